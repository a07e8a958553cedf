"""What a kernel is, how kernels combine, and how foreign ones become one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_tsvgp.gaussian.state_space import StateSpace
from numpyro_tsvgp.kernels.distance import as_matrix, as_rows
from numpyro_tsvgp.kernels.spectral import RandomFeatures, Term, draw_features, product
from numpyro_tsvgp.kernels.state_space import (
    ProductSpace,
    QuasisepSpace,
    RotationSpace,
    ScaledSpace,
    SumSpace,
)
from numpyro_tsvgp.kernels.tree import pytree, static

__all__ = [
    "Constant",
    "External",
    "Function",
    "Kernel",
    "NotACovariance",
    "Product",
    "Scaled",
    "Sum",
    "White",
    "as_kernel",
]

WITH_STATE_SPACE = (
    "Matern12, Matern32, Matern52, Cosine, Periodic, Constant, Linear, IntegratedBrownian, "
    "quasiseparable kernels of tinygp, and sums and products of these"
)

# Hyperparameters that have no meaning below zero.
_NOT_NEGATIVE = (
    "variance",
    "lengthscale",
    "period",
    "alpha",
    "offset",
    "scale",
    "kappa",
    "weights",
)


class NotACovariance(ValueError):
    """A kernel was given a hyperparameter with which it is none."""


def _check_not_negative(value: Any, what: str) -> None:
    if not isinstance(value, jax.core.Tracer) and np.any(np.asarray(value) < 0):
        raise NotACovariance(
            f"{what} {value}, which is negative: the result is not a covariance. Keep it positive, "
            "by a prior such as dist.LogNormal or by numpyro.param(..., "
            "constraint=dist.constraints.positive)."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number, np.ndarray, jax.Array))


class Kernel:
    """Base class of all kernels: the algebra, and the two methods that a kernel has."""

    # Without this, `np.float64(2.0) * kernel` is NumPy's attempt to make an array of it.
    __array_ufunc__ = None

    @property
    def ndim(self) -> int:
        # tinygp takes what a kernel of its own is added to for a number, and asks for its axes.
        raise TypeError(
            "A kernel is not a number. A sum or product of a tinygp kernel and one of "
            "numpyro_tsvgp is evaluated by the latter: give it to GP as it is, or write "
            "kernels.as_kernel(theirs + ours)."
        )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            # In a pytree a list of lengthscales would be a container of leaves, not an array.
            if isinstance(value, list) and not field.metadata.get("static"):
                value = jnp.asarray(value)
                object.__setattr__(self, field.name, value)
            if field.name in _NOT_NEGATIVE and _is_number(value):
                _check_not_negative(value, f"{type(self).__name__} has the {field.name}")

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        """Covariance between two sets of inputs, of shape ``batch + (n1, n2)``."""
        raise NotImplementedError

    def diag(self, X: ArrayLike) -> Array:
        """Variance at each input, of shape ``batch + (n,)``."""
        raise NotImplementedError

    def scaled(self, X1: ArrayLike, X2: ArrayLike) -> tuple[ArrayLike, Array]:
        """The covariance in two factors: a number, or an array of shape ``batch``, and a matrix."""
        return 1.0, self(X1, X2)

    def noise(self, X: ArrayLike) -> Array:
        """What ``kernel(X, X)`` has on its diagonal and ``kernel(X, X.copy())`` has not."""

        def shared(a: Array, b: Array) -> Array:
            return self(a[None], b[None])[..., 0, 0]

        X = jnp.asarray(X)
        return self.diag(X) - jax.vmap(shared, out_axes=-1)(X, X)

    def random_features(
        self, key: Array, count: int, columns: int, centre: Any = 0.0
    ) -> RandomFeatures:
        r"""Features :math:`\phi` with :math:`\phi(x)^\top \phi(x') \approx k(x, x')`.

        Args:
          key: random key.
          count: how many random frequencies each stationary term of the kernel gets; each makes
            two features.
          columns: how many columns the inputs have.
          centre: somewhere among the inputs, a number or an array of shape ``(columns,)``; it
            keeps angles from rounding where inputs are large.

        Returns:
          A function of inputs that gives features of shape ``batch + (n, size)``, a pytree.

        Raises:
          ValueError: if the kernel, or one that it is made of, has none.

        References:
          Rahimi and Recht, `Random Features for Large-Scale Kernel Machines
          <https://papers.nips.cc/paper/2007/hash/013a006f03dbc5392effeb8f18fda755-Abstract.html>`_,
          2007. Avron, Sindhwani, Yang and Mahoney, `Quasi-Monte Carlo Feature Maps for
          Shift-Invariant Kernels <https://jmlr.org/papers/v17/14-538.html>`_, 2016.
        """
        return draw_features(self.spectral_terms(columns), key, count, centre)

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        """What :meth:`random_features` are made of; see :mod:`numpyro_tsvgp.kernels.spectral`."""
        raise ValueError(
            f"The kernel {type(self).__name__} has no random features, so that no functions can be "
            "drawn. Kernels that have are RBF, Matern12, Matern32, Matern52, RationalQuadratic, "
            "Periodic, Cosine, SpectralMixture, Constant, Linear, Polynomial and Coregion, their "
            "sums, products, multiples and change points. Of any kernel values can be drawn: "
            "fit.sample(key, X_new)."
        )

    def state_space(self) -> StateSpace:
        """The kernel of one input as a Markov chain of states, for ``markov=True``.

        Returns:
          The form; see :mod:`numpyro_tsvgp.gaussian.state_space`.

        Raises:
          TypeError: if the kernel has none.

        Examples:
          >>> from numpyro_tsvgp import kernels
          >>> (kernels.Matern32(2.0) + kernels.Constant()).state_space().dim
          3
        """
        raise TypeError(f"{self._described()} has no state-space form: {WITH_STATE_SPACE} have one")

    def _described(self) -> str:
        return f"the kernel {type(self).__name__}"

    def __add__(self, other: Any) -> Kernel:
        if _is_number(other):
            _check_not_negative(other, "a kernel plus")
            return Sum(self, Constant(other))
        return Sum(self, as_kernel(other))

    def __radd__(self, other: Any) -> Kernel:
        if isinstance(other, int) and other == 0:  # where the built-in `sum` starts
            return self
        return self + other if _is_number(other) else Sum(as_kernel(other), self)

    def __mul__(self, other: Any) -> Kernel:
        if _is_number(other):
            _check_not_negative(other, "a kernel times")
            return Scaled(self, other)
        return Product(self, as_kernel(other))

    def __rmul__(self, other: Any) -> Kernel:
        return self * other if _is_number(other) else Product(as_kernel(other), self)


@pytree
class Sum(Kernel):
    """Sum of two kernels: the covariance of the sum of two independent functions."""

    left: Kernel
    right: Kernel

    # Inputs go to the leaves untouched, here and below: they tell one object from two.
    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        return self.left(X1, X2) + self.right(X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        return self.left.diag(X) + self.right.diag(X)

    def noise(self, X: ArrayLike) -> Array:
        return self.left.noise(X) + self.right.noise(X)

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        return self.left.spectral_terms(columns) + self.right.spectral_terms(columns)

    def state_space(self) -> StateSpace:
        return SumSpace(self.left.state_space(), self.right.state_space())


@pytree
class Product(Kernel):
    """Product of two kernels: the covariance of the product of two independent functions."""

    left: Kernel
    right: Kernel

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        return self.left(X1, X2) * self.right(X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        return self.left.diag(X) * self.right.diag(X)

    def noise(self, X: ArrayLike) -> Array:
        left, right = self.left.noise(X), self.right.noise(X)
        return self.left.diag(X) * right + left * self.right.diag(X) - left * right

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        return product(self.left.spectral_terms(columns), self.right.spectral_terms(columns))

    def state_space(self) -> StateSpace:
        return ProductSpace(self.left.state_space(), self.right.state_space())


@pytree
class Scaled(Kernel):
    """A kernel times a number, or times an array of shape ``batch``."""

    kernel: Kernel
    scale: ArrayLike

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        return as_matrix(self.scale) * self.kernel(X1, X2)

    def scaled(self, X1: ArrayLike, X2: ArrayLike) -> tuple[ArrayLike, Array]:
        scale, matrix = self.kernel.scaled(X1, X2)
        return jnp.asarray(self.scale) * scale, matrix

    def diag(self, X: ArrayLike) -> Array:
        return jnp.asarray(self.scale)[..., None] * self.kernel.diag(X)

    def noise(self, X: ArrayLike) -> Array:
        return jnp.asarray(self.scale)[..., None] * self.kernel.noise(X)

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        return product([Term(self.scale)], self.kernel.spectral_terms(columns))

    def state_space(self) -> StateSpace:
        return ScaledSpace(self.kernel.state_space(), self.scale)


@pytree
class Constant(Kernel):
    r"""Covariance of a constant function with a random value.

    .. math:: k(x, x') = \sigma^2

    Args:
      variance: :math:`\sigma^2`.

    Examples:
      >>> from numpyro_tsvgp import kernels
      >>> kernels.Constant(2.0).diag([0.0, 1.0]).tolist()
      [2.0, 2.0]
    """

    variance: ArrayLike = 1.0

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        X1, X2 = as_rows(X1), as_rows(X2)
        return as_matrix(self.variance) * jnp.ones((len(X1), len(X2)), X1.dtype)

    def diag(self, X: ArrayLike) -> Array:
        X = as_rows(X)
        return jnp.asarray(self.variance)[..., None] * jnp.ones(len(X), X.dtype)

    def noise(self, X: ArrayLike) -> Array:
        X = as_rows(X)
        return jnp.zeros(len(X), X.dtype)

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        del columns
        return (Term(self.variance),)

    def state_space(self) -> StateSpace:
        return RotationSpace(0.0, (self.variance,), 0)


@pytree
class White(Kernel):
    r"""Noise that is independent between inputs, and between different sets of inputs.

    .. math:: k(x_i, x_j) = \sigma^2 \delta_{ij}

    ``kernel(X, X)`` is :math:`\sigma^2 I` when both arguments are the same *object*, and
    ``kernel(X1, X2)`` is zero otherwise, even where rows of X1 and X2 have the same values.
    ``jax.jit(kernel)(X, X)`` makes two objects of one: jit ``lambda X: kernel(X, X)`` instead.

    Args:
      variance: the noise variance :math:`\sigma^2`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp import kernels
      >>> X = jnp.array([0.0, 1.0])
      >>> kernels.White(0.5)(X, X).tolist(), kernels.White(0.5)(X, X.copy()).tolist()
      ([[0.5, 0.0], [0.0, 0.5]], [[0.0, 0.0], [0.0, 0.0]])
    """

    variance: ArrayLike = 1.0

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        same, A, B = X1 is X2, as_rows(X1), as_rows(X2)
        noise = jnp.eye(len(A), dtype=A.dtype) if same else jnp.zeros((len(A), len(B)), A.dtype)
        return as_matrix(self.variance) * noise

    def diag(self, X: ArrayLike) -> Array:
        return Constant(self.variance).diag(X)

    def noise(self, X: ArrayLike) -> Array:
        return self.diag(X)

    def state_space(self) -> StateSpace:
        raise TypeError(
            "the kernel White has no state-space form, because no state carries it from one time "
            "to the next: leave it out and put the noise into the likelihood"
        )


def _foreign_call(kernel: Any, X1: ArrayLike, X2: ArrayLike) -> Array:
    K = kernel(X1, X2)
    expected = (len(X1), len(X2))  # type: ignore[arg-type]
    if jnp.shape(K)[-2:] != expected:
        raise ValueError(
            f"the kernel {kernel!r} returned shape {jnp.shape(K)} for inputs of {expected[0]} and "
            f"{expected[1]} rows: it must return the matrix of covariances, of shape {expected}"
        )
    return K


def _foreign_diag(kernel: Any, X: ArrayLike) -> Array:
    if _is_tinygp(kernel):
        return jax.vmap(kernel.evaluate_diag)(jnp.asarray(X))
    if callable(getattr(kernel, "diag", None)):
        return kernel.diag(X)

    def variance(x: Array) -> Array:
        x = x[None]
        return _foreign_call(kernel, x, x)[..., 0, 0]

    return jax.vmap(variance, out_axes=-1)(jnp.asarray(X))


@pytree
class External(Kernel):
    """A foreign kernel that is a pytree, such as one of tinygp, with its leaves as data."""

    kernel: Any

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        return _foreign_call(self.kernel, X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        return _foreign_diag(self.kernel, X)

    def state_space(self) -> StateSpace:
        names = ("stationary_covariance", "observation_model", "transition_matrix")
        if not all(callable(getattr(self.kernel, name, None)) for name in names):
            return super().state_space()
        space = QuasisepSpace(self.kernel)
        jax.eval_shape(space.emission)  # refuses one that depends on the time
        return space

    def _described(self) -> str:
        kind = type(self.kernel)
        return f"the kernel {kind.__module__}.{kind.__name__}"


@pytree
class Function(Kernel):
    """A plain function as a kernel. It is static: JAX does not see what it closes over."""

    function: Callable[..., Any] = static()

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        return _foreign_call(self.function, X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        return _foreign_diag(self.function, X)


def _is_tinygp(kernel: Any) -> bool:
    return all(callable(getattr(kernel, name, None)) for name in ("evaluate", "evaluate_diag"))


def _has_ours(kernel: Any) -> bool:
    """Whether a sum or product of tinygp has a kernel of this module as one of its numbers."""
    parts = [getattr(kernel, name, None) for name in ("kernel1", "kernel2")]
    return isinstance(getattr(kernel, "value", None), Kernel) or any(
        map(_has_ours, filter(None, parts))
    )


def as_kernel(kernel: Any) -> Kernel:
    """Makes a :class:`Kernel` of anything that can serve as one.

    Args:
      kernel: a kernel of this module, returned unchanged; a tinygp kernel; or a callable
        ``kernel(X1, X2)`` that returns the matrix of covariances and may have a method
        ``diag(X)``. A callable that is a pytree, such as ``jax.tree_util.Partial``, keeps its
        leaves as hyperparameters; a plain function has none that JAX can see.

    Returns:
      The kernel, which composes with the others. Foreign kernels get the inputs as they are.
      What tinygp makes of ``theirs + ours``, where it takes ours for a number, is taken apart.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from numpyro_tsvgp import kernels
      >>> def brownian(scale, X1, X2):
      ...     return scale * jnp.minimum(X1[:, None], X2[None, :])
      >>> kernel = kernels.as_kernel(jax.tree_util.Partial(brownian, 2.0)) + kernels.RBF()
      >>> kernel.diag(jnp.array([0.5, 1.0])).tolist()
      [2.0, 3.0]
    """
    if isinstance(kernel, Kernel):
        return kernel
    if isinstance(kernel, type):
        name = kernel.__name__
        raise TypeError(f"got the class {name} instead of a kernel: did you mean {name}()?")
    if not callable(kernel):
        shape = getattr(kernel, "shape", None)
        if shape is not None:
            raise TypeError(
                f"cannot make a kernel of an array of shape {shape}: the kernel comes first, "
                "GP(kernel, X)"
            )
        raise TypeError(
            f"cannot make a kernel of {kernel!r}: pass a kernel of numpyro_tsvgp.kernels, a tinygp "
            "kernel, or a function kernel(X1, X2) that returns a matrix of shape (n1, n2)"
        )
    if _has_ours(kernel):
        combine = {"Sum": Sum, "Product": Product}.get(type(kernel).__name__)
        if combine is not None:
            return combine(as_kernel(kernel.kernel1), as_kernel(kernel.kernel2))
        return kernel.value
    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree_util.tree_structure(kernel))
    return Function(kernel) if is_leaf else External(kernel)
