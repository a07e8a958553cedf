"""Inputs as matrices, and the distances between their rows by one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

__all__ = ["as_matrix", "as_rows", "centred", "inner", "pair", "squared_distance"]

_T = TypeVar("_T")

# With few columns, squared norms are two more columns of the product of distances: for many rows
# that is less than adding them to it, and so is the gradient.
_FEW_COLUMNS = 64


def as_matrix(batched: ArrayLike) -> Array:
    """Lets a hyperparameter of shape ``batch`` multiply matrices."""
    return jnp.asarray(batched)[..., None, None]


def as_rows(X: ArrayLike) -> Array:
    """Inputs as a floating-point matrix of shape ``(n, d)``."""
    X = jnp.asarray(X)
    if X.ndim not in (1, 2):
        raise ValueError(f"inputs must have shape (n,) or (n, d), got {X.shape}")
    X = X if jnp.issubdtype(X.dtype, jnp.floating) else X.astype(float)
    return X[:, None] if X.ndim == 1 else X


def inner(a: Array, b: Array) -> Array:
    # Accelerators multiply in reduced precision by default, which distances do not survive.
    return jnp.matmul(a, jnp.swapaxes(b, -1, -2), precision=lax.Precision.HIGHEST)


@jax.custom_jvp
def gram(a: Array) -> Array:
    """Inner products of the rows of ``a``; symmetry makes its gradient one product, not two."""
    return inner(a, a)


@gram.defjvp
def _gram_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    half = inner(primals[0], tangents[0])
    return gram(*primals), half + jnp.swapaxes(half, -1, -2)


def squared_distance(a: Array, b: Array, unit: ArrayLike = 1.0) -> Array:
    """Squared distances between the rows of ``a`` and of ``b`` in ``unit``, by one product."""
    if a.shape[-1] == 1:
        return jnp.square(a - jnp.swapaxes(b, -1, -2)) / unit
    norm_a = jnp.sum(a * a, -1, keepdims=True)
    if a is b:
        s = _clipped((norm_a + jnp.swapaxes(norm_a, -1, -2) - 2.0 * gram(a)) / unit)
        return jnp.where(jnp.eye(a.shape[-2], dtype=bool), 0.0, s)
    norm_b = jnp.sum(b * b, -1, keepdims=True)
    if a.shape[-1] <= _FEW_COLUMNS:
        one_a, one_b = jnp.ones_like(norm_a), jnp.ones_like(norm_b)
        left = jnp.concatenate([-2.0 * a, norm_a, one_a], -1)
        # The unit goes to the rows of b, which are few, so that its gradient is a sum over them.
        s = inner(left, jnp.concatenate([b, one_b, norm_b], -1) / unit)
    else:
        s = (norm_a + jnp.swapaxes(norm_b, -1, -2) - 2.0 * inner(a, b)) / unit
    return _clipped(s)


def _clipped(s: Array) -> Array:
    # Rounding can make s negative. Clip the value but differentiate the polynomial itself, whose
    # derivatives of every order are right at coincident points too.
    return s + lax.stop_gradient(jnp.maximum(s, 0.0) - s)


def pair(function: Callable[[Array], _T], A: Array, B: Array) -> tuple[_T, _T]:
    """Maps both inputs, so that two names of one object remain two names of one object."""
    a = function(A)
    return a, a if B is A else function(B)


def centred(A: Array, B: Array) -> tuple[Array, Array]:
    # Stationary kernels do not see a shift, but rounding does. As the shift has no effect,
    # neither has its gradient.
    centre = lax.stop_gradient(jnp.mean(B, axis=0))
    return pair(lambda X: X - centre, A, B)
