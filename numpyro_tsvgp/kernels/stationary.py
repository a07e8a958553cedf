"""Kernels that see the distance between inputs alone."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import ndtri
from jax.typing import ArrayLike

from numpyro_tsvgp.gaussian.state_space import StateSpace
from numpyro_tsvgp.kernels.distance import as_matrix, centred, pair, squared_distance
from numpyro_tsvgp.kernels.leaf import Leaf
from numpyro_tsvgp.kernels.spectral import (
    Frequencies,
    Term,
    gamma_quantiles,
    harmonics,
    wide_gamma,
    wide_normal,
)
from numpyro_tsvgp.kernels.state_space import MaternSpace, RotationSpace, cosine_series
from numpyro_tsvgp.kernels.tree import Dims, pytree, static

__all__ = [
    "RBF",
    "Cosine",
    "Matern12",
    "Matern32",
    "Matern52",
    "Periodic",
    "RationalQuadratic",
    "Stationary",
]


class Stationary(Leaf):
    """A kernel that depends on the difference of its inputs, by default on their distance."""

    def diag(self, X: ArrayLike) -> Array:
        X = self._inputs(X)
        batches = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.name in ("lengthscale", "period"):
                batches.append(self._per_input(field.name, X).shape[:-2])
            elif not field.metadata.get("static"):
                batches.append(jnp.shape(getattr(self, field.name)))
        variance = jnp.asarray(self.variance)[..., None] * jnp.ones(len(X), X.dtype)
        return jnp.broadcast_to(variance, jnp.broadcast_shapes(*batches) + (len(X),))

    def _correlation(self, A: Array, B: Array) -> Array:
        scale = self._per_input("lengthscale", A)
        if A.shape[-1] == 1:  # no matrix product, so no cancellation to guard against
            return self._shape(jnp.square((A - B.T) / scale))
        A, B = centred(A, B)
        if scale.shape[-1] == 1:  # one product serves the whole batch
            return self._shape(squared_distance(A, B, jnp.square(scale)))
        return self._shape(squared_distance(*pair(lambda X: X / scale, A, B)))

    def _shape(self, s: Array) -> Array:
        """The correlation at squared, scaled distance ``s``."""
        raise NotImplementedError

    def _term(
        self, columns: int, more: int, of: Callable[[Array, Array], tuple[Array, Array]]
    ) -> tuple[Term, ...]:
        """A term with frequencies in all columns that the kernel sees.

        Args:
          columns: how many the inputs have.
          more: how many uniform numbers a frequency takes beyond one for each column.
          of: a function of uniform numbers, ``(count, seen)`` and ``(count, more)``, that gives
            frequencies of shape ``batch + (count, seen)`` and their weights.

        Returns:
          The only term.
        """
        seen = self._columns(columns)

        def frequencies(u: Array) -> tuple[Array, Array]:
            found, weights = of(u[:, : len(seen)], u[:, len(seen) :])
            all_of_them = jnp.zeros((*found.shape[:-1], columns), found.dtype)
            return all_of_them.at[..., seen].add(found), weights

        return (Term(self.variance, (Frequencies(len(seen) + more, frequencies),)),)

    def _matern(self, columns: int, nu: float) -> tuple[Term, ...]:
        """Frequencies of Student's t with 2 nu degrees of freedom."""

        if len(self._columns(columns)) == 1:  # one uniform number makes it, by a Cauchy variable

            def of_one(u: Array, _: Array) -> tuple[Array, Array]:
                student = jnp.tan(math.pi * (u - 0.5))
                square = jnp.square(student[:, 0])
                power = (1.0 + square / (2.0 * nu)) ** (-nu - 0.5)
                return student / self._per_input("lengthscale", u), power * (1.0 + square)

            return self._term(columns, 0, of_one)

        def of(u: Array, more: Array) -> tuple[Array, Array]:
            gamma, weights = wide_gamma(more[:, 0], nu)
            student = jnp.sqrt(nu / gamma)[:, None] * ndtri(u)
            return student / self._per_input("lengthscale", u), weights

        return self._term(columns, 1, of)


