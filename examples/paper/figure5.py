"""Figure 5: seconds for 100 iterations on MNIST as the number of inducing inputs grows.

    python examples/paper/figure5.py --data DIRECTORY

One E-step and one M-step an iteration, minibatches of 200, as in ``mnist.py``. The two methods take
their steps in turn, so that whatever else the machine does slows both alike.
"""

import numpy as np
from common import WHITENED, Results, T, plt, published
from mnist import Run, load_mnist
from tqdm import tqdm

METHODS = (T, WHITENED)


def main() -> None:
    results = Results("figure5", __doc__, steps=60)
    X, y = load_mnist(results.args.data)
    methods, sizes, steps = METHODS, (50, 100, 150, 200, 250), results.args.steps
    if results.quick:
        methods, X, y, sizes, steps = METHODS[:1], X[:2000], y[:2000], (10,), 2
    data = (X, y), (X[:0], y[:0])
    columns = {"m": sizes, **{m.key: [] for m in methods}, **{f"{m.key}_best": [] for m in methods}}
    for size in sizes:
        runs = {m.key: Run(m, data, False, 0.03, 0.02, m=size) for m in methods}
        for _ in tqdm(range(steps), desc=f"m = {size}"):
            for run in runs.values():
                run.step()
        for key, run in runs.items():
            columns[key].append(float(100 * np.median(run.seconds)))
            columns[f"{key}_best"].append(float(100 * np.min(run.seconds)))
    results.table(columns)
    plot(results, methods, columns)


def plot(results, methods, columns):
    table = published("fig5_seconds_per_100_steps_vs_m")
    figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    names = (("t_svgp", "t-SVGP"), ("q_svgp", "q-SVGP"))
    for method, (name, label) in zip(methods, names, strict=False):
        style = {"color": method.colour, "marker": "o"}
        ax.plot(table["m"], table[name], ls=":", label=f"{label}, published", **style)
        ax.plot(columns["m"], columns[method.key], label=f"{method.label}, ours", **style)
    ax.set(xlabel="inducing inputs m", ylabel="seconds for 100 iterations", yscale="log")
    ax.legend()
    results.picture(figure)


if __name__ == "__main__":
    main()
