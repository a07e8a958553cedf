"""Figure 2: the M-step's objective and its argmax as functions of the old hyperparameter.

    python examples/paper/figure2.py

For each old variance the E-step is run to convergence; the contours show the objective of the
M-step that follows, the line its argmax, and the staircase EM from 2.5. Where the line crosses the
diagonal EM rests; the flatter it is there, the faster EM gets there.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from common import UNWHITENED, WHITENED, Results, T, plt
from toy import X, Y, Z, bound_at, model
from tqdm import tqdm

METHODS = (T, UNWHITENED, WHITENED)
START, STAIRS = 2.5, 8
GRID = np.linspace(0.05, 3.2, 64)


class EM:
    """One method: what an E-step at an old variance makes of the objective, and its argmax."""

    def __init__(self, method):
        svi = method.make(model, Z, None, site_lr=0.8, e_steps=60, learn_inducing=False)
        self.start = svi.init(jax.random.key(0), X, Y)
        self.update = jax.jit(svi.update)
        at = partial(bound_at, svi)
        self.bounds = jax.jit(lambda state, grid: jax.lax.map(lambda v: at(state, v), grid))

    def __call__(self, old):
        free = {**self.start.optim_state, "variance": jnp.log(old)}
        state, _ = self.update(dataclasses.replace(self.start, optim_state=free), X, Y)
        values, grid = self.bounds(state, GRID), GRID
        best = np.argmax(values)
        for _ in range(2):  # zoom in, then the top of a parabola through the best three
            log = np.log(grid[[max(best - 1, 0), min(best + 1, len(grid) - 1)]])
            grid = np.exp(np.linspace(*log, len(grid)))
            fine = np.asarray(self.bounds(state, grid))
            best = np.clip(np.argmax(fine), 1, len(grid) - 2)
        low, mid, high = fine[best - 1 : best + 2]
        shift = 0.5 * (low - high) / min(low - 2 * mid + high, -1e-300)
        step = np.log(grid[1] / grid[0])
        return np.asarray(values), float(grid[best] * np.exp(np.clip(shift, -1, 1) * step))


def main() -> None:
    results = Results("figure2", __doc__)
    olds = np.linspace(0.1, 3.0, 4 if results.quick else 59)
    figure, axes = plt.subplots(2, 3, figsize=(12, 7.5), layout="constrained")
    columns, stairs = {"old_variance": olds}, {"iteration": range(STAIRS + 1)}
    bar = tqdm(total=len(METHODS) * (len(olds) + STAIRS))
    for method, column in zip(METHODS, axes.T, strict=True):
        objective = EM(method)
        values, best = [], []
        for old in olds:
            value, argmax = objective(old)
            values.append(value)
            best.append(argmax)
            bar.update()
        path = [START]
        for _ in range(STAIRS):
            path.append(objective(path[-1])[1])
            bar.update()
        columns[method.key], stairs[method.key] = best, path
        draw(column, method, olds, GRID, np.array(values), best, path)
    bar.close()
    results.table(columns)
    results.table(stairs, "figure2_em_from_2.5")
    results.picture(figure)
    for method in METHODS:
        slope = np.gradient(columns[method.key], olds)
        where = np.argmin(np.abs(np.array(columns[method.key]) - olds))
        path = ", ".join(f"{v:.3f}" for v in stairs[method.key])
        print(f"{method.label}: slope {slope[where]:.3f} at {olds[where]:.2f}; EM: {path}")


def draw(axes, method, olds, grid, values, best, path):
    top, bottom = axes
    relative = values - values.max()
    levels = -np.geomspace(40, 0.01, 14)
    style = {"colors": "tab:blue", "linewidths": 0.6, "linestyles": "-"}
    top.contour(olds, grid, relative.T, levels=levels, **style)
    top.set(title=method.label, ylabel="new variance", ylim=(0.05, 3.0), xlim=(0.1, 3.0))
    top.plot([], [], color="tab:blue", lw=0.6, label="contours of the objective")
    bottom.plot(olds, olds, color="black", lw=0.7, label="new = old")
    corners = np.repeat(path, 2)
    bottom.plot(corners[:-1], corners[1:], color="black", ls="--", lw=1, label="EM from 2.5")
    bottom.set(ylabel="new variance: argmax of the objective")
    bottom.set(xlabel="old variance", ylim=(0.05, 3.0), xlim=(0.1, 3.0))
    for ax in axes:
        ax.plot(olds, best, color="tab:orange", label="argmax of the objective")
        ax.legend(fontsize=8)


if __name__ == "__main__":
    main()
