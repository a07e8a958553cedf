"""Counts: the rate of coal-mining disasters in Britain, 1851 to 1962.

    python examples/counts.py

191 dates, counted in quarters of a year: a log-Gaussian Cox process. Writes ``counts.png``.
"""

# %% Imports
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import band, load, options, save

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, loo

jax.config.update("jax_enable_x64", True)
args = options("counts", __doc__)
steps = 3 if args.quick else 200

# %% [markdown]
# The data are 448 small counts. Most are zero, so a Gaussian likelihood would be out of place.

# %%
(dates,) = load("coal.csv")
edges = np.arange(1851.0, 1963.01, 0.25)
y, _ = np.histogram(dates, edges)
X = (edges[:-1] + edges[1:]) / 2

# %% [markdown]
# Two models that differ in one line. The Poisson has a variance equal to its mean; the Negative
# Binomial has a concentration that lets it be larger.


# %%
def poisson(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(3.0, 0.7))  # in years
    deviation = numpyro.sample("deviation", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", GP(deviation**2 * kernels.Matern52(lengthscale), X, mean=level))
    with numpyro.plate("quarters", X.shape[0]):
        numpyro.sample("y", dist.Poisson(0.25 * jnp.exp(f)), obs=y)  # exp(f): disasters a year


def negative_binomial(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(3.0, 0.7))
    deviation = numpyro.sample("deviation", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 1.0))
    f = numpyro.sample("f", GP(deviation**2 * kernels.Matern52(lengthscale), X, mean=level))
    with numpyro.plate("quarters", X.shape[0]):
        rate = 0.25 * jnp.exp(f)
        numpyro.sample("y", dist.NegativeBinomial2(rate, concentration), obs=y)


# %% [markdown]
# Fit both with 25 inducing inputs and score them by leave-one-out, from the sites.

# %%
X_new = np.linspace(1851.0, 1963.0, 300)
models = {"Poisson": poisson, "negative binomial": negative_binomial}
rates = {}
for name, model in models.items():
    guide = AutoDualGaussian(model, inducing=np.linspace(1851.0, 1963.0, 25))
    svi = TSVGP(model, guide, optax.adam(0.05))
    result = svi.run(jax.random.key(0), steps, X, y)
    rates[name] = guide.marginals(result.params, X_new)["f"]
    points = guide.median(result.params, X_new[:1])
    print({k: round(float(v), 3) for k, v in points.items() if k != "f"})
    if not args.quick:
        print(loo(result.fit))

# %% A picture
fig, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", width_ratios=[2, 1])
f = rates["Poisson"]
q = {z: np.exp(f.mean + z * np.sqrt(f.variance)) for z in (-2, -1, 0, 1, 2)}
axes[0].fill_between(X_new, q[-2], q[2], color="C0", alpha=0.2, linewidth=0)
axes[0].fill_between(X_new, q[-1], q[1], color="C0", alpha=0.3, linewidth=0)
axes[0].plot(X_new, q[0], label="posterior median, 68% and 95% bands")
per_year, years = np.histogram(dates, np.arange(1851, 1964))
axes[0].bar(years[:-1] + 0.5, per_year, width=0.9, color="0.8", zorder=0, label="count of the year")
axes[0].set(title="coal-mining disasters", xlabel="year", ylabel="disasters a year")
axes[0].legend()
for i, (name, f) in enumerate(rates.items()):
    band(axes[1], X_new, f.mean, np.sqrt(f.variance), f"C{i}", name)
axes[1].set(title="log of the rate, by likelihood", xlabel="year")
axes[1].set_ylabel("log of disasters a year")
axes[1].legend()
save(fig, args)
