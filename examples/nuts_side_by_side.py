"""The same model under NUTS and under t-SVGP, side by side.

    python examples/nuts_side_by_side.py

Coal-mining disasters in four-year counts: few enough for NUTS over the whole function. Nothing in
the model changes between the two. Writes ``nuts_side_by_side.png``.
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
from _common import band, load, options, save
from numpyro.infer import MCMC, NUTS

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, collapse, kernels, whiten
from numpyro_tsvgp.gaussian.linalg import blas_threads

jax.config.update("jax_enable_x64", True)
args = options("nuts_side_by_side", __doc__)
steps, draws, width = (3, 5, 16.0) if args.quick else (100, 300, 4.0)

# %%
(dates,) = load("coal.csv")
y, edges = np.histogram(dates, np.arange(1851.0, 1963.1, width))
X = (edges[:-1] + edges[1:]) / 2


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(3.0, 0.5))
    deviation = numpyro.sample("deviation", dist.LogNormal(-0.5, 0.5))
    f = numpyro.sample("f", GP(deviation**2 * kernels.Matern32(lengthscale), X, mean=0.5))
    with numpyro.plate("bins", X.shape[0]):
        numpyro.sample("y", dist.Poisson(width * jnp.exp(f)), obs=y)


# %% NUTS over everything: f, drawn as white noise times the factor of its covariance, and the
# hyperparameters
start = time.perf_counter()
mcmc = MCMC(NUTS(whiten(model)), num_warmup=draws, num_samples=draws, progress_bar=not args.quick)
with blas_threads(len(X)):  # one thread for small matrices, as fits have by themselves
    mcmc.run(jax.random.key(0), X, y)
nuts = mcmc.get_samples()
seconds = {"NUTS": time.perf_counter() - start}

# %% t-SVGP: the same model, two other lines. One site for each bin; hyperparameters by MAP
start = time.perf_counter()
guide = AutoDualGaussian(model)
result = TSVGP(model, guide, optax.adam(0.1)).run(jax.random.key(0), steps, X, y)
f = guide.marginals(result.params, X)["f"]
seconds["t-SVGP, MAP"] = time.perf_counter() - start

posteriors = {
    "NUTS": (nuts["f"].mean(0), nuts["f"].std(0)),
    "t-SVGP, MAP": (f.mean, jnp.sqrt(f.variance)),
}
hyperparameters = {"NUTS": nuts}

# %% In between: NUTS over the two hyperparameters alone, with f integrated out
if not args.quick:
    start = time.perf_counter()
    collapsed = collapse(result.fit)
    mcmc = MCMC(NUTS(collapsed), num_warmup=draws, num_samples=draws)
    with blas_threads(len(X)):
        mcmc.run(jax.random.key(1), X, y)
    mixed = collapsed.marginals(mcmc.get_samples())["f"]
    both = "t-SVGP, NUTS over hyperparameters"
    posteriors[both] = mixed.mean, jnp.sqrt(mixed.variance)
    hyperparameters[both] = mcmc.get_samples()
    seconds[both] = time.perf_counter() - start

# %% How far apart are they?
for name, (mean, sd) in posteriors.items():
    away = np.max(np.abs(mean - posteriors["NUTS"][0]) / posteriors["NUTS"][1])
    ratio = np.mean(sd / posteriors["NUTS"][1])
    print(f"{name}: {seconds[name]:.0f} s with compilation; means at most {away:.2f} deviations")
    print(f"  from those of NUTS, deviations {ratio:.2f} of theirs on average")

# %% A picture
fig, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained", width_ratios=[2, 1, 1])
axes[0].plot(
    X, np.log(np.maximum(y / width, 0.2)), "k.", markersize=4, label="log of the count a year"
)
for i, (name, (mean, sd)) in enumerate(posteriors.items()):
    band(axes[0], X, mean, sd, f"C{i}", name)
axes[0].set(title="posterior of the log rate, two deviations", xlabel="year")
axes[0].legend(fontsize=8)
points = guide.median(result.params, X)
for ax, name in zip(axes[1:], ("lengthscale", "deviation"), strict=True):
    upper = max(np.quantile(draws[name], 0.99) for draws in hyperparameters.values())
    for draws, color in zip(hyperparameters.values(), ("C0", "C2"), strict=False):
        ax.hist(draws[name], np.linspace(0, upper, 21), color=color, alpha=0.4, density=True)
    ax.axvline(points[name], color="C1")
    unit = " (years)" if name == "lengthscale" else ""
    ax.set(title=f"posterior of the {name}", xlabel=name + unit, yticks=[])
save(fig, args.output)
