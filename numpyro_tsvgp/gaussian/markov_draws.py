r"""Joint draws from the posterior of a time series, in linear time.

A draw of the prior is corrected by what the sites say about it (Durbin and Koopman): with
:math:`f^+ \sim p(f)` and, in natural form, pseudo data
:math:`\lambda^+_i = \beta_i f^+_i + \sqrt{\beta_i} \, \varepsilon_i`,

.. math:: f = f^+ + \mathbb{E}[f \mid \lambda - \lambda^+, \beta]

is a draw from the posterior, the expectation being linear in the first numbers of sites.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.gaussian.approximation import Noise
from numpyro_tsvgp.gaussian.linalg import default_jitter
from numpyro_tsvgp.gaussian.points import PointCarry
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.series import Series, Simulation

__all__ = ["MarkovJoint"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkovJoint:
    """The joint posterior of function values at some times.

    Attributes:
      series: the training times and then those to draw at.
      simulation: what draws have in common.
      sites: sites at all of these times, zero where it is drawn, each ``(p, n)``.
      mean: posterior mean at the times to draw at, with the prior mean, ``(p, m)``.
      variance: posterior variance there.
      loc: prior mean there, ``(p, m)``.
      log_z: log Z of the sites, by function.
      noise_variance: what is added to variances where a density is asked for, ``(p, m)``.
    """

    series: Series
    simulation: Simulation
    sites: PointCarry
    mean: Array
    variance: Array
    loc: Array
    log_z: Array
    noise_variance: Array

    @classmethod
    def of(cls, series: Series, sites: PointCarry, process: Process) -> MarkovJoint:
        """The posterior at the last rows of a series."""
        from numpyro_tsvgp.gaussian.chain import log_normaliser

        m = process.rows
        found = series.smooth(sites)
        shape = (process.functions, m)
        loc = jnp.broadcast_to(process.loc, shape)
        variance = process.kernel.diag(process.X)
        least = jnp.finfo(loc.dtype).eps * variance
        jitter = default_jitter(loc.dtype) if process.jitter is None else process.jitter
        return cls(
            series,
            series.gains(sites.quadratic),
            sites,
            loc + found.mean[:, -m:],
            jnp.maximum(found.variance[:, -m:], least),
            loc,
            log_normaliser(found, *sites).sum(-1),
            jnp.broadcast_to(jitter * variance.mean(-1, keepdims=True), shape),
        )

    def noise_shape(self) -> Noise:
        d = self.simulation.A.shape[1]
        p, m = self.mean.shape
        return Noise((p, self.series.t.shape[0] - m, d + 1), (p, m, d))

    def _drawn(self, noise: Noise) -> Array:
        """Draws at all times of the series, without the prior mean."""
        states = jnp.concatenate([noise.inner[..., 1:], noise.rest], -2)
        prior = self.simulation.prior_draw(self.series, states)
        own, n = noise.inner[..., 0], noise.inner.shape[-2]
        beta = self.sites.quadratic[:, :n]
        pseudo = beta * prior[..., :n] + jnp.sqrt(beta) * own
        left = self.sites.linear[:, :n] - pseudo
        left = jnp.pad(left, [(0, 0)] * (left.ndim - 1) + [(0, self.mean.shape[1])])
        return prior + self.simulation.means(self.series, left)

    def draw(self, noise: Noise) -> Array:
        return self.loc + self._drawn(noise)[..., noise.inner.shape[-2] :]

    def draw_own(self, noise: Noise) -> Array:
        """The same draws at the training times, without the prior mean."""
        return self._drawn(noise)[..., : noise.inner.shape[-2]]

    def log_prob(self, values: Array) -> Array:
        # p(f, sites) / p(sites), f being data with as little noise as jitter would be.
        centred = values - self.loc

        def one(values: Array) -> Array:
            precision = 1 / self.noise_variance
            n = self.sites.linear.shape[1] - values.shape[-1]
            linear = self.sites.linear.at[:, n:].set(precision * values)
            quadratic = self.sites.quadratic.at[:, n:].set(precision)
            found = self.series.smooth(PointCarry(linear, quadratic))
            g, v = found.predicted_mean[:, :n], found.predicted_variance[:, :n]
            S = 1 + quadratic[:, :n] * v
            lam, beta = linear[:, :n], quadratic[:, :n]
            sites = -0.5 * jnp.log(S) + (2 * lam * g + v * lam**2 - beta * g**2) / (2 * S)
            spread = found.predicted_variance[:, n:] + self.noise_variance
            error = (values - found.predicted_mean[:, n:]) ** 2 / spread
            density = -0.5 * (error + jnp.log(2 * math.pi * spread))
            return sites.sum(-1) + density.sum(-1) - self.log_z

        flat = centred.reshape(-1, *centred.shape[-2:])
        return jax.lax.map(one, flat).reshape(*centred.shape[:-1])
