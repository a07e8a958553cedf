"""Large data: counts at millions of places, from a file that is never in memory as a whole.

    python examples/large_data.py
    python examples/large_data.py --rows 20000000 --folder /tmp

Simulated counts on a map, written to a memory-mapped file and fitted batch by batch. Writes
``large_data.png``. Without options there are 200,000 rows; memory is the same for any number.
"""

# %% Imports
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import options, save

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, inducing, kernels

args = options("large_data", __doc__, rows="number of rows", folder="where the file is written")
N = 20_000 if args.quick else int(str(args.rows or 200_000))
BATCH = 2_000 if args.quick else 10_000
folder = Path(args.folder or tempfile.mkdtemp())
held_out = BATCH
memory: list[tuple[float, float]] = []
started = time.monotonic()


def note_memory():
    """Megabytes that the process itself holds, without pages of the file."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        memory.append((time.monotonic() - started, int(lines["RssAnon"].split()[0]) / 1e3))


# %% [markdown]
# The file: two coordinates and a count in each row, twelve bytes.


# %%
def log_rate(X):
    return 0.5 + np.sin(5 * X[:, 0]) * np.cos(4 * X[:, 1]) + 0.5 * np.sin(15 * X[:, 0] * X[:, 1])


rng = np.random.default_rng(0)
table = np.lib.format.open_memmap(
    folder / "counts.npy", "w+", dtype=np.float32, shape=(N + held_out, 3)
)
for start in range(0, len(table), BATCH):
    X = rng.random((min(BATCH, len(table) - start), 2))
    table[start : start + BATCH, :2] = X
    table[start : start + BATCH, 2] = rng.poisson(np.exp(log_rate(X)))
table.flush()

# %% [markdown]
# A loader that can tell its place, so that a checkpoint can go on from it. One of `grain` does the
# same with workers, shuffling and sharding on top.


# %%
class Loader:
    """Batches in another order in each pass."""

    def __iter__(self):
        return self

    def __init__(self):
        self.place = 0

    def __next__(self):
        batches = N // BATCH
        order = np.random.default_rng(self.place // batches).permutation(batches)
        start = order[self.place % batches] * BATCH
        self.place += 1
        note_memory()
        rows = np.array(table[start : start + BATCH])
        return rows[:, :2], rows[:, 2]

    def get_state(self):
        return self.place

    def set_state(self, place):
        self.place = place


# %% [markdown]
# The model has a plate of the size of all data, and is given a batch.


# %%
def model(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", GP(variance * kernels.Matern52(lengthscale), X))
    with numpyro.plate("data", X.shape[0] if y is None else N, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


Z = inducing.kmeans(jax.random.key(0), np.array(table[:BATCH, :2]), 20 if args.quick else 80)
guide = AutoDualGaussian(model, inducing=Z, learn_inducing=False)
svi = TSVGP(model, guide, optax.adam(0.02))
steps = 3 if args.quick else max(N // BATCH, 200)
result = svi.run(
    jax.random.key(1), steps, batches=Loader(), checkpoint=folder / "large_data_fit.npz"
)

# %% [markdown]
# Exact passes over all rows: an E-step, and the loss before and after it. Then rows that the fit
# has not seen.


# %%
def one_pass():
    for start in range(0, N, BATCH):
        note_memory()
        rows = np.array(table[start : start + BATCH])
        yield rows[:, :2], rows[:, 2]


state, before = svi.full_e_step(result.state, one_pass())
print(f"loss a row, exact: {float(before) / N:.5f}", end=" ")
print(f"and after an exact E-step {float(svi.evaluate(state, batches=one_pass())) / N:.5f}")
fit = svi.fit(state, *next(one_pass()))
new = np.array(table[N:])
q = fit.marginals(new[:, :2])["f"]
error = np.asarray(q.mean) - log_rate(new[:, :2])
print(f"held-out rows: root mean squared error of the log rate {np.sqrt((error**2).mean()):.4f},")
print(f"  largest posterior sd {float(jnp.sqrt(q.variance).max()):.4f}")
score = jax.scipy.stats.poisson.logpmf(new[:, 2], jnp.exp(q.mean + 0.5 * q.variance)).mean()
best = jax.scipy.stats.poisson.logpmf(new[:, 2], jnp.exp(log_rate(new[:, :2]))).mean()
print(f"  log density a row {float(score):.4f}; of the truth {float(best):.4f}")

# %% A picture
side = np.linspace(0, 1, 60, dtype=np.float32)
grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
mean = np.asarray(fit.marginals(grid)["f"].mean).reshape(60, 60)
fig, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
image = axes[0].imshow(mean, origin="lower", extent=(0, 1, 0, 1))
axes[0].set(title=f"map from {N:,} counts", xlabel="$x_1$", ylabel="$x_2$")
fig.colorbar(image, ax=axes[0], label="log of the rate")
axes[1].plot(np.asarray(result.losses) / N, linewidth=0.7)
axes[1].axhline(float(before) / N, color="C1", label="all rows, exact")
axes[1].set(title="loss, batch by batch", xlabel="update", ylabel="nats a row")
axes[1].legend()
if memory:
    seconds, megabytes = np.array(memory).T
    axes[2].plot(seconds, megabytes)
    axes[2].axhline(table.nbytes / 1e6, color="C1", linestyle="--", label="size of the file")
    axes[2].set(title="memory of the process", xlabel="seconds", ylabel="MB", ylim=(0, None))
    axes[2].legend()
save(fig, args)
