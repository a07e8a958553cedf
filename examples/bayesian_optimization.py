"""Bayesian optimization of a response that is a count, while evaluations are pending.

Each evaluation of a setting returns a Poisson count, three rounds after it was started. A round
takes in the count that has arrived (``fit.condition``), imagines those that have not
(``fit.fantasies``), and chooses the next setting by expected improvement, or by a draw of the
function (Thompson sampling). The model is fitted once, to ten settings.

    python examples/bayesian_optimization.py

Writes ``bayesian_optimization.png``.
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
from jax.scipy.stats import norm

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

jax.config.update("jax_enable_x64", True)
args = options("bayesian_optimization", __doc__)
rounds, repeats, steps, fantasies = (3, 1, 3, 4) if args.quick else (40, 3, 150, 16)
PENDING, START = 3, 10

# %% [markdown]
# The rate of the counts over two settings: a broad hill and a higher, narrower one.


# %%
def true_rate(X):
    def hill(x, y, width):
        return np.exp(-0.5 * ((X[..., 0] - x) ** 2 + (X[..., 1] - y) ** 2) / width**2)

    return 1.0 + 8.0 * hill(0.3, 0.35, 0.2) + 15.0 * hill(0.75, 0.7, 0.1)


def model(X, y=None):
    deviation = numpyro.sample("deviation", dist.LogNormal(0.0, 0.3))
    scale = numpyro.sample("scale", dist.LogNormal(-1.6, 0.2))
    level = numpyro.sample("level", dist.Normal(1.0, 0.5))
    f = numpyro.sample("f", GP(deviation**2 * kernels.Matern52(scale), X, mean=level))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


side = np.linspace(0.0, 1.0, 21)
candidates = np.stack(np.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 2)
inducing = np.stack(np.meshgrid(np.linspace(0, 1, 10), np.linspace(0, 1, 5)), -1).reshape(-1, 2)

# %% [markdown]
# What to evaluate next, from a fit and the settings whose counts are pending.


# %%
@jax.jit
def improvement(mean, variance, incumbent):
    """Expected improvement of the log rate, averaged over fantasies."""
    sd = jnp.sqrt(variance)
    z = (mean - incumbent) / sd
    return jnp.mean(sd * (z * norm.cdf(z) + norm.pdf(z)), 0)


def expected_improvement(key, fit, pending):
    imagined = fit.fantasies(key, pending, num=fantasies).marginals(candidates)["f"]
    incumbent = imagined.mean.max(-1, keepdims=True)
    return candidates[int(improvement(*imagined, incumbent).argmax())]


def thompson(key, fit, pending):
    drawn = fit.sample(key, candidates)["f"]  # one joint draw of the log rate
    return candidates[int(drawn.argmax())]


def random_search(key, fit, pending):
    return candidates[int(jax.random.randint(key, (), 0, len(candidates)))]


# %% [markdown]
# The loop. What is reported is the true rate at the setting that the fit would choose now.


# %%
def optimize(choose, seed):
    rng = np.random.default_rng(seed)
    key = jax.random.key(seed)
    X = candidates[rng.choice(len(candidates), START, replace=False)]
    y = rng.poisson(true_rate(X))
    svi = TSVGP(model, AutoDualGaussian(model, X, learn_inducing=False), optax.adam(0.03))
    fit = svi.run(key, steps, X, y, progress_bar=False).fit.with_inducing(inducing)
    pending = candidates[rng.choice(len(candidates), PENDING, replace=False)]
    rates, times, settings = [], [], []
    for i in range(rounds):
        arrived, count = pending[:1], rng.poisson(true_rate(pending[:1]))
        start = time.process_time()
        fit = fit.condition(arrived, count)
        pending = pending[1:]
        new = choose(jax.random.fold_in(key, i), fit, pending)
        times.append(time.process_time() - start)
        pending = np.concatenate([pending, new[None]])
        settings.append(new)
        best = int(fit.marginals(candidates)["f"].mean.argmax())
        rates.append(true_rate(candidates[best]))
    return np.array(rates), np.array(times), np.array(settings), fit


METHODS = {
    "expected improvement": expected_improvement,
    "Thompson sampling": thompson,
    "random search": random_search,
}
found = {}
for name, choose in METHODS.items():
    runs = [optimize(choose, seed) for seed in range(repeats)]
    found[name] = runs
    rates, times, settings = (np.array([run[i] for run in runs]) for i in (0, 1, 2))
    print(
        f"{name:21} rate after 10 rounds {rates[:, :10][:, -1].mean():5.2f}, after {rounds} "
        f"{rates[:, -1].mean():5.2f} of {true_rate(candidates).max():5.2f}; on the way "
        f"{true_rate(settings).mean():5.2f}; a round takes "
        f"{1e3 * np.median(times[:, 1:]):.0f} ms of CPU time"
    )

# %% A picture
fig, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
grid = true_rate(candidates).reshape(len(side), -1).T
axes[0].contourf(side, side, grid, 12, cmap="viridis")
settings = found["expected improvement"][0][2]
axes[0].scatter(*settings.T, c=np.arange(len(settings)), cmap="Reds", s=20, edgecolors="k")
axes[0].set(title="true rate, and the settings tried", xlabel="first setting")
mean = np.asarray(found["expected improvement"][0][3].marginals(candidates)["f"].mean)
shown = axes[1].contourf(side, side, np.exp(mean).reshape(len(side), -1).T, 12, cmap="viridis")
axes[1].set(title="posterior median of the rate", xlabel="first setting")
for ax in axes[:2]:
    ax.set_ylabel("second setting")
fig.colorbar(shown, ax=axes[1], label="rate")
for i, (name, runs) in enumerate(found.items()):
    rates = np.array([run[0] for run in runs])
    axes[2].plot(np.arange(1, rounds + 1), rates.mean(0), color=f"C{i}", label=name)
    tried = true_rate(np.array([run[2] for run in runs])).mean(0)
    axes[2].plot(np.arange(1, rounds + 1), np.cumsum(tried) / np.arange(1, rounds + 1), f"C{i}--")
axes[2].axhline(true_rate(candidates).max(), color="k", linewidth=0.8)
axes[2].set(
    title="rate at the best setting\n(dashed: mean of those tried)", xlabel="round", ylabel="rate"
)
axes[2].legend(fontsize=8)
save(fig, args)
