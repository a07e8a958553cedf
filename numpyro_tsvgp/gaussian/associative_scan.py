r"""The posterior of a chain by associative scans of logarithmic depth: for accelerators.

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
from numpyro_tsvgp.gaussian.small import (
    eye_like,
    first_like,
    inverse,
    multiply,
    outer,
    times,
    transpose,
)

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
    before: Start
    seen: Seen
    here: Adjoint
    mean: Array
    variance: Array
    end: Start


def _steps(space: Any, t: Array) -> tuple[Array, Array]:
    return space.step(jnp.concatenate([t[:1], t[:-1]]), t)


def _pass(space: Any, start: Start, t: Array, linear: Array, quadratic: Array) -> _Passed:
    A, Q = _steps(space, t)
    p, n = linear.shape
    shape = (*A.shape[:2], p, n)
    A, Q = jnp.broadcast_to(A, shape), jnp.broadcast_to(Q, shape)
    # The first stretch starts from a state that is known: what it does does not depend on it.
    first = jnp.arange(n) == 0
    known = predict(A[..., :1], Q[..., :1], Start(*(x[..., None] for x in start)))
    into = jnp.where(first, 0.0, A)
    offset = jnp.where(first, known.mean, 0.0)
    noise = jnp.where(first, known.covariance, Q)
    (b, C), (u, g, v) = take_in(Start(offset, noise), linear, quadratic)
    S, a = 1 + quadratic * v, into[0]
    e, c = (linear - quadratic * g) / S, quadratic / S
    parts = _Stretch(into - outer(c * u, a), b, C, a * e, outer(c * a, a))
    joined = _scan(_join, parts)

    def shifted(at_start: Array, values: Array) -> Array:
        return jnp.concatenate([at_start[..., None], values[..., :-1]], -1)

    before = Start(shifted(start.mean, joined.b), shifted(start.covariance, joined.C))
    _, seen = take_in(predict(A, Q, before), linear, quadratic)
    # From the adjoint before the site of a time to that before the site of the one before.
    next_A = _later(A)
    zero = Adjoint(jnp.zeros_like(seen.u), jnp.zeros_like(A))
    c = quadratic / (1 + quadratic * seen.v)
    h = first_like(seen.u).astype(c.dtype)
    through = next_A - outer(c * times(next_A, seen.u), h)
    own = _Back(through, *before_site(zero, seen, linear, quadratic))
    here = Adjoint(*_scan(_join_back, own, reverse=True)[1:])
    back = transpose(next_A)
    after = Adjoint(times(back, _later(here.r)), multiply(multiply(back, _later(here.N)), next_A))
    mean, variance = moments(after, seen, linear, quadratic)
    end = Start(joined.b[..., -1], joined.C[..., -1])
    return _Passed(A, before, seen, here, mean, variance, end)


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
    return Smoothed(at.mean, at.variance, at.seen.g, at.seen.v, at.end)


def gradient(
    space: Any,
    start: Start,
    t: Array,
    linear: Array,
    quadratic: Array,
    weight: Array,
    along: tuple[Array, Array] | None,
) -> Gradient:
    """See :func:`numpyro_tsvgp.gaussian.sequential_scan.gradient`."""

    def found(linear: Array, quadratic: Array) -> Any:
        at = _pass(space, start, t, linear, quadratic)
        back = transpose(at.A[..., 0])
        r = times(back, at.here.r[..., 0])
        N = multiply(multiply(back, at.here.N[..., 0]), transpose(back))
        by_start = Start(r, 0.5 * (outer(r, r) - N))
        by_sites = at.mean, -0.5 * (at.variance + at.mean**2)
        return derivatives(at.here, at.A, at.before), by_start, by_sites

    if along is None:
        value = found(linear, quadratic)
        change = jax.tree.map(jnp.zeros_like, value)
    else:
        value, change = jax.jvp(found, (linear, quadratic), along)
    (by_A, by_Q), by_start, by_sites = jax.tree.map(lambda x, dx: weight * x + dx, value, change)
    (A, Q), pull = jax.vjp(_steps, space, t)
    by_space, by_t = pull((_shared(by_A, A), _shared(by_Q, Q)))
    return Gradient(by_space, by_start, by_t, *by_sites)


def _shared(values: Array, like: Array) -> Array:
    """Values ``(..., p, n)`` summed over functions where these share what it is for."""
    return values.sum(-2, keepdims=True) if values.shape[-2] > like.shape[-2] else values
