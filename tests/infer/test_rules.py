"""Site rules: what an E-step makes of curvature, by the formulas and on data with outliers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, NaturalGradient, Riemannian, kernels
from numpyro_tsvgp.gaussian import whitened
from numpyro_tsvgp.gaussian.features import Features
from numpyro_tsvgp.gaussian.quadrature import SiteGradients

positive = dist.constraints.positive

RULES = {"clip": NaturalGradient(), "riemannian": Riemannian()}
# Rounding through K^-1, whose condition number is about 1e4 here.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def make(optim, model, inducing, **options):
    guide = AutoDualGaussian(model, inducing=inducing, learn_inducing=False)
    return TSVGP(model, guide, optim, **options)


def student(X, y=None):
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=positive)
    variance = numpyro.param("variance", 1.0, constraint=positive)
    scale = numpyro.param("scale", 0.5, constraint=positive)
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(3.0, f, scale), obs=y)


def heteroscedastic(X, y=None):
    l1 = numpyro.param("l1", 0.5, constraint=positive)
    l2 = numpyro.param("l2", 1.0, constraint=positive)
    v1 = numpyro.param("v1", 1.0, constraint=positive)
    v2 = numpyro.param("v2", 1.0, constraint=positive)
    f = numpyro.sample("f", GP(kernels.RBF(l1, v1), X))
    g = numpyro.sample("g", GP(kernels.RBF(l2, v2), X, mean=-1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


@pytest.fixture(scope="module")
def outliers():
    """A sine with a tenth of gross outliers, a hundred times the noise."""
    rng = np.random.RandomState(0)
    X = np.sort(rng.rand(150) * 6 - 3)
    y = np.sin(2 * X) + 0.1 * rng.randn(150)
    y[rng.choice(150, 15, replace=False)] += 10 * rng.randn(15)
    return X, y


def _both_curvatures(model, X, y, m, steps):
    inducing = np.linspace(X.min(), X.max(), m)
    losses = {}
    for curvature in RULES:
        options = {"site_lr": 0.5, "rule": RULES[curvature], "quadrature": 12}
        svi = make(optax.adam(0.1), model, inducing, **options)
        result = svi.run(jax.random.key(0), steps, X, y, progress_bar=False)
        assert np.isfinite(result.losses).all()
        losses[curvature] = np.asarray(result.losses)
    return losses


@pytest.mark.slow
def test_curvatures_agree_on_outliers(outliers):
    losses = _both_curvatures(student, *outliers, m=15, steps=100)
    # Both settle at 99.24; Adam leaves them within 0.01 of one another.
    assert losses["clip"][-1] == pytest.approx(99.24, abs=0.05)
    assert losses["riemannian"][-1] == pytest.approx(99.24, abs=0.05)
    # They are different rules: the first steps differ by much more than that.
    assert abs(losses["clip"][3] - losses["riemannian"][3]) > 1.0


@pytest.mark.slow
def test_curvatures_agree_on_two_gps(mcycle):
    X, y = mcycle.X[:, 0], mcycle.y
    X, y = (X - X.mean()) / X.std(), (y - y.mean()) / y.std()
    losses = _both_curvatures(heteroscedastic, X, y, m=20, steps=150)
    # Both settle at 76.63; Adam leaves them within 0.01 of one another.
    assert losses["clip"][-1] == pytest.approx(76.63, abs=0.05)
    assert losses["riemannian"][-1] == pytest.approx(76.63, abs=0.05)
    assert abs(losses["clip"][3] - losses["riemannian"][3]) > 1.0


def _student_gradients(y, mean, variance, scale):
    """alpha and beta of Gauss-Hermite quadrature with 20 nodes, differentiated by hand."""
    x, w = np.polynomial.hermite.hermgauss(20)
    x, w = np.sqrt(2.0) * x[:, None], w[:, None] / np.sqrt(np.pi)
    t = (y - mean - np.sqrt(variance) * x) / scale
    slope = 4.0 * t / (3.0 + t**2) / scale  # of the log-density of a Student-t with 3 degrees
    return (w * slope).sum(0), -(w * slope * x).sum(0) / np.sqrt(variance)


@pytest.mark.parametrize("curvature", RULES)
def test_step_of_the_precision(outliers, curvature):
    """One E-step in the original coordinates, from the textbook formulas.

    With P the posterior precision and H = K^-1 + sum_i beta_i a_i a_i^T that which is asked for,
    a natural-gradient step of rate r goes to P + r D, D = H - P, and the mean moves by
    r P_new^-1 times the gradient. The Riemannian step adds r^2/2 D P^-1 D to the precision;
    clipping changes H.
    """
    X, y = outliers
    X, y = X[::5], y[::5] + 2.0 * (np.arange(30) % 4 == 0)  # outliers that are not too far
    inducing, rate = np.linspace(-3, 3, 7), 0.6
    svi = make(None, student, inducing, site_lr=rate, rule=RULES[curvature])
    update = jax.jit(svi.update)
    state = svi.init(jax.random.key(0), X, y)
    for _ in range(2):  # away from the start, where the precision is that of the prior
        state, _ = update(state, X, y)
    after, _ = update(state, X, y)
    duals = [svi.guide.dual_parameters(svi.get_params(s), X, y)["f"] for s in (state, after)]
    (xi, gram), (new_xi, new_gram) = jax.tree.map(np.asarray, duals)

    def rbf(A, B):
        return np.exp(-0.5 * (A[:, None] - B[None, :]) ** 2)

    K = rbf(inducing, inducing) + 1e-8 * np.eye(7)
    K_inv = np.linalg.inv(K)
    a = K_inv @ rbf(inducing, X)
    P = K_inv + gram
    S = np.linalg.inv(P)
    m = S @ xi
    mean, variance = a.T @ m, 1.0 - (a * (K @ a)).sum(0) + (a * (S @ a)).sum(0)
    alpha, beta = _student_gradients(y, mean, variance, 0.5)
    assert (beta < -0.1).any() and (beta > 0.1).any()  # or there would be nothing to choose
    if curvature == "clip":
        beta = np.maximum(beta, 0.0)
        asked = a @ (alpha + beta * mean)
        np.testing.assert_allclose(new_gram, (1 - rate) * gram + rate * (a * beta) @ a.T, **CLOSE)
        np.testing.assert_allclose(new_xi, (1 - rate) * xi + rate * asked, **CLOSE)
    else:
        D = K_inv + (a * beta) @ a.T - P
        new_P = P + rate * D + 0.5 * rate**2 * D @ S @ D
        new_m = m + rate * np.linalg.solve(new_P, a @ alpha - K_inv @ m)
        np.testing.assert_allclose(K_inv + new_gram, new_P, **CLOSE)
        np.testing.assert_allclose(np.linalg.solve(K_inv + new_gram, new_xi), new_m, **CLOSE)


def test_riemannian_precision_is_positive_by_construction():
    """B_new = B/2 + (B + rD) B^-1 (B + rD) / 2, so its eigenvalues are at least half of B's."""
    rng = np.random.RandomState(0)
    m, n = 5, 12
    plain_step_fails = 0

    @jax.jit
    def step(sums, gradients, features, rate):
        return sums.riemannian(gradients, whitened.posterior(sums), features, rate)

    for rate in (0.1, 0.5, 1.0):
        for _ in range(10):
            root = rng.randn(m, m)
            B = 0.05 * np.eye(m) + root @ root.T
            w, beta = rng.randn(1, n, m), 20.0 * rng.randn(1, n)
            sums = whitened.Sums(jnp.asarray(rng.randn(1, m)), jnp.asarray(B[None] - np.eye(m)))
            gradients = SiteGradients(jnp.zeros((1, n)), jnp.asarray(beta))
            features = Features(jnp.asarray(w), *jnp.zeros((2, 1, n)))
            new = step(sums, gradients, features, rate)
            eigenvalues = np.linalg.eigvalsh(np.eye(m) + np.asarray(new.gram[0]))
            assert eigenvalues.min() >= 0.5 * np.linalg.eigvalsh(B).min() * (1 - 1e-6)
            D = np.eye(m) + (w[0].T * beta[0]) @ w[0] - B
            plain_step_fails += np.linalg.eigvalsh(B + rate * D).min() < 0
    assert plain_step_fails > 15  # or the test would not need the second-order term


