"""How long does a step take, and how far is that from the machine's limit?

    python examples/benchmarks/steps.py --output steps.csv

Three jobs, each with t-SVGP and with whitened q-SVGP (natural gradients), in turns, in one run:

- ``mnist``: ten latent functions, one Matern-5/2 kernel, softmax, d = 784, m = 100, minibatches of
  200 rows, learned inducing inputs, one E-step and one step of Adam;
- ``em``: binary classification, n = 10,000, d = 8, m = 50, 8 E-steps and 15 steps of Adam on all
  rows;
- ``em, minibatch``: the same with minibatches of 200 rows.

``roofline`` is the linear algebra that an iteration cannot do without, at the same sizes and
precision, and nothing else: distances and their derivatives, factors and inverses, projections and
sums over data points. Data are random numbers of the right shapes, which take the same time.

Times are medians over iterations after compilation. Compilation is that of one update.
"""

import argparse
import csv
import os
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as TSVGP.run has it; set it to compare

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

from numpyro_tsvgp import GP, QSVGP, TSVGP, AutoDualGaussian, AutoMomentGaussian, kernels
from numpyro_tsvgp.gaussian.linalg import cholesky_and_inverse

JOBS = {  # rows in all, rows in a batch, inputs, inducing inputs, functions, E-steps, M-steps
    "mnist": (60_000, 200, 784, 100, 10, 1, 1),
    "em": (10_000, 10_000, 8, 50, 1, 8, 15),
    "em, minibatch": (10_000, 200, 8, 50, 1, 8, 15),
}
QUICK = {"em, minibatch": (100, 20, 2, 5, 1, 2, 2)}


def make_model(rows, functions):
    def model(X, y=None):
        lengthscale = numpyro.param("lengthscale", 1.0, constraint=dist.constraints.positive)
        variance = numpyro.param("variance", 1.0, constraint=dist.constraints.positive)
        kernel = variance * kernels.Matern52(lengthscale * jnp.sqrt(X.shape[1]))
        if functions == 1:
            likelihood = dist.Bernoulli(logits=numpyro.sample("f", GP(kernel, X)))
        else:
            with numpyro.plate("functions", functions):
                f = numpyro.sample("f", GP(kernel, X))
            likelihood = dist.Categorical(logits=f.T)
        with numpyro.plate("data", rows, subsample_size=X.shape[0]):
            numpyro.sample("y", likelihood, obs=y)

    return model


def drivers(job):
    """Compiled updates with their first states, and how long compilation took."""
    rows, batch, d, m, functions, e_steps, m_steps = job
    rng = np.random.default_rng(0)
    dtype = jnp.zeros(()).dtype
    X = jnp.asarray(rng.uniform(size=(batch, d)), dtype)
    y = jnp.asarray(rng.integers(0, max(functions, 2), batch))
    Z = rng.uniform(size=(m, d)).astype(dtype)
    model = make_model(rows, functions)
    out = {}
    for name, driver, family in (
        ("t-SVGP", TSVGP, AutoDualGaussian),
        ("q-SVGP", QSVGP, AutoMomentGaussian),
    ):
        svi = driver(
            model,
            family(model, inducing=Z),
            optax.adam(0.01),
            site_lr=0.1,
            e_steps=e_steps,
            m_steps=m_steps,
        )
        state = svi.init(jax.random.key(0), X, y)
        start = time.perf_counter()
        update = jax.jit(svi.update, donate_argnums=0).lower(state, X, y).compile()
        out[name] = update, state, (X, y), time.perf_counter() - start
    return out


