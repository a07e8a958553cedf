"""Predictions in units of the data, and draws that are functions: coal-mining disasters again.

    python examples/predictions.py

What a count of a year will be, when the rate was at its highest, and how fast it fell; then the
same predictions from a file, as a server would make them. Writes ``predictions.png``.
"""

# %% Imports
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import load as load_columns
from _common import options
from _common import save as save_picture

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, load, save

jax.config.update("jax_enable_x64", True)
args = options("predictions", __doc__)
steps, num = (3, 20) if args.quick else (200, 500)

# %% [markdown]
# 191 dates, counted by year. The last ten years are kept back.

# %%
(dates,) = load_columns("coal.csv")
y, edges = np.histogram(dates, np.arange(1851, 1963))
years = edges[:-1] + 0.5
X, held_out = years[:-10], years[-10:]


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(3.0, 0.7))
    deviation = numpyro.sample("deviation", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", GP(deviation**2 * kernels.Matern52(lengthscale), X, mean=level))
    with numpyro.plate("years", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


guide = AutoDualGaussian(model, inducing=np.linspace(1851.0, 1953.0, 25))
fit = TSVGP(model, guide, optax.adam(0.05)).run(jax.random.key(0), steps, X, y[:-10]).fit

# %% [markdown]
# The distribution of the counts themselves: bands are whole numbers, and years that were kept back
# get a log score.

# %%
at = fit.predict(years)
print(at)
low, high = at.interval(0.9)
inside = (y[:-10] >= low[:-10]) & (y[:-10] <= high[:-10])
print(f"{inside.mean():.0%} of the counts are inside of the 90% band")
print("log score of the last ten years:", fit.predict(held_out).log_prob(y[-10:]).mean().round(3))

# %% [markdown]
# Draws that are functions: where each has its maximum, and its derivative.

# %%
draws = fit.functions(jax.random.key(1), num)
fine = jnp.linspace(1851.0, 1962.0, 1000)
values = draws["f"](fine)
peaks = fine[values.argmax(-1)]
slopes = jax.vmap(jax.jacfwd(lambda x: draws["f"](x[None])[:, 0]), out_axes=-1)(fine)

# %% [markdown]
# A server loads the predictor: the kernel and the posterior, without training data.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "predictor.npz"
    save(path, fit.predictor())
    served = load(path, model=model)
    again = served.predict(years).mean
print("largest difference of the means it serves:", float(jnp.abs(again - at.mean).max()))

# %% A picture
fig, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained", width_ratios=[2, 1, 1.3])
axes[0].fill_between(
    years, low, high, step="mid", alpha=0.25, linewidth=0, label="90% predictive band"
)
axes[0].plot(years, at.mean, label="predictive mean")
axes[0].plot(years[:-10], y[:-10], "k.", markersize=4, label="counts")
axes[0].plot(held_out, y[-10:], "C3.", label="counts kept back")
axes[0].set(title="counts and their predictions", xlabel="year", ylabel="disasters a year")
axes[0].legend()
axes[1].hist(peaks, np.arange(1851, 1963, 4), density=True, color="C1", alpha=0.7)
axes[1].set(title="year of the highest rate", xlabel="year", ylabel="posterior density")
axes[1].set_yticks([])
lines = axes[2].plot(fine, slopes[:20].T, color="C2", alpha=0.3, linewidth=0.8)
lines[0].set_label("twenty draws")
axes[2].plot(fine, slopes.mean(0), color="C2", label="mean of all draws")
axes[2].axhline(0.0, color="0.5", linewidth=0.8)
axes[2].set(title="slope of the log rate", xlabel="year", ylabel="change a year")
axes[2].legend()
save_picture(fig, args)
