"""The driver: SVI's interface, EM's steps, and nothing lost between one step and the next."""

import dataclasses
import inspect
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
from numpyro_tsvgp.infer.em import iteration
from numpyro_tsvgp.infer.em.optim import as_optimizer, evaluates_once

N, M = 30, 6
RNG = np.random.RandomState(7)
X = np.sort(RNG.rand(N))
Y = RNG.poisson(np.exp(1.0 + np.sin(7.0 * X))).astype(float)
Z = np.linspace(0.0, 1.0, M)
KEY = jax.random.key(0)


traces = 0  # how often the model below was run


def model(X, y=None):
    global traces
    traces += 1
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.param("lengthscale", 0.25, constraint=dist.constraints.positive)
    offset = numpyro.param("offset", 0.5)
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X, mean=offset))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


SITES = {f"f_auto_{x}" for x in ("linear", "quadratic", "inverse", "prior_mean", "anchor")}
FREE = {"variance_auto_loc", "lengthscale", "offset", "f_auto_inducing"}


class Driver:
    """A driver, its compiled update, and its initial state. Always a new guide, a new object."""

    def __init__(self, optim, **options):
        self.svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), optim, **options)
        self.update = jax.jit(self.svi.update)
        self.start = self.svi.init(KEY, X, Y)


@cache
def sites_only() -> Driver:
    return Driver(None, site_lr=1.0)


@cache
def adam() -> Driver:
    return Driver(optax.adam(0.03), e_steps=2)


def assert_identical(a, b):
    """Bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, _data(a), _data(b))


def assert_close(a, b, rtol=1e-9):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-11), a, b)


def _data(tree):
    """Random keys as numbers."""
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else np.asarray(x), tree)


# ---- interface -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["init", "update", "stable_update", "evaluate", "run"])
def test_arguments_are_named_as_in_svi(name):
    ours = list(inspect.signature(getattr(TSVGP, name)).parameters)
    theirs = list(inspect.signature(getattr(SVI, name)).parameters)
    # Derivatives of the bound are ours to choose; all other arguments are there, in order.
    theirs = [p for p in theirs if p != "forward_mode_differentiation"]
    assert [p for p in ours if p in theirs] == theirs


def test_parameters_are_constrained_and_states_are_not():
    driver = adam()
    start = {"lengthscale": 0.4, "variance_auto_loc": 2.0, "offset": -1.0}
    state = driver.svi.init(KEY, X, Y, init_params=start)
    params = driver.svi.get_params(state)
    for name, value in start.items():
        assert params[name] == pytest.approx(value, rel=1e-12)
    free = driver.svi.free(state.optim_state)
    assert set(free) == FREE and set(state.approximation) == SITES
    assert free["lengthscale"] == pytest.approx(np.log(0.4))
    with pytest.raises(ValueError, match=r"length_scale.*not parameters"):
        driver.svi.init(KEY, X, Y, init_params={"length_scale": 0.4})


# ---- compilation -----------------------------------------------------------------------------


@pytest.mark.slow
def test_one_compilation_for_one_shape():
    driver = adam()
    state, _ = driver.update(driver.start, X, Y)
    before = traces
    for i in range(4):  # other states, other data
        state, _ = driver.update(state, X + 0.01 * i, Y + i)
    assert traces == before
    assert driver.update._cache_size() == 1
    jax.eval_shape(lambda state: driver.svi.update(state, X, Y), state)  # the counter does count
    assert traces > before


def test_a_state_can_be_donated():
    """No two of its arrays share a buffer, and none is an array of the user's."""
    inducing = jnp.asarray(Z)
    for guide in (
        AutoDualGaussian(model, inducing=inducing),
        AutoDualGaussian(model, inducing=inducing, sites="untied"),
    ):
        state = TSVGP(model, guide, optax.adam(0.03)).init(KEY, X, Y)
        own = [
            x.unsafe_buffer_pointer()
            for x in jax.tree.leaves(dataclasses.replace(state, rng_key=None))
        ]
        theirs = [jnp.asarray(x).unsafe_buffer_pointer() for x in (inducing, X, Y)]
        assert len({*own, *theirs}) == len(own) + len(theirs)


