"""NUTS over hyperparameters with f integrated out, beside NUTS over everything.

    python examples/benchmarks/collapsed_nuts.py --output collapsed_nuts.csv

Counts of a smooth rate at n random places, Poisson, Matern-5/2 with a lengthscale and a deviation
to be found. NUTS on the full model has n + 2 dimensions, f as white noise (``whiten``), and starts
at the fit; NUTS on ``collapse(fit)`` has two, with 25 inducing inputs. Both take as many draws
after as many steps of warm-up, under ``blas_threads``. The first run, with compilation and warm-up,
is timed; and the draws after it, compiled, which are divided by the smallest effective sample size
of the two hyperparameters, all in CPU seconds. Where the full model would take longer than
``--limit`` seconds, its gradient alone is timed.
"""

import argparse
import csv
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, init_to_value
from numpyro.infer.util import initialize_model

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, collapse, kernels, whiten
from numpyro_tsvgp.gaussian.linalg import blas_threads

jax.config.update("jax_enable_x64", True)

NAMES = ("lengthscale", "deviation")
INDUCING = 25
# Gradients that a draw of the full model takes at the least, by which its time is foreseen.
GRADIENTS = 15


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    deviation = numpyro.sample("deviation", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(deviation**2 * kernels.Matern52(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def counts(n):
    rng = np.random.default_rng(n)
    X = np.sort(rng.uniform(0.0, 10.0, n))
    return X, rng.poisson(np.exp(np.sin(X) + 0.5 * np.cos(2.3 * X)))


def gradient_seconds(target, start, X, y):
    """CPU seconds of one gradient of the density, the median of several."""
    found = initialize_model(
        jax.random.key(0),
        target,
        init_strategy=init_to_value(values=start),
        model_args=(X, y),
        dynamic_args=False,
    )
    gradient = jax.jit(jax.value_and_grad(found.potential_fn))
    times = []
    while len(times) < 3 or (len(times) < 12 and sum(times) < 20.0):
        before = time.process_time()
        jax.block_until_ready(gradient(found.param_info.z))
        times.append(time.process_time() - before)
    return float(np.median(times[1:]))  # the first compiles


def measured(target, start, X, y, draws, limit):
    row = {"gradient_ms": 1e3 * gradient_seconds(target, start, X, y)}
    if 1e-3 * row["gradient_ms"] * GRADIENTS * 4 * draws > limit:
        return row
    kernel = NUTS(target, init_strategy=init_to_value(values=start))
    mcmc = MCMC(kernel, num_warmup=draws, num_samples=draws, progress_bar=False)
    before = time.process_time()
    mcmc.run(jax.random.key(1), X, y)
    jax.block_until_ready(mcmc.get_samples())
    row["first_seconds"] = time.process_time() - before

    @jax.jit
    def chain(state):
        def one(state, _):
            state = kernel.sample(state, (X, y), {})
            return state, ({k: state.z[k] for k in NAMES}, state.num_steps)

        return jax.lax.scan(one, state, None, length=draws)

    state, _ = jax.block_until_ready(chain(mcmc.last_state))  # compiles
    before = time.process_time()
    _, (logs, num_steps) = jax.block_until_ready(chain(state))
    row["seconds"] = time.process_time() - before
    row["gradients_a_draw"] = float(np.mean(num_steps))
    row["effective"] = float(min(effective_sample_size(np.asarray(logs[k])[None]) for k in NAMES))
    row["ms_an_effective_draw"] = 1e3 * row["seconds"] / row["effective"]
    for k in NAMES:
        row[f"log_{k}_mean"], row[f"log_{k}_sd"] = float(logs[k].mean()), float(logs[k].std())
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[50, 200, 1000, 5000])
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--limit", type=float, default=240.0)
    parser.add_argument("--output", default="collapsed_nuts.csv")
    parser.add_argument("--methods", nargs="*", default=["collapsed", "full"])
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    sizes, draws = ([30], 10) if args.quick else (args.sizes, args.draws)
    rows = []
    for n in sizes:
        X, y = counts(n)
        Z = np.linspace(0.0, 10.0, INDUCING)
        guide = AutoDualGaussian(model, Z, learn_inducing=False)
        result = TSVGP(model, guide, optax.adam(0.1)).run(
            jax.random.key(0), 5 if args.quick else 150, X, y, progress_bar=False
        )
        start = result.fit.hyper
        for name, target, largest in (
            ("collapsed", collapse(result.fit), INDUCING),
            ("full", whiten(model), n),
        ):
            if name not in args.methods:
                continue
            with blas_threads(largest):
                row = measured(target, start, X, y, draws, args.limit)
            rows.append({"n": n, "method": name, "draws": draws, **row})
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()})
    with open(args.output, "w", newline="") as file:
        writer = csv.DictWriter(file, max(rows, key=len).keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
