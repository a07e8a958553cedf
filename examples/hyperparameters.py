"""Hyperparameters three ways: a point (MAP), a variational posterior, and NUTS.

    python examples/hyperparameters.py

Thirty yearly counts, too few to tell how much the rate varies, and how fast. The best single
answer is 'hardly at all', with a band that is far too narrow. Writes ``hyperparameters.png``.
"""

# %% Imports
import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import load, options, save
from numpyro.infer import MCMC, NUTS, init_to_value
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, collapse, kernels, to_arviz
from numpyro_tsvgp.gaussian.linalg import blas_threads

jax.config.update("jax_enable_x64", True)
args = options("hyperparameters", __doc__)
steps, draws, chains = (3, 5, 1) if args.quick else (600, 400, 4)

# %% [markdown]
# Coal-mining disasters in Britain, counted by year, and the model of the rate. Its standard
# deviation has a prior that is highest at zero: no variation is the simplest story.

# %%
(dates,) = load("coal.csv")
y, edges = np.histogram(dates, np.arange(1851, 1882))
X = edges[:-1] + 0.5


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.5, 0.7))  # in years
    deviation = numpyro.sample("deviation", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(1.0, 1.0))
    f = numpyro.sample("f", GP(deviation**2 * kernels.Matern52(lengthscale), X, mean=level))
    with numpyro.plate("years", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


# %% [markdown]
# A point, and a Gaussian over the unconstrained hyperparameters, differ in one argument.

# %%
inducing = X[::2]


def fit(**options):
    guide = AutoDualGaussian(model, inducing=inducing, learn_inducing=False, **options)
    return TSVGP(model, guide, optax.adam(0.02)).run(jax.random.key(0), steps, X, y).fit


point = fit()
variational = fit(hyper_guide=AutoMultivariateNormal)

# %% [markdown]
# NUTS runs on the model with the GP integrated out, which has three parameters. It starts from a
# fit; that the fit is at a poor value of the hyperparameters does not matter, since the density
# makes the sites anew.

# %%
start = init_to_value(values=variational.hyper)
mcmc = MCMC(
    NUTS(collapse(variational), init_strategy=start, target_accept_prob=0.9),
    num_warmup=draws,
    num_samples=draws,
    num_chains=chains,
    chain_method="vectorized",
    progress_bar=not args.quick,
)
with blas_threads():  # several times faster on a busy machine
    mcmc.run(jax.random.key(1), X, y)
X_new = np.linspace(1846.0, 1886.0, 81)
data = to_arviz(jax.random.key(2), variational, mcmc=mcmc, predictions=X_new, prior=False)
if not args.quick:
    print(az.summary(data, var_names=["lengthscale", "deviation", "level"]))

# %% [markdown]
# The posterior of the rate: quantiles of draws for the two that have draws of hyperparameters.

# %%
f_point = point.marginals(X_new)["f"]
rates = {
    "MAP": f_point.mean + np.sqrt(f_point.variance) * dist.Normal().icdf(np.c_[[0.025, 0.5, 0.975]])
}
f = variational.sample(jax.random.key(3), X_new, sample_shape=(chains * draws,))
rates["variational"] = np.quantile(f["f"], (0.025, 0.5, 0.975), axis=0)
f_nuts = np.asarray(data["predictions"]["f"]).reshape(-1, len(X_new))
rates["NUTS"] = np.quantile(f_nuts, (0.025, 0.5, 0.975), axis=0)

# %% A picture
fig, axes = plt.subplots(2, 3, figsize=(11, 6.4), layout="constrained", height_ratios=[3, 2])
for i, (name, (low, middle, high)) in enumerate(rates.items()):
    ax = axes[0, i]
    ax.bar(X, y, width=0.9, color="0.85", zorder=0, label="count of the year")
    ax.fill_between(X_new, np.exp(low), np.exp(high), color=f"C{i}", alpha=0.3, linewidth=0)
    ax.plot(X_new, np.exp(middle), color=f"C{i}", label="rate: median, 95% band")
    ax.set(title=name, xlabel="year", ylabel="disasters a year", ylim=(0, y.max() + 0.5))
axes[0, 0].legend(loc="upper left")
samples = {k: np.asarray(v) for k, v in mcmc.get_samples().items()}
for ax, name in zip(axes[1], ("deviation", "lengthscale", "level"), strict=True):
    bins = np.linspace(*np.quantile(samples[name], (0.0, 0.99)), 40)
    ax.hist(samples[name], bins, density=True, color="C2", alpha=0.5, label="NUTS")
    options = dict(density=True, histtype="step", color="C1", linewidth=2)
    ax.hist(np.asarray(f[name]), bins, label="variational", **options)
    ax.axvline(point.hyper[name], color="C0", linewidth=2, label="MAP")
    unit = {"lengthscale": " (years)", "level": " of the log rate"}.get(name, " of the log rate")
    ax.set(xlabel=name + unit, ylabel="posterior density", yticks=[])
axes[1, 0].legend()
save(fig, args)
