"""Likelihoods that are not Gaussian, with answers by slice sampling."""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from answers import Prior
from numpyro import handlers
from scipy import special, stats

from corpus.data import (
    BINARY,
    COUNTS,
    NOISE,
    ORDINAL,
    POSITIVE,
    SHARES,
    TRUTH,
    TWO,
    F,
    K,
    N,
    X,
    Y,
    data,
    function,
    likelihood,
)
from corpus.entries import sampled

RNG = np.random.RandomState(6)

# ---- other likelihoods -----------------------------------------------------------------------


def of_f(log_prob, y):
    """The log-likelihood of one function, from a log density of y and f."""
    return lambda f: log_prob(y, f["f"]).sum(-1)


def one(name, distribution, y, log_prob, **settings):
    """Registers a model of one function and a distribution of y."""
    sampled(X, y, prior=F, log_likelihood=of_f(log_prob, y), **settings)(
        likelihood(distribution, name)
    )


def log_bernoulli(y, f):
    return special.log_expit((2 * y - 1) * f)


one(
    "binary_classification",
    lambda f: dist.Bernoulli(logits=2 * f),
    BINARY,
    lambda y, f: log_bernoulli(y, 2 * f),
)
one(
    "probit_classification",
    lambda f: dist.Bernoulli(probs=1e-3 + 0.998 * dist.Normal().cdf(f)),
    BINARY,
    lambda y, f: stats.bernoulli.logpmf(y, 1e-3 + 0.998 * special.ndtr(f)),
)


def _ordinal(y, f):
    edges = np.array([-np.inf, -0.8, 0.6, np.inf])
    return np.log(special.expit(edges[y + 1] - f) - special.expit(edges[y] - f))


one("ordinal", lambda f: dist.OrderedLogistic(f, jnp.array([-0.8, 0.6])), ORDINAL, _ordinal)

EXPOSURE = np.exp(RNG.randn(N))
EXPOSED = RNG.poisson(EXPOSURE * np.exp(TRUTH))


@sampled(
    *(X, EXPOSURE, EXPOSED),
    prior=F,
    log_likelihood=of_f(lambda y, f: stats.poisson.logpmf(y, EXPOSURE * np.exp(f)), EXPOSED),
)
def counts_with_an_exposure(X, exposure, y=None):
    f = function(X)
    with data(X):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + jnp.log(exposure))), obs=y)


OVERDISPERSED = RNG.negative_binomial(3, 3 / (3 + np.exp(TRUTH)))
one(
    "negative_binomial",
    lambda f: dist.NegativeBinomial2(jnp.exp(f), 3.0),
    OVERDISPERSED,
    lambda y, f: stats.nbinom.logpmf(y, 3, 3 / (3 + np.exp(f))),
)

INFLATED = COUNTS * (RNG.rand(N) < 0.8)


def _zero_inflated(y, f):
    counted = np.log(0.8) + stats.poisson.logpmf(y, np.exp(f))
    return np.where(y == 0, np.logaddexp(np.log(0.2), counted), counted)


one(
    "zero_inflated_counts",
    lambda f: dist.ZeroInflatedPoisson(0.2, rate=jnp.exp(f)),
    INFLATED,
    _zero_inflated,
)

BINS = np.linspace(0.0, 1.0, 31)
CENTRES = 0.5 * (BINS[1:] + BINS[:-1])
_events = np.concatenate([RNG.beta(2.0, 6.0, 50), RNG.beta(9.0, 3.0, 30)])
BINNED = np.histogram(_events, BINS)[0]


@sampled(
    *(CENTRES, BINNED),
    prior=Prior({"f": dense.rbf(CENTRES, CENTRES, 0.15)}, {"f": np.log(80.0)}),
    log_likelihood=of_f(lambda y, f: stats.poisson.logpmf(y, np.exp(f) / 30), BINNED),
)
def events_in_bins(X, y=None):
    f = function(X, scale=0.15, mean=np.log(80.0))
    with data(X):
        numpyro.sample("y", dist.Poisson(jnp.exp(f) / 30), obs=y)


LIMIT = 0.8
CENSORED = Y > LIMIT


def _censored(y, f):
    beyond = special.log_ndtr((f - LIMIT) / NOISE)
    return np.where(CENSORED, beyond, stats.norm.logpdf(np.minimum(Y, LIMIT), f, NOISE))


@sampled(
    *(X, np.minimum(Y, LIMIT), CENSORED),
    prior=F,
    log_likelihood=of_f(_censored, Y),
)
def censored_data(X, y, censored):
    f = function(X)
    with data(X):
        fn = dist.RightCensoredDistribution(dist.Normal(f, NOISE), censored)
        numpyro.sample("y", fn, obs=y)


@sampled(
    *(X, np.minimum(Y, LIMIT), CENSORED),
    prior=F,
    log_likelihood=of_f(_censored, Y),
)
def censored_data_by_a_factor(X, y, censored):
    f = function(X)
    with data(X):
        beyond = jax.scipy.special.log_ndtr((f - LIMIT) / NOISE)
        seen = dist.Normal(f, NOISE).log_prob(y)
        numpyro.factor("fit", jnp.where(censored, beyond, seen))


