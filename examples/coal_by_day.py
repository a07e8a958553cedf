"""A long series of events: coal-mining disasters in Britain, day by day.

    python examples/coal_by_day.py

40,634 days with 191 disasters. A log-Gaussian Cox process on so many bins is out of reach
of a dense GP and blurred by inducing inputs; with Markov sites it is linear in their number. Writes
``coal_by_day.png``.
"""

# %% Imports
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import load, options, save

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

jax.config.update("jax_enable_x64", True)
args = options("coal_by_day", __doc__)
steps = 2 if args.quick else 60

# %% [markdown]
# Days since the first of 1851, and how many disasters each had.

# %%
(dates,) = load("coal.csv")
day = 1 / 365.25
last = 1852.0 if args.quick else 1962.25
edges = np.arange(1851.0, last, day)
y, _ = np.histogram(dates, edges)
t = (edges[:-1] + edges[1:]) / 2
print(f"{len(t):,} days, {y.sum()} disasters")


# %% [markdown]
# A slow change of the rate over decades, and a fast one over weeks or months, if disasters come in
# clusters. One function, whose state has four numbers.


# %%
def model(t, y=None):
    decades = numpyro.sample("decades", dist.LogNormal(3.0, 0.7))  # lengthscales in years
    months = numpyro.sample("months", dist.LogNormal(-1.5, 0.7))
    slow = numpyro.sample("slow", dist.HalfNormal(1.0))
    fast = numpyro.sample("fast", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    kernel = slow**2 * kernels.Matern52(decades) + fast**2 * kernels.Matern12(months)
    f = numpyro.sample("f", GP(kernel, t, mean=level))
    with numpyro.plate("days", t.shape[0]):
        numpyro.sample("y", dist.Poisson(day * jnp.exp(f)), obs=y)  # exp(f): disasters a year


# %% [markdown]
# All days with Markov sites, and the same model with 100 inducing inputs for each function.

# %%
inducing = np.linspace(1851.0, last, 10 if args.quick else 100)
guides = {
    "Markov sites": AutoDualGaussian(model, markov=True),
    "100 inducing inputs": AutoDualGaussian(model, inducing=inducing, learn_inducing=False),
}
fits = {}
for name, guide in guides.items():
    svi = TSVGP(model, guide, optax.adam(0.1))
    start = time.perf_counter()
    result = svi.run(jax.random.key(0), steps, t, y, progress_bar=False, audit=False)
    fits[name] = result.fit
    found = {k: round(float(v), 3) for k, v in result.fit.hyper.items()}
    seconds = time.perf_counter() - start
    print(f"{name}: bound {-result.losses[-1]:.2f} after {steps} steps, {seconds:.0f} s, {found}")

# %% A picture
fig, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
per_year, bins = np.histogram(dates, np.arange(1851, int(last) + 1))
axes[0].bar(bins[:-1] + 0.5, per_year, width=0.9, color="0.85", zorder=0, label="count of the year")
some = (1851.0, 1852.0) if args.quick else (1876.0, 1882.0)
for ax, x in ((axes[0], np.linspace(1851.0, last, 800)), (axes[1], np.linspace(*some, 800))):
    for i, (name, fit) in enumerate(fits.items()):
        q = fit.marginals(x)["f"]
        low, middle, high = (np.exp(q.mean + z * np.sqrt(q.variance)) for z in (-1, 0, 1))
        ax.fill_between(x, low, high, color=f"C{i}", alpha=0.2, linewidth=0)
        ax.plot(x, middle, color=f"C{i}", linewidth=1, label=name)
here = dates[(dates > some[0]) & (dates < some[1])]
axes[1].plot(here, np.zeros_like(here), "|", color="0.2", markersize=14, label="a disaster")
axes[0].set(
    title="rate: median and 68% band", ylabel="disasters a year", xlabel="year", ylim=(0, None)
)
axes[1].set(title="six of these years", ylabel="disasters a year", xlabel="year", ylim=(0, None))
for ax in axes:
    ax.legend()
save(fig, args)
