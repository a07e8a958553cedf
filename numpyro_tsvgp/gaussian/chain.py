r"""The posterior of a Markov chain of states given sites: what both programs compute, and share.

At sorted times, with states and sites in natural form

.. math::
  x_i = A_i x_{i-1} + \mathcal{N}(0, Q_i), \qquad
  t_i(x_i) = \exp\big(\lambda_i h^\top x_i - \tfrac12 \beta_i (h^\top x_i)^2\big),

a filter goes forward. From the mean :math:`m^-` and covariance :math:`P^-` of a state given the
sites before, with :math:`u = P^- h`, :math:`g = h^\top m^-`, :math:`v = h^\top u` and
:math:`S = 1 + \beta v`, it takes the site in,

.. math::
  m = m^- + u \, \frac{\lambda - \beta g}{S}, \qquad P = P^- - \frac{\beta}{S} u u^\top, \qquad
  \log Z \mathrel{+}= -\tfrac12 \log S + \frac{2 \lambda g + v \lambda^2 - \beta g^2}{2 S} .

A smoother goes back with the derivatives of log Z in what the filter predicts,

.. math::
  r = \frac{\partial \log Z}{\partial m^-}, \qquad
  \tfrac12 (r r^\top - N) = \frac{\partial \log Z}{\partial P^-},

(Bryson and Frazier). It inverts nothing, so that a state which is known exactly, a time that comes
twice and a site of zero need no special case, and the derivatives of log Z in everything are there
to be read off. As means and variances are derivatives of log Z in the sites themselves,

.. math::
  \mu_i = \frac{\partial \log Z}{\partial \lambda_i}, \qquad
  \mu_i^2 + v_i = -2 \frac{\partial \log Z}{\partial \beta_i},

derivatives of a *function of them* in the prior are, by symmetry, derivatives of these derivatives
along a change of the sites: reverse mode costs one forward mode of the smoother and keeps nothing
of its steps (:func:`smooth_once`).

The first number of a state is the function itself, :math:`h = (1, 0, \ldots)`, whatever the kernel
(:func:`~numpyro_tsvgp.gaussian.series.observed_first`). Its variance, which precise data make small
while sums of processes keep large ones apart, is then never a difference of large numbers.

Shapes: states ``(d, p, ...)``, sites ``(p, n)``, times ``(n,)`` in order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian.linalg import differentiated_once
from numpyro_tsvgp.gaussian.small import first_like, multiply, outer, times, transpose

__all__ = [
    "Adjoint",
    "Gradient",
    "Seen",
    "Smoothed",
    "Start",
    "before_site",
    "derivatives",
    "log_normaliser",
    "moments",
    "predict",
    "program",
    "smooth",
    "smooth_once",
    "take_in",
]


class Start(NamedTuple):
    """The state at the first time before any site: mean ``(d, p)``, covariance ``(d, d, p)``."""

    mean: Array
    covariance: Array


class Smoothed(NamedTuple):
    """The posterior of function values, each ``(p, n)``.

    Attributes:
      mean: posterior mean.
      variance: posterior variance.
      predicted_mean: mean given the sites of earlier points alone.
      predicted_variance: variance given the sites of earlier points alone.
      end: the state after the last point, given all sites.
    """

    mean: Array
    variance: Array
    predicted_mean: Array
    predicted_variance: Array
    end: Start

    def rearranged(self, order: Callable[[Array], Array]) -> Smoothed:
        """The same with the times of function values in another order."""
        mean, variance, predicted_mean, predicted_variance = (order(x) for x in self[:4])
        return Smoothed(mean, variance, predicted_mean, predicted_variance, self.end)


class Gradient(NamedTuple):
    """Derivatives in all that log Z depends on, summed over functions where these share it.

    They are those of a multiple of log Z, plus those of its derivative along a change of the sites.
    """

    space: Any
    start: Start
    t: Array
    linear: Array
    quadratic: Array


# ---- one time --------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What a filter predicts at one time, before its site.

    Attributes:
      u: covariance of the state and the function value, ``(d, ...)``.
      g: mean of the function value.
      v: variance of the function value.
    """

    u: Array
    g: Array
    v: Array


class Adjoint(NamedTuple):
    """Derivatives of log Z in a state: r ``(d, p, ...)`` and N ``(d, d, p, ...)``."""

    r: Array
    N: Array


def predict(A: Array, Q: Array, state: Start) -> Start:
    """The state after a transition."""
    m, P = state
    return Start(times(A, m), multiply(multiply(A, P), transpose(A)) + Q)


def take_in(predicted: Start, linear: Array, quadratic: Array) -> tuple[Start, Seen]:
    """The state after its site, and what was predicted of the function value."""
    m, P = predicted
    u, g, v = P[:, 0], m[0], P[0, 0]
    S = 1 + quadratic * v
    P = P - outer((quadratic / S) * u, u)
    # In the row of the function itself that is u / S, but not in floating-point arithmetic.
    half, here = u / S, first_like(u)
    P = jnp.where(here[:, None], half[None], jnp.where(here[None], half[:, None], P))
    return Start(m + u * ((linear - quadratic * g) / S), P), Seen(u, g, v)


