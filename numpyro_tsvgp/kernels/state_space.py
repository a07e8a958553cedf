r"""State-space forms of kernels; see :mod:`numpyro_tsvgp.gaussian.state_space` for the contract.

Hyperparameters of a form have shape ``batch``, or ``(k,)`` once it is flattened. States are in
units of the process itself, so that in single precision nothing is far from one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_tsvgp.kernels.tree import pytree, static

__all__ = [
    "cosine_series",
    "IntegratedSpace",
    "LineSpace",
    "MaternSpace",
    "ProductSpace",
    "QuasisepSpace",
    "RotationSpace",
    "ScaledSpace",
    "SumSpace",
]


def _matrix(rows: list[list[Any]]) -> Array:
    """A matrix of arrays ``(k, b)`` that broadcast: ``(d, d, k, b)``."""
    flat = jnp.broadcast_arrays(*[jnp.asarray(x) for row in rows for x in row])
    return jnp.stack(flat).reshape(len(rows), len(rows[0]), *flat[0].shape)


def _column(hyperparameter: ArrayLike) -> Array:
    """A hyperparameter ``(k,)`` that multiplies times ``(b,)``."""
    return jnp.asarray(hyperparameter)[..., None]


def _floating(leaf: ArrayLike) -> Array:
    leaf = jnp.asarray(leaf)
    return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(float)


class _Form:
    """What forms have in common."""

    def flattened(self, flatten: Callable[[Array], Array]) -> Self:
        return jax.tree.map(lambda leaf: flatten(_floating(leaf)), self)


# ---- Matern ----------------------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gamma_integrals(highest: int, z: Array) -> tuple[Array, ...]:
    r"""The integrals :math:`\int_0^z u^k e^{-2u} \mathrm{d}u`, k = 0 ... ``highest``.

    To full relative precision: that of the highest power by a series where z is small, the others
    by a recurrence of positive terms.
    """
    power, decay = highest, jnp.exp(-2 * z)
    small, large = jnp.minimum(z, 1.0), jnp.maximum(z, 1.0)
    total = jnp.ones_like(z)
    for j in range(19 if z.dtype == jnp.float64 else 10, 0, -1):
        total = 1 + total * small * (2 / (power + 1 + j))
    series = small ** (power + 1) * decay * total / (power + 1)
    tail = jnp.ones_like(z)
    for j in range(power, 0, -1):
        tail = 1 + tail * large * (2 / j)
    closed = math.factorial(power) / 2 ** (power + 1) * (1 - decay * tail)
    found = [jnp.where(z < 1.0, series, closed)]
    for k in range(highest, 0, -1):
        found.append((2 * found[-1] + _weight(k, z, decay)) / k)
    return tuple(found[::-1])


def _weight(power: int, z: Array, decay: Array) -> Array:
    # Powers beyond the largest number would be infinity times zero.
    return jnp.minimum(z, 1e3) ** power * decay


@_gamma_integrals.defjvp
def _gamma_integrals_jvp(highest: int, primals: Any, tangents: Any) -> Any:
    (z,), (dz,) = primals, tangents
    decay = jnp.exp(-2 * z)
    found = _gamma_integrals(highest, z)
    return found, tuple(_weight(k, z, decay) * dz for k in range(highest + 1))


# With z = rate (t1 - t0) the transition is e^-z (I + z N + z^2/2 N^2) and the noise is
# q times the integral of a(u) a(u)^T, a(u) being the last column of the transition.
_NILPOTENT = {
    1: np.array([[0.0]]),
    2: np.array([[1.0, 1.0], [-1.0, -1.0]]),
    3: np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [-1.0, -3.0, -2.0]]),
}
_STATIONARY = {
    1: np.array([[1.0]]),
    2: np.eye(2),
    3: np.array([[1.0, 0.0, -1 / 3], [0.0, 1 / 3, 0.0], [-1 / 3, 0.0, 1.0]]),
}
_INTENSITY = {1: 2.0, 2: 4.0, 3: 16 / 3}


@pytree
class MaternSpace(_Form):
    r"""A Matérn function and its derivatives, in units of :math:`\sqrt{2\nu} / \ell`.

    Args:
      rate: :math:`\sqrt{2\nu} / \ell`.
      variance: the variance of the function.
      dim: :math:`\nu + 1/2`; 1, 2 or 3.
    """

    rate: ArrayLike
    variance: ArrayLike
    dim: int = static(default=1)

    def emission(self) -> Any:
        return np.eye(self.dim)[:, :1]

    def covariance(self, t: Array) -> Array:
        variance = _column(self.variance) * jnp.ones_like(t)
        return jnp.asarray(_STATIONARY[self.dim], variance.dtype)[..., None, None] * variance

    def step(self, t0: Array, t1: Array) -> tuple[Array, Array]:
        d, z = self.dim, _column(self.rate) * (t1 - t0)
        N = _NILPOTENT[d]
        decay = jnp.exp(-z)
        powers = [decay, decay * z, decay * z**2 / 2][:d]
        terms = [np.eye(d), N, N @ N][:d]
        parts_of_A = [
            jnp.asarray(term, z.dtype)[..., None, None] * power
            for term, power in zip(terms, powers, strict=True)
        ]
        A = sum(parts_of_A[1:], parts_of_A[0])
        # The last column of the transition, as polynomials in z.
        last = np.stack([term[:, -1] / math.factorial(j) for j, term in enumerate(terms)], -1)
        integrals = _gamma_integrals(2 * d - 2, z)
        scale = _INTENSITY[d] * _column(self.variance)
        entries: list[list[Any]] = [[None] * d for _ in range(d)]
        for i in range(d):
            for j in range(i + 1):
                product = np.convolve(last[i], last[j])
                parts = [float(c) * integrals[p] for p, c in enumerate(product) if c]
                entries[i][j] = entries[j][i] = scale * sum(parts[1:], parts[0])
        return A, _matrix(entries)


# ---- sinusoids -------------------------------------------------------------------------------


@pytree
class RotationSpace(_Form):
    r"""A constant and sinusoids of multiples of one frequency, with random amplitudes.

    .. math:: k(t, t') = \sum_j w_j \cos(j \omega (t - t'))

    Args:
      frequency: :math:`\omega`.
      weights: the variances :math:`w_j`, a tuple.
      first: the first j; the constant, j = 0, has one number in the state and others have two.
    """

    frequency: ArrayLike
    weights: tuple[ArrayLike, ...]
    first: int = static(default=1)

    @property
    def multiples(self) -> range:
        return range(self.first, self.first + len(self.weights))

    @property
    def dim(self) -> int:
        return sum(2 if j else 1 for j in self.multiples)

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each number in a state its j, and whether it is the second of two."""
        pairs = [(j, second) for j in self.multiples for second in range(2 if j else 1)]
        j, second = np.array(pairs).T
        return j, second.astype(bool)

    def emission(self) -> Any:
        return (~self._places()[1]).astype(float)[:, None]

    def covariance(self, t: Array) -> Array:
        j, _ = self._places()
        weights = jnp.stack(jnp.broadcast_arrays(*map(jnp.asarray, self.weights)))
        diagonal = weights[j - self.first][..., None] * jnp.ones_like(t)
        return _diagonal(diagonal)

    def step(self, t0: Array, t1: Array) -> tuple[Array, Array]:
        j, second = self._places()
        angle = _column(self.frequency) * (t1 - t0)
        angles = jnp.asarray(j, angle.dtype).reshape(-1, *[1] * angle.ndim) * angle
        # A rotation of each pair: sines with their signs next to the diagonal.
        beside = np.zeros((len(j), len(j)))
        for i in np.flatnonzero(second):
            beside[i - 1, i], beside[i, i - 1] = 1.0, -1.0
        signs = jnp.asarray(beside, angle.dtype).reshape(*beside.shape, *[1] * angle.ndim)
        A = _diagonal(jnp.cos(angles)) + signs * jnp.sin(angles)[:, None]
        return A, jnp.zeros_like(A)


