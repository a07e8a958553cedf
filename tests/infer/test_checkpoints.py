"""Fits in files: what is saved comes back, a killed run ends as if it had not been, and no run
goes on from a checkpoint of another."""

import dataclasses
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    TSVGPState,
    kernels,
    load,
    save,
)
from numpyro_tsvgp.infer.em import loop
from numpyro_tsvgp.infer.files.fingerprint import fingerprint

positive = dist.constraints.positive

N = 30
RNG = np.random.RandomState(0)
X = np.sort(RNG.rand(N))
Y = np.sin(6.0 * X) + 0.1 * RNG.randn(N)
Z = np.linspace(0.0, 1.0, 6)


def model(X, y=None):
    lengthscale = numpyro.param("lengthscale", 0.3, constraint=positive)
    variance = numpyro.param("variance", 1.0, constraint=positive)
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def make(optim=None, *, inducing=Z, model=model, **options):
    guide = AutoDualGaussian(model, inducing=inducing, learn_inducing=False)
    return TSVGP(model, guide, optim, **options)


def run(svi, steps, *args, **options):
    return svi.run(jax.random.key(0), steps, *args, progress_bar=False, **options)


def leaves(tree):
    """Leaves as NumPy arrays, random keys as their data."""
    keys = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x)
        for x in jax.tree.leaves(tree)
    ]


