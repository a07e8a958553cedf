"""What terms of a likelihood read: at other values, in other batches, across kinks."""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from answers import Moments, Prior, gaussian
from numpyro import handlers
from scipy import special

from corpus.data import BINARY, NOISE, READS_BOTH, SCALE, TWO, K, N, X, Y, data, function
from corpus.entries import Answer, Remembered, accepted, refused, sampled, scenario
from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

# ---- what terms read (2, 3, 4, 5) ------------------------------------------------------------


@refused(READS_BOTH.format("won"), X, np.array(0.5), BINARY[:10])
def preferences_beside_a_precise_sensor(X, y=None, won=None):
    f = function(X)
    numpyro.sample("y", dist.Normal(f[0], 1e-4), obs=y)
    with numpyro.plate("pairs", X.shape[0] // 2):
        numpyro.sample("won", dist.Bernoulli(logits=f[0::2] - f[1::2]), obs=won)


def mixed_logits(X, y=None):
    W = numpyro.param("W", jnp.eye(2))
    with numpyro.plate("functions", 2):
        f = function(X)
    with numpyro.plate("outputs", 2, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Bernoulli(logits=W @ f), obs=y)


_mixing = Remembered()


def mixing_answer() -> Answer:
    """Minus the bound of the very same q, by draws from it; its standard error is a hundredth."""
    params, duals = _mixing.value
    rng = np.random.default_rng(0)
    W, Z = np.asarray(params["W"]), np.asarray(params["f_auto_inducing"])
    qs = [
        dense.posterior(lambda A, B: dense.rbf(A, B, SCALE), Z, X, dual)
        for dual in zip(*duals, strict=True)
    ]
    draws = np.stack(
        [q.mean + np.sqrt(q.variance) * rng.standard_normal((200_000, N)) for q in qs], 1
    )
    logits = W @ draws
    each = (TWO * logits - np.logaddexp(0.0, logits)).sum((1, 2))
    return {"loss": Moments(sum(q.kl for q in qs) - each.mean(), np.array(0.05))}


@scenario(answer=mixing_answer, how="Monte Carlo on the same q", mean=1.0, sd=None)
def mixing_matrix_that_starts_at_the_identity():
    guide = AutoDualGaussian(mixed_logits, inducing=X[::3])
    svi = TSVGP(mixed_logits, guide, optax.adam(0.1))
    result = svi.run(jax.random.key(0), 40, X, TWO, progress_bar=False)
    assert result.state.structure.dim == 2
    assert abs(result.params["W"][0, 1]) > 0.1  # or there would be nothing to see
    _mixing.value = result.params, guide.dual_parameters(result.params, X)["f"]
    return {"loss": Moments(np.asarray(svi.evaluate(result.state, X, TWO)), None)}


@refused(READS_BOTH.format("y"), X, BINARY)
def lag_whose_coefficient_starts_at_zero(X, y=None):
    a = numpyro.param("a", 0.0)
    f = function(X)
    before = jnp.concatenate([jnp.zeros(1), f[:-1]])
    with data(X):
        numpyro.sample("y", dist.Bernoulli(logits=f + a * before), obs=y)


SECOND = np.where(np.arange(N) < N // 2, 0.0, 1.0)
SHIFTED = Y + SECOND * np.cos(20.0 * X)


@accepted(
    *(X, SECOND, SHIFTED),
    answer=lambda: gaussian(
        Prior({"f": K, "g": dense.rbf(X, X, 0.1, 0.25)}),
        SHIFTED,
        0.6,
        {"f": np.eye(N), "g": np.diag(SECOND)},
        factorised=True,
    ),
    how="Gaussian algebra, for a guide that factorises",
    guide={"inducing": X, "learn_inducing": False},
    site_lr=lambda step: 0.3 / (1.0 + 0.02 * step),
    steps=2000,
    mean=0.15,
    sd=0.05,
)
def second_function_that_the_first_batch_does_not_show(X, s, y=None):
    plate = numpyro.plate("data", X.shape[0], subsample_size=5)
    with plate as rows:
        x, s, y = X[rows], s[rows], None if y is None else y[rows]
    f, g = function(x), function(x, "g", 0.1, 0.25)
    with plate:
        numpyro.sample("y", dist.Normal(f + s * g, 0.6), obs=y)


FIRST = np.arange(N)
OTHER = np.where(np.arange(N) < N // 2, FIRST, FIRST[::-1])


@refused(READS_BOTH.format("y"), X, FIRST, OTHER, BINARY)
def pairs_that_the_first_batch_does_not_show(X, i, j, y=None):
    f = function(X)
    with numpyro.plate("data", X.shape[0], subsample_size=5) as rows:
        logits = 2.0 * f[i[rows]] - f[j[rows]]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=None if y is None else y[rows])


@refused(READS_BOTH.format("y"), X, Y)
def laplace_of_cumulative_sums(X, y=None):
    f = function(X)
    with data(X):
        numpyro.sample("y", dist.Laplace(jnp.cumsum(f), 0.5), obs=y)


@refused(READS_BOTH.format("total"), X, Y)
def laplace_of_the_sum(X, y=None):
    f = function(X)
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)
    numpyro.sample("total", dist.Laplace(f.sum(), 0.5), obs=1.0)


@refused(READS_BOTH.format("average"), X, Y)
def laplace_of_the_mean(X, y=None):
    f = function(X)
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)
    numpyro.sample("average", dist.Laplace(f.mean(), 0.02), obs=0.1)


