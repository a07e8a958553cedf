"""Latent variables between a GP and the data: group effects that scatter about a function.

``b ~ Normal(f, 0.1)`` for each group and ``y ~ Normal(b[g], 0.3)`` for each point. Everything is
Gaussian, so that the posterior is known. Given b the GP has the posterior of a regression on b; a
guide that holds b apart from f has the right means and the variances given b, as it warns.
"""

import importlib.metadata
from functools import cache

import arviz as az
import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import log_density
from scipy.stats import multivariate_normal, norm

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    collapse,
    influence,
    kernels,
    loo,
    psis_khat,
    to_arviz,
)
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.checks import inspect

ARVIZ_1 = int(importlib.metadata.version("arviz").split(".")[0]) >= 1
pytestmark = pytest.mark.filterwarnings("ignore:Site 'b' is a latent variable that depends on a GP")

GROUPS, EACH = 8, 12
RNG = np.random.default_rng(0)
X = np.linspace(0.0, 1.0, GROUPS)
G = np.repeat(np.arange(GROUPS), EACH)
Y = (2.0 * np.sin(5.0 * X) + 0.1 * RNG.standard_normal(GROUPS))[G] + 0.3 * RNG.standard_normal(96)
ARGS = (X, G, Y)
NEW = (np.array([0.2, 0.55, 0.9]), np.array([0, 1, 1, 2]))  # three groups, four points


def model(X, g, y=None):
    f = numpyro.sample("f", GP(4.0 * kernels.RBF(0.3), X, jitter=1e-12))
    with numpyro.plate("groups", X.shape[0]):
        b = numpyro.sample("b", dist.Normal(f, 0.1))
    with numpyro.plate("data", g.shape[0]):
        numpyro.sample("y", dist.Normal(b[g], 0.3), obs=y)


# The posterior of b is that of a regression on the means of the groups, whose prior has f
# integrated out; f then is a linear function of b, with what is left of its variance given b.
K = dense.rbf(X, X, 0.3, 4.0)
SPREAD = K + 0.1**2 * np.eye(GROUPS)
B_COV = np.linalg.inv(np.linalg.inv(SPREAD) + EACH / 0.3**2 * np.eye(GROUPS))
B_MEAN = B_COV @ (EACH / 0.3**2 * Y.reshape(GROUPS, EACH).mean(1))
GAIN = K @ np.linalg.inv(SPREAD)
GIVEN_B = np.diag(K - GAIN @ K)
F_MEAN = GAIN @ B_MEAN
F_VARIANCE = GIVEN_B + np.diag(GAIN @ B_COV @ GAIN.T)


class Fitted:
    """A guide and a driver of it, and fits that they make."""

    def __init__(self, hyper_guide=None, optim=None, **options):
        self.guide = AutoDualGaussian(model, hyper_guide=hyper_guide)
        self.svi = TSVGP(model, self.guide, optim, **options)

    def run(self, steps, **start):
        key = jax.random.key(0)
        return self.svi.run(key, steps, *ARGS, init_params=start, progress_bar=False).fit


@cache
def at_the_mode():
    """One E-step at the mode of b, which makes the sites that belong to it."""
    return Fitted(site_lr=1.0).run(1, b_auto_loc=B_MEAN)


# ---- fits ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_means_are_right_with_a_point_estimate_and_variances_those_given_it():
    fitted = Fitted(optim=optax.adam(0.1), site_lr=1.0)
    with pytest.warns(UserWarning, match="'b'.*means are right.*variances.*too small.*collapse"):
        fit = fitted.run(150)
    q = fit.marginals()["f"]
    assert np.abs(F_MEAN).max() > 1.5
    np.testing.assert_allclose(q.mean, F_MEAN, atol=1e-3)
    np.testing.assert_allclose(fit.hyper["b"], B_MEAN, atol=1e-3)
    np.testing.assert_allclose(q.variance, GIVEN_B, atol=1e-6)
    assert (GIVEN_B < 0.75 * F_VARIANCE).all()