def identical(a, b):
    """The same arrays, bit for bit, in the same structure."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(leaves(a), leaves(b), strict=True)
    )


def finite(tree):
    return all(np.isfinite(x).all() for x in leaves(tree))


@pytest.fixture(scope="module")
def straight():
    """A run that nothing happens to."""
    return run(make(optax.adam(0.05)), 40, X, Y)


# ---- files -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "adam": optax.adam(0.05),
    "lbfgs": optax.lbfgs(),
    "numpyro": numpyro.optim.Adam(0.05),
    "none": None,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_come_back(tmp_path, name):
    svi = make(OPTIMIZERS[name])
    state = svi.init(jax.random.key(7), X, Y)
    state = dataclasses.replace(state, step=state.step + 3)
    save(tmp_path / "state", state)
    fresh = make(OPTIMIZERS[name])
    loaded = load(tmp_path / "state", like=fresh.init(jax.random.key(0), X, Y))
    assert isinstance(loaded, TSVGPState)
    assert identical(loaded, state)
    assert os.listdir(tmp_path) == ["state"]


def test_results_come_back(tmp_path, straight):
    path = tmp_path / "fit.npz"
    save(path, straight)
    assert identical(load(path, like=straight), straight)
    # Without `like`, in another process, the parameters are all that prediction needs.
    loaded = load(path)
    assert sorted(loaded) == ["losses", "params", "state"]
    assert identical(loaded["params"], straight.params)
    svi = make(optax.adam(0.05))
    marginals = svi.guide.marginals(loaded["params"], X[:4])["f"]
    assert identical(marginals, straight.fit.marginals(X[:4])["f"])
    # The state of a result can be gone on from by a fresh object.
    state = load(path, like=svi.init(jax.random.key(3), X, Y))
    assert identical(state, straight.state)


def test_fits_come_back(tmp_path, straight):
    path = tmp_path / "fit.npz"
    save(path, straight.fit)
    loaded = load(path, model=model)
    assert identical(loaded.params, straight.fit.params)
    assert loaded.structure == straight.fit.structure and loaded.rule == straight.fit.rule
    assert identical(loaded.marginals(X[:4])["f"], straight.fit.marginals(X[:4])["f"])
    with pytest.raises(ValueError, match=r"without its training data.*fit\.with_data\(X, y\)"):
        loaded.marginals()
    save(tmp_path / "result.npz", straight)
    with pytest.raises(ValueError, match=r"a state or a result and not a fit.*save result\.fit"):
        load(tmp_path / "result.npz", model=model)


def test_fit_of_another_model(tmp_path, straight):
    def other(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(numpyro.param("scale", 0.3)), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    save(tmp_path / "fit.npz", straight.fit)
    with pytest.raises(ValueError, match=r"no \['scale'\], which the model of GP site 'f' has"):
        load(tmp_path / "fit.npz", model=other).marginals(X[:4])


def test_old_style_keys_come_back(tmp_path):
    svi = make()
    state = svi.init(jax.random.PRNGKey(0), X, Y)
    save(tmp_path / "state", state)
    assert identical(load(tmp_path / "state", like=state), state)


def test_file_describes_itself(tmp_path, straight):
    save(tmp_path / "fit.npz", straight)
    with np.load(tmp_path / "fit.npz", allow_pickle=False) as archive:
        description = json.loads(archive["description.json"].tobytes())
    assert description["format"] == "numpyro_tsvgp fit"
    assert {"numpyro-tsvgp", "numpyro", "jax"} <= set(description["versions"])
    entries = {"/".join(e["path"]): e for e in description["entries"]}
    assert entries["params/f_auto_linear"]["shape"] == [1, 6]
    assert entries["params/f_auto_linear"]["dtype"] == "float64"


def test_truncated_files(tmp_path, straight):
    path = tmp_path / "fit.npz"
    save(path, straight)
    whole = path.read_bytes()
    for length in np.linspace(0, len(whole) - 1, 12).astype(int):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"fit\.npz' is not a complete numpyro_tsvgp fit"):
            load(path)


def test_damaged_files(tmp_path, straight):
    """A flipped byte is an error or has no effect; it never changes a number."""
    path = tmp_path / "fit.npz"
    save(path, straight)
    whole = path.read_bytes()
    errors = 0
    for position in np.linspace(0, len(whole) - 1, 40).astype(int):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            assert identical(load(path, like=straight), straight)
        except ValueError:
            errors += 1
    assert errors > 20  # most bytes matter


def _archive(path, description, **arrays):
    text = np.frombuffer(json.dumps(description).encode(), np.uint8)
    with open(path, "wb") as file:
        np.savez(file, **arrays, **{"description.json": text})


ENTRY = {"path": ["x"], "array": "a0", "shape": [2], "dtype": "float64", "key": None}
HEAD = {"format": "numpyro_tsvgp fit", "format_version": 2, "meta": {}}


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ({"format": "something else"}, "an archive of something else"),
        ({**HEAD, "format_version": 99, "entries": []}, "newer version"),
        ({**HEAD, "format_version": 1, "entries": []}, r"version 0\.1 .*fit the model again"),
        ({**HEAD, "entries": [{**ENTRY, "array": "a1"}]}, "a1"),
        ({**HEAD, "entries": [{**ENTRY, "shape": [3]}]}, "x is not the array that its description"),
        ({**HEAD, "entries": [{**ENTRY, "key": "no such generator"}]}, "no such generator"),
        ({**HEAD, "entries": [{**ENTRY, "path": None}]}, "a path that is not a list of names"),
        ({**HEAD, "entries": [{**ENTRY, "path": [["x"]]}]}, "a path that is not a list of names"),
        ({**HEAD, "entries": [ENTRY, ENTRY]}, "two arrays in one place"),
        ({**HEAD, "entries": [ENTRY, {**ENTRY, "path": ["x", "y"]}]}, "two arrays in one place"),
        ({**HEAD, "entries": ["a0"]}, ""),
        ([], ""),
        (HEAD, "entries"),
    ],
)
def test_foreign_archives(tmp_path, description, reason):
    path = tmp_path / "other.npz"
    _archive(path, description, a0=np.ones(2))
    with pytest.raises(ValueError, match=rf"not a complete numpyro_tsvgp fit.*{reason}"):
        load(path)


def test_arrays_that_are_not_of_numbers(tmp_path):
    path = tmp_path / "other.npz"
    for array in (np.array(["a", "b"]), np.zeros(2, [("x", float)])):
        entry = {**ENTRY, "dtype": str(array.dtype)}
        _archive(path, {**HEAD, "entries": [entry]}, a0=array)
        with pytest.raises(ValueError, match="x is of type .*not of numbers"):
            load(path)


def test_compressed_files_are_not_expanded(tmp_path):
    """A hundred megabytes of zeros in a file of a tenth of one."""
    path = tmp_path / "bomb.npz"
    entry = {**ENTRY, "shape": [100, 131072]}
    text = np.frombuffer(json.dumps({**HEAD, "entries": [entry]}).encode(), np.uint8)
    with open(path, "wb") as file:
        np.savez_compressed(file, a0=np.zeros((100, 131072)), **{"description.json": text})
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    with pytest.raises(ValueError, match="it is compressed, which what numpyro_tsvgp writes"):
        load(path)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


@pytest.mark.parametrize(
    "fit",
    [{}, [], {"guide": 3}, {"rule": {"class": "Riemannian", "fields": {"no": 1}}}, {"rule": "x"}],
)
def test_descriptions_that_cannot_be_followed(tmp_path, fit):
    path = tmp_path / "other.npz"
    entry = {**ENTRY, "path": ["params", "x"]}
    _archive(path, {**HEAD, "entries": [entry], "meta": {"fit": fit}}, a0=np.ones(2))
    with pytest.raises(ValueError, match="not a complete numpyro_tsvgp fit.*cannot be followed"):
        load(path, model=lambda X: None)


def test_other_files(tmp_path):
    np.savez(tmp_path / "arrays.npz", x=np.ones(2))
    np.save(tmp_path / "array.npy", np.ones(2))
    (tmp_path / "text").write_text("not an archive")
    for name, reason in (
        ("arrays.npz", "no description"),
        ("array.npy", "not an archive"),
        ("text", "not an archive"),
    ):
        with pytest.raises(ValueError, match=f"{name}' is not a complete .*{reason}"):
            load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing")


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_files_run_no_code(tmp_path):
    trap = tmp_path / "trap"
    entry = {**ENTRY, "shape": [1], "dtype": "object"}
    array = np.array([Malicious(str(trap))], dtype=object)
    _archive(tmp_path / "inside.npz", {**HEAD, "entries": [entry]}, a0=array)
    (tmp_path / "raw").write_bytes(pickle.dumps(Malicious(str(trap))))
    for name in ("inside.npz", "raw"):
        with pytest.raises(ValueError, match=f"{name}' is not a complete numpyro_tsvgp fit"):
            load(tmp_path / name)
    assert not trap.exists()
    pickle.loads((tmp_path / "raw").read_bytes())
    assert trap.exists()  # the trap works


def test_objects_are_not_saved(tmp_path):
    with pytest.raises(TypeError, match="params/x is not an array: Malicious"):
        save(tmp_path / "fit.npz", {"params": {"x": Malicious("")}})
    assert os.listdir(tmp_path) == []


def test_fits_of_another_kind(tmp_path, straight):
    path = tmp_path / "fit.npz"
    save(path, straight)
    key = jax.random.key(0)
    other = make(numpyro.optim.Momentum(0.1, 0.9)).init(key, X, Y)
    with pytest.raises(ValueError, match=r"belongs to another fit: it lacks .*optimizer"):
        load(path, like=other)
    other = make(optax.adam(0.1), inducing=Z[:4]).init(key, X, Y)
    pattern = r"another fit: approximation/f_auto_\w+ has shape \(.*6.*\) .*\(.*4.*\).*of inducing"
    with pytest.raises(ValueError, match=pattern):
        load(path, like=other)
    jax.config.update("jax_enable_x64", False)  # the fixture restores it
    with pytest.raises(ValueError, match=r"params/f_auto_\w+ in .* is float64.*jax_enable_x64"):
        load(path)


def test_types_that_differ(tmp_path, straight):
    path = tmp_path / "fit.npz"
    save(path, straight)
    other = straight._replace(losses=straight.losses.astype("float32"))
    with pytest.raises(ValueError, match=r"losses has shape \(40,\) and type float64.*float32"):
        load(path, like=other)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_failure_while_writing_leaves_the_old_file(tmp_path, monkeypatch, straight, error):
    path = tmp_path / "fit.npz"
    save(path, straight)
    whole = path.read_bytes()

    def broken(file, **arrays):
        file.write(b"half of an archive")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", broken)
        with pytest.raises(type(error)):
            save(path, straight._replace(losses=straight.losses * 2))
    assert path.read_bytes() == whole
    assert os.listdir(tmp_path) == ["fit.npz"]
    # The same for a failure of the last step, the move into place.
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            save(path, straight._replace(losses=straight.losses * 2))
    assert path.read_bytes() == whole
    assert os.listdir(tmp_path) == ["fit.npz"]


# ---- checkpoints -----------------------------------------------------------------------------


@pytest.fixture
def saved(monkeypatch):
    """After how many updates checkpoints were written."""
    counts = []
    write = loop.write_tree

    def counted(path, result, meta):
        counts.append(len(result.losses))
        write(path, result, meta)

    monkeypatch.setattr(loop, "write_tree", counted)
    return counts


def test_run_goes_on_from_a_checkpoint(tmp_path, saved, straight):
    path = tmp_path / "run.npz"
    first = run(make(optax.adam(0.05)), 17, X, Y, checkpoint=path, checkpoint_every=5)
    assert saved == [5, 10, 15, 17]
    assert identical(first.losses, straight.losses[:17])
    rest = run(make(optax.adam(0.05)), 40, X, Y, checkpoint=path, checkpoint_every=20)
    assert saved == [5, 10, 15, 17, 20, 40]
    assert identical(rest, straight)
    # Nothing is left to do, and nothing changes.
    again = run(make(optax.adam(0.05)), 40, X, Y, checkpoint=path)
    assert saved[6:] == [] and identical(again, straight)


def test_checkpoints_that_cannot_be(tmp_path, straight):
    svi = make(optax.adam(0.05))
    with pytest.raises(ValueError, match="checkpoint_every must be at least 1, got 0"):
        run(svi, 5, X, Y, checkpoint=tmp_path / "a", checkpoint_every=0)
    with pytest.raises(FileNotFoundError, match=r"no directory .*nowhere to save to"):
        run(svi, 5, X, Y, checkpoint=tmp_path / "nowhere" / "a")
    save(tmp_path / "state", straight.state)
    with pytest.raises(ValueError, match=r"state' is not a checkpoint of a run.*init_state"):
        run(svi, 5, X, Y, checkpoint=tmp_path / "state")
    save(tmp_path / "result", straight)
    with pytest.raises(ValueError, match=r"result' is a checkpoint of another run"):
        run(svi, 5, X, Y, checkpoint=tmp_path / "result")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A run that was interrupted after five of ten updates."""
    path = tmp_path_factory.mktemp("runs") / "run.npz"
    run(make(optax.adam(0.05)), 5, X, Y, checkpoint=path)
    return path


