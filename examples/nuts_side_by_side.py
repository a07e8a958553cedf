"""The same model under NUTS and under t-SVGP, side by side.

    python examples/nuts_side_by_side.py

Coal-mining disasters in 224 half-years. NUTS over the whole function has 226 dimensions and
factorises a matrix of 224 rows for each of its gradients, a cost that grows with the cube of the
number of rows; t-SVGP has 25 inducing inputs. Nothing in the model changes between them. Writes
``nuts_side_by_side.png``.
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
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, init_to_value

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, collapse, kernels, whiten
from numpyro_tsvgp.gaussian.linalg import blas_threads

jax.config.update("jax_enable_x64", True)
args = options("nuts_side_by_side", __doc__)
steps, draws, width = (3, 5, 4.0) if args.quick else (200, 200, 0.5)

# %% The model
(dates,) = load("coal.csv")
y, edges = np.histogram(dates, np.arange(1851.0, 1963.01, width))
X = (edges[:-1] + edges[1:]) / 2


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(3.0, 0.5))
    deviation = numpyro.sample("deviation", dist.LogNormal(-0.5, 0.5))
    f = numpyro.sample("f", GP(deviation**2 * kernels.Matern32(lengthscale), X, mean=0.5))
    with numpyro.plate("bins", X.shape[0]):
        numpyro.sample("y", dist.Poisson(width * jnp.exp(f)), obs=y)


seconds, posteriors, hyperparameters = {}, {}, {}

# %% t-SVGP: hyperparameters by MAP
start = time.process_time()
Z = np.linspace(1851.0, 1963.0, 25)
result = TSVGP(model, AutoDualGaussian(model, Z), optax.adam(0.1)).run(
    jax.random.key(0), steps, X, y
)
f = result.fit.marginals(X)["f"]
seconds["t-SVGP, MAP"] = time.process_time() - start
posteriors["t-SVGP, MAP"] = f.mean, jnp.sqrt(f.variance)

# %% In between: NUTS over the two hyperparameters alone, with f integrated out
start = time.process_time()
at_the_fit = init_to_value(values=result.fit.hyper)
collapsed = collapse(result.fit)
mcmc = MCMC(
    NUTS(collapsed, init_strategy=at_the_fit),
    num_warmup=draws,
    num_samples=draws,
    progress_bar=not args.quick,
)
with blas_threads(len(Z)):  # one thread for small matrices, as fits have by themselves
    mcmc.run(jax.random.key(1), X, y)
mixed = collapsed.marginals(mcmc.get_samples())["f"]
name = "t-SVGP, NUTS over hyperparameters"
posteriors[name] = mixed.mean, jnp.sqrt(mixed.variance)
hyperparameters[name] = mcmc.get_samples()
seconds[name] = time.process_time() - start

# %% NUTS over everything: the function as white noise, and the hyperparameters
start = time.process_time()
mcmc = MCMC(
    NUTS(whiten(model), init_strategy=at_the_fit),
    num_warmup=draws,
    num_samples=draws,
    progress_bar=not args.quick,
)
with blas_threads(len(X)):
    mcmc.run(jax.random.key(2), X, y)
nuts = mcmc.get_samples()
posteriors["NUTS"] = nuts["f"].mean(0), nuts["f"].std(0)
hyperparameters["NUTS"] = nuts
seconds["NUTS"] = time.process_time() - start

# %% How far apart are they, and what did they cost?
for name, (mean, sd) in posteriors.items():
    away = np.max(np.abs(mean - posteriors["NUTS"][0]) / posteriors["NUTS"][1])
    ratio = np.mean(sd / posteriors["NUTS"][1])
    print(f"{name}: {seconds[name]:.0f} s of CPU time, with compilation")
    print(f"  means at most {away:.2f} sd from those of NUTS, sds {ratio:.2f} of its on average")
    if name in hyperparameters:
        size = min(
            effective_sample_size(np.asarray(hyperparameters[name][k])[None])
            for k in ("lengthscale", "deviation")
        )
        print(f"  smallest effective sample size of the hyperparameters {size:.0f} of {draws}")

# %% A picture
fig, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained", width_ratios=[2, 1, 1])
colours = dict(zip(posteriors, ("C1", "C2", "C0"), strict=True))
for name, (mean, sd) in reversed(posteriors.items()):
    band(axes[0], X, mean, sd, colours[name], f"{name}: {seconds[name]:.0f} s of CPU time")
axes[0].plot(dates, np.full(len(dates), axes[0].get_ylim()[0]), "k|", label="a disaster")
axes[0].set(title="posterior of the log rate", xlabel="year", ylabel="log of disasters a year")
axes[0].legend(fontsize=8)
for ax, what in zip(axes[1:], ("lengthscale", "deviation"), strict=True):
    upper = max(np.quantile(found[what], 0.99) for found in hyperparameters.values())
    for name, found in hyperparameters.items():
        bins = np.linspace(0, upper, 21)
        ax.hist(found[what], bins, color=colours[name], alpha=0.4, density=True, label=name)
    ax.axvline(result.fit.hyper[what], color=colours["t-SVGP, MAP"], label="t-SVGP, MAP")
    unit = " in years" if what == "lengthscale" else " of the log rate"
    ax.set(title=f"posterior of the {what}", xlabel=what + unit, ylabel="density", yticks=[])
axes[1].legend(fontsize=7)
save(fig, args)
