"""Hyperparameters learned with the bound and with the EP-like objective, on UCI classification.

Three data sets, five folds each: a logit likelihood, an isotropic Matern-5/2 kernel, no inducing
inputs, maximum likelihood of lengthscale and variance by EM. Columns are means and standard errors
over folds of the negative log predictive density of the fold that was left out.

    python examples/benchmarks/ep_like_uci.py --output ep_like_uci.csv   # goes on where it stopped
"""

import argparse
import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, Bound, EPLike, kernels

jax.config.update("jax_enable_x64", True)
DATA = Path(__file__).parent.parent / "data"
SETS = {"ionosphere": 0, "sonar": 0, "diabetes": 1}  # header lines
FOLDS = 5


def load(name):
    table = np.loadtxt(DATA / f"{name}.csv", delimiter=",", skiprows=SETS[name])
    X, y = table[:, :-1], (table[:, -1] > 0).astype(float)
    rows = np.random.default_rng(0).permutation(len(y))
    X = (X - X.mean(0)) / (X.std(0) + 1e-9)
    return X[rows], y[rows]


def model(X, y=None):
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", jnp.sqrt(1.0 * X.shape[1]), constraint=positive)
    variance = numpyro.param("variance", 2.0, constraint=positive)
    f = numpyro.sample("f", GP(variance * kernels.Matern52(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def score(fit, X, y):
    """Negative log predictive density and error rate."""
    mean, variance = fit.marginals(X)["f"]
    z, w = np.polynomial.hermite_e.hermegauss(40)
    p = (w / w.sum()) @ np.asarray(jax.nn.sigmoid(mean + jnp.sqrt(variance) * z[:, None]))
    return -np.log(np.where(y > 0, p, 1 - p)).mean(), ((p > 0.5) != y).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small part of one fold, for tests")
    parser.add_argument("--only", nargs="*", default=list(SETS), help="names of data sets")
    parser.add_argument(
        "--output", default="ep_like_uci.csv", help="the CSV; folds in it are not redone"
    )
    args = parser.parse_args()
    done = set()
    if Path(args.output).exists():
        with open(args.output, newline="") as file:
            done = {tuple(row[:3]) for row in csv.reader(file)}
    with open(args.output, "a", newline="") as file:
        writer = csv.writer(file)
        if not done:
            writer.writerow(
                ["data", "fold", "objective", "lengthscale", "variance", "nlpd", "error"]
            )
        for name in args.only[:1] if args.quick else args.only:
            X, y = load(name)
            for fold in range(1 if args.quick else FOLDS):
                out = np.arange(len(y)) % FOLDS == fold
                kept = np.flatnonzero(~out)[: 20 if args.quick else None]
                for objective in (Bound(), EPLike()):
                    if (name, str(fold), repr(objective)) in done:
                        continue
                    svi = TSVGP(
                        model,
                        AutoDualGaussian(model),
                        optax.adam(0.1),
                        objective=objective,
                        e_steps=2,
                    )
                    steps = 2 if args.quick else 60
                    fit = svi.run(
                        jax.random.key(0), steps, X[kept], y[kept], progress_bar=False
                    ).fit
                    hyper = [float(fit.params[k]) for k in ("lengthscale", "variance")]
                    found = [f"{v:.6g}" for v in (*hyper, *score(fit, X[out], y[out]))]
                    row = [name, fold, repr(objective), *found]
                    writer.writerow(row)
                    file.flush()
                    print(row)


if __name__ == "__main__":
    main()
