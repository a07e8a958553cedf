"""Draws that are functions: their moments, and that they are functions."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoNormal

from numpyro_tsvgp import GP, QSVGP, TSVGP, AutoDualGaussian, AutoMomentGaussian, kernels

X = jnp.linspace(0.0, 3.0, 40)
NEW = jnp.linspace(-2.0, 6.0, 23)  # far from the data, too
NUM = 4000


def model(X, y=None):
    with numpyro.plate("pair", 2):
        scales = jnp.array([[0.5], [1.0]])
        f = numpyro.sample("f", GP(1.5 * kernels.Matern52(scales) + kernels.Linear(), X, mean=1.0))
    g = numpyro.sample("g", GP(kernels.RBF(0.7), X, mean=lambda x: x))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f[0] + f[1] * g, 0.3), obs=y)


@pytest.fixture(scope="module")
def fit():
    svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::4]), None, site_lr=0.5, e_steps=10)
    return svi.run(jax.random.key(0), 1, X, jnp.sin(3.0 * X), progress_bar=False).fit


@pytest.fixture(scope="module")
def draws(fit):
    return fit.functions(jax.random.key(1), NUM)


def within_noise(values, mean, covariance):
    """Whether moments of draws are those of a Gaussian, but for their sampling error."""
    centred = values - mean
    sd = np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1))
    assert np.abs(centred.mean(0) / sd).max() < 5 / np.sqrt(len(values))
    found = np.einsum("s...i,s...j->...ij", centred, centred) / len(values)
    errors = (found - covariance) / (sd[..., :, None] * sd[..., None, :])
    assert np.abs(errors).max() < 5 * np.sqrt(2 / len(values))


@pytest.mark.slow
def test_moments_are_those_of_the_joint_posterior(fit, draws):
    values = draws(NEW)
    reading = fit.read(fit.inputs((NEW,), {}))
    for name, (process, approximation) in fit.guide.latents(reading, fit.params).items():
        joint = approximation.joint(process)
        explained = joint.w @ joint.inverse.mT
        covariance = joint.residual_chol @ joint.residual_chol.mT + explained @ explained.mT
        flat = np.asarray(values[name]).reshape(NUM, -1, len(NEW))
        within_noise(flat, joint.mean, np.broadcast_to(covariance, (flat.shape[1], 23, 23)))


@pytest.mark.slow
def test_the_same_functions_at_every_call_jitted_and_by_site(draws):
    values = draws(NEW)
    assert values["f"].shape == (NUM, 2, 23) and values["g"].shape == (NUM, 23)
    for name in draws:
        np.testing.assert_allclose(draws[name](NEW), values[name], atol=1e-10)
        again = jax.jit(lambda site, x: site(x))(draws[name], NEW[5:9])
        np.testing.assert_allclose(again, values[name][..., 5:9], atol=1e-10)
    assert repr(draws) == "FunctionDraws(4000 draws of f, g)"


@pytest.mark.slow
def test_functions_have_derivatives(fit):
    draws = fit.functions(jax.random.key(1), 3)
    for name in draws:
        slope = jax.vmap(jax.jacfwd(lambda x, name=name: draws[name](x[None])[..., 0]))(NEW)
        h = 1e-5
        quotient = (draws[name](NEW + h) - draws[name](NEW - h)) / (2 * h)
        np.testing.assert_allclose(jnp.moveaxis(slope, 0, -1), quotient, atol=1e-6)


@pytest.mark.slow
def test_many_inputs_in_blocks(fit):
    draws = fit.functions(jax.random.key(1), 3, features=2000)
    many = jnp.linspace(0.0, 3.0, 3000)
    np.testing.assert_allclose(draws["g"](many)[:, ::100], draws["g"](many[::100]), atol=1e-10)


def test_draws_go_to_predictive(fit):
    samples = fit.functions(jax.random.key(1), 30)(NEW)
    assert Predictive(model, samples)(jax.random.key(2), NEW)["y"].shape == (30, 23)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["without inducing inputs", "point sites", "moments"])
def test_every_approximation(kind):
    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.Matern32(0.7), X, mean=0.5))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    options = {"without inducing inputs": {}, "point sites": {"sites": "untied"}}.get(kind)
    y = jnp.round(jnp.exp(jnp.sin(3.0 * X)))
    if options is None:
        guide = AutoMomentGaussian(model, inducing=X[::4])
        fit = QSVGP(model, guide, optax.adam(0.1)).run(jax.random.key(0), 20, X, y).fit
    else:
        guide = AutoDualGaussian(model, None if not options else X[::4], **options)
        fit = TSVGP(model, guide, None, e_steps=20).run(jax.random.key(0), 1, X, y).fit
    values = fit.functions(jax.random.key(1), NUM)["f"](NEW)
    mean, variance = fit.marginals(NEW)["f"]
    assert (jnp.abs(values.mean(0) - mean) < 5 * jnp.sqrt(variance / NUM)).all()
    np.testing.assert_allclose(values.var(0), variance, rtol=5 * np.sqrt(2 / NUM))


@pytest.mark.slow
def test_hyperparameters_with_a_distribution():
    def model(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", GP(kernels.Matern32(scale), X, mean=lambda x: slope * x))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = AutoDualGaussian(model, inducing=X[::4], hyper_guide=AutoNormal)
    svi = TSVGP(model, guide, optax.adam(0.05))
    fit = svi.run(jax.random.key(0), 50, X, jnp.sin(3.0 * X), progress_bar=False).fit
    draws = fit.functions(jax.random.key(1), 1000, features=256)
    values = draws(NEW)
    assert values["scale"].shape == (1000,) and values["f"].shape == (1000, 23)
    mean, variance = fit.marginals(NEW, num_hyper=1000)["f"]
    sd = jnp.sqrt(variance)
    assert (jnp.abs(values["f"].mean(0) - mean) / sd).max() < 5 * np.sqrt(2 / 1000)
    np.testing.assert_allclose(values["f"].std(0), sd, rtol=0.2)
    with pytest.raises(ValueError, match="not known apart from the model"):
        draws["f"](NEW)


@pytest.mark.slow
def test_what_cannot_be_drawn_is_refused(fit, draws):
    with pytest.raises(ValueError, match="num=0"):
        fit.functions(jax.random.key(0), 0)
    with pytest.raises(KeyError, match="no GP site 'h'"):
        draws["h"]
    with pytest.raises(ValueError, match="fitted to inputs with 1 columns"):
        draws["f"](jnp.zeros((3, 2)))
