"""Which labels look wrong? The influence of each point on the posterior, from its site alone.

    python examples/influence.py

Flips 12 labels of the banana data, fits, and ranks points by how far the posterior would move
without them. Writes ``influence.png``.
"""

# %% Imports
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import load, options, save

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, inducing, influence, kernels

jax.config.update("jax_enable_x64", True)
args = options("influence", __doc__)


# %%
def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 0.5))
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


# %%
x1, x2, y = load("banana.csv")
X = np.stack([x1, x2], axis=1)

# %% [markdown]
# Flip labels of points whose fifteen nearest neighbours agree with them: near the boundary a
# flipped label is as good as an honest one.

# %%
nearest = np.argsort(((X[:, None] - X[None]) ** 2).sum(-1), axis=1)[:, 1:16]
clear = np.flatnonzero((y[nearest] == y[:, None]).all(1))
flipped = np.random.RandomState(0).choice(clear, 12, replace=False)
y[flipped] = 1 - y[flipped]

# %% Fit, and ask for the influence of each point
guide = AutoDualGaussian(model, inducing=inducing.kmeans(jax.random.key(0), X, 40))
svi = TSVGP(model, guide, optax.adam(0.05))
result = svi.run(jax.random.key(1), 3 if args.quick else 200, X, y)
score = influence(result.fit)["influence"].values

top = np.argsort(-score)[:20]
print(f"planted label errors among the 20 most influential of {len(y)} points: ", end="")
print(f"{len(set(top) & set(flipped))} of {len(flipped)}")

# %% A picture
fig, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
size = 6 + 150 * score / score.max()
for label, colour in ((0, "tab:blue"), (1, "tab:red")):
    axes[0].scatter(
        *X[y == label].T,
        s=size[y == label],
        c=colour,
        alpha=0.5,
        linewidths=0,
        label=f"class {label}",
    )
axes[0].scatter(
    *X[flipped].T, s=110, facecolors="none", edgecolors="black", label="label was flipped"
)
axes[0].legend()
axes[0].set(title="banana data (area: influence)", xlabel="$x_1$", ylabel="$x_2$")
order = np.argsort(-score)
colours = np.where(np.isin(order, flipped), "black", "lightgray")
axes[1].bar(np.arange(60), score[order][:60], color=colours[:60])
axes[1].set(
    title="sixty most influential points (black: flipped)", ylabel="influence (nats)", xlabel="rank"
)
save(fig, args)