def penalised(name, penalty):
    """Data and one factor of all values."""

    def model(X, y=None):
        f = function(X)
        with data(X):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)
        numpyro.factor("penalty", -penalty(f))

    model.__name__ = name
    refused(READS_BOTH.format("penalty"), X, Y)(model)


penalised("absolute_balance_of_two_halves", lambda f: 5.0 * jnp.abs(f[:10].sum() - f[10:].sum()))
penalised("cap_on_the_maximum", lambda f: 10.0 * jax.nn.relu(f.max() - 1.0))
penalised("cap_on_a_sum_far_away", lambda f: jax.nn.relu(jnp.sum(jax.nn.relu(f)) - 60.0))
penalised("hinge_of_neighbouring_differences", lambda f: jnp.sum(jax.nn.relu(jnp.diff(f) - 0.1)))
penalised("total_variation", lambda f: jnp.sum(jnp.abs(jnp.diff(f))))
penalised("logarithm_of_a_sum_of_squares", lambda f: jnp.log1p(jnp.sum(f**2)))


@refused(READS_BOTH.format("y"), X, np.sort(Y))
def sorted_values(X, y=None):
    f = function(X)
    with data(X):
        numpyro.sample("y", dist.Normal(jnp.sort(f), NOISE), obs=y)


@refused(READS_BOTH.format("won"), X, BINARY[:10])
def preferences_between_values(X, won=None):
    f = function(X)
    with numpyro.plate("pairs", X.shape[0] // 2):
        numpyro.sample("won", dist.Bernoulli(logits=f[0::2] - f[1::2]), obs=won)


@refused(READS_BOTH.format("y"), X, Y)
def correlated_noise(X, y=None):
    f = function(X)
    covariance = 0.09 * jnp.eye(X.shape[0]) + 0.05
    numpyro.sample("y", dist.MultivariateNormal(f, covariance), obs=y)


# Preferences that can be fitted: the difference of two values is a GP on pairs of inputs.
PAIRS = np.stack([X[0::2], X[1::2]], 1) + np.array([0.0, 0.3])


def difference_kernel(A, B):
    def k(a, b):
        return jnp.exp(-0.5 * ((a[:, None] - b[None, :]) / SCALE) ** 2)

    return k(A[:, 0], B[:, 0]) - k(A[:, 0], B[:, 1]) - k(A[:, 1], B[:, 0]) + k(A[:, 1], B[:, 1])


_ends = dense.rbf(PAIRS.T.ravel(), PAIRS.T.ravel(), SCALE)
_differ = np.hstack([np.eye(10), -np.eye(10)])


@sampled(
    *(PAIRS, BINARY[:10]),
    prior=Prior({"d": _differ @ _ends @ _differ.T}),
    log_likelihood=lambda f: special.log_expit((2 * BINARY[:10] - 1) * 2 * f["d"]).sum(-1),
)
def preferences_as_a_function_of_pairs(X, won=None):
    d = numpyro.sample("d", GP(difference_kernel, X))
    with numpyro.plate("pairs", X.shape[0]):
        numpyro.sample("won", dist.Bernoulli(logits=2.0 * d), obs=won)


# ---- models that sites cannot represent ------------------------------------------------------


@refused(r"Site 'y' is a Bernoulli\w* whose probs leaves its range.*link function", X, BINARY)
def probabilities_without_a_link(X, y=None):
    f = function(X)
    with data(X):
        numpyro.sample("y", dist.Bernoulli(probs=f), obs=y)


@refused(r"(?s)'f'.*(gradient|constant|flat)", X, BINARY)
def likelihood_in_steps(X, y=None):
    f = function(X)
    with data(X):
        numpyro.sample("y", dist.Bernoulli(probs=jnp.where(f > 0, 0.99, 0.01)), obs=y)


@refused(r"GP site 'g' depend on the value of another GP.*Deep GPs", X, Y)
def deep_gp(X, y=None):
    f = function(X)
    g = numpyro.sample("g", GP(kernels.RBF(1.0), f))
    with data(X):
        numpyro.sample("y", dist.Normal(g, NOISE), obs=y)


@refused(r"Site 'outlier' is a discrete latent variable \(Bernoulli", X, Y)
def discrete_latent(X, y=None):
    f = function(X)
    with data(X):
        outlier = numpyro.sample("outlier", dist.Bernoulli(0.1))
        numpyro.sample("y", dist.Normal(f, jnp.where(outlier == 1, 3.0, NOISE)), obs=y)


@refused(r"GP site 'f' is observed", X, Y)
def observed_gp(X, y=None):
    numpyro.sample("f", GP(kernels.RBF(SCALE), X), obs=y)


@refused(r"GP site 'f' stands inside the data plate 'data'", X, Y)
def data_plate_around_the_gp(X, y=None):
    with data(X):
        f = function(X)
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@refused(r"GP site 'f' has scale 2\.0", X, Y)
def scale_around_the_gp(X, y=None):
    with handlers.scale(scale=2.0):
        f = function(X)
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)
