"""Predictors: what a fit says, again, without computing it again."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoNormal

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, load, save
from numpyro_tsvgp.infer.predictions.filling import bucket

rng = np.random.default_rng(0)
X, NEW = rng.normal(size=(60, 2)), rng.normal(size=(11, 2))
y = rng.poisson(np.exp(np.sin(2.0 * X[:, 0])))


def model(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    offset = numpyro.param("offset", 0.3)
    kernel = kernels.Matern52(scale, active_dims=slice(0, 1)) + 0.1 * kernels.Polynomial(
        2, lengthscale=3.0, active_dims=1
    )
    kernel = kernel + 0.1 * kernels.Periodic(period=3.0, base=kernels.Matern32, active_dims=0)
    X = X / 2.0  # so that inputs of the site are not those of the model
    f = numpyro.sample("f", GP(kernel, X, mean=offset))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def fitted(hyper_guide=None, model=model, inducing=X[:20] / 2):
    guide = AutoDualGaussian(model, inducing=inducing, hyper_guide=hyper_guide)
    svi = TSVGP(model, guide, optax.adam(0.05), site_lr=0.3)
    return svi.run(jax.random.key(0), 5, X, y, progress_bar=False).fit


@pytest.fixture(
    scope="module", params=["points", pytest.param("distributions", marks=pytest.mark.slow)]
)
def fit(request):
    return fitted(AutoNormal if request.param == "distributions" else None)


def test_a_predictor_says_what_the_fit_says_and_so_does_a_loaded_one(fit, tmp_path):
    expected = fit.marginals(NEW)["f"]
    predictor = fit.predictor()
    save(tmp_path / "predictor.npz", predictor)
    loaded = load(tmp_path / "predictor.npz", model=model)
    alone = load(tmp_path / "predictor.npz")["f"]
    for found in (predictor(NEW)["f"], loaded(NEW)["f"], predictor["f"](NEW / 2), alone(NEW / 2)):
        np.testing.assert_allclose(found.mean, expected.mean, atol=1e-10)
        np.testing.assert_allclose(found.variance, expected.variance, atol=1e-10)
    np.testing.assert_allclose(alone.mean(NEW / 2), expected.mean, atol=1e-10)
    jitted = jax.jit(lambda predictor, X: predictor(X)["f"].mean)(predictor, NEW)
    np.testing.assert_allclose(jitted, expected.mean, atol=1e-10)
    np.testing.assert_allclose(loaded.predict(NEW).mean, fit.predict(NEW).mean, atol=1e-10)
    assert repr(loaded) == "Predictor(f by 20 inducing values)"
    held = {leaf.shape for leaf in jax.tree.leaves(loaded)}
    assert not any(len(X) in shape for shape in held), "no training data"
    with pytest.raises(ValueError, match="loaded without its model"):
        load(tmp_path / "predictor.npz")(NEW)


def test_numbers_of_rows_share_programs():
    assert [bucket(n) for n in (1, 16, 17, 20, 21, 100, 1000)] == [16, 16, 20, 20, 24, 112, 1024]
    assert all(n <= bucket(n) <= max(16, 1.25 * n) for n in range(1, 3000))


def test_another_number_of_rows_compiles_nothing():
    from numpyro_tsvgp.infer.predictions import predictor as module

    site = fitted().predictor()["f"]
    site(NEW)
    before = module._site_marginals._cache_size()
    for rows in (1, 5, 10):
        assert site(NEW[:rows]).mean.shape == (rows,)
    assert module._site_marginals._cache_size() == before


@pytest.mark.slow
def test_what_no_file_can_hold_and_bad_inputs_are_refused(tmp_path):
    def model(X, y=None):
        kernel = kernels.as_kernel(lambda a, b: jnp.exp(a @ b.T))
        f = numpyro.sample("f", GP(kernel, X, mean=X[:, 0]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    fit = fitted(model=model)
    predictor = fit.predictor()
    expected = fit.marginals(NEW)["f"].mean
    np.testing.assert_allclose(predictor(NEW)["f"].mean, expected, atol=1e-10)
    with pytest.raises(TypeError, match="has a Function in it"):
        save(tmp_path / "predictor.npz", predictor)
    with pytest.raises(ValueError, match="not known apart from the model"):
        predictor["f"](NEW)
    with pytest.raises(ValueError, match="fitted to inputs with 2 columns"):
        predictor["f"](NEW[:, 0])
    with pytest.raises(KeyError, match="no GP site 'g'"):
        predictor["g"]
