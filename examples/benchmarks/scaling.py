"""How time and memory of a step grow: with the rows, the inducing inputs, the latent functions.

    python examples/benchmarks/scaling.py --output results/

Rows lie in a file and come from it a batch of 1,000 at a time, through a memory map. One of three
sizes is varied while the others stay at 100,000 rows, 100 inducing inputs and one function:

- rows from 1,000 to 2,000,000;
- inducing inputs from 50 to 2,000;
- latent functions from 1 to 50, one kernel, a label of its own for each.

Each point is measured in a fresh process: the median time of a step (one E-step, one step of Adam)
after compilation, the time of compilation, and the peak of resident memory above what the imports
take. The slopes in log-log coordinates are printed, over all points and over the last two. Writes
``scaling.csv`` and ``scaling.png``.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BASE = {"rows": 100_000, "inducing": 100, "functions": 1}
GRID = {
    "rows": (1_000, 10_000, 100_000, 1_000_000, 2_000_000),
    "inducing": (50, 100, 200, 500, 1_000, 2_000),
    "functions": (1, 2, 5, 10, 20, 50),
}
QUICK_BASE = {"rows": 200, "inducing": 5, "functions": 1}
QUICK = {"rows": (200, 1_000)}
BATCH, INPUTS = 1_000, 8
COLUMNS = ["varied", "rows", "inducing", "functions", "precision"]
COLUMNS += ["step_ms", "best_ms", "compile_s", "peak_mb", "import_mb"]


def write_rows(path, rows, dtype):
    """Inputs and one column that labels are made of, in pieces, so that memory stays small."""
    rng = np.random.default_rng(0)
    file = np.lib.format.open_memmap(path, "w+", dtype, (rows, INPUTS + 1))
    for i in range(0, rows, 100_000):
        part = rng.standard_normal((min(100_000, rows - i), INPUTS + 1))
        part[:, -1] = np.sin(part[:, 0]) + np.cos(part[:, 1]) + 0.3 * part[:, -1]
        file[i : i + len(part)] = part
    file.flush()


def peak_mb():
    """The most memory that this process has ever held, in megabytes."""
    import resource

    unit = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measure(point):
    """Steps of one model, in this process."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    import optax

    from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
    from numpyro_tsvgp.gaussian.linalg import blas_threads

    jax.config.update("jax_enable_x64", point["precision"] == "float64")
    jnp.zeros(()).block_until_ready()
    imports = peak_mb()
    rows, m, functions = point["rows"], point["inducing"], point["functions"]
    batch = min(BATCH, rows)
    shifts = np.linspace(-1.0, 1.0, functions + 2)[1:-1, None]

    def model(X, y=None):
        lengthscale = numpyro.param("lengthscale", 3.0, constraint=dist.constraints.positive)
        data = numpyro.plate("data", rows, subsample_size=X.shape[0], dim=-1)
        plate = numpyro.plate("functions", functions, dim=-2)
        with numpyro.plate("functions_of_f", functions, dim=-1):
            f = numpyro.sample("f", GP(kernels.Matern52(lengthscale), X))
        with plate, data:
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    def take(i):
        # Mapped anew each time: pages that stay mapped would be counted as memory of ours.
        start = i * batch % (rows - batch + 1)
        part = np.array(np.load(point["file"], mmap_mode="r")[start : start + batch])
        return jnp.asarray(part[:, :-1]), jnp.asarray(part[:, -1] > shifts, part.dtype)

    Z = np.random.default_rng(1).standard_normal((m, INPUTS)).astype(point["precision"])
    svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), optax.adam(0.01), site_lr=0.1)
    state = svi.init(jax.random.key(0), *take(0))
    start = time.perf_counter()
    update = jax.jit(svi.update, donate_argnums=0).lower(state, *take(0)).compile()
    compilation = time.perf_counter() - start
    times = []
    with blas_threads(m):
        while sum(times) < point["seconds"] or len(times) < 4:
            X, y = take(len(times))
            start = time.perf_counter()
            state, _ = jax.block_until_ready(update(state, X, y))
            times.append(time.perf_counter() - start)
    return {
        "step_ms": 1e3 * float(np.median(times[1:])),
        "best_ms": 1e3 * min(times),
        "compile_s": compilation,
        "peak_mb": peak_mb(),
        "import_mb": imports,
    }


