r"""Covariance functions.

A kernel is an immutable pytree: its hyperparameters are leaves, so it can be built from
``numpyro.param`` and ``numpyro.sample`` values, differentiated, jitted and vmapped.

* ``kernel(X1, X2)`` has shape ``batch + (n1, n2)``, ``kernel.diag(X)`` has shape ``batch + (n,)``.
  Inputs have shape ``(n, d)``, or ``(n,)`` for ``d = 1``.
* The *last* axis of a ``lengthscale`` or ``period``, if there is one, is the input axis, of size 1
  or d. Axes before it are batch axes: ``()`` is isotropic, ``(d,)`` has one lengthscale for each
  input, ``(10, 1)`` is a batch of ten isotropic kernels and ``(10, d)`` of ten others.
* Every other hyperparameter has shape ``batch``. All of them broadcast together.
* ``active_dims`` names the columns of the inputs that the kernel sees, by a number, several, or a
  slice; d is then their number.
* Kernels add and multiply with each other, with numbers or arrays of shape ``batch``, and with
  whatever :func:`as_kernel` takes.
* ``kernel(X, X)``, with the very same object twice, is the covariance of one set of function
  values: squared distances are exactly zero on its diagonal and :class:`White` adds its noise.
* ``kernel.scaled(X1, X2)`` and ``kernel.noise(X)`` are parts of these that save work where a
  kernel can name them. One that cannot, such as a function of yours, need not.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

_T = TypeVar("_T")

# Hyperparameters that have no meaning below zero.
_NOT_NEGATIVE = ("variance", "lengthscale", "period", "alpha", "offset", "scale", "kappa")

# With few columns, squared norms are two more columns of the product of distances: for many rows
# that is less than adding them to it, and so is the gradient.
_FEW_COLUMNS = 64


def _static(*, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(_static,))
def _pytree(cls: type[_T]) -> type[_T]:
    # No field-wise `==`: the fields are arrays, and arrays have no single truth value.
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    data = tuple(field.name for field in fields if not field.metadata.get("static"))
    static = tuple(field.name for field in fields if field.metadata.get("static"))

    def flatten(kernel: _T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(kernel, n) for n in data), tuple(getattr(kernel, n) for n in static)

    def flatten_with_keys(kernel: _T) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        leaves, meta = flatten(kernel)
        keys = (jax.tree_util.GetAttrKey(n) for n in data)
        return tuple(zip(keys, leaves, strict=True)), meta

    def unflatten(meta: tuple[Any, ...], leaves: Any) -> _T:
        # Not by the constructor, which refuses what cannot be a hyperparameter: the gradient of a
        # kernel is a kernel too, and may well be negative.
        kernel = object.__new__(cls)
        for name, value in (*zip(data, leaves, strict=True), *zip(static, meta, strict=True)):
            object.__setattr__(kernel, name, value)
        return kernel

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


@dataclasses.dataclass(frozen=True)
class _Slice:
    """A slice of columns that can be hashed, which before Python 3.12 a ``slice`` cannot."""

    start: int | None
    stop: int | None
    step: int | None

    @classmethod
    def of(cls, columns: slice) -> "_Slice":
        limits = (columns.start, columns.stop, columns.step)
        return cls(*(None if limit is None else operator.index(limit) for limit in limits))

    def __repr__(self) -> str:
        return repr(slice(self.start, self.stop, self.step))

    def columns(self, d: int) -> tuple[int, ...]:
        return tuple(range(*slice(self.start, self.stop, self.step).indices(d)))


_Dims = int | Sequence[int] | slice | None


def _matrix(batched: ArrayLike) -> Array:
    """Lets a hyperparameter of shape ``batch`` multiply matrices."""
    return jnp.asarray(batched)[..., None, None]


def _rows(X: ArrayLike) -> Array:
    """Inputs as a floating-point matrix of shape ``(n, d)``."""
    X = jnp.asarray(X)
    if X.ndim not in (1, 2):
        raise ValueError(f"inputs must have shape (n,) or (n, d), got {X.shape}")
    X = X if jnp.issubdtype(X.dtype, jnp.floating) else X.astype(float)
    return X[:, None] if X.ndim == 1 else X


def _inner(a: Array, b: Array) -> Array:
    # Accelerators multiply in reduced precision by default, which distances do not survive.
    return jnp.matmul(a, jnp.swapaxes(b, -1, -2), precision=lax.Precision.HIGHEST)


@jax.custom_jvp
def _gram(a: Array) -> Array:
    """Inner products of the rows of ``a``; symmetry makes its gradient one product, not two."""
    return _inner(a, a)


@_gram.defjvp
def _gram_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    half = _inner(primals[0], tangents[0])
    return _gram(*primals), half + jnp.swapaxes(half, -1, -2)


def _squared_distance(a: Array, b: Array, unit: ArrayLike = 1.0) -> Array:
    """Squared distances between the rows of ``a`` and of ``b`` in ``unit``, by one product."""
    if a.shape[-1] == 1:
        return jnp.square(a - jnp.swapaxes(b, -1, -2)) / unit
    norm_a = jnp.sum(a * a, -1, keepdims=True)
    if a is b:
        s = (norm_a + jnp.swapaxes(norm_a, -1, -2) - 2.0 * _gram(a)) / unit
        return jnp.where(jnp.eye(a.shape[-2], dtype=bool), 0.0, s)
    norm_b = jnp.sum(b * b, -1, keepdims=True)
    if a.shape[-1] <= _FEW_COLUMNS:
        one_a, one_b = jnp.ones_like(norm_a), jnp.ones_like(norm_b)
        left = jnp.concatenate([-2.0 * a, norm_a, one_a], -1)
        # The unit goes to the rows of b, which are few, so that its gradient is a sum over them.
        s = _inner(left, jnp.concatenate([b, one_b, norm_b], -1) / unit)
    else:
        s = (norm_a + jnp.swapaxes(norm_b, -1, -2) - 2.0 * _inner(a, b)) / unit
    # Rounding can make s negative. Clip the value but differentiate the polynomial itself, whose
    # derivatives of every order are right at coincident points too.
    return s + lax.stop_gradient(jnp.maximum(s, 0.0) - s)


def _pair(function: Callable[[Array], _T], A: Array, B: Array) -> tuple[_T, _T]:
    """Maps both inputs, so that two names of one object remain two names of one object."""
    a = function(A)
    return a, a if B is A else function(B)


def _centred(A: Array, B: Array) -> tuple[Array, Array]:
    # Stationary kernels do not see a shift, but rounding does. As the shift has no effect,
    # neither has its gradient.
    centre = lax.stop_gradient(jnp.mean(B, axis=0))
    return _pair(lambda X: X - centre, A, B)


def _check_not_negative(value: Any, what: str) -> None:
    if not isinstance(value, jax.core.Tracer) and np.any(np.asarray(value) < 0):
        raise ValueError(f"{what} {value}, which is negative: the result is not a covariance")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number, np.ndarray, jax.Array))


class Kernel:
    """Base class of all kernels: the algebra, and the two methods that a kernel has."""

    # Without this, `np.float64(2.0) * kernel` is NumPy's attempt to make an array of it.
    __array_ufunc__ = None

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

    def __add__(self, other: Any) -> "Kernel":
        if _is_number(other):
            _check_not_negative(other, "a kernel plus")
            return Sum(self, Constant(other))
        return Sum(self, as_kernel(other))

    def __radd__(self, other: Any) -> "Kernel":
        if isinstance(other, int) and other == 0:  # where the built-in `sum` starts
            return self
        return self + other if _is_number(other) else Sum(as_kernel(other), self)

    def __mul__(self, other: Any) -> "Kernel":
        if _is_number(other):
            _check_not_negative(other, "a kernel times")
            return Scaled(self, other)
        return Product(self, as_kernel(other))

    def __rmul__(self, other: Any) -> "Kernel":
        return self * other if _is_number(other) else Product(as_kernel(other), self)


@_pytree
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


@_pytree
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


@_pytree
class Scaled(Kernel):
    """A kernel times a number, or times an array of shape ``batch``."""

    kernel: Kernel
    scale: ArrayLike

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        return _matrix(self.scale) * self.kernel(X1, X2)

    def scaled(self, X1: ArrayLike, X2: ArrayLike) -> tuple[ArrayLike, Array]:
        scale, matrix = self.kernel.scaled(X1, X2)
        return jnp.asarray(self.scale) * scale, matrix

    def diag(self, X: ArrayLike) -> Array:
        return jnp.asarray(self.scale)[..., None] * self.kernel.diag(X)

    def noise(self, X: ArrayLike) -> Array:
        return jnp.asarray(self.scale)[..., None] * self.kernel.noise(X)


@_pytree
class Constant(Kernel):
    r"""Covariance of a constant function with a random value.

    .. math:: k(x, x') = \sigma^2

    Args:
        variance: :math:`\sigma^2`.

    Example:
        >>> from numpyro_tsvgp import kernels
        >>> kernels.Constant(2.0).diag([0.0, 1.0]).tolist()
        [2.0, 2.0]
    """

    variance: ArrayLike = 1.0

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        X1, X2 = _rows(X1), _rows(X2)
        return _matrix(self.variance) * jnp.ones((len(X1), len(X2)), X1.dtype)

    def diag(self, X: ArrayLike) -> Array:
        X = _rows(X)
        return jnp.asarray(self.variance)[..., None] * jnp.ones(len(X), X.dtype)

    def noise(self, X: ArrayLike) -> Array:
        X = _rows(X)
        return jnp.zeros(len(X), X.dtype)


@_pytree
class White(Kernel):
    r"""Noise that is independent between inputs, and between different sets of inputs.

    .. math:: k(x_i, x_j) = \sigma^2 \delta_{ij}

    ``kernel(X, X)`` is :math:`\sigma^2 I` when both arguments are the same *object*, and
    ``kernel(X1, X2)`` is zero otherwise, even where rows of X1 and X2 have the same values.
    ``jax.jit(kernel)(X, X)`` makes two objects of one: jit ``lambda X: kernel(X, X)`` instead.

    Args:
        variance: the noise variance :math:`\sigma^2`.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tsvgp import kernels
        >>> X = jnp.array([0.0, 1.0])
        >>> kernels.White(0.5)(X, X).tolist(), kernels.White(0.5)(X, X.copy()).tolist()
        ([[0.5, 0.0], [0.0, 0.5]], [[0.0, 0.0], [0.0, 0.0]])
    """

    variance: ArrayLike = 1.0

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        same, A, B = X1 is X2, _rows(X1), _rows(X2)
        noise = jnp.eye(len(A), dtype=A.dtype) if same else jnp.zeros((len(A), len(B)), A.dtype)
        return _matrix(self.variance) * noise

    def diag(self, X: ArrayLike) -> Array:
        return Constant(self.variance).diag(X)

    def noise(self, X: ArrayLike) -> Array:
        return self.diag(X)


class _Leaf(Kernel):
    """A kernel with hyperparameters that looks at the values of its inputs."""

    lengthscale: ArrayLike
    variance: ArrayLike
    active_dims: _Dims

    def __post_init__(self) -> None:
        super().__post_init__()
        # Static metadata of a pytree must be hashable.
        if isinstance(self.active_dims, slice):
            object.__setattr__(self, "active_dims", _Slice.of(self.active_dims))
        elif self.active_dims is not None and not isinstance(self.active_dims, _Slice):
            dims = tuple(operator.index(i) for i in np.atleast_1d(np.asarray(self.active_dims)))
            if not dims:
                raise ValueError(f"{type(self).__name__}: active_dims is empty")
            object.__setattr__(self, "active_dims", dims)

    def _inputs(self, X: ArrayLike) -> Array:
        X, dims = _rows(X), self.active_dims
        if dims is None:
            return X
        if isinstance(dims, _Slice):
            name, dims = f"active_dims {dims}", dims.columns(X.shape[1])
            if not dims:
                raise IndexError(
                    f"{type(self).__name__}: {name} names none of the {X.shape[1]} columns of the "
                    "inputs"
                )
        assert isinstance(dims, tuple)
        if not all(-X.shape[1] <= i < X.shape[1] for i in dims):  # JAX would clamp in silence
            raise IndexError(
                f"{type(self).__name__}: active_dims {dims} out of range for inputs with "
                f"{X.shape[1]} columns"
            )
        return X[:, np.array(dims)]

    def _per_input(self, name: str, X: Array) -> Array:
        """A lengthscale or period, of shape ``batch + (1, 1)`` or ``batch + (1, d)``."""
        value, d = jnp.atleast_1d(getattr(self, name)), X.shape[-1]
        if value.shape[-1] not in (1, d):
            raise ValueError(
                f"{type(self).__name__}: {name} has shape {value.shape}, but its last axis is the "
                f"input axis and must have size 1 or d = {d}. A batch of isotropic kernels is "
                f"written {name}[:, None]."
            )
        return value[..., None, :]

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        scale, matrix = self.scaled(X1, X2)
        return _matrix(scale) * matrix

    def scaled(self, X1: ArrayLike, X2: ArrayLike) -> tuple[ArrayLike, Array]:
        same, A = X1 is X2, self._inputs(X1)
        B = A if same else self._inputs(X2)
        if A.shape[1] != B.shape[1]:
            raise ValueError(
                f"{type(self).__name__}: inputs have different numbers of columns, "
                f"{A.shape[1]} and {B.shape[1]}"
            )
        return self.variance, self._correlation(A, B)

    def noise(self, X: ArrayLike) -> Array:
        return Constant().noise(X)

    def _correlation(self, A: Array, B: Array) -> Array:
        raise NotImplementedError


class Stationary(_Leaf):
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
        A, B = _centred(A, B)
        if scale.shape[-1] == 1:  # one product serves the whole batch
            return self._shape(_squared_distance(A, B, jnp.square(scale)))
        return self._shape(_squared_distance(*_pair(lambda X: X / scale, A, B)))

    def _shape(self, s: Array) -> Array:
        """The correlation at squared, scaled distance ``s``."""
        raise NotImplementedError


@_pytree
class RBF(Stationary):
    r"""Squared exponential kernel, of infinitely smooth functions.

    .. math:: k(x, x') = \sigma^2 \exp\left(-\tfrac12 r^2\right), \quad
        r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2

    Args:
        lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
        variance: :math:`\sigma^2`, of shape ``batch``.
        active_dims: the columns of the inputs to use; all of them by default.

    Example:
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
    active_dims: _Dims = _static(default=None)

    def _shape(self, s: Array) -> Array:
        return jnp.exp(-0.5 * s)


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


@_pytree
class Matern12(Stationary):
    r"""Matérn-1/2 or exponential kernel, of continuous functions without derivatives.

    .. math:: k(x, x') = \sigma^2 e^{-r}, \quad r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2

    It has no derivative at :math:`x = x'`; there, automatic differentiation returns zero.

    Args:
        lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
        variance: :math:`\sigma^2`, of shape ``batch``.
        active_dims: the columns of the inputs to use; all of them by default.

    Example:
        >>> from numpyro_tsvgp import kernels
        >>> round(kernels.Matern12(lengthscale=2.0)([0.0], [2.0]).item(), 4)
        0.3679
    """

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: _Dims = _static(default=None)

    def _shape(self, s: Array) -> Array:
        return _matern12(s)


@_pytree
class Matern32(Stationary):
    r"""Matérn-3/2 kernel, of functions with one derivative.

    .. math:: k(x, x') = \sigma^2 (1 + \sqrt3 r) e^{-\sqrt3 r}, \quad
        r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2

    Args:
        lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
        variance: :math:`\sigma^2`, of shape ``batch``.
        active_dims: the columns of the inputs to use; all of them by default.

    Example:
        >>> from numpyro_tsvgp import kernels
        >>> round(kernels.Matern32(lengthscale=2.0)([0.0], [2.0]).item(), 4)
        0.4834
    """

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: _Dims = _static(default=None)

    def _shape(self, s: Array) -> Array:
        return _matern32(3.0 * s)


@_pytree
class Matern52(Stationary):
    r"""Matérn-5/2 kernel, of functions with two derivatives.

    .. math:: k(x, x') = \sigma^2 (1 + \sqrt5 r + \tfrac53 r^2) e^{-\sqrt5 r}, \quad
        r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2

    Args:
        lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
        variance: :math:`\sigma^2`, of shape ``batch``.
        active_dims: the columns of the inputs to use; all of them by default.

    Example:
        >>> from numpyro_tsvgp import kernels
        >>> round(kernels.Matern52(lengthscale=2.0)([0.0], [2.0]).item(), 4)
        0.524
    """

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: _Dims = _static(default=None)

    def _shape(self, s: Array) -> Array:
        return _matern52(5.0 * s)


@_pytree
class RationalQuadratic(Stationary):
    r"""Rational quadratic kernel: a mixture of RBF kernels of many lengthscales.

    .. math:: k(x, x') = \sigma^2 \left(1 + \frac{r^2}{2\alpha}\right)^{-\alpha}, \quad
        r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2

    Args:
        lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
        alpha: :math:`\alpha`, of shape ``batch``; the kernel tends to :class:`RBF` as it grows.
        variance: :math:`\sigma^2`, of shape ``batch``.
        active_dims: the columns of the inputs to use; all of them by default.

    Example:
        >>> from numpyro_tsvgp import kernels
        >>> round(kernels.RationalQuadratic(lengthscale=1.0, alpha=1.0)([0.0], [2.0]).item(), 4)
        0.3333
    """

    lengthscale: ArrayLike = 1.0
    alpha: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: _Dims = _static(default=None)

    def _shape(self, s: Array) -> Array:
        alpha = _matrix(self.alpha)
        return jnp.exp(-alpha * jnp.log1p(s / (2.0 * alpha)))


@_pytree
class Periodic(Stationary):
    r"""Kernel of functions that repeat themselves.

    .. math:: k(x, x') = \sigma^2 \exp\left(
        -2 \sum_d \sin^2\left(\pi (x_d - x'_d) / p_d\right) / \ell_d^2 \right)

    Args:
        lengthscale: :math:`\ell`, relative to the period, of shape ``()``, ``(d,)``,
            ``batch + (1,)`` or ``batch + (d,)``.
        period: :math:`p`, of such a shape too.
        variance: :math:`\sigma^2`, of shape ``batch``.
        active_dims: the columns of the inputs to use; all of them by default.

    Example:
        >>> from numpyro_tsvgp import kernels
        >>> round(kernels.Periodic(period=3.0)([0.0], [6.0]).item(), 4)
        1.0

    References:
        MacKay, `Introduction to Gaussian processes
        <https://www.inference.org.uk/mackay/gpB.pdf>`_, 1998.
    """

    lengthscale: ArrayLike = 1.0
    period: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: _Dims = _static(default=None)

    def _correlation(self, A: Array, B: Array) -> Array:
        scale = self._per_input("lengthscale", A)
        frequency = 2.0 * math.pi / self._per_input("period", A)

        def on_circles(X: Array) -> Array:
            # The squared distance of two points on a circle of radius 1/l is (2 sin(.)/l)^2.
            angle = X * frequency
            return jnp.concatenate([jnp.cos(angle) / scale, jnp.sin(angle) / scale], -1)

        return jnp.exp(-0.5 * _squared_distance(*_pair(on_circles, *_centred(A, B))))


@_pytree
class Cosine(Stationary):
    r"""Kernel of sinusoids of one frequency, with random amplitude and phase.

    .. math:: k(x, x') = \sigma^2 \cos\left(2\pi \sum_d (x_d - x'_d) / \ell_d\right)

    Args:
        lengthscale: :math:`\ell`, the wavelength, of shape ``()``, ``(d,)``, ``batch + (1,)`` or
            ``batch + (d,)``.
        variance: :math:`\sigma^2`, of shape ``batch``.
        active_dims: the columns of the inputs to use; all of them by default.

    Example:
        >>> from numpyro_tsvgp import kernels
        >>> round(kernels.Cosine(lengthscale=4.0)([0.0], [2.0]).item(), 4)
        -1.0
    """

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: _Dims = _static(default=None)

    def _correlation(self, A: Array, B: Array) -> Array:
        scale = self._per_input("lengthscale", A)
        u, v = _pair(lambda X: jnp.sum(X / scale, -1), *_centred(A, B))
        return jnp.cos(2.0 * math.pi * (u[..., :, None] - v[..., None, :]))


@_pytree
class Linear(_Leaf):
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
    active_dims: _Dims = _static(default=None)

    def diag(self, X: ArrayLike) -> Array:
        X = self._inputs(X)
        squares = jnp.sum(jnp.square(X / self._per_input("lengthscale", X)), -1)
        return jnp.asarray(self.variance)[..., None] * squares

    def _correlation(self, A: Array, B: Array) -> Array:
        scale = self._per_input("lengthscale", A)
        return _inner(*_pair(lambda X: X / scale, A, B))


@_pytree
class Polynomial(_Leaf):
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

    degree: int = _static(default=2)
    offset: ArrayLike = 1.0
    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: _Dims = _static(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if operator.index(self.degree) < 1:
            raise ValueError(f"Polynomial: degree must be a positive integer, got {self.degree}")

    def diag(self, X: ArrayLike) -> Array:
        squares = Linear(self.lengthscale, 1.0, self.active_dims).diag(X)
        powers = (squares + jnp.asarray(self.offset)[..., None]) ** self.degree
        return jnp.asarray(self.variance)[..., None] * powers

    def _correlation(self, A: Array, B: Array) -> Array:
        scale = self._per_input("lengthscale", A)
        return (_inner(*_pair(lambda X: X / scale, A, B)) + _matrix(self.offset)) ** self.degree


@_pytree
class Group(_Leaf):
    r"""Kernel of independent effects of groups: inputs covary if they are equal, and only then.

    .. math:: k(x, x') = \sigma^2 \, [x = x']

    The inputs are names of groups, as numbers; with several columns all of them must be equal.
    Unlike :class:`White` this is a function of the values: two data points of one group share its
    effect, and so do data and predictions.

    Random effects of ``G`` groups are a GP at the names of the groups, and ``b[g]`` in the
    likelihood for data with names ``g``::

        b = numpyro.sample("b", GP(tau**2 * kernels.Group(), jnp.arange(G)))

    Products with other kernels vary by group: for inputs with the columns ``(group, x)``,
    ``Group(active_dims=0) * Linear(active_dims=1)`` are random slopes, and with :class:`RBF` in
    place of :class:`Linear` there is one smooth function for each group.

    The derivative in the inputs is zero. Put inducing inputs at names of groups and keep them
    there (``learn_inducing=False``).

    Args:
        variance: :math:`\sigma^2`, of shape ``batch``.
        active_dims: the columns of the inputs to use; all of them by default.

    Example:
        >>> from numpyro_tsvgp import kernels
        >>> kernels.Group(0.5)([3, 4, 3], [3, 5]).tolist()
        [[0.5, 0.0], [0.0, 0.0], [0.5, 0.0]]
        >>> slopes = kernels.Group(active_dims=0) * kernels.Linear(active_dims=1)
        >>> slopes([[0, 2.0], [1, 2.0]], [[0, 3.0]]).tolist()
        [[6.0], [0.0]]

    References:
        Gelman and Hill, *Data Analysis Using Regression and Multilevel/Hierarchical Models*, 2007,
        chapters 12 and 13.
    """

    variance: ArrayLike = 1.0
    active_dims: _Dims = _static(default=None)

    def diag(self, X: ArrayLike) -> Array:
        return Constant(self.variance).diag(X)

    def _correlation(self, A: Array, B: Array) -> Array:
        # One column after the other: no array of shape (n1, n2, d).
        equal = (A[:, None, i] == B[None, :, i] for i in range(A.shape[1]))
        return functools.reduce(operator.and_, equal).astype(A.dtype)


@_pytree
class Coregion(_Leaf):
    r"""Covariance between levels of a category, which is the input: a matrix of any kind.

    .. math:: k(x, x') = B_{x x'}, \quad B = W W^\top + \operatorname{diag}(\kappa)

    The input is one column of whole numbers from 0 to P - 1, rounded to the nearest. Times another
    kernel it is the intrinsic model of coregionalization, of P outputs that are mixtures of R
    functions: for inputs with the columns ``(output, x)``,
    ``Coregion(W, kappa, active_dims=0) * RBF(active_dims=1)``.

    As with :class:`Group`, which it is for ``W = 0``, the derivative in the inputs is zero.

    Args:
        W: :math:`W`, of shape ``(P, R)`` or ``batch + (P, R)``: levels with similar rows covary.
        kappa: :math:`\kappa`, not negative: a number, or of shape ``(P,)``, ``batch + (1,)`` or
            ``batch + (P,)``. It is what a level has for itself.
        active_dims: the column of the inputs to use, if they have more than one.

    Raises:
        IndexError: if an input is none of 0, ..., P - 1. Inside of ``jax.jit``, where values are
            not known, its covariances are NaN.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tsvgp import kernels
        >>> kernel = kernels.Coregion(W=jnp.array([[1.0], [2.0], [0.0]]), kappa=0.5)
        >>> kernel([0, 1, 2], [0, 1, 2]).tolist()
        [[1.5, 2.0, 0.0], [2.0, 4.5, 0.0], [0.0, 0.0, 0.5]]

    References:
        Álvarez, Rosasco and Lawrence, `Kernels for Vector-Valued Functions: a Review
        <https://arxiv.org/abs/1106.6251>`_, 2012, section 4.2.
    """

    variance = 1.0  # not a field: `W` and `kappa` have it

    W: ArrayLike
    kappa: ArrayLike = 0.0
    active_dims: _Dims = _static(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if jnp.ndim(self.W) < 2:
            raise ValueError(
                f"Coregion: W has shape {jnp.shape(self.W)}, but must have shape (P, R), with one "
                "row for each level. One column is written W[:, None]."
            )
        levels = jnp.shape(self.W)[-2]
        if jnp.ndim(self.kappa) and jnp.shape(self.kappa)[-1] not in (1, levels):
            raise ValueError(
                f"Coregion: kappa has shape {jnp.shape(self.kappa)}, but its last axis must have "
                f"size 1 or {levels}, the number of rows of W"
            )

    def diag(self, X: ArrayLike) -> Array:
        w, kappa, _ = self._at(self._inputs(X))
        return jnp.sum(jnp.square(w), -1) + kappa

    def _correlation(self, A: Array, B: Array) -> Array:
        (a, kappa, i), (b, _, j) = _pair(self._at, A, B)
        # Products of rows of W rather than entries of B: their gradient has n R numbers to add up
        # where that of the entries has n^2.
        return _inner(a, b) + kappa[..., None] * (i[:, None] == j)

    def _at(self, X: Array) -> tuple[Array, Array, Array]:
        """Rows of W, entries of kappa, and levels, at inputs of shape ``(n, 1)``."""
        if X.shape[1] != 1:
            raise ValueError(
                f"Coregion: inputs have {X.shape[1]} columns, but the level is one; name it by "
                "active_dims"
            )
        W, kappa = (jnp.asarray(x, jnp.result_type(x, float)) for x in (self.W, self.kappa))
        levels = W.shape[-2]
        index = jnp.rint(X[:, 0])
        known = (index >= 0) & (index < levels)
        if not isinstance(known, jax.core.Tracer) and not known.all():
            wrong = X[~known, 0][0]
            raise IndexError(
                f"Coregion: {wrong} is not a level, which are 0, ..., {levels - 1} for W of shape "
                f"{W.shape}"
            )
        index = jnp.where(known, index, levels).astype(int)
        kappa = jnp.broadcast_to(kappa, (*kappa.shape[:-1], levels))
        # A level that does not exist is a NaN, and not, as JAX would have it, the last one.
        return (
            jnp.take(W, index, axis=-2, mode="fill", fill_value=jnp.nan),
            jnp.take(kappa, index, axis=-1, mode="fill", fill_value=jnp.nan),
            index,
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


@_pytree
class External(Kernel):
    """A foreign kernel that is a pytree, such as one of tinygp, with its leaves as data."""

    kernel: Any

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        return _foreign_call(self.kernel, X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        return _foreign_diag(self.kernel, X)


@_pytree
class Function(Kernel):
    """A plain function as a kernel. It is static: JAX does not see what it closes over."""

    function: Callable[..., Any] = _static()

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        return _foreign_call(self.function, X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        return _foreign_diag(self.function, X)


def _is_tinygp(kernel: Any) -> bool:
    return all(callable(getattr(kernel, name, None)) for name in ("evaluate", "evaluate_diag"))


def as_kernel(kernel: Any) -> Kernel:
    """Makes a :class:`Kernel` of anything that can serve as one.

    Args:
        kernel: a kernel of this module, returned unchanged; a tinygp kernel; or a callable
            ``kernel(X1, X2)`` that returns the matrix of covariances and may have a method
            ``diag(X)``. A callable that is a pytree, such as ``jax.tree_util.Partial``, keeps its
            leaves as hyperparameters; a plain function has none that JAX can see.

    Returns:
        The kernel, which composes with the others. Foreign kernels get the inputs as they are.
        (Write ``as_kernel(theirs) + ours``: tinygp takes what it is added to for a number.)

    Example:
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
        raise TypeError(
            f"cannot make a kernel of {kernel!r}: pass a kernel of numpyro_tsvgp.kernels, a tinygp "
            "kernel, or a function kernel(X1, X2) that returns a matrix of shape (n1, n2)"
        )
    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree_util.tree_structure(kernel))
    return Function(kernel) if is_leaf else External(kernel)
