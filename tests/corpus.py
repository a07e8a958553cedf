"""Models that are hard to get right, with their data and an answer that does not come from here.

Each entry is either accepted, with posterior moments by other means to compare with, or refused,
with the words of the refusal. There is no third thing. Answers come from :mod:`answers`: Gaussian
algebra and grids are computed when asked for; those of long Markov chains are in
``data/corpus.json``, and ``python tests/corpus.py NAME ...`` computes them anew.

Tolerances are those of an entry: ``mean`` in posterior standard deviations, ``sd`` relative. What
is exact is compared to rounding; a Gaussian that is fitted to a posterior which is not may be off
by 0.15 standard deviations in its mean and by a tenth in its standard deviation, unless an entry
says otherwise.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import tinygp
from answers import (
    Moments,
    Prior,
    gaussian,
    log_evidence,
    mixed,
    on_grid,
    slice_sample,
    weighted,
)
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy import optimize, special, stats

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, collapse, kernels, whiten
from numpyro_tsvgp.gaussian.linalg import blas_threads

STORED = Path(__file__).parent / "data" / "corpus.json"
Answer = dict[str, Moments]


@dataclass(frozen=True)
class Entry:
    """One model.

    Attributes:
      run: fits it; gives moments by name.
      refused: a pattern of the words it is refused with, or None if it is accepted.
      answer: moments by other means; None where being warned is all that is asked for.
      how: how the answer was got.
      mean: how far means may be off, in posterior standard deviations.
      sd: how far standard deviations may be off, relative; None where they are not asked for.
      warns: a pattern of a warning that must come; None if there must be none.
      stored: whether the answer is read from the file of stored ones.
    """

    run: Callable[[], Answer]
    refused: str | None = None
    answer: Callable[[], Answer] | None = None
    how: str = ""
    mean: float = 0.15
    sd: float | None = 0.1
    warns: str | None = None
    stored: bool = False


CORPUS: dict[str, Entry] = {}


def reference(name: str) -> Answer:
    """The answer of an entry, computed anew, however long it takes."""
    answer = CORPUS[name].answer
    assert answer is not None
    return answer()


def expected(name: str) -> Answer:
    """The answer of an entry: computed, or as it was stored."""
    if not CORPUS[name].stored:
        return reference(name)
    found = _stored()[name]
    keys = [key.removesuffix(" mean") for key in found if key.endswith(" mean")]
    return {k: Moments(*(np.array(found[f"{k} {part}"]) for part in Moments._fields)) for k in keys}


@cache
def _stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())


# ---- how entries are made --------------------------------------------------------------------


def fit(model, *args, steps=50, optim=None, guide=None, init_params=None, key=0, **options):
    """A fit: by default of one site for each data point, at given hyperparameters."""
    svi = TSVGP(model, AutoDualGaussian(model, **(guide or {})), optim, **options)
    return svi.run(jax.random.key(key), steps, *args, init_params=init_params, progress_bar=False)


def marginals(result, *args) -> Answer:
    return {
        name: Moments(np.asarray(q.mean), np.sqrt(np.asarray(q.variance)))
        for name, q in result.fit.marginals(*args).items()
    }


def hyperparameters(result, count=4000) -> Answer:
    """Moments of variational hyperparameters, by draws from their guide."""
    made = result.fit.hyper_guide
    keys = jax.random.split(jax.random.key(3), count)
    draw = jax.jit(jax.vmap(lambda key: made.draw(key, result.fit.params, result.fit.data)[0]))
    return {k: Moments(np.mean(v, 0), np.std(v, 0)) for k, v in draw(keys).items()}


def points(*names: str):
    """Values of parameters, which have no spread."""

    def found(result) -> Answer:
        values = {**result.params, **result.fit.hyper}
        return {k: Moments(np.asarray(values[k]), None) for k in names}

    return found


def nuts_on_collapse(result, *args, draws=600, transform=None) -> Answer:
    """Hyperparameters and GPs by NUTS on the collapsed model."""
    collapsed = collapse(result.fit)
    mcmc = MCMC(NUTS(collapsed), num_warmup=400, num_samples=draws, progress_bar=False)
    with blas_threads():
        mcmc.run(jax.random.key(5), *args)
    samples = mcmc.get_samples()
    out = {k: Moments(np.mean(v, 0), np.std(v, 0)) for k, v in (transform or dict)(samples).items()}
    for name, q in collapsed.marginals(samples).items():
        out[name] = Moments(np.asarray(q.mean), np.sqrt(np.asarray(q.variance)))
    return out


def _name(function: Callable) -> str:
    return function.__name__.strip("_").replace("_", " ")


def accepted(
    *args, answer, how, mean=0.15, sd=0.1, warns=None, stored=False, found=marginals, **settings
):
    """Registers a model that is fitted and compared."""

    def register(model):
        entry = Entry(
            lambda: found(fit(model, *args, **settings)), None, answer, how, mean, sd, warns, stored
        )
        assert _name(model) not in CORPUS
        CORPUS[_name(model)] = entry
        return model

    return register


def exactly(*args, answer, how="Gaussian algebra", **settings):
    """Registers a model whose fit is exact: one E-step of rate 1 on a Gaussian likelihood."""
    exact = {"site_lr": 1.0, "steps": 2, "mean": 1e-4, "sd": 1e-4}
    return accepted(*args, answer=answer, how=how, **{**exact, **settings})


def sampled(*args, prior, log_likelihood, draws=3000, **settings):
    """Registers a model whose answer is by elliptical slice sampling."""

    def answer() -> Answer:
        found = slice_sample(prior, log_likelihood, steps=draws)
        print(f"  standard error of means: {found.error:.3f} posterior standard deviations")
        sd = np.sqrt(np.diag(found.covariance))
        return {name: Moments(found.mean[b], sd[b]) for name, b in prior.blocks.items()}

    return accepted(*args, answer=answer, how="elliptical slice sampling", stored=True, **settings)


def refused(pattern: str, *args, **settings):
    """Registers a model that must not be fitted."""

    def register(model):
        CORPUS[_name(model)] = Entry(
            lambda: marginals(fit(model, *args, **settings)), refused=pattern
        )
        return model

    return register


def scenario(**fields):
    """Registers a function that does more than one fit and gives moments."""

    def register(run):
        CORPUS[_name(run)] = Entry(run, **fields)
        return run

    return register


def together(parts: Answer, name: str) -> Answer:
    """Moments of several vectors as those of one GP site with several functions."""
    return {
        name: Moments(*(np.stack([getattr(m, f) for m in parts.values()]) for f in ("mean", "sd")))
    }


# ---- data ------------------------------------------------------------------------------------

N = 20
RNG = np.random.RandomState(0)
X = np.sort(RNG.rand(N))
TRUTH = 1.5 * np.sin(7.0 * X)
SCALE = 0.25  # the lengthscale of everything that has none of its own
K = dense.rbf(X, X, SCALE)
F = Prior({"f": K})
NOISE = 0.3
Y = TRUTH + NOISE * RNG.randn(N)
COUNTS = RNG.poisson(np.exp(TRUTH))
BINARY = (RNG.rand(N) < special.expit(2 * TRUTH)).astype(int)
POSITIVE = RNG.gamma(2.0, np.exp(0.7 * TRUTH) / 2.0)
SHARES = RNG.beta(6 * special.expit(TRUTH), 6 * special.expit(-TRUTH))
ORDINAL = np.digitize(Y, [-0.8, 0.6])
GROUPS = np.arange(N) % 5
SEEN = np.arange(N) % 4 != 1
MEAN = TRUTH + 2.0


def positive(name, value):
    return numpyro.param(name, value, constraint=constraints.positive)


def function(X, name="f", scale=SCALE, variance=1.0, **options):
    return numpyro.sample(name, GP(kernels.RBF(scale, variance), X, **options))


def data(X):
    return numpyro.plate("data", X.shape[0])


def likelihood(distribution, name):
    """A model of one function and the given distribution of y."""

    def model(X, y=None):
        f = function(X)
        with data(X):
            numpyro.sample("y", distribution(f), obs=y)

    model.__name__ = name
    return model


# ---- latent variables below a GP (1) ---------------------------------------------------------

BELOW = r"is a latent variable that depends on a GP"
TIMES = np.linspace(0.0, 1.0, 8)
MEMBERS = np.arange(24) % 8
K_TIMES = dense.rbf(TIMES, TIMES, 0.3, 4.0)
GROUPED = 2.0 * np.sin(6.0 * TIMES)[MEMBERS] + 0.3 * RNG.randn(24)
DESIGN = np.eye(8)[MEMBERS]


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
    mean=0.3,
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


# ---- what terms read (2, 3, 4, 5) ------------------------------------------------------------

READS_BOTH = r"one term of site '{}' reads both f\[\d+\] and f\[\d+\] of GP site 'f'.*Use NUTS"


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


TWO = np.stack([BINARY, (RNG.rand(N) < special.expit(3 * TRUTH + np.cos(9 * X))).astype(int)])


class Remembered:
    """What a run found out, for an answer that is about that run."""

    def __init__(self):
        self.value: Any = None


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


# ---- one guide, several data (6) -------------------------------------------------------------

X_CV = np.sort(RNG.rand(40))
Y_CV = np.sin(9.0 * X_CV) + 0.5 * RNG.randn(40)
FOLDS = [(np.arange(40) % 4 != k, np.arange(40) % 4 == k) for k in range(4)]
regression = likelihood(lambda f: dist.Normal(f, 0.5), "regression")


def cross_validation_answer() -> Answer:
    out = []
    for train, test in FOLDS:
        K_train = dense.rbf(X_CV[train], X_CV[train], SCALE)
        k = dense.rbf(X_CV[train], X_CV[test], SCALE)
        out.append(_r2(dense.regression(K_train, k, 1.0, Y_CV[train], 0.5)[0], Y_CV[test]))
    return {"R2": Moments(np.array(out), np.full(4, 0.01))}


def _r2(found, y):
    return 1 - np.mean((np.asarray(found) - y) ** 2) / np.var(y)


@scenario(answer=cross_validation_answer, how="exact regression", mean=0.01, sd=None)
def cross_validation_with_one_guide():
    svi = TSVGP(regression, AutoDualGaussian(regression), None, site_lr=1.0)
    out = []
    for train, test in FOLDS:
        result = svi.run(jax.random.key(0), 2, X_CV[train], Y_CV[train], progress_bar=False)
        out.append(_r2(result.fit.marginals(X_CV[test])["f"].mean, Y_CV[test]))
    return {"R2": Moments(np.array(out), None)}


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
    sd=0.25,
)
def counts_with_random_effects(X, g, y=None):
    f = function(X)
    b = numpyro.sample("b", GP(0.25 * kernels.Group(), jnp.arange(5)))
    with data(X):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + b[g])), obs=y)


# ---- losses of minibatches (9) ---------------------------------------------------------------

X_MANY = np.sort(RNG.rand(120))
COUNTS_MANY = RNG.poisson(np.exp(np.sin(7 * X_MANY)))
_minibatches = Remembered()


def subsampled_counts(X, y=None):
    plate = numpyro.plate("data", X.shape[0], subsample_size=20)
    with plate as rows:
        x, y = X[rows], None if y is None else y[rows]
    f = function(x, variance=positive("variance", 1.0))
    with plate:
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def full_loss() -> Answer:
    """Minus the bound on all rows at the end of the run, from dense formulas."""
    params, dual = _minibatches.value
    variance = float(params["variance"])
    q = dense.posterior(
        lambda A, B: dense.rbf(A, B, SCALE, variance), params["f_auto_inducing"], X_MANY, dual
    )
    expectation = dense.integral(
        lambda f: stats.poisson.logpmf(COUNTS_MANY, np.exp(f)), q.mean, q.variance
    )
    return {"loss": Moments(np.asarray(q.kl - expectation), np.array(0.02 * abs(expectation)))}


@scenario(answer=full_loss, how="dense formulas on all rows", mean=1.0, sd=None)
def losses_of_minibatches():
    guide = AutoDualGaussian(subsampled_counts, inducing=np.linspace(0, 1, 8))
    svi = TSVGP(subsampled_counts, guide, optax.adam(0.01))
    result = svi.run(jax.random.key(0), 1000, X_MANY, COUNTS_MANY, progress_bar=False)
    duals = guide.dual_parameters(result.params, X_MANY, COUNTS_MANY)["f"]
    _minibatches.value = (
        result.params,
        [np.squeeze(d, 0) if d.ndim > i + 1 else d for i, d in enumerate(duals)],
    )
    reported = np.mean(result.losses[-300:])
    return {"loss": Moments(np.asarray(reported), None)}


# ---- the same model under NUTS (10) ----------------------------------------------------------

counts = likelihood(lambda f: dist.Poisson(jnp.exp(f)), "counts")
COUNTED = {
    "prior": F,
    "log_likelihood": lambda f: stats.poisson.logpmf(COUNTS, np.exp(f["f"])).sum(-1),
}
sampled(X, COUNTS, **COUNTED)(counts)


@scenario(answer=lambda: expected("counts"), how="elliptical slice sampling", mean=0.15, sd=0.1)
def counts_by_nuts_on_the_whitened_model():
    mcmc = MCMC(NUTS(whiten(counts)), num_warmup=500, num_samples=2000, progress_bar=False)
    mcmc.run(jax.random.key(0), X, COUNTS)
    f = np.asarray(mcmc.get_samples()["f"])
    return {"f": Moments(f.mean(0), f.std(0))}


# ---- mistakes (11, 15, 16) -------------------------------------------------------------------


def mistake(pattern: str):
    """Registers a function that must end in an error."""

    def register(run):
        CORPUS[_name(run)] = Entry(run, refused=pattern)
        return run

    return register


normal = likelihood(lambda f: dist.Normal(f, NOISE), "normal")
EXACT = {"site_lr": 1.0, "steps": 2}


def with_variance(X, y=None):
    f = function(X, variance=positive("variance", 1.0))
    with data(X):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@mistake(r"The parameters have no \['variance'\].*another model")
def parameters_of_another_model():
    result = fit(normal, X, Y, **EXACT)
    return AutoDualGaussian(with_variance).marginals(result.params, X)


@mistake(r"The parameters have no \['f_auto_linear'\]")
def parameters_without_one():
    params = dict(fit(normal, X, Y, **EXACT).params)
    del params["f_auto_linear"]
    return AutoDualGaussian(normal).marginals(params, X)


@mistake(r"The state is one of another model.*variance")
def state_of_another_model():
    state = fit(normal, X, Y, **EXACT).state
    svi = TSVGP(with_variance, AutoDualGaussian(with_variance), None)
    return svi.run(jax.random.key(0), 2, X, Y, init_state=state, progress_bar=False)


@mistake(r"The data of site 'y' are one number.*distribution has shape \(20,\)")
def one_number_for_all_data():
    return fit(normal, X, np.array(0.3))


@mistake(r"data of site 'y' at index 0.*outside of the support of Poisson.*are X and y swapped\?")
def inputs_and_data_swapped():
    return fit(counts, COUNTS.astype(float), X)


@mistake(r"is a checkpoint of another run: the data is not the same")
def checkpoint_of_other_data():
    with tempfile.TemporaryDirectory() as folder:
        svi = TSVGP(normal, AutoDualGaussian(normal), None)
        options = {"progress_bar": False, "checkpoint": f"{folder}/run.npz"}
        svi.run(jax.random.key(0), 3, X, Y, **options)
        return svi.run(jax.random.key(0), 3, X, Y + 1.0, **options)


@mistake(r"data of site 'y' at index 100: the value nan is missing")
def missing_value_in_a_later_batch():
    def model(X, y=None):
        plate = numpyro.plate("data", X.shape[0], subsample_size=20)
        with plate as rows:
            x, y = X[rows], y[rows]
        f = function(x)
        with plate:
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    y = COUNTS_MANY.astype(float)
    y[100] = np.nan
    return fit(model, X_MANY, y, guide={"inducing": X_MANY[::20]})


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


def moving(name, **guide):
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
    )(model)


moving("inputs_that_move_with_a_site_for_each_point")
moving("inputs_that_move_with_tied_sites", inducing=np.linspace(0.0, 6.0, 12))
moving("inputs_that_move_with_untied_sites", inducing=np.linspace(0.0, 6.0, 12), sites="untied")


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


# ---- divergence (14) -------------------------------------------------------------------------

RNG_SHARP = np.random.RandomState(11)
X_SHARP = np.sort(RNG_SHARP.rand(40))
Y_SHARP = np.sin(6 * X_SHARP) + RNG_SHARP.logistic(scale=0.02, size=40)


def sharp_logistic(X, y=None):
    f = function(X, scale=0.3)
    with data(X):
        numpyro.sample("y", dist.Logistic(f, 0.02), obs=y)


@sampled(
    *(X_SHARP, Y_SHARP),
    prior=Prior({"f": dense.rbf(X_SHARP, X_SHARP, 0.3)}),
    log_likelihood=lambda f: stats.logistic.logpdf(Y_SHARP, f["f"], 0.02).sum(-1),
    draws=40_000,
    site_lr=0.05,
    steps=400,
)
def sharp_logistic_with_short_steps(X, y=None):
    sharp_logistic(X, y)


X_EVEN = np.linspace(0.0, 1.0, 40)
NOISE_ALONE = 2.0 * RNG_SHARP.randn(40)
CURVE = np.sin(6 * X_EVEN) + 0.1 * RNG_SHARP.randn(40)


def restless(name, distribution, y, words, **kernel):
    """Registers a model whose E-steps of rate 1 do not converge, which is all that is asked for."""

    def model(X, y=None):
        f = function(X, **kernel)
        with data(X):
            numpyro.sample("y", distribution(f), obs=y)

    model.__name__ = name
    accepted(X_EVEN, y, answer=None, how="", warns=words, site_lr=1.0, steps=80)(model)


restless(
    "losses_that_alternate",
    lambda f: dist.Logistic(f, 0.02),
    NOISE_ALONE,
    "losses alternate",
    scale=0.3,
)
restless(
    "losses_that_rise",
    lambda f: dist.Laplace(f, 0.02),
    NOISE_ALONE,
    "fit has diverged",
    scale=0.3,
)
restless(
    "losses_that_jump",
    lambda f: dist.Cauchy(f, 0.1),
    CURVE,
    "has not converged.*losses jump",
    scale=0.05,
    variance=9.0,
)


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
    sd=0.15,
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
    # The two functions are independent under the guide and the posterior is skewed.
    mean=0.3,
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
    # The three functions are independent under the guide.
    sd=0.15,
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
    sd=0.15,
)
def binary_outputs_that_mix_functions(X, y=None):
    with numpyro.plate("functions", 2):
        f = function(X)
    with numpyro.plate("outputs", 2, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Bernoulli(logits=jnp.array([[1.0, 0.7], [0.0, 1.0]]) @ f), obs=y)


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
    mean=0.2,
    sd=0.15,
)
def hierarchical_counts_by_nuts_on_collapse():
    result = fit(hierarchical_counts, X, COUNTS, optim=optax.adam(0.05), steps=100)
    return nuts_on_collapse(result, X, COUNTS)


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


def main(names: list[str]) -> None:
    """Computes stored answers anew, all or those of some entries, and writes them."""
    for name, entry in CORPUS.items():
        if not entry.stored or (names and name not in names):
            continue
        print(name, flush=True)
        stored = json.loads(STORED.read_text()) if STORED.exists() else {}
        stored[name] = {
            f"{key} {k}": np.round(v, 4).tolist()
            for key, moments in reference(name).items()
            for k, v in moments._asdict().items()
        }
        lines = [
            f'"{name}": {{\n  '
            + ",\n  ".join(f'"{k}": {json.dumps(v)}' for k, v in stored[name].items())
            + "\n}"
            for name in sorted(stored)
        ]
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    from corpus import main as run  # under the name that answers look themselves up by

    run(sys.argv[1:])
