"""The posterior of a chain by scans in order of time: the program for CPUs.

Formulas are in :mod:`numpyro_tsvgp.gaussian.chain`. What the way forward leaves for the way back is
a vector and two numbers a time; derivatives need the filtered states as well.

Cutting the times into blocks that are scanned side by side was tried: it saves a third of the time
for one function, but summaries of blocks are information matrices, which in single precision have
no room for many precise data close together.

Shapes: states ``(d, p)``, the axis of a scan first. The first number of a state is the function.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian.chain import (
    Adjoint,
    Gradient,
    Seen,
    Smoothed,
    Start,
    before_site,
    derivatives,
    moments,
    predict,
    take_in,
)
from numpyro_tsvgp.gaussian.small import multiply, outer, times, transpose

__all__ = ["gradient", "smooth"]


class _Rows(NamedTuple):
    """Times ``(n, 1)`` and sites ``(n, p)`` in order."""

    before: Array
    t: Array
    linear: Array
    quadratic: Array


def _rows(t: Array, linear: Array, quadratic: Array) -> _Rows:
    before = jnp.concatenate([t[:1], t[:-1]])
    return _Rows(before[:, None], t[:, None], linear.T, quadratic.T)


def _step(space: Any, row: _Rows) -> tuple[Array, Array]:
    A, Q = space.step(row.before, row.t)
    return A[..., 0], Q[..., 0]


def _end(start: Start) -> Adjoint:
    return Adjoint(jnp.zeros_like(start.mean), jnp.zeros_like(start.covariance))


def smooth(space: Any, start: Start, t: Array, linear: Array, quadratic: Array) -> Smoothed:
    """The posterior of function values; see :func:`numpyro_tsvgp.gaussian.chain.smooth`."""
    rows = _rows(t, linear, quadratic)

    def forward(state: Start, row: _Rows) -> tuple[Start, Seen]:
        return take_in(predict(*_step(space, row), state), row.linear, row.quadratic)

    last, seen = lax.scan(forward, start, rows)

    def backward(after: Adjoint, inputs: tuple[_Rows, Seen]) -> tuple[Adjoint, Any]:
        row, at = inputs
        here = before_site(after, at, row.linear, row.quadratic)
        A, _ = _step(space, row)
        back = transpose(A)
        new = Adjoint(times(back, here.r), multiply(multiply(back, here.N), A))
        return new, moments(after, at, row.linear, row.quadratic)

    _, (mean, variance) = lax.scan(backward, _end(start), (rows, seen), reverse=True)
    return Smoothed(mean.T, variance.T, seen.g.T, seen.v.T, last)


def gradient(
    space: Any,
    start: Start,
    t: Array,
    linear: Array,
    quadratic: Array,
    weight: Array,
    along: tuple[Array, Array] | None,
) -> Gradient:
    """Derivatives of ``weight * log Z`` and of the derivative of log Z along a change of sites.

    Args:
      space: the state-space form of the prior.
      start: the state at the first time.
      t: times in order, ``(n,)``.
      linear: first number of each site, ``(p, n)``.
      quadratic: second number of each site, ``(p, n)``.
      weight: a number.
      along: changes of both numbers of each site, or None for those of ``weight * log Z`` alone.

    Returns:
      The derivatives.
    """
    rows = _rows(t, linear, quadratic)
    changes = None if along is None else (along[0].T, along[1].T)

    # Every quantity goes with its derivative along the change of the sites.
    def forward(carry: Any, inputs: Any) -> tuple[Any, Any]:
        row, change = inputs
        A, Q = _step(space, row)

        def one(state: Start, *sites: Array) -> tuple[Start, Seen]:
            return take_in(predict(A, Q, state), *sites)

        state, d_state = carry
        moved = None if change is None else (d_state, *change)
        (new, seen), (d_new, d_seen) = _moving(one, (state, row.linear, row.quadratic), moved)
        return (new, d_new), (carry, (seen, d_seen))

    still = None if along is None else Start(*jax.tree.map(jnp.zeros_like, tuple(start)))
    _, (states, seen) = lax.scan(forward, (start, still), (rows, changes))

    def backward(carry: Any, inputs: Any) -> tuple[Any, Any]:
        after, by_space = carry
        row, change, state, seen = inputs
        (A, _), pull = jax.vjp(lambda s, a, b: s.step(a, b), space, row.before, row.t)
        A = A[..., 0]

        def one(after: Adjoint, seen: Seen, state: Start, *sites: Array) -> Any:
            here = before_site(after, seen, *sites)
            back = transpose(A)
            new = Adjoint(times(back, here.r), multiply(multiply(back, here.N), A))
            mean, variance = moments(after, seen, *sites)
            by_sites = mean, -0.5 * (variance + mean**2)
            return new, (derivatives(here, A, state), by_sites)

        values = after[0], seen[0], state[0], row.linear, row.quadratic
        moved = None if change is None else (after[1], seen[1], state[1], *change)
        (new, found), (d_new, d_found) = _moving(one, values, moved)
        (by_A, by_Q), by_sites = _weighted(weight, found, d_found)
        more, by_before, by_t = pull((_shared(by_A, A)[..., None], _shared(by_Q, A)[..., None]))
        by_space = jax.tree.map(jnp.add, by_space, more)
        return ((new, d_new), by_space), (by_before, by_t, *by_sites)

    ends = _end(start), None if along is None else _end(start)
    begin = ends, jax.tree.map(jnp.zeros_like, space)
    inputs = rows, changes, states, seen
    (first, by_space), rest = lax.scan(backward, begin, inputs, reverse=True)
    by_before, by_t, by_linear, by_quadratic = rest
    moved = None if first[1] is None else (tuple(first[1]),)
    value, (r, P) = _moving(_by_start, (tuple(first[0]),), moved)
    by_start = Start(*_weighted(weight, tuple(value), None if along is None else (r, P)))
    by_times = by_t[:, 0].at[:-1].add(by_before[1:, 0]).at[0].add(by_before[0, 0])
    return Gradient(by_space, by_start, by_times, by_linear.T, by_quadratic.T)


def _moving(function: Any, values: Any, changes: Any) -> tuple[Any, Any]:
    """A function that gives a pair, and its derivative along changes, if there are any."""
    return (
        (function(*values), (None, None)) if changes is None else jax.jvp(function, values, changes)
    )


def _weighted(weight: Array, values: Any, changes: Any) -> Any:
    if changes is None:
        return jax.tree.map(lambda x: weight * x, values)
    return jax.tree.map(lambda x, dx: weight * x + dx, values, changes)


def _by_start(adjoint: tuple[Array, Array]) -> Start:
    r, N = adjoint
    return Start(r, 0.5 * (outer(r, r) - N))


def _shared(values: Array, like: Array) -> Array:
    """Values ``(..., p)`` summed over functions where these share what it is a derivative in."""
    return values.sum(-1, keepdims=True) if values.shape[-1] > like.shape[-1] else values