@pytest.mark.slow
def test_runs_compile_once_however_long():
    """What is traced is the check of the state; the second run compiles nothing."""

    def traces_of_a_run(steps):
        before = traces
        adam().svi.run(KEY, steps, X, Y, init_state=adam().start, progress_bar=False)
        return traces - before

    first = traces_of_a_run(2)
    assert traces_of_a_run(2) == traces_of_a_run(25) <= first


# ---- run -------------------------------------------------------------------------------------


def test_progress_bar_and_resumed_runs_change_no_number(capfd):
    whole = adam().svi.run(KEY, 9, X, Y, progress_bar=False)
    assert whole._fields[:3] == ("params", "state", "losses")
    assert whole.losses.shape == (9,) and int(whole.state.step) == 9
    assert np.isfinite(whole.losses).all() and whole.losses[-1] < whole.losses[0]
    assert "loss" not in capfd.readouterr().err
    # With a bar, the first part only.
    first = adam().svi.run(KEY, 4, X, Y, progress_bar=True)
    shown = capfd.readouterr().err
    assert "4/4" in shown and f"init loss: {whole.losses[0]:.4f}" in shown
    assert_identical(first.losses, whole.losses[:4])
    # The rest on fresh objects that know nothing but the state, with another key.
    fresh = TSVGP(model, AutoDualGaussian(model, inducing=Z), optax.adam(0.03), e_steps=2)
    second = fresh.run(jax.random.key(99), 5, X, Y, init_state=first.state, progress_bar=False)
    assert_identical(second.losses, whole.losses[4:])
    assert_identical(second.params, whole.params)
    assert_identical(second.state, whole.state)
    # What `run` does is what `update` does.
    state = adam().start
    for loss in whole.losses:
        state, again = adam().update(state, X, Y)
        np.testing.assert_allclose(again, loss, rtol=1e-12)


def test_a_fresh_object_knows_all_from_the_state():
    """Parameters are constrained and fits are made by an object that never saw the data."""
    state = sites_only().update(sites_only().start, X, Y)[0]
    fresh = TSVGP(model, AutoDualGaussian(model, inducing=Z), None)
    assert fresh.get_params(state)["lengthscale"] == pytest.approx(0.25)
    ours, theirs = (svi.fit(state, X, Y).marginals(X[:3])["f"] for svi in (fresh, sites_only().svi))
    assert_identical(ours, theirs)
    with pytest.raises(TypeError, match="what svi.init returns"):
        fresh.update((1, 2), X, Y)


# ---- E-steps ---------------------------------------------------------------------------------


def test_without_optimizer_only_sites_move():
    driver = sites_only()
    state, loss = driver.update(driver.start, X, Y)
    assert set(state.optim_state) == FREE  # the free parameters themselves, unconstrained
    assert_identical(state.optim_state, driver.start.optim_state)
    for name in ("f_auto_linear", "f_auto_quadratic"):
        assert np.abs(state.approximation[name] - driver.start.approximation[name]).max() > 0.1
    # The loss is that of the new state, and evaluating it takes no step.
    evaluate = jax.jit(driver.svi.evaluate)
    assert_close(evaluate(state, X, Y), loss)
    assert loss < evaluate(driver.start, X, Y) - 1.0


def test_the_rate_blends_sites():
    """lambda <- (1 - r) lambda + r target, with the rate of the schedule at each step."""
    full = sites_only()
    rates = jnp.array([0.3, 0.6])
    slow = Driver(None, site_lr=lambda step: rates[step])
    state = full.update(full.start, X, Y)[0]  # not zero
    state = dataclasses.replace(state, step=jnp.zeros_like(state.step))
    for rate in rates:
        target = full.update(state, X, Y)[0].approximation
        new = slow.update(state, X, Y)[0]
        for name in ("f_auto_linear", "f_auto_quadratic"):
            blended = (1 - rate) * state.approximation[name] + rate * target[name]
            np.testing.assert_allclose(new.approximation[name], blended, rtol=1e-10, atol=1e-12)
        state = new
    assert int(state.step) == 2


def test_e_steps():
    """Three site updates in one iteration are three iterations without optimizer."""
    three = Driver(None, site_lr=1.0, e_steps=3)
    once, loss = three.update(three.start, X, Y)
    state = sites_only().start
    for _ in range(3):
        state, last = sites_only().update(state, X, Y)
    assert_close(once.approximation, state.approximation)
    assert_close(loss, last)


