"""What people do with models: several data, minibatches, NUTS, mistakes, steps too long."""

import tempfile

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from answers import Moments, Prior
from numpyro.infer import MCMC, NUTS
from scipy import stats

from corpus.data import (
    COUNTS,
    COUNTS_MANY,
    NOISE,
    SCALE,
    X_MANY,
    F,
    X,
    Y,
    counts,
    data,
    function,
    likelihood,
    normal,
    positive,
)
from corpus.entries import (
    CORPUS,
    Answer,
    Entry,
    Remembered,
    _name,
    accepted,
    expected,
    fit,
    sampled,
    scenario,
)
from numpyro_tsvgp import TSVGP, AutoDualGaussian, whiten

RNG = np.random.RandomState(4)

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


# ---- losses of minibatches (9) ---------------------------------------------------------------

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
    result = svi.run(jax.random.key(0), 3000, X_MANY, COUNTS_MANY, progress_bar=False)
    duals = guide.dual_parameters(result.params, X_MANY, COUNTS_MANY)["f"]
    _minibatches.value = result.params, duals
    reported = np.mean(result.losses[-2000:])
    return {"loss": Moments(np.asarray(reported), None)}


# ---- the same model under NUTS (10) ----------------------------------------------------------

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
    mean=0.1,  # chains are long here, and their answer still off by 0.02
    site_lr=0.05,
    steps=400,
)
def sharp_logistic_with_short_steps(X, y=None):
    sharp_logistic(X, y)


X_EVEN = np.linspace(0.0, 1.0, 40)
_draws = np.random.RandomState(0).randn(3, 40)
CURVE = np.sin(6 * X_EVEN) + 0.1 * _draws[0]
NOISE_ALONE = 2.0 * _draws[2]


def restless(name, distribution, y, words, **kernel):
    """Registers a model whose E-steps of rate 1 do not converge, which is all that is asked for."""

    def model(X, y=None):
        f = function(X, **kernel)
        with data(X):
            numpyro.sample("y", distribution(f), obs=y)

    model.__name__ = name
    accepted(X_EVEN, y, answer=None, how="", warns=words, site_lr=1.0, steps=120)(model)


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
    "has not converged.*losses jump|ended worse than it started",
    scale=0.05,
    variance=9.0,
)