def roofline(job):
    """The linear algebra of one iteration, as one compiled function of its inputs."""
    _, n, d, m, p, e_steps, m_steps = job
    rng = np.random.default_rng(0)
    dtype = jnp.zeros(()).dtype
    Z, X = (jnp.asarray(rng.standard_normal((k, d)), dtype) for k in (m, n))
    alpha = jnp.asarray(rng.uniform(size=(n, p)), dtype)
    spd = jnp.broadcast_to(jnp.eye(m, dtype=dtype), (p, m, m))

    def prior(Z):
        K = jnp.exp(Z @ Z.T / d - 1.0) + jnp.eye(m, dtype=dtype)
        k = jnp.exp(X @ Z.T / d - 1.0)
        _, inverse = cholesky_and_inverse(K)
        return K, k, inverse, k @ inverse.T

    def moved(gram, K, inverse):  # sites to the coordinates of this prior
        move = 1e-3 * inverse @ K
        return move.T @ (gram @ move)

    def projected(matrices, w):
        return (w @ matrices.reshape(p * m, m).T).reshape(n, p, m)

    def sums(weights, w):
        weighted = w[:, None, :] * weights[..., None]
        return (weighted.reshape(n, p * m).T @ w).reshape(p, m, m)

    def e_step(gram, w):
        _, inverse = cholesky_and_inverse(spd + 1e-3 * gram)
        return sums(alpha + 1e-9 * (projected(inverse, w) ** 2).sum(-1), w)

    def gradient(Z, gram, K, k, inverse, w):
        _, factor = cholesky_and_inverse(spd + 1e-3 * gram)
        A = inverse - (factor.mT @ factor) @ inverse
        P = projected(A.mT, w)
        weights = alpha + 1e-9 * (P * k[:, None, :]).sum(-1)
        # Backwards: to the covariances, of which those between inducing inputs have two parts, as
        # functions of the hyperparameters and of the inputs, and from there to the inputs.
        by_k = (P * weights[..., None]).sum(1)
        flat, rows = (P * weights[..., None]).reshape(n * p, m), A.reshape(p * m, m)
        by_K = flat.T @ P.reshape(n * p, m) + rows.T @ rows
        by_departure = (by_k.T @ w) @ inverse
        scale = 1.0 + 1e-9 * (by_K * K).sum()
        return scale * ((by_k * k).T @ X + (by_departure * K) @ Z)

    def m_step(carry, _):
        Z, gram = carry
        K, k, inverse, w = prior(Z)
        by_Z = gradient(Z, moved(gram, K, inverse), K, k, inverse, w)
        return (Z - 1e-9 * by_Z, gram), None

    def iteration(Z, gram):
        K, k, inverse, w = prior(Z)
        gram = moved(gram, K, inverse)
        gram = jax.lax.fori_loop(0, e_steps, lambda _, g: e_step(g, w), gram)
        if m_steps == 1:  # at the same hyperparameters, so the prior is shared
            return Z - 1e-9 * gradient(Z, gram, K, k, inverse, w), gram
        return jax.lax.scan(m_step, (Z, gram), length=m_steps)[0]

    start = time.perf_counter()
    compiled = jax.jit(iteration, donate_argnums=(0, 1)).lower(Z, jnp.array(spd)).compile()
    return compiled, (Z, jnp.array(spd)), time.perf_counter() - start


def measure(name, job, seconds):
    """Medians of all systems, which take their turns until time is up."""
    found = drivers(job)
    ideal, arguments, ideal_compile = roofline(job)
    states = {system: state for system, (_, state, _, _) in found.items()}
    times = {system: [] for system in [*found, "roofline"]}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["roofline"]) < 3:
        for system, (update, _, data, _) in found.items():
            start = time.perf_counter()
            states[system], loss = jax.block_until_ready(update(states[system], *data))
            times[system].append(time.perf_counter() - start)
        start = time.perf_counter()
        arguments = jax.block_until_ready(ideal(*arguments))
        times["roofline"].append(time.perf_counter() - start)
    compilation = {system: found[system][3] for system in found} | {"roofline": ideal_compile}
    limit = np.median(times["roofline"])
    precision = str(jnp.zeros(()).dtype)
    rows = []
    for system, values in times.items():
        median = np.median(values)
        rows.append((name, precision, system, 1e3 * median, 1e3 * min(values), compilation[system]))
        print(
            f"{name:14} {precision}  {system:9} median {1e3 * median:7.1f} ms  best "
            f"{1e3 * min(values):7.1f} ms  {median / limit:4.1f} x roofline  "
            f"compiled in {compilation[system]:.1f} s"
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for tests")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each measurement")
    parser.add_argument("--output", default="steps.csv", help="where to put the numbers")
    args = parser.parse_args()
    with open(args.output, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["job", "precision", "system", "median_ms", "best_ms", "compile_s"])
        for double in (True,) if args.quick else (True, False):
            jax.config.update("jax_enable_x64", double)
            for name, job in (QUICK if args.quick else JOBS).items():
                writer.writerows(measure(name, job, 0.0 if args.quick else args.seconds))
                file.flush()


if __name__ == "__main__":
    main()
