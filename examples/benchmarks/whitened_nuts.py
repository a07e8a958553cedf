"""What whitening does for NUTS: effective draws of a model, as it is and with a white GP.

Forty counts with a Poisson likelihood and an RBF kernel. Hyperparameters are held at 1, or sampled.
Each of the four runs has two chains of 200 warmup steps and 300 draws. The table has the smallest
effective sample size and the largest r_hat among the values of f and the hyperparameters, the
number of divergences, and the gradients of the draws, warmup not counted.

    python examples/benchmarks/whitened_nuts.py --output docs/data/whitened_nuts.csv
"""

import argparse
import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS

from numpyro_tsvgp import GP, kernels, whiten
from numpyro_tsvgp.gaussian.linalg import blas_threads

jax.config.update("jax_enable_x64", True)


def held(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def sampled(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(variance * kernels.RBF(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def measure(model, X, y, warmup, draws):
    """Smallest n_eff, largest r_hat, divergences and gradients of two chains."""
    chains = {"num_chains": 2, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(NUTS(model), num_warmup=warmup, num_samples=draws, **chains)
    with blas_threads():  # its threads fight XLA's
        mcmc.run(jax.random.key(0), X, y, extra_fields=("diverging", "num_steps"))
    names = ("f", "variance", "lengthscale")  # not the white noise itself
    values = {k: v for k, v in mcmc.get_samples(group_by_chain=True).items() if k in names}
    found = summary(values).values()
    fields = mcmc.get_extra_fields()
    return {
        "n_eff": min(float(np.min(part["n_eff"])) for part in found),
        "r_hat": max(float(np.max(part["r_hat"])) for part in found),
        "divergences": int(fields["diverging"].sum()),
        "gradients": int(fields["num_steps"].sum()),
    }


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few points and draws, for tests")
    parser.add_argument("--output", type=Path, default=Path("whitened_nuts.csv"), help="the table")
    args = parser.parse_args()
    n, warmup, draws = (4, 5, 8) if args.quick else (40, 200, 300)
    X = jnp.linspace(0.0, 6.0, n)
    y = jax.random.poisson(jax.random.key(1), jnp.exp(jnp.sin(2.0 * X)))
    rows = []
    for name, model in (("held at 1", held), ("sampled", sampled)):
        for how, program in (("NUTS(model)", model), ("NUTS(whiten(model))", whiten(model))):
            rows.append({"hyperparameters": name, "how": how})
            rows[-1] |= measure(program, X, y, warmup, draws)
            print(rows[-1], flush=True)
    with open(args.output, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
