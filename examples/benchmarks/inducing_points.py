"""How many inducing inputs, and where: the last loss on the banana data for each choice.

    python examples/benchmarks/inducing_points.py --output docs/data/inducing_points.csv

The model of ``examples/quickstart.py`` (400 points, two classes, Matern-5/2 kernel), 200 EM
iterations of ``optax.adam(0.1)``. The loss is minus the bound minus the log prior of the
hyperparameters. Inducing inputs are a random subset of the data, greedily chosen for a kernel of
lengthscale 1, or k-means centres; held, or learned with the hyperparameters.
"""

import argparse
import csv
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, inducing, kernels

DATA = Path(__file__).resolve().parents[1] / "data" / "banana.csv"


def model(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(variance * kernels.Matern52(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


PLACEMENTS = {
    "subset, held": (lambda X, m: inducing.subset(jax.random.key(0), X, m), False),
    "greedy, held": (lambda X, m: inducing.greedy(kernels.Matern52(1.0), X, m), False),
    "k-means, held": (lambda X, m: inducing.kmeans(jax.random.key(0), X, m), False),
    "k-means, learned": (lambda X, m: inducing.kmeans(jax.random.key(0), X, m), True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few points and steps, for tests")
    parser.add_argument("--output", type=Path, default=Path("inducing_points.csv"))
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    x1, x2, y = np.loadtxt(DATA, delimiter=",", skiprows=1).T
    X = np.stack([x1, x2], axis=1)
    sizes, steps = ((8, 16, 32, 64), 200)
    if args.quick:
        X, y, sizes, steps = X[:60], y[:60], (4,), 3

    def loss(Z, learn):
        guide = AutoDualGaussian(model, inducing=Z, learn_inducing=learn)
        svi = TSVGP(model, guide, optax.adam(0.1))
        return float(svi.run(jax.random.key(1), steps, X, y, progress_bar=False).losses[-1])

    rows = [
        (m, name, loss(place(X, m), learn))
        for m in sizes
        for name, (place, learn) in PLACEMENTS.items()
    ]
    rows.append((0, "none", loss(None, False)))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with open(args.output, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("m", "placement", "loss"))
        writer.writerows((m, name, f"{value:.2f}") for m, name, value in rows)
    print(args.output.read_text())


if __name__ == "__main__":
    main()
