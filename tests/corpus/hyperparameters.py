"""Posteriors and maxima of hyperparameters, and inputs that move with them."""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from answers import Moments, Prior, gaussian, log_evidence, mixed, on_grid, slice_sample, weighted
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy import optimize, stats

from corpus.data import COUNTS, MEAN, NOISE, SCALE, TRUTH, K, N, X, Y, data, function, positive
from corpus.entries import (
    Answer,
    accepted,
    expected,
    fit,
    hyperparameters,
    marginals,
    nuts_on_collapse,
    points,
    scenario,
)
from numpyro_tsvgp import GP, kernels, whiten

RNG = np.random.RandomState(3)

# ---- hyperparameters (7) ---------------------------------------------------------------------


def intercept(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 5.0))
    f = function(X, mean=lambda x: b * jnp.ones(x.shape[0]))
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def intercept_answer() -> Answer:
    prior = Prior({"b": np.array([[25.0]]), "rest": K})
    design = {"b": np.ones((N, 1)), "rest": np.eye(N)}
    b = gaussian(prior, MEAN, NOISE, design)["b"]
    f = gaussian(Prior({"f": K + 25.0}), MEAN, NOISE)["f"]
    return {"b": Moments(b.mean[0], b.sd[0]), "f": f}


def with_hyperparameters(result) -> Answer:
    many = result.fit.marginals(num_hyper=1000)
    f = {k: Moments(np.asarray(q.mean), np.sqrt(np.asarray(q.variance))) for k, q in many.items()}
    return {**hyperparameters(result), **f}


VARIATIONAL = {
    "optim": optax.adam(optax.exponential_decay(0.05, 1500, 0.02)),
    "steps": 1500,
    "site_lr": 1.0,
    "found": with_hyperparameters,
    # The optimizer leaves some noise.
    "mean": 0.15,
    "sd": 0.1,
}
accepted(
    *(X, MEAN),
    answer=intercept_answer,
    how="Gaussian algebra",
    guide={"hyper_guide": AutoNormal},
    **VARIATIONAL,
)(intercept)

X2 = np.stack([X, RNG.randn(N)], 1)
Y2 = Y + X2 @ np.array([1.0, -0.5])


@accepted(
    *(X2, Y2),
    answer=lambda: {
        "w": gaussian(Prior({"w": 4.0 * np.eye(2), "f": K}), Y2, NOISE, {"w": X2, "f": np.eye(N)})[
            "w"
        ],
        "f": gaussian(Prior({"f": K + 4.0 * X2 @ X2.T}), Y2, NOISE)["f"],
    },
    how="Gaussian algebra",
    guide={"hyper_guide": AutoMultivariateNormal},
    **VARIATIONAL,
)
def linear_predictor_as_the_mean(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    f = numpyro.sample("f", GP(kernels.RBF(SCALE, active_dims=0), X, mean=lambda x: x @ w))
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@accepted(
    *(X2, Y2),
    answer=lambda: {
        "w": Moments(
            np.linalg.solve(
                X2.T @ np.linalg.solve(K + 0.09 * np.eye(N), X2),
                X2.T @ np.linalg.solve(K + 0.09 * np.eye(N), Y2),
            ),
            np.full(2, 0.01),
        )
    },
    how="generalised least squares",
    found=points("w"),
    optim=optax.adam(0.05),
    steps=400,
    site_lr=1.0,
    mean=1.0,
    sd=None,
)
def linear_predictor_as_a_parameter(X, y=None):
    w = numpyro.param("w", jnp.zeros(2))
    f = numpyro.sample("f", GP(kernels.RBF(SCALE, active_dims=0), X, mean=lambda x: x @ w))
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


CALLS = np.random.RandomState(7).poisson(np.exp(1.5 + 0.5 * TRUTH))


def poisson_intercept(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 5.0))
    f = function(X, mean=lambda x: b * jnp.ones(x.shape[0]))
    with data(X):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def poisson_intercept_answer() -> Answer:
    """f is a GP with covariance K + 25; given f, b is Gaussian."""
    C = K + 25.0
    f = slice_sample(
        Prior({"f": C}),
        lambda f: stats.poisson.logpmf(CALLS, np.exp(f["f"])).sum(-1),
        warmup=3000,
        steps=10_000,
    )
    A = 25.0 * np.ones(N) @ np.linalg.inv(C + 1e-8 * np.eye(N))
    variance = 25.0 - 25.0 * A.sum() + A @ f.covariance @ A
    sd = np.sqrt(np.diag(f.covariance))
    return {"b": Moments(A @ f.mean, np.sqrt(variance)), "f": Moments(f.mean, sd)}