def _diagonal(values: Array) -> Array:
    """Diagonal matrices of vectors ``(d, k, b)``."""
    d = values.shape[0]
    return jnp.eye(d, dtype=values.dtype).reshape(d, d, *[1] * (values.ndim - 1)) * values[:, None]


def cosine_series(correlation: Callable[[Array], Array], order: int) -> tuple[Array, ...]:
    r"""Weights of the cosine series of a function of an angle, :math:`0 \ldots` ``order``.

    .. math::
      c(\theta) = \sum_j w_j \cos j\theta, \qquad
      w_j = \frac{2 - [j = 0]}{\pi} \int_0^\pi c(\theta) \cos j\theta \, \mathrm{d}\theta

    by the trapezoidal rule, which for smooth periodic integrands is exact to rounding.

    Args:
      correlation: the function, of angles in the last axis.
      order: the last term.

    Returns:
      The weights, each of the shape that the function has without its last axis.
    """
    size = max(512, 4 * order)
    angle = 2 * math.pi * np.arange(size) / size
    values = correlation(jnp.asarray(angle))
    out = []
    for j in range(order + 1):
        wave = jnp.asarray(np.cos(j * angle) * ((2.0 if j else 1.0) / size), values.dtype)
        out.append(jnp.maximum((values * wave).sum(-1), 0.0))  # of a covariance none is negative
    return tuple(out)


