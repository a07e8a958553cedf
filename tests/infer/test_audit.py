"""Fits that are broken by hand are told apart from honest ones by draws through the model."""

import dataclasses
from functools import cache

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoNormal

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, EPLike, kernels
from numpyro_tsvgp.model import checks
from numpyro_tsvgp.model.coupling import Couplings

X, N = canonical.X, canonical.N
Y, LABELS = canonical.CANONICAL["regression"].y, canonical.CANONICAL["labels"].y
KEYS = [jax.random.key(i) for i in range(10)]


def latent(X, name="f", **options):
    return numpyro.sample(name, GP(kernels.RBF(0.3), X, **options))


def observe(X, distribution, y):
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", distribution, obs=y)


def product(X, y=None):
    f, g = latent(X, mean=1.0), latent(X, "g")
    observe(X, dist.Normal(f * g, 0.15), y)


def cumulative(X, y=None):
    observe(X, dist.Normal(jnp.cumsum(latent(X)) / 5, 0.3), y)


def paired(X, y=None):
    f = latent(X)
    observe(X, dist.Bernoulli(logits=f - f[::-1]), y)


def outlying(X, y=None):
    observe(X, dist.StudentT(2.0, latent(X), 0.01), y)


def intercept(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 5.0))
    f = latent(X, mean=lambda x: b * jnp.ones(x.shape[0]))
    observe(X, dist.Normal(f, 0.3), y)


def fit(model, y=Y, *, steps=60, optim=None, hyper_guide=None, **options):
    guide = AutoDualGaussian(model, hyper_guide=hyper_guide)
    svi = TSVGP(model, guide, optim, **options)
    return svi.run(jax.random.key(0), steps, X, y, progress_bar=False).fit


def said(fit, key=KEYS[0]):
    """All concerns in one line."""
    return " ".join(fit.audit(key).concerns)


@cache
def honest(name):
    """A fit that has converged."""
    if name == "intercept":
        optim = optax.adam(optax.exponential_decay(0.1, 400, 0.05))
        return fit(intercept, Y + 2.0, steps=400, optim=optim, hyper_guide=AutoNormal, site_lr=1.0)
    if name == "product":
        return fit(product, site_lr=0.2, steps=150)
    return canonical.result(name).fit


# ---- what the quadrature misses --------------------------------------------------------------

DISAGREES = r"The expected log-likelihood of site 'y' is"


def with_one_coordinate(fit):
    """All latent functions share a coordinate, as if none of them met."""
    one = tuple((name, (0,) * len(axes)) for name, axes in fit.structure.coordinates)
    return dataclasses.replace(
        fit, structure=dataclasses.replace(fit.structure, coordinates=one, dim=1)
    )


@pytest.mark.parametrize("name", ["spread", pytest.param("product", marks=pytest.mark.slow)])
def test_functions_that_meet_unseen(name):
    right = honest(name)
    assert right.structure.dim == 2
    assert right.audit(KEYS[0]).concerns == []
    assert DISAGREES in said(with_one_coordinate(right))