accepted(
    *(X, CALLS),
    answer=poisson_intercept_answer,
    how="elliptical slice sampling",
    stored=True,
    guide={"hyper_guide": AutoNormal},
    **{**VARIATIONAL, "sd": 0.15, "site_lr": 0.5},
)(poisson_intercept)


@scenario(
    answer=lambda: expected("poisson intercept"),
    how="elliptical slice sampling",
    mean=0.2,
    sd=0.15,
)
def poisson_intercept_by_nuts_on_collapse():
    result = fit(poisson_intercept, X, CALLS, optim=optax.adam(0.1), steps=100)
    return nuts_on_collapse(result, X, CALLS)


# The GP example of NumPyro: three hyperparameters with wide priors, noise in the likelihood.
WIDE = {"variance": 2.0, "length": 2.0, "noise": 2.0}


def numpyro_example(X, y=None):
    variance, length, noise = (
        numpyro.sample(name, dist.LogNormal(0.0, scale)) for name, scale in WIDE.items()
    )
    f = numpyro.sample("f", GP(kernels.RBF(length, variance), X))
    with data(X):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


X_EXAMPLE = np.linspace(-1.0, 1.0, 25)
Y_EXAMPLE = (
    X_EXAMPLE
    + 0.2 * X_EXAMPLE**3
    + 0.5 * (0.5 + X_EXAMPLE) ** 2 * np.sin(4.0 * X_EXAMPLE)
    + 0.15 * np.random.RandomState(0).randn(25)
)
Y_EXAMPLE = (Y_EXAMPLE - Y_EXAMPLE.mean()) / Y_EXAMPLE.std()


def _log_joint(variance, length, noise):
    """Log evidence and prior, as densities of the logarithms."""
    prior = sum(
        stats.norm.logpdf(v, 0.0, s)
        for v, s in zip((variance, length, noise), WIDE.values(), strict=True)
    )
    K = dense.rbf(X_EXAMPLE, X_EXAMPLE, np.exp(length), np.exp(variance))
    return prior + log_evidence(K, Y_EXAMPLE, np.exp(noise))


def example_answer() -> Answer:
    axes = {
        "variance": np.linspace(-3.0, 7.0, 36),
        "length": np.linspace(-2.0, 2.5, 36),
        "noise": np.linspace(-2.5, -0.3, 36),
    }
    grid, weights = on_grid(_log_joint, axes)
    out = {name: weighted(grid[:, i], weights) for i, name in enumerate(axes)}
    heavy = np.flatnonzero(weights > 1e-5 * weights.max())
    parts = [
        gaussian(
            Prior({"f": dense.rbf(X_EXAMPLE, X_EXAMPLE, np.exp(grid[i, 1]), np.exp(grid[i, 0]))}),
            Y_EXAMPLE,
            np.exp(grid[i, 2]),
        )
        for i in heavy
    ]
    return {**out, **mixed(parts, weights[heavy] / weights[heavy].sum())}


@scenario(answer=example_answer, how="quadrature on a grid", mean=0.2, sd=0.15)
def numpyro_example_by_nuts_on_collapse():
    result = fit(
        numpyro_example, X_EXAMPLE, Y_EXAMPLE, optim=optax.adam(0.1), steps=100, site_lr=1.0
    )
    logs = lambda samples: {k: np.log(samples[k]) for k in WIDE}  # noqa: E731
    return nuts_on_collapse(result, X_EXAMPLE, Y_EXAMPLE, transform=logs)


