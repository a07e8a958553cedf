"""How far correlations of random features are from those of the kernel.

Forty inputs from a standard normal distribution, one or two columns, lengthscale 0.7 (period 1.5).
The error is the root mean square over all pairs of inputs and ten random keys.

    python examples/benchmarks/random_features.py --output docs/data/random_features.csv
"""

import argparse
import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tsvgp import kernels

jax.config.update("jax_enable_x64", True)

KERNELS = {  # the kernel and its number of columns
    "`RBF`, one column": (kernels.RBF(0.7), 1),
    "`RBF`, two columns": (kernels.RBF(0.7), 2),
    "`Matern52`, one column": (kernels.Matern52(0.7), 1),
    "`Matern52`, two columns": (kernels.Matern52(0.7), 2),
    "`Matern12`, one column": (kernels.Matern12(0.7), 1),
    "`Matern12`, two columns": (kernels.Matern12(0.7), 2),
    "`RationalQuadratic`, two columns": (kernels.RationalQuadratic(0.7), 2),
    "`Periodic`, one column": (kernels.Periodic(0.7, 1.5), 1),
    "`Periodic * RBF`, one column": (kernels.Periodic(0.7, 1.5) * kernels.RBF(2.0), 1),
}


def error(kernel, columns, frequencies, keys):
    """Root mean square error of correlations: all these kernels have variance one."""
    X = jnp.asarray(np.random.default_rng(0).normal(size=(40, columns)))
    K = kernel(X, X)

    @jax.jit
    def squared(key):
        phi = kernel.random_features(key, frequencies, columns)(X)
        return jnp.mean((phi @ phi.T - K) ** 2)

    return float(jnp.sqrt(np.mean([squared(jax.random.key(k)) for k in range(keys)])))


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two kernels, for tests")
    parser.add_argument("--output", type=Path, default=Path("random_features.csv"), help="a table")
    args = parser.parse_args()
    with open(args.output, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["kernel", "frequencies", "error"])
        for name, (kernel, columns) in list(KERNELS.items())[: 2 if args.quick else None]:
            for frequencies in (16,) if args.quick else (512, 2048):
                found = error(kernel, columns, frequencies, 2 if args.quick else 10)
                writer.writerow([name, frequencies, f"{found:.3g}"])
                print(name, frequencies, f"{found:.3g}", flush=True)


if __name__ == "__main__":
    main()