def slopes(sizes, values):
    """Exponents of a power law, over all points and over the last two."""
    x, y = np.log(sizes), np.log(np.maximum(values, 1e-3))
    return np.polyfit(x, y, 1)[0], np.polyfit(x[-2:], y[-2:], 1)[0]


def report(rows):
    """Prints the exponents and gives the curves: (what, precision) to sizes, times, memory."""
    curves = {}
    for row in rows:
        found = curves.setdefault((row["varied"], row["precision"]), ([], [], []))
        for values, value in zip(
            found,
            (row[row["varied"]], row["step_ms"], row["peak_mb"] - row["import_mb"]),
            strict=True,
        ):
            values.append(value)
    for (what, precision), (sizes, times, memory) in curves.items():
        (t, t_last), (m, m_last) = slopes(sizes, times), slopes(sizes, memory)
        print(
            f"{what:10} {precision}  time ~ {what}^{t:.2f} (at the end {t_last:.2f})  "
            f"memory ~ {what}^{m:.2f} (at the end {m_last:.2f})"
        )
    return curves


def plot(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(what for what, _ in curves))
    fig, axes = plt.subplots(
        2, len(kinds), figsize=(4.2 * len(kinds), 6.5), layout="constrained", squeeze=False
    )
    for (what, precision), (sizes, times, memory) in curves.items():
        for ax, values in zip(axes[:, kinds.index(what)], (times, memory), strict=True):
            ax.plot(sizes, values, marker="o", label=precision)
    for ax, what in zip(axes[1], kinds, strict=True):
        ax.set_xlabel(
            {"inducing": "inducing inputs", "functions": "latent functions"}.get(what, what)
        )
    for ax in axes.flat:
        ax.set(xscale="log", yscale="log")
        low, high = ax.get_ylim()
        if high < 3 * low:  # flat: not a picture of noise
            ax.set_ylim(low / 3, high * 3)
    axes[0, 0].set_ylabel("milliseconds a step")
    axes[1, 0].set_ylabel("peak memory above imports, MB")
    axes[0, 0].legend()
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="a folder")
    parser.add_argument("--precisions", default="float64", help="float64, float32 or both")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each point")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for tests")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(measure(json.loads(args.point))))
        return
    args.output.mkdir(parents=True, exist_ok=True)
    base, grid = (QUICK_BASE, QUICK) if args.quick else (BASE, GRID)
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        open(args.output / "scaling.csv", "w", newline="") as file,
    ):
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for precision in args.precisions.split(","):
            for what, sizes in grid.items():
                for size in sizes:
                    point = base | {what: size, "precision": precision}
                    path = Path(folder) / f"{point['rows']}_{precision}.npy"
                    if not path.exists():
                        write_rows(path, point["rows"], precision)
                    asked = {"file": str(path), "seconds": 0.0 if args.quick else args.seconds}
                    command = [sys.executable, __file__, "--point", json.dumps(point | asked)]
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    row = {"varied": what, **point, **json.loads(done.stdout.splitlines()[-1])}
                    rows.append(row)
                    writer.writerow(row)
                    file.flush()
                    print(
                        f"{what} = {size}: {row['step_ms']:.1f} ms, {row['peak_mb']:.0f} MB "
                        f"(imports {row['import_mb']:.0f}), compiled in {row['compile_s']:.1f} s",
                        flush=True,
                    )
    plot(report(rows), args.output / "scaling.png")


if __name__ == "__main__":
    main()
