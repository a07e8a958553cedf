"""Laplace, Fisher scoring and expectation propagation, against dense references of their own."""

import dataclasses
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from dense import jittered, rbf
from jax.scipy.stats import norm
from numpyro.infer import MCMC, NUTS

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    EPLike,
    ExpectationPropagation,
    NaturalGradient,
    kernels,
    loo,
    whiten,
)
from numpyro_tsvgp.infer.steps.fisher import FisherScoring
from numpyro_tsvgp.infer.steps.laplace import Laplace

ARVIZ_1 = int(importlib.metadata.version("arviz").split(".")[0]) >= 1
KEY = jax.random.key(0)
RNG = np.random.RandomState(5)
N = 12
X = np.sort(RNG.uniform(-2.0, 2.0, N))
K = jittered(rbf(X, X, 0.7, 2.0))
MEAN = 0.3
F = MEAN + np.linalg.cholesky(K) @ RNG.randn(N)
DATA = {
    "probit": (RNG.uniform(size=N) < norm.cdf(F)) * 1.0,
    "poisson": RNG.poisson(np.exp(F)) * 1.0,
    "student": F + 0.3 * RNG.standard_t(3, N) + 2.0 * (np.arange(N) == 4),
    "normal": F + 0.3 * RNG.randn(N),
}
LIKELIHOODS = {
    "probit": lambda f: dist.Bernoulli(probs=jnp.clip(norm.cdf(f), 1e-12, 1 - 1e-12)),
    "poisson": lambda f: dist.Poisson(jnp.exp(f)),
    "student": lambda f: dist.StudentT(3.0, f, 0.3),
    "normal": lambda f: dist.Normal(f, 0.3),
}


def model_of(name):
    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.7, 2.0), X, mean=MEAN))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", LIKELIHOODS[name](f), obs=y)

    return model


MODELS = {name: model_of(name) for name in LIKELIHOODS}


def fitted(name, rule, inducing=None, steps=100, rate=0.5, **guide):
    q = AutoDualGaussian(MODELS[name], inducing, **guide)
    svi = TSVGP(MODELS[name], q, None, rule=rule, site_lr=rate, e_steps=steps)
    return svi.run(KEY, 1, X, DATA[name], progress_bar=False).fit


def sites(fit):
    return [np.asarray(fit.params[f"f_auto_{what}"][0]) for what in ("linear", "quadratic")]


def posterior(linear, quadratic):
    """Mean and covariance of f from sites about f, by the book."""
    S = np.linalg.inv(np.linalg.inv(K) + np.diag(quadratic))
    return S @ (linear + np.linalg.solve(K, np.full(N, MEAN))), S


# ---- expectation propagation -----------------------------------------------------------------


def dense_ep(log_prob, power, sweeps=60):
    """Sequential power EP with moments on a fine grid, in natural parameters."""
    linear, quadratic = np.zeros(N), np.zeros(N)
    for _ in range(sweeps):
        for i in range(N):
            m, S = posterior(linear, quadratic)
            precision = 1 / S[i, i] - power * quadratic[i]
            mean = (m[i] / S[i, i] - power * linear[i]) / precision
            f = mean + np.linspace(-10, 10, 2001) / np.sqrt(precision)
            log_p = power * np.asarray(log_prob(f, i)) - 0.5 * precision * (f - mean) ** 2
            p = np.exp(log_p - log_p.max())
            p /= p.sum()
            new_mean = p @ f
            new_precision = 1 / (p @ (f - new_mean) ** 2)
            quadratic[i] = (new_precision - precision) / power
            linear[i] = (new_precision * new_mean - precision * mean) / power
    return posterior(linear, quadratic)


@pytest.mark.parametrize(
    ("name", "power"),
    [("probit", 1.0), pytest.param("poisson", 0.5, marks=pytest.mark.slow)],
)
def test_ep_is_that_of_a_dense_reference(name, power):
    def log_prob(f, i):
        return LIKELIHOODS[name](f).log_prob(jnp.asarray(DATA[name])[i])

    fit = fitted(name, ExpectationPropagation(power))
    mean, S = dense_ep(jax.jit(log_prob), power, sweeps=25)
    q = fit.marginals()["f"]
    np.testing.assert_allclose(q.mean, mean, atol=1e-6)
    np.testing.assert_allclose(q.variance, np.diag(S), rtol=1e-6)
    if power < 1:
        return
    # Its log partition function is stationary in the sites.
    svi = TSVGP(MODELS[name], fit.guide, None, rule=fit.rule, objective=EPLike(), site_lr=0.5)
    state = svi.init(KEY, X, DATA[name])
    here = {k: jnp.asarray(fit.params[k]) for k in state.approximation}

    def at(change):
        moved = {
            **here,
            "f_auto_linear": here["f_auto_linear"] + change[0],
            "f_auto_quadratic": here["f_auto_quadratic"] + change[1],
        }
        return svi.evaluate(dataclasses.replace(state, approximation=moved), X, DATA[name])

    at = jax.jit(at)
    for direction in np.eye(2)[:, :, None] * np.cos(np.arange(N) + 1.0):
        slope = (at(1e-4 * direction) - at(-1e-4 * direction)) / 2e-4
        assert abs(float(slope)) < 1e-5


