"""The one place that factorises matrices, and the one place that adds jitter.

Two facts shape this module.

*Batched LAPACK can hang.* On a CPU with few cores jaxlib's batched Cholesky and triangular
solve may deadlock when two of them run at once. Every factorisation here therefore runs one
matrix at a time on CPU, also when a batch was created behind our back by ``jax.vmap``; other
platforms keep true batching.

*Products are cheaper than solves.* A Cholesky factor is returned together with its inverse, so
that everything after it (features, marginals and all derivatives) is a matrix product. In
particular no derivative calls LAPACK again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.scipy.linalg import solve_triangular

# Relative to the mean of the diagonal. In float64 it only has to cover rounding; in float32
# rounding is 1e-7 times the largest eigenvalue, which grows with the number of inputs.
_JITTER = {"float64": 1e-8, "float32": 1e-5}

# Above this size a factorisation is long enough to repay the start of BLAS threads.
_LARGE = 1024


def default_jitter(dtype: Any) -> float:
    """The jitter added to a prior covariance, relative to the mean of its diagonal.

    Args:
      dtype: the floating-point type of the covariance.

    Returns:
      1e-8 in double precision, 1e-5 in single precision and below.
    """
    return _JITTER["float64"] if jnp.finfo(dtype).bits >= 64 else _JITTER["float32"]


def add_jitter(covariance: Array, jitter: Any = None, variance: Array | None = None) -> Array:
    r"""Adds ``jitter`` times the mean of the diagonal to the diagonal.

    .. math:: K \leftarrow K + \epsilon \, \tfrac{1}{n} \operatorname{tr}(K) \, I

    Args:
      covariance: a batch of covariance matrices, shape ``(..., n, n)``.
      jitter: the relative jitter, or None for :func:`default_jitter`.
      variance: the diagonal, shape ``(..., n)``, if its derivative is not that of ``covariance``.

    Returns:
      The covariance with its diagonal raised.
    """
    n = covariance.shape[-1]
    if jitter is None:
        jitter = default_jitter(covariance.dtype)
    if variance is None:
        variance = jnp.diagonal(covariance, axis1=-2, axis2=-1)
    scale = variance.sum(-1) / n
    raised = jnp.asarray(jitter * scale, covariance.dtype)[..., None, None]
    return covariance + raised * jnp.eye(n, dtype=covariance.dtype)


# ---- one matrix at a time --------------------------------------------------------------------


def _one_at_a_time(function: Any) -> Any:
    """Makes a function of one matrix safe under ``vmap``: a loop on CPU, a batch elsewhere."""

    @custom_vmap
    def single(matrix: Array) -> Any:
        return function(matrix)

    @single.def_vmap
    def rule(axis_size: int, in_batched: list[bool], matrices: Array) -> Any:
        del axis_size, in_batched
        # The loop calls `single` so that a further vmap around it meets this rule again.
        out = lax.platform_dependent(
            matrices, cpu=partial(lax.map, single), default=jax.vmap(function)
        )
        return out, jax.tree.map(lambda _: True, out)

    def batched(matrix: Array) -> Any:
        if matrix.ndim == 2:
            return single(matrix)
        if matrix.shape[0] == 1:  # a batch of one needs no loop
            return jax.tree.map(lambda x: x[None], batched(matrix[0]))
        return jax.vmap(batched)(matrix)

    return batched


def _invert(chol: Array) -> Array:
    identity = jnp.eye(chol.shape[-1], dtype=chol.dtype)
    return solve_triangular(chol, identity, lower=True)


def _factor(matrix: Array) -> tuple[Array, Array]:
    chol = jnp.linalg.cholesky(matrix, symmetrize_input=False)
    return chol, _invert(chol)


_cholesky = _one_at_a_time(lambda matrix: jnp.linalg.cholesky(matrix, symmetrize_input=False))
_cholesky_and_inverse = _one_at_a_time(_factor)
_triangular_inverse = _one_at_a_time(_invert)


def _phi(matrix: Array) -> Array:
    """The lower triangle with half of the diagonal: the derivative map of a Cholesky."""
    half = 0.5 * jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    return jnp.tril(matrix) - half * matrix


@jax.custom_jvp
def cholesky(matrix: Array) -> Array:
    r"""Lower Cholesky factor :math:`L` of each matrix, :math:`A = L L^\top`.

    Args:
      matrix: symmetric positive-definite matrices, shape ``(..., n, n)``; only the lower
        triangle is read. A matrix that is not positive definite gives NaN, as in JAX.

    Returns:
      The factors, shape ``(..., n, n)``.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp.gaussian.linalg import cholesky
      >>> cholesky(jnp.array([[4.0, 2.0], [2.0, 5.0]])).tolist()
      [[2.0, 0.0], [1.0, 2.0]]
    """
    return _cholesky(matrix)


@cholesky.defjvp
def _cholesky_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    chol, inverse = cholesky_and_inverse(primals[0])
    return chol, chol @ _phi(inverse @ tangents[0] @ inverse.mT)


@jax.custom_jvp
def cholesky_and_inverse(matrix: Array) -> tuple[Array, Array]:
    r"""Lower Cholesky factor of each matrix together with its inverse, :math:`(L, L^{-1})`.

    Differentiating is products only, with :math:`\Phi` the lower triangle with half of its
    diagonal:

    .. math::
      \mathrm{d}L = L \, \Phi(L^{-1} \mathrm{d}A \, L^{-\top}), \qquad
      \mathrm{d}(L^{-1}) = -\Phi(L^{-1} \mathrm{d}A \, L^{-\top}) \, L^{-1}.

    Args:
      matrix: symmetric positive-definite matrices, shape ``(..., n, n)``.

    Returns:
      The factors and their inverses, each of shape ``(..., n, n)``.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp.gaussian.linalg import cholesky_and_inverse
      >>> chol, inverse = cholesky_and_inverse(jnp.array([[4.0, 2.0], [2.0, 5.0]]))
      >>> (inverse @ chol).tolist()
      [[1.0, 0.0], [0.0, 1.0]]

    References:
      S. Särkkä, *Bayesian Filtering and Smoothing*, 2013, Theorem A.1.
    """
    return _cholesky_and_inverse(matrix)


@cholesky_and_inverse.defjvp
def _cholesky_and_inverse_jvp(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    chol, inverse = cholesky_and_inverse(primals[0])
    phi = _phi(inverse @ tangents[0] @ inverse.mT)
    return (chol, inverse), (chol @ phi, -phi @ inverse)


@jax.custom_jvp
def triangular_inverse(matrix: Array) -> Array:
    """Inverse of each lower triangular matrix.

    Args:
      matrix: lower triangular matrices, shape ``(..., n, n)``.

    Returns:
      The inverses, shape ``(..., n, n)``.
    """
    return _triangular_inverse(matrix)


@triangular_inverse.defjvp
def _triangular_inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = triangular_inverse(primals[0])
    return inverse, -inverse @ tangents[0] @ inverse


@jax.custom_jvp
def congruence(matrix: Array, factor: Array) -> Array:
    r"""The product :math:`T^\top A \, T` with a symmetric A.

    Symmetry makes the derivative in T one product, where three would be taken without.

    Args:
      matrix: symmetric matrices A, shape ``(..., n, n)``.
      factor: matrices T, shape ``(..., n, n)``.

    Returns:
      The products, shape ``(..., n, n)``.
    """
    return factor.mT @ (matrix @ factor)


@congruence.defjvp
def _congruence_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    matrix, factor = primals
    product = matrix @ factor
    half = tangents[1].mT @ product
    return factor.mT @ product, half + half.mT + factor.mT @ (tangents[0] @ factor)


@jax.custom_jvp
def differentiated_once(tree: Any) -> Any:
    """Numbers in a derivative that must not be differentiated again, because it would be wrong."""
    return tree


@differentiated_once.defjvp
def _differentiated_twice(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "The loss of an M-step has first derivatives only. For a Hessian differentiate the log "
        "density of numpyro_tsvgp.collapse(...), which is the same function."
    )


def cholesky_of_residual(matrix: Array, scale: Array, jitter: Any = None) -> Array:
    r"""Cholesky factor of a covariance that may be zero up to rounding.

    What a prior leaves after conditioning, :math:`K - W^\top W`, vanishes at the inducing inputs,
    and in single precision its rounding error can exceed any fixed jitter. The jitter starts at
    the usual one and grows tenfold until the factor exists.

    Args:
      matrix: positive semi-definite matrices up to rounding, shape ``(..., n, n)``.
      scale: the scale that jitter is relative to, shape ``(...,)``.
      jitter: the relative jitter to start from, or None for :func:`default_jitter`.

    Returns:
      The factors, shape ``(..., n, n)``.
    """
    start = jnp.asarray(default_jitter(matrix.dtype) if jitter is None else jitter, matrix.dtype)
    identity = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)

    def raised(level: Array) -> Array:
        return matrix + (level * scale)[..., None, None] * identity

    def fails(level: Array) -> Array:
        return ~jnp.isfinite(cholesky(raised(level))).all() & (level < 1.0).all()

    def grow(level: Array) -> Array:  # from zero, too
        return jnp.maximum(10 * level, jnp.finfo(matrix.dtype).eps)

    level = lax.while_loop(fails, grow, lax.stop_gradient(start))
    return cholesky(raised(level))


# ---- precision of products -------------------------------------------------------------------


@contextmanager
def full_precision(*, on_cpu: bool = True) -> Iterator[None]:
    """Products of matrices in the precision of their type, for a block or a function.

    Accelerators multiply float32 matrices in fewer bits by default (TF32 or bfloat16), which
    variances, as differences of products, do not survive. A product takes its precision where it is
    traced, so this stands inside of what is compiled. It holds for what a model computes, too; a
    product with a ``precision`` of its own keeps that. On CPU it changes no number.

    Updates, predictions and diagnostics do this by themselves.

    Args:
      on_cpu: False around functions that are not compiled as a whole. Their operations are small
        programs, which those outside of the block share if nothing is set where nothing is gained.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from numpyro_tsvgp.gaussian.linalg import full_precision
      >>> product = full_precision()(lambda a: a @ a)
      >>> "HIGHEST" in str(jax.make_jaxpr(product)(jnp.eye(2)))
      True
    """
    if not on_cpu and jax.default_backend() == "cpu":
        yield
        return
    with jax.default_matmul_precision("highest"):
        yield


# ---- BLAS threads ----------------------------------------------------------------------------


class _OneThread:
    """Gives BLAS one thread from the first block that enters to the last one that leaves.

    Blocks of several threads overlap: each restoring what it found, the last one to leave would
    restore the single thread that the first had set.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._limits: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                from threadpoolctl import threadpool_limits

                self._limits = threadpool_limits(limits=1, user_api="blas")
            self._inside += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._limits.restore_original_limits()


_one_thread = _OneThread()


@contextmanager
def blas_threads(largest: int = 0) -> Iterator[None]:
    """Gives BLAS one thread for the duration of a block, or a function, of small factorisations.

    JAX on CPU calls the BLAS inside SciPy, whose threads spin and compete with XLA's own: with
    matrices of a few hundred rows they cost more than they bring. What was set before is
    restored at the end of the last of several blocks that overlap, and for large matrices nothing
    is changed.

    Fits and diagnostics do this by themselves. Around a sampler it is yours to do.

    Args:
      largest: the size of the largest matrix that will be factorised.

    Examples:
      >>> from numpyro_tsvgp.gaussian.linalg import blas_threads
      >>> with blas_threads():
      ...     pass  # mcmc.run(...)
    """
    if largest > _LARGE or jax.default_backend() != "cpu":
        yield
        return
    with _one_thread:
        yield
