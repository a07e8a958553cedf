"""A time series with the chain of states of its prior: times in any order, sorted inside."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_tsvgp.gaussian import chain
from numpyro_tsvgp.gaussian.chain import Smoothed, Start, predict, take_in
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.small import eye_like, first_like, outer, psd_factor, times, transpose

__all__ = ["Series", "Simulation", "observed_first", "series_of", "times_of"]


def times_of(X: Array) -> Array:
    """Inputs ``(n,)`` or ``(n, 1)`` as times ``(n,)``."""
    return X.reshape(-1)


class Series(NamedTuple):
    """Times with the chain of states of a prior.

    Attributes:
      space: the state-space form of the prior, see :mod:`numpyro_tsvgp.gaussian.state_space`.
      start: the state at the first time.
      t: the times in order, ``(n,)``.
      order: the place of each of them in the order of the data.
      rank: the place of each data point in the order of time.
    """

    space: Any
    start: Start
    t: Array
    order: Array
    rank: Array

    def sorted(self, values: Array) -> Array:
        """Values ``(..., n)`` of the data in the order of time."""
        return values[..., self.order]

    def unsorted(self, values: Array) -> Array:
        """Values ``(..., n)`` in the order of time as those of the data."""
        return values[..., self.rank]

    def smooth(self, sites: tuple[Array, Array]) -> Smoothed:
        """The posterior given sites, in the order of the data."""
        linear, quadratic = (self.sorted(x) for x in sites)
        found = chain.smooth(self.space, self.start, self.t, linear, quadratic)
        return found.rearranged(self.unsorted)

    def smooth_once(self, sites: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Means, variances and log Z, for one first derivative; see :mod:`.chain`."""
        linear, quadratic = (self.sorted(x) for x in sites)
        mean, variance, log_z = chain.smooth_once(
            self.space, self.start, self.t, linear, quadratic, None
        )
        return self.unsorted(mean), self.unsorted(variance), log_z

    def gains(self, quadratic: Array) -> Simulation:
        """What draws and means of other sites need, which does not depend on what sites say."""
        return _gains(self, self.sorted(quadratic))

    def means(self, quadratic: Array, linear: Array) -> Array:
        """Posterior means ``(..., p, n)`` of sites that differ in their first number alone."""
        return self.gains(quadratic).means(self, linear)


class Simulation(NamedTuple):
    """The parts of a filter that depend on the second numbers of sites alone, in order of time.

    Attributes:
      A: transitions into each time, ``(n, d, d, p)``.
      noise: factors of the noise of each transition, ``(n, d, d, p)``.
      first: a factor of the covariance of the first state, ``(d, d, p)``.
      u: covariance of state and function value, given earlier sites, ``(n, d, p)``.
      v: variance of the function value, given earlier sites, ``(n, p)``.
      quadratic: second number of each site, ``(n, p)``.
    """

    A: Array
    noise: Array
    first: Array
    u: Array
    v: Array
    quadratic: Array

    def means(self, series: Series, linear: Array) -> Array:
        """Posterior means given first numbers ``(..., p, n)`` in the order of the data."""
        rows = jnp.moveaxis(series.sorted(linear), -1, 0)  # (n, ..., p)
        S = 1 + self.quadratic * self.v

        def forward(m: Array, inputs: Any) -> tuple[Array, Array]:
            A, u, beta, s, row = inputs
            m = _apply(A, m)
            return m + _along(u, row) * ((row - beta * m[0]) / s), m[0]

        zero = jnp.zeros((self.u.shape[1], *rows.shape[1:]), rows.dtype)
        _, g = lax.scan(forward, zero, (self.A, self.u, self.quadratic, S, rows))

        def backward(r: Array, inputs: Any) -> tuple[Array, Array]:
            A, u, beta, s, v, row, g = inputs
            u = _along(u, row)
            e, shift = (row - beta * g) / s, (u * r).sum(0) / s
            r = r.at[0].add(e - beta * shift)
            return _apply(transpose(A), r), g + v * e + shift

        inputs = self.A, self.u, self.quadratic, S, self.v, rows, g
        _, means = lax.scan(backward, zero, inputs, reverse=True)
        return series.unsorted(jnp.moveaxis(means, 0, -1))

    def prior_draw(self, series: Series, noise: Array) -> Array:
        """Draws ``(..., p, n)`` of the prior, from noise ``(..., p, n, d)`` in the data's order."""
        ordered = jnp.take(noise, series.order, axis=-2)
        rows = jnp.moveaxis(ordered, (-2, -1), (0, 1))  # (n, d, ..., p)

        def forward(x: Array, inputs: Any) -> tuple[Array, Array]:
            A, L, row = inputs
            x = _apply(A, x) + _apply(L, row)
            return x, x[0]

        first = _apply(self.first, rows[0])
        # The first transition takes no time and has no noise.
        _, rest = lax.scan(forward, first, (self.A[1:], self.noise[1:], rows[1:]))
        values = jnp.concatenate([first[:1], rest])
        return series.unsorted(jnp.moveaxis(values, 0, -1))


