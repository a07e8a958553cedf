"""Linear algebra alone: factors, their derivatives, and what is done where there is none."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tsvgp.gaussian import linalg


def spd(x, n=4):
    """A positive-definite matrix that depends smoothly on a vector of n entries."""
    t = jnp.arange(n) / n
    return jnp.exp(-((t[:, None] - t[None, :]) ** 2) / 0.1) + jnp.outer(x, x) + 0.1 * jnp.eye(n)


def reference(A):
    chol = jnp.linalg.cholesky(A)
    return chol, jnp.linalg.inv(chol)


@pytest.mark.parametrize("which", ["cholesky", pytest.param("inverse", marks=pytest.mark.slow)])
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


@pytest.mark.slow
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

        @partial(jax.jit, static_argnums=0)
        def look(function, at, along):
            def loss(*x):
                return (function(*x) * dA).sum()

            return jax.jvp(function, at, along), jax.grad(loss, tuple(range(len(at))))(*at)

        at, along = jax.tree.map(jnp.asarray, (at, along))
        (values, gradients), (expected, theirs) = (look(f, at, along) for f in (ours, plain))
        for a, b in zip(values, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        for i, (a, b) in enumerate(zip(gradients, theirs, strict=True)):
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


def test_threads_of_blas_are_restored_where_blocks_overlap():
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def threads():
        found = threadpoolctl.threadpool_info()
        return {pool["num_threads"] for pool in found if pool["user_api"] == "blas"}

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = threads()
        first, second = linalg.blas_threads(), linalg.blas_threads()
        first.__enter__()
        second.__enter__()
        assert threads() == {1}
        first.__exit__(None, None, None)  # the first to come is the first to leave
        assert threads() == {1}
        second.__exit__(None, None, None)
        assert threads() == before