@pytree
class RBF(Stationary):
    r"""Squared exponential kernel, of infinitely smooth functions.

    .. math:: k(x, x') = \sigma^2 \exp\left(-\tfrac12 r^2\right), \quad
        r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2

    Args:
      lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
      variance: :math:`\sigma^2`, of shape ``batch``.
      active_dims: the columns of the inputs to use; all of them by default.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp import kernels
      >>> X = jnp.linspace(0.0, 1.0, 5)
      >>> kernels.RBF(0.5)(X, X).shape
      (5, 5)
      >>> kernels.RBF(jnp.array([[0.5], [1.0], [2.0]]))(X, X).shape
      (3, 5, 5)

    References:
      Rasmussen and Williams, `Gaussian Processes for Machine Learning
      <https://gaussianprocess.org/gpml/>`_, 2006, chapter 4, here and for the kernels below.
    """

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: Dims = static(default=None)

    def _shape(self, s: Array) -> Array:
        return jnp.exp(-0.5 * s)

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        def of(u: Array, _: Array) -> tuple[Array, Array]:
            normal, weights = wide_normal(u)
            return normal / self._per_input("lengthscale", u), weights

        return self._term(columns, 0, of)


def _matern12(z: Array) -> Array:
    # sqrt has an infinite slope at zero, which both branches of `where` must be kept from seeing.
    away = z > 0
    return jnp.where(away, jnp.exp(-jnp.sqrt(jnp.where(away, z, 1.0))), 1.0)


# As functions of z = r^2 each Matern function is, up to a factor, the derivative of the next one.
# Saying so keeps the derivatives right at r = 0, where differentiating sqrt cannot.
@jax.custom_jvp
def _matern32(z: Array) -> Array:
    r = jnp.sqrt(z)
    return (1.0 + r) * jnp.exp(-r)


@jax.custom_jvp
def _matern52(z: Array) -> Array:
    r = jnp.sqrt(z)
    return (1.0 + r + z / 3.0) * jnp.exp(-r)


_matern32.defjvps(lambda dz, _, z: -0.5 * _matern12(z) * dz)
_matern52.defjvps(lambda dz, _, z: -_matern32(z) / 6.0 * dz)


@pytree
class Matern12(Stationary):
    r"""Matérn-1/2 or exponential kernel, of continuous functions without derivatives.

    .. math:: k(x, x') = \sigma^2 e^{-r}, \quad r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2

    It has no derivative at :math:`x = x'`; there, automatic differentiation returns zero.

    Args:
      lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
      variance: :math:`\sigma^2`, of shape ``batch``.
      active_dims: the columns of the inputs to use; all of them by default.

    Examples:
      >>> from numpyro_tsvgp import kernels
      >>> round(kernels.Matern12(lengthscale=2.0)([0.0], [2.0]).item(), 4)
      0.3679
    """

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: Dims = static(default=None)

    def _shape(self, s: Array) -> Array:
        return _matern12(s)

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        return self._matern(columns, 0.5)

    def state_space(self) -> StateSpace:
        return MaternSpace(1.0 / self._of_one_input("lengthscale"), self.variance, 1)


@pytree
class Matern32(Stationary):
    r"""Matérn-3/2 kernel, of functions with one derivative.

    .. math:: k(x, x') = \sigma^2 (1 + \sqrt3 r) e^{-\sqrt3 r}, \quad
        r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2

    Args:
      lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
      variance: :math:`\sigma^2`, of shape ``batch``.
      active_dims: the columns of the inputs to use; all of them by default.

    Examples:
      >>> from numpyro_tsvgp import kernels
      >>> round(kernels.Matern32(lengthscale=2.0)([0.0], [2.0]).item(), 4)
      0.4834
    """

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: Dims = static(default=None)

    def _shape(self, s: Array) -> Array:
        return _matern32(3.0 * s)

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        return self._matern(columns, 1.5)

    def state_space(self) -> StateSpace:
        return MaternSpace(math.sqrt(3.0) / self._of_one_input("lengthscale"), self.variance, 2)


@pytree
class Matern52(Stationary):
    r"""Matérn-5/2 kernel, of functions with two derivatives.

    .. math:: k(x, x') = \sigma^2 (1 + \sqrt5 r + \tfrac53 r^2) e^{-\sqrt5 r}, \quad
        r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2

    Args:
      lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
      variance: :math:`\sigma^2`, of shape ``batch``.
      active_dims: the columns of the inputs to use; all of them by default.

    Examples:
      >>> from numpyro_tsvgp import kernels
      >>> round(kernels.Matern52(lengthscale=2.0)([0.0], [2.0]).item(), 4)
      0.524
    """

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: Dims = static(default=None)

    def _shape(self, s: Array) -> Array:
        return _matern52(5.0 * s)

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        return self._matern(columns, 2.5)

    def state_space(self) -> StateSpace:
        return MaternSpace(math.sqrt(5.0) / self._of_one_input("lengthscale"), self.variance, 3)


