"""Inputs that depend on hyperparameters: sites of points go where their inputs go."""

from functools import cache

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

N, STEPS = 30, 150
RNG = np.random.RandomState(8)
X = np.sort(RNG.uniform(-2.0, 2.0, N))
TRUTH = np.sin(4.0 * X)
Y = TRUTH + 0.1 * RNG.randn(N)
NEW = np.linspace(-1.9, 1.9, 25)
WIDE = np.linspace(-7.0, 7.0, 24)  # where the stretched inputs end up


def positive(name):
    return numpyro.param(name, 1.0, constraint=dist.constraints.positive)


def observe(f, y):
    with numpyro.plate("data", f.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def stretched(X, y=None):
    observe(numpyro.sample("f", GP(kernels.RBF(1.0), positive("w") * X)), y)


def scaled(X, y=None):
    """The same prior: a lengthscale of 1/w."""
    observe(numpyro.sample("f", GP(kernels.RBF(positive("lengthscale")), X)), y)


@cache
def fit(model, **options):
    guide = AutoDualGaussian(model, learn_inducing=False, **options)
    svi = TSVGP(model, guide, optax.adam(0.05), site_lr=1.0)
    return svi.run(jax.random.key(0), STEPS, X, Y, progress_bar=False)


@pytest.mark.slow
def test_stretched_inputs_are_a_lengthscale():
    """Adam takes the same steps in log w as in minus log lengthscale: all numbers agree."""
    ours, theirs = fit(stretched), fit(scaled)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-6)
    w = float(ours.params["w"])
    assert w * float(theirs.params["lengthscale"]) == pytest.approx(1.0, rel=1e-6)
    assert w > 1.5 and ours.losses[-1] < ours.losses[0] - 20.0  # it has moved, and gained by it
    np.testing.assert_allclose(ours.params["f_auto_inputs"], w * X, rtol=1e-12)
    a, b = (result.fit.marginals(NEW)["f"] for result in (ours, theirs))
    np.testing.assert_allclose(a.mean, b.mean, atol=1e-5)
    np.testing.assert_allclose(a.variance, b.variance, atol=1e-5)
    assert np.sqrt(np.mean((a.mean - np.sin(4.0 * NEW)) ** 2)) < 0.15


@pytest.mark.slow
def test_sites_of_points_through_inducing_inputs():
    """Inducing inputs are in the stretched space; with enough of them the fit is the same."""
    ours = fit(stretched, inducing=tuple(WIDE), sites="untied")
    theirs = fit(scaled)
    assert ours.losses[-1] == pytest.approx(float(theirs.losses[-1]), abs=0.2)
    w = float(ours.params["w"])
    assert w * float(theirs.params["lengthscale"]) == pytest.approx(1.0, rel=0.02)
    a, b = (result.fit.marginals(NEW)["f"] for result in (ours, theirs))
    np.testing.assert_allclose(a.mean, b.mean, atol=0.02)
    np.testing.assert_allclose(a.variance, b.variance, atol=0.01)
