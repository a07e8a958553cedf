"""Streams with and without a memory, against a fit to all data: accuracy and time.

    python examples/benchmarks/streaming.py --output docs/data/streaming.csv

Training data are sorted by one input and come in ten batches, which are then gone, so that the
stream drifts. Hyperparameters are learned all along. The score is the negative log predictive
density of held-out points that were not sorted; `mean` and `sd` are over splits, and `scores` are
those of each split.
"""

import argparse
import csv
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, Stream, inducing, kernels

jax.config.update("jax_enable_x64", True)
DATA = Path(__file__).parents[1] / "data"
parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--quick", action="store_true", help="a few steps only, for tests")
parser.add_argument("--output", type=Path, default=Path("streaming.csv"), help="the table")
parser.add_argument("--methods", nargs="*", help="only these; rows of others are kept")
options = parser.parse_known_args()[0]

INDUCING, MEMORY, BATCHES = 50, 40, 10
SPLITS, FIRST_STEPS, STEPS, BATCH_FIT_STEPS = 3, 200, 30, 400
if options.quick:
    INDUCING, MEMORY, BATCHES = 8, 5, 3
    SPLITS, FIRST_STEPS, STEPS, BATCH_FIT_STEPS = 1, 2, 2, 2


def hyperparameters(columns):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0).expand([columns]).to_event(1))
    return variance * kernels.Matern52(scale)


def classification(X, y=None):
    f = numpyro.sample("f", GP(hyperparameters(X.shape[1]), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def regression(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", GP(hyperparameters(X.shape[1]), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def score(fit, X, y):
    """Negative log predictive density, by quadrature over f."""
    mean, variance = (np.asarray(x)[:, None] for x in fit.marginals(X)["f"])
    z, w = np.polynomial.hermite_e.hermegauss(40)
    f = mean + np.sqrt(variance) * z
    if fit.model is classification:
        density = 1 / (1 + np.exp(-np.where(y[:, None] > 0, f, -f)))
    else:
        noise = float(fit.sample(jax.random.key(0), X[:1])["noise"])  # a point estimate
        density = np.exp(-0.5 * ((y[:, None] - f) / noise) ** 2) / noise / np.sqrt(2 * np.pi)
    return float(-np.log(density @ (w / w.sum())).mean())


SETS = {  # model, file, the column that the stream is sorted by
    "banana": (classification, "banana.csv", 0),
    "concrete": (regression, "concrete.csv", 0),
    "airfoil": (regression, "airfoil.csv", 0),
}
METHODS = {
    "leverage": {"memory": MEMORY, "select": "leverage"},
    "importance": {"memory": MEMORY, "select": "importance"},
    "random": {"memory": MEMORY, "select": "random"},
    "none": {"memory": 0},
}
WANTED = options.methods or ["batch fit", *METHODS]


def run(name, split):
    """Rows of the table for one split of one data set."""
    model, file, column = SETS[name]
    table = np.loadtxt(DATA / file, delimiter=",", skiprows=1)
    X, y = table[:, :-1], table[:, -1]
    X = (X - X.mean(0)) / X.std(0)
    if model is regression:
        y = (y - y.mean()) / y.std()
    order = np.random.default_rng(split).permutation(len(X))
    test, train = order[: len(X) // 5], order[len(X) // 5 :]
    train = train[np.argsort(X[train, column], kind="stable")]
    if options.quick:
        train = train[:: len(train) // 40]
    batches = [(X[rows], y[rows]) for rows in np.array_split(train, BATCHES)]

    if "batch fit" in WANTED:
        start = time.perf_counter()
        Z = inducing.greedy(kernels.Matern52(1.0), X[train], min(INDUCING, len(train)))
        guide = AutoDualGaussian(model, Z, learn_inducing=False)
        svi = TSVGP(model, guide, optax.adam(0.05))
        fit = svi.run(
            jax.random.key(split), BATCH_FIT_STEPS, X[train], y[train], progress_bar=False
        ).fit
        yield "batch fit", score(fit, X[test], y[test]), time.perf_counter() - start, np.nan
    for method in [name for name in METHODS if name in WANTED]:
        first = batches[0][0]
        guide = AutoDualGaussian(model, inducing.greedy(kernels.Matern52(1.0), first, 8))
        stream = Stream(
            model, guide, optax.adam(0.05), num_inducing=INDUCING, steps=STEPS, **METHODS[method]
        )
        times = [time.perf_counter()]
        fit = stream.run(
            jax.random.key(split),
            FIRST_STEPS,
            batches,
            each=lambda i, fit, times=times: times.append(time.perf_counter()),
        )
        # The last batches compile nothing.
        yield (
            method,
            score(fit, X[test], y[test]),
            times[-1] - times[0],
            1e3 * np.min(np.diff(times)[1:]),
        )


HEADER = ["data", "method", "memory", "splits", "mean", "sd", "seconds", "update_ms", "scores"]
rows = {}
if options.methods and options.output.exists():
    with options.output.open(newline="") as file:
        old = {(row["data"], row["method"]): row for row in csv.DictReader(file)}
    rows = {key: [row.get(column, "") for column in HEADER] for key, row in old.items()}
for name in SETS:
    found = {}
    for split in range(SPLITS):
        for method, nlpd, seconds, update in run(name, split):
            found.setdefault(method, []).append((nlpd, seconds, update))
            print(
                f"{name:9} {split} {method:10} {nlpd:7.4f} {seconds:6.1f} s {update:7.1f} ms",
                flush=True,
            )
    for method, results in found.items():
        nlpd, seconds, update = np.array(results).T
        rows[name, method] = [
            name,
            method,
            METHODS.get(method, {}).get("memory", 0),
            SPLITS,
            f"{nlpd.mean():.4f}",
            f"{nlpd.std():.4f}",
            f"{np.median(seconds):.1f}",
            f"{np.min(update):.0f}",
            " ".join(f"{score:.4f}" for score in nlpd),
        ]
    with options.output.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        places = {name: i for i, name in enumerate([*SETS, "batch fit", *METHODS])}
        for key in sorted(rows, key=lambda key: (places[key[0]], places[key[1]])):
            writer.writerow(rows[key])
print(f"wrote {options.output}")
