r"""The posterior of a chain by associative scans, of logarithmic depth: the program for accelerators.

What a stretch of times does to the state that enters it is a Gaussian :math:`\mathcal{N}(F x + b,
C)` of the state that leaves and a likelihood :math:`\exp(\eta^\top x - \tfrac12 x^\top J x)` of the
one that enters. Two stretches in a row make one, in any order of joining. Backwards the adjoints of
:mod:`numpyro_tsvgp.gaussian.chain` are affine in those of later states.

Shapes: states ``(d, p, n)``.

References:
  S. Särkkä, Á. F. García-Fernández, *Temporal parallelization of Bayesian smoothers*, IEEE
  Transactions on Automatic Control, 2021.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian.chain import Gradient, Smoothed, Start
from numpyro_tsvgp.gaussian.small import eye_like, inverse, multiply, outer, times, transpose

__all__ = ["gradient", "smooth"]


class _Stretch(NamedTuple):
    """What a stretch of times does to the state that enters it."""

    F: Array
    b: Array
    C: Array
    eta: Array
    J: Array


def _join(first: _Stretch, second: _Stretch) -> _Stretch:
    D = inverse(eye_like(first.C) + multiply(second.J, first.C))
    through = transpose(multiply(D, transpose(second.F)))
    back = transpose(first.F)
    C = multiply(multiply(through, first.C), transpose(second.F)) + second.C
    J = multiply(multiply(back, multiply(D, second.J)), first.F) + first.J
    return _Stretch(
        multiply(through, first.F),
        times(through, first.b + times(first.C, second.eta)) + second.b,
        0.5 * (C + transpose(C)),
        times(back, times(D, second.eta - times(second.J, first.b))) + first.eta,
        0.5 * (J + transpose(J)),
    )


class _Back(NamedTuple):
    """What a stretch of times does to the adjoint of the state that leaves it."""

    through: Array
    r: Array
    N: Array


def _join_back(later: _Back, earlier: _Back) -> _Back:
    back = transpose(earlier.through)
    return _Back(
        multiply(later.through, earlier.through),
        earlier.r + times(back, later.r),
        earlier.N + multiply(multiply(back, later.N), earlier.through),
    )


class _Passed(NamedTuple):
    """Everything at every time, from both directions."""

    A: Array
    Q: Array
    h: Array
    before: Start
    u: Array
    g: Array
    v: Array
    r: Array
    N: Array
    mean: Array
    variance: Array
    end: Start


def _steps(space: Any, t: Array) -> tuple[Array, Array]:
    return space.step(jnp.concatenate([t[:1], t[:-1]]), t)


def _pass(space: Any, start: Start, t: Array, linear: Array, quadratic: Array) -> _Passed:
    h = space.emission()[..., None]
    A, Q = _steps(space, t)
    p, n = linear.shape
    shape = (*A.shape[:2], p, n)
    A, Q = jnp.broadcast_to(A, shape), jnp.broadcast_to(Q, shape)
    # The first stretch starts from a state that is known: what it does does not depend on it.
    first = jnp.arange(n) == 0
    into = jnp.where(first, 0.0, A)
    carried = multiply(multiply(A[..., :1], start.covariance[..., None]), transpose(A[..., :1]))
    noise = jnp.where(first, carried + Q, Q)
    offset = jnp.where(first, times(A[..., :1], start.mean[..., None]), 0.0)
    u, a = times(noise, h), times(transpose(into), h)
    S = 1 + quadratic * (h * u).sum(0)
    e, c = (linear - quadratic * (h * offset).sum(0)) / S, quadratic / S
    parts = _Stretch(
        into - outer(c * u, a), offset + u * e, noise - outer(c * u, u), a * e, outer(c * a, a)
    )
    joined = _scan(_join, parts)

    def shifted(at_start: Array, values: Array) -> Array:
        return jnp.concatenate([at_start[..., None], values[..., :-1]], -1)

    before = Start(shifted(start.mean, joined.b), shifted(start.covariance, joined.C))
    m = times(A, before.mean)
    P = multiply(multiply(A, before.covariance), transpose(A)) + Q
    u = times(P, h)
    g, v = (h * m).sum(0), (h * u).sum(0)
    S = 1 + quadratic * v
    e, c = (linear - quadratic * g) / S, quadratic / S
    # From the adjoint before the site of a time to that before the site of the one before.
    next_A = jnp.concatenate([A[..., 1:], jnp.zeros_like(A[..., :1])], -1)
    own = _Back(next_A - outer(c * times(next_A, u), h), h * e, outer(h, h) * c[None, None])
    r, N = _scan(_join_back, own, reverse=True)[1:]
    after_r = times(transpose(next_A), _later(r))
    after_N = multiply(multiply(transpose(next_A), _later(N)), next_A)
    half = u / S
    mean = g + v * e + (half * after_r).sum(0)
    variance = v / S - (half * times(after_N, half)).sum(0)
    end = Start(joined.b[..., -1], joined.C[..., -1])
    return _Passed(A, Q, h, before, u, g, v, r, N, mean, variance, end)


def _scan(join: Any, parts: Any, reverse: bool = False) -> Any:
    """An associative scan over the last axis."""
    first = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), parts)

    def joined(a: Any, b: Any) -> Any:
        a, b = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), (a, b))
        return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), join(a, b))

    found = lax.associative_scan(joined, first, reverse=reverse)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), found)


def _later(values: Array) -> Array:
    return jnp.concatenate([values[..., 1:], jnp.zeros_like(values[..., :1])], -1)


def smooth(space: Any, start: Start, t: Array, linear: Array, quadratic: Array) -> Smoothed:
    """The posterior of function values; see :func:`numpyro_tsvgp.gaussian.chain.smooth`."""
    at = _pass(space, start, t, linear, quadratic)
    return Smoothed(at.mean, at.variance, at.g, at.v, at.end)


def gradient(space: Any, start: Start, t: Array, linear: Array, quadratic: Array) -> Gradient:
    """Derivatives of log Z in everything, from one way forward and one way back."""
    at = _pass(space, start, t, linear, quadratic)
    by_Q = 0.5 * (outer(at.r, at.r) - at.N)
    AP = multiply(at.A, at.before.covariance)
    by_A = outer(at.r, at.before.mean) + 2 * multiply(by_Q, AP)

    def predicted(x: Array) -> Array:
        return times(AP, times(transpose(at.A), x)) + times(at.Q, x)

    state = times(at.A, at.before.mean) + predicted(at.r)
    by_h = (linear - quadratic * at.mean) * state - quadratic * (
        at.u - predicted(times(at.N, at.u))
    )
    (A, _), pull = jax.vjp(_steps, space, t)
    by_space, by_t = pull((_shared(by_A, A), _shared(by_Q, A)))
    _, pull = jax.vjp(lambda s: s.emission()[..., None], space)
    (more,) = pull(_shared(by_h, at.h).sum(-1, keepdims=True))
    A0 = transpose(at.A[..., 0])
    r = times(A0, at.r[..., 0])
    N = multiply(multiply(A0, at.N[..., 0]), transpose(A0))
    return Gradient(
        jax.tree.map(jnp.add, by_space, more),
        Start(r, 0.5 * (outer(r, r) - N)),
        by_t,
        at.mean,
        -0.5 * (at.variance + at.mean**2),
    )


def _shared(values: Array, like: Array) -> Array:
    """Values ``(..., p, n)`` summed over functions where these share what it is for."""
    p, k = values.shape[-2], like.shape[-2]
    return values.sum(-2, keepdims=True) if p > k else values
