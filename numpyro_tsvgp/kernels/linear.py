"""Kernels of inner products: linear and polynomial functions of the inputs."""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_tsvgp.gaussian.state_space import StateSpace
from numpyro_tsvgp.kernels.distance import as_matrix, inner, pair
from numpyro_tsvgp.kernels.leaf import Leaf
from numpyro_tsvgp.kernels.spectral import Term, outer
from numpyro_tsvgp.kernels.state_space import LineSpace
from numpyro_tsvgp.kernels.tree import Dims, pytree, static

__all__ = ["ArcCosine", "Linear", "Polynomial"]

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

    Examples:
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

    def state_space(self) -> StateSpace:
        return LineSpace(jnp.asarray(self.variance) / self._of_one_input("lengthscale") ** 2)


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

    Examples:
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


@jax.custom_jvp
def _arc_cosine_0(c: Array) -> Array:
    return 1.0 - jnp.arccos(c) / math.pi


@jax.custom_jvp
def _arc_cosine_1(c: Array) -> Array:
    return jnp.sqrt(1.0 - c * c) / math.pi + _arc_cosine_0(c) * c


@jax.custom_jvp
def _arc_cosine_2(c: Array) -> Array:
    return 3.0 * c * jnp.sqrt(1.0 - c * c) / math.pi + _arc_cosine_0(c) * (1.0 + 2.0 * c * c)


def _arc_cosine_0_slope(c: Array) -> Array:
    # Infinite where the angle is zero; there, as for a Matern-1/2 kernel, zero.
    inside = jnp.abs(c) < 1.0
    return jnp.where(inside, 1.0 / (math.pi * jnp.sqrt(jnp.where(inside, 1.0 - c * c, 1.0))), 0.0)


# As functions of the cosine each is, up to a factor, the derivative of the next one.
_arc_cosine_0.defjvps(lambda dc, _, c: _arc_cosine_0_slope(c) * dc)
_arc_cosine_1.defjvps(lambda dc, _, c: _arc_cosine_0(c) * dc)
_arc_cosine_2.defjvps(lambda dc, _, c: 4.0 * _arc_cosine_1(c) * dc)
_ARC_COSINES = (_arc_cosine_0, _arc_cosine_1, _arc_cosine_2)


@pytree
class ArcCosine(Leaf):
    r"""Kernel of infinitely wide networks with one hidden layer.

    .. math:: k(x, x') = \frac{\sigma^2}{\pi} \left(a(x, x) \, a(x', x')\right)^{p/2} J_p(\theta),
        \quad \cos \theta = \frac{a(x, x')}{\sqrt{a(x, x) \, a(x', x')}}, \quad
        a(x, x') = c + \sum_d x_d x'_d / \ell_d^2

    with :math:`J_0 = \pi - \theta` for hidden units that are steps,
    :math:`J_1 = \sin\theta + (\pi - \theta) \cos\theta` for rectified linear ones and
    :math:`J_2 = 3 \sin\theta \cos\theta + (\pi - \theta)(1 + 2 \cos^2\theta)` for their squares.
    It does not die out far from the data, where functions go on as straight lines (order 1).

    Args:
      order: :math:`p`, which is 0, 1 or 2.
      offset: :math:`c`, the variance of the biases, not negative, of shape ``batch``.
      lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``;
        :math:`1 / \ell^2` are the variances of the weights.
      variance: :math:`\sigma^2`, of shape ``batch``.
      active_dims: the columns of the inputs to use; all of them by default.

    Examples:
      >>> from numpyro_tsvgp import kernels
      >>> kernels.ArcCosine(order=1).diag([0.0, 2.0]).tolist()
      [1.0, 5.0]

    References:
      Cho and Saul, *Kernel Methods for Deep Learning*, NeurIPS 2009.
    """

    order: int = static(default=0)
    offset: ArrayLike = 1.0
    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: Dims = static(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in (0, 1, 2):
            raise ValueError(f"ArcCosine: order must be 0, 1 or 2, got {self.order}")

    def _squares(self, X: Array) -> Array:
        """Products of inputs with themselves, of shape ``batch + (n,)``."""
        scale = self._per_input("lengthscale", X)
        return jnp.sum(jnp.square(X / scale), -1) + jnp.asarray(self.offset)[..., None]

    def diag(self, X: ArrayLike) -> Array:
        # J(0) is pi, pi and 3 pi.
        power = (3.0 if self.order == 2 else 1.0) * self._squares(self._inputs(X)) ** self.order
        return jnp.asarray(self.variance)[..., None] * power

    def _correlation(self, A: Array, B: Array) -> Array:
        scale = self._per_input("lengthscale", A)
        product = inner(*pair(lambda X: X / scale, A, B)) + as_matrix(self.offset)
        a, b = pair(self._squares, A, B)
        squares = a[..., :, None] * b[..., None, :]
        zero = squares == 0.0  # an input of zero without biases: a function that is zero there
        norms = jnp.sqrt(jnp.where(zero, 1.0, squares))
        cosine = product / norms
        cosine = cosine + lax.stop_gradient(jnp.clip(cosine, -1.0, 1.0) - cosine)
        if B is A:  # the same input has no angle, up to no rounding
            cosine = jnp.where(jnp.eye(A.shape[0], dtype=bool), 1.0, cosine)
        return jnp.where(zero, 0.0, norms) ** self.order * _ARC_COSINES[self.order](cosine)
