r"""The posterior of a time series at single times, with everything else computed once.

Given both ends of the gap that a new time falls into, the posterior there does not depend on the
rest of the series. What is kept is the filtered state at each training time and the adjoint that
later data have there (see :mod:`numpyro_tsvgp.gaussian.chain`). Each new time is then one step from
the time before it and one to the time after it, whatever the length of the series.

The filtered state at the last time is all that a forecast needs, and all that new data at the end
of a series need: :class:`MarkovEnd`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian import chain
from numpyro_tsvgp.gaussian.approximation import Local, Noise
from numpyro_tsvgp.gaussian.chain import Adjoint, Start, before_site, predict, take_in
from numpyro_tsvgp.gaussian.points import PointCarry
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.series import observed_first, series_of, times_of
from numpyro_tsvgp.gaussian.small import multiply, times, transpose
from numpyro_tsvgp.gaussian.whitened import PointSites

__all__ = ["MarkovEnd", "MarkovReady", "end_of", "ready_at"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkovReady:
    """The posterior of a time series, ready to be asked at single times.

    Attributes:
      t: training times in order, ``(n,)``.
      mean: filtered mean of the state at each, ``(d, p, n)``.
      covariance: its filtered covariance, ``(d, d, p, n)``.
      r: adjoint of the mean before the site of each, ``(d, p, n)``.
      N: adjoint of the covariance, ``(d, d, p, n)``.
    """

    t: Array
    mean: Array
    covariance: Array
    r: Array
    N: Array

    @property
    def inducing(self) -> Array:
        return self.t

    def means(self, process: Process) -> Array:
        return self.marginals(process).mean

    def weights(self, noise: Noise, values: Array) -> Array:
        del noise, values
        raise ValueError(
            "Functions cannot be drawn of a GP that was fitted with markov=True: each evaluation "
            "would visit all of its times. Draw values, which is linear: fit.sample(key, t_new)."
        )

    def marginals(self, process: Process) -> Local:
        """The posterior at the inputs of ``process``, centred, in any order."""
        space = observed_first(process.kernel.state_space(), self.mean.dtype)
        now, n = times_of(process.X), self.t.shape[0]
        before = jnp.searchsorted(self.t, now, side="right") - 1
        is_first, is_last = before < 0, before == n - 1
        at, after = jnp.maximum(before, 0), jnp.minimum(before + 1, n - 1)
        A, Q = space.step(jnp.where(is_first, now, self.t[at]), now)
        m = jnp.where(is_first, 0.0, times(A, self.mean[..., at]))
        P = multiply(multiply(A, self.covariance[..., at]), transpose(A)) + Q
        P = jnp.where(is_first, space.covariance(now), P)
        back, _ = space.step(now, jnp.where(is_last, now, self.t[after]))
        r = jnp.where(is_last, 0.0, times(transpose(back), self.r[..., after]))
        N = multiply(multiply(transpose(back), self.N[..., after]), back)
        N = jnp.where(is_last, 0.0, N)
        u = P[:, 0]
        mean = m[0] + (u * r).sum(0)
        variance = u[0] - (u * times(N, u)).sum(0)
        return _floored(mean, variance, process)


def _floored(mean: Array, variance: Array, process: Process) -> Local:
    prior = process.kernel.diag(process.X)
    variance = jnp.maximum(variance, jnp.finfo(mean.dtype).eps * jnp.abs(prior))
    return Local(mean, variance, variance)


def ready_at(kept: Any, process: Process) -> MarkovReady:
    """Everything about Markov sites that does not depend on where they are asked.

    Args:
      kept: the :class:`~numpyro_tsvgp.gaussian.markov.Markov` sites.
      process: the prior, with its mean at their times.

    Returns:
      The posterior, ready.
    """
    series = series_of(process, times_of(kept.inputs))
    space, t = series.space, series.t
    linear, quadratic = (series.sorted(x).T for x in kept.centred(process.means))

    def step_to(t0: Array, t1: Array) -> tuple[Array, Array]:
        A, Q = space.step(t0[None], t1[None])
        return A[..., 0], Q[..., 0]

    def forward(state: Start, row: Any) -> tuple[Start, Any]:
        t0, t1, lam, beta = row
        new, seen = take_in(predict(*step_to(t0, t1), state), lam, beta)
        return new, (new, seen)

    before = jnp.concatenate([t[:1], t[:-1]])
    rows = before, t, linear, quadratic
    _, (states, seen) = lax.scan(forward, series.start, rows)

    def backward(after: Adjoint, row: Any) -> tuple[Adjoint, Adjoint]:
        (t0, t1, lam, beta), at = row
        here = before_site(after, at, lam, beta)
        A, _ = step_to(t0, t1)
        back = transpose(A)
        return Adjoint(times(back, here.r), multiply(multiply(back, here.N), A)), here

    zero = Adjoint(*jax.tree.map(jnp.zeros_like, tuple(series.start)))
    _, (r, N) = lax.scan(backward, zero, (rows, seen), reverse=True)
    found = (states.mean, states.covariance, r, N)
    return MarkovReady(t, *(jnp.moveaxis(x, 0, -1) for x in found))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkovEnd:
    """The state at the end of a series: what forecasts and new data there need of all data before.

    Attributes:
      time: the last time, a scalar.
      mean: mean of the state then, without the prior mean, ``(d, p)``.
      covariance: its covariance, ``(d, d, p)``.
    """

    time: Array
    mean: Array
    covariance: Array

    def at_new_data(self, process: Process) -> EndAtNewData:
        """At times after it."""
        return EndAtNewData(self, process)

    def smooth(self, process: Process, sites: PointCarry) -> tuple[chain.Smoothed, Array]:
        """The posterior at later times with sites there, and the last of these times."""
        space = observed_first(process.kernel.state_space(), self.mean.dtype)
        t = times_of(process.X)
        order = jnp.argsort(t)
        t = jnp.concatenate([self.time[None], t[order]])
        padded = (jnp.pad(x[:, order], [(0, 0), (1, 0)]) for x in sites)
        found = chain.smooth(space, Start(self.mean, self.covariance), t, *padded)
        rank = jnp.argsort(order)
        return found.rearranged(lambda x: x[:, 1:][:, rank]), t[-1]

    def marginals(self, process: Process) -> Local:
        """Forecasts at the inputs of ``process``, centred."""
        zero = jnp.zeros((process.functions, process.rows), self.mean.dtype)
        found, _ = self.smooth(process, PointCarry(zero, zero))
        return _floored(found.mean, found.variance, process)


def end_of(kept: Any, process: Process) -> MarkovEnd:
    """The state at the end of the series of Markov sites.

    Args:
      kept: the :class:`~numpyro_tsvgp.gaussian.markov.Markov` sites.
      process: the prior, with its mean at their times.

    Returns:
      The end.
    """
    series = series_of(process, times_of(kept.inputs))
    found = series.smooth(kept.centred(process.means))
    return MarkovEnd(series.t[-1], *found.end)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EndAtNewData:
    """The end of a series at times after it: what E-steps there need; O(1) a new point.

    Attributes:
      kept: the end of the series so far.
      process: the prior at the new times.
    """

    kept: MarkovEnd
    process: Process

    @property
    def features(self) -> None:
        return None

    def start(self) -> PointCarry:
        zero = jnp.zeros((self.process.functions, self.process.rows), self.kept.mean.dtype)
        return PointCarry(zero, zero)

    def posterior(self, carry: PointCarry) -> Any:
        found, _ = self.kept.smooth(self.process, carry)
        log_z = chain.log_normaliser(found, *carry).sum()
        inner = carry.linear * found.mean
        inner = inner - 0.5 * carry.quadratic * (found.mean**2 + found.variance)
        return found, inner.sum() - log_z

    def point_sites(self, carry: PointCarry) -> PointSites:
        return PointSites(*carry)

    def local(self, posterior: Any) -> Local:
        return _floored(posterior[0].mean, posterior[0].variance, self.process)

    def divergence(self, posterior: Any) -> Array:
        return posterior[1]

    def count_floored(self, posterior: Any) -> Array:
        return (posterior[0].variance <= 0).sum()

    def keep(self, carry: PointCarry) -> MarkovEnd:
        found, last = self.kept.smooth(self.process, carry)
        return MarkovEnd(last, *found.end)
