"""Gaussian likelihoods in many forms, whose answers are exact."""

import dense
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import tinygp
from answers import Moments, Prior, gaussian, log_evidence
from numpyro import handlers
from scipy import optimize

from corpus.data import (
    DESIGN,
    GROUPED,
    K_TIMES,
    MEMBERS,
    NOISE,
    READS_BOTH,
    SCALE,
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
    normal,
    positive,
)
from corpus.entries import Answer, accepted, exactly, marginals, points, refused, together
from numpyro_tsvgp import GP, kernels

RNG = np.random.RandomState(5)

# ---- regression in many forms ----------------------------------------------------------------

exactly(X, Y, answer=lambda: gaussian(F, Y, NOISE))(normal)


def additive_kernel(A, B):
    d = np.subtract.outer(A, B)
    return np.exp(-0.5 * d**2 / 0.25) + 0.5 * np.exp(-2.0 * np.sin(np.pi * d / 0.3) ** 2)


@exactly(X, Y, answer=lambda: gaussian(Prior({"f": additive_kernel(X, X)}), Y, NOISE))
def trend_and_season_in_one_kernel(X, y=None):
    kernel = kernels.RBF(0.5) + 0.5 * kernels.Periodic(1.0, period=0.3)
    f = numpyro.sample("f", GP(kernel, X))
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


_season = 0.5 * np.exp(-2.0 * np.sin(np.pi * np.subtract.outer(X, X) / 0.3) ** 2)


@exactly(
    *(X, Y),
    answer=lambda: gaussian(
        Prior({"trend": dense.rbf(X, X, 0.5), "season": _season}), Y, NOISE, factorised=True
    ),
    how="Gaussian algebra, for a guide that factorises",
    # The two are hard to tell apart, and E-steps take that long to do so.
    site_lr=0.9,
    steps=1000,
    mean=0.01,
    sd=0.01,
)
def trend_and_season_in_two_functions(X, y=None):
    trend = function(X, "trend", 0.5)
    season = numpyro.sample("season", GP(0.5 * kernels.Periodic(1.0, period=0.3), X))
    with data(X):
        numpyro.sample("y", dist.Normal(trend + season, NOISE), obs=y)


MIXTURE = np.array([[1.0, 0.2], [-0.5, 0.8], [0.3, 0.3]])
Y_MIXED = MIXTURE @ np.stack([TRUTH, np.cos(5 * X)]) + NOISE * RNG.randn(3, N)


@exactly(
    *(X, Y_MIXED),
    answer=lambda: together(
        gaussian(
            Prior({"0": K, "1": K}),
            Y_MIXED.ravel(),
            NOISE,
            {str(k): np.kron(MIXTURE[:, [k]], np.eye(N)) for k in range(2)},
            factorised=True,
        ),
        "f",
    ),
    how="Gaussian algebra, for a guide that factorises",
    site_lr=0.5,
    steps=200,
    mean=0.01,
    sd=0.01,
)
def outputs_that_mix_functions(X, y=None):
    with numpyro.plate("functions", 2):
        f = function(X)
    with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(MIXTURE @ f, NOISE), obs=y)


OUTPUT = np.arange(N) % 2
X_OUTPUT = np.stack([OUTPUT, X], 1)
_W, _KAPPA = np.array([[1.0], [0.6]]), np.array([0.1, 0.2])
_B = _W @ _W.T + np.diag(_KAPPA)


@exactly(
    *(X_OUTPUT, Y),
    answer=lambda: gaussian(Prior({"f": _B[np.ix_(OUTPUT, OUTPUT)] * K}), Y, NOISE),
)
def coregionalisation(X, y=None):
    kernel = kernels.Coregion(_W, _KAPPA, active_dims=0) * kernels.RBF(SCALE, active_dims=1)
    f = numpyro.sample("f", GP(kernel, X))
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


_distance = np.sqrt(3.0) * np.abs(np.subtract.outer(X, X)) / 0.4


@exactly(
    *(X, Y),
    answer=lambda: gaussian(Prior({"f": 1.3 * (1.0 + _distance) * np.exp(-_distance)}), Y, NOISE),
)
def kernel_of_tinygp(X, y=None):
    f = numpyro.sample("f", GP(1.3 * tinygp.kernels.Matern32(0.4), X))
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def seen_answer() -> Answer:
    k = K[SEEN]
    mean, variance = dense.regression(K[np.ix_(SEEN, SEEN)], k, 1.0, Y[SEEN], NOISE)
    return {"f": Moments(mean, np.sqrt(variance))}


@exactly(X, np.where(SEEN, Y, np.nan), answer=seen_answer)
def missing_data_by_obs_mask(X, y=None):
    f = function(X)
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=jnp.nan_to_num(y), obs_mask=SEEN)


