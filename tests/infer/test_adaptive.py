"""site_lr="auto": every E-step is judged by the bound, also in a loop of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.stats import norm

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    EPLike,
    ExpectationPropagation,
    Riemannian,
    kernels,
)
from numpyro_tsvgp.infer.steps.adaptive import Adaptive

positive = dist.constraints.positive
KEY = jax.random.key(0)
N = 40
X = np.linspace(0.0, 1.0, N)
Y = np.sin(6.0 * X) + 0.3 * np.random.RandomState(0).randn(N)


def likelihood(distribution):
    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", distribution(f), obs=y)

    return model


def loop(svi, steps, *args):
    """A loop of one's own: states and losses."""
    state, update, losses = svi.init(KEY, *args), jax.jit(svi.update), []
    for _ in range(steps):
        state, loss = update(state, *args)
        losses.append(float(loss))
    return state, np.array(losses)


def poisson(X, y=None):
    variance = numpyro.param("variance", 1.0, constraint=positive)
    f = numpyro.sample("f", GP(kernels.RBF(0.3, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


COUNTS = np.random.RandomState(1).poisson(np.exp(4.0 + 1.5 * np.sin(6.0 * X))).astype(float)
BEST = 159.094  # of steps with rate 0.001 at first


def test_counts_that_overshoot():
    """A fixed rate leads to 1e45 and then to nothing; an optimizer must not see such steps."""
    guide = AutoDualGaussian(poisson, X[::3], learn_inducing=False)
    for start in (0.1, 1.0):
        svi = TSVGP(poisson, guide, optax.adam(0.1), site_lr=Adaptive(start))
        state, losses = loop(svi, 150, X, COUNTS)
        assert np.isfinite(losses).all()
        assert (np.diff(losses[:20]) < 0.02).all()
        assert losses[-1] == pytest.approx(BEST, abs=0.05)
        assert float(state.rate) == 1.0 and int(state.step) == 150
    fixed = TSVGP(poisson, guide, optax.adam(0.1))
    assert not np.isfinite(loop(fixed, 10, X, COUNTS)[1]).all()


@pytest.mark.slow
def test_narrow_likelihood_in_a_loop_of_ones_own():
    """From a user's state a fixed rate diverges here; see test_convergence.py."""
    model = likelihood(lambda f: dist.Logistic(f, 0.02))
    svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::3]), None, site_lr="auto")
    _, losses = loop(svi, 60, X, Y)
    assert losses[-1] == pytest.approx(321.3114, abs=0.01)
    several = TSVGP(
        model, AutoDualGaussian(model, inducing=X[::3]), None, site_lr="auto", e_steps=7
    )
    _, losses = loop(several, 12, X, Y)
    assert losses[-1] == pytest.approx(321.3114, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distribution", "right"),
    [
        (lambda f: dist.StudentT(3.0, f, 0.1), 37.57),
        (lambda f: dist.Cauchy(f, 0.1), 28.44),
        (lambda f: dist.Laplace(f, 0.02), 341.72),
    ],
    ids=["student", "cauchy", "laplace"],
)
def test_heavy_tails(distribution, right):
    """Where steps of rate 1 cycle."""
    model = likelihood(distribution)
    for start in (0.5, 1.0):
        svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::3]), None, site_lr=Adaptive(start))
        _, losses = loop(svi, 100, X, Y)
        assert losses[-1] <= right + 0.05


def student(X, y=None):
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=positive)
    scale = numpyro.param("scale", 0.5, constraint=positive)
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale, numpyro.param("variance", 1.0)), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(3.0, f, scale), obs=y)


def heteroscedastic(X, y=None):
    l1, l2, v1, v2 = (
        numpyro.param(k, v, constraint=positive)
        for k, v in {"l1": 0.5, "l2": 1.0, "v1": 1.0, "v2": 1.0}.items()
    )
    f = numpyro.sample("f", GP(kernels.RBF(l1, v1), X))
    g = numpyro.sample("g", GP(kernels.RBF(l2, v2), X, mean=-1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, Riemannian()], ids=["default", "riemannian"])
def test_two_gps_from_any_rate(mcycle, rule):
    """With clipped curvature a fixed rate of 1 ends at 88.4."""
    X, y = mcycle.X[:, 0], mcycle.y
    X, y = (X - X.mean()) / X.std(), (y - y.mean()) / y.std()
    guide = AutoDualGaussian(
        heteroscedastic, np.linspace(X.min(), X.max(), 25), learn_inducing=False
    )
    for start in (0.1, 1.0) if rule is None else (0.5,):
        svi = TSVGP(heteroscedastic, guide, optax.adam(0.05), site_lr=Adaptive(start), rule=rule)
        assert loop(svi, 220, X, y)[1][-1] == pytest.approx(76.383, abs=0.05)


