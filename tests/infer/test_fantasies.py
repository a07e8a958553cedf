"""Fantasies against conditioning on the same outcomes, one fit at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(-2, 2, 20))
Y = {
    "normal": np.sin(3 * X) + 0.3 * RNG.standard_normal(20),
    "poisson": RNG.poisson(np.exp(1 + np.sin(3 * X))),
}
LINKS = {"normal": lambda f: dist.Normal(f, 0.3), "poisson": lambda f: dist.Poisson(jnp.exp(1 + f))}
Z, PENDING, TEST = np.linspace(-2, 2, 8), np.array([0.3, 2.3, 0.5]), np.linspace(-2.5, 2.5, 6)


def fitted(likelihood, inducing):
    def model(X, y=None):
        f = numpyro.sample("f", GP(1.5 * kernels.Matern52(0.5), X, mean=lambda x: 0.1 * x))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", LINKS[likelihood](f), obs=y)

    svi = TSVGP(model, AutoDualGaussian(model, inducing), None, site_lr=0.5, e_steps=60)
    return svi.run(jax.random.key(0), 1, X, Y[likelihood], progress_bar=False).fit


@pytest.mark.parametrize(
    ("likelihood", "inducing"),
    [
        ("poisson", Z),
        pytest.param("normal", Z, marks=pytest.mark.slow),
        pytest.param("poisson", None, marks=pytest.mark.slow),
    ],
    ids=["poisson", "normal", "without inducing inputs"],
)
def test_a_fantasy_is_a_fit_conditioned_on_its_outcomes(likelihood, inducing):
    fit = fitted(likelihood, inducing)
    fantasies = fit.fantasies(jax.random.key(1), PENDING, num=3)
    found = fantasies.marginals(TEST)["f"]
    assert found.mean.shape == found.variance.shape == (3, 6)
    for i, y in enumerate(fantasies.values["y"]):
        expected = fit.condition(PENDING, y).marginals(TEST)["f"]
        np.testing.assert_allclose(found.mean[i], expected.mean, atol=1e-6)
        np.testing.assert_allclose(found.variance[i], expected.variance, atol=1e-6)
    assert len(np.unique(np.asarray(found.mean), axis=0)) == 3


@pytest.mark.slow
def test_fantasies_are_draws_of_the_posterior_predictive():
    """On average nothing is learned: the mean over fantasies is the mean before."""
    fit = fitted("normal", Z)
    fantasies = fit.fantasies(jax.random.key(1), PENDING, num=4000)
    before, after = fit.marginals(TEST)["f"], fantasies.marginals(TEST)["f"]
    total = after.variance.mean(0) + after.mean.var(0)
    error = jnp.sqrt(before.variance / 4000)
    assert (jnp.abs(after.mean.mean(0) - before.mean) < 4 * error).all()
    np.testing.assert_allclose(total, before.variance, rtol=0.1)


@pytest.mark.slow
def test_two_gps_imagine_together():
    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.5), X))
        with numpyro.plate("outputs", 2):
            g = numpyro.sample("g", GP(0.3 * kernels.RBF(jnp.array([[0.9], [0.6]])), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + g[1], jnp.exp(g[0] - 1.0)), obs=y)

    svi = TSVGP(model, AutoDualGaussian(model, Z), None, site_lr=0.3, e_steps=100)
    fit = svi.run(jax.random.key(0), 1, X, Y["normal"], progress_bar=False).fit
    fantasies = fit.fantasies(jax.random.key(1), PENDING, num=2)
    found = fantasies.marginals(TEST)
    assert found["g"].mean.shape == (2, 2, 6)
    for i, y in enumerate(fantasies.values["y"]):
        expected = fit.condition(PENDING, y).marginals(TEST)
        for name in ("f", "g"):
            np.testing.assert_allclose(found[name].mean[i], expected[name].mean, atol=1e-5)


def test_what_cannot_be_imagined_is_refused():
    fit = fitted("poisson", Z)
    with pytest.raises(ValueError, match="Site 'y' is observed at the pending points"):
        fit.fantasies(jax.random.key(0), PENDING, np.ones(3))
    with pytest.raises(ValueError, match="columns|mean of the GP has shape"):
        fit.fantasies(jax.random.key(0), np.ones((3, 2)))
