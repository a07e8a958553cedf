"""Minibatches, written in the three ways that NumPyro has: N/|M| counts once, in the likelihood."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import Predictive

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

N, BATCH, M = 36, 12, 6
RNG = np.random.RandomState(3)
X = jnp.asarray(RNG.rand(N))  # JAX arrays, which can be indexed by traced ones
Y = jnp.asarray(RNG.poisson(np.exp(1.0 + np.sin(7.0 * X))))
Z = np.linspace(0.0, 1.0, M)
BATCHES = jnp.asarray(RNG.permutation(N).reshape(-1, BATCH))


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    """Each model here is compiled for a few small steps: optimizing the code costs more."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


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
        self.guide = AutoDualGaussian(model, inducing=Z)
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
    sites = driver.update(state, *args)[0].sites
    return {what: sites[f"f_auto_{what}"] for what in ("linear", "quadratic")}


def assert_average(batches, whole):
    """The average over disjoint batches is the whole, up to the order of sums."""
    average = jax.tree.map(lambda *parts: np.mean(parts, axis=0), *batches)
    for what, value in whole.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(average[what], value, rtol=1e-9, atol=1e-11 * scale)
        # Not vacuous: a batch is not the whole.
        assert np.abs(batches[0][what] - value).max() > 1e-2 * scale


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
    # The bound too: N/|M| stands before the likelihood, not before KL and hyperprior.
    losses = [float(driver.evaluate(state, rows, X, Y)) for rows in BATCHES]
    assert np.mean(losses) == pytest.approx(float(whole.evaluate(state, X, Y)), rel=1e-10)
    assert np.ptp(losses) > 0.1


def test_batches_as_arguments_average_to_the_whole():
    whole, state = full_driver()
    driver = Driver(by_argument, site_lr=1.0)
    batches = [(X[rows], Y[rows]) for rows in BATCHES]
    driver.svi.init(jax.random.key(0), *batches[0])
    assert_average([targets(driver, state, *b) for b in batches], targets(whole, state, X, Y))
    losses = [float(driver.evaluate(state, *b)) for b in batches]
    assert np.mean(losses) == pytest.approx(float(whole.evaluate(state, X, Y)), rel=1e-10)


def test_one_update_draws_one_batch():
    """E-step and M-step see the same random rows, the next update sees others."""
    seen = []

    def model(X, y=None):
        data = numpyro.plate("data", X.shape[0], subsample_size=BATCH)
        with data as rows:
            if not isinstance(rows, jax.core.Tracer):
                seen.append(tuple(np.asarray(rows)))
        f = gp(X[rows])
        with data:
            observe(f, None if y is None else y[rows])

    svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), optax.adam(0.01))
    state = svi.init(jax.random.key(0), X, Y)
    drawn = []
    for _ in range(2):
        seen.clear()
        state, _ = svi.update(state, X, Y)  # not compiled, so that the indices are numbers
        assert len(seen) >= 2 and len(set(seen)) == 1
        assert len(set(seen[0])) == BATCH
        drawn.append(seen[0])
    assert drawn[0] != drawn[1]


@cache
def optimum() -> float:
    """The loss of converged sites at the initial hyperparameters."""
    driver, state = full_driver()
    for _ in range(30):
        state, loss = driver.update(state, X, Y)
    return float(loss)


@pytest.mark.parametrize("name", [*IN_MODEL, "by_argument"])
def test_a_stochastic_fit_comes_close(name):
    """A rate that decays like 1/t averages the noise of the batches away."""
    whole, start = full_driver()
    model = {**IN_MODEL, "by_argument": by_argument}[name]
    driver = Driver(model, site_lr=lambda step: 1.0 / (1.0 + 0.3 * step))
    args = (X[:BATCH], Y[:BATCH]) if name == "by_argument" else (X, Y)
    state = driver.svi.init(jax.random.key(1), *args)
    first = float(whole.evaluate(start._replace(sites=state.sites), X, Y))
    rng = np.random.RandomState(0)
    for _ in range(150):
        if name == "by_argument":
            rows = rng.permutation(N)[:BATCH]
            args = X[rows], Y[rows]
        state, _ = driver.update(state, *args)
    loss = float(whole.evaluate(start._replace(sites=state.sites), X, Y))
    # The loss is quadratic around the optimum: 150 steps leave about 1/50 of a nat of noise, where
    # the start is tens of nats away. The sites of one batch alone cost more than a nat.
    assert optimum() - 1e-8 < loss < optimum() + 0.2
    assert first > optimum() + 10.0


def test_the_default_rate_follows_the_batch():
    """0.5 sqrt(|M| / N), however the model says what N and |M| are."""
    for model in IN_MODEL.values():
        svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), None)
        svi.init(jax.random.key(0), X, Y)
        assert svi._rate(0) == pytest.approx(0.5 * np.sqrt(BATCH / N))
    whole, _ = full_driver()
    assert TSVGP(full, whole.guide, None)._rate(0) == 0.5


def test_hyperparameters_and_predictions_of_a_minibatch_fit():
    """EM on minibatches moves the hyperparameters too, and the fit predicts without batches."""
    driver = Driver(by_index, optax.adam(0.02))
    state = driver.svi.init(jax.random.key(0), X, Y)
    losses = []
    for _ in range(200):
        state, loss = driver.update(state, X, Y)
        losses.append(float(loss))
    assert np.isfinite(losses).all()
    whole, _ = full_driver()
    assert np.mean(losses[-50:]) < optimum()  # better than the initial hyperparameters allow
    params = driver.svi.get_params(state)
    new = jnp.linspace(0.0, 1.0, 7)
    q = driver.guide.marginals(params, new, batch=7)["f"]
    np.testing.assert_allclose(q.mean, whole.guide.marginals(params, new)["f"].mean)
    draws = Predictive(by_index, guide=driver.guide, params=params, num_samples=5)(
        jax.random.key(0), new, batch=7
    )
    assert draws["y"].shape == (5, 7)
