"""Bayesian optimization of a response that is a count, while evaluations are pending.

Each evaluation of three settings returns a Poisson count, three rounds after it was started. A
round takes in the count that has arrived (``fit.with_inducing``, ``fit.condition``), imagines those
that have not (``fit.fantasies``), and chooses the next settings by expected improvement, or by a
draw of the function (Thompson sampling). The model is fitted once, to ten evaluations.

    python examples/bayesian_optimization.py

Writes ``bayesian_optimization.png``.
"""

# %% Imports
import time
from functools import cache

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import options, save
from jax.scipy.stats import norm
from scipy.stats import qmc

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, inducing, kernels

jax.config.update("jax_enable_x64", True)
args = options("bayesian_optimization", __doc__)
rounds, repeats, steps = (3, 2, 3) if args.quick else (40, 12, 150)
PENDING, START, INDUCING, FANTASIES = 3, 10, 50, 16

# %% [markdown]
# The rate of the counts over three settings: a broad hill, and a higher one elsewhere. There are
# 512 candidates, spread evenly over the cube.


# %%
def hill(X, centre, width):
    return np.exp(-0.5 * ((X - np.array(centre)) ** 2).sum(-1) / width**2)


def true_rate(X):
    broad, high = hill(X, (0.3, 0.35, 0.6), 0.25), hill(X, (0.8, 0.75, 0.2), 0.25)
    return 1.0 + 8.0 * broad + 15.0 * high


def model(X, y=None):
    deviation = numpyro.sample("deviation", dist.LogNormal(0.0, 0.3))
    scale = numpyro.sample("scale", dist.LogNormal(-0.7, 0.2))
    level = numpyro.sample("level", dist.Normal(1.0, 0.5))
    f = numpyro.sample("f", GP(deviation**2 * kernels.Matern52(scale), X, mean=level))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


candidates = qmc.Sobol(3, scramble=False).random(512)
best_rate = true_rate(candidates).max()

# %% [markdown]
# **Inducing inputs.** A posterior by inducing values knows f between them no better than they
# predict it, however many counts there are. Expected improvement takes what is left there for
# something to be learned, and evaluates one place again and again. So what is evaluated becomes an
# inducing input. There are always 50, so that programs for them stay the same: a new one takes the
# place of one of those that were spread over the cube.

# %%
spread = np.asarray(inducing.greedy(kernels.Matern52(0.5), candidates, INDUCING))


def among(setting, places):
    return np.abs(places - setting).max(1) < 1e-9


def with_room_for(fit, setting, places, used):
    """The fit with a setting among its inducing inputs, of which the first have data."""
    if not among(setting, places[:used]).any():
        places = places.copy()
        same = np.flatnonzero(among(setting, places))
        places[same[0] if len(same) else used] = places[used]
        places[used] = setting
        fit, used = fit.with_inducing(places), used + 1
    return fit, places, used


# %% [markdown]
# **What to evaluate next**, from a fit and the settings whose counts are pending. Counts are noisy:
# where f is already known well, one more count changes little. Expected improvement does not see
# that, and stays on the first hill that it finds. It is therefore discounted by the share of the
# uncertainty that would remain (Huang, Allen, Notz and Zeng 2006). The variance of the noise, on
# the scale of f, is one over the rate.


# %%
@jax.jit
def improvement(mean, variance, incumbent):
    """Expected improvement of the log rate over an incumbent, for each fantasy."""
    sd = jnp.sqrt(variance)
    z = (mean - incumbent) / sd
    return sd * (z * norm.cdf(z) + norm.pdf(z))


@jax.jit
def discounted(mean, variance, incumbent):
    """The same for noisy counts."""
    noise = jnp.exp(-mean)
    remains = jnp.sqrt(noise / (noise + variance))
    return improvement(mean, variance, incumbent) * (1 - remains)


def by_improvement(score):
    def choose(key, fit, pending):
        imagined = fit.fantasies(key, pending, num=FANTASIES).marginals(candidates)["f"]
        incumbent = imagined.mean.max(-1, keepdims=True)
        return candidates[int(score(*imagined, incumbent).mean(0).argmax())]

    return choose


def thompson(key, fit, pending):
    drawn = fit.sample(key, candidates)["f"]  # one joint draw of the log rate
    return candidates[int(drawn.argmax())]


def random_search(key, fit, pending):
    return candidates[int(jax.random.randint(key, (), 0, len(candidates)))]


# %% [markdown]
# **The loop.** What is reported is the true rate at the settings that the fit would recommend now,
# whoever chose what to evaluate: random search has the same model, and the same start.