@pytest.mark.slow
def test_cycle_of_a_probit(banana):
    """Figure 1 (right) of the paper, where steps of rate 1 end in a cycle at 107.0 to 107.9."""

    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.814, 15.99), X))
        with numpyro.plate("data", X.shape[0]):
            probs = 1e-3 + (1 - 2e-3) * norm.cdf(f)
            numpyro.sample("y", dist.Bernoulli(probs=probs), obs=y)

    guide = AutoDualGaussian(model, banana.X[:100], learn_inducing=False)
    fixed = TSVGP(model, guide, None, site_lr=1.0)
    losses = loop(fixed, 60, banana.X, banana.y)[1][-10:]
    assert losses.max() - losses.min() > 0.5 and losses.min() > 106.9
    for start in (0.1, 1.0):
        svi = TSVGP(model, guide, None, site_lr=Adaptive(start))
        assert loop(svi, 80, banana.X, banana.y)[1][-1] == pytest.approx(106.696, abs=1e-3)


@pytest.mark.slow
def test_gross_outliers():
    rng = np.random.RandomState(0)
    X = np.sort(rng.rand(150) * 6 - 3)
    y = np.sin(2 * X) + 0.1 * rng.randn(150)
    y[rng.choice(150, 15, replace=False)] += 10 * rng.randn(15)
    guide = AutoDualGaussian(student, np.linspace(-3, 3, 25), learn_inducing=False)
    svi = TSVGP(student, guide, optax.adam(0.05), site_lr="auto")
    assert loop(svi, 200, X, y)[1][-1] == pytest.approx(99.235, abs=0.02)


@pytest.mark.slow
def test_where_the_m_step_has_an_evaluation_of_its_own():
    """Another objective, and an optimizer with a line search: judged by the bound all the same."""
    guide = AutoDualGaussian(poisson, X[::3], learn_inducing=False)
    svi = TSVGP(poisson, guide, optax.adam(0.1), site_lr="auto", objective=EPLike())
    state, losses = loop(svi, 60, X, COUNTS)
    assert np.isfinite(losses[-20:]).all() and losses[-1] < BEST + 1.0
    lbfgs = TSVGP(poisson, guide, optax.lbfgs(), site_lr="auto", e_steps=5, m_steps=3)
    _, losses = loop(lbfgs, 20, X, COUNTS)
    assert losses[-1] == pytest.approx(BEST, abs=0.05)


@pytest.mark.slow
def test_minibatches_have_the_rate_of_their_size():
    def plain(X, y):
        with numpyro.plate("data", N, subsample_size=10) as rows:
            pass
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X[rows]))
        with numpyro.plate("data", N, subsample_size=10):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y[rows])

    found = []
    # A quarter of the data: 0.5 * sqrt(1 / 4), halved after ten epochs.
    for rate in ("auto", lambda step: 0.25 / (1 + step / 40)):
        svi = TSVGP(plain, AutoDualGaussian(plain, X[::4]), None, site_lr=rate)
        found.append(loop(svi, 5, X, Y)[1])
    np.testing.assert_allclose(*found, rtol=1e-12)


def test_judgement():
    """Of a step from one bound to another: accepted, and the rate of the next."""
    cases = [  # rate, before, after, accepted, next
        (0.4, -10.0, -9.0, True, 0.5),
        (0.9, -10.0, -9.0, True, 1.0),
        (1.0, -10.0, -10.00005, True, 1.0),  # rounding
        (1.0, -10.0, -10.005, True, 0.5),  # a little lower, as clipped curvature can be
        (0.3, -10.0, -10.005, True, 0.25),
        (0.1, -10.0, -10.005, True, 0.1),
        (0.8, -10.0, -10.1, False, 0.4),
        (0.8, -10.0, -20.0, False, 0.2),
        (0.8, -10.0, -np.inf, False, 0.2),
        (0.8, -10.0, np.nan, False, 0.2),
        (0.8, np.nan, -20.0, True, 1.0),
        (1e-5, -10.0, -20.0, True, 1.25e-5),  # not to blame
    ]
    for rate, before, after, accepted, following in cases:
        ok, found = Adaptive().judged(*map(jnp.asarray, (rate, after, before)))
        assert bool(ok) == accepted, (rate, after)
        assert float(found) == pytest.approx(following), (rate, after)


def test_words():
    model = likelihood(lambda f: dist.Normal(f, 0.3))
    guide = AutoDualGaussian(model)
    with pytest.raises(ValueError, match="which those of ExpectationPropagation.* do not climb"):
        TSVGP(model, guide, None, site_lr="auto", rule=ExpectationPropagation())
    with pytest.raises(TypeError, match="a function of the step or 'auto', got str"):
        TSVGP(model, guide, None, site_lr="automatic")
    with pytest.raises(ValueError, match="0 < start <= largest <= 1"):
        Adaptive(0.5, 0.2)
