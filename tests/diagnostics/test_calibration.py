"""Importance weights between guide and model, their Pareto k, and simulated data."""

import dataclasses
import importlib.metadata
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.autoguide import AutoNormal
from scipy.stats import kstest, multivariate_normal

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, psis_khat, sbc
from numpyro_tsvgp.diagnostics import compat
from numpyro_tsvgp.gaussian.quadrature import GaussHermite
from numpyro_tsvgp.infer.evidence import evidence_of

ARVIZ_1 = int(importlib.metadata.version("arviz").split(".")[0]) >= 1

NOISE = 0.3
RNG = np.random.default_rng(4)
X = np.sort(RNG.uniform(0.0, 1.0, 20))
Y = 2.0 + np.sin(7.0 * X) + NOISE * RNG.standard_normal(20)
COV = np.asarray(kernels.Matern32(0.3)(X, X)) + NOISE**2 * np.eye(20)


# ---- a Gaussian likelihood, where everything is known ----------------------------------------


def intercept_model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 3.0))
    f = numpyro.sample("f", GP(kernels.Matern32(0.3), X, mean=b, jitter=1e-13))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


# Sites of a Gaussian likelihood: what each y says about f, whatever the prior.
SITES = {
    "f_auto_linear": Y[None] / NOISE**2,
    "f_auto_quadratic": np.full((1, 20), 1 / NOISE**2),
}
# The posterior of b, with f integrated out.
ONES = np.linalg.solve(COV, np.ones(20))
B_SD = 1 / np.sqrt(ONES.sum() + 1 / 9)
B_MEAN = B_SD**2 * ONES @ Y


@cache
def start(hyper_guide):
    guide = AutoDualGaussian(intercept_model, hyper_guide=hyper_guide)
    svi = TSVGP(intercept_model, guide, None)
    return svi, svi.init(jax.random.key(0), X, Y)


def intercept_fit(hyper_guide=None, **params):
    """A fit with given parameters, without fitting."""
    svi, state = start(hyper_guide)
    fit = svi.fit(state, X, Y)
    return dataclasses.replace(fit, params={**fit.params, **SITES, **params})


def test_importance_weights_of_an_exact_posterior_are_the_evidence():
    fit = intercept_fit(b_auto_loc=1.3)
    khat = psis_khat(jax.random.key(0), fit, num_samples=200)
    evidence = multivariate_normal.logpdf(Y - 1.3, cov=COV)
    # The draws carry the jitter that the singular covariance of f given u needs, 1e-10 or so.
    np.testing.assert_allclose(khat.log_weights, evidence, atol=1e-3)
    assert khat.hyperparameters is None and "points" in str(khat)
    # Counting each site four times leaves a posterior too narrow to cover the model's.
    narrow = {name: 4.0 * value for name, value in SITES.items()}
    bad = psis_khat(jax.random.key(0), intercept_fit(b_auto_loc=1.3, **narrow), num_samples=200)
    assert bad.joint > 0.7 and "bad" in str(bad)


def test_khat_sees_hyperparameters_that_are_too_sure():
    """Sites that are statements about f leave b free, so the weights of a narrow q(b) vary."""
    honest = intercept_fit(AutoNormal, b_auto_loc=B_MEAN, b_auto_scale=B_SD)
    khat = psis_khat(jax.random.key(0), honest, num_samples=500)
    # q(b) q(f | b) is the posterior: every weight is p(y), b integrated out.
    evidence = multivariate_normal.logpdf(Y, cov=COV + 9.0)
    np.testing.assert_allclose(khat.log_weights, evidence, atol=1e-3)
    assert khat.hyperparameters < 0.7 and "Pareto k of the hyperparameters" in str(khat)

    sure = intercept_fit(AutoNormal, b_auto_loc=B_MEAN, b_auto_scale=B_SD / 8)
    khat = psis_khat(jax.random.key(0), sure, num_samples=500)
    assert khat.hyperparameters > 0.7 and khat.joint > 0.7
    assert str(khat).count("bad") == 2


# ---- the settings of a fit -------------------------------------------------------------------


@pytest.mark.slow
def test_khat_takes_the_quadrature_of_the_fit(monkeypatch):
    """The bound stands for the evidence: that of the fit, with its nodes."""

    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
        f = numpyro.sample("f", GP(variance * kernels.Matern32(0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=4.0 * f), obs=y)

    y = (Y > 2.0).astype(float)
    guide = AutoDualGaussian(model, inducing=X[::3], hyper_guide=AutoNormal)
    svi = TSVGP(model, guide, None, quadrature=GaussHermite(3))
    # Next to no width, so that all draws are of one value.
    narrow = {"variance_auto_loc": 0.7, "variance_auto_scale": 1e-9}
    fit = svi.fit(svi.init(jax.random.key(0), X, y, init_params=narrow), X, y)
    seen = []
    monkeypatch.setattr(compat, "pareto_k", lambda ratios: seen.append(ratios) or 0.0)
    for quadrature in (GaussHermite(3), None):
        psis_khat(
            jax.random.key(0), dataclasses.replace(fit, quadrature=quadrature), num_samples=10
        )
    joint, alone, same_joint, alone_by_default = seen
    np.testing.assert_array_equal(joint, same_joint)  # the model's own density has no nodes
    bound = jax.jit(lambda fit: evidence_of(fit, {"variance": jnp.exp(0.7)}, 3))
    difference = bound(fit) - bound(dataclasses.replace(fit, quadrature=None))
    assert abs(difference) > 1e-3
    np.testing.assert_allclose(alone - alone_by_default, difference, atol=1e-7)


# ---- simulated data --------------------------------------------------------------------------


def weighted_model(X, y=None, weight=1.0):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
    with numpyro.plate("data", X.shape[0]), handlers.scale(scale=weight):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "weight", [1.0, pytest.param(8.0, marks=pytest.mark.slow)], ids=["exact", "too sure"]
)
def test_simulation_based_calibration(weight):
    """Of the exact posterior, and of one that counts each point eight times."""
    X = jnp.linspace(0.0, 1.0, 5)
    guide = AutoDualGaussian(weighted_model, inducing=X, learn_inducing=False)
    svi = TSVGP(weighted_model, guide, None, site_lr=1.0)
    options = dict(num_simulations=200, num_steps=1, num_samples=99)
    pit = sbc(jax.random.key(0), svi, X, jnp.zeros(5), weight, **options)
    values = (pit["prior_sbc"] if ARVIZ_1 else pit.prior_sbc)["f"]
    assert values.dims == ("chain", "draw", "data") and values.shape == (1, 200, 5)
    p_value = kstest(values.values[0, :, 2], "uniform").pvalue
    assert p_value > 0.01 if weight == 1 else p_value < 1e-3


def test_simulated_data_need_a_place_in_the_arguments():
    def renamed(X, labels):
        weighted_model(X, labels)

    X = jnp.linspace(0.0, 1.0, 5)
    svi = TSVGP(renamed, AutoDualGaussian(renamed, inducing=X), None)
    with pytest.raises(ValueError, match="to_args"):
        sbc(jax.random.key(0), svi, X, jnp.zeros(5))