@pytest.mark.slow
def test_ep_with_inducing_inputs_and_a_gaussian_likelihood_is_fitc():
    Z = np.linspace(-2, 2, 4)
    fit = fitted("normal", ExpectationPropagation(), Z, sites="untied", learn_inducing=False)
    k = rbf(Z, X, 0.7, 2.0)
    d = 2.0 - (k * np.linalg.solve(jittered(rbf(Z, Z, 0.7, 2.0)), k)).sum(0)
    linear, quadratic = sites(fit)
    np.testing.assert_allclose(quadratic, 1 / (0.3**2 + d), rtol=1e-6)
    np.testing.assert_allclose(linear / quadratic, DATA["normal"], rtol=1e-6)


@pytest.mark.slow
def test_ep_of_little_power_is_the_default():
    small, default = (
        fitted("probit", r) for r in (ExpectationPropagation(1e-3), NaturalGradient())
    )
    for a, b in zip(sites(small), sites(default), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3)


@pytest.mark.slow
def test_leaving_out_a_point_of_an_ep_fit():
    """The cavity of the sites that it has, by the book."""
    fit = fitted("probit", ExpectationPropagation())
    linear, quadratic = sites(fit)
    m, S = posterior(linear, quadratic)
    expected = []
    for i in range(N):
        v = 1 / (1 / S[i, i] - quadratic[i])
        c = v * (m[i] / S[i, i] - linear[i])
        sign = 2 * DATA["probit"][i] - 1
        expected.append(norm.logcdf(sign * c / np.sqrt(1 + v)))
    found = loo(fit)
    pointwise = np.asarray(found["elpd_i" if ARVIZ_1 else "loo_i"])
    np.testing.assert_allclose(pointwise, expected, rtol=1e-5)


# ---- Laplace ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_laplace_is_at_the_mode():
    """By Newton's method on the log joint, which finite differences call stationary."""
    y = DATA["poisson"]

    def log_joint(f):
        return (y * f - np.exp(f)).sum() - 0.5 * (f - MEAN) @ np.linalg.solve(K, f - MEAN)

    f = np.full(N, MEAN)
    for _ in range(100):
        W = np.exp(f)
        S = np.linalg.inv(np.linalg.inv(K) + np.diag(W))
        f = 0.5 * f + 0.5 * S @ (W * f + y - W + np.linalg.solve(K, np.full(N, MEAN)))
    q = fitted("poisson", Laplace()).marginals()["f"]
    np.testing.assert_allclose(q.mean, f, atol=1e-8)
    np.testing.assert_allclose(q.variance, np.diag(S), rtol=1e-7)
    for step in 1e-5 * K:  # in directions that K allows
        assert abs(log_joint(q.mean + step) - log_joint(q.mean - step)) / 2e-5 < 1e-4


@pytest.mark.slow
def test_laplace_of_two_gps_that_meet():
    """Second derivatives of each function by itself, not sums of them."""

    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.7), X))
        g = numpyro.sample("g", GP(kernels.RBF(0.7), X))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)

    y = DATA["normal"]
    svi = TSVGP(model, AutoDualGaussian(model), None, rule=Laplace(), site_lr=0.3, e_steps=200)
    fit = svi.run(KEY, 1, X, y, progress_bar=False).fit
    q, p = fit.marginals(), fit.params
    f, g = q["f"].mean, q["g"].mean
    np.testing.assert_allclose(p["f_auto_quadratic"][0], np.exp(-2 * g), rtol=1e-5)
    np.testing.assert_allclose(
        p["g_auto_quadratic"][0], 2 * (y - f) ** 2 * np.exp(-2 * g), rtol=1e-4, atol=1e-6
    )


# ---- Fisher scoring --------------------------------------------------------------------------