# ---- trends ----------------------------------------------------------------------------------


@pytree
class LineSpace(_Form):
    """A line through the origin with a random slope; the state is its value and its slope."""

    variance: ArrayLike

    @property
    def dim(self) -> int:
        return 2

    def emission(self) -> Any:
        return np.array([1.0, 0.0])[:, None]

    def covariance(self, t: Array) -> Array:
        variance = _column(self.variance)
        return _matrix([[variance * t * t, variance * t], [variance * t, variance]])

    def step(self, t0: Array, t1: Array) -> tuple[Array, Array]:
        gap = (t1 - t0)[None]
        A = _matrix([[jnp.ones_like(gap), gap], [jnp.zeros_like(gap), jnp.ones_like(gap)]])
        return A, jnp.zeros_like(A)


@pytree
class IntegratedSpace(_Form):
    """Integrated Brownian motion that starts at an origin; the state is its value and its slope."""

    variance: ArrayLike
    origin: ArrayLike

    @property
    def dim(self) -> int:
        return 2

    def emission(self) -> Any:
        return np.array([1.0, 0.0])[:, None]

    def _since(self, t: Array) -> Array:
        return jnp.maximum(t - _column(self.origin), 0.0)

    def _grown(self, u: Array) -> Array:
        v = _column(self.variance)
        return _matrix([[v * u**3 / 3, v * u**2 / 2], [v * u**2 / 2, v * u]])

    def covariance(self, t: Array) -> Array:
        return self._grown(self._since(t))

    def step(self, t0: Array, t1: Array) -> tuple[Array, Array]:
        gap = self._since(t1) - self._since(t0)
        one, zero = jnp.ones_like(gap), jnp.zeros_like(gap)
        return _matrix([[one, gap], [zero, one]]), self._grown(gap)


# ---- combinations ----------------------------------------------------------------------------


def _block_diagonal(blocks: list[Array]) -> Array:
    """Matrices ``(d_i, d_i, k, b)`` on the diagonal of one; kernel axes may be 1."""
    tail = jnp.broadcast_shapes(*(block.shape[2:] for block in blocks))
    dims = [block.shape[0] for block in blocks]
    rows, start = [], 0
    for block, d in zip(blocks, dims, strict=True):
        block = jnp.broadcast_to(block, (d, d, *tail))
        after = sum(dims) - start - d
        rows.append(jnp.pad(block, [(0, 0), (start, after)] + [(0, 0)] * len(tail)))
        start += d
    return jnp.concatenate(rows)


def _kronecker(left: Array, right: Array) -> Array:
    """Products of all entries, ``(d1 d2, d1 d2, k, b)``."""
    product = left[:, None, :, None] * right[None, :, None, :]
    size = left.shape[0] * right.shape[0]
    return product.reshape(size, size, *product.shape[4:])


def _congruence(A: Array, C: Array) -> Array:
    return jnp.einsum("ij...,jk...,lk...->il...", A, C, A)


@pytree
class SumSpace(_Form):
    """The sum of two independent processes: their states side by side."""

    left: Any
    right: Any

    @property
    def dim(self) -> int:
        return self.left.dim + self.right.dim

    def flattened(self, flatten: Callable[[Array], Array]) -> SumSpace:
        return SumSpace(self.left.flattened(flatten), self.right.flattened(flatten))

    def emission(self) -> Any:
        left, right = self.left.emission(), self.right.emission()
        if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
            return np.concatenate([left, right])
        return jnp.concatenate([left, right])

    def covariance(self, t: Array) -> Array:
        return _block_diagonal([self.left.covariance(t), self.right.covariance(t)])

    def step(self, t0: Array, t1: Array) -> tuple[Array, Array]:
        parts = self.left.step(t0, t1), self.right.step(t0, t1)
        A, Q = zip(*parts, strict=True)
        return _block_diagonal(list(A)), _block_diagonal(list(Q))


