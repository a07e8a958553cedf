"""Noise that changes: the motorcycle data with a GP for the mean and one for the log-scale.

    python examples/heteroscedastic.py

Writes ``heteroscedastic.png``.
"""

# %% Imports
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import band, elpd, load, options, save
from numpyro.infer import Predictive

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, loo

jax.config.update("jax_enable_x64", True)
args = options("heteroscedastic", __doc__)
steps, draws = (3, 10) if args.quick else (300, 2000)

# %%
times, accel = load("mcycle.csv")
X = times / 10.0
y = accel / 50.0


# %% [markdown]
# Two GP sites. Both meet in each likelihood term, which is found out by itself: the expectations
# are then taken on a two-dimensional grid.


# %%
def two_gps(X, y=None):
    scale_f = numpyro.sample("scale_f", dist.LogNormal(0.0, 0.5))
    scale_g = numpyro.sample("scale_g", dist.LogNormal(0.0, 0.5))
    level = numpyro.sample("level", dist.Normal(-1.0, 1.0))
    f = numpyro.sample("f", GP(kernels.Matern52(scale_f), X))
    g = numpyro.sample("g", GP(kernels.Matern52(scale_g), X, mean=level))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


def one_gp(X, y=None):
    scale_f = numpyro.sample("scale_f", dist.LogNormal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", GP(kernels.Matern52(scale_f), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


# %%
X_new = np.linspace(0.0, 6.0, 200)
Z = np.linspace(X.min(), X.max(), 25)
models = {"one GP, constant noise": one_gp, "two GPs, changing noise": two_gps}
scores, fits, predictive = {}, {}, {}
for name, model in models.items():
    guide = AutoDualGaussian(model, inducing=Z)
    result = TSVGP(model, guide, optax.adam(0.05)).run(jax.random.key(0), steps, X, y)
    scores[model] = elpd(loo(result.fit))
    fits[model] = guide.marginals(result.params, X_new)
    predict = Predictive(model, guide=guide, params=result.params, num_samples=draws)
    predictive[model] = np.asarray(predict(jax.random.key(1), X_new)["y"])
    print(f"{name}: leave-one-out log density {scores[model]:.1f}")

# %% A picture
fig, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
for ax, (name, model) in zip(axes, models.items(), strict=False):
    low, high = np.quantile(predictive[model], [0.025, 0.975], axis=0)
    ax.fill_between(X_new, low, high, color="0.85", label="95% of predictions")
    f = fits[model]["f"]
    band(ax, X_new, f.mean, np.sqrt(f.variance), label="mean function")
    ax.plot(X, y, "k.", markersize=3, label="data")
    ax.set(title=f"{name}\nleave-one-out score {scores[model]:.1f}", xlabel="time (10 ms)")
    ax.set_ylim(-3.6, 2.6)
axes[0].set_ylabel("acceleration (50 g)")
axes[0].legend(loc="upper left", fontsize=8)
g = fits[two_gps]["g"]
band(axes[2], X_new, g.mean, np.sqrt(g.variance), "C1")
axes[2].set(title="the second GP: log of the noise scale", xlabel="time (10 ms)")
axes[2].set_ylabel("log of (50 g)")
axes[2].legend()
save(fig, args)
