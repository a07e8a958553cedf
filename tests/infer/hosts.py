"""One of several processes on this machine, each with its own rows; started by test_hosts.py.

Arguments: rank, number of processes, port, folder, and what to do: "everything", "fits" (without
what comes after a fit), "killed" (the last process dies during a run) or "resumed".
"""
# ruff: noqa: E402

import json
import os
import sys
import warnings
from pathlib import Path

import jax

RANK, COUNT, PORT = map(int, sys.argv[1:4])
FOLDER, WHAT = Path(sys.argv[4]), sys.argv[5]
jax.config.update("jax_enable_x64", True)
if COUNT > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{PORT}", COUNT, RANK, heartbeat_timeout_seconds=20)

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, influence, kernels, load, loo, save, to_arviz
from numpyro_tsvgp import collapse as collapsed
from numpyro_tsvgp.model import glance

glance._SAMPLE = 16  # so that of these few rows a sample is looked at, and all where they are

N, BATCH = 80, 40
RNG = np.random.RandomState(0)
X = RNG.rand(N, 2)
Y = RNG.poisson(np.exp(1.0 + np.sin(7.0 * X[:, 0]))).astype(float)
BAD = Y.copy()
BAD[-3] = np.nan
Z = RNG.rand(6, 2)


def model(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(variance * kernels.Matern52(0.5), X))
    with numpyro.plate("data", X.shape[0] if y is None else N, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


mesh = jax.make_mesh((COUNT,), ("rows",), axis_types=(AxisType.Auto,))
spread = NamedSharding(mesh, PartitionSpec("rows"))
svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), optax.adam(0.01))
found = {}


def share(first=0, last=N):
    """The rows of this process, of those from first to last."""
    size = (last - first) // COUNT
    return slice(first + RANK * size, first + (RANK + 1) * size)


class Loader(list):
    """Batches of this process; it dies before one of them."""

    def __init__(self, y, kill=-1, batches=2):
        rows = [share(i * BATCH, (i + 1) * BATCH) for i in range(batches)]
        super().__init__((X[some], y[some]) for some in rows)
        self.kill, self.asked = kill, 0

    def __getitem__(self, i):
        self.asked += 1
        if self.asked == self.kill and RANK == COUNT - 1:
            os._exit(1)
        return super().__getitem__(i)


def message(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def run(*args, driver=svi, key=0, steps=2, sharding=spread, **options):
    key = jax.random.key(key)
    return driver.run(key, steps, *args, sharding=sharding, progress_bar=False, **options)


def fits():
    """Runs on arrays, exact passes, and what is wrong in one process or in all."""
    mine = X[share()], Y[share()]
    whole = run(*mine, steps=4)
    found["losses"] = whole.losses.tolist()
    made = [jax.make_array_from_process_local_data(spread, part) for part in mine]
    found["made"] = run(*made, steps=4, sharding=None).losses.tolist()
    found["loss"] = float(svi.evaluate(whole.state, *whole.fit.call.args))
    found["pass"] = float(svi.evaluate(whole.state, batches=Loader(Y)))
    state, before = svi.full_e_step(whole.state, Loader(Y))
    found["before"], found["after"] = float(before), float(svi.evaluate(state, batches=Loader(Y)))
    other = TSVGP(model, AutoDualGaussian(model, inducing=Z + RANK), optax.adam(0.01))
    found["said"] = {
        "bad rows": message(run, mine[0], BAD[share()]),
        "bad batch": message(run, batches=Loader(BAD)),
        "bad pass": message(svi.evaluate, whole.state, batches=Loader(BAD)),
        "few rows": message(svi.evaluate, whole.state, batches=Loader(Y)[:1]),
    }
    if COUNT > 1:
        found["said"] |= {
            "keys": message(run, *mine, key=RANK),
            "inducing": message(run, *mine, driver=other),
            "alone": message(run, *mine, sharding=None),
            "batches alone": message(run, batches=Loader(Y), sharding=None),
            "ends": message(run, batches=iter(Loader(Y, batches=2 if RANK == 0 else 1))),
        }
    return whole.fit


def after(fit):
    """What is asked of a fit: each process by itself, none waits for another."""
    if RANK == 0:  # the others are not there
        found["hyper"] = float(fit.hyper["variance"])
        found["mean"] = np.asarray(fit.marginals(X)["f"].mean).tolist()
        found["predicted"] = np.asarray(fit.predict(X[:5]).mean).tolist()
        found["predictor"] = np.asarray(fit.predictor()(X[:5])["f"].variance).tolist()
        save(FOLDER / "fit.npz", fit)
        again = load(FOLDER / "fit.npz", model=model)
        found["loaded"] = np.asarray(again.marginals(X[:5])["f"].mean).tolist()
        more = fit.condition(X[:2], Y[:2])
        found["conditioned"] = np.asarray(more.marginals(X[:5])["f"].mean).tolist()
    here = fit.of_this_process()
    rows = found["rows"] = {}
    rows["marginals"] = np.asarray(here.marginals()["f"].variance).tolist()
    rows["loo"] = loo(here)["leverage"].values.tolist()
    rows["influence"] = influence(here).influence.values.tolist()
    rows["loo of batches"] = loo(fit, batches=[(X[share()], Y[share()])])[
        "leverage"
    ].values.tolist()
    tree = to_arviz(jax.random.key(1), here, num_samples=5, prior=False)
    rows["log likelihood"] = tree["posterior"]["f"].values[0].mean(0).tolist()
    audit = here.audit(jax.random.key(2))
    assert not audit.concerns, str(audit)
    found["gain"] = audit.gain
    if COUNT > 1:
        key = jax.random.key(0)
        for what, function in {
            "marginals": fit.marginals,
            "loo": lambda: loo(fit),
            "influence": lambda: influence(fit),
            "to_arviz": lambda: to_arviz(key, fit),
            "predict": fit.predict,
            "audit": lambda: fit.audit(key),
            "sample": lambda: fit.sample(key),
            "collapse": lambda: collapsed(fit),
        }.items():
            assert "divided among" in message(function), what
        for what, function in {
            "collapse": lambda: collapsed(here),
            "refine": lambda: loo(here, refine=1),
            "to_arviz": lambda: to_arviz(key, here, mcmc="an MCMC"),
        }.items():
            assert "needs all data" in message(function), what


warnings.simplefilter("ignore")
if WHAT in ("everything", "fits"):
    fit = fits()
    if WHAT == "everything":
        after(fit)
loader = Loader(Y, kill=6 if WHAT == "killed" else -1)
result = run(batches=loader, steps=8, checkpoint=FOLDER / "run.npz", checkpoint_every=2)
found["batches"] = result.losses.tolist()
(FOLDER / f"{WHAT}-{RANK}.json").write_text(json.dumps(found))