@pytree
class ProductSpace(_Form):
    """The product of two independent processes: all products of a number of each state."""

    left: Any
    right: Any

    @property
    def dim(self) -> int:
        return self.left.dim * self.right.dim

    def flattened(self, flatten: Callable[[Array], Array]) -> ProductSpace:
        return ProductSpace(self.left.flattened(flatten), self.right.flattened(flatten))

    def emission(self) -> Any:
        left, right = self.left.emission(), self.right.emission()
        return (left[:, None] * right[None]).reshape(self.dim, -1)

    def covariance(self, t: Array) -> Array:
        return _kronecker(self.left.covariance(t), self.right.covariance(t))

    def step(self, t0: Array, t1: Array) -> tuple[Array, Array]:
        A1, Q1 = self.left.step(t0, t1)
        A2, Q2 = self.right.step(t0, t1)
        # C1 x C2 after the step, less what the transitions carried over; a sum, so that noise
        # which is small has no rounding error of what is large.
        carried = _congruence(A2, self.right.covariance(t0))
        Q = _kronecker(Q1, carried) + _kronecker(self.left.covariance(t1), Q2)
        return _kronecker(A1, A2), Q


@pytree
class ScaledSpace(_Form):
    """A process times a number."""

    space: Any
    scale: ArrayLike

    @property
    def dim(self) -> int:
        return self.space.dim

    def flattened(self, flatten: Callable[[Array], Array]) -> ScaledSpace:
        return ScaledSpace(self.space.flattened(flatten), flatten(_floating(self.scale)))

    def emission(self) -> Any:
        return self.space.emission()

    def covariance(self, t: Array) -> Array:
        return _column(self.scale) * self.space.covariance(t)

    def step(self, t0: Array, t1: Array) -> tuple[Array, Array]:
        A, Q = self.space.step(t0, t1)
        return A, _column(self.scale) * Q


# ---- tinygp ----------------------------------------------------------------------------------


def _dense(matrix: Any) -> Array:
    return matrix.to_dense() if hasattr(matrix, "to_dense") else jnp.asarray(matrix)


@pytree
class QuasisepSpace(_Form):
    """The form of a quasiseparable kernel of tinygp, in the matrices that the kernel names."""

    kernel: Any

    @property
    def dim(self) -> int:
        return jax.eval_shape(lambda: _dense(self.kernel.stationary_covariance())).shape[0]

    def flattened(self, flatten: Callable[[Array], Array]) -> QuasisepSpace:
        del flatten  # such a kernel has no batch
        return jax.tree.map(_floating, self)

    def emission(self) -> Any:
        try:
            # None in place of a time: whatever looks at it fails.
            h = self.kernel.observation_model(None)
        except Exception as error:
            raise TypeError(
                f"the observation_model of {type(self.kernel).__name__} depends on the input, for "
                "which Markov sites have no form"
            ) from error
        return jnp.asarray(h)[:, None]

    def covariance(self, t: Array) -> Array:
        stationary = _dense(self.kernel.stationary_covariance())
        return jnp.broadcast_to(stationary[..., None, None], (*stationary.shape, 1, *t.shape))

    def step(self, t0: Array, t1: Array) -> tuple[Array, Array]:
        stationary = _dense(self.kernel.stationary_covariance())
        # tinygp's matrix is that of the process backwards in time.
        back = jax.vmap(lambda a, b: _dense(self.kernel.transition_matrix(a, b)))(t0, t1)
        A = back.transpose(2, 1, 0)
        Q = stationary[..., None] - jnp.einsum("ijb,jk,lkb->ilb", A, stationary, A)
        still = t0 == t1
        A = jnp.where(still, jnp.eye(len(stationary))[..., None], A)
        return A[:, :, None], jnp.where(still, 0.0, 0.5 * (Q + Q.swapaxes(0, 1)))[:, :, None]
