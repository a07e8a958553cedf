"""Kernels of inner products: linear and polynomial functions of the inputs."""

from __future__ import annotations

import functools
import operator

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_tsvgp.kernels.distance import as_matrix, inner, pair
from numpyro_tsvgp.kernels.leaf import Leaf
from numpyro_tsvgp.kernels.spectral import Term, outer
from numpyro_tsvgp.kernels.tree import Dims, pytree, static

__all__ = ["Linear", "Polynomial"]

# Of a polynomial, to draw functions with.
_MOST_FEATURES = 2**12


@pytree
class Linear(Leaf):
    r"""Kernel of linear functions through the origin.

    .. math:: k(x, x') = \sigma^2 \sum_d x_d x'_d / \ell_d^2

    A slope with a variance of its own for each column, :math:`\sum_d v_d x_d x'_d`, is written
    ``Linear(lengthscale=v**-0.5)``: an array of *variances* is a batch of kernels, as everywhere
    in this module, where some other libraries take it for the columns.

    Args:
        lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
        variance: :math:`\sigma^2`, of shape ``batch``.
        active_dims: the columns of the inputs to use; all of them by default.

    Example:
        >>> from numpyro_tsvgp import kernels
        >>> kernels.Linear(variance=0.5)([[1.0, 2.0]], [[3.0, 4.0]]).item()
        5.5
    """

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: Dims = static(default=None)

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        self._columns(columns)  # which must be there
        return (Term(self.variance, exact=(self,)),)

    def exact_features(self, X: ArrayLike) -> Array:
        """Features whose products are the kernel over its variance, ``batch + (n, size)``."""
        X = self._inputs(X)
        return X / self._per_input("lengthscale", X)

    def diag(self, X: ArrayLike) -> Array:
        X = self._inputs(X)
        squares = jnp.sum(jnp.square(X / self._per_input("lengthscale", X)), -1)
        return jnp.asarray(self.variance)[..., None] * squares

    def _correlation(self, A: Array, B: Array) -> Array:
        scale = self._per_input("lengthscale", A)
        return inner(*pair(lambda X: X / scale, A, B))


@pytree
class Polynomial(Leaf):
    r"""Kernel of polynomials.

    .. math:: k(x, x') = \sigma^2 \left(c + \sum_d x_d x'_d / \ell_d^2\right)^p

    Args:
        degree: :math:`p`, a positive integer.
        offset: :math:`c`, not negative, of shape ``batch``.
        lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
        variance: :math:`\sigma^2`, of shape ``batch``.
        active_dims: the columns of the inputs to use; all of them by default.

    Example:
        >>> from numpyro_tsvgp import kernels
        >>> kernels.Polynomial(degree=2)([[1.0, 2.0]], [[3.0, 4.0]]).item()
        144.0
    """

    degree: int = static(default=2)
    offset: ArrayLike = 1.0
    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: Dims = static(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if operator.index(self.degree) < 1:
            raise ValueError(f"Polynomial: degree must be a positive integer, got {self.degree}")

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        size = (len(self._columns(columns)) + 1) ** self.degree
        if size > _MOST_FEATURES:
            raise ValueError(
                f"Polynomial of degree {self.degree} in {columns} columns has {size:,} features, "
                f"which are too many to draw functions with ({_MOST_FEATURES:,} are the most). "
                "Values can be drawn: fit.sample(key, X_new)."
            )
        return (Term(self.variance, exact=(self,)),)

    def exact_features(self, X: ArrayLike) -> Array:
        """Features whose products are the kernel over its variance, ``batch + (n, size)``."""
        X = self._inputs(X)
        columns = X / self._per_input("lengthscale", X)
        one = jnp.sqrt(as_matrix(self.offset)) * jnp.ones((len(X), 1), X.dtype)
        batch = jnp.broadcast_shapes(columns.shape[:-2], one.shape[:-2])
        parts = [jnp.broadcast_to(part, batch + part.shape[-2:]) for part in (one, columns)]
        return functools.reduce(outer, [jnp.concatenate(parts, -1)] * self.degree)

    def diag(self, X: ArrayLike) -> Array:
        squares = Linear(self.lengthscale, 1.0, self.active_dims).diag(X)
        powers = (squares + jnp.asarray(self.offset)[..., None]) ** self.degree
        return jnp.asarray(self.variance)[..., None] * powers

    def _correlation(self, A: Array, B: Array) -> Array:
        scale = self._per_input("lengthscale", A)
        return (inner(*pair(lambda X: X / scale, A, B)) + as_matrix(self.offset)) ** self.degree
