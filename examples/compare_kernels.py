"""Which kernel? Leave-one-out scores of three, compared by ArviZ, without a single refit.

    python examples/compare_kernels.py

The motorcycle data with a robust likelihood. Writes ``compare_kernels.png``.
"""

import argparse
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, loo

matplotlib.use("Agg")
import matplotlib.pyplot as plt

jax.config.update("jax_enable_x64", True)

KERNELS = {
    "squared exponential": kernels.RBF,
    "Matern 5/2": kernels.Matern52,
    "Matern 1/2": kernels.Matern12,
}


def make_model(kernel):
    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 1.0))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        f = numpyro.sample("f", GP(kernel(lengthscale, variance), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.StudentT(4.0, f, noise), obs=y)

    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps only, for tests")
    parser.add_argument("--output", type=Path, default=Path("compare_kernels.png"))
    args = parser.parse_args()

    data = np.loadtxt(Path(__file__).parent / "data" / "mcycle.csv", delimiter=",", skiprows=1)
    data = (data - data.mean(0)) / data.std(0)
    X, y = data.T
    X_new = np.linspace(X.min() - 0.2, X.max() + 0.2, 200)
    Z = np.linspace(X.min(), X.max(), 30)

    scores, fits = {}, {}
    for name, kernel in KERNELS.items():
        model = make_model(kernel)
        guide = AutoDualGaussian(model, inducing=Z)
        svi = TSVGP(model, guide, optax.adam(0.05))
        result = svi.run(jax.random.key(0), 5 if args.quick else 300, X, y)
        scores[name] = loo(guide, result.params, X, y)
        fits[name] = guide.marginals(result.params, X_new)["f"]
    table = az.compare(scores)
    print(table)

    fig, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained")
    for ax, (name, f) in zip(axes, fits.items(), strict=False):
        sd = jnp.sqrt(f.variance)
        ax.fill_between(X_new, f.mean - 2 * sd, f.mean + 2 * sd, alpha=0.25)
        ax.plot(X_new, f.mean)
        ax.plot(X, y, "k.", markersize=3)
        ax.set(title=name, xlabel="time (standardised)", ylim=(-3, 3))
    axes[0].set_ylabel("acceleration (standardised)")
    best, *others = table.index
    field = "elpd_i" if hasattr(scores[best], "elpd_i") else "loo_i"  # ArviZ 1.x, 0.x
    pointwise = {name: np.asarray(score[field]).ravel() for name, score in scores.items()}
    for name in others:
        gap = np.cumsum((pointwise[best] - pointwise[name])[np.argsort(X)])
        axes[3].plot(np.sort(X), gap, label=f"{best}\nover {name}")
    axes[3].axhline(0.0, color="gray", linewidth=0.5)
    axes[3].set(title="where the scores differ (cumulated)", xlabel="time (standardised)")
    axes[3].legend(fontsize=7)
    fig.savefig(args.output, dpi=110)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