@pytree
class RationalQuadratic(Stationary):
    r"""Rational quadratic kernel: a mixture of RBF kernels of many lengthscales.

    .. math:: k(x, x') = \sigma^2 \left(1 + \frac{r^2}{2\alpha}\right)^{-\alpha}, \quad
        r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2

    Args:
      lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
      alpha: :math:`\alpha`, of shape ``batch``; the kernel tends to :class:`RBF` as it grows.
      variance: :math:`\sigma^2`, of shape ``batch``.
      active_dims: the columns of the inputs to use; all of them by default.

    Examples:
      >>> from numpyro_tsvgp import kernels
      >>> round(kernels.RationalQuadratic(lengthscale=1.0, alpha=1.0)([0.0], [2.0]).item(), 4)
      0.3333
    """

    lengthscale: ArrayLike = 1.0
    alpha: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: Dims = static(default=None)

    def _shape(self, s: Array) -> Array:
        alpha = as_matrix(self.alpha)
        return jnp.exp(-alpha * jnp.log1p(s / (2.0 * alpha)))

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        alpha = jnp.asarray(self.alpha)

        def of(u: Array, more: Array) -> tuple[Array, Array]:
            gamma = gamma_quantiles(more[:, 0], alpha)
            normal, weights = wide_normal(u)
            scale = jnp.sqrt(gamma / alpha[..., None])[..., None]
            return scale * normal / self._per_input("lengthscale", u), weights

        return self._term(columns, 1, of)


# Kernels of the distance alone, by their names.
_BASES: dict[str, type[Stationary]] = {
    kind.__name__: kind for kind in (RBF, Matern12, Matern32, Matern52)
}


