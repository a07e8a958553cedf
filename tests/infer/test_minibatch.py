"""Minibatches, written in the three ways that NumPyro has: N/|M| counts once, in the likelihood."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import read

N, BATCH, M = 36, 12, 6
RNG = np.random.RandomState(3)
X = jnp.asarray(RNG.rand(N))  # JAX arrays, which can be indexed by traced ones
Y = jnp.asarray(RNG.poisson(np.exp(1.0 + np.sin(7.0 * X))))
Z = np.linspace(0.0, 1.0, M)
BATCHES = jnp.asarray(RNG.permutation(N).reshape(-1, BATCH))


def gp(X):
    """The GP of every model here. Its prior on the variance must not be scaled by N/|M|."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.param("lengthscale", 0.3, constraint=dist.constraints.positive)
    return numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X))


def observe(f, y):
    numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def full(X, y=None):
    """Every point in every step: what the minibatches estimate."""
    f = gp(X)
    with numpyro.plate("data", X.shape[0]):
        observe(f, y)


def by_index(X, y=None, batch=BATCH):
    """A plate that subsamples, and its indices."""
    data = numpyro.plate("data", X.shape[0], subsample_size=batch)
    with data as rows:
        x, y = X[rows], None if y is None else y[rows]
    f = gp(x)
    with data:
        observe(f, y)


def by_subsample(X, y=None, batch=BATCH):
    """A plate that subsamples, and `numpyro.subsample`."""
    data = numpyro.plate("data", X.shape[0], subsample_size=batch)
    with data:
        x = numpyro.subsample(X, event_dim=0)
        y = None if y is None else numpyro.subsample(y, event_dim=0)
    f = gp(x)
    with data:
        observe(f, y)


def by_values(X, y=None, batch=BATCH):
    """The GP at all inputs, of which a batch is observed."""
    f = gp(X)
    with numpyro.plate("data", X.shape[0], subsample_size=batch) as rows:
        observe(f[rows], None if y is None else y[rows])


def by_argument(X, y=None, size=N):
    """A batch comes as the arguments, the plate has the size of all data."""
    f = gp(X)
    with numpyro.plate("data", size, subsample_size=X.shape[0]):
        observe(f, y)


IN_MODEL = {model.__name__: model for model in (by_index, by_subsample, by_values)}


class Driver:
    """A driver with its compiled methods."""

    def __init__(self, model, optim=None, **options):
        self.guide = AutoDualGaussian(model, inducing=Z, learn_inducing=False)
        self.svi = TSVGP(model, self.guide, optim, **options)
        self.update = jax.jit(self.svi.update)
        self.evaluate = jax.jit(self.svi.evaluate)


@cache
def full_driver():
    """Full batches with rate 1, and a state of it that is neither the prior nor converged."""
    driver = Driver(full, site_lr=1.0)
    state = driver.svi.init(jax.random.key(0), X, Y)
    state, _ = driver.update(state, X, 2 * Y)
    return driver, state


def targets(driver, state, *args):
    """The sites that one E-step of rate 1 moves to."""
    kept = driver.update(state, *args)[0].approximation
    return {what: kept[f"f_auto_{what}"] for what in ("linear", "quadratic")}


def assert_average(batches, whole):
    """The average over disjoint batches is the whole, up to the order of sums."""
    average = jax.tree.map(lambda *parts: np.mean(parts, axis=0), *batches)
    for what, value in whole.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(average[what], value, rtol=1e-9, atol=1e-11 * scale)
        # Not vacuous: a batch is not the whole.
        assert np.abs(batches[0][what] - value).max() > 1e-2 * scale


def assert_default_rate(guide, *args):
    """0.5 sqrt(|M| / N) / (1 + epochs / 10), however the model says what N and |M| are."""
    reading = read(guide.model, Call(args, {}), key=jax.random.key(0), first_rows=True)
    svi = TSVGP(guide.model, guide, None)
    for epochs in (0, 10, 30):
        rate = svi.rate(epochs * N / BATCH, reading.subsampling)
        assert rate == pytest.approx(0.5 * np.sqrt(BATCH / N) / (1 + epochs / 10))
    assert svi.rate(1000, 1.0) == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_MODEL)
def test_batches_in_the_model_average_to_the_whole(name):
    whole, state = full_driver()

    def chosen(rows, X, y=None):
        """The model with its random indices replaced."""
        return handlers.substitute(IN_MODEL[name], data={"data": rows})(X, y)

    driver = Driver(chosen, site_lr=1.0)
    driver.svi.init(jax.random.key(0), BATCHES[0], X, Y)
    expected = targets(whole, state, X, Y)
    assert_average([targets(driver, state, rows, X, Y) for rows in BATCHES], expected)
    assert_default_rate(driver.guide, BATCHES[0], X, Y)
    # The bound too: N/|M| stands before the likelihood, not before KL and hyperprior.
    losses = [float(driver.evaluate(state, rows, X, Y)) for rows in BATCHES]
    assert np.mean(losses) == pytest.approx(float(whole.evaluate(state, X, Y)), rel=1e-10)
    assert np.ptp(losses) > 0.1


