"""New data with every site rule: the sites of new points are those that the rule asks for."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    ExpectationPropagation,
    NaturalGradient,
    Riemannian,
    kernels,
)
from numpyro_tsvgp.infer.steps.fisher import FisherScoring
from numpyro_tsvgp.infer.steps.laplace import Laplace

RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, 24)
COUNTS = RNG.poisson(np.exp(1 + np.sin(3 * X)))
OUTLIERS = np.sin(3 * X) + 0.2 * RNG.standard_t(3, 24)
OUTLIERS[[4, 18]] += 2.5
Z, TEST = np.linspace(-2, 2, 8), np.linspace(-2.5, 2.5, 6)


def counts(X, y=None):
    f = numpyro.sample("f", GP(1.5 * kernels.Matern52(0.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(1 + f)), obs=y)


def robust(X, y=None):
    """With outliers, whose curvature is negative."""
    f = numpyro.sample("f", GP(1.5 * kernels.Matern52(0.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(3.0, f, 0.2), obs=y)


DATA = {counts: COUNTS, robust: OUTLIERS}


def fitted(model, rule, rows=slice(None), inducing=Z, **options):
    guide = AutoDualGaussian(model, inducing, **options)
    svi = TSVGP(model, guide, None, rule=rule, site_lr=0.3, e_steps=200)
    with warnings.catch_warnings():  # the default rule says how much of the curvature is negative
        warnings.simplefilter("ignore")
        run = svi.run(jax.random.key(0), 1, X[rows], DATA[model][rows], progress_bar=False)
    return run.fit


def apart(one, other):
    """The largest distance of means and of standard deviations, in standard deviations."""
    a, b = (fit.marginals(TEST)["f"] for fit in (one, other))
    sd = jnp.sqrt(b.variance)
    return float(
        jnp.maximum(jnp.abs(a.mean - b.mean) / sd, jnp.abs(a.variance**0.5 / sd - 1)).max()
    )


def emptied(fit):
    nothing = fit.guide.unpack("f", fit.params).without_data()
    params = {**fit.params, **fit.guide.pack({"f": nothing})}
    return dataclasses.replace(fit, params=params, call=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rule"),
    [
        (counts, NaturalGradient()),
        (counts, Laplace()),
        (robust, FisherScoring()),
        (robust, Riemannian()),
        (counts, Riemannian()),
    ],
    ids=lambda x: getattr(x, "__name__", repr(x)),
)
@pytest.mark.filterwarnings("error:The sites of the new data points")
def test_sites_of_new_data_are_those_of_the_rule(model, rule):
    whole, y = fitted(model, rule), DATA[model]
    # Data that come to a fit without any: nothing is held, so nothing may differ.
    assert apart(emptied(whole).condition(X, y), whole) < 1e-5
    if rule != NaturalGradient() and (model, rule) != (counts, Riemannian()):  # the same there
        assert apart(fitted(model, NaturalGradient()), whole) > 1e-3
    # Data that come later find the earlier ones held, so that they end near the fit to all.
    first = fitted(model, rule, slice(16))
    later = first.condition(X[16:], y[16:])
    assert apart(later, whole) < 0.5 * apart(first, whole)
    assert apart(later, whole) < 0.3
    # Data that go leave the fit to the others.
    assert apart(later.without(X[16:], y[16:]), first) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("inducing", [Z, None], ids=["untied", "every point"])
@pytest.mark.filterwarnings("error:The sites of the new data points")
def test_expectation_propagation_takes_new_data(inducing):
    """It needs sites of points, which are held one by one."""
    rule = ExpectationPropagation()
    options = {"inducing": inducing} | ({} if inducing is None else {"sites": "untied"})
    whole = fitted(counts, rule, **options)
    first = fitted(counts, rule, slice(16), **options)
    later = first.condition(X[16:], COUNTS[16:])
    assert apart(later, whole) < 0.2 < apart(first, whole)
    assert apart(later.without(X[16:], COUNTS[16:]), first) < 1e-8
    # The rule of the fit made the new sites, and more of its own steps settle where it does.
    assert apart(later.refreshed({}, 80), whole) < 1e-5
    default = dataclasses.replace(first, rule=NaturalGradient()).condition(X[16:], COUNTS[16:])
    assert apart(default, later) > 1e-3


@pytest.mark.slow
def test_a_rule_that_knows_no_counts_says_so():
    """The information of a count is no sum over finitely many values."""
    with pytest.raises(ValueError, match="Fisher information of the distribution Poisson"):
        fitted(counts, FisherScoring())
