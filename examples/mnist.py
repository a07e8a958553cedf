"""Ten classes in minibatches: handwritten digits.

    python examples/mnist.py                    # 1797 small digits, shipped with the example
    python examples/mnist.py --data mnist.npz   # arrays X (70000, 784) and y, 60000 for training
    python examples/mnist.py --data openml      # fetched by scikit-learn

Ten latent functions meet in one softmax. A step costs as much as its batch, whatever the size of
the data. Writes ``mnist.png``.
"""

# %% Imports
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import DATA, options, save

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, inducing, kernels

args = options("mnist", __doc__, data="an .npz file with X and y, or the word openml")

# %% [markdown]
# float32, JAX's default, is enough here. Pixels are scaled to lie between 0 and 1.

# %%
if args.data is not None and str(args.data) == "openml":
    from sklearn.datasets import fetch_openml

    X, y = fetch_openml("mnist_784", return_X_y=True, as_frame=False)
else:
    with np.load(args.data or DATA / "digits.npz") as file:
        X, y = file["X"], file["y"]
train = 60_000 if len(y) == 70_000 else len(y) * 2 // 3
X = np.asarray(X, np.float32) / np.max(X)
y = np.asarray(y, np.int32)
print(f"{train} digits to learn from, {len(y) - train} to test on, {X.shape[1]} pixels")
steps, m, batch = (2, 10, 50) if args.quick else (300, 100, 200)


# %% [markdown]
# The plate subsamples: each step sees the GP at the rows of its batch alone. `scale` of the
# likelihood, N / batch, is NumPyro's own doing.


# %%
def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 1.0))
    deviation = numpyro.sample("deviation", dist.LogNormal(1.0, 1.0))
    data = numpyro.plate("data", X.shape[0], subsample_size=batch if y is not None else None)
    with data as rows:
        inputs, labels = X[rows], None if y is None else y[rows]
    with numpyro.plate("classes", 10, dim=-1):
        f = numpyro.sample("f", GP(deviation**2 * kernels.Matern52(lengthscale), inputs))
    with data:
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=labels)


# %%
Z = inducing.kmeans(jax.random.key(0), X[: min(train, 5000)], m)
guide = AutoDualGaussian(model, inducing=Z)
svi = TSVGP(model, guide, optax.adam(0.02))
result = svi.run(jax.random.key(1), steps, X[:train], y[:train])

# %% [markdown]
# Probabilities of the test digits, by a few draws from the marginals of the ten functions.

# %%
f = guide.marginals(result.params, X[train:])["f"]
noise = jax.random.normal(jax.random.key(2), (32, *f.mean.shape))
p = np.asarray(jax.nn.softmax(f.mean + jnp.sqrt(f.variance) * noise, axis=1).mean(0))  # (10, n)
truth = y[train:]
error = np.mean(p.argmax(0) != truth)
nlpd = -np.mean(np.log(p[truth, np.arange(len(truth))]))
print(f"test error {error:.2%}, negative log predictive density {nlpd:.3f}")

# %% A picture
fig = plt.figure(figsize=(12, 4.2), layout="constrained")
left, right = fig.subfigures(1, 2, width_ratios=[2, 3])
ax = left.subplots()
ax.plot(np.arange(1, steps + 1), result.losses, linewidth=0.8)
ax.set(
    title=f"loss in steps of {batch} digits",
    xlabel="step",
    ylabel="minus bound (nats)",
    yscale="log",
)
side = int(np.sqrt(X.shape[1]))
unsure = np.argsort(p.max(0))[:10]
for ax, i in zip(right.subplots(2, 5).flat, unsure, strict=True):
    ax.imshow(X[train + i].reshape(side, side), cmap="gray_r")
    best = np.argsort(-p[:, i])[:2]
    ax.set_title(" ".join(f"{k}: {p[k, i]:.0%}" for k in best) + f"\ntruth: {truth[i]}", fontsize=9)
    ax.axis("off")
right.suptitle("the ten least certain test digits")
save(fig, args)