def example_maximum() -> Answer:
    """The maximum in the coordinates of the prior, which is what MAP means here."""
    found = optimize.minimize(
        lambda v: -_log_joint(*v) + np.sum(v),
        np.array([0.0, 0.0, -1.0]),
        method="Nelder-Mead",
        options={"xatol": 1e-6, "fatol": 1e-9, "maxiter": 4000},
    )
    return {
        name: Moments(np.exp(v), 0.02 * np.exp(v)) for name, v in zip(WIDE, found.x, strict=True)
    }


accepted(
    *(X_EXAMPLE, Y_EXAMPLE),
    answer=example_maximum,
    how="Nelder-Mead on the exact evidence",
    found=points(*WIDE),
    optim=optax.adam(optax.exponential_decay(0.1, 800, 0.02)),
    steps=800,
    site_lr=1.0,
    mean=1.0,
    sd=None,
)(numpyro_example)


# ---- a posterior over everything, from a model with priors -----------------------------------

HIERARCHY = {"length": -1.5, "amplitude": 0.0}


def hierarchical_counts(X, y=None):
    length = numpyro.sample("length", dist.LogNormal(-1.5, 0.4))
    amplitude = numpyro.sample("amplitude", dist.LogNormal(0.0, 0.5))
    f = function(X, scale=length, variance=amplitude**2)
    with data(X):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def hierarchical_answer() -> Answer:
    mcmc = MCMC(
        NUTS(whiten(hierarchical_counts)),
        num_warmup=2000,
        num_samples=10_000,
        num_chains=4,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), X, COUNTS)
    draws = mcmc.get_samples()
    return {k: Moments(np.mean(draws[k], 0), np.std(draws[k], 0)) for k in ("f", *HIERARCHY)}


@scenario(
    answer=hierarchical_answer,
    how="NUTS on the whitened model, 40,000 draws",
    stored=True,
    # Instead of the evidence there is a bound, which is less tight where the amplitude is large.
    mean=0.25,
    sd=0.25,
)
def hierarchical_counts_by_nuts_on_collapse():
    result = fit(hierarchical_counts, X, COUNTS, optim=optax.adam(0.05), steps=100)
    return nuts_on_collapse(result, X, COUNTS)


# ---- inputs that move (12) -------------------------------------------------------------------


def moving_answer() -> Answer:
    def loss(w):
        return -log_evidence(dense.rbf(X, X, 1.0 / w), Y, NOISE)

    w = optimize.minimize_scalar(loss, bounds=(0.5, 20.0), method="bounded").x
    new = np.linspace(0.0, 1.0, 7)
    f = dense.regression(dense.rbf(X, X, 1 / w), dense.rbf(X, new, 1 / w), 1.0, Y, NOISE)
    return {
        "w": Moments(w, 0.02 * w),
        "loss": Moments(np.array(loss(w)), np.array(0.05)),
        "new": Moments(f[0], np.sqrt(f[1])),
    }


def moving_found(result) -> Answer:
    (f,) = marginals(result, np.linspace(0.0, 1.0, 7)).values()
    loss = Moments(np.asarray(result.losses[-1]), None)
    return {"w": points("w")(result)["w"], "loss": loss, "new": f}


def moving(name, warns=None, **guide):
    def model(X, y=None):
        w = positive("w", 1.5)
        f = numpyro.sample("f", GP(kernels.RBF(1.0), w * X))
        with data(X):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    model.__name__ = name
    accepted(
        *(X, Y),
        answer=moving_answer,
        how="maximum of the exact evidence",
        found=moving_found,
        guide=guide,
        optim=optax.adam(optax.exponential_decay(0.1, 600, 0.05)),
        steps=600,
        site_lr=1.0,
        mean=1.0,
        sd=None,
        warns=warns,
    )(model)


# Inducing inputs for where the inputs will go lie far from where they start.
FAR = {"inducing": np.linspace(0.0, 6.0, 12), "warns": "lie further from its inputs"}
moving("inputs_that_move_with_a_site_for_each_point")
moving("inputs_that_move_with_tied_sites", **FAR)
moving("inputs_that_move_with_untied_sites", **FAR, sites="untied")
