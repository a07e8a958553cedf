"""Models of every kind that NumPyro can write: each fitted, and its bound recomputed in NumPy."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import Predictive
from numpyro.infer.util import log_density
from scipy import special, stats

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

N, M = 40, 7
RNG = np.random.RandomState(0)
X = np.sort(RNG.rand(N))
Z = np.linspace(0.0, 1.0, M)
TRUTH = 1.5 * np.sin(7.0 * X)


def positive(name: str, value: Any) -> Any:
    return numpyro.param(name, value, constraint=constraints.positive)


class Fit(NamedTuple):
    guide: AutoDualGaussian
    params: dict[str, Any]
    losses: np.ndarray


class Fitter:
    """Short fits of one model, compiled once for all data of the same shape."""

    def __init__(self, model, inducing=Z):
        self.guide = AutoDualGaussian(model, inducing=inducing)
        self.svi = TSVGP(model, self.guide, optax.adam(0.03))
        self.update = jax.jit(self.svi.update)

    def __call__(self, *args, steps=10, init_params=None) -> Fit:
        """A fit whose parameters are those that its last loss belongs to.

        The loss of an update is the M-step's, before the optimizer moves: that of the new sites
        at the old hyperparameters. Taking it from there saves compiling `evaluate`.
        """
        state, losses = self.svi.init(jax.random.key(1), *args, init_params=init_params), []
        for _ in range(steps):
            before = state
            state, loss = self.update(state, *args)
            losses.append(float(loss))
        params = self.svi.get_params(dataclasses.replace(state, optim_state=before.optim_state))
        return Fit(self.guide, params, np.array(losses))


def improved(losses) -> bool:
    """Finite throughout, and lower at the end than at the start by more than rounding."""
    losses = np.asarray(losses)
    return bool(np.isfinite(losses).all() and losses[-1] < losses[0] - 1e-3)


# ---- one latent function, every likelihood ---------------------------------------------------


class Tobit(dist.Distribution):
    """A user's own likelihood: a Normal of which only the part above zero is seen."""

    support = constraints.nonnegative
    pytree_data_fields = ("loc", "scale")

    def __init__(self, loc, scale, *, validate_args=None):
        self.loc, self.scale = jnp.broadcast_arrays(loc, scale)
        super().__init__(self.loc.shape, validate_args=validate_args)

    def sample(self, key, sample_shape=()):
        noise = jax.random.normal(key, sample_shape + self.batch_shape)
        return jnp.maximum(self.loc + self.scale * noise, 0.0)

    def log_prob(self, value):
        seen = dist.Normal(self.loc, self.scale).log_prob(value)
        return jnp.where(value > 0, seen, jax.scipy.stats.norm.logcdf(-self.loc / self.scale))


class Case(NamedTuple):
    """A likelihood: its NumPyro distribution, data, its log-density in SciPy, its own parameter."""

    distribution: Callable  # of f and the parameter
    data: np.ndarray
    log_prob: Callable  # of y, f and the parameter
    start: Any = None  # the initial value of the parameter
    constraint: Any = constraints.positive


SQUEEZE = 1e-3


def probit(f):
    return SQUEEZE + (1 - 2 * SQUEEZE) * jax.scipy.stats.norm.cdf(f)


def _ordinal(y, f, cuts):
    edges = np.concatenate([[-np.inf], cuts, [np.inf]])
    upper, lower = special.expit(edges[y + 1] - f), special.expit(edges[y] - f)
    return np.log(upper - lower)


def _zero_inflated(y, f, gate):
    counted = np.log1p(-gate) + stats.poisson.logpmf(y, np.exp(f))
    return np.where(y == 0, np.logaddexp(np.log(gate), counted), counted)


def _negative_binomial(y, f, c):
    return stats.nbinom.logpmf(y, c, c / (c + np.exp(f)))


_noisy = TRUTH + 0.3 * RNG.randn(N)
_rate = np.exp(0.7 * TRUTH)
_mean = special.expit(TRUTH)

