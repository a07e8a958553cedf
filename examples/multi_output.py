"""Several outputs as a linear mixture: sea temperatures of twelve months, with gaps.

    python examples/multi_output.py

Each month of the El Nino record is an output, each year an input, and the outputs are mixtures of
three latent functions. A third of the years lose some months, which the others fill in. Writes
``multi_output.png``.
"""

# %% Imports
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import band, load, options, save

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

jax.config.update("jax_enable_x64", True)
args = options("multi_output", __doc__)
steps, latents = (3, 2) if args.quick else (500, 3)

# %% [markdown]
# The data: 12 months by 61 years, each month centred on its own mean. In every third year six
# months in a row are hidden.

# %%
year, *months = load("elnino.csv")
Y = np.array(months) - np.mean(months, axis=1, keepdims=True)
Y /= Y.std()
X = year - 1950.0
seen = np.ones(Y.shape, bool)
for i in range(2, len(X), 3):
    seen[(i % 12 + np.arange(6)) % 12, i] = False

# %% [markdown]
# The mixture is `W @ f`, in plain NumPyro: a plate of GPs and a matrix product. Observations that
# are missing are masked.


# %%
def model(X, Y=None, seen=True):
    W = numpyro.sample("W", dist.Normal().expand([12, latents]).to_event(2))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 0.5).expand([latents]))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    with numpyro.plate("latents", latents):
        f = numpyro.sample("f", GP(kernels.Matern32(lengthscale[:, None]), X))
    mixture = numpyro.deterministic("mixture", W @ f)
    months, years = numpyro.plate("months", 12, dim=-2), numpyro.plate("years", X.shape[0], dim=-1)
    with months, years, numpyro.handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(mixture, noise), obs=Y)


# %%
guide = AutoDualGaussian(model, inducing=X)
svi = TSVGP(model, guide, optax.adam(0.03))
result = svi.run(jax.random.key(3), steps, X, Y, seen)

# %% [markdown]
# The mixture is linear, so its mean and variance follow from those of the latent functions.

# %%
X_new = np.linspace(X[0], X[-1], 400)
point = guide.median(result.params, X_new)
W, noise = point["W"], point["noise"]
f = guide.marginals(result.params, X_new)["f"]
mean, variance = W @ f.mean, W**2 @ f.variance

at_data = W @ guide.marginals(result.params, X)["f"].mean
error = np.sqrt(np.mean((at_data - Y)[~seen] ** 2))
plain = np.sqrt(np.mean(Y[~seen] ** 2))
print(f"{np.sum(~seen)} hidden values: root mean square error {error:.3f}, of the mean {plain:.3f}")

# %% A picture
fig, axes = plt.subplots(2, 2, figsize=(12, 5.5), layout="constrained")
names = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
for ax, month in zip(axes.flat, (0, 5, 9), strict=False):
    sd = np.sqrt(variance[month] + noise**2)
    band(ax, 1950 + X_new, mean[month], sd, label="prediction")
    show = seen[month]
    ax.plot(1950 + X[show], Y[month, show], "k.", markersize=5, label="seen")
    ax.plot(1950 + X[~show], Y[month, ~show], "rx", markersize=6, label="hidden from the fit")
    ax.set(title=f"sea temperature, {names[month]}", xlabel="year")
    ax.set_ylabel("anomaly (standardised)")
axes[0, 0].legend(loc="upper left", fontsize=8)
picture = axes[1, 1].imshow(W, cmap="RdBu_r", vmin=-abs(W).max(), vmax=abs(W).max(), aspect="auto")
axes[1, 1].set(yticks=range(12), yticklabels=names, xticks=range(latents))
axes[1, 1].set(title="mixing weights of the months", xlabel="latent function")
fig.colorbar(picture, ax=axes[1, 1], label="weight")
save(fig, args)
