"""Leave-one-out scores from the sites, against fits that leave out each point in turn.

    python examples/benchmarks/loo_refits.py --output docs/data/loo_refits.csv

Hyperparameters are held, as in ``loo``. Each row is a set of problems: eight draws of 28 counts or
labels at random inputs with ten inducing inputs, and the yearly counts of the coal-mining
disasters without inducing inputs. Errors are absolute differences of log densities, in nats: the
mean over all points and the largest, for ``loo(fit)`` and for ``loo(fit, refine=3)``.
"""

import argparse
import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, loo

DATA = Path(__file__).resolve().parents[1] / "data" / "coal.csv"


def pointwise(score):
    """Log densities of the points, under ArviZ 0.x and 1.x."""
    return np.asarray(score["elpd_i" if hasattr(score, "elpd_i") else "loo_i"]).ravel()


def errors(kernel, mean, likelihood, X, problems, inducing):
    """Absolute errors of both scores at each point of each problem."""

    def model(X, y=None, kept=True):
        f = numpyro.sample("f", GP(kernel, X, mean=mean))
        with numpyro.plate("data", X.shape[0]), handlers.mask(mask=kept):
            numpyro.sample("y", likelihood(f), obs=y)

    n = len(X)
    guide = AutoDualGaussian(model, inducing=inducing, learn_inducing=False)
    svi = TSVGP(model, guide, None, site_lr=0.7, e_steps=50)
    masks = jnp.concatenate([~jnp.eye(n, dtype=bool), jnp.ones((1, n), bool)])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()

    @jax.jit
    def refits(start, y):
        def refit(mask):
            state, _ = svi.update(start, X, y, mask)
            return state, guide.marginals(svi.get_params(state), X, y, mask)["f"]

        return jax.lax.map(refit, masks)

    plain, refined = [], []
    for y in problems:
        states, without = refits(svi.init(jax.random.key(0), X, y, masks[-1]), y)
        mean_i, variance_i = (np.diagonal(x[:-1]) for x in without)
        values = mean_i + np.sqrt(variance_i) * nodes[:, None]
        truth = np.log(weights @ np.exp(likelihood(values).log_prob(y)))
        fit = svi.fit(jax.tree.map(lambda x: x[-1], states), X, y, masks[-1])
        plain.append(np.abs(pointwise(loo(fit)) - truth))
        refined.append(np.abs(pointwise(loo(fit, refine=3)) - truth))
    return np.array(plain), np.array(refined)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small problems, for tests")
    parser.add_argument("--output", type=Path, default=Path("loo_refits.csv"))
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    seeds, n = (1, 8) if args.quick else (8, 28)
    X = jnp.asarray(np.sort(np.random.default_rng(0).uniform(0.0, 1.0, n)))
    likelihoods = {
        "Bernoulli": lambda f: dist.Bernoulli(logits=f),
        "Poisson": lambda f: dist.Poisson(jnp.exp(f)),
    }
    found = {}
    for name, likelihood in likelihoods.items():
        truth = likelihood(jnp.sin(7.0 * X))
        problems = [truth.sample(jax.random.key(k)).astype(float) for k in range(seeds)]
        case = f"{seeds} of {name}"
        found[case, n] = errors(kernels.RBF(0.3), 0.0, likelihood, X, problems, X[::3])
    if not args.quick:
        counts, edges = np.histogram(np.loadtxt(DATA, skiprows=1), np.arange(1851, 1963))
        years = jnp.asarray(edges[:-1] + 0.5)
        kernel = 0.5 * kernels.Matern52(15.0)
        y = jnp.asarray(counts, float)
        case = "coal, Poisson"
        found[case, len(y)] = errors(kernel, 0.5, likelihoods["Poisson"], years, [y], None)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with open(args.output, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("problem", "n", "mean", "worst", "refined_mean", "refined_worst"))
        for (case, size), pair in found.items():
            values = [value for error in pair for value in (error.mean(), error.max())]
            writer.writerow((case, size, *(f"{value:.3g}" for value in values)))
    print(args.output.read_text())


if __name__ == "__main__":
    main()
