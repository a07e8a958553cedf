"""Markov sites on long series: time and memory of an EM iteration, and tinygp beside it.

    python examples/benchmarks/time_series.py --output results/

Poisson counts at times that are not evenly spaced, one GP with a Matern-5/2 kernel, double
precision. Each length is measured in a fresh process: the best time of an iteration (one E-step,
one step of Adam) after compilation, the time of compilation, and the peak of resident memory above
what the imports take. The slopes in log-log coordinates are printed, over all points and over the
last two. Then, in one process and in turns, the log evidence of a Gaussian likelihood with its
gradient in three hyperparameters: the bound of converged sites, and tinygp's quasiseparable solver,
with the same numbers. Writes ``time_series.csv`` and ``time_series.png``.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
QUICK = (200, 1_000)
COLUMNS = ["what", "points", "step_ms", "microseconds_a_point", "compile_s", "peak_mb", "import_mb"]


def peak_mb():
    """The most memory that this process has ever held, in megabytes."""
    import resource

    unit = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def times_and_trend(n):
    rng = np.random.default_rng(0)
    t = np.cumsum(rng.exponential(0.02, n))
    return t, np.sin(t) + np.sin(0.05 * t), rng


def measure_iterations(n, repeats):
    """EM iterations on counts."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    import optax

    from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

    jax.config.update("jax_enable_x64", True)
    jnp.zeros(()).block_until_ready()
    imports = peak_mb()
    positive = dist.constraints.positive

    def model(t, y=None):
        lengthscale = numpyro.param("lengthscale", 1.0, constraint=positive)
        variance = numpyro.param("variance", 1.0, constraint=positive)
        f = numpyro.sample("f", GP(variance * kernels.Matern52(lengthscale), t))
        with numpyro.plate("data", t.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    t, f, rng = times_and_trend(n)
    t, y = jnp.asarray(t), jnp.asarray(rng.poisson(np.exp(f)))
    svi = TSVGP(model, AutoDualGaussian(model, markov=True), optax.adam(0.01))
    state = svi.init(jax.random.key(0), t, y)
    start = time.perf_counter()
    update = jax.jit(svi.update, donate_argnums=0).lower(state, t, y).compile()
    compilation = time.perf_counter() - start
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(update(state, t, y))
        taken.append(time.perf_counter() - start)
    return {
        "what": "EM iteration",
        "points": n,
        "step_ms": 1e3 * min(taken),
        "compile_s": compilation,
        "peak_mb": peak_mb(),
        "import_mb": imports,
    }


def measure_evidence(n, repeats):
    """Value and gradient of the log evidence of a Gaussian likelihood, in turns with tinygp."""
    import jax
    import jax.numpy as jnp
    import tinygp

    from numpyro_tsvgp import kernels
    from numpyro_tsvgp.gaussian.markov import Markov
    from numpyro_tsvgp.gaussian.process import Process

    jax.config.update("jax_enable_x64", True)
    t, f, rng = times_and_trend(n)
    t, y = jnp.asarray(t), jnp.asarray(f + 0.3 * rng.standard_normal(n))
    zero = jnp.zeros((1, n))

    def ours(hyper, t, y):
        lengthscale, variance, noise = hyper
        process = Process(variance * kernels.Matern52(lengthscale), t, zero, zero, None, (1,))
        # Sites of a Gaussian likelihood; the bound is then the evidence.
        precision = jnp.full((1, n), 1 / noise)
        at = Markov(precision * y, precision, t, zero).at_data_for_gradient(process)
        (mean, variance), divergence = at.bound()
        square = ((y - mean) ** 2 + variance).sum()
        return -0.5 * square / noise - 0.5 * n * jnp.log(2 * jnp.pi * noise) - divergence

    def theirs(hyper, t, y):
        lengthscale, variance, noise = hyper
        kernel = variance * tinygp.kernels.quasisep.Matern52(scale=lengthscale)
        process = tinygp.GaussianProcess(kernel, t, diag=noise, assume_sorted=True)
        return process.log_probability(y)

    hyper = jnp.array([0.8, 1.2, 0.1])
    functions = {"evidence": ours, "evidence, tinygp": theirs}
    rows, answers = [], []
    compiled = {}
    for what, function in functions.items():
        start = time.perf_counter()
        compiled[what] = jax.jit(jax.value_and_grad(function)).lower(hyper, t, y).compile()
        answers.append(compiled[what](hyper, t, y))
        rows.append({"what": what, "points": n, "compile_s": time.perf_counter() - start})
    for one, other in zip(*(jax.tree.leaves(answer) for answer in answers), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8)
    taken = {what: [] for what in functions}
    for _ in range(repeats):
        for what, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(hyper, t, y))
            taken[what].append(time.perf_counter() - start)
    for row in rows:
        row |= {"step_ms": 1e3 * min(taken[row["what"]]), "peak_mb": peak_mb(), "import_mb": 0.0}
    return rows


def slopes(sizes, values):
    """Exponents of a power law, over all points and over the last two."""
    x, y = np.log(sizes), np.log(np.maximum(values, 1e-3))
    return np.polyfit(x, y, 1)[0], np.polyfit(x[-2:], y[-2:], 1)[0]


def report(rows):
    for row in rows:
        print(
            f"{row['what']:18} {row['points']:>9,} points  {row['step_ms']:9.1f} ms  "
            f"{row['microseconds_a_point']:6.2f} microseconds a point  "
            f"{row['peak_mb'] - row['import_mb']:7.0f} MB"
        )
    series = [row for row in rows if row["what"] == "EM iteration"]
    sizes = [row["points"] for row in series]
    memory = [row["peak_mb"] - row["import_mb"] for row in series]
    t, t_last = slopes(sizes, [row["step_ms"] for row in series])
    m, m_last = slopes(sizes, memory)
    print(
        f"time ~ n^{t:.2f} (at the end {t_last:.2f})  memory ~ n^{m:.2f} (at the end {m_last:.2f})"
    )
    return sizes, [row["step_ms"] for row in series], memory


def plot(sizes, times, memory, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(8.5, 3.6), layout="constrained")
    for ax, values, what in (
        (axes[0], times, "milliseconds an EM iteration"),
        (axes[1], memory, "peak memory above imports, MB"),
    ):
        ax.plot(sizes, values, marker="o")
        ax.set(xscale="log", yscale="log", xlabel="points", ylabel=what)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="a folder")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for tests")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(measure_iterations(**json.loads(args.point))))
        return
    args.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for n in QUICK if args.quick else LENGTHS:
        point = {"n": n, "repeats": 2 if args.quick else 5}
        command = [sys.executable, __file__, "--point", json.dumps(point)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    rows += measure_evidence(*((500, 2) if args.quick else (100_000, 10)))
    for row in rows:
        row["microseconds_a_point"] = 1e3 * row["step_ms"] / row["points"]
    with open(args.output / "time_series.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(
            {k: v if isinstance(v, str | int) else f"{v:.4g}" for k, v in row.items()}
            for row in rows
        )
    plot(*report(rows), args.output / "time_series.png")


if __name__ == "__main__":
    main()