def _slopes(svi, state, X, y):
    """Central differences of the bound in the sums over sites, linear and quadratic."""
    here = state.approximation
    evaluate = jax.jit(svi.evaluate)
    rng = np.random.RandomState(1)
    out = {}
    for field in ("f_auto_linear", "f_auto_quadratic"):
        out[field] = []
        for _ in range(4):
            way = rng.randn(*here[field].shape)
            way = way + np.swapaxes(way, -1, -2) if field == "f_auto_quadratic" else way
            ends = [
                evaluate(
                    dataclasses.replace(
                        state, approximation={**here, field: here[field] + e * way}
                    ),
                    X,
                    y,
                )
                for e in (1e-4, -1e-4)
            ]
            out[field].append(abs(float(ends[0] - ends[1])) / 2e-4)
    return [max(slopes) for slopes in out.values()]


@pytest.mark.parametrize(
    "curvature",
    [
        "riemannian",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("clip", "clip, log-concave")),
    ],
)
def test_fixed_points_are_stationary(outliers, curvature):
    """Of the bound, by finite differences; with clipped curvature in the mean alone.

    A change of the linear sums moves the mean and leaves the covariance.
    """
    X, y = outliers
    X, y = X[::5], y[::5] + 2.0 * (np.arange(30) % 4 == 0)
    model, rule = student, RULES[curvature[:4] if "," in curvature else curvature]
    if "log-concave" in curvature:
        model, y = _counts, np.abs(np.round(y))
    options = {"site_lr": 0.3, "rule": rule, "e_steps": 300}
    svi = make(None, model, np.linspace(-3, 3, 7), **options)
    state, _ = jax.jit(svi.update)(svi.init(jax.random.key(0), X, y), X, y)
    linear, quadratic = _slopes(svi, state, X, y)
    assert linear < 1e-6
    if curvature == "clip":
        assert quadratic > 1e-3  # or nothing would have been clipped
    else:
        assert quadratic < 1e-6


def _counts(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
