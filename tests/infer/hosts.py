"""One of several processes on this machine, each with its own rows; started by test_hosts.py.

Arguments: rank, number of processes, port, folder, and a step to be killed before, or -1.
"""
# ruff: noqa: E402

import json
import os
import sys
from pathlib import Path

import jax

RANK, COUNT, PORT, KILL = *map(int, sys.argv[1:4]), int(sys.argv[5])
FOLDER = Path(sys.argv[4])
jax.config.update("jax_enable_x64", True)
if COUNT > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{PORT}", COUNT, RANK, heartbeat_timeout_seconds=10)

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

N, BATCH = 80, 40
RNG = np.random.RandomState(0)
X = RNG.rand(N, 2)
Y = RNG.poisson(np.exp(1.0 + np.sin(7.0 * X[:, 0]))).astype(float)
Z = RNG.rand(6, 2)


def model(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(variance * kernels.Matern52(0.5), X))
    with numpyro.plate("data", X.shape[0] if y is None else N, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


mesh = jax.make_mesh((COUNT,), ("rows",), axis_types=(AxisType.Auto,))
options = {"sharding": NamedSharding(mesh, PartitionSpec("rows")), "progress_bar": False}
svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), optax.adam(0.01))
found = {}


def share(first, last):
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


def message(*args, key=0, **more):
    try:
        svi.run(jax.random.key(key), 2, *args, **options, **more)
    except ValueError as error:
        return str(error)


if KILL < 0:
    whole = svi.run(jax.random.key(0), 4, X[share(0, N)], Y[share(0, N)], **options)
    found["losses"] = whole.losses.tolist()
    found["loss"] = float(svi.evaluate(whole.state, *whole.fit.call.args))
    found["mean"] = np.asarray(whole.fit.marginals(X)["f"].mean).tolist()
    bad = Y.copy()
    bad[-3] = np.nan
    found["bad rows"] = message(X[share(0, N)], bad[share(0, N)])
    found["bad batch"] = message(batches=Loader(bad))
    found["keys"] = message(X[share(0, N)], Y[share(0, N)], key=RANK)
    found["ends"] = message(batches=iter(Loader(Y, batches=2 if RANK == 0 else 1)))
path = FOLDER / "run.npz"
loader = Loader(Y, KILL)
result = svi.run(
    jax.random.key(0), 8, batches=loader, checkpoint=path, checkpoint_every=2, **options
)
found["batches"] = result.losses.tolist()
(FOLDER / f"{COUNT}-{RANK}.json").write_text(json.dumps(found))
