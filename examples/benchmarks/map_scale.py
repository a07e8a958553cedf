"""Which mode of the hyperparameters predicts better: on their own scale, or the unconstrained one?

A mode depends on the scale that a density is written in. ``AutoDelta`` (the default) takes that of
the space in which the model samples; ``AutoUnconstrainedDelta`` that of the logarithms of what is
positive. Both are fitted to the same folds of real data, and to problems that are drawn from the
priors themselves. A score is the log predictive density of held-out data, nats a point; differences
are unconstrained minus default, so that positive ones speak for the unconstrained scale.

    python examples/benchmarks/map_scale.py --output map_scale.csv
    python examples/benchmarks/map_scale.py --data breast_cancer --output map_scale.csv
"""

import argparse
import csv
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, AutoUnconstrainedDelta, kernels

jax.config.update("jax_enable_x64", True)

DATA = Path(__file__).parents[1] / "data"
# File, whether it has a header, and whether the last column is a class.
TABLES = {
    "breast_cancer": ("breast_cancer.csv", True, True),
    "ionosphere": ("ionosphere.csv", False, True),
    "diabetes": ("diabetes.csv", True, True),
}
# Location of the logarithm of each lengthscale, in standard deviations of its column.
LOCATIONS = (0.0, 2.0)
FOLDS = 5
SEEDS = 16
INDUCING = 100


def model(X, y=None, location=0.0, is_class=True):
    with numpyro.plate("columns", X.shape[1]):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(location, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    if not is_class:
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X, mean=intercept))
    with numpyro.plate("data", X.shape[0]):
        p = dist.Bernoulli(logits=f) if is_class else dist.Normal(f, noise)
        numpyro.sample("y", p, obs=y)


def table(name):
    """Inputs and targets; inputs and numbers to predict have mean zero and variance one."""
    file, header, is_class = TABLES[name]
    data = np.loadtxt(DATA / file, delimiter=",", skiprows=int(header))
    X, y = data[:, :-1], data[:, -1]
    X = (X - X.mean(0)) / np.maximum(X.std(0), 1e-12)
    return X, (y > y.mean()).astype(float) if is_class else (y - y.mean()) / y.std()


def simulated(seed, is_class, location):
    """40 points and 300 to predict, in three columns, with hyperparameters from their priors."""
    key_hyper, key_f, key_y = jax.random.split(jax.random.key(seed), 3)
    X = np.random.default_rng(seed).standard_normal((340, 3))
    trace = handlers.trace(handlers.seed(model, key_hyper)).get_trace(
        X[:2], None, location, is_class
    )
    hyper = {k: s["value"] for k, s in trace.items() if s["type"] == "sample"}
    kernel = kernels.RBF(hyper["lengthscale"], hyper["variance"])
    f = GP(kernel, X, mean=hyper["intercept"]).sample(key_f)
    p = dist.Bernoulli(logits=f) if is_class else dist.Normal(f, hyper["noise"])
    y = np.asarray(p.sample(key_y), float)
    return X, y, np.arange(340) >= 40


@cache  # the small problems share a compiled step
def driver(hyper_guide, steps, inducing=None):
    guide = AutoDualGaussian(
        model, inducing=inducing, learn_inducing=False, hyper_guide=hyper_guide
    )
    return TSVGP(model, guide, optax.adam(optax.cosine_decay_schedule(0.1, steps)))


def score(X, y, test, location, is_class, hyper_guide, steps):
    """Mean log predictive density of the rows ``test``, and the loss of the fit to the others."""
    train = ~test
    if train.sum() <= INDUCING:
        svi = driver(hyper_guide, steps)
    else:
        Z = X[train][np.random.default_rng(0).permutation(int(train.sum()))]
        distinct = np.sort(np.unique(Z, axis=0, return_index=True)[1])
        svi = driver.__wrapped__(hyper_guide, steps, Z[distinct][:INDUCING])
    given = {"location": location, "is_class": is_class}
    result = svi.run(jax.random.key(0), steps, X[train], y[train], progress_bar=False, **given)
    marginals = result.fit.marginals(X[test], None, **given)["f"]
    if is_class:
        nodes, weights = np.polynomial.hermite_e.hermegauss(40)
        f = marginals.mean[:, None] + jnp.sqrt(marginals.variance)[:, None] * nodes
        log_density = dist.Bernoulli(logits=f).log_prob(y[test][:, None])
        log_score = jax.nn.logsumexp(log_density, 1, weights / weights.sum())
    else:
        scale = jnp.sqrt(marginals.variance + result.fit.hyper["noise"] ** 2)
        log_score = dist.Normal(marginals.mean, scale).log_prob(y[test])
    return float(log_score.mean()), float(result.losses[-1])


def problems(quick, chosen):
    """Name, location of the prior, number, data, rows to predict, whether targets are classes."""
    for location in LOCATIONS[:1] if quick else LOCATIONS:
        for name, (_, _, is_class) in TABLES.items():
            if chosen and name not in chosen:
                continue
            X, y = table(name)
            if quick:
                X, y = X[:40], y[:40]
            fold = np.random.default_rng(0).permutation(len(X)) % FOLDS
            for i in range(1 if quick else FOLDS):
                yield name, location, i, X, y, fold == i, is_class
            if quick:
                break
        for name, is_class in (("simulated classes", True), ("simulated regression", False)):
            for seed in range((1 if quick else SEEDS) * (not chosen or "simulated" in chosen)):
                X, y, test = simulated(seed, is_class, location)
                yield name, location, seed, X, y, test, is_class


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one fold of 40 rows, few steps")
    parser.add_argument("--output", default="map_scale.csv", help="where to put the CSV")
    parser.add_argument("--data", nargs="*", help=f"some of {[*TABLES, 'simulated']}")
    args = parser.parse_args()
    steps = 10 if args.quick else 300
    differences = {}
    with open(args.output, "w", newline="") as file:
        writer = csv.writer(file)
        header = ["data", "prior_location", "fold_or_seed", "default", "unconstrained"]
        writer.writerow([*header, "default_loss", "unconstrained_loss"])
        for name, location, number, X, y, test, is_class in problems(args.quick, args.data):
            rest = (X, y, test, location, is_class)
            own, own_loss = score(*rest, None, steps)
            free, free_loss = score(*rest, AutoUnconstrainedDelta, steps)
            writer.writerow([name, location, number, own, free, own_loss, free_loss])
            file.flush()
            differences.setdefault((name, location), []).append((own, free))
    for (name, location), found in differences.items():
        own, free = np.array(found).T
        d = free - own
        se = d.std(ddof=1) / np.sqrt(len(d)) if len(d) > 1 else np.nan
        print(
            f"{name:22} prior {location}: default {own.mean():.4f}, unconstrained "
            f"{free.mean():.4f}, difference {d.mean():+.4f} (se {se:.4f}, of {len(d)})"
        )


if __name__ == "__main__":
    main()