@pytest.mark.slow
def test_means_are_right_with_a_distribution():
    """Sites follow the mean of q(b) when small steps average over its draws."""
    sd = 1 / np.sqrt(EACH / 0.3**2 + 1 / 0.1**2)  # of b given f
    fit = Fitted(AutoNormal, site_lr=0.02).run(400, b_auto_loc=B_MEAN, b_auto_scale=[sd] * GROUPS)
    q = fit.marginals()["f"]
    # A draw moves a mean by up to 0.05; fifty of them together by a seventh of it.
    np.testing.assert_allclose(q.mean, F_MEAN, atol=0.02)
    np.testing.assert_allclose(q.variance, GIVEN_B, rtol=1e-3)  # 0.98^400 of the start is left
    # What is not in q(b) q(f), the correlation of b and f, shows in the weights.
    assert psis_khat(jax.random.key(0), fit, num_samples=500).joint > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("hyper_guide", [AutoNormal, AutoMultivariateNormal])
def test_means_are_found_with_a_distribution(hyper_guide):
    """From NumPyro's own start."""
    rate = optax.exponential_decay(0.05, 400, 0.1)
    fitted = Fitted(hyper_guide, optax.adam(rate), site_lr=lambda step: 1 / (2 + 0.05 * step))
    q = fitted.run(1500).marginals()["f"]
    np.testing.assert_allclose(q.mean, F_MEAN, atol=0.03)
    np.testing.assert_allclose(q.variance, GIVEN_B, atol=1e-6)


# ---- the posterior of b by a sampler ---------------------------------------------------------


def test_collapsing_leaves_the_density_of_b():
    collapsed = collapse(at_the_mode(), refresh=1)

    @jax.jit
    def density(b):
        return log_density(handlers.seed(collapsed, 0), ARGS, {}, {"b": b})[0]

    for b in (B_MEAN, np.zeros(GROUPS)):
        exact = multivariate_normal.logpdf(b, np.zeros(GROUPS), SPREAD)
        exact += norm.logpdf(Y, b[G], 0.3).sum()
        assert density(b) == pytest.approx(exact, abs=1e-5)


@pytest.mark.slow
def test_given_draws_of_b_the_gp_is_exact():
    """Sites are made anew for each draw, and so f follows b."""
    root = np.linalg.cholesky(B_COV)
    draws = np.random.default_rng(1).standard_normal((200, GROUPS)) @ root.T
    draws = B_MEAN + np.concatenate([draws, -draws])  # the mean has no Monte Carlo error
    q = collapse(at_the_mode(), refresh=1).marginals({"b": draws})["f"]
    np.testing.assert_allclose(q.mean, F_MEAN, atol=1e-6)
    between = np.diag(GAIN @ np.cov(draws.T, bias=True) @ GAIN.T)
    np.testing.assert_allclose(q.variance, GIVEN_B + between, atol=1e-6)
    # Elsewhere, with groups of its own: no b of the training data enters.
    there = collapse(at_the_mode(), refresh=1).marginals({"b": draws}, *NEW)["f"]
    k = dense.rbf(X, NEW[0], 0.3, 4.0)
    np.testing.assert_allclose(there.mean, k.T @ np.linalg.solve(SPREAD, B_MEAN), atol=1e-6)


@pytest.mark.slow
def test_nuts_on_the_collapsed_model_has_the_exact_posterior():
    collapsed = collapse(at_the_mode(), refresh=1)
    mcmc = MCMC(NUTS(collapsed), num_warmup=300, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(0), *ARGS)
    draws = mcmc.get_samples()
    np.testing.assert_allclose(draws["b"].mean(0), B_MEAN, atol=0.02)
    q = collapsed.marginals(draws)["f"]
    np.testing.assert_allclose(q.mean, F_MEAN, atol=0.02)
    np.testing.assert_allclose(q.variance, F_VARIANCE, rtol=0.1)
    # And what an ArviZ object makes of the chain: draws of f, and data left out one by one.
    data = to_arviz(jax.random.key(1), at_the_mode(), mcmc=mcmc, prior=False)
    np.testing.assert_allclose(data["posterior"]["f"].values[0].std(0) ** 2, F_VARIANCE, rtol=0.15)
    covariance = SPREAD[np.ix_(G, G)] + 0.09 * np.eye(96)
    precision = np.linalg.inv(covariance)
    sd = 1 / np.sqrt(np.diag(precision))
    exact = norm.logpdf(Y, Y - sd**2 * (precision @ Y), sd)
    elpd = az.loo(data, pointwise=True)
    np.testing.assert_allclose(elpd["elpd_i" if ARVIZ_1 else "loo_i"], exact, atol=0.05)


# ---- diagnostics and predictions -------------------------------------------------------------


def test_leaving_out_is_refused_in_words():
    """The value of b was found with all data; its cavities would be those of no data at all."""
    for diagnose in (loo, influence):
        with pytest.raises(ValueError, match=r"'b' is a latent variable.*az.loo.*collapse"):
            diagnose(at_the_mode())