@cache
def argument_driver():
    return Driver(by_argument, site_lr=lambda step: 1.0 / (1.0 + 0.3 * step))


@pytest.mark.slow
def test_batches_as_arguments_average_to_the_whole():
    whole, state = full_driver()
    driver = argument_driver()
    batches = [(X[rows], Y[rows]) for rows in BATCHES]
    driver.svi.init(jax.random.key(0), *batches[0])
    state = dataclasses.replace(state, step=jnp.zeros_like(state.step))  # where the rate is one
    assert_average([targets(driver, state, *b) for b in batches], targets(whole, state, X, Y))
    assert_default_rate(driver.guide, *batches[0])
    losses = [float(driver.evaluate(state, *b)) for b in batches]
    assert np.mean(losses) == pytest.approx(float(whole.evaluate(state, X, Y)), rel=1e-10)


@pytest.mark.slow
def test_one_update_draws_one_batch():
    """E-step and M-step see the same random rows, the next update sees others."""
    seen = []

    def model(X, y=None):
        data = numpyro.plate("data", X.shape[0], subsample_size=BATCH)
        with data as rows:
            jax.debug.callback(lambda rows: seen.append(tuple(np.asarray(rows))), rows)
        f = gp(X[rows])
        with data:
            observe(f, None if y is None else y[rows])

    driver = Driver(model, optax.adam(0.01))
    state, drawn = driver.svi.init(jax.random.key(0), X, Y), []
    for _ in range(2):
        jax.effects_barrier()
        seen.clear()
        state, _ = driver.update(state, X, Y)
        jax.effects_barrier()
        assert len(seen) >= 2 and len(set(seen)) == 1  # several runs of the model, one batch
        assert len(set(seen[0])) == BATCH  # without repetition
        drawn.append(seen[0])
    assert drawn[0] != drawn[1]


def with_sites(state, other):
    """A state with the sites of another fit."""
    return dataclasses.replace(state, approximation=other.approximation)


def converged(state) -> float:
    """The lowest loss of full batches at the hyperparameters of a state of `full_driver`."""
    driver, _ = full_driver()
    for _ in range(30):
        state, loss = driver.update(state, X, Y)
    return float(loss)


@pytest.mark.slow
def test_a_stochastic_fit_comes_close():
    """Batches as arguments: a rate that decays like 1/t averages their noise away."""
    whole, start = full_driver()
    driver = argument_driver()
    state = driver.svi.init(jax.random.key(1), X[:BATCH], Y[:BATCH])
    rng = np.random.RandomState(0)
    losses = []
    for i in range(150):
        if i in (0, 1):
            losses.append(float(whole.evaluate(with_sites(start, state), X, Y)))
        rows = rng.permutation(N)[:BATCH]
        state, _ = driver.update(state, X[rows], Y[rows])
    losses.append(float(whole.evaluate(with_sites(start, state), X, Y)))
    best = converged(start)
    # The loss is quadratic around its minimum, so the noise of 150 averaged batches costs about
    # 1/50 of that of one batch, which is eight nats.
    assert losses[0] > best + 10.0 and losses[1] > best + 1.0
    assert best - 1e-8 < losses[-1] < best + 0.2


@pytest.mark.slow
def test_a_stochastic_fit_of_everything():
    """A plate that subsamples: EM moves the hyperparameters too; predictions are whole."""
    driver = Driver(by_index, optax.adam(0.02), site_lr=lambda step: 1.0 / (1.0 + 0.3 * step))
    state = driver.svi.init(jax.random.key(0), X, Y)
    for _ in range(150):
        state, loss = driver.update(state, X, Y)
        assert np.isfinite(loss)
    # Full batches at the hyperparameters that this fit has found.
    whole, start = full_driver()
    free = driver.svi.free(state.optim_state)
    here = dataclasses.replace(with_sites(start, state), optim_state=free)
    best = converged(here)
    assert best < converged(start) - 0.5  # better than the initial hyperparameters allow
    # Above the minimum by the noise of the batches, and by what the sites lag behind.
    assert best - 1e-8 < float(whole.evaluate(here, X, Y)) < best + 0.2
    params = driver.svi.get_params(state)
    # The guide answers at all inputs, whatever the plate of the model would draw of them.
    q = driver.guide.marginals(params, X)["f"]
    assert q.mean.shape == (N,)
    np.testing.assert_allclose(q.mean, whole.guide.marginals(params, X)["f"].mean)
