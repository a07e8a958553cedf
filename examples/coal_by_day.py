"""A long series of events: coal-mining disasters in Britain, day by day.

    python examples/coal_by_day.py

40,633 days with 191 disasters. A log-Gaussian Cox process on so many bins is out of reach
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
# A slow change of the rate, and a season: colliery explosions have been said to come more often in
# winter, when the pressure of the air falls. Its kernel is a periodic one with five harmonics.


# %%
def model(t, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(3.0, 0.7))  # in years
    deviation = numpyro.sample("deviation", dist.HalfNormal(1.0))
    season = numpyro.sample("season", dist.HalfNormal(0.5))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    slow = deviation**2 * kernels.Matern52(lengthscale)
    yearly = season**2 * kernels.Periodic(1.5, 1.0, order=5)
    f = numpyro.sample("f", GP(slow, t, mean=level))
    g = numpyro.sample("g", GP(yearly, t))
    with numpyro.plate("days", t.shape[0]):
        numpyro.sample("y", dist.Poisson(day * jnp.exp(f + g)), obs=y)  # disasters a year


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
    svi = TSVGP(model, guide, optax.adam(0.05))
    start = time.perf_counter()
    result = svi.run(jax.random.key(0), steps, t, y, progress_bar=False, audit=False)
    fits[name] = result.fit
    found = {k: round(float(v), 3) for k, v in result.fit.hyper.items()}
    seconds = time.perf_counter() - start
    print(f"{name}: bound {-result.losses[-1]:.2f} after {steps} steps, {seconds:.0f} s, {found}")

# %% A picture
fig, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", width_ratios=[2, 1])
years = np.linspace(1851.0, last, 400)
per_year, bins = np.histogram(dates, np.arange(1851, int(last) + 1))
axes[0].bar(bins[:-1] + 0.5, per_year, width=0.9, color="0.85", zorder=0, label="count of the year")
month = np.linspace(1900.0, 1901.0, 200) if not args.quick else np.linspace(1851.0, 1852.0, 200)
for i, (name, fit) in enumerate(fits.items()):
    f, g = fit.marginals(years)["f"], fit.marginals(month)["g"]
    for ax, x, q in ((axes[0], years, f), (axes[1], 12 * (month - month[0]), g)):
        low, middle, high = (np.exp(q.mean + z * np.sqrt(q.variance)) for z in (-2, 0, 2))
        ax.fill_between(x, low, high, color=f"C{i}", alpha=0.2, linewidth=0)
        ax.plot(x, middle, color=f"C{i}", label=name)
axes[0].set(title="disasters a year, without the season", xlabel="year")
axes[0].legend()
axes[1].axhline(1.0, color="0.6", linewidth=0.8)
axes[1].set(title="season: factor of the rate", xlabel="month", xlim=(0, 12))
save(fig, args.output)
