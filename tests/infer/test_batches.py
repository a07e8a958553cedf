"""Batches from any iterable: runs that load them ahead, exact passes over all of them."""

import itertools
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import xarray as xr

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    FitError,
    Riemannian,
    influence,
    kernels,
    loo,
)
from numpyro_tsvgp.infer.feed.prefetch import Prefetched

N, M = 60, 6
RNG = np.random.RandomState(0)
X = RNG.rand(N)
Y = RNG.poisson(np.exp(1.0 + np.sin(7.0 * X)))
Z = np.linspace(0.0, 1.0, M)
BATCHES = [(X[i : i + 25], Y[i : i + 25]) for i in range(0, N, 25)]  # the last one is ragged
STEPS = 12


def model(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(kernels.RBF(0.3, variance), X))
    with numpyro.plate("data", X.shape[0] if y is None else N, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def make(**options):
    return TSVGP(model, AutoDualGaussian(model, inducing=Z), optax.adam(0.01), **options)


def run(svi, batches, steps=STEPS, **options):
    return svi.run(jax.random.key(0), steps, batches=batches, progress_bar=False, **options)


@pytest.fixture(scope="module")
def svi():
    return make()


@pytest.fixture(scope="module")
def result(svi):
    return run(svi, BATCHES)


@pytest.mark.slow
def test_batches_give_what_a_loop_of_updates_gives(svi, result):
    state = svi.init(jax.random.key(0), *BATCHES[0])
    update = jax.jit(svi.update)
    losses = []
    for batch in itertools.islice(itertools.cycle(BATCHES), STEPS):
        state, loss = update(state, *batch)
        losses.append(loss)
    np.testing.assert_array_equal(result.losses, jnp.stack(losses))
    assert svi.compiled_update._cache_size() == 2  # one more for the ragged batch
    assert result.fit.call is None
    with pytest.raises(ValueError, match="without its training data"):
        loo(result.fit)


def test_any_iterable_will_do(svi, result):
    class Loader:  # starts again at its end
        def __iter__(self):
            return ({"X": x, "y": y} for x, y in BATCHES)

    endless = (list(batch) for batch in itertools.cycle(BATCHES))
    for batches in (Loader(), endless):
        np.testing.assert_array_equal(run(svi, batches).losses, result.losses)
    # No more is taken from an iterator than is used.
    np.testing.assert_array_equal(next(endless)[0], BATCHES[STEPS % 3][0])


def test_an_iterator_that_ends_ends_the_run(svi, result):
    with pytest.warns(UserWarning, match="ended after 3 of 12"):
        short = run(svi, iter(BATCHES))
    np.testing.assert_array_equal(short.losses, result.losses[:3])
    with pytest.raises(ValueError, match="batches is empty"):
        run(svi, iter([]))
    with pytest.raises(TypeError, match="iterable of tuples"):
        run(svi, 7)
    with pytest.raises(ValueError, match="come from the batches"):
        svi.run(jax.random.key(0), 2, X, batches=BATCHES)


def test_a_bad_value_is_named_when_its_batch_arrives(svi):
    bad = [(x, y.astype(float)) for x, y in BATCHES]
    bad[2][1][4] = np.nan
    with pytest.raises(ValueError, match=r"Batch 2 .* site 'y' at index 4: .* missing"):
        run(svi, bad)
    bad = [(x.copy(), y.copy()) for x, y in BATCHES]
    bad[1][1][7] = -1
    with pytest.raises(ValueError, match=r"Batch 1 .* site 'y' at index 7: .* support of Poisson"):
        run(svi, bad)
    bad = [(x.copy(), y) for x, y in BATCHES]
    bad[1][0][3] = np.inf
    with pytest.raises(ValueError, match=r"Batch 1 .* GP site 'f' .* at index 3"):
        run(svi, bad)


def test_errors_of_a_loader_arrive(svi):
    def broken():
        yield BATCHES[0]
        yield BATCHES[1]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as caught:
        run(svi, broken())
    assert "batch 2 was loaded" in caught.value.__notes__[0]
    assert not [t for t in threading.enumerate() if t.name == "batches" and t.is_alive()]


def test_loading_overlaps_computing():
    ahead = threading.Event()

    def loader():
        yield 0
        yield 1
        ahead.set()  # two were loaded, and a third is asked for, while the first is worked on
        yield 2

    values = Prefetched(loader(), 2)
    assert next(values) == 0
    assert ahead.wait(timeout=60)
    assert list(values) == [1, 2]
    endless = Prefetched(itertools.count(), 2)
    assert next(endless) == 0
    endless.close()
    assert list(endless) == []


class Resumable:
    """A loader in a random order that can tell its place, as those of grain do."""

    def __init__(self, stop_after=None):
        self.stop_after = stop_after

    def __iter__(self):
        return _Iterator(self.stop_after)


class _Iterator:
    def __init__(self, stop_after):
        self.place, self.stop_after = 0, stop_after

    def __next__(self):
        if self.place == self.stop_after:
            raise KeyboardInterrupt
        self.place += 1
        rows = np.random.RandomState(self.place).choice(N, 25, replace=False)
        return X[rows], Y[rows]

    def get_state(self):
        return {"place": np.int64(self.place)}

    def set_state(self, state):
        self.place = state["place"]


def test_a_stopped_run_goes_on_with_the_batches_it_would_have_seen(svi, tmp_path):
    whole = run(svi, Resumable())
    path = tmp_path / "run.npz"
    with pytest.warns(UserWarning, match="Interrupted after 7 of 12"):
        run(svi, Resumable(stop_after=7), checkpoint=path, checkpoint_every=5)
    resumed = run(svi, Resumable(), checkpoint=path, checkpoint_every=5)
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    for name, value in whole.params.items():
        np.testing.assert_array_equal(resumed.params[name], value)


@pytest.mark.slow
def test_a_list_goes_on_at_its_place_and_a_generator_says_that_it_cannot(svi, result, tmp_path):
    path = tmp_path / "run.npz"

    class Stopped(list):
        def __getitem__(self, i):
            self.asked = getattr(self, "asked", 0) + 1
            if self.asked > 8:
                raise KeyboardInterrupt
            return super().__getitem__(i)

    with pytest.warns(UserWarning, match="Interrupted after 8 of 12"):
        run(svi, Stopped(BATCHES), checkpoint=path, checkpoint_every=4)
    np.testing.assert_array_equal(run(svi, BATCHES, checkpoint=path).losses, result.losses)
    path.unlink()
    run(svi, itertools.cycle(BATCHES), 6, checkpoint=path)
    with pytest.warns(UserWarning, match="cannot tell their place"):
        more = run(svi, itertools.cycle(BATCHES), checkpoint=path)
    assert len(more.losses) == STEPS
    np.testing.assert_array_equal(more.losses, result.losses)  # six batches are two passes
    with pytest.raises(ValueError, match="the data is not the same"):
        run(svi, [(x[:9], y[:9]) for x, y in BATCHES], checkpoint=path)


@pytest.mark.slow
def test_grain_goes_on_bit_for_bit(svi, tmp_path):
    grain = pytest.importorskip("grain", reason="grain, the extra [large], is not installed")

    def loader():
        data = grain.MapDataset.range(N).seed(3).shuffle().repeat()
        return data.map(lambda i: (X[i], Y[i])).batch(20).to_iter_dataset()

    whole = run(svi, loader())
    path = tmp_path / "run.npz"

    class Interrupted:
        def __init__(self):
            self.inner, self.count = iter(loader()), 0

        def __iter__(self):
            return self

        def __next__(self):
            self.count += 1
            if self.count > 7:
                raise KeyboardInterrupt
            return next(self.inner)

        def get_state(self):
            return self.inner.get_state()

        def set_state(self, state):
            self.inner.set_state(state)

    with pytest.warns(UserWarning, match="Interrupted after 7"):
        run(svi, Interrupted(), checkpoint=path, checkpoint_every=5)
    np.testing.assert_array_equal(run(svi, loader(), checkpoint=path).losses, whole.losses)


@pytest.mark.slow
def test_the_default_rate_follows_the_size_of_each_batch(svi):
    state = svi.init(jax.random.key(0), *BATCHES[2])  # ten rows
    by_default, _ = jax.jit(svi.update)(state, X, Y)
    by_number, _ = jax.jit(make(site_lr=0.5).update)(state, X, Y)  # that of all rows
    np.testing.assert_array_equal(
        by_default.approximation["f_auto_linear"], by_number.approximation["f_auto_linear"]
    )


# ---- a start that overshoots, and a fit that cannot go on ---------------------------------------


@pytest.mark.slow
def test_a_start_that_overshoots_is_replaced_in_runs_and_in_loops_of_ones_own():
    counts = np.full(N, 300)  # from a log rate of 0 a Newton step asks for 300
    batches = [(X[i::3], counts[i::3]) for i in range(3)]
    svi = make()
    losses = run(svi, batches, 15).losses
    assert np.isfinite(losses).all() and losses[0] < 1e4 * N
    state = svi.init(jax.random.key(0), *batches[0])
    naive, careful = [], []
    start, update = state, jax.jit(svi.update)
    for batch in batches:
        start, loss = update(start, *batch)
        naive.append(float(loss))
    assert not max(naive) < 1e6 * N  # or there would be nothing to protect from
    with svi.protected() as loop:
        for batch in batches * 5:
            state, loss = loop.update(state, *batch)
            careful.append(float(loss))
        with pytest.raises(ValueError, match=r"Batch 15 .* missing"):
            loop.update(state, X, np.full(N, np.nan))
    assert np.isfinite(careful).all() and max(careful[3:]) < 1e4 * N


@pytest.mark.slow
def test_a_fit_that_cannot_go_on_says_so_and_holds_the_last_good_result():
    svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), optax.sgd(1e6))
    with pytest.raises(FitError, match="no longer finite after") as caught:
        run(svi, BATCHES)
    assert np.isfinite(caught.value.result.losses).all()


