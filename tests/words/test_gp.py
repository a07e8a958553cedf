"""The GP distribution: density, draws, shapes, transformations, and life outside of t-SVGP."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.handlers as handlers
import optax
import pytest
import tinygp
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from scipy.stats import multivariate_normal

from numpyro_tsvgp import GP, kernels
from numpyro_tsvgp.distributions import find_gp
from numpyro_tsvgp.gaussian.inducing_values import InducingJoint
from numpyro_tsvgp.infer.guides.joint import GPPosterior

N = 6
X = np.linspace(0.0, 1.0, N)
X2 = np.random.default_rng(0).uniform(size=(N, 2))
VALUE = np.sin(5 * X)
JITTER = 1e-6


def dense(lengthscale=0.4, variance=1.3, X=X):
    """The squared exponential with its jitter, in NumPy."""
    X = X.reshape(len(X), -1)
    distance = ((X[:, None, :] - X[None, :, :]) ** 2).sum(-1) / lengthscale**2
    return variance * (np.exp(-0.5 * distance) + JITTER * np.eye(len(X)))


def rbf(X1, X2):
    return 1.3 * jnp.exp(-0.5 * (X1[:, None] - X2[None, :]) ** 2 / 0.4**2)


def gp(mean=None, kernel=None, X=X):
    kernel = kernels.RBF(0.4, 1.3) if kernel is None else kernel
    return GP(kernel, X, mean=mean, jitter=JITTER)


# ---- density ---------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [X, X[:, None], X2], ids=["(n,)", "(n, 1)", "(n, 2)"])
def test_log_prob_is_that_of_a_multivariate_normal(inputs):
    q = gp(X=inputs)
    assert q.batch_shape == () and q.event_shape == (N,)
    expected = multivariate_normal(np.zeros(N), dense(X=inputs)).logpdf(VALUE)
    np.testing.assert_allclose(q.log_prob(VALUE), expected, rtol=1e-8)
    np.testing.assert_allclose(q.covariance_matrix, dense(X=inputs), rtol=1e-12)
    np.testing.assert_allclose(q.variance, np.full(N, 1.3))
    # Several values at once, as vectorized chains ask for.
    values = np.stack([VALUE, 2 * VALUE])
    expected = multivariate_normal(np.zeros(N), dense(X=inputs)).logpdf(values)
    np.testing.assert_allclose(q.log_prob(values), expected, rtol=1e-8)


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        (None, np.zeros(N)),
        (2, np.full(N, 2.0)),
        (-0.5, np.full(N, -0.5)),
        (np.arange(N), np.arange(N) * 1.0),
        (lambda x: 3.0 * x**2, 3.0 * X**2),
    ],
    ids=["None", "integer", "number", "array", "callable"],
)
def test_mean(mean, expected):
    q = gp(mean)
    assert q.mean.shape == (N,) and q.mean.dtype == jnp.float64
    np.testing.assert_allclose(q.mean, expected)
    log_prob = multivariate_normal(expected, dense()).logpdf(VALUE)
    np.testing.assert_allclose(q.log_prob(VALUE), log_prob, rtol=1e-8)


@pytest.mark.parametrize(
    "kernel",
    [rbf, 1.3 * tinygp.kernels.ExpSquared(0.4), 1.3 * kernels.as_kernel(rbf) * (1 / 1.3)],
    ids=["callable", "tinygp", "composed"],
)
def test_foreign_kernels(kernel):
    q = gp(kernel=kernel)
    expected = multivariate_normal(np.zeros(N), dense()).logpdf(VALUE)
    np.testing.assert_allclose(q.log_prob(VALUE), expected, rtol=1e-8)
    np.testing.assert_allclose(q.variance, np.full(N, 1.3), rtol=1e-12)
    assert q.sample(jax.random.key(0), (2,)).shape == (2, N)


def test_gradient_of_log_prob_in_every_argument():
    """Against the matrix formula 1/2 tr((a a^T - K^-1) dK) with a = K^-1 (f - mean)."""

    def log_prob(lengthscale, variance, mean, value):
        return GP(kernels.RBF(lengthscale, variance), X, mean=mean, jitter=JITTER).log_prob(value)

    g = jax.jit(jax.grad(log_prob, argnums=(0, 1, 2, 3)))(0.4, 1.3, 0.5, VALUE)
    K = dense()
    inverse = np.linalg.inv(K)
    a = inverse @ (VALUE - 0.5)
    step = 1e-5
    d_length = (dense(lengthscale=0.4 + step) - dense(lengthscale=0.4 - step)) / (2 * step)
    for ours, dK in ((g[0], d_length), (g[1], K / 1.3)):
        np.testing.assert_allclose(ours, 0.5 * np.trace((np.outer(a, a) - inverse) @ dK), rtol=1e-5)
    np.testing.assert_allclose(g[2], a.sum(), rtol=1e-6)
    np.testing.assert_allclose(g[3], -a, rtol=1e-6)


# ---- draws -----------------------------------------------------------------------------------


def test_sample_moments():
    q = gp(mean=lambda x: 2 * x)
    draws = np.asarray(q.sample(jax.random.key(0), (20_000,)))
    # Four Monte Carlo errors: 1.14 / sqrt(20000) for means, 1.3 sqrt(2 / 20000) for covariances.
    np.testing.assert_allclose(draws.mean(0), 2 * X, atol=4 * 0.0081)
    np.testing.assert_allclose(np.cov(draws.T), dense(), atol=4 * 0.013)


def test_posterior_distribution_has_the_density_and_moments_of_its_factors():
    rng = np.random.default_rng(1)
    m, n = 3, 4
    loc, w = rng.standard_normal((2, n)), rng.standard_normal((n, m))
    inverse = np.tril(rng.standard_normal((2, m, m)))
    chol = np.tril(rng.uniform(0.3, 0.6, (n, n)))
    factors = (loc, w[None], inverse, chol[None])
    q = GPPosterior(InducingJoint(*(jnp.asarray(v) for v in factors)), (2,))
    assert q.batch_shape == (2,) and q.event_shape == (n,)
    value, draws = rng.standard_normal((2, n)), q.sample(jax.random.key(0), (20_000,))
    assert draws.shape == (20_000, 2, n)
    log_prob = q.log_prob(value)
    for p in range(2):
        A = w @ inverse[p].T
        covariance = A @ A.T + chol @ chol.T
        expected = multivariate_normal(loc[p], covariance)
        np.testing.assert_allclose(log_prob[p], expected.logpdf(value[p]), rtol=1e-8)
        np.testing.assert_allclose(q.variance[p], np.diag(covariance), rtol=1e-10)
        spread = np.sqrt(np.diag(covariance).max())
        # Four Monte Carlo errors of the largest entry.
        np.testing.assert_allclose(draws[:, p].mean(0), loc[p], atol=4 * spread / 141)
        np.testing.assert_allclose(np.cov(draws[:, p].T), covariance, atol=4 * spread**2 / 100)


# ---- batches ---------------------------------------------------------------------------------


def test_plates_expand_one_shared_prior():
    def model():
        with numpyro.plate("outer", 2, dim=-2), numpyro.plate("inner", 3):
            return numpyro.sample("f", gp(mean=1.0))

    trace = handlers.trace(handlers.seed(model, 0)).get_trace()
    f, fn = trace["f"]["value"], trace["f"]["fn"]
    assert f.shape == (2, 3, N) and fn.batch_shape == (2, 3)
    assert find_gp(fn).batch_shape == ()
    log_prob = multivariate_normal(np.ones(N), dense()).logpdf(f)
    np.testing.assert_allclose(fn.log_prob(f), log_prob, rtol=1e-7)
    assert np.abs(f[0, 0] - f[1, 2]).max() > 0.1  # draws differ


def test_a_batch_of_kernels_makes_a_batch_of_gps():
    scales, variances = np.array([0.2, 0.4, 0.9]), np.array([0.5, 1.3, 2.0])
    mean = np.arange(3.0)[:, None]
    q = gp(mean, kernels.RBF(scales[:, None], variances))
    assert q.batch_shape == (3,) and q.mean.shape == (3, N)
    f = q.sample(jax.random.key(0), (2,))
    assert f.shape == (2, 3, N)
    log_prob = q.log_prob(f)
    for p in range(3):
        normal = multivariate_normal(np.full(N, mean[p, 0]), dense(scales[p], variances[p]))
        np.testing.assert_allclose(log_prob[:, p], normal.logpdf(f[:, p]), rtol=1e-6)
        np.testing.assert_allclose(q.variance[p], np.full(N, variances[p]))

    def model():
        with numpyro.plate("latents", 3):
            return numpyro.sample("f", q)

    assert handlers.seed(model, 0)().shape == (3, N)


def test_a_mean_of_several_rows_makes_a_batch():
    mean = np.stack([X, -X])
    q = gp(mean)
    assert q.batch_shape == (2,)
    expected = [multivariate_normal(m, dense()).logpdf(VALUE) for m in mean]
    np.testing.assert_allclose(q.log_prob(VALUE), expected, rtol=1e-8)


# ---- transformations -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel",
    [kernels.RBF(0.4, 1.3), rbf, 1.3 * tinygp.kernels.ExpSquared(0.4)],
    ids=["ours", "callable", "tinygp"],
)
def test_jit_vmap_and_pytree_round_trip(kernel):
    q = gp(lambda x: x, kernel)
    leaves, tree = jax.tree.flatten(q)
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again, GP)
    assert (again.batch_shape, again.event_shape) == (q.batch_shape, q.event_shape)
    expected = multivariate_normal(X, dense()).logpdf(VALUE)
    np.testing.assert_allclose(again.log_prob(VALUE), expected, rtol=1e-8)
    through_jit = jax.jit(lambda q: q)(q)  # every array field must survive
    np.testing.assert_allclose(through_jit.log_prob(VALUE), expected, rtol=1e-8)

    @jax.jit
    def both(q, values):
        return jax.vmap(q.log_prob)(values), q.sample(jax.random.key(0))

    log_probs, draw = both(q, np.stack([VALUE, VALUE]))
    np.testing.assert_allclose(log_probs, [expected, expected], rtol=1e-8)
    np.testing.assert_allclose(draw, q.sample(jax.random.key(0)), atol=1e-9)


def test_vmap_over_hyperparameters_and_over_distributions():
    scales = jnp.array([0.2, 0.4, 0.9])
    expected = [multivariate_normal(np.zeros(N), dense(s)).logpdf(VALUE) for s in scales]
    ours = jax.vmap(lambda s: gp(kernel=kernels.RBF(s, 1.3)).log_prob(VALUE))(scales)
    np.testing.assert_allclose(ours, expected, rtol=1e-7)
    stacked = jax.vmap(lambda s: gp(kernel=kernels.RBF(s, 1.3)))(scales)
    ours = jax.vmap(lambda q: q.log_prob(VALUE))(stacked)
    np.testing.assert_allclose(ours, expected, rtol=1e-7)


def test_nothing_is_computed_before_it_is_asked_for():
    """A million inputs: the covariance would have 8e12 bytes."""
    q = GP(kernels.RBF(0.1), np.linspace(0, 1, 1_000_000), mean=1.0)
    assert q.event_shape == (1_000_000,)
    assert q.mean.shape == (1_000_000,) and q.variance.shape == (1_000_000,)


@pytest.mark.float32
def test_single_precision():
    @jax.jit
    def draw_and_score(X):
        q = GP(kernels.RBF(1.0, 1.3), X, mean=1)
        f = q.sample(jax.random.key(0))
        return f, q.log_prob(f)

    with jax.enable_x64(False):
        # A hundred inputs within a hundredth of a lengthscale: jitter alone keeps it regular.
        f, log_prob = draw_and_score(np.linspace(0, 0.01, 100))
        assert f.dtype == log_prob.dtype == jnp.float32
        assert np.isfinite(f).all() and np.isfinite(log_prob)


# ---- mistakes --------------------------------------------------------------------------------


def test_messages_name_the_mistake():
    with pytest.raises(ValueError, match=r"mean of the GP has shape \(5,\).*6 rows"):
        gp(mean=np.zeros(5))
    with pytest.raises(ValueError, match=r"\(n, d\) or \(n,\); got \(2, 3, 4\)"):
        gp(X=np.zeros((2, 3, 4)))
    with pytest.raises(ValueError, match="covariance"):
        GP(lambda a, b: jnp.zeros(len(a)), X)
    with pytest.raises(TypeError, match="RBF"):
        GP(kernels.RBF, X)


# ---- the same model under NumPyro's own inference --------------------------------------------


def poisson_model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.5))
    f = numpyro.sample("f", GP(kernels.Matern32(lengthscale), X, mean=0.5))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


COUNTS = np.array([1.0, 4.0, 3.0, 1.0, 0.0, 0.0])


def test_prior_predictive():
    draws = Predictive(poisson_model, num_samples=2000)(jax.random.key(0), X)
    assert draws["f"].shape == (2000, N) and draws["y"].shape == (2000, N)
    # Four Monte Carlo errors. E exp(f) = exp(0.5 + 1/2), and y has a standard deviation of 3.9.
    np.testing.assert_allclose(draws["f"].mean(0), 0.5, atol=4 / np.sqrt(2000))
    np.testing.assert_allclose(draws["y"].mean(0), np.exp(1.0), atol=4 * 3.9 / np.sqrt(2000))


@pytest.mark.slow
def test_nuts():
    mcmc = MCMC(NUTS(poisson_model), num_warmup=100, num_samples=200, progress_bar=False)
    mcmc.run(jax.random.key(0), X, COUNTS)
    f = mcmc.get_samples()["f"]
    assert f.shape == (200, N) and np.isfinite(f).all()
    assert f[:, 1].mean() > f[:, 4].mean() + 0.5  # it has seen the data


@pytest.mark.slow
def test_svi_with_an_autoguide():
    guide = AutoNormal(poisson_model)
    svi = SVI(poisson_model, guide, optax.adam(0.05), Trace_ELBO(num_particles=4))
    result = svi.run(jax.random.key(0), 300, X, COUNTS, progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert result.losses[-50:].mean() < result.losses[:50].mean() - 1
    f = guide.median(result.params)["f"]
    assert f[1] > f[4] + 0.5