@pytest.mark.slow
def test_arviz_objects_have_b_where_it_belongs():
    given = {"num_samples": 400, "dims": "plates"}
    data = to_arviz(jax.random.key(0), at_the_mode(), predictions=NEW, **given)
    posterior, predictions, prior = (data[k] for k in ("posterior", "predictions", "prior"))
    assert posterior["f"].dims == posterior["b"].dims == ("chain", "draw", "groups")
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "data")
    np.testing.assert_allclose(posterior["b"][0], np.broadcast_to(B_MEAN, (400, GROUPS)))
    expected = norm.logpdf(Y, B_MEAN[G], 0.3)
    np.testing.assert_allclose(data["log_likelihood"]["y"][0, 0], expected, rtol=1e-10)
    some = to_arviz(jax.random.key(0), at_the_mode(), prior=False, rows=[1, 6], **given)
    np.testing.assert_array_equal(some["posterior"]["groups"], [1, 6])
    np.testing.assert_array_equal(some["posterior"]["b"][0, 0], B_MEAN[[1, 6]])
    assert some["posterior"]["f"].shape == (1, 400, 2)
    # New groups scatter about the function, and new data about them, in both.
    for group, g in ((predictions, NEW[1]), (prior, None)):
        f, b = group["f"].values[0], (group if g is not None else data["prior_predictive"])["b"][0]
        scatter = b.values - f
        assert scatter.std() == pytest.approx(0.1, rel=0.1) and abs(scatter.mean()) < 0.015
        if g is not None:
            noise = group["y"].values[0] - b.values[:, g]
            assert noise.std() == pytest.approx(0.3, rel=0.1) and abs(noise.mean()) < 0.04


@pytest.mark.slow
def test_predictions_need_neither_data_nor_b():
    fit = at_the_mode()
    guide, params = fit.guide, fit.params
    k = dense.rbf(X, NEW[0], 0.3, 4.0)
    expected = k.T @ np.linalg.solve(SPREAD, B_MEAN)
    np.testing.assert_allclose(fit.marginals(*NEW)["f"].mean, expected, atol=1e-6)
    np.testing.assert_allclose(guide.marginals(params, *NEW)["f"].mean, expected, atol=1e-6)
    assert set(fit.sample(jax.random.key(0))) == {"b", "f"}
    assert set(fit.sample(jax.random.key(0), *NEW)) == {"f"}  # of other groups
    predictive = Predictive(model, guide=guide, params=params, num_samples=200)
    draws = predictive(jax.random.key(1), *map(jnp.asarray, NEW))
    assert draws["b"].shape == (200, 3) and draws["y"].shape == (200, 4)
    np.testing.assert_allclose(draws["b"].mean(0), expected, atol=0.05)
    np.testing.assert_allclose(draws["y"].mean(0), expected[NEW[1]], atol=0.1)


def noisy(X, g, y=None, mask=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = numpyro.sample("f", GP(4.0 * kernels.RBF(0.3), X))
    with numpyro.plate("groups", X.shape[0]):
        b = numpyro.sample("b", dist.Normal(f, 0.1))
    with numpyro.plate("data", g.shape[0]):
        numpyro.sample("y", dist.Normal(b[g], noise), obs=y, obs_mask=mask)


def test_data_to_impute_are_no_hyperparameters():
    """They follow from the GP through b, and would pull the noise towards zero as a MAP."""
    structure, _ = inspect(noisy, Call((*ARGS, np.arange(96) % 3 > 0), {}))
    assert set(structure.hyperparameters) == {"noise", "b"} and structure.below == ("b",)


@pytest.mark.slow
def test_a_joint_guide_of_hyperparameters_asks_for_the_fit():
    """Its parameters are of noise and b together, which no other arguments have."""
    guide = AutoDualGaussian(noisy, hyper_guide=AutoMultivariateNormal)
    svi = TSVGP(noisy, guide, None)
    fit = svi.fit(svi.init(jax.random.key(0), *ARGS), *ARGS)
    with pytest.raises(ValueError, match=r"keeps 9 numbers.*has 1.*result.fit.marginals"):
        guide.marginals(fit.params, *NEW)
    assert fit.marginals(*NEW)["f"].mean.shape == (3,)
    assert set(fit.sample(jax.random.key(0), *NEW)) == {"noise", "f"}