# ---- passes over all data ----------------------------------------------------------------------


def test_passes_over_batches_equal_all_rows_at_once(svi, result):
    state, fit = result.state, result.fit
    exact = svi.evaluate(state, X, Y)
    np.testing.assert_allclose(svi.evaluate(state, batches=iter(BATCHES)), exact, rtol=1e-13)
    by_batches, loss = svi.full_e_step(state, BATCHES, rate=0.7)
    at_once, _ = svi.full_e_step(state, [(X, Y)], rate=0.7)
    np.testing.assert_allclose(loss, exact, rtol=1e-13)
    for name, value in at_once.approximation.items():
        np.testing.assert_allclose(by_batches.approximation[name], value, rtol=1e-9, atol=1e-12)
    # And both are the E-step of an update on all rows.
    key = jax.random.split(state.rng_key)[1]
    call = fit.with_data(X, Y).call
    updated, *_ = jax.jit(svi.e_step)(state, key, call, 0.7)
    for name, value in updated.approximation.items():
        np.testing.assert_allclose(at_once.approximation[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_point_results_over_batches_equal_all_rows_at_once(result, tmp_path):
    fit, whole = result.fit, result.fit.with_data(X, Y).of_all_data()
    maps = [np.lib.format.open_memmap(tmp_path / f"{i}.npy", "w+", shape=(N,)) for i in range(2)]
    assert fit.marginals(batches=((x,) for x, _ in BATCHES), out={"f": maps}) == N
    mean, variance = fit.marginals(X)["f"]
    np.testing.assert_allclose(maps[0], mean, rtol=1e-12)
    np.testing.assert_allclose(maps[1], variance, rtol=1e-12)
    parts = list(fit.marginals(batches=[(x,) for x, _ in BATCHES]))
    assert [part["f"].mean.shape for part in parts] == [(25,), (25,), (10,)]
    with pytest.raises(ValueError, match="room for 60 rows"):
        fit.marginals(batches=[(X,), (X,)], out={"f": maps})
    out = np.lib.format.open_memmap(tmp_path / "loo.npy", "w+", shape=(3, N))
    exact = loo(whole)
    for found in (loo(fit, batches=BATCHES), loo(fit, batches=BATCHES, out=out)):
        np.testing.assert_allclose(found["leverage"], exact["leverage"], rtol=1e-12)
        p = "p" if hasattr(exact, "p") else "p_loo"
        assert float(found[p]) == pytest.approx(float(exact[p]), rel=1e-10)
    moved = xr.concat(list(influence(fit, delta=True, batches=BATCHES)), "data")
    xr.testing.assert_allclose(moved, influence(whole, delta=True), rtol=1e-10)


@pytest.mark.slow
def test_passes_refuse_what_would_not_be_exact(svi, result):
    state = result.state
    with pytest.raises(ValueError, match="50 rows in all, but the plate of the model has 60"):
        svi.evaluate(state, batches=BATCHES[:2])
    with pytest.raises(ValueError, match="more rows than the 60"):
        svi.evaluate(state, batches=itertools.cycle(BATCHES))
    with pytest.raises(ValueError, match="do not average"):
        make(rule=Riemannian()).full_e_step(state, BATCHES)
    with pytest.raises(ValueError, match="neither mcmc nor refine"):
        loo(result.fit, batches=BATCHES, refine=2)

    def of_its_own_size(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    other = TSVGP(of_its_own_size, AutoDualGaussian(of_its_own_size, inducing=Z), None)
    state = other.init(jax.random.key(0), *BATCHES[0])
    with pytest.raises(ValueError, match="for all data: its plate has the size of the batch"):
        other.evaluate(state, batches=BATCHES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.evaluate(state, batches=BATCHES[:1])