@pytest.mark.slow
def test_fisher_information_of_a_student_t():
    fit = fitted("student", FisherScoring(), steps=500)
    linear, quadratic = sites(fit)
    np.testing.assert_allclose(quadratic, 4.0 / (6.0 * 0.3**2), rtol=1e-5)
    # The mean is stationary for its variances.
    q = fit.marginals()["f"]
    z, w = np.polynomial.hermite_e.hermegauss(20)
    w = w / w.sum()

    def bound(mean):
        f = mean + np.sqrt(q.variance) * z[:, None]
        expected = w @ np.asarray(LIKELIHOODS["student"](f).log_prob(DATA["student"]))
        return expected.sum() - 0.5 * (mean - MEAN) @ np.linalg.solve(K, mean - MEAN)

    for step in 1e-4 * K:
        assert abs(bound(q.mean + step) - bound(q.mean - step)) / 2e-4 < 1e-4
    assert not np.allclose(sites(fitted("student", NaturalGradient()))[1], quadratic, rtol=0.1)


@pytest.mark.slow
def test_fisher_information_of_a_probit():
    fit = fitted("probit", FisherScoring())
    q = fit.marginals()["f"]
    z, w = np.polynomial.hermite_e.hermegauss(20)
    f = np.asarray(q.mean + np.sqrt(q.variance) * z[:, None])
    expected = (w / w.sum()) @ (norm.pdf(f) ** 2 / (norm.cdf(f) * norm.cdf(-f)))
    np.testing.assert_allclose(sites(fit)[1], expected, rtol=1e-6)


def test_fisher_scoring_is_exact_for_a_gaussian_likelihood():
    fit = fitted("normal", FisherScoring(), steps=1, rate=1.0)
    linear, quadratic = sites(fit)
    np.testing.assert_allclose(quadratic, 1 / 0.3**2, rtol=1e-9)
    np.testing.assert_allclose(linear, DATA["normal"] / 0.3**2, rtol=1e-9)


# ---- refused in words ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "name", "options", "words"),
    [
        (ExpectationPropagation(), "probit", {"inducing": X[::3]}, "sums over sites do not tell"),
        (FisherScoring(), "poisson", {}, "Fisher information of the distribution Poisson .* 'y'"),
    ],
)
def test_rules_that_cannot_be_used(rule, name, options, words):
    svi = TSVGP(MODELS[name], AutoDualGaussian(MODELS[name], **options), None, rule=rule)
    with pytest.raises(ValueError, match=words):
        svi.init(KEY, X, DATA[name])


def test_several_data_points_for_one_value():
    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.7), X))
        with numpyro.plate("data", N), numpyro.plate("copies", 2):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    svi = TSVGP(model, AutoDualGaussian(model), None, rule=FisherScoring())
    with pytest.raises(ValueError, match="Several data points of observed site 'y' read the same"):
        svi.init(KEY, X, np.stack([DATA["normal"]] * 2))


def test_power():
    with pytest.raises(ValueError, match=r"power must lie in \(0, 1\], got 2"):
        ExpectationPropagation(2)


# ---- against long chains ---------------------------------------------------------------------


# By rule: deviations of means, in standard deviations, and relative ones of standard deviations.
NEAR_NUTS = {
    "probit": {
        ExpectationPropagation(): (0.1, 0.1),
        NaturalGradient(): (0.1, 0.1),
        Laplace(): (0.4, 0.15),
        FisherScoring(): (0.1, 0.15),
    },
    "poisson": {
        ExpectationPropagation(): (0.1, 0.1),
        NaturalGradient(): (0.1, 0.1),
        Laplace(): (0.4, 0.1),
    },
    "student": {
        ExpectationPropagation(): (0.1, 0.1),
        NaturalGradient(): (0.1, 0.2),
        Laplace(): (0.7, 0.4),
        FisherScoring(): (0.2, 0.6),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEAR_NUTS)
def test_moments_are_those_of_nuts(name):
    """EP within the error of the chains, the others within what is known of them.

    The bound's optimum is somewhat narrow; the mode is not the mean; the information of a Student-t
    is that of other data at an outlier, so that posteriors near one are half as wide as they are.
    """
    mcmc = MCMC(NUTS(whiten(MODELS[name])), num_warmup=500, num_samples=6000, progress_bar=False)
    mcmc.run(KEY, X, DATA[name])
    f = np.asarray(mcmc.get_samples()["f"])
    mean, sd = f.mean(0), f.std(0)
    for rule, (off, ratio) in NEAR_NUTS[name].items():
        q = fitted(name, rule, rate=0.3).marginals()["f"]
        assert np.abs((q.mean - mean) / sd).max() < off, rule
        np.testing.assert_allclose(np.sqrt(q.variance), sd, rtol=ratio, err_msg=repr(rule))
