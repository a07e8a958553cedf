"""Latent variables that are not GPs: below a GP, and random effects."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from answers import Moments, Prior, gaussian, log_evidence, mixed, on_grid, slice_sample, weighted
from scipy import optimize, stats

from corpus.data import (
    COUNTS,
    DESIGN,
    GROUPED,
    GROUPS,
    K_TIMES,
    MEMBERS,
    NOISE,
    SEEN,
    TIMES,
    TRUTH,
    F,
    K,
    N,
    X,
    Y,
    data,
    function,
)
from corpus.entries import (
    Answer,
    accepted,
    exactly,
    expected,
    fit,
    marginals,
    nuts_on_collapse,
    points,
    refused,
    sampled,
    scenario,
)
from numpyro_tsvgp import GP, kernels

# ---- latent variables below a GP (1) ---------------------------------------------------------

BELOW = r"is a latent variable that depends on a GP"


def grouped_answer() -> Answer:
    noise = 0.09 * np.eye(24) + 0.01 * DESIGN @ DESIGN.T
    return gaussian(Prior({"f": K_TIMES}), GROUPED, noise, {"f": DESIGN})


def effects_around_a_function(t, g, y=None):
    f = function(t, scale=0.3, variance=4.0)
    with numpyro.plate("groups", len(t)):
        b = numpyro.sample("b", dist.Normal(f, 0.1))
    with numpyro.plate("data", len(g)):
        numpyro.sample("y", dist.Normal(b[g], NOISE), obs=y)


SLOWLY = {"optim": optax.adam(0.05), "steps": 400, "site_lr": 1.0}
exactly(
    *(TIMES, MEMBERS, GROUPED), answer=grouped_answer, warns=BELOW, mean=0.02, sd=None, **SLOWLY
)(effects_around_a_function)


@scenario(answer=grouped_answer, how="Gaussian algebra", warns=BELOW, mean=0.15, sd=0.1)
def effects_around_a_function_by_nuts_on_collapse():
    args = (TIMES, MEMBERS, GROUPED)
    result = fit(effects_around_a_function, *args, **{**SLOWLY, "steps": 20})
    return {"f": nuts_on_collapse(result, *args)["f"]}


@refused(r"one term of site 's' reads both f\[\d+\] and f\[\d+\]", X, Y)
def scalar_around_the_mean_of_a_function(X, y=None):
    f = function(X)
    s = numpyro.sample("s", dist.Normal(f.mean(), 0.1))
    with data(X):
        numpyro.sample("y", dist.Normal(s, NOISE), obs=y)


def noisy_rates(X, y=None):
    f = function(X)
    with data(X):
        z = numpyro.sample("z", dist.Normal(f, 0.5))
        numpyro.sample("y", dist.Poisson(jnp.exp(z)), obs=y)


def noisy_rates_answer() -> Answer:
    """z = f + noise is a GP, too; given it, f is Gaussian."""
    C = K + 0.25 * np.eye(N)
    z = slice_sample(
        Prior({"z": C}), lambda f: stats.poisson.logpmf(COUNTS, np.exp(f["z"])).sum(-1)
    )
    A = K @ np.linalg.inv(C)
    S = K - A @ K + A @ z.covariance @ A.T
    return {"f": Moments(A @ z.mean, np.sqrt(np.diag(S)))}


# Counts of latent rates at their mode, not their mean: the mean of f is as far off as that is.
accepted(
    *(X, COUNTS),
    answer=noisy_rates_answer,
    how="elliptical slice sampling",
    stored=True,
    warns=BELOW,
    mean=0.5,
    sd=None,
    **SLOWLY,
)(noisy_rates)


@scenario(
    answer=lambda: expected("noisy rates"), how="elliptical slice sampling", warns=BELOW, mean=0.2
)
def noisy_rates_by_nuts_on_collapse():
    result = fit(noisy_rates, X, COUNTS, **{**SLOWLY, "steps": 20})
    return {"f": nuts_on_collapse(result, X, COUNTS)["f"]}


def imputed_answer() -> Answer:
    # Where y is missing, w / 0.5 = f + noise of variance 0.09 + 0.2^2 / 0.5^2.
    return gaussian(F, np.where(SEEN, Y, TRUTH), np.where(SEEN, NOISE, np.sqrt(0.09 + 0.16)))


@exactly(
    *(X, np.where(SEEN, Y, np.nan), 0.5 * TRUTH),
    answer=imputed_answer,
    warns=BELOW,
    mean=0.02,
    sd=None,
    **SLOWLY,
)
def imputed_data_that_another_site_reads(X, y=None, w=None):
    f = function(X)
    with data(X):
        y = numpyro.sample("y", dist.Normal(f, NOISE), obs=jnp.nan_to_num(y), obs_mask=SEEN)
        numpyro.sample("w", dist.Normal(0.5 * y, 0.2), obs=w)


@exactly(
    *(X, Y),
    answer=lambda: gaussian(F, Y, np.sqrt(0.01 + 0.09)),
    warns=r"'b_unobserved' is a latent variable that depends on a GP",
    mean=0.02,
    sd=None,
    **SLOWLY,
)
def latent_that_is_only_called_unobserved(X, y=None):
    f = function(X)
    with data(X):
        b = numpyro.sample("b_unobserved", dist.Normal(f, 0.1))
        numpyro.sample("y", dist.Normal(b, NOISE), obs=y)


# ---- random effects (8) ----------------------------------------------------------------------

EFFECTS = np.random.RandomState(3).randn(6) * 0.5
MEMBER = np.arange(30) % 6
Y_GROUPS = EFFECTS[MEMBER] + 0.4 * np.random.RandomState(4).randn(30)
ONE_HOT = np.eye(6)[MEMBER]


def effects_answer() -> Answer:
    def log_density(tau):
        K = np.exp(2 * tau) * ONE_HOT @ ONE_HOT.T
        # HalfNormal, as a density of the logarithm
        return log_evidence(K, Y_GROUPS, 0.4) - 0.5 * np.exp(2 * tau) + tau

    grid, weights = on_grid(log_density, {"tau": np.linspace(-8.0, 2.0, 201)})
    parts = [
        gaussian(Prior({"b": np.exp(2 * t) * np.eye(6)}), Y_GROUPS, 0.4, {"b": ONE_HOT})
        for (t,) in grid
    ]
    return {"tau": weighted(np.exp(grid[:, 0]), weights), **mixed(parts, weights)}


def random_effects(g, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    b = numpyro.sample("b", GP(tau**2 * kernels.Group(), jnp.arange(6)))
    with numpyro.plate("data", len(g)):
        numpyro.sample("y", dist.Normal(b[g], 0.4), obs=y)


@scenario(answer=effects_answer, how="quadrature on a grid", mean=0.15, sd=0.1)
def random_effects_by_nuts_on_collapse():
    result = fit(random_effects, MEMBER, Y_GROUPS, optim=optax.adam(0.1), steps=50, site_lr=1.0)
    return nuts_on_collapse(result, MEMBER, Y_GROUPS, draws=1000)


def effects_maximum() -> Answer:
    def loss(tau):
        return 0.5 * tau**2 - log_evidence(tau**2 * ONE_HOT @ ONE_HOT.T, Y_GROUPS, 0.4)

    tau = optimize.minimize_scalar(loss, bounds=(0.01, 3.0), method="bounded").x
    b = gaussian(Prior({"b": tau**2 * np.eye(6)}), Y_GROUPS, 0.4, {"b": ONE_HOT})
    return {"tau": Moments(tau, 0.01 * tau), **b}


accepted(
    *(MEMBER, Y_GROUPS),
    answer=effects_maximum,
    how="the maximum of the exact marginal posterior",
    found=lambda result: {"tau": points("tau")(result)["tau"], **marginals(result)},
    optim=optax.adam(optax.exponential_decay(0.1, 400, 0.02)),
    steps=400,
    site_lr=1.0,
    mean=1.0,
    sd=0.02,
)(random_effects)


def random_effects_as_normals(X, g, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    f = function(X)
    with numpyro.plate("groups", 5):
        b = numpyro.sample("b", dist.Normal(0.0, tau))
    with data(X):
        numpyro.sample("y", dist.Normal(f + b[g], NOISE), obs=y)


accepted(
    *(X, GROUPS, Y),
    answer=None,
    how="",
    warns=r"Site 'b' is a plate of 5 latent variables.*kernels\.Group\(\)",
    optim=optax.adam(0.05),
    steps=5,
)(random_effects_as_normals)


@refused(r"kernel of GP site 'b' is noise alone.*kernels\.Group", MEMBER, Y_GROUPS)
def random_effects_as_white_noise(g, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    b = numpyro.sample("b", GP(tau**2 * kernels.White(), jnp.arange(6)))
    with numpyro.plate("data", len(g)):
        numpyro.sample("y", dist.Normal(b[g], 0.4), obs=y)


@sampled(
    *(X, GROUPS, COUNTS),
    prior=Prior({"f": K, "b": 0.25 * np.eye(5)}),
    log_likelihood=lambda f: stats.poisson.logpmf(COUNTS, np.exp(f["f"] + f["b"][:, GROUPS])).sum(
        -1
    ),
    # Under the guide f and b are independent, and each is narrower for it.
    sd=0.2,
)
def counts_with_random_effects(X, g, y=None):
    f = function(X)
    b = numpyro.sample("b", GP(0.25 * kernels.Group(), jnp.arange(5)))
    with data(X):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + b[g])), obs=y)
