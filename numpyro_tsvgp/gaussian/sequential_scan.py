r"""The posterior of a chain by scans in order of time: the program for CPUs.

One scan over n steps of a few small operations each is mostly the cost of starting them. So the
times are cut into blocks that are scanned side by side, a step being the same step of all blocks.
What a block does to the state that enters it is summed up first, with no knowledge of that state:
as a function of it, the state that leaves is :math:`\mathcal{N}(F x + b, C)` and the likelihood of
the sites is :math:`\exp(\eta^\top x - \tfrac12 x^\top J x)`. A scan over blocks then gives each its
start and, backwards, its end.

Shapes: states ``(d, p, blocks)``, the axis of a scan first. Formulas are in
:mod:`numpyro_tsvgp.gaussian.chain`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian.chain import Gradient, Smoothed, Start
from numpyro_tsvgp.gaussian.small import eye_like, inverse, multiply, outer, times, transpose

__all__ = ["gradient", "smooth"]


class _Rows(NamedTuple):
    """Times and sites in blocks: ``(steps, blocks)`` and ``(steps, p, blocks)``."""

    before: Array
    t: Array
    linear: Array
    quadratic: Array


class _Adjoint(NamedTuple):
    """Derivatives of log Z in a state: r ``(d, p, ...)`` and N ``(d, d, p, ...)``."""

    r: Array
    N: Array


def _blocks_for(n: int) -> int:
    """How many blocks to cut n times into."""
    blocks = 1
    while blocks * blocks * 4 < n:
        blocks *= 2
    return blocks if n >= 64 else 1


def _cut(t: Array, linear: Array, quadratic: Array, blocks: int) -> _Rows:
    n = t.shape[0]
    pad = -n % blocks
    # A site of zero at the last time changes nothing.
    t = jnp.pad(t, (0, pad), mode="edge")
    before = jnp.concatenate([t[:1], t[:-1]])

    def rows(values: Array) -> Array:
        values = jnp.pad(
            values, [(0, 0)] * (values.ndim - 1) + [(0, t.shape[0] - values.shape[-1])]
        )
        return jnp.moveaxis(values.reshape(*values.shape[:-1], blocks, -1), -1, 0)

    return _Rows(rows(before), rows(t), rows(linear), rows(quadratic))


def _uncut(rows: Array, n: int) -> Array:
    """From ``(steps, ..., blocks)`` to ``(..., n)``."""
    rows = jnp.moveaxis(rows, 0, -1)
    return rows.reshape(*rows.shape[:-2], -1)[..., :n]


# ---- forward ---------------------------------------------------------------------------------


def _predict(A: Array, Q: Array, m: Array, P: Array) -> tuple[Array, Array]:
    return times(A, m), multiply(multiply(A, P), transpose(A)) + Q


class _Summary(NamedTuple):
    """What a block does to the state that enters it."""

    F: Array
    b: Array
    C: Array
    eta: Array
    J: Array


def _summarised(space: Any, h: Array, rows: _Rows) -> _Summary:
    _, p, blocks = rows.linear.shape
    d, dtype = h.shape[0], rows.linear.dtype

    def step(carry: _Summary, row: _Rows) -> tuple[_Summary, None]:
        A, Q = space.step(row.before, row.t)
        F, (b, C) = multiply(A, carry.F), _predict(A, Q, carry.b, carry.C)
        u, a = times(C, h), times(transpose(F), h)
        g, v = (h * b).sum(0), (h * u).sum(0)
        S = 1 + row.quadratic * v
        e, c = (row.linear - row.quadratic * g) / S, row.quadratic / S
        new = _Summary(
            F - outer(c * u, a),
            b + u * e,
            C - outer(c * u, u),
            carry.eta + a * e,
            carry.J + outer(c * a, a),
        )
        return new, None

    zero = jnp.zeros((d, d, p, blocks), dtype)
    start = _Summary(zero + eye_like(zero), zero[0], zero, zero[0], zero)
    return lax.scan(step, start, rows)[0]


def _starts_and_ends(start: Start, summary: _Summary) -> tuple[Start, _Adjoint]:
    """The state that enters each block, and the adjoint of the one that leaves it."""
    by_block = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), summary)

    def forward(state: Start, block: _Summary) -> tuple[Start, tuple[Start, Any]]:
        (m, P), (F, b, C, eta, J) = state, block
        D = inverse(eye_like(P) + multiply(J, P))
        through = transpose(multiply(D, transpose(F)))
        after = multiply(multiply(through, P), transpose(F)) + C
        new = Start(times(through, m + times(P, eta)) + b, 0.5 * (after + transpose(after)))
        N = multiply(D, J)
        own = _Adjoint(times(D, eta - times(J, m)), 0.5 * (N + transpose(N)))
        return new, (state, (through, own))

    def backward(after: _Adjoint, block: Any) -> tuple[_Adjoint, _Adjoint]:
        through, own = block
        back = transpose(through)
        new = _Adjoint(
            own.r + times(back, after.r),
            own.N + multiply(multiply(back, after.N), through),
        )
        return new, after

    _, (starts, blocks) = lax.scan(forward, start, by_block)
    last = _Adjoint(jnp.zeros_like(start.mean), jnp.zeros_like(start.covariance))
    _, ends = lax.scan(backward, last, blocks, reverse=True)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), (starts, ends))


class _Filtered(NamedTuple):
    """What the way back needs of the way forward."""

    u: Array
    g: Array
    v: Array


def _filter(
    space: Any, h: Array, starts: Start, rows: _Rows, *, keep_states: bool
) -> tuple[Start, tuple[_Filtered, Start | None]]:
    def step(state: Start, row: _Rows) -> tuple[Start, Any]:
        A, Q = space.step(row.before, row.t)
        m, P = _predict(A, Q, *state)
        u = times(P, h)
        g, v = (h * m).sum(0), (h * u).sum(0)
        S = 1 + row.quadratic * v
        new = Start(
            m + u * ((row.linear - row.quadratic * g) / S),
            P - outer((row.quadratic / S) * u, u),
        )
        return new, (_Filtered(u, g, v), state if keep_states else None)

    return lax.scan(step, starts, rows)


# ---- backward --------------------------------------------------------------------------------


def _take_in(after: _Adjoint, h: Array, row: _Rows, at: _Filtered) -> _Adjoint:
    """The adjoint of a state before its site was taken in."""
    S = 1 + row.quadratic * at.v
    e, c = (row.linear - row.quadratic * at.g) / S, row.quadratic / S
    w = times(after.N, at.u)
    r = after.r + h * (e - c * (at.u * after.r).sum(0))
    cross = outer(c * w, h)
    N = after.N - cross - transpose(cross) + outer(h, h) * (c + c**2 * (at.u * w).sum(0))
    return _Adjoint(r, N)


def _moments(after: _Adjoint, row: _Rows, at: _Filtered) -> tuple[Array, Array]:
    """Mean and variance of a function value: those of the filter, moved by what came later."""
    S = 1 + row.quadratic * at.v
    half = at.u / S
    mean = at.g + at.v * ((row.linear - row.quadratic * at.g) / S) + (half * after.r).sum(0)
    return mean, at.v / S - (half * times(after.N, half)).sum(0)


def _prepared(
    space: Any, start: Start, t: Array, linear: Array, quadratic: Array, blocks: int | None
) -> tuple[Array, _Rows, Start, _Adjoint]:
    blocks = _blocks_for(t.shape[0]) if blocks is None else blocks
    h = space.emission()[..., None]
    rows = _cut(t, linear, quadratic, blocks)
    if blocks == 1:
        starts = jax.tree.map(lambda x: x[..., None], start)
        return h, rows, starts, _Adjoint(*jax.tree.map(jnp.zeros_like, starts))
    return h, rows, *_starts_and_ends(start, _summarised(space, h, rows))


def smooth(
    space: Any,
    start: Start,
    t: Array,
    linear: Array,
    quadratic: Array,
    blocks: int | None = None,
) -> Smoothed:
    """The posterior of function values; see :func:`numpyro_tsvgp.gaussian.chain.smooth`."""
    n = t.shape[0]
    h, rows, starts, ends = _prepared(space, start, t, linear, quadratic, blocks)
    last, (filtered, _) = _filter(space, h, starts, rows, keep_states=False)

    def step(after: _Adjoint, inputs: Any) -> tuple[_Adjoint, Any]:
        row, at = inputs
        here = _take_in(after, h, row, at)
        A, _ = space.step(row.before, row.t)
        back = transpose(A)
        new = _Adjoint(times(back, here.r), multiply(multiply(back, here.N), A))
        return new, _moments(after, row, at)

    _, (mean, variance) = lax.scan(step, ends, (rows, filtered), reverse=True)
    found = (mean, variance, filtered.g, filtered.v)
    return Smoothed(*(_uncut(x, n) for x in found), jax.tree.map(lambda x: x[..., -1], last))


def gradient(
    space: Any,
    start: Start,
    t: Array,
    linear: Array,
    quadratic: Array,
    blocks: int | None = None,
) -> Gradient:
    """Derivatives of log Z in everything, from one way forward and one way back."""
    n = t.shape[0]
    h, rows, starts, ends = _prepared(space, start, t, linear, quadratic, blocks)
    _, (filtered, states) = _filter(space, h, starts, rows, keep_states=True)

    def step(carry: Any, inputs: Any) -> tuple[Any, Any]:
        after, by_space, by_h = carry
        row, at, (m, P) = inputs
        r, N = _take_in(after, h, row, at)
        mean, variance = _moments(after, row, at)
        (A, Q), pull = jax.vjp(lambda s, a, b: s.step(a, b), space, row.before, row.t)
        by_Q = 0.5 * (outer(r, r) - N)
        AP = multiply(A, P)
        by_A = outer(r, m) + 2 * multiply(by_Q, AP)

        # In the emission, from E[(lambda - beta f) x] under the posterior of the state.
        def predicted(x: Array) -> Array:
            return times(AP, times(transpose(A), x)) + times(Q, x)

        state = times(A, m) + predicted(r)
        new_h = (row.linear - row.quadratic * mean) * state - row.quadratic * (
            at.u - predicted(times(N, at.u))
        )
        # Functions that share a kernel share its derivative.
        more, by_before, by_t = pull((_shared(by_A, A), _shared(by_Q, Q)))
        by_space = jax.tree.map(jnp.add, by_space, more)
        by_h = by_h + _shared(new_h, h).sum(-1)
        back = transpose(A)
        new = _Adjoint(times(back, r), multiply(multiply(back, N), A))
        return (new, by_space, by_h), (by_before, by_t, mean, -0.5 * (variance + mean**2))

    begin = ends, jax.tree.map(jnp.zeros_like, space), jnp.zeros(h.shape[:-1], linear.dtype)
    (first, by_space, by_h), rest = lax.scan(step, begin, (rows, filtered, states), reverse=True)
    by_before, by_t, by_linear, by_quadratic = (_uncut(x, None) for x in rest)
    _, pull = jax.vjp(lambda s: s.emission(), space)
    by_space = jax.tree.map(jnp.add, by_space, pull(by_h)[0])
    r, N = (x[..., 0] for x in first)
    by_start = Start(r, 0.5 * (outer(r, r) - N))
    times_ = by_t.at[:-1].add(by_before[1:]).at[0].add(by_before[0])
    times_ = times_[:n].at[-1].add(times_[n:].sum())  # the padding is at the last time
    return Gradient(by_space, by_start, times_, by_linear[:, :n], by_quadratic[:, :n])


def _shared(values: Array, like: Array) -> Array:
    """Values ``(..., p, blocks)`` summed over functions where these share what it is for."""
    p, k = values.shape[-2], like.shape[-2]
    return values.sum(-2, keepdims=True) if p > k else values
