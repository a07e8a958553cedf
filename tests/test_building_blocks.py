"""Linear algebra, expectations and site algebra, each alone against dense formulas."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import gammaln, logsumexp

from numpyro_tsvgp import GP, expectations, features, kernels, linalg, posterior, sites
from numpyro_tsvgp.bound import Data
from numpyro_tsvgp.expectations import (
    GaussHermite,
    Marginals,
    QuasiMonteCarlo,
    SiteGradients,
    choose_rule,
    expect,
    site_gradients,
)
from numpyro_tsvgp.extract import FlatKernel, GPSite
from numpyro_tsvgp.posterior import Fitted

# ---- linalg ----------------------------------------------------------------------------------


def spd(x, n=4):
    """A positive-definite matrix that depends smoothly on a vector of n entries."""
    t = jnp.arange(n) / n
    return jnp.exp(-((t[:, None] - t[None, :]) ** 2) / 0.1) + jnp.outer(x, x) + 0.1 * jnp.eye(n)


def reference(A):
    chol = jnp.linalg.cholesky(A)
    return chol, jnp.linalg.inv(chol)


@pytest.mark.parametrize("which", ["cholesky", "inverse"])
def test_factor_and_its_first_two_derivatives(which):
    """Ours are hand-written products; JAX differentiates its own Cholesky and LU."""
    x = jnp.array([0.3, -0.5, 1.0, 0.2])
    weights = np.random.default_rng(0).standard_normal((4, 4))

    def scalar(factors, x):
        return (weights * factors(spd(x))).sum() ** 2

    if which == "cholesky":
        ours, theirs = linalg.cholesky, jnp.linalg.cholesky
    else:
        ours, theirs = (lambda A, f=f: f(A)[1] for f in (linalg.cholesky_and_inverse, reference))
    for derivative in (lambda f: f, jax.grad, jax.hessian):  # Hessian: forward over reverse
        np.testing.assert_allclose(
            jax.jit(derivative(partial(scalar, ours)))(x),
            jax.jit(derivative(partial(scalar, theirs)))(x),
            rtol=1e-9,
            atol=1e-9,
        )


def test_factors_of_batches_and_under_nested_vmap():
    X = np.random.default_rng(1).standard_normal((2, 3, 4))
    A = jax.vmap(jax.vmap(spd))(X)
    expected = np.stack([np.stack([np.linalg.cholesky(a) for a in row]) for row in A])
    chol, inverse = linalg.cholesky_and_inverse(A)
    np.testing.assert_allclose(chol, expected, atol=1e-12)
    np.testing.assert_allclose(inverse @ chol, np.broadcast_to(np.eye(4), A.shape), atol=1e-12)
    np.testing.assert_allclose(linalg.cholesky(A[:1, 0]), expected[:1, 0], atol=1e-12)
    nested = jax.jit(jax.vmap(jax.vmap(linalg.cholesky)))(A)
    np.testing.assert_allclose(nested, expected, atol=1e-12)

    def logdet(x):
        return 2 * jnp.log(jnp.diagonal(linalg.cholesky(spd(x)))).sum()

    gradient = jax.jit(jax.vmap(jax.grad(logdet)))(X[0])
    for g, x in zip(gradient, X[0], strict=True):  # d logdet(A) = tr(A^-1 dA), dA = 2 x dx
        np.testing.assert_allclose(g, 2 * np.linalg.solve(spd(x), x), atol=1e-12)


def test_congruence_and_triangular_inverse_with_their_derivatives():
    """Against plain products and a general inverse, along symmetric directions."""
    rng = np.random.RandomState(0)
    A, dA = (x + x.mT for x in rng.standard_normal((2, 3, 4, 4)))
    T, dT = rng.standard_normal((2, 1, 4, 4))  # one factor for three matrices
    L, dL = np.tril(rng.standard_normal((2, 3, 4, 4))) + [[[2 * np.eye(4)]], [[np.zeros((4, 4))]]]
    for ours, plain, at, along in (
        (linalg.congruence, lambda A, T: T.mT @ A @ T, (A, T), (dA, dT)),
        (linalg.triangular_inverse, jnp.linalg.inv, (L,), (dL,)),
    ):
        at, along = jax.tree.map(jnp.asarray, (at, along))
        for a, b in zip(jax.jvp(ours, at, along), jax.jvp(plain, at, along), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)

        def loss(function, *x):
            return (function(*x) * dA).sum()

        for i in range(len(at)):
            a, b = (jax.grad(partial(loss, f), argnums=i)(*at) for f in (ours, plain))
            if i == 0 and len(at) == 2:  # as a function of symmetric matrices
                a, b = a + a.mT, b + b.mT
            np.testing.assert_allclose(jnp.tril(a), jnp.tril(b), rtol=1e-9, atol=1e-9)


def test_a_matrix_without_a_factor_gives_nan_and_spoils_no_neighbour():
    A = jnp.stack([jnp.eye(3), -jnp.eye(3), 4 * jnp.eye(3)])
    chol = linalg.cholesky(A)
    assert np.isnan(chol[1]).any()
    np.testing.assert_array_equal(chol[::2], np.stack([np.eye(3), 2 * np.eye(3)]))


def test_jitter_is_relative_to_the_scale_and_depends_on_precision():
    A = jnp.stack([jnp.eye(2), 100 * jnp.eye(2)])
    raised = linalg.add_jitter(A) - A
    np.testing.assert_allclose(raised, 1e-8 * A, rtol=1e-6)
    np.testing.assert_allclose(linalg.add_jitter(A, 0.5) - A, 0.5 * A)
    each = linalg.add_jitter(A, jnp.array([0.1, 0.2])) - A
    np.testing.assert_allclose(each, np.array([0.1, 0.2])[:, None, None] * A, rtol=1e-12)
    assert linalg.default_jitter(jnp.float32) == 1e-5
    assert linalg.add_jitter(A.astype(jnp.float32)).dtype == jnp.float32


@pytest.mark.parametrize("jitter", [None, 0.0])
def test_factor_of_a_residual_that_vanishes(jitter):
    """Zero, of rank one, and indefinite by rounding: the factor is finite and reproduces it."""
    v = np.array([1.0, 2.0, -1.0])
    rounding = np.diag([0.0, 0.0, -1e-7])
    matrices = np.stack([np.zeros((3, 3)), np.outer(v, v), np.outer(v, v) + rounding])
    one_by_one = jax.jit(partial(linalg.cholesky_of_residual, jitter=jitter))
    for matrix in matrices:
        chol = one_by_one(matrix, jnp.ones(()))
        assert np.isfinite(chol).all()
        # Jitter grows tenfold from below what is needed: up to ten times 1e-7, squared away.
        np.testing.assert_allclose(chol @ chol.T, matrix, atol=2e-6)
    batch = jax.jit(jax.vmap(partial(linalg.cholesky_of_residual, jitter=jitter)))
    chol = batch(matrices, jnp.ones(3))
    np.testing.assert_allclose(chol @ chol.mT, matrices, atol=2e-6)


def test_factor_of_a_regular_residual_is_its_cholesky_with_a_gradient():
    x = jnp.array([0.3, -0.5, 1.0, 0.2])
    ours = jax.jit(jax.grad(lambda x: linalg.cholesky_of_residual(spd(x), 1.0).sum()))(x)
    theirs = jax.grad(lambda x: jnp.linalg.cholesky(spd(x)).sum())(x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)  # 1e-8 of jitter


# ---- expectations ----------------------------------------------------------------------------

MEAN, VAR = np.array([[0.3, -1.0, 1.5]]), np.array([[0.5, 0.1, 0.8]])
AXES = {"f": np.array([0])}


def gradients_1d(log_likelihood):
    nodes, weights = GaussHermite().nodes(jax.random.key(0), 1)
    q = {"f": Marginals(jnp.asarray(MEAN), jnp.asarray(VAR))}

    def gradients(q):
        return site_gradients(lambda f: log_likelihood(f["f"]).sum(), q, AXES, nodes, weights)

    value, g = jax.jit(gradients)(q)
    return value, g["f"]


def test_gauss_hermite_is_exact_for_a_gaussian_likelihood():
    y, s2 = np.array([[0.0, 1.0, 2.0]]), 0.3
    value, g = gradients_1d(lambda f: -0.5 * (y - f) ** 2 / s2)
    np.testing.assert_allclose(value, (-0.5 * ((y - MEAN) ** 2 + VAR) / s2).sum(), rtol=1e-12)
    np.testing.assert_allclose(g.alpha, (y - MEAN) / s2, atol=1e-11)
    np.testing.assert_allclose(g.beta, np.full((1, 3), 1 / s2), atol=1e-11)


def test_gauss_hermite_for_a_poisson_likelihood():
    y = np.array([[0.0, 1.0, 4.0]])
    value, g = gradients_1d(lambda f: y * f - jnp.exp(f) - gammaln(y + 1))
    rate = np.exp(MEAN + VAR / 2)
    np.testing.assert_allclose(value, (y * MEAN - rate - gammaln(y + 1)).sum(), rtol=1e-12)
    # Twenty nodes integrate exp(f) at a variance below one to rounding.
    np.testing.assert_allclose(g.alpha, y - rate, atol=1e-10)
    np.testing.assert_allclose(g.beta, rate, atol=1e-10)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_gauss_hermite_moments_on_the_tensor_grid(dim):
    nodes, weights = GaussHermite(6).nodes(jax.random.key(0), dim)
    assert nodes.shape == (6**dim, dim) and weights.shape == (6**dim,)
    np.testing.assert_allclose(weights.sum(), 1.0)
    np.testing.assert_allclose(weights @ nodes, np.zeros(dim), atol=1e-12)
    np.testing.assert_allclose((weights[:, None] * nodes).T @ nodes, np.eye(dim), atol=1e-12)
    np.testing.assert_allclose(weights @ nodes**10, np.full(dim, 945.0), rtol=1e-10)  # degree 11


@pytest.mark.parametrize("dim", [1, 4, 10])
def test_quasi_monte_carlo_moments(dim):
    rule = jax.jit(partial(QuasiMonteCarlo(128).nodes, dim=dim))
    nodes, weights = rule(jax.random.key(1))
    assert nodes.shape == (128, dim)
    np.testing.assert_allclose(weights.sum(), 1.0)
    np.testing.assert_allclose(weights @ nodes, np.zeros(dim), atol=1e-12)  # mirrored
    second = (weights[:, None] * nodes).T @ nodes
    np.testing.assert_allclose(second, np.eye(dim), atol=1e-12)  # orthonormal
    fourth = weights @ nodes**4  # 3 each, and of 64 independent draws sqrt(96 / 64) = 1.2 off
    assert np.sqrt(np.mean((fourth - 3) ** 2)) < 0.8
    other, _ = rule(jax.random.key(2))
    assert np.abs(np.sort(nodes[:, 0]) - np.sort(other[:, 0])).max() > 1e-4  # shifted by the key


def test_quasi_monte_carlo_with_few_nodes_is_rescaled():
    nodes, weights = QuasiMonteCarlo(12).nodes(jax.random.key(1), 10)
    assert np.isfinite(nodes).all()
    np.testing.assert_allclose(weights @ nodes**2, np.ones(10))


def test_quasi_monte_carlo_accuracy_beats_plain_monte_carlo():
    """E log softmax with eight latent functions, over random shifts of the lattice."""
    rng = np.random.default_rng(2)
    mean, sd = rng.standard_normal(8), rng.uniform(0.3, 1.0, 8)

    def integrand(z):  # log p(class 0)
        f = mean + sd * z
        return f[..., 0] - logsumexp(f, axis=-1)

    truth = integrand(rng.standard_normal((400_000, 8))).mean()  # error 0.001
    rule = QuasiMonteCarlo(128)
    keys = jax.random.split(jax.random.key(0), 40)
    nodes = jax.jit(jax.vmap(lambda key: rule.nodes(key, 8)[0]))(keys)
    lattice = integrand(np.asarray(nodes)).mean(-1)
    plain = [integrand(rng.standard_normal((128, 8))).mean() for _ in range(400)]
    errors = [np.sqrt(np.mean((np.array(x) - truth) ** 2)) for x in (lattice, plain)]
    # Measured: the ratio is 0.02, and 0.1 without the orthonormal nodes.
    assert errors[0] < 0.05 * errors[1]


def test_expectation_in_chunks_equals_one_sum(monkeypatch):
    """Many nodes are visited in turn, padded with weight zero."""
    monkeypatch.setattr(expectations, "_VALUES_AT_ONCE", 4 * 64)
    q = {
        "f": Marginals(
            np.array([[0.1, 0.7], [-0.4, 0.2]]),
            np.array([[0.5, 0.6], [0.3, 0.9]]),
        )
    }
    nodes, weights = GaussHermite(9).nodes(jax.random.key(0), 2)  # 81 = 2 * 41 - 1
    axes = {"f": np.array([0, 1])}

    def log_likelihood(f):
        return jnp.sum(jnp.tanh(f["f"][0] * f["f"][1]))

    def direct(q):
        f = q.mean[None] + jnp.sqrt(q.variance)[None] * nodes[:, :, None]
        return (weights[:, None] * jnp.tanh(f[:, 0] * f[:, 1])).sum()

    value, g = jax.jit(lambda q: site_gradients(log_likelihood, q, axes, nodes, weights))(q)
    expected, h = jax.jit(jax.value_and_grad(direct))(q["f"])
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(g["f"].alpha, h.mean, atol=1e-12)
    np.testing.assert_allclose(g["f"].beta, -2 * h.variance, atol=1e-12)


@pytest.mark.parametrize("order", [4, 9], ids=["at once", "in chunks"])
def test_expectations_are_differentiated_in_what_else_the_likelihood_depends_on(order, monkeypatch):
    """A noise scale, together with the marginals; twice; and the gradients of the sites."""
    monkeypatch.setattr(expectations, "_VALUES_AT_ONCE", 4 * 64)
    nodes, weights = GaussHermite(order).nodes(jax.random.key(0), 2)
    axes = {"f": np.array([0, 1])}

    def ours(x):
        def log_likelihood(f):
            return jnp.sum(jnp.tanh(f["f"][0] * f["f"][1] * jnp.exp(x[0])))

        q = {"f": Marginals(x[1:5].reshape(2, 2), jnp.exp(x[5:]).reshape(2, 2))}
        _, g = site_gradients(log_likelihood, q, axes, nodes, weights)
        return expect(log_likelihood, q, axes, nodes, weights), g["f"].beta.sum()

    def direct(x):
        def total(mean, variance):
            f = mean + jnp.sqrt(variance) * nodes[:, :, None]
            return (weights[:, None] * jnp.tanh(f[:, 0] * f[:, 1] * jnp.exp(x[0]))).sum()

        q = x[1:5].reshape(2, 2), jnp.exp(x[5:]).reshape(2, 2)
        return total(*q), -2.0 * jax.grad(total, 1)(*q).sum()

    def look(f):
        def all_of(x):
            first = jax.jacrev(f)(x)
            forward = jax.jvp(f, (x,), (jnp.ones(9),))[1]
            return f(x), first, forward, jax.hessian(lambda x: f(x)[0])(x)

        return jax.jit(all_of)(jnp.linspace(-0.5, 0.8, 9))

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12),
        look(ours),
        look(direct),
    )


def test_default_rules():
    assert choose_rule(1) == choose_rule(2) == GaussHermite(20)
    assert choose_rule(3) == GaussHermite(10)
    assert isinstance(choose_rule(4), QuasiMonteCarlo)


# ---- sites -----------------------------------------------------------------------------------

P, M, N = 2, 4, 7
Z, X = np.linspace(-1, 1, M), np.linspace(-1.2, 1.1, N)


def make_kernel(batched, scale):
    """Squared exponentials of (1, ., .) or (P, ., .), and the dense covariances of each latent."""
    scales = np.array([[0.5], [0.8]]) * scale if batched else np.array([[0.6]]) * scale
    kernel = FlatKernel(kernels.RBF(scales, np.array([1.2])), (P,))
    per_latent = [scales[p if batched else 0, 0] for p in range(P)]

    def dense(A, B, p):
        return 1.2 * np.exp(-0.5 * ((A[:, None] - B[None, :]) / per_latent[p]) ** 2)

    return kernel, dense


def random_duals():
    rng = np.random.default_rng(3)
    lambda_1, root = rng.standard_normal((P, M)), rng.standard_normal((P, M, M))
    return lambda_1, root @ root.swapaxes(-1, -2)


def tied(lambda_1, lambda_2, prior, anchor=None):
    """Tied sites of given duals in the coordinates of a prior."""
    factor = jnp.broadcast_to(prior.chol, (P, M, M))
    xi = jnp.einsum("pij,pi->pj", factor, lambda_1)
    return sites.TiedSites(xi, factor.mT @ lambda_2 @ factor, prior.inverse, anchor)


def jittered(K):
    return K + 1e-8 * np.trace(K) / len(K) * np.eye(len(K))


@pytest.mark.parametrize("batched", [False, True], ids=["shared kernel", "kernel each"])
def test_posterior_of_sites_made_at_another_prior(batched):
    """Marginals and KL of tied sites after a move of the hyperparameters, by dense moments."""
    lambda_1, lambda_2 = random_duals()
    old, _ = make_kernel(batched, 1.3)
    new, dense = make_kernel(batched, 1.0)

    @jax.jit
    def compute():
        made = tied(lambda_1, lambda_2, features.prior(old, Z))
        prior = features.prior(new, Z)
        assert prior.chol.shape == (P if batched else 1, M, M)
        q = sites.posterior(sites.whiten(made, prior, None))
        at = features.at(new, Z, X, prior)
        return sites.marginals(q, at), sites.means(q, at), sites.kl_divergence(q)

    ours, means, our_kl = compute()
    np.testing.assert_allclose(means, ours.mean)
    kl = 0.0
    for p in range(P):
        K, Kzx = jittered(dense(Z, Z, p)), dense(Z, X, p)
        S = np.linalg.inv(np.linalg.inv(K) + lambda_2[p])
        m = S @ lambda_1[p]
        A = np.linalg.solve(K, Kzx)
        np.testing.assert_allclose(ours.mean[p], A.T @ m, atol=1e-10)
        variance = 1.2 - (A * Kzx).sum(0) + (A * (S @ A)).sum(0)
        np.testing.assert_allclose(ours.variance[p], variance, atol=1e-10)
        kl += 0.5 * (
            np.trace(np.linalg.solve(K, S))
            + m @ np.linalg.solve(K, m)
            - M
            + np.linalg.slogdet(K)[1]
            - np.linalg.slogdet(S)[1]
        )
    np.testing.assert_allclose(our_kl, kl, rtol=1e-9)


@pytest.mark.parametrize("batched", [False, True], ids=["shared kernel", "kernel each"])
def test_sites_follow_inducing_inputs_that_move(batched):
    """They stay statements about f at the old inputs, which the new inducing values predict."""
    lambda_1, lambda_2 = random_duals()
    old, _ = make_kernel(batched, 1.3)
    new, dense = make_kernel(batched, 1.0)
    moved = Z + np.array([0.2, -0.1, 0.15, 0.05])

    @jax.jit
    def move(to):
        made = tied(lambda_1, lambda_2, features.prior(old, Z), jnp.asarray(Z))
        prior = features.prior(new, to)
        shift = (new(jnp.asarray(Z), to) - new(jnp.copy(to), to)) @ prior.inverse.mT
        return sites.whiten(made, prior, None, shift), sites.whiten(made, prior, None)

    (xi, gram), _ = move(moved)
    for p in range(P):
        K = jittered(dense(moved, moved, p))
        cross = dense(moved, Z, p) + 1e-8 * 1.2 * np.eye(M)
        predict, L = np.linalg.solve(K, cross), np.linalg.cholesky(K)
        np.testing.assert_allclose(xi[p], L.T @ predict @ lambda_1[p], atol=1e-9)
        expected = L.T @ predict @ lambda_2[p] @ predict.T @ L
        np.testing.assert_allclose(gram[p], expected, atol=1e-9)
    for a, b in zip(*move(Z), strict=True):  # where nothing has moved
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("each", "how"),
    [("shared", how) for how in ("kept", "carried", "fresh", "fresh and moving")]
    + [(e, how) for e in ("lengthscale", "variance") for how in ("carried", "fresh and moving")],
)
def test_the_bound_in_held_coordinates_is_the_bound(each, how):
    """Value, gradient and forward mode against differentiating the Cholesky factor.

    The kernel has noise and is not stationary, and the jitter is large, so that each has a part.
    """
    lambda_1, lambda_2 = random_duals()
    rng = np.random.default_rng(4)
    weights = rng.standard_normal((2, P, N))
    scales = np.array([[0.5], [0.8]]) if each == "lengthscale" else 0.6
    variance = np.array([1.3, 0.7]) if each == "variance" else 1.3
    moving = how in ("carried", "fresh and moving")

    def at(theta):
        kernel = kernels.RBF(scales * jnp.exp(theta[0]), 1.2)
        kernel = kernel + kernels.Linear(variance=0.3) + kernels.White(0.1 * jnp.exp(theta[1]))
        site = GPSite(GP(variance * jnp.exp(theta[2]) * kernel, X, jitter=0.02), (P,))
        return site, jnp.asarray(Z) + (theta[3:] if moving else 0.0)

    start, origin = at(jnp.zeros(3 + M))
    prior = features.prior(start.kernel, origin, 0.02)
    made = tied(lambda_1, lambda_2, prior, origin if moving else None)

    def bound(theta, held):
        site, to = at(theta)
        fitted = Fitted(to, made, None)
        fresh = held and how.startswith("fresh")
        prior = posterior.prior(site, fitted, held=held, departs=fresh)
        data = Data(site, fitted, prior, posterior.training_features(site, fitted, prior, X))
        if held:
            (mean, variance), kl = data.bound(made if fresh else None)
        else:
            q = sites.posterior(data.whitened())
            (mean, variance), kl = sites.marginals(q, data.features), sites.kl_divergence(q)
        pull = jnp.sum(weights[0] * jnp.sin(mean)) + jnp.sum(weights[1] * jnp.log(variance))
        return pull + 0.7 * kl

    @partial(jax.jit, static_argnums=1)
    def look(theta, held):
        f = partial(bound, held=held)
        forward = jax.jvp(f, (theta,), (jnp.ones(3 + M),))[1]
        return f(theta), jax.grad(f)(theta), forward

    theta = jnp.zeros(3 + M)  # where fresh sites have been made
    if not how.startswith("fresh"):
        theta = jnp.concatenate([jnp.array([0.1, -0.2, 0.3]), 0.1 * rng.standard_normal(M)])
    for ours, expected in zip(look(theta, True), look(theta, False), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-9)
    for second in (jax.hessian, lambda f: jax.jacrev(jax.grad(f))):  # rather than a wrong one
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            jax.eval_shape(second(partial(bound, held=True)), theta)


def test_moving_inducing_inputs_never_strengthens_sites():
    """At fixed hyperparameters G can only shrink, however close together the inputs are."""
    kernel = FlatKernel(kernels.RBF(0.5), ())
    close = np.array([-0.5, -0.499, 0.0, 0.001, 0.5])
    prior = features.prior(kernel, close)
    made = sites.TiedSites(jnp.zeros((1, 5)), jnp.eye(5)[None], prior.inverse, jnp.asarray(close))

    @jax.jit
    def move(to):
        new = features.prior(kernel, to)
        shift = (kernel(close, to) - kernel(jnp.copy(to), to)) @ new.inverse.mT
        return sites.whiten(made, new, None, shift).gram[0], sites.whiten(made, new, None).gram[0]

    for step in (1e-4, 1e-2, 1.0):
        gram, frozen = move(close + step * np.array([1.0, -1.0, 0.5, 1.0, -1.0]))
        # Rounding: 1e-16 over the jitter of 1e-8.
        assert np.linalg.eigvalsh(gram).max() < 1 + 1e-6
        if step == 1e-4:  # the same lambda at the new inputs, for comparison
            assert np.linalg.eigvalsh(frozen).max() > 1.1


@pytest.mark.parametrize("batched", [False, True], ids=["shared kernel", "kernel each"])
def test_point_sites_are_sums_over_features(batched):
    rng = np.random.default_rng(4)
    linear, quadratic = rng.standard_normal((P, N)), rng.uniform(0, 1, (P, N))
    kernel, dense = make_kernel(batched, 1.0)
    prior = features.prior(kernel, Z)
    at = features.at(kernel, Z, X, prior)
    xi, gram = sites.whiten(sites.PointSites(linear, quadratic), prior, at)
    for p in range(P):
        W = np.linalg.solve(np.linalg.cholesky(jittered(dense(Z, Z, p))), dense(Z, X, p))
        np.testing.assert_allclose(xi[p], W @ linear[p], atol=1e-10)
        np.testing.assert_allclose(gram[p], (W * quadratic[p]) @ W.T, atol=1e-10)
        residual = 1.2 - (W**2).sum(0)
        k = p if batched else 0
        np.testing.assert_allclose(at.residual[k], np.maximum(residual, 0), atol=1e-10)


@pytest.mark.parametrize("kind", ["tied", "point"])
def test_blend_is_a_convex_combination_of_old_and_new_sites(kind):
    rng = np.random.default_rng(5)
    kernel, _ = make_kernel(True, 1.0)
    prior = features.prior(kernel, Z)
    at = features.at(kernel, Z, X, prior)
    alpha, beta, mean = rng.standard_normal((P, N)), rng.uniform(0.1, 1, (P, N)), np.ones((P, N))
    start = sites.PointSites(jnp.ones((P, N)), jnp.ones((P, N)))
    if kind == "tied":
        start = tied(*random_duals(), prior)
    new = sites.blend(start, SiteGradients(alpha, beta), mean, prior, at, 0.3)
    asked = sites.whiten(sites.PointSites(alpha + beta * mean, beta), prior, at)
    before, after = (sites.whiten(s, prior, at) for s in (start, new))
    for a, b, c in zip(before, after, asked, strict=True):
        np.testing.assert_allclose(b, 0.7 * a + 0.3 * c, atol=1e-9)


def test_sites_of_zero_give_the_prior():
    kernel, _ = make_kernel(False, 1.0)
    prior = features.prior(kernel, Z)
    zero = sites.TiedSites(jnp.zeros((P, M)), jnp.zeros((P, M, M)), jnp.eye(M)[None])
    q = sites.posterior(sites.whiten(zero, prior, None))
    ours = sites.marginals(q, features.at(kernel, Z, X, prior))
    np.testing.assert_allclose(ours.mean, np.zeros((P, N)), atol=1e-12)
    np.testing.assert_allclose(ours.variance, np.full((P, N), 1.2), rtol=1e-7)
    np.testing.assert_allclose(sites.kl_divergence(q), 0.0, atol=1e-12)
