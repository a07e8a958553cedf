"""A stream: batches that come in order and are then gone, the posterior after each of them.

The data are sorted by the first input, so that each batch comes from another region. Inducing
inputs move along, hyperparameters are learned on the way, and a memory of 20 points stands for all
that is gone.

    python examples/streaming.py

Writes ``streaming.png``.
"""

# %% Imports
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import load, options, save

from numpyro_tsvgp import GP, AutoDualGaussian, Stream, inducing, kernels

jax.config.update("jax_enable_x64", True)
args = options("streaming", __doc__)
first_steps, steps, count = (3, 2, 3) if args.quick else (200, 30, 6)

# %% [markdown]
# Four hundred points of two classes, in six batches.

# %%
x1, x2, y = load("banana.csv")
order = np.argsort(x1)
X, y = np.stack([x1, x2], -1)[order], y[order]
batches = [(X[rows], y[rows]) for rows in np.array_split(np.arange(len(X)), count)]


# %%
def model(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", GP(variance * kernels.Matern52(scale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


# %% [markdown]
# The guide starts with eight inducing inputs among the first batch. The stream may use forty.

# %%
guide = AutoDualGaussian(model, inducing=inducing.greedy(kernels.Matern52(1.0), batches[0][0], 8))
stream = Stream(model, guide, optax.adam(0.05), memory=20, num_inducing=40, steps=steps)
fits = []
stream.run(jax.random.key(0), first_steps, batches, each=lambda i, fit: fits.append(fit))

# %% A picture of the posterior after each batch
side = np.linspace(-3.2, 3.2, 20 if args.quick else 60)
grid = np.stack(np.meshgrid(side, side, indexing="xy"), -1).reshape(-1, 2)
fig, axes = plt.subplots(
    -(-count // 3), 3, figsize=(11, 3.6 * -(-count // 3)), layout="constrained", sharey=True
)
for i, (ax, fit) in enumerate(zip(np.ravel(axes), fits, strict=False)):
    mean, variance = (np.asarray(v) for v in fit.marginals(grid)["f"])
    p = 1 / (1 + np.exp(-mean / np.sqrt(1 + np.pi * variance / 8)))
    p = p.reshape(len(side), -1)
    shown = ax.contourf(side, side, p, np.linspace(0, 1, 11), cmap="RdBu_r", alpha=0.6)
    ax.contour(side, side, p, [0.5], colors="k", linewidths=1)
    seen = np.concatenate([b for _, b in batches[: i + 1]])
    old = X[: len(seen)]
    gone = len(seen) - len(batches[i][1])
    ax.scatter(*old[:gone].T, s=3, color="0.6", label="points that are gone")
    for k, color in enumerate(("tab:blue", "tab:red")):
        here = batches[i][0][batches[i][1] == k].T
        ax.scatter(
            *here, s=12, color=color, edgecolors="k", linewidths=0.3, label=f"new, class {k}"
        )
    Z = np.asarray(fit.params["f_auto_inducing"])
    ax.scatter(*Z.T, marker="+", s=30, color="k", linewidths=0.8, label="inducing inputs")
    kept = np.asarray(fit.memory.call.args[0])[: int(fit.memory.count)]
    ax.scatter(*kept.T, s=50, facecolors="none", edgecolors="C2", linewidths=1.5, label="memory")
    hyper = fit.hyper_at(fit.memory.call)
    ax.set_title(f"after {len(seen)} points, lengthscale {float(hyper['scale']):.2f}")
    ax.set(xlim=(-3.2, 3.2), ylim=(-3.2, 3.2), xlabel="$x_1$", ylabel="$x_2$")
handles, labels = np.ravel(axes)[0].get_legend_handles_labels()
fig.legend(handles, labels, loc="outside lower center", ncols=5)
fig.colorbar(shown, ax=axes, label="probability of class 1", shrink=0.6)
save(fig, args)