def _along(vector: Array, like: Array) -> Array:
    """A vector ``(d, p)`` that multiplies numbers ``(..., p)``."""
    return vector.reshape(vector.shape[0], *[1] * (like.ndim - 1), vector.shape[-1])


def _apply(matrix: Array, x: Array) -> Array:
    """Matrices ``(d, d, p)`` times vectors ``(d, ..., p)``."""
    d, p = matrix.shape[0], matrix.shape[-1]
    return times(matrix.reshape(d, d, *[1] * (x.ndim - 2), p), x)


def _gains(series: Series, quadratic: Array) -> Simulation:
    space, t = series.space, series.t
    p = quadratic.shape[0]
    zero = jnp.zeros_like(series.start.mean)

    def step(P: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, Any]:
        before, now, beta = inputs
        A, Q = (x[..., 0] for x in space.step(before[None], now[None]))
        A, Q = (jnp.broadcast_to(x, (*x.shape[:2], p)) for x in (A, Q))
        new, seen = take_in(predict(A, Q, Start(zero, P)), jnp.zeros_like(beta), beta)
        return new.covariance, (A, Q, seen.u, seen.v)

    before = jnp.concatenate([t[:1], t[:-1]])
    rows = before, t, quadratic.T
    _, (A, Q, u, v) = lax.scan(step, series.start.covariance, rows)
    noise = jnp.moveaxis(psd_factor(jnp.moveaxis(Q, 0, -1)), -1, 0)
    return Simulation(A, noise, psd_factor(series.start.covariance), u, v, quadratic.T)


def series_of(process: Process, t: Array) -> Series:
    """A prior at times in any order.

    Args:
      process: the prior of a GP, whose kernel has a state-space form.
      t: times, ``(n,)``.

    Returns:
      The series.
    """
    dtype = process.loc.dtype
    space = observed_first(process.kernel.state_space(), dtype)
    order = jnp.argsort(t)
    n = t.shape[0]
    rank = jnp.zeros(n, order.dtype).at[order].set(jnp.arange(n, dtype=order.dtype))
    t = t[order]
    d, p = space.dim, process.functions
    covariance = jnp.broadcast_to(space.covariance(t[:1])[..., 0], (d, d, p))
    return Series(space, Start(jnp.zeros((d, p), dtype), covariance), t, order, rank)


def observed_first(space: Any, dtype: Any) -> Any:
    r"""A state-space form in coordinates whose first is the function itself.

    With a regular matrix T whose first row is h, the states :math:`T x` have
    :math:`T A T^{-1}`, :math:`T Q T^\top` and :math:`T C T^\top`.

    Args:
      space: the form of a kernel.
      dtype: the precision of the data.

    Returns:
      The form in other coordinates.
    """
    h = space.emission()
    if isinstance(h, np.ndarray) and (h == np.eye(len(h))[:, :1]).all():
        return _Observed(space, None, None, dtype)
    # A reflection that takes h to a multiple of the first axis, and then its length.
    h = jnp.asarray(h, dtype)
    sign = jnp.where(h[0] < 0, -1.0, 1.0).astype(dtype)
    length = jnp.sqrt((h**2).sum(0))
    w = h + first_like(h) * sign * length
    w = w * jnp.sqrt(2 / (w**2).sum(0))
    return _Observed(space, w[..., None], (-sign * length)[..., None], dtype)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["space", "normal", "scale"],
    meta_fields=["dtype"],
)
@dataclasses.dataclass(frozen=True)
class _Observed:
    """A form in coordinates whose first is the function, in the precision of the data.

    Attributes:
      space: the form of the kernel.
      normal: the vector w of a reflection I - w w^T, ``(d, k, 1)``; None if the first number of
        a state is the function already.
      scale: what the first coordinate is multiplied by after it.
      dtype: the precision.
    """

    space: Any
    normal: Array | None
    scale: Array | None
    dtype: Any

    @property
    def dim(self) -> int:
        return self.space.dim

    def covariance(self, t: Array) -> Array:
        return self._congruent(self.space.covariance(t))

    def _left(self, matrix: Array, scale: Array) -> Array:
        """A reflection from the left, and a multiple of the first row."""
        assert self.normal is not None
        matrix = matrix - outer(self.normal, (self.normal[:, None] * matrix).sum(0))
        return jnp.where(first_like(matrix), scale * matrix, matrix)

    def _congruent(self, matrix: Array) -> Array:
        matrix = matrix.astype(self.dtype)
        if self.scale is None:
            return matrix
        return self._left(transpose(self._left(matrix, self.scale)), self.scale)

    def step(self, t0: Array, t1: Array) -> tuple[Array, Array]:
        A, Q = self.space.step(t0, t1)
        A = A.astype(self.dtype)
        if self.scale is None:
            return A, self._congruent(Q)
        A = transpose(self._left(transpose(self._left(A, self.scale)), 1 / self.scale))
        A = jnp.where(t0 == t1, eye_like(A), A)
        # Computed once, and not again for each number of the products that they go into.
        return lax.optimization_barrier((A, self._congruent(Q)))