@pytest.mark.slow
@pytest.mark.parametrize("model", [paired, pytest.param(cumulative, marks=pytest.mark.slow)])
def test_a_likelihood_that_is_no_sum_over_points(model, monkeypatch):
    y = LABELS if model is paired else Y
    with pytest.raises(ValueError, match="not a sum over data points"):
        fit(model, y)
    forced = Couplings({"f": np.zeros(1, int)}, 1, True)
    monkeypatch.setattr(checks, "couplings", lambda *args: forced)
    wrong = fit(model, y, site_lr=0.1)
    assert DISAGREES in said(wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The fit has diverged")  # which is telling, too
@pytest.mark.parametrize("model", [canonical.spread, product])
def test_functions_that_meet_unseen_by_the_fit_itself(model, monkeypatch):
    forced = Couplings({"f": np.zeros(1, int), "g": np.zeros(1, int)}, 1, True)
    monkeypatch.setattr(checks, "couplings", lambda *args: forced)
    wrong = fit(model, site_lr=0.2, steps=150)
    for key in KEYS:
        assert DISAGREES in said(wrong, key)


@pytest.mark.slow
def test_too_few_nodes():
    assert DISAGREES in said(fit(outlying, quadrature=2, site_lr=0.1))
    assert DISAGREES not in said(fit(outlying, quadrature=100, site_lr=0.1))


# ---- steps and hyperparameters ---------------------------------------------------------------


@pytest.mark.slow
def test_sites_that_have_not_converged():
    start = fit(canonical.counts, canonical.CANONICAL["counts"].y, steps=1, site_lr=0.05)
    assert "the sites have not converged" in said(start)
    assert honest("counts").audit(KEYS[0]).concerns == []


def narrowed(factor):
    params = honest("intercept").params
    narrower = {**params, "b_auto_scale": params["b_auto_scale"] / factor}
    return dataclasses.replace(honest("intercept"), params=narrower)


@pytest.mark.slow
def test_hyperparameters_that_are_too_sure():
    assert narrowed(1.0).audit(KEYS[0]).concerns == []
    for key in KEYS:
        report = narrowed(8.0).audit(key)
        assert report.spread > 0.5
        assert any("posterior of the hyperparameters is off" in c for c in report.concerns)
    assert narrowed(8.0).audit(KEYS[0], hyperparameters=False).spread is None


# ---- honest fits -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=pytest.mark.slow) for k in ("labels", "spread", "intercept")]
)
def test_honest_fits_are_left_alone(name):
    for key in KEYS:
        report = honest(name).audit(key)
        assert report.concerns == [], str(report)
        assert str(report).endswith("nothing to worry about")


@pytest.mark.slow
def test_draws_are_of_the_guide():
    """The expectation by draws is that of a Gaussian likelihood in closed form."""

    found = honest("regression")
    report = found.audit(KEYS[0], num_draws=4096)
    mean, variance = found.marginals()["f"]
    each = -0.5 * np.log(2 * np.pi * 0.09) - 0.5 * ((Y - mean) ** 2 + variance) / 0.09
    exact = float(each.sum())
    assert report.expected["y"] == pytest.approx(exact, rel=1e-5)  # the jitter of f at the data
    assert abs(report.drawn["y"] - exact) < 4 * report.standard_error["y"]
    assert 0 < report.standard_error["y"] < 0.2
    assert report.gain == pytest.approx(0.0, abs=1e-6)
    assert (report.points, report.floored, report.spread) == (N, 0, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The fit")  # has diverged, or ended worse, in losses of EPLike
def test_an_objective_that_runs_away_from_the_bound(banana):
    """With few inducing inputs EPLike is far above the bound at large variances."""

    def model(X, y=None, variance=1.0):
        f = numpyro.sample("f", GP(variance * kernels.Matern52(0.5), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    guide = AutoDualGaussian(model, banana.X[:10], learn_inducing=False)
    svi = TSVGP(model, guide, None, objective=EPLike(), site_lr=0.1)
    found = []
    for variance in (np.array(5.0), np.array(500.0)):
        fit = svi.run(jax.random.key(0), 60, *banana, variance, progress_bar=False).fit
        found.append(fit.audit(KEYS[0]))
    ordinary, large = found
    assert 0 < ordinary.excess < 0.5 * len(banana.y) and large.excess > 2.0 * len(banana.y)
    said = [any("exceeds the bound" in words for words in report.concerns) for report in found]
    assert said == [False, True]


def test_a_run_says_what_its_audit_found():
    svi = TSVGP(canonical.counts, AutoDualGaussian(canonical.counts), None, site_lr=0.05)
    with pytest.warns(UserWarning, match=r"Audit of the fit: One more E-step would change"):
        y = canonical.CANONICAL["counts"].y
        svi.run(jax.random.key(0), 1, X, y, progress_bar=False, audit=True)