# %%
@cache
def begin(seed):
    """The fit to the first evaluations, their settings, and settings that are pending."""
    rng = np.random.default_rng(seed)
    X = candidates[rng.choice(len(candidates), START, replace=False)]
    y = rng.poisson(true_rate(X))
    svi = TSVGP(model, AutoDualGaussian(model, X, learn_inducing=False), optax.adam(0.03))
    fit = svi.run(jax.random.key(seed), steps, X, y, progress_bar=False).fit
    return fit, X, candidates[rng.choice(len(candidates), PENDING, replace=False)]


def optimize(choose, seed, rounds=rounds, each=lambda i: None):
    """True rates of what is recommended and of what is tried, times of rounds, settings, fit."""
    fit, X, pending = begin(seed)
    rng, key = np.random.default_rng((seed, 1)), jax.random.key(seed)
    others = np.array([place for place in spread if not among(place, X).any()])
    places, used = np.concatenate([X, others])[:INDUCING], START
    fit = fit.with_inducing(places)
    rates, times, settings = [], [], []
    for i in range(rounds):
        arrived, count = pending[:1], rng.poisson(true_rate(pending[:1]))
        start = time.perf_counter()
        fit, places, used = with_room_for(fit, arrived[0], places, used)
        fit = fit.condition(arrived, count)
        pending = pending[1:]
        new = choose(jax.random.fold_in(key, i), fit, pending)
        times.append(time.perf_counter() - start)
        pending = np.concatenate([pending, new[None]])
        settings.append(new)
        rates.append(true_rate(candidates[int(fit.marginals(candidates)["f"].mean.argmax())]))
        each(i)
    settings = np.array(settings)
    return np.array(rates), true_rate(settings), np.array(times), settings, fit


METHODS = {
    "expected improvement, discounted": by_improvement(discounted),
    "expected improvement": by_improvement(improvement),
    "Thompson sampling": thompson,
    "random search": random_search,
}
found = {}
print(f"true rates of what is recommended; the best is {best_rate:.1f}")
for name, choose in METHODS.items():
    found[name] = [optimize(choose, seed) for seed in range(repeats)]
    rates, tried = (np.array([run[i] for run in found[name]]) for i in (0, 1))
    print(f"{name}: after {rounds} rounds, by seed:", *(f"{rate:.1f}" for rate in rates[:, -1]))
    for k in sorted({min(k, rounds) for k in (10, 20, 30, 40)}):
        mean, error = rates[:, k - 1].mean(), rates[:, k - 1].std(ddof=1) / np.sqrt(repeats)
        print(
            f"   round {k}: {mean:.2f} ± {error:.2f}; mean of those tried {tried[:, :k].mean():.2f}"
        )

# %% [markdown]
# A picture: what was tried in the first run by expected improvement, seen along the third setting;
# the posterior in the plane of the setting that it recommends; and all runs.

# %% A picture
fig, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
side = np.linspace(0.0, 1.0, 41)
plane = np.stack(np.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 2)
*_, settings, fit = found["expected improvement, discounted"][0]
chosen = candidates[int(fit.marginals(candidates)["f"].mean.argmax())]
third = np.full((len(plane), 1), chosen[2])
there = np.concatenate([plane, third], 1)
levels = np.linspace(0.0, 20.0, 11)
rates_there = true_rate(there), np.exp(np.asarray(fit.marginals(there)["f"].mean))
titles = ("true rate, and what was tried\n(darker: later)", "posterior median of the rate")
for ax, rate, title in zip(axes, rates_there, titles, strict=False):
    shown = ax.contourf(side, side, rate.reshape(len(side), -1).T, levels, extend="max")
    ax.set(title=title, xlabel="first setting", ylabel="second setting")
axes[0].scatter(*settings[:, :2].T, c=np.arange(len(settings)), cmap="Reds", s=25, edgecolors="k")
axes[1].plot(*chosen[:2], "r*", markersize=12)
fig.colorbar(shown, ax=axes[1], label=f"rate where the third setting is {chosen[2]:.2f}")
for i, (name, runs) in enumerate(found.items()):
    rates, tried = (np.array([run[j] for run in runs]) for j in (0, 1))
    count = np.arange(1, rounds + 1)
    mean, error = rates.mean(0), rates.std(0, ddof=1) / np.sqrt(repeats)
    axes[2].plot(count, mean, color=f"C{i}", label=name)
    axes[2].fill_between(count, mean - error, mean + error, color=f"C{i}", alpha=0.2, linewidth=0)
    axes[2].plot(count, np.cumsum(tried.mean(0)) / count, color=f"C{i}", linestyle=":")
axes[2].axhline(best_rate, color="k", linewidth=0.8)
title = "rate of what is recommended (± standard error)\nand mean of what was tried (dotted)"
axes[2].set(title=title, xlabel="round", ylabel="rate")
axes[2].legend(fontsize=8)
save(fig, args)
