"""Kernels of functions that change their character."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_tsvgp.kernels.base import Kernel, as_kernel
from numpyro_tsvgp.kernels.distance import as_rows
from numpyro_tsvgp.kernels.spectral import Term, product
from numpyro_tsvgp.kernels.tree import pytree, static

__all__ = ["ChangePoint"]


@pytree
class ChangePoint(Kernel):
    r"""One kernel before a point, another one after it.

    .. math:: k(x, x') = (1 - w(x)) \, k_1(x, x') \, (1 - w(x')) + w(x) \, k_2(x, x') \, w(x'),
        \quad w(x) = \frac{1}{1 + e^{-s (x - t)}}

    It is the covariance of two independent functions, of which one fades into the other. Several
    points are change points of change points: ``ChangePoint(ChangePoint(a, b, 1.0), c, 2.0)``.

    Args:
      left: the kernel :math:`k_1`, or what :func:`~numpyro_tsvgp.kernels.as_kernel` takes.
      right: the kernel :math:`k_2`.
      location: :math:`t`, of shape ``batch``.
      steepness: :math:`s`, of shape ``batch``; the change takes about ``4 / s``.
      column: the column of the inputs that the change is in.

    Examples:
      >>> from numpyro_tsvgp import kernels
      >>> kernel = kernels.ChangePoint(kernels.Constant(1.0), kernels.Constant(9.0), 0.0, 50.0)
      >>> [round(k, 4) for k in kernel.diag([-1.0, 0.0, 1.0]).tolist()]
      [1.0, 2.5, 9.0]

    References:
      Lloyd, Duvenaud, Grosse, Tenenbaum and Ghahramani, *Automatic Construction and
      Natural-Language Description of Nonparametric Regression Models*, AAAI 2014.
    """

    left: Kernel
    right: Kernel
    location: ArrayLike
    steepness: ArrayLike = 1.0
    column: int = static(default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "left", as_kernel(self.left))
        object.__setattr__(self, "right", as_kernel(self.right))

    def _after(self, X: ArrayLike) -> Array:
        """The weight of the right kernel at each input, ``batch + (n,)``."""
        X = as_rows(X)
        if not -X.shape[1] <= self.column < X.shape[1]:
            raise IndexError(
                f"ChangePoint: column {self.column} out of range for inputs with {X.shape[1]} "
                "columns"
            )
        x = X[:, self.column]
        location, steepness = jnp.asarray(self.location), jnp.asarray(self.steepness)
        return jax.nn.sigmoid(steepness[..., None] * (x - location[..., None]))

    # Inputs go to the kernels untouched: they tell one object from two.
    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        a, b = self._after(X1)[..., :, None], self._after(X2)[..., None, :]
        return (1 - a) * self.left(X1, X2) * (1 - b) + a * self.right(X1, X2) * b

    def _mixed(self, left: Array, right: Array, X: ArrayLike) -> Array:
        a = self._after(X)
        return (1 - a) ** 2 * left + a**2 * right

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        before, after = (Term(1.0, exact=(_Fading(self, side),)) for side in (False, True))
        left, right = self.left.spectral_terms(columns), self.right.spectral_terms(columns)
        return product([before], left) + product([after], right)

    def diag(self, X: ArrayLike) -> Array:
        return self._mixed(self.left.diag(X), self.right.diag(X), X)

    def noise(self, X: ArrayLike) -> Array:
        return self._mixed(self.left.noise(X), self.right.noise(X), X)


@pytree
class _Fading:
    """The weight of one side of a change point, as a feature."""

    change: ChangePoint
    right: bool = static()

    def exact_features(self, X: ArrayLike) -> Array:
        after = self.change._after(X)[..., None]
        return after if self.right else 1.0 - after