TRUNCATED = np.abs(Y) + 0.05
one(
    "truncated_data",
    lambda f: dist.TruncatedNormal(f, 0.5, low=0.0),
    TRUNCATED,
    lambda y, f: stats.norm.logpdf(y, f, 0.5) - special.log_ndtr(f / 0.5),
)

OUTLYING = Y + 4.0 * (np.arange(N) % 7 == 3)
one(
    "heavy_tails",
    lambda f: dist.StudentT(4.0, f, NOISE),
    OUTLYING,
    lambda y, f: stats.t.logpdf(y, 4.0, f, NOISE),
)
one(
    "beta_regression",
    lambda f: dist.Beta(6 * jax.nn.sigmoid(f), 6 * jax.nn.sigmoid(-f)),
    SHARES,
    lambda y, f: stats.beta.logpdf(y, 6 * special.expit(f), 6 * special.expit(-f)),
)
one(
    "gamma_regression",
    lambda f: dist.Gamma(2.0, 2.0 * jnp.exp(-f)),
    POSITIVE,
    lambda y, f: stats.gamma.logpdf(y, 2.0, scale=np.exp(f) / 2.0),
)
one(
    "absolute_errors",
    lambda f: dist.Laplace(f, 0.5),
    Y,
    lambda y, f: stats.laplace.logpdf(y, f, 0.5),
    mean=0.25,  # a kink between nodes of the quadrature; with 200 of them it would be 0.06
    sd=0.1,
)
one(
    "successes_of_trials",
    lambda f: dist.Binomial(5, logits=f),
    BINARY + ORDINAL,
    lambda y, f: stats.binom.logpmf(y, 5, special.expit(f)),
)

FOLLOWED = 1.5
TIME = np.exp(0.5 * TRUTH) * RNG.weibull(1.7, N)


def _survival(_, f):
    alive = -((FOLLOWED / np.exp(f)) ** 1.7)
    died = stats.weibull_min.logpdf(np.minimum(TIME, FOLLOWED), 1.7, scale=np.exp(f))
    return np.where(TIME > FOLLOWED, alive, died)


@sampled(
    *(X, np.minimum(TIME, FOLLOWED), TIME > FOLLOWED),
    prior=F,
    log_likelihood=of_f(_survival, TIME),
)
def survival_times(X, time, alive):
    f = function(X)
    with data(X):
        died = dist.Weibull(jnp.exp(f), 1.7).log_prob(time)
        numpyro.factor("fit", jnp.where(alive, -((time / jnp.exp(f)) ** 1.7), died))


@sampled(X, BINARY, prior=F, log_likelihood=of_f(lambda y, f: 2.5 * log_bernoulli(y, f), BINARY))
def classification_with_weights(X, y=None):
    f = function(X)
    with data(X), handlers.scale(scale=2.5):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@sampled(
    *(X, Y, COUNTS),
    prior=F,
    log_likelihood=lambda f: (
        stats.norm.logpdf(Y, f["f"], 0.8) + stats.poisson.logpmf(COUNTS, np.exp(f["f"]))
    ).sum(-1),
)
def measurements_and_counts(X, y=None, z=None):
    f = function(X)
    with data(X):
        numpyro.sample("y", dist.Normal(f, 0.8), obs=y)
        numpyro.sample("z", dist.Poisson(jnp.exp(f)), obs=z)


NOISY = TRUTH + np.exp(-1.0 + 0.8 * np.cos(6 * X)) * RNG.randn(N)


@sampled(
    *(X, NOISY),
    prior=Prior({"f": K, "g": dense.rbf(X, X, 0.4, 0.5)}, {"g": -1.0}),
    log_likelihood=lambda f: stats.norm.logpdf(NOISY, f["f"], np.exp(f["g"])).sum(-1),
    # The two functions are independent under the guide, and the posterior is skewed.
    mean=0.2,
    sd=0.25,
)
def heteroscedastic(X, y=None):
    f, g = function(X), function(X, "g", 0.4, 0.5, mean=-1.0)
    with data(X):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


CLASSES = (np.stack([TRUTH, -TRUTH, 0 * X]) + RNG.gumbel(size=(3, N))).argmax(0)


def _softmax(f):
    logits = f["f"].reshape(-1, 3, N)
    return (
        np.take_along_axis(logits, CLASSES[None, None], 1)[:, 0] - special.logsumexp(logits, 1)
    ).sum(-1)


@sampled(
    *(X, CLASSES),
    prior=Prior({"f": np.kron(np.eye(3), K)}),
    log_likelihood=_softmax,
    # The three functions are independent under the guide, and narrower for it.
    sd=0.25,
)
def three_classes(X, y=None):
    with numpyro.plate("classes", 3):
        f = function(X)
    with data(X):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


@sampled(
    *(X, TWO),
    prior=Prior({"f": np.kron(np.eye(2), K)}),
    log_likelihood=lambda f: special.log_expit(
        (2 * TWO - 1) * (np.array([[1.0, 0.7], [0.0, 1.0]]) @ f["f"].reshape(-1, 2, N))
    ).sum((-2, -1)),
    sd=0.15,  # independent under the guide
)
def binary_outputs_that_mix_functions(X, y=None):
    with numpyro.plate("functions", 2):
        f = function(X)
    with numpyro.plate("outputs", 2, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Bernoulli(logits=jnp.array([[1.0, 0.7], [0.0, 1.0]]) @ f), obs=y)
