"""A long count series: trend, two seasonalities and a forecast, with Markov sites.

    python examples/time_series.py

Hourly counts of 200 days, simulated: a slow trend, a day, a week, and what wanders within days.
Two weeks are forecast. 100 inducing inputs hold the first three, but not the last. Writes
``time_series.png``.
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
from _common import options, save

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

jax.config.update("jax_enable_x64", True)
args = options("time_series", __doc__)
days, ahead, steps = (15, 5, 2) if args.quick else (200, 14, 25)

# %% [markdown]
# Simulated counts an hour, time in days. A tenth of the hours are missing and two weeks have no
# data at all; times need not be evenly spaced, nor in order.

# %%
rng = np.random.default_rng(0)
hours = np.arange(0.0, days + ahead, 1 / 24)
weekend = np.where(hours % 7 >= 5, -0.8, 0.0)
rate = 1.0 + 0.6 * np.sin(hours / 35) + 0.7 * np.sin(2 * np.pi * hours) + weekend
wander, keep = np.zeros(len(hours)), np.exp(-1 / 12)  # it forgets within half a day
for i in range(1, len(hours)):
    wander[i] = keep * wander[i - 1] + 0.6 * np.sqrt(1 - keep**2) * rng.standard_normal()
rate = rate + wander
counts = rng.poisson(np.exp(rate))
gap = (hours > 0.45 * days) & (hours < 0.45 * days + 14)
seen = (hours < days) & ~gap & (rng.uniform(size=len(hours)) > 0.1)
t, y = hours[seen], counts[seen]
print(f"{len(t):,} counts")


# %% [markdown]
# One function of time: a trend whose slope wanders, a week, a day, and what is left. The state has
# 2 + 1 + 7 + 7 + 1 numbers.


# %%
def model(t, y=None):
    weekly = numpyro.sample("weekly", dist.HalfNormal(1.0))
    daily = numpyro.sample("daily", dist.HalfNormal(1.0))
    rest = numpyro.sample("rest", dist.HalfNormal(0.5))
    trend = kernels.IntegratedBrownian(0.0005**2, origin=-1.0) + 1.0  # 0.8 after 200 days
    week = weekly**2 * kernels.Periodic(1.5, 7.0, order=3)
    day = daily**2 * kernels.Periodic(1.5, 1.0, order=3)
    f = numpyro.sample("f", GP(trend + week + day + rest**2 * kernels.Matern12(0.5), t))
    with numpyro.plate("hours", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


# %%
Z = np.linspace(0.0, days, 10 if args.quick else 100)
guides = {
    "Markov sites": AutoDualGaussian(model, markov=True),
    "100 inducing inputs": AutoDualGaussian(model, inducing=Z, learn_inducing=False),
}
future = hours >= days - 7
found = {}
for name, guide in guides.items():
    svi = TSVGP(model, guide, optax.lbfgs())
    start = time.process_time()
    result = svi.run(jax.random.key(0), steps, t, y, progress_bar=False, audit=False)
    seconds = time.process_time() - start
    fit = result.fit
    found[name] = (
        fit.marginals(hours)["f"],
        fit.sample(jax.random.key(1), hours[future], sample_shape=(200,)),
    )
    q = found[name][0]
    density = dist.Poisson(jnp.exp(found[name][1]["f"])).log_prob(counts[future])
    score = float((jax.nn.logsumexp(density, 0) - np.log(200))[hours[future] >= days].mean())
    print({k: round(float(v), 3) for k, v in fit.hyper.items()})
    print(
        f"{name}: bound {-result.losses[-1]:.1f}, {seconds:.0f} s of CPU time, "
        f"log density of a count to come {score:.3f}"
    )

# %% A picture
fig, axes = plt.subplots(2, 1, figsize=(11, 6.5), layout="constrained")
some = (hours >= days - 22) & (hours < days - 7)
for i, (name, (q, draws)) in enumerate(found.items()):
    low, middle, high = (np.exp(q.mean + z * np.sqrt(q.variance)) for z in (-1, 0, 1))
    axes[0].fill_between(hours[some], low[some], high[some], color=f"C{i}", alpha=0.2, linewidth=0)
    axes[0].plot(hours[some], middle[some], color=f"C{i}", label=name)
    simulated = rng.poisson(np.exp(np.asarray(draws["f"])))
    low, high = np.quantile(simulated, [0.05, 0.95], axis=0)
    axes[1].fill_between(hours[future], low, high, color=f"C{i}", alpha=0.2, linewidth=0)
    axes[1].plot(hours[future], middle[future], color=f"C{i}", label=name)
axes[0].plot(hours[some], np.exp(rate[some]), "k:", linewidth=1, label="true rate")
observed = some & seen
axes[0].plot(hours[observed], counts[observed], ".", color="0.6", markersize=3, label="counts")
axes[0].set(
    title="rate in two of the weeks: median and 68% band", xlabel="day", ylabel="counts an hour"
)
axes[1].plot(hours[future], counts[future], ".", color="0.4", markersize=3, label="counts")
axes[1].axvline(days, color="0.5", linestyle=":", label="end of the data")
axes[1].set(xlabel="day", ylabel="counts an hour")
axes[1].set_title("the last week and the forecast: median of the rate, 90% band of counts")
for ax in axes:
    ax.legend(loc="upper left", ncols=2, fontsize=9)
    ax.margins(x=0)
save(fig, args)