# ---- M-steps ---------------------------------------------------------------------------------


def test_m_steps():
    """One iteration: an E-step, then optimizer steps on the bound with its sites held."""
    driver = Driver(optax.adam(0.03), site_lr=1.0, m_steps=3)
    state, loss = driver.update(driver.start, X, Y)
    full = sites_only()
    held = full.update(full.start, X, Y)[0]
    assert_close(state.approximation, held.approximation)

    @jax.jit
    @jax.value_and_grad
    def objective(free):
        return full.svi.evaluate(dataclasses.replace(held, optim_state=free), X, Y)

    optim = optax.adam(0.03)
    free, moments = full.start.optim_state, optim.init(full.start.optim_state)
    for _ in range(3):
        value, gradient = objective(free)
        updates, moments = optim.update(gradient, moments)
        free = optax.apply_updates(free, updates)
    assert_close(driver.svi.free(state.optim_state), free)
    assert_close(loss, value)  # the loss before the last of the three steps


@pytest.mark.slow
def test_one_evaluation_for_both_steps_is_both_steps(monkeypatch):
    """With one M-step the E-step is part of its evaluation; that changes no number."""
    apart, together = Driver(optax.adam(0.03), e_steps=2), adam()
    a, b = apart.start, together.start
    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(iteration, "evaluates_once", lambda *_: False)
            a, loss_a = apart.update(a, X, Y)
        b, loss_b = together.update(b, X, Y)
        assert_close(loss_a, loss_b)
    assert_close(_data(a), _data(b), rtol=1e-8)


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        (optax.adam(0.1), True),
        (optax.chain(optax.clip(1.0), optax.sgd(0.1)), True),
        (numpyro.optim.Adam(0.1), True),
        (optax.lbfgs(), False),
        (optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3)), False),
        (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), False),
        (numpyro.optim.Minimize(), False),
    ],
    ids=["adam", "chain", "numpyro", "lbfgs", "line search", "plateau", "minimize"],
)
def test_which_optimizers_evaluate_once(optim, expected):
    """Line searches must not meet an objective whose sites move with its argument."""
    optim = as_optimizer(optim)
    state = optim.init({"a": jnp.ones(2), "b": jnp.zeros(())})
    assert evaluates_once(optim, state) == expected


@pytest.mark.slow
def test_optimizers_of_numpyro_and_of_optax():
    """Adam is Adam, with the state of either."""
    theirs = Driver(numpyro.optim.Adam(0.03), e_steps=2)
    a, b = theirs.start, adam().start
    for _ in range(3):
        (a, loss_a), (b, loss_b) = theirs.update(a, X, Y), adam().update(b, X, Y)
        assert_close(loss_a, loss_b)
    assert_close(theirs.svi.get_params(a), adam().svi.get_params(b), rtol=1e-7)


# ---- steps that fail -------------------------------------------------------------------------


def test_stable_update_keeps_everything_of_the_last_good_state():
    driver = adam()
    stable = jax.jit(driver.svi.stable_update)
    good = driver.update(driver.start, X, Y)[0]
    poisoned = np.where(np.arange(N) == 3, np.nan, Y)
    broken, loss = driver.update(good, X, poisoned)
    assert not np.isfinite(loss) and not np.isfinite(broken.approximation["f_auto_linear"]).all()
    kept, loss = stable(good, X, poisoned)
    assert np.isnan(loss)
    # Sites, hyperparameters, and the moments and the count of the optimizer.
    assert_identical(kept.approximation, good.approximation)
    assert_identical(kept.optim_state, good.optim_state)
    # The step is over: time and randomness go on, so that a bad batch is not drawn for ever.
    assert int(kept.step) == int(good.step) + 1 and int(kept.rejected) == 1
    assert (jax.random.key_data(kept.rng_key) != jax.random.key_data(good.rng_key)).any()
    # With good data it does what `update` does.
    after, loss = stable(kept, X, Y)
    expected, expected_loss = driver.update(kept, X, Y)
    assert_close(loss, expected_loss)
    assert_close(after.approximation, expected.approximation)
    assert int(after.rejected) == 1