@exactly(X, np.where(SEEN, Y, 99.0), answer=seen_answer)
def missing_data_by_a_mask(X, y=None):
    f = function(X)
    with data(X), handlers.mask(mask=SEEN):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@exactly(X, Y, answer=lambda: gaussian(F, Y, NOISE))
def likelihood_as_a_factor_of_all_terms(X, y):
    f = function(X)
    numpyro.factor("fit", -0.5 * jnp.sum((y - f) ** 2) / NOISE**2)


@refused(READS_BOTH.format("fit"), X, Y)
def likelihood_as_a_function_of_the_sum_of_terms(X, y):
    f = function(X)
    numpyro.factor("fit", -5.0 * jnp.log1p(jnp.sum((y - f) ** 2)))


TEMPERATURE = Y + 0.5 * RNG.randn(N)


@exactly(
    *(X, Y, TEMPERATURE),
    answer=lambda: gaussian(
        F,
        np.concatenate([Y, TEMPERATURE]),
        np.repeat([NOISE, 0.5], N),
        {"f": np.tile(np.eye(N), (2, 1))},
    ),
)
def two_instruments(X, y=None, z=None):
    f = function(X)
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)
        numpyro.sample("z", dist.Normal(f, 0.5), obs=z)


@exactly(
    *(TIMES, MEMBERS, GROUPED),
    answer=lambda: gaussian(Prior({"f": K_TIMES}), GROUPED, NOISE, {"f": DESIGN}),
)
def many_data_at_the_same_inputs(t, g, y=None):
    f = function(t, scale=0.3, variance=4.0)
    with numpyro.plate("data", len(g)):
        numpyro.sample("y", dist.Normal(f[g], NOISE), obs=y)


@exactly(X, Y, answer=lambda: gaussian(F, Y, NOISE / np.sqrt(2.0)))
def likelihood_that_counts_twice(X, y=None):
    f = function(X)
    with data(X), handlers.scale(scale=2.0):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def learned_hyperparameters_answer() -> Answer:
    start = np.log([0.3, 1.0, 0.3])

    def loss(v):
        length, variance, noise = np.exp(v)
        return -log_evidence(dense.rbf(X, X, length, variance), Y, noise)

    length, variance, noise = np.exp(optimize.minimize(loss, start, tol=1e-9).x)
    f = gaussian(Prior({"f": dense.rbf(X, X, length, variance)}), Y, noise)["f"]
    values = {"length": length, "variance": variance, "noise": noise}
    return {**{k: Moments(v, 0.02 * v) for k, v in values.items()}, "f": f}


@accepted(
    *(X, Y),
    answer=learned_hyperparameters_answer,
    how="maximum of the exact evidence",
    found=lambda r: {**points("length", "variance", "noise")(r), **marginals(r)},
    optim=optax.adam(optax.exponential_decay(0.1, 600, 0.02)),
    steps=600,
    site_lr=1.0,
    mean=1.0,
    sd=0.05,
)
def hyperparameters_as_parameters(X, y=None):
    f = function(X, scale=positive("length", 0.3), variance=positive("variance", 1.0))
    with data(X):
        numpyro.sample("y", dist.Normal(f, positive("noise", 0.3)), obs=y)


# ---- shapes and masks (13) -------------------------------------------------------------------

THREE = np.stack([Y, -Y, Y[::-1]])


def three_answer() -> Answer:
    found = [gaussian(F, y, NOISE)["f"] for y in THREE]
    return together(dict(enumerate(found)), "f")


@exactly(X, THREE, answer=three_answer)
def functions_by_expand_and_to_event(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(SCALE), X).expand([3]).to_event(1))
    with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@exactly(X, THREE, answer=three_answer)
def functions_by_sample_shape(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(SCALE), X), sample_shape=(3,))
    with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@refused(r"GP site 'f' stands under a mask", X, Y)
def mask_around_a_gp(X, y=None):
    with handlers.mask(mask=SEEN[0]):
        f = function(X)
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@refused(r"inputs X of GP site 'f' have shape \(1, 20\).*pass X\.T", X[None, :], Y)
def inputs_in_a_row(X, y=None):
    f = function(X)
    with numpyro.plate("data", X.shape[1]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


OWN = np.array([0.1, 0.25, 0.6])


@exactly(
    *(X, THREE),
    answer=lambda: together(
        {
            k: gaussian(Prior({"f": dense.rbf(X, X, s, 2.0)}), y, NOISE)["f"]
            for k, (s, y) in enumerate(zip(OWN, THREE, strict=True))
        },
        "f",
    ),
)
def plate_of_functions_with_kernels_of_their_own(X, y=None):
    with numpyro.plate("outputs", 3):
        f = numpyro.sample("f", GP(kernels.RBF(OWN[:, None], 2.0 * np.ones(3)), X))
    with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)