@pytree
class Periodic(Stationary):
    r"""Kernel of functions that repeat themselves.

    .. math:: k(x, x') = \sigma^2 \exp\left(
        -2 \sum_d \sin^2\left(\pi (x_d - x'_d) / p_d\right) / \ell_d^2 \right)

    That is :class:`RBF` at points on circles, whose squared distance is
    :math:`r^2 = 4 \sum_d \sin^2\left(\pi (x_d - x'_d) / p_d\right) / \ell_d^2`. With ``base`` it is
    another kernel of that distance, for functions that repeat themselves and are rougher.

    Args:
      lengthscale: :math:`\ell`, relative to the period, of shape ``()``, ``(d,)``,
        ``batch + (1,)`` or ``batch + (d,)``.
      period: :math:`p`, of such a shape too.
      variance: :math:`\sigma^2`, of shape ``batch``.
      active_dims: the columns of the inputs to use; all of them by default.
      base: the class of a kernel of the distance alone: :class:`RBF`, :class:`Matern12`,
        :class:`Matern32` or :class:`Matern52`.
      order: number of harmonics in the state-space form, which has ``2 * order + 1`` numbers in
        a state. Nothing else of the kernel depends on it. Short lengthscales need many, see
        :meth:`needed_order`.

    Examples:
      >>> from numpyro_tsvgp import kernels
      >>> round(kernels.Periodic(period=3.0)([0.0], [6.0]).item(), 4)
      1.0
      >>> rough = kernels.Periodic(period=3.0, base=kernels.Matern12)
      >>> round(rough([0.0], [1.5]).item(), 4)  # half a period: a distance of 2
      0.1353

    References:
      MacKay, `Introduction to Gaussian processes
      <https://www.inference.org.uk/mackay/gpB.pdf>`_, 1998.
    """

    lengthscale: ArrayLike = 1.0
    period: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: Dims = static(default=None)
    base: type[Stationary] | str = static(default="RBF")
    order: int = static(default=10)

    def __post_init__(self) -> None:
        super().__post_init__()
        # By its name, which files can hold.
        is_kernel = isinstance(self.base, Stationary)
        name = type(self.base).__name__ if is_kernel else getattr(self.base, "__name__", self.base)
        if is_kernel or name not in _BASES:
            raise TypeError(
                f"Periodic: base is {name}, but must be one of the classes RBF, Matern12, Matern32 "
                "and Matern52 (the class itself: hyperparameters are those of Periodic)"
            )
        object.__setattr__(self, "base", name)
        if operator.index(self.order) < 1:
            raise ValueError(f"Periodic: order must be a positive integer, got {self.order}")

    def _correlation(self, A: Array, B: Array) -> Array:
        scale = self._per_input("lengthscale", A)
        frequency = 2.0 * math.pi / self._per_input("period", A)

        def on_circles(X: Array) -> Array:
            # The squared distance of two points on a circle of radius 1/l is (2 sin(.)/l)^2.
            angle = X * frequency
            return jnp.concatenate([jnp.cos(angle) / scale, jnp.sin(angle) / scale], -1)

        return _BASES[str(self.base)]()._shape(squared_distance(*pair(on_circles, *centred(A, B))))

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        if self.base != "RBF":
            raise ValueError(
                f"The kernel Periodic over {self.base} has no random features, so that no "
                "functions can be drawn; Periodic over RBF, its default, has. Of any kernel values "
                "can be drawn: fit.sample(key, X_new)."
            )

        def of(u: Array, _: Array) -> tuple[Array, Array]:
            concentration = jnp.square(1.0 / self._per_input("lengthscale", u))
            concentration = jnp.broadcast_to(
                concentration, (*concentration.shape[:-1], u.shape[1])
            )[..., 0, :]
            found = [harmonics(u[:, i], concentration[..., i]) for i in range(u.shape[1])]
            numbers, weights = (jnp.stack(part, -1) for part in zip(*found, strict=True))
            return numbers * (2.0 * math.pi / self._per_input("period", u)), weights.prod(-1)

        return self._term(columns, 0, of)

    def _series(self, order: int) -> tuple[Array, ...]:
        """The first weights of the cosine series of the correlation."""
        shape, lengthscale = _BASES[str(self.base)]()._shape, self._of_one_input("lengthscale")
        return cosine_series(
            lambda angle: shape((2 - 2 * jnp.cos(angle)) / lengthscale[..., None] ** 2), order
        )

    def needed_order(self, error: float = 1e-6, most: int = 200) -> int | None:
        """The smallest ``order`` whose state-space form is the kernel up to an error.

        All weights of the series are positive, so that the error is largest where two inputs
        coincide: it is the share of the variance that the form leaves out.

        Args:
          error: the largest error, relative to the variance.
          most: the largest order to look at.

        Returns:
          The order, or None if it is larger than that.

        Examples:
          >>> from numpyro_tsvgp import kernels
          >>> [kernels.Periodic(lengthscale).needed_order() for lengthscale in (2.0, 1.0, 0.3)]
          [4, 7, 17]
        """
        weights = np.stack(np.broadcast_arrays(*self._series(most)), 0)
        missing = np.max(1.0 - np.cumsum(weights.reshape(most + 1, -1), 0), 1)
        enough = np.flatnonzero(missing <= error)
        return max(int(enough[0]), 1) if len(enough) else None

    def state_space(self) -> StateSpace:
        weights = self._series(self.order)
        variance = jnp.asarray(self.variance)
        frequency = 2.0 * math.pi / self._of_one_input("period")
        return RotationSpace(frequency, tuple(variance * w for w in weights), 0)


@pytree
class Cosine(Stationary):
    r"""Kernel of sinusoids of one frequency, with random amplitude and phase.

    .. math:: k(x, x') = \sigma^2 \cos\left(2\pi \sum_d (x_d - x'_d) / \ell_d\right)

    Args:
      lengthscale: :math:`\ell`, the wavelength, of shape ``()``, ``(d,)``, ``batch + (1,)`` or
        ``batch + (d,)``.
      variance: :math:`\sigma^2`, of shape ``batch``.
      active_dims: the columns of the inputs to use; all of them by default.

    Examples:
      >>> from numpyro_tsvgp import kernels
      >>> round(kernels.Cosine(lengthscale=4.0)([0.0], [2.0]).item(), 4)
      -1.0
    """

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: Dims = static(default=None)

    def _correlation(self, A: Array, B: Array) -> Array:
        scale = self._per_input("lengthscale", A)
        u, v = pair(lambda X: jnp.sum(X / scale, -1), *centred(A, B))
        return jnp.cos(2.0 * math.pi * (u[..., :, None] - v[..., None, :]))

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        # One frequency and its negative. Which of them matters in products alone.
        def of(u: Array, more: Array) -> tuple[Array, Array]:
            sign = jnp.where(more < 0.5, -1.0, 1.0) * jnp.ones_like(u)
            found = sign * (2.0 * math.pi / self._per_input("lengthscale", u))
            return found, jnp.ones(len(u), u.dtype)

        return self._term(columns, 1, of)

    def state_space(self) -> StateSpace:
        frequency = 2.0 * math.pi / self._of_one_input("lengthscale")
        return RotationSpace(frequency, (self.variance,), 1)