ZOO = {
    "gaussian": Case(
        lambda f, p: dist.Normal(f, p),
        _noisy,
        lambda y, f, p: stats.norm.logpdf(y, f, p),
        0.5,
    ),
    "bernoulli-logit": Case(
        lambda f, p: dist.Bernoulli(logits=f),
        (RNG.rand(N) < special.expit(2 * TRUTH)).astype(int),
        lambda y, f, p: stats.bernoulli.logpmf(y, special.expit(f)),
    ),
    "bernoulli-probit": Case(
        lambda f, p: dist.Bernoulli(probs=probit(f)),
        (RNG.rand(N) < stats.norm.cdf(TRUTH)).astype(int),
        lambda y, f, p: stats.bernoulli.logpmf(y, SQUEEZE + (1 - 2 * SQUEEZE) * stats.norm.cdf(f)),
    ),
    "poisson": Case(
        lambda f, p: dist.Poisson(jnp.exp(f)),
        RNG.poisson(_rate),
        lambda y, f, p: stats.poisson.logpmf(y, np.exp(f)),
    ),
    "negative-binomial": Case(
        lambda f, p: dist.NegativeBinomial2(jnp.exp(f), p),
        RNG.negative_binomial(3, 3 / (3 + _rate)),
        _negative_binomial,
        2.0,
    ),
    "student-t": Case(
        lambda f, p: dist.StudentT(4.0, f, p),
        TRUTH + 0.3 * RNG.standard_t(4, N),
        lambda y, f, p: stats.t.logpdf(y, 4.0, f, p),
        0.5,
    ),
    "beta": Case(
        lambda f, p: dist.Beta(p * jax.nn.sigmoid(f), p * jax.nn.sigmoid(-f)),
        RNG.beta(6 * _mean, 6 * (1 - _mean)),
        lambda y, f, p: stats.beta.logpdf(y, p * special.expit(f), p * special.expit(-f)),
        4.0,
    ),
    "gamma": Case(
        lambda f, p: dist.Gamma(p, p * jnp.exp(-f)),
        RNG.gamma(2.0, _rate / 2.0),
        lambda y, f, p: stats.gamma.logpdf(y, p, scale=np.exp(f) / p),
        1.5,
    ),
    "ordinal": Case(
        lambda f, p: dist.OrderedLogistic(f, p),
        np.digitize(_noisy, [-0.8, 0.6]),
        _ordinal,
        np.array([-1.0, 1.0]),
        constraints.ordered_vector,
    ),
    "zero-inflated-poisson": Case(
        lambda f, p: dist.ZeroInflatedPoisson(p, rate=jnp.exp(f)),
        RNG.poisson(_rate) * (RNG.rand(N) < 0.8),
        _zero_inflated,
        0.3,
        constraints.unit_interval,
    ),
    "a user's own": Case(
        lambda f, p: Tobit(f, p),
        np.maximum(_noisy, 0.0),
        lambda y, f, p: np.where(y > 0, stats.norm.logpdf(y, f, p), stats.norm.logcdf(-f / p)),
        0.5,
    ),
}


FAST = ["a user's own"]


