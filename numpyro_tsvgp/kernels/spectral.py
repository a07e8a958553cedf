r"""Functions drawn from kernels: features whose products are covariances.

.. math:: k(x, x') \approx \phi(x)^\top \phi(x'), \qquad
  f(x) = \phi(x)^\top \theta, \quad \theta \sim \mathcal{N}(0, I)

A stationary kernel is the Fourier transform of its spectral density, so it is an average of cosines
of the difference of its inputs over random frequencies (Bochner). Each frequency makes a pair of
features, a cosine and a sine, which have the variance of the kernel exactly. The spectral density
of a product of kernels is that of the sum of their frequencies. Kernels of finitely many functions,
such as :class:`~numpyro_tsvgp.kernels.Linear`, have exact features, and those of a product are all
products.

A kernel says what it is made of (``spectral_terms``): a sum of terms, each a variance times random
frequencies times exact features. Frequencies are functions of uniform numbers, which come from one
randomly shifted lattice instead of being independent: their averages, and so the covariances, are
closer to the integrals for it.

High frequencies are rare, and yet they are what is left of a function where data nearly tell it: an
error of the covariance that no one sees of the prior shows in the variance next to the data. So
frequencies are drawn from a wider distribution than the spectral density, and weighted for it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import gammainc, ndtri

from numpyro_tsvgp.kernels.distance import as_rows, inner

__all__ = [
    "Frequencies",
    "RandomFeatures",
    "Term",
    "draw_features",
    "gamma_quantiles",
    "harmonics",
    "outer",
    "product",
    "wide_gamma",
    "wide_normal",
]


class Frequencies(NamedTuple):
    """Random frequencies of one stationary kernel.

    Attributes:
      coordinates: how many uniform numbers make one frequency.
      of: a function of such numbers, ``(count, coordinates)``, that gives frequencies of shape
        ``batch + (count, columns)`` and their weights of shape ``batch + (count,)``: the spectral
        density over the density that they are drawn from.
    """

    coordinates: int
    of: Callable[[Array], tuple[Array, Array]]


class Term(NamedTuple):
    """One term of a kernel: a variance times stationary correlations times exact features.

    Attributes:
      variance: the variance, of shape ``batch``.
      frequencies: one for each stationary factor.
      exact: kernels with a method ``exact_features``, whose variance is in ``variance``.
    """

    variance: Any
    frequencies: tuple[Frequencies, ...] = ()
    exact: tuple[Any, ...] = ()


def product(left: Sequence[Term], right: Sequence[Term]) -> tuple[Term, ...]:
    """The terms of a product of two kernels."""
    return tuple(
        Term(
            jnp.asarray(a.variance) * jnp.asarray(b.variance),
            a.frequencies + b.frequencies,
            a.exact + b.exact,
        )
        for a in left
        for b in right
    )


class _Block(NamedTuple):
    """Features of one term.

    Frequencies have shape ``batch + (count, columns)``, amplitudes ``batch + (count,)``.
    """

    variance: Array
    frequencies: Array | None
    amplitudes: Array | None
    exact: tuple[Any, ...]

    def __call__(self, X: Array, centre: Any) -> Array:
        rows = as_rows(X)
        parts = [jnp.sqrt(self.variance)[..., None, None] * jnp.ones((len(rows), 1), rows.dtype)]
        parts += [kernel.exact_features(X) for kernel in self.exact]
        if self.frequencies is not None:
            # A shift of the inputs changes no correlation, and keeps large angles from rounding.
            angles = inner(rows - centre, self.frequencies.astype(rows.dtype))
            size = self.amplitudes[..., None, :].astype(rows.dtype)  # type: ignore[index]
            parts.append(jnp.concatenate([size * jnp.cos(angles), size * jnp.sin(angles)], -1))
        return functools.reduce(outer, parts)


class RandomFeatures(NamedTuple):
    """A feature map of a kernel, which stays the same at every call: a pytree.

    Attributes:
      blocks: the features of each term of the kernel.
      centre: where angles are measured from.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from numpyro_tsvgp import kernels
      >>> X = jnp.linspace(0.0, 3.0, 50)
      >>> kernel = kernels.RBF(0.5) + kernels.Linear()
      >>> phi = kernel.random_features(jax.random.key(0), 256, 1)(X)
      >>> phi.shape
      (50, 513)
      >>> bool(jnp.abs(phi @ phi.T - kernel(X, X)).max() < 0.02)
      True
    """

    blocks: tuple[_Block, ...]
    centre: Any

    def __call__(self, X: Array) -> Array:
        """Features of shape ``batch + (n, size)``."""
        parts = [block(X, self.centre) for block in self.blocks]
        batch = jnp.broadcast_shapes(*(part.shape[:-2] for part in parts))
        return jnp.concatenate([jnp.broadcast_to(p, batch + p.shape[-2:]) for p in parts], -1)


def draw_features(terms: Sequence[Term], key: Array, count: int, centre: Any) -> RandomFeatures:
    """Draws the frequencies of all terms.

    Args:
      terms: the spectral terms of a kernel.
      key: random key.
      count: frequencies of each term.
      centre: where angles are measured from, a number or an array of shape ``(columns,)``.

    Returns:
      The feature map.
    """
    blocks = []
    for key_of_term, term in zip(jax.random.split(key, len(terms)), terms, strict=True):
        frequencies, amplitudes = None, None
        if term.frequencies:
            stops = np.cumsum([part.coordinates for part in term.frequencies])
            uniform = _lattice(key_of_term, count, int(stops[-1]))
            parts = [
                part.of(uniform[:, stop - part.coordinates : stop])
                for part, stop in zip(term.frequencies, stops, strict=True)
            ]
            frequencies = functools.reduce(operator.add, [part[0] for part in parts])
            weights = functools.reduce(operator.mul, [part[1] for part in parts])
            # Their sum is one, so that the variance is right exactly.
            amplitudes = jnp.sqrt(weights / weights.sum(-1, keepdims=True))
        blocks.append(_Block(jnp.asarray(term.variance), frequencies, amplitudes, term.exact))
    return RandomFeatures(tuple(blocks), centre)


def outer(a: Array, b: Array) -> Array:
    """All products of features ``batch + (n, r)`` and ``batch + (n, s)`` of the same inputs."""
    both = a[..., :, None] * b[..., None, :]
    return both.reshape((*both.shape[:-2], -1))


def _lattice(key: Array, count: int, dim: int) -> Array:
    """A randomly shifted lattice in the open unit cube, ``(count, dim)``.

    The first coordinate is evenly spaced, the others are a Kronecker lattice.
    """
    phi = 2.0
    for _ in range(64):  # the positive root of x^dim = x + 1
        phi = (1 + phi) ** (1 / dim)
    steps = np.append(1.0 / count, phi ** -np.arange(1.0, dim))
    lattice = jnp.asarray((np.arange(count)[:, None] * steps) % 1.0)
    u = (lattice + jax.random.uniform(key, (dim,), lattice.dtype)) % 1.0
    eps = jnp.finfo(u.dtype).eps
    return jnp.clip(u, eps, 1 - eps)


def wide_normal(u: Array) -> tuple[Array, Array]:
    """Standard normal vectors from a wider distribution, ``(count, d)``, and their weights.

    It is twice as wide in one dimension, and less in more, where weights would vary too much.
    """
    d = u.shape[-1]
    width = (1.0 + 3.0 / d) ** 0.5
    z = ndtri(u)
    return width * z, width**d * jnp.exp(-0.5 * (width**2 - 1.0) * jnp.square(z).sum(-1))


def wide_gamma(u: Array, shape: float) -> tuple[Array, Array]:
    """Gamma variables from one with more small values, ``(count,)``, and their weights."""
    wider = max(0.5 * shape, shape - 1.0)
    gamma = gamma_quantiles(u, wider)
    return gamma, gamma ** (shape - wider) * (math.gamma(wider) / math.gamma(shape))


def gamma_quantiles(u: Array, shape: Any) -> Array:
    """Quantiles of gamma distributions with rate one, by bisection of the logarithm.

    Args:
      u: numbers between zero and one, ``(count,)``.
      shape: shape parameters, ``batch``.

    Returns:
      An array of shape ``batch + (count,)``.
    """
    a = jnp.asarray(shape, u.dtype)[..., None]
    size = jnp.broadcast_shapes(a.shape, u.shape)
    low = jnp.full(size, -80.0, u.dtype)
    high = jnp.broadcast_to(jnp.log(a + 12.0 * jnp.sqrt(a) + 60.0), size)

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        below = gammainc(a, jnp.exp(middle)) < u
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, high = lax.fori_loop(0, 50, halve, (low, high))
    return jnp.exp(0.5 * (low + high))


# Points on the circle whose discrete Fourier transform gives the series: enough for lengthscales
# of a hundredth of the radian.
_ON_CIRCLE = 2048


def harmonics(u: Array, concentration: Array) -> Array:
    r"""Random harmonics of :math:`e^{\kappa (\cos t - 1)}`, whose Fourier series has weights.

    .. math:: e^{\kappa (\cos t - 1)} = \sum_j e^{-\kappa} I_j(\kappa) \cos(j t)

    The weights, of all whole numbers j, are positive and add up to one: they are probabilities.

    Args:
      u: numbers between zero and one, ``(count,)``.
      concentration: :math:`\kappa`, ``batch``.

    Returns:
      Whole numbers from a wider distribution, and their weights, of shape ``batch + (count,)``.
    """
    angle = 2 * np.pi * np.arange(_ON_CIRCLE) / _ON_CIRCLE
    values = jnp.exp(concentration[..., None] * jnp.asarray(np.cos(angle) - 1.0, u.dtype))
    half = jnp.fft.rfft(values).real / _ON_CIRCLE
    half = jnp.where(half > 8 * jnp.finfo(u.dtype).eps, half, 0.0)  # the others are rounding
    top = half.shape[-1] - 1
    exact = jnp.concatenate([half[..., :0:-1], half], -1)
    wider = exact**0.25

    def draw(exact: Array, wider: Array) -> tuple[Array, Array]:
        cumulative = jnp.cumsum(wider)
        found = jnp.searchsorted(cumulative, u * cumulative[-1])
        return (found - top).astype(u.dtype), exact[found] / wider[found]

    flat = exact.reshape(-1, exact.shape[-1]), wider.reshape(-1, exact.shape[-1])
    return jax.tree.map(lambda x: x.reshape(*concentration.shape, -1), jax.vmap(draw)(*flat))