def matern(X, y=None):
    """As the model, with another kernel: all parameters and shapes are the same."""
    lengthscale = numpyro.param("lengthscale", 0.3, constraint=positive)
    variance = numpyro.param("variance", 1.0, constraint=positive)
    f = numpyro.sample("f", GP(kernels.Matern52(lengthscale, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


@pytest.mark.parametrize(
    ("what", "options", "data", "key"),
    [
        ("the data", {}, (X, 1.1 * Y), 0),
        ("the data", {}, (np.r_[X[:-1], 2.0], Y), 0),
        ("the model", {"model": matern}, (X, Y), 0),
        ("the start", {"inducing": Z + 0.01}, (X, Y), 0),
        ("the start", {}, (X, Y), 1),
        ("the settings of the driver", {"optim": optax.adam(0.06)}, (X, Y), 0),
        ("the settings of the driver", {"site_lr": 0.3}, (X, Y), 0),
        ("the settings of the driver", {"m_steps": 2}, (X, Y), 0),
    ],
    ids=["y", "X", "kernel", "inducing", "key", "optimizer", "rate", "steps"],
)
def test_checkpoint_of_another_run(checkpoint, what, options, data, key):
    before = checkpoint.read_bytes()
    svi = make(**{"optim": optax.adam(0.05), **options})
    pattern = rf"run\.npz' is a checkpoint of another run: {what}.* not the same\. .*init_state="
    with pytest.raises(ValueError, match=pattern):
        svi.run(jax.random.key(key), 10, *data, progress_bar=False, checkpoint=checkpoint)
    assert checkpoint.read_bytes() == before


def test_state_of_a_checkpoint_can_be_used_on_purpose(checkpoint):
    """As the message about another run says."""
    svi = make(optax.adam(0.05))
    state = load(checkpoint, like=svi.init(jax.random.key(0), X, 1.1 * Y))
    result = run(svi, 2, X, 1.1 * Y, init_state=state)
    assert int(result.state.step) == 7


class Schedule:
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate / (1 + step)


@pytest.mark.parametrize(
    "make_optim",
    [
        optax.adam,
        optax.sgd,
        lambda rate: optax.chain(optax.clip(1.0), optax.adam(rate)),
        lambda rate: optax.adam(optax.exponential_decay(rate, 100, 0.9)),
        lambda rate: optax.adam(Schedule(rate)),
        lambda rate: optax.multi_transform({"a": optax.adam(rate)}, {"lengthscale": "a"}),
        lambda rate: optax.inject_hyperparams(optax.adam)(rate),
        numpyro.optim.Adam,
        lambda rate: numpyro.optim.ClippedAdam(rate, clip_norm=1.0),
        lambda rate: jax.example_libraries.optimizers.adam(rate),
    ],
    ids=["adam", "sgd", "chain", "decay", "schedule", "multi", "inject", "np", "clipped", "jax"],
)
def test_fingerprint_of_optimizers(make_optim):
    optims = [make(make_optim(rate)).optim for rate in (0.1, 0.2, 0.1)]
    one, other, same = map(fingerprint, optims)
    assert one == same and one != other


def test_fingerprint_of_models():
    def with_scale(scale):
        def model(X):
            return numpyro.sample("f", GP(kernels.RBF(scale), X))

        return model

    class Callable:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, X):
            return numpyro.sample("f", GP(kernels.RBF(self.scale), X))

    for build in (
        with_scale,
        lambda scale: Callable(scale),
        lambda scale: numpyro.handlers.condition(with_scale(1.0), data={"y": scale}),
        lambda scale: jax.tree_util.Partial(with_scale(1.0), scale),
        lambda scale: lambda X, scale=scale: scale,
        lambda scale: with_scale(np.full(3, scale)),
    ):
        assert fingerprint(build(0.1)) == fingerprint(build(0.1))
        assert fingerprint(build(0.1)) != fingerprint(build(0.2))


@pytest.mark.slow
def test_careful_start_is_resumed(tmp_path):
    """A start that is made with shorter steps is made once, also where the run was stopped."""

    def narrow(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Logistic(f, 0.02), obs=y)

    inputs = np.linspace(0.0, 1.0, 40)
    y = np.sin(6.0 * inputs) + 0.3 * np.random.RandomState(0).randn(40)
    svi = make(None, model=narrow, inducing=inputs[::3])
    whole = run(svi, 12, inputs, y)
    assert float(whole.losses[0]) < 330  # without care it begins at 522 and ends near a million
    path = tmp_path / "run.npz"
    early = run(svi, 3, inputs, y, checkpoint=path)  # ends before there is need for care
    assert float(early.losses[0]) > 500
    later = run(svi, 6, inputs, y, checkpoint=path)
    assert identical(later.losses, whole.losses[:6])
    assert identical(run(svi, 12, inputs, y, checkpoint=path), whole)


# ---- disks that are full, folders that are gone ----------------------------------------------


def test_checkpoint_that_cannot_be_written(tmp_path, monkeypatch, straight):
    """The fit goes on, says so once, and saves again when it can."""
    path = tmp_path / "run.npz"
    fails = [True] * 3
    replace = os.replace

    def full(source, target):
        if fails:
            fails.pop()
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match=r"run\.npz' could not be .* 5 updates.*No space") as seen:
        result = run(make(optax.adam(0.05)), 40, X, Y, checkpoint=path, checkpoint_every=5)
    assert len(seen) == 1 and not fails
    assert identical(result, straight)
    assert identical(load(path, like=straight), straight)
    assert os.listdir(tmp_path) == ["run.npz"]


def test_folder_that_is_gone(tmp_path, monkeypatch, straight):
    folder, write = tmp_path / "runs", loop.write_tree
    folder.mkdir()

    def removing(path, result, meta):
        if len(result.losses) == 20:
            shutil.rmtree(folder)
        write(path, result, meta)

    monkeypatch.setattr(loop, "write_tree", removing)
    with pytest.warns(UserWarning, match=r"could not be written after 20 updates: .*No such"):
        result = run(make(optax.adam(0.05)), 40, X, Y, checkpoint=folder / "run.npz")
    assert identical(result, straight) and not folder.exists()


# ---- kills -----------------------------------------------------------------------------------

KILLS = 10

CHILD = """
import sys
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

jax.config.update("jax_enable_x64", True)
from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, save


def model(X, y):
    scale = numpyro.param("scale", 0.5, constraint=dist.constraints.positive)
    with numpyro.plate("data", X.shape[0], subsample_size=8) as rows:
        batch, values = X[rows], y[rows]
    f = numpyro.sample("f", GP(kernels.RBF(scale), batch))
    with numpyro.plate("data", X.shape[0], subsample_size=8):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=values)


rng = np.random.RandomState(0)
X = jax.numpy.asarray(rng.rand(40))
y = (jax.numpy.sin(9 * X) > 0).astype(float)
folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
svi = TSVGP(model, AutoDualGaussian(model, np.linspace(0, 1, 5)), optax.adam(0.02))
for number in range(first, last):
    print("start", number, flush=True)
    # Number 0 is the run that is never interrupted, without checkpoints.
    files = {"checkpoint": folder / f"{number}.npz", "checkpoint_every": 5} if number else {}
    result = svi.run(jax.random.key(1), 250, X, y, progress_bar=False, **files)
    save(folder / f"end{number}.npz", result)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_runs_end_as_if_they_had_not_been(tmp_path):
    """Ten runs are killed at a random moment each, and resumed by another process.

    A process first ends the run that the one before it was killed in, and then starts the next,
    in which it is killed. The runs draw minibatches, so the random key must be resumed too.
    """
    environment = {
        **os.environ,
        # Only the first process compiles.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(Path(loop.__file__).parents[2]),
    }
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))

    def start(first, last):
        command = [sys.executable, str(script), str(tmp_path), str(first), str(last + 1)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def updates_saved(number):
        path = tmp_path / f"{number}.npz"
        return len(load(path)["losses"]) if path.exists() else 0

    def end(number):
        return tmp_path / f"end{number}.npz"

    def kill_in(process, number):
        """Kills a process in a run, a moment after the run has saved some number of updates."""
        after = moment.randint(0, 150)
        with process:
            try:
                assert any(line.split() == ["start", str(number)] for line in process.stdout)
                while updates_saved(number) < after and process.poll() is None:
                    time.sleep(0.002)
                time.sleep(moment.uniform(0.0, 0.03))
            finally:
                process.kill()  # SIGKILL

    with start(0, 0) as process:
        assert process.wait() == 0
    wanted = load(end(0))
    assert finite(wanted["losses"]) and wanted["losses"].shape == (250,)
    moment, resumed_from = random.Random(), []
    for number in range(1, KILLS + 1):
        kill_in(start(max(number - 1, 1), number), number)
        while end(number).exists():  # it was over before this process had its turn: once more
            end(number).unlink()
            (tmp_path / f"{number}.npz").unlink()
            kill_in(start(number, number), number)
        resumed_from.append(updates_saved(number))
    with start(KILLS, KILLS) as process:
        assert process.wait() == 0
    assert len(set(resumed_from)) > 3 and max(resumed_from) > 0  # they were different moments
    for number in range(1, KILLS + 1):
        assert identical(load(end(number)), wanted), (number, resumed_from)
