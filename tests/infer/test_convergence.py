"""A fit that diverges or cycles says so, and a start that would is made with shorter steps."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
from numpyro_tsvgp.infer.em import run
from numpyro_tsvgp.infer.em.convergence import complaint
from numpyro_tsvgp.infer.em.warmup import overshoots, settle

N = 40
RNG = np.random.RandomState(0)
X = np.linspace(0.0, 1.0, N)
Y = np.sin(6.0 * X) + 0.3 * RNG.randn(N)
LABELS = (Y > 0) * 1.0
KEY = jax.random.key(0)


def likelihood(distribution):
    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", distribution(f), obs=y)

    return model


logistic = likelihood(lambda f: dist.Logistic(f, 0.02))


def make(model, **options):
    return TSVGP(model, AutoDualGaussian(model, inducing=X[::3]), None, **options)


# ---- what losses say -------------------------------------------------------------------------


def falling(n=200, noise=0.0, seed=0):
    """From 300 to 100 within the first tenth, for a hundred points."""
    rng = np.random.RandomState(seed)
    return 100 + 200 * np.exp(-np.arange(n) / (0.05 * n)) + noise * rng.standard_normal(n)


def of_100_points(losses, subsampled=False, rate=0.5, drawn=0):
    return complaint(losses, 100, subsampled=subsampled, rate=rate, drawn=drawn)


@pytest.mark.parametrize("n", [1, 2, 5, 8, 12, 40, 200, 5000])
def test_losses_that_fall_are_fine(n):
    assert of_100_points(falling(n)) is None
    assert of_100_points(falling(n, 20.0), subsampled=True) is None


def test_rounding_is_fine():
    wiggle = 1e-5 * np.tile([1.0, -1.0], 100)
    assert of_100_points(falling() + wiggle) is None
    assert of_100_points(1e8 + falling() + 1e3 * wiggle) is None  # single precision


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_fine(seed):
    """Minibatches, and draws of variational hyperparameters, at any length of the run."""
    for n in (12, 30, 100, 1000):
        rng = np.random.RandomState(seed)
        heavy = falling(n) + 30 * np.clip(rng.standard_t(2, n), -30, 30)
        assert of_100_points(heavy, subsampled=True) is None
        assert of_100_points(falling(n, 5.0, seed)) is None


def test_one_minibatch_with_an_outlier_is_fine():
    losses = falling()
    losses[-3] = 1e6
    assert of_100_points(losses, subsampled=True) is None


def test_losses_that_are_missing_are_left_out():
    losses = falling()
    losses[::7] = np.nan
    assert of_100_points(losses) is None
    assert of_100_points(np.full(50, np.nan)) is None


@pytest.mark.parametrize("n", [12, 30, 200, 5000])
def test_divergence(n):
    rising = falling(n) + 1000 * np.linspace(0, 1, n) ** 2
    message = of_100_points(rising)
    assert "has diverged: the last losses are near" in message
    assert "smaller site_lr, such as 0.1 (it was 0.5)" in message
    assert of_100_points(rising, rate=None).endswith("Try a smaller learning rate.")
    if n > 12:
        assert "diverged" in of_100_points(rising + 20 * RNG.randn(n), subsampled=True)


def test_ending_somewhat_above_the_best_is_told():
    """Twenty nats of a hundred points, without noise, are a worse fit than the one before."""
    losses = falling()
    losses[-30:] += 20
    assert "near 120, far above the 100 of earlier ones" in of_100_points(losses)
    assert of_100_points(losses, subsampled=True) is None  # other rows may explain it


def test_exploding_losses_do_not_excuse_themselves():
    losses = 500 * 2.0 ** np.arange(20)
    assert "diverged" in of_100_points(losses)


@pytest.mark.parametrize("n", [14, 40, 500])
def test_cycle(n):
    sign = (-1.0) ** np.arange(n)
    assert "The losses alternate between 99.95 and 100.05" in of_100_points(100 + 0.05 * sign)
    late = np.where(np.arange(n) < n // 3, falling(n), 100 + 0.05 * sign)
    assert "alternate" in of_100_points(late)
    fading = 100 + 50 * 0.9 ** np.arange(n) * sign
    assert of_100_points(fading) is None


@pytest.mark.parametrize("n", [30, 200])
def test_losses_that_jump(n):
    """Neither a divergence nor a cycle, and no fit that has converged."""
    rng = np.random.RandomState(0)
    jumps = np.where(np.arange(n) < n // 3, 100 + falling(n), 140 + 120 * rng.rand(n))
    message = of_100_points(jumps)
    assert "has not converged: the last losses jump between" in message
    assert of_100_points(jumps, subsampled=True) is None  # batches differ by as much
    settled = np.where(np.arange(n) < n // 2, jumps, 140)
    assert of_100_points(settled) is None
    assert of_100_points(jumps, drawn=3) == message


def test_draws_of_variational_hyperparameters_have_noise():
    """Log densities of 400 normal numbers, here with a standard deviation of sqrt(200)."""
    noisy = falling(200, np.sqrt(200.0))
    assert "has not converged" in of_100_points(noisy)
    assert of_100_points(noisy, drawn=400) is None


# ---- what first losses ask for ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1900.0], False),
        ([2100.0], True),
        ([np.inf], True),
        ([500.0, np.nan], True),
        ([500.0, 400.0, 450.0], False),
        ([99.9, 134.4, 102.1, 199.7], False),  # a Student-t that recovers by itself
        ([522.5, 526.5, 828.3], False),
        ([522.5, 526.5, 828.3, 1277.8], True),  # a logistic that does not
        ([-300.0, -310.0, -40.0], False),
        ([-300.0, -310.0, -30.0], True),
    ],
)
def test_overshoots(losses, expected):
    """Forty points."""
    assert overshoots(losses, 40, subsampled=False) is expected


def test_minibatches_may_differ():
    assert not overshoots([100.0, 900.0], 40, subsampled=True)
    assert overshoots([100.0, 9000.0], 40, subsampled=True)


def test_settling_takes_the_longest_steps_that_do_not_climb():
    """Newton steps on a function with a narrow minimum: the longest one overshoots."""
    rates = []

    def attempt(x, rate):
        rates.append(rate)
        new = x - 4 * rate * x
        return new, new**2

    end = settle(attempt, 100.0, 1.0)
    assert abs(end) < 1.0
    assert max(rates) == 1.0 and min(r for r in rates if r) < 0.5


# ---- runs ------------------------------------------------------------------------------------


RIGHT = 321.3114  # minus the bound that short steps (site_lr=0.05) lead to


@pytest.mark.slow
def test_narrow_likelihood(monkeypatch):
    """Every step from the prior goes further than the one before; the first loss does not tell."""
    calls = []
    settled = run.settled
    monkeypatch.setattr(run, "settled", lambda *args: calls.append(1) or settled(*args))
    svi = make(logistic)
    result = svi.run(KEY, 40, X, Y, progress_bar=False)
    assert calls == [1] and result.losses.shape == (40,) and int(result.state.step) == 40
    assert float(result.losses[-1]) == pytest.approx(RIGHT, abs=0.01)
    # Without the careful start, from a state of the user's, it diverges, and the result says so.
    start = svi.init(KEY, X, Y)
    pattern = r"fit has diverged: the last losses are near [5-9]\d{5}, far .*site_lr, such as 0\.1"
    with pytest.warns(UserWarning, match=pattern):
        wrong = svi.run(KEY, 60, X, Y, init_state=start, progress_bar=False)
    assert float(wrong.losses[-1]) > 100 * RIGHT


@pytest.mark.slow
def test_short_steps_lead_to_the_same_fit():
    slow = make(logistic, site_lr=0.05).run(KEY, 200, X, Y, progress_bar=False)
    assert float(slow.losses[-1]) == pytest.approx(RIGHT, abs=0.01)
    fast = make(logistic).run(KEY, 60, X, Y, progress_bar=False)
    np.testing.assert_allclose(
        fast.fit.marginals()["f"].mean, slow.fit.marginals()["f"].mean, atol=1e-3
    )


@pytest.mark.slow
def test_two_cycle_of_the_longest_steps():
    model = likelihood(lambda f: dist.Bernoulli(logits=5 * f))
    pattern = r"losses alternate between 12\.\d+ and 12\.\d+: .*smaller site_lr, such as 0\.2"
    with pytest.warns(UserWarning, match=pattern):
        make(model, site_lr=1.0).run(KEY, 60, X, LABELS, progress_bar=False)


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
def test_longest_steps_on_heavy_tails(distribution, right):
    """Version 0.1 cycled far away from these, or diverged, in silence."""
    model = likelihood(distribution)
    for rate in (None, 1.0):
        result = make(model, site_lr=rate).run(KEY, 200, X, Y, progress_bar=False)
        assert float(result.losses[-1]) == pytest.approx(right, abs=0.5)


@pytest.mark.slow
def test_start_that_goes_wrong_after_the_first_step():
    """Large counts and an optimizer: what the first steps spoil, Adam does not repair."""
    counts = np.random.RandomState(1).poisson(np.exp(4.0 + 1.5 * np.sin(6.0 * X))).astype(float)

    def model(X, y=None):
        variance = numpyro.param("variance", 1.0, constraint=dist.constraints.positive)
        f = numpyro.sample("f", GP(kernels.RBF(0.3, variance), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    losses = {}
    for rate in (None, 0.02):
        svi = TSVGP(model, AutoDualGaussian(model, X[::3]), optax.adam(0.05), site_lr=rate)
        losses[rate] = float(svi.run(KEY, 500, X, counts, progress_bar=False).losses[-1])
    assert losses[None] < losses[0.02] + 0.5


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 8])
def test_ordinary_runs_are_not_warned_of(size):
    """Warnings are errors in this suite."""
    for name, distribution, y in (
        ("normal", lambda f: dist.Normal(f, 0.1), Y),
        ("bernoulli", lambda f: dist.Bernoulli(logits=f), LABELS),
        ("student", lambda f: dist.StudentT(3.0, f, 0.1), Y),
        ("poisson", lambda f: dist.Poisson(jnp.exp(f)), np.round(3 * np.exp(Y))),
    ):

        def model(X, y, distribution=distribution):
            scale = numpyro.param("scale", 0.3, constraint=dist.constraints.positive)
            with numpyro.plate("data", X.shape[0], subsample_size=size) as rows:
                batch, values = X[rows], y[rows]
            f = numpyro.sample("f", GP(kernels.RBF(scale), batch))
            with numpyro.plate("data", X.shape[0], subsample_size=size):
                numpyro.sample("y", distribution(f), obs=values)

        svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::4]), optax.adam(0.02))
        for steps in (20, 300):
            result = svi.run(KEY, steps, X, y, progress_bar=False)
        assert np.isfinite(result.losses).all(), name


def test_ending_above_the_start():
    """A first step that went too far, and a fit that settled in another place."""
    losses = np.r_[9.0, 6e3, 80.0, 5e4, np.full(26, 1775.6)]
    told = complaint(losses, 24, subsampled=False, rate=0.5)
    assert (
        "ended worse than it started: the last losses are near 1775.6 and the first was 9" in told
    )
    assert (
        complaint(np.r_[9.0, 50.0, np.linspace(12.0, 8.0, 28)], 24, subsampled=False, rate=0.5)
        is None
    )


def test_losses_that_no_density_has():
    told = complaint([1e80, 1e68, 1e60], 24, subsampled=False, rate=0.5)
    assert told.startswith("The last loss is 1e+60, more than 1e+07 nats for each data point")
    assert complaint([1e7, 9e6, 8e6], 24, subsampled=False, rate=0.5) is None