def before_site(after: Adjoint, seen: Seen, linear: Array, quadratic: Array) -> Adjoint:
    """The adjoint of a state before its site, from that after it."""
    (r, N), (u, g, v) = after, seen
    S = 1 + quadratic * v
    e, c = (linear - quadratic * g) / S, quadratic / S
    w = times(N, u)
    h = first_like(u).astype(u.dtype)
    cross = outer(h, c * w)
    N = N - cross - transpose(cross) + outer(h, h) * (c + c**2 * (u * w).sum(0))
    return Adjoint(r + h * (e - c * (u * r).sum(0)), N)


def moments(after: Adjoint, seen: Seen, linear: Array, quadratic: Array) -> tuple[Array, Array]:
    """Mean and variance of a function value: those of the filter, moved by what came later."""
    u, g, v = seen
    S = 1 + quadratic * v
    half = u / S
    mean = g + v * ((linear - quadratic * g) / S) + (half * after.r).sum(0)
    return mean, v / S - (half * times(after.N, half)).sum(0)


def derivatives(here: Adjoint, A: Array, before: Start) -> tuple[Array, Array]:
    """Derivatives of log Z in a transition and its noise, from the adjoint before the site."""
    by_Q = 0.5 * (outer(here.r, here.r) - here.N)
    by_A = outer(here.r, before.mean) + 2 * multiply(by_Q, multiply(A, before.covariance))
    return by_A, by_Q


# ---- the whole -------------------------------------------------------------------------------


def log_normaliser(smoothed: Smoothed, linear: Array, quadratic: Array) -> Array:
    r"""The terms of :math:`\log \int p(x) \prod_i t_i(x_i) \mathrm{d}x`, shape ``(p, n)``."""
    g, v = smoothed.predicted_mean, smoothed.predicted_variance
    S = 1 + quadratic * v
    return -0.5 * jnp.log(S) + (2 * linear * g + v * linear**2 - quadratic * g**2) / (2 * S)


def program() -> Any:
    """The program for this machine: a scan in order on CPU, an associative one elsewhere."""
    from numpyro_tsvgp.gaussian import associative_scan, sequential_scan

    return sequential_scan if jax.default_backend() == "cpu" else associative_scan


def smooth(
    space: Any, start: Start, t: Array, linear: Array, quadratic: Array, using: Any = None
) -> Smoothed:
    """The posterior of function values, differentiable in everything as often as one likes.

    Args:
      space: the state-space form of the prior.
      start: the state at the first time.
      t: times in order, ``(n,)``.
      linear: first number of each site, ``(p, n)``.
      quadratic: second number of each site, ``(p, n)``.
      using: the program; that for this machine by default.

    Returns:
      The posterior.
    """
    return (using or program()).smooth(space, start, t, linear, quadratic)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def smooth_once(
    space: Any, start: Start, t: Array, linear: Array, quadratic: Array, using: Any = None
) -> tuple[Array, Array, Array]:
    """Means, variances ``(p, n)`` and log Z of all functions, for one first derivative in reverse.

    Args:
      space: the state-space form of the prior.
      start: the state at the first time.
      t: times in order, ``(n,)``.
      linear: first number of each site, ``(p, n)``.
      quadratic: second number of each site, ``(p, n)``.
      using: the program; that for this machine by default.

    Returns:
      The three.
    """
    found = smooth(space, start, t, linear, quadratic, using)
    return found.mean, found.variance, log_normaliser(found, linear, quadratic).sum()


def _forward(
    space: Any, start: Start, t: Array, linear: Array, quadratic: Array, using: Any
) -> tuple[Any, Any]:
    found = smooth_once(space, start, t, linear, quadratic, using)
    return found, ((space, start, t, linear, quadratic), found[0])


def _reverse(using: Any, kept: Any, cotangents: tuple[Array, Array, Array]) -> Any:
    inputs, mean = differentiated_once(kept)
    by_mean, by_variance, by_log_z = cotangents
    # Sum g_m dm + g_v dv is the derivative of log Z along these changes of the sites, derived.
    along = by_mean - 2 * by_variance * mean, -2 * by_variance
    gradient = partial((using or program()).gradient, *inputs, by_log_z)
    # At converged sites the likelihood asks for no change, and half of the work is for nothing.
    rounding = 64 * jnp.finfo(mean.dtype).eps
    scales = (jnp.abs(site).max() for site in inputs[3:])
    none = [jnp.abs(x).max() <= rounding * s for x, s in zip(along, scales, strict=True)]
    found = lax.cond(none[0] & none[1], lambda: gradient(None), lambda: gradient(along))
    return tuple(found)


smooth_once.defvjp(_forward, _reverse)
