"""Products and inverses of many small matrices at once, without LAPACK.

Matrices have shape ``(d, d, ...)`` and vectors ``(d, ...)``: a product is then a sum of long rows.
Kernels of time series have d from one to a few dozen, where calling LAPACK, or even a loop over
d x d products, costs more than the arithmetic.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = [
    "eye_like",
    "first_like",
    "inverse",
    "multiply",
    "outer",
    "psd_factor",
    "times",
    "transpose",
]

# Up to this size sums over the inner axis are written out, so that they are one loop over rows.
_WRITTEN_OUT = 4


def transpose(matrix: Array) -> Array:
    """The transpose of each matrix."""
    return matrix.swapaxes(0, 1)


def multiply(a: Array, b: Array) -> Array:
    """The products of matrices ``(d, d, ...)``, whose other axes broadcast."""
    if a.shape[1] <= _WRITTEN_OUT:
        total = a[:, 0, None] * b[None, 0]
        for j in range(1, a.shape[1]):
            total = total + a[:, j, None] * b[None, j]
        return total
    if a[0, 0].size == b[0, 0].size == 1:
        tail = jnp.broadcast_shapes(a.shape[2:], b.shape[2:])
        product = a.reshape(a.shape[:2]) @ b.reshape(b.shape[:2])
        return product.reshape(*product.shape, *tail)
    return (a[:, :, None] * b[None]).sum(1)


def times(a: Array, x: Array) -> Array:
    """The products of matrices ``(d, d, ...)`` and vectors ``(d, ...)``."""
    return (a * x[None]).sum(1)


def outer(x: Array, y: Array) -> Array:
    """The products ``x y^T`` of vectors."""
    return x[:, None] * y[None]


def eye_like(matrix: Array) -> Array:
    """Identities that broadcast with matrices."""
    d = matrix.shape[0]
    return jnp.eye(d, dtype=matrix.dtype).reshape(d, d, *[1] * (matrix.ndim - 2))


def first_like(vector: Array) -> Array:
    """Which number of vectors ``(d, ...)`` is the first: booleans that broadcast with them."""
    return (jnp.arange(vector.shape[0]) == 0).reshape(-1, *[1] * (vector.ndim - 1))


@jax.custom_jvp
def inverse(matrix: Array) -> Array:
    """Inverses of matrices ``(d, d, ...)`` by elimination with pivoting.

    Args:
      matrix: regular matrices, which need not be symmetric.

    Returns:
      The inverses, of the same shape.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp.gaussian.small import inverse
      >>> inverse(jnp.array([[0.0, 2.0], [4.0, 0.0]])).tolist()
      [[0.0, 0.25], [0.5, 0.0]]
    """
    d = matrix.shape[0]
    both = jnp.concatenate([matrix, jnp.broadcast_to(eye_like(matrix), matrix.shape)], 1)
    rows = jnp.arange(d).reshape(d, *[1] * (matrix.ndim - 2))

    def eliminate(k: Any, both: Array) -> Array:
        pivot = jnp.argmax(jnp.where(rows >= k, jnp.abs(both[:, k]), -1.0), 0)
        chosen = (rows == pivot)[:, None]
        new = jnp.where(chosen, both, 0.0).sum(0)
        both = jnp.where(chosen, both[k][None], both)  # the rows change places
        new = new / new[k][None]
        rest = both - both[:, k][:, None] * new[None]
        return jnp.where((rows == k)[:, None], new[None], rest)

    if d <= _WRITTEN_OUT:
        for k in range(d):
            both = eliminate(k, both)
    else:
        both = lax.fori_loop(0, d, eliminate, both)
    return both[:, d:]


@inverse.defjvp
def _inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    found = inverse(primals[0])
    return found, -multiply(found, multiply(tangents[0], found))


def psd_factor(matrix: Array) -> Array:
    """A factor L with ``matrix = L L^T`` of positive semi-definite matrices, singular ones too.

    A pivot that is zero up to rounding has a column of zeros.

    Args:
      matrix: covariances, ``(d, d, ...)``.

    Returns:
      Lower triangular factors, of the same shape.
    """
    d = matrix.shape[0]
    rows = jnp.arange(d).reshape(d, *[1] * (matrix.ndim - 2))
    least = 8 * jnp.finfo(matrix.dtype).eps * jnp.diagonal(matrix, axis1=0, axis2=1)

    def column(j: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, factor = state
        pivot = rest[j, j]
        there = pivot > jnp.abs(least[..., j])
        root = jnp.sqrt(jnp.where(there, pivot, 1.0))
        new = jnp.where(there & (rows >= j), rest[:, j] / root, 0.0)
        return rest - outer(new, new), factor.at[:, j].set(new)

    return lax.fori_loop(0, d, column, (matrix, jnp.zeros_like(matrix)))[1]