@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=() if k in FAST else pytest.mark.slow) for k in ZOO]
)
def test_likelihoods(name):
    """A few EM steps lower the loss, and the loss is what NumPy says it is."""
    case = ZOO[name]

    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        lengthscale = positive("lengthscale", 0.25)
        p = None
        if case.start is not None:
            p = numpyro.param("p", case.start, constraint=case.constraint)
        f = numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", case.distribution(f, p), obs=y)

    guide, params, losses = Fitter(model)(X, case.data)
    assert improved(losses)
    loss = losses[-1]
    lengthscale, variance = params["lengthscale"], params["variance_auto_loc"]
    q = dense.posterior(
        lambda A, B: dense.rbf(A, B, lengthscale, variance),
        params["f_auto_inducing"],
        X,
        guide.dual_parameters(params, X, case.data)["f"],
    )
    # Two ways to the same numbers: what is left is rounding times the condition of K (1e5).
    marginals = guide.marginals(params, X, case.data)["f"]
    np.testing.assert_allclose(marginals.mean, q.mean, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(marginals.variance, q.variance, rtol=1e-7, atol=1e-8)

    def log_prob(f):
        return case.log_prob(case.data, f, np.asarray(params["p"]) if "p" in params else None)

    log_prior = stats.lognorm.logpdf(variance, 1.0)
    same_rule = dense.gauss_hermite(log_prob, q.mean, q.variance) - q.kl + log_prior
    assert loss == pytest.approx(-same_rule, abs=1e-9)
    exact = dense.integral(log_prob, q.mean, q.variance) - q.kl + log_prior
    # Twenty nodes are exact to 1e-9 nats at posteriors like these, far from any kink.
    assert loss == pytest.approx(-exact, abs=1e-7)


@pytest.mark.slow
def test_softmax_of_three_latent_functions_that_share_a_kernel():
    """Three coupled latent functions: a joint rule, one plate, one kernel."""
    scores = np.stack([TRUTH, -TRUTH, np.zeros(N)])
    y = (scores + RNG.gumbel(size=scores.shape)).argmax(0)

    def model(X, y=None):
        lengthscale = positive("lengthscale", 0.25)
        with numpyro.plate("classes", 3):
            f = numpyro.sample("f", GP(kernels.RBF(lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

    guide, params, losses = Fitter(model)(X, y)
    assert improved(losses)
    assert params["f_auto_linear"].shape == (3, M)
    assert params["f_auto_inverse"].shape == (1, M, M)  # one prior for all three
    linear, quadratic = guide.dual_parameters(params, X, y)["f"]
    kernel = _rbf(params["lengthscale"])
    qs = [
        dense.posterior(kernel, params["f_auto_inducing"], X, dual)
        for dual in zip(linear, quadratic, strict=True)
    ]
    marginals = guide.marginals(params, X, y)["f"]
    np.testing.assert_allclose(marginals.mean, [q.mean for q in qs], atol=1e-8)
    # Over all of space: the trapezoidal rule on a cube of 12 standard deviations, which for a
    # Gaussian times a smooth function converges faster than any power of the step (0.3).
    z = np.linspace(-6, 6, 41)
    w = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    grid = np.stack(np.meshgrid(z, z, z, indexing="ij")).reshape(3, -1)
    weights = np.einsum("i,j,k->ijk", w, w, w).ravel()
    expected = 0.0
    for i in range(N):
        f = np.stack(
            [q.mean[i] + np.sqrt(q.variance[i]) * g for q, g in zip(qs, grid, strict=True)]
        )
        expected += weights @ (f[y[i]] - special.logsumexp(f, axis=0))
    # The default rule for three latent functions has 10 nodes in each dimension.
    assert losses[-1] == pytest.approx(sum(q.kl for q in qs) - expected, abs=1e-5)


# ---- several latent functions: expectations in closed form -----------------------------------


def _rbf(lengthscale=1.0, variance=1.0):
    return lambda A, B: dense.rbf(A, B, lengthscale, variance)


def _posteriors(fitted: Fit, args, kernels_of: dict[str, Callable], inputs=None):
    """Dense posteriors of GP sites that have one latent function each."""
    duals = fitted.guide.dual_parameters(fitted.params, *args)
    return {
        name: dense.posterior(
            kernel,
            fitted.params[f"{name}_auto_inducing"],
            X if inputs is None else inputs[name],
            duals[name],
        )
        for name, kernel in kernels_of.items()
    }


@pytest.mark.slow
def test_batched_kernel_gives_each_latent_function_its_own_hyperparameters():
    Y = np.stack([TRUTH, np.sin(20 * X), X]) + 0.2 * RNG.randn(3, N)

    def model(X, Y=None):
        lengthscale = positive("lengthscale", jnp.array([0.3, 0.1, 0.5]))
        with numpyro.plate("functions", 3):
            variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
            f = numpyro.sample("f", GP(kernels.RBF(lengthscale[:, None], variance), X))
        with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=Y)

    guide, params, losses = Fitter(model)(X, Y)
    assert improved(losses)
    assert params["f_auto_inverse"].shape == (3, M, M)
    linear, quadratic = guide.dual_parameters(params, X, Y)["f"]
    bound = 0.0
    for p in range(3):
        variance = params["variance_auto_loc"][p]
        kernel = _rbf(params["lengthscale"][p], variance)
        q = dense.posterior(kernel, params["f_auto_inducing"], X, (linear[p], quadratic[p]))
        bound += dense.normal_expectation(Y[p], q.mean, q.variance, 0.3) - q.kl
        bound += stats.lognorm.logpdf(variance, 1.0)
    assert losses[-1] == pytest.approx(-bound, abs=1e-8)


@pytest.mark.slow
def test_plates_may_leave_axes_of_size_one():
    """Nested plates give the GP the batch shape (3, 1): the shape of its values everywhere."""
    scales = np.array([0.3, 0.1, 0.5])

    def model(X, Y=None):
        with numpyro.plate("outputs", 3, dim=-2):
            f = numpyro.sample("f", GP(kernels.RBF(scales[:, None, None], scales[:, None]), X))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", dist.Normal(f[:, 0], 0.3), obs=Y)

    guide = AutoDualGaussian(model, inducing=Z)
    svi = TSVGP(model, guide, None)
    state = svi.init(jax.random.key(0), X, np.tile(_noisy, (3, 1)))
    q = guide.marginals(svi.get_params(state), X)["f"]
    # Before the first step the posterior is the prior.
    np.testing.assert_allclose(q.variance, np.broadcast_to(scales[:, None, None], (3, 1, N)))
    assert q.mean.shape == (3, 1, N)


@pytest.mark.slow
def test_mean_and_log_scale_of_a_normal(mcycle):
    """Two GP sites that meet in each term, on data whose noise changes with time."""
    rows = np.linspace(0, len(mcycle.y) - 1, N).astype(int)
    t, a = mcycle.X[rows, 0] / 60.0, mcycle.y[rows] / 50.0
    Z = np.linspace(t.min(), t.max(), 11)

    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.15), X))
        g = numpyro.sample("g", GP(kernels.RBF(0.2, positive("variance", 1.0)), X, mean=-1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)

    fitted = Fitter(model, inducing={"f": Z, "g": Z[::2]})(t, a, steps=30)
    assert improved(fitted.losses)
    params = fitted.params
    assert params["f_auto_inducing"].shape == (11,) and params["g_auto_inducing"].shape == (6,)
    q = _posteriors(
        fitted,
        (t, a),
        {"f": _rbf(0.15), "g": _rbf(0.2, params["variance"])},
        {"f": t, "g": t},
    )
    f, g = q["f"], q["g"]._replace(mean=q["g"].mean - 1.0)
    precision = np.exp(-2 * g.mean + 2 * g.variance)
    expected = (
        -0.5 * np.log(2 * np.pi) - g.mean - 0.5 * precision * ((a - f.mean) ** 2 + f.variance)
    )
    # E[exp(-2g)] by 20 nodes is exact to rounding for variances below one.
    assert fitted.losses[-1] == pytest.approx(f.kl + g.kl - expected.sum(), abs=1e-8)
    # The noise is small before the impact (15 ms) and large after it.
    g = fitted.guide.marginals(params, np.array([5.0, 35.0]) / 60.0)["g"].mean
    assert g[1] > g[0] + 1.0


@pytest.mark.slow
def test_linear_mixture_of_latent_functions():
    """Three outputs mix two latent functions, `W @ f`, with W learned."""
    W0 = np.array([[1.0, 0.2], [0.5, -1.0], [-0.3, 0.8]])
    Y = W0 @ np.stack([TRUTH, np.cos(9 * X)]) + 0.2 * RNG.randn(3, N)

    def model(X, Y=None):
        W = numpyro.param("W", jnp.asarray(W0))
        with numpyro.plate("latents", 2):
            f = numpyro.sample("f", GP(kernels.RBF(0.2), X))
        with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
            numpyro.sample("y", dist.Normal(W @ f, 0.2), obs=Y)

    guide, params, losses = Fitter(model)(X, Y)
    assert improved(losses)
    W = np.asarray(params["W"])
    assert np.abs(W - W0).max() > 0.01
    linear, quadratic = guide.dual_parameters(params, X, Y)["f"]
    qs = [
        dense.posterior(_rbf(0.2), params["f_auto_inducing"], X, dual)
        for dual in zip(linear, quadratic, strict=True)
    ]
    mean, variance = W @ [q.mean for q in qs], W**2 @ [q.variance for q in qs]
    bound = dense.normal_expectation(Y, mean, variance, 0.2) - sum(q.kl for q in qs)
    assert losses[-1] == pytest.approx(-bound, abs=1e-8)


@pytest.mark.slow
def test_additive_functions():
    """Two GPs of different inputs that add up, one of them with a kernel of tinygp."""
    from tinygp import kernels as tiny

    X2 = RNG.rand(N, 2)
    y = np.sin(7 * X2[:, 0]) + X2[:, 1] ** 2 + 0.1 * RNG.randn(N)

    def model(X, y=None):
        noise = positive("noise", 0.2)
        f = numpyro.sample("f", GP(tiny.ExpSquared(positive("lengthscale", 0.3)), X[:, 0]))
        g = numpyro.sample("g", GP(kernels.RBF(0.5, active_dims=1), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + g, noise), obs=y)

    fitted = Fitter(model, inducing={"f": Z, "g": X2[:M]})(X2, y)
    assert improved(fitted.losses)
    params = fitted.params
    inputs = {"f": X2[:, 0], "g": X2}
    second = lambda A, B: dense.rbf(np.asarray(A)[:, 1], np.asarray(B)[:, 1], 0.5)  # noqa: E731
    q = _posteriors(fitted, (X2, y), {"f": _rbf(params["lengthscale"]), "g": second}, inputs)
    mean = q["f"].mean + q["g"].mean
    variance = q["f"].variance + q["g"].variance
    bound = dense.normal_expectation(y, mean, variance, params["noise"]) - q["f"].kl - q["g"].kl
    assert fitted.losses[-1] == pytest.approx(-bound, abs=1e-8)


@pytest.mark.slow
def test_two_data_sets_of_different_length_and_kind():
    """GPs at different inputs and of different n, observed by different plates.

    The second is observed by `numpyro.factor`, which is as good a likelihood as any.
    """
    inputs = {"f": X, "g": np.linspace(-1.0, 1.0, N // 2)}
    counts = RNG.poisson(np.exp(inputs["g"]))

    def model(Xf, Xg, y=None, counts=None):
        lengthscale = positive("lengthscale", 0.3)  # what the two have in common
        f = numpyro.sample("f", GP(kernels.RBF(lengthscale), Xf))
        g = numpyro.sample("g", GP(kernels.RBF(lengthscale, 0.5), Xg))
        with numpyro.plate("first", Xf.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
        if counts is not None:
            with numpyro.plate("second", Xg.shape[0]):
                numpyro.factor("counts", dist.Poisson(jnp.exp(g)).log_prob(counts))

    args = (inputs["f"], inputs["g"])
    fitted = Fitter(model, inducing={"f": Z, "g": 2 * Z - 1})(*args, _noisy, counts)
    assert improved(fitted.losses)
    scale = fitted.params["lengthscale"]
    q = _posteriors(
        fitted, (*args, _noisy, counts), {"f": _rbf(scale), "g": _rbf(scale, 0.5)}, inputs
    )
    f, g = q["f"], q["g"]
    poisson = counts * g.mean - np.exp(g.mean + g.variance / 2) - special.gammaln(counts + 1)
    bound = dense.normal_expectation(_noisy, f.mean, f.variance, 0.3) + poisson.sum() - f.kl - g.kl
    assert fitted.losses[-1] == pytest.approx(-bound, abs=1e-8)


# ---- handlers and the other words of NumPyro: each means what it says ------------------------

COUNTS = np.asarray(ZOO["poisson"].data)
HALF = N // 2
SEEN = np.sort(RNG.permutation(N)[:HALF])
IS_SEEN = np.isin(np.arange(N), SEEN)


def poisson_model(X, y=None, weights=1.0, mask=True, penalty=0.0):
    """One model with a switch for every word, so that one compilation serves them all."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = positive("lengthscale", 0.25)
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X))
    numpyro.factor("penalty", -penalty * (lengthscale - 0.4) ** 2)
    with (
        numpyro.plate("data", X.shape[0]),
        handlers.scale(scale=weights),
        handlers.mask(mask=mask),
    ):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@cache
def poisson_fitter() -> Fitter:
    return Fitter(poisson_model)


def poisson_fit(X, y, weights=None, mask=None, penalty=0.0, **kwargs) -> Fit:
    weights = np.ones(len(X)) if weights is None else weights
    mask = np.ones(len(X), bool) if mask is None else mask
    return poisson_fitter()(X, y, weights, mask, penalty, steps=3, **kwargs)


@cache
def reference() -> Fit:
    return poisson_fit(X, COUNTS)


@cache
def reference_of_seen() -> Fit:
    return poisson_fit(X[SEEN], COUNTS[SEEN])


def assert_same_fit(a: Fit, b: Fit, but: str = "") -> None:
    """Three EM steps on two ways to write one model: the same up to the order of sums."""
    np.testing.assert_allclose(a.losses, b.losses, rtol=1e-10)
    assert set(a.params) == set(b.params)
    for name in set(a.params) - {but}:
        np.testing.assert_allclose(a.params[name], b.params[name], rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_reference_tells_data_apart():
    """The comparisons below are not vacuous: dropping points does change the fit."""
    assert abs(reference().losses[-1] - reference_of_seen().losses[-1]) > 1.0


@pytest.mark.slow
def test_a_masked_point_is_a_deleted_point():
    y = np.where(IS_SEEN, COUNTS, 10_000)
    assert_same_fit(poisson_fit(X, y, mask=IS_SEEN), reference_of_seen())


@pytest.mark.slow
def test_an_unobserved_point_is_a_deleted_point():
    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", GP(kernels.RBF(positive("lengthscale", 0.25), variance), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y, obs_mask=IS_SEEN)

    y = np.where(IS_SEEN, COUNTS, 10_000)
    fitted = Fitter(model)(X, y, steps=3)
    assert_same_fit(fitted, reference_of_seen())
    # Predictive imputes what was not observed and returns what was.
    draws = Predictive(model, guide=fitted.guide, params=fitted.params, num_samples=50)(
        jax.random.key(0), X, y
    )
    imputed = np.asarray(draws["y"])
    assert (imputed[:, SEEN] == COUNTS[SEEN]).all()
    assert (imputed[:, ~IS_SEEN] < 10_000).all() and imputed[:, ~IS_SEEN].std() > 0


@pytest.mark.slow
def test_weights_count_points_several_times():
    """A weight of three is the same point three times."""
    rows = np.arange(HALF)
    weights = np.where(rows % 2 == 0, 3, 1)
    repeated = np.repeat(rows, weights)
    assert len(repeated) == N  # no other shape to compile
    left = poisson_fit(X[:HALF], COUNTS[:HALF], weights=weights.astype(float))
    assert_same_fit(left, poisson_fit(X[repeated], COUNTS[repeated]))


def test_a_factor_shifts_the_loss_by_its_value():
    fitted, plain = poisson_fit(X, COUNTS, penalty=50.0), reference()
    # At the first step the hyperparameters are still the same, and E-steps do not see a factor.
    assert fitted.losses[0] - plain.losses[0] == pytest.approx(50.0 * 0.15**2, rel=1e-9)
    # The optimizer does: the penalty pulls the lengthscale up.
    assert fitted.params["lengthscale"] > plain.params["lengthscale"] + 1e-3


@pytest.mark.slow
def test_deterministic_sites_and_scope():
    """A scope renames all sites and parameters; deterministic sites are predicted."""

    @handlers.scope(prefix="left")
    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        numpyro.deterministic("deviation", jnp.sqrt(variance))
        f = numpyro.sample("f", GP(kernels.RBF(positive("lengthscale", 0.25), variance), X))
        rate = numpyro.deterministic("rate", jnp.exp(f))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    guide, params, losses = Fitter(model)(X, COUNTS, steps=3)
    assert set(params) == {f"left/{name}" for name in reference().params}
    unscoped = {name.removeprefix("left/"): value for name, value in params.items()}
    assert_same_fit(Fit(guide, unscoped, losses), reference())
    marginals = guide.marginals(params, X)["left/f"]
    expected = reference().guide.marginals(reference().params, X)["f"]
    np.testing.assert_allclose(marginals.mean, expected.mean, rtol=1e-8)
    sites = ["f", "rate", "deviation", "y"]
    draws = Predictive(
        model,
        guide=guide,
        params=params,
        num_samples=4,
        return_sites=[f"left/{name}" for name in sites],
    )(jax.random.key(0), X)
    f, rate, deviation, y = (draws[f"left/{name}"] for name in sites)
    assert y.shape == (4, N)
    np.testing.assert_allclose(rate, np.exp(f))
    np.testing.assert_allclose(deviation**2, params["left/variance_auto_loc"])


@pytest.mark.slow
def test_scopes_put_one_model_into_another_twice():
    halves = {"left": slice(0, HALF), "right": slice(HALF, N)}

    def model(X, y=None):
        for side, rows in halves.items():
            with handlers.scope(prefix=side):
                poisson_model(X[rows], None if y is None else y[rows])

    # AutoDelta starts at the median of a few draws from the prior; start all at one.
    start = {"variance_auto_loc": 1.0}
    fitted = Fitter(model, inducing={"left/f": Z, "right/f": Z})(
        X,
        COUNTS,
        steps=3,
        init_params={f"{side}/{k}": v for side in halves for k, v in start.items()},
    )
    left, right = (poisson_fit(X[r], COUNTS[r], init_params=start) for r in halves.values())
    # The two halves share nothing, so the loss is the sum of theirs.
    np.testing.assert_allclose(fitted.losses, left.losses + right.losses, rtol=1e-10)
    for side, part in (("left", left), ("right", right)):
        for name, value in part.params.items():
            found = fitted.params[f"{side}/{name}"]
            np.testing.assert_allclose(found, value, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_mean_function():
    """The mean is where the data are seen from, at the inputs of the fit and at others."""

    steep, flat = jnp.array(2.0), jnp.array(0.0)

    def model(X, y=None, slope=steep):
        mean = lambda x: slope * x  # noqa: E731
        f = numpyro.sample("f", GP(kernels.RBF(positive("lengthscale", 0.25)), X, mean))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    fitter = Fitter(model)
    centred = fitter(X, _noisy, flat, steps=3)
    sloped = fitter(X, _noisy + 2.0 * X, steep, steps=3)
    assert_same_fit(sloped, centred, but="f_auto_prior_mean")
    at = X + 0.01
    np.testing.assert_allclose(
        sloped.guide.marginals(sloped.params, at)["f"].mean,
        centred.guide.marginals(centred.params, at, slope=flat)["f"].mean + 2.0 * at,
        atol=1e-8,
    )
    np.testing.assert_allclose(GP(kernels.RBF(), X, 2.0 * X).mean, 2.0 * X)
    np.testing.assert_allclose(GP(kernels.RBF(), X, 5.0).mean, np.full(N, 5.0))


# ---- the same model elsewhere ----------------------------------------------------------------


@pytest.mark.slow
def test_the_rest_of_numpyro_sees_an_ordinary_distribution():
    """Prior Predictive draws from the model; MCMC and autoguides see its joint density."""
    prior = Predictive(poisson_model, num_samples=4, params={"lengthscale": 0.25})(
        jax.random.key(0), X
    )
    assert prior["f"].shape == prior["y"].shape == (4, N)
    values = {"f": TRUTH, "variance": 1.3, "lengthscale": 0.05}

    @jax.jit
    @jax.value_and_grad
    def density(values):
        return log_density(poisson_model, (X, COUNTS), {}, values)[0]

    value, gradient = density(values)
    K = dense.rbf(X, X, 0.05, 1.3) + 1.3 * dense.JITTER * np.eye(N)
    expected = (
        stats.lognorm.logpdf(1.3, 1.0)
        + stats.multivariate_normal.logpdf(TRUTH, np.zeros(N), K)
        + stats.poisson.logpmf(COUNTS, np.exp(TRUTH)).sum()
    )
    assert value == pytest.approx(expected, rel=1e-8)
    score = COUNTS - np.exp(TRUTH) - np.linalg.solve(K, TRUTH)
    # Forty inputs at a lengthscale of 0.05: the condition number of K is 1e8.
    np.testing.assert_allclose(gradient["f"], score, rtol=1e-5, atol=1e-5 * np.abs(score).max())
