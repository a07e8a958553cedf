r"""Markov sites: one pair of numbers for each time of a series, and a posterior in linear time.

Where the kernel has a state-space form the posterior given point sites is that of a chain of
states, and a filter and a smoother give its marginals, its evidence and its draws in O(n). There is
no other approximation in it: it is t-VGP, with nothing factorised. The divergence is

.. math::
  \mathrm{KL} = \sum_i \big[ \lambda_i m_i - \tfrac12 \beta_i (m_i^2 + v_i) \big] - \log Z .

Sites are statements about f, mean included. Times may come in any order, more than once, and with
any gaps; they are sorted inside.

Shapes: ``p`` latent functions, ``n`` times.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian import chain
from numpyro_tsvgp.gaussian.approximation import Local, Noise
from numpyro_tsvgp.gaussian.chain import Smoothed
from numpyro_tsvgp.gaussian.inducing_values import NOT_THERE, approximation
from numpyro_tsvgp.gaussian.markov_draws import MarkovJoint
from numpyro_tsvgp.gaussian.markov_ready import MarkovReady, ready_at
from numpyro_tsvgp.gaussian.points import PointCarry
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.quadrature import Marginals
from numpyro_tsvgp.gaussian.series import Series, series_of, times_of
from numpyro_tsvgp.gaussian.whitened import PointSites

__all__ = ["Markov", "MarkovAtData", "MarkovAtNewData", "initial_markov"]


class MarkovPosterior(NamedTuple):
    """The posterior at the times of some data, in the order of the data; each ``(p, n)``.

    Attributes:
      mean: posterior mean without the prior mean.
      variance: posterior variance.
      divergence: from the prior, summed over functions.
    """

    mean: Array
    variance: Array
    divergence: Array


def _divergence(sites: PointCarry, mean: Array, variance: Array, log_z: Array) -> Array:
    inner = sites.linear * mean - 0.5 * sites.quadratic * (mean**2 + variance)
    return inner.sum() - log_z


def _rounding(process: Process, X: Array) -> Array:
    variance = process.kernel.diag(X)
    return jnp.finfo(variance.dtype).eps * jnp.abs(variance)


@approximation
class Markov:
    """Point sites at the times of a series, whose prior is a chain of states.

    Attributes:
      linear: first number of each site, about f, ``(p, n)``.
      quadratic: second number of each site, ``(p, n)``.
      inputs: the times, ``(n, 1)`` or ``(n,)``, in any order.
      prior_mean: the prior mean there, ``(p, n)`` or ``(1, n)``.
    """

    linear: Array
    quadratic: Array
    inputs: Array
    prior_mean: Array

    optimized: ClassVar[frozenset[str]] = frozenset()
    keeps_sums: ClassVar[bool] = False
    keeps_points: ClassVar[bool] = True
    follows_inputs: ClassVar[bool] = True

    # ---- what it is about --------------------------------------------------------------------

    @property
    def inducing(self) -> Array:
        return self.inputs

    @property
    def mean_inputs(self) -> Array:
        return self.inputs

    @property
    def known_means(self) -> Array:
        return self.prior_mean

    @property
    def largest_factor(self) -> int:
        return 0  # nothing is factorised

    @property
    def input_columns(self) -> int:
        return 1

    def information(self, process: Process) -> Array:
        r"""How much the sites say against the prior: :math:`\sum_i \beta_i k(x_i, x_i)`."""
        variance = process.kernel.diag(self.inputs)
        return (jnp.maximum(self.quadratic, 0.0) * variance).sum()

    def centred(self, mean: Array) -> PointCarry:
        """The sites about the function without a mean."""
        return PointCarry(self.linear - self.quadratic * mean, self.quadratic)

    def synced(self, process: Process) -> Self:
        prior_mean = jnp.broadcast_to(process.loc, self.prior_mean.shape)
        return dataclasses.replace(self, inputs=process.X, prior_mean=prior_mean)

    def without_data(self) -> Self:
        zero = jnp.zeros_like(self.linear)
        return dataclasses.replace(self, linear=zero, quadratic=zero)

    # ---- at the data -------------------------------------------------------------------------

    def at_data(self, process: Process) -> Any:
        if process.rows != self.linear.shape[-1]:  # some of the rows: nothing new is said there
            return self.at_new_data(process)
        here = self.synced(process)
        return MarkovAtData(here, process, series_of(process, times_of(process.X)))

    def at_data_for_gradient(self, process: Process) -> Any:
        at = self.at_data(process)
        return dataclasses.replace(at, once=True) if isinstance(at, MarkovAtData) else at

    def at_new_data(self, process: Process) -> MarkovAtNewData:
        """At times that are new to it; see :class:`MarkovAtNewData`."""
        both = jnp.concatenate([times_of(self.inputs), times_of(process.X)])
        return MarkovAtNewData(self, process, series_of(process, both))

    def with_points(self, process: Process, sites: PointCarry) -> Self:
        """The approximation with more times in it, sites there being about f without its mean."""
        p, m = sites.linear.shape
        loc = jnp.broadcast_to(process.loc, (p, m))
        old = jnp.broadcast_to(self.prior_mean, (p, self.prior_mean.shape[1]))
        return dataclasses.replace(
            self,
            linear=jnp.concatenate([self.linear, sites.linear + sites.quadratic * loc], 1),
            quadratic=jnp.concatenate([self.quadratic, sites.quadratic], 1),
            inputs=jnp.concatenate([self.inputs, process.X.reshape(m, *self.inputs.shape[1:])]),
            prior_mean=jnp.concatenate([old, loc], 1),
        )

    def without_points(self, process: Process, sites: PointSites) -> Self:
        """The same without times, of equal ones those with the nearest sites."""
        times, gone = (np.asarray(times_of(x)) for x in (self.inputs, process.X))
        own = np.concatenate([np.asarray(self.linear), np.asarray(self.quadratic)])
        linear = np.asarray(sites.linear + sites.quadratic * process.loc)
        theirs = np.concatenate([linear, np.asarray(sites.quadratic)])
        stays = np.ones(len(times), bool)
        for t, site in zip(gone, theirs.T, strict=True):
            rows = np.flatnonzero(stays & (times == t))
            if not len(rows):
                raise ValueError(NOT_THERE)
            stays[rows[np.abs(own[:, rows] - site[:, None]).sum(0).argmin()]] = False
        return dataclasses.replace(
            self,
            linear=self.linear[:, stays],
            quadratic=self.quadratic[:, stays],
            inputs=self.inputs[stays],
            prior_mean=self.prior_mean[:, stays],
        )

    def with_inducing(self, process: Process, inducing: Array, prior_mean: Array) -> Self:
        raise ValueError(
            "This GP has no inducing inputs that could be moved: it was fitted with markov=True, "
            "where every time has a site of its own."
        )

    # ---- at any times ------------------------------------------------------------------------

    def ready(self, process: Process) -> MarkovReady:
        return ready_at(self, process)

    def _union(self, process: Process) -> tuple[Series, PointCarry]:
        """The series of its own times and then those of ``process``, with sites of zero there."""
        both = jnp.concatenate([times_of(self.inputs), times_of(process.X)])
        sites = self.centred(process.means)
        pad = [(0, 0), (0, process.rows)]
        return series_of(process, both), PointCarry(*(jnp.pad(x, pad) for x in sites))

    def marginals(self, process: Process) -> Local:
        series, sites = self._union(process)
        found = series.smooth(sites)
        return _local(found, process, slice(self.linear.shape[-1], None))

    def marginals_at_data(self, process: Process) -> Local:
        if process.rows != self.linear.shape[-1]:
            return self.marginals(process)
        here = self.synced(process)
        series = series_of(process, times_of(process.X))
        return _local(series.smooth(here.centred(process.loc)), process, slice(None))

    def kl(self, process: Process) -> Array:
        sites = self.centred(process.means)
        found = series_of(process, times_of(self.inputs)).smooth(sites)
        return _divergence(sites, found.mean, found.variance, _log_z(found, sites))

    def joint(self, process: Process) -> MarkovJoint:
        series, sites = self._union(process)
        return MarkovJoint.of(series, sites, process)

    def joint_factor(self, process: Process) -> int:
        del process
        known = not isinstance(self.quadratic, jax.core.Tracer)
        if known and bool((np.asarray(self.quadratic) < 0).any()):
            raise ValueError(
                "Joint draws from Markov sites need sites whose curvature is zero or more, and "
                "some are negative: the pseudo data that a draw is corrected by would have "
                "negative variances. Marginals are right. Use a site rule that counts negative "
                "curvature as zero, as the default does."
            )
        return 0

    def noise_shape(self, process: Process) -> Noise:
        d, n = process.kernel.state_space().dim, self.linear.shape[-1]
        p, m = process.functions, process.rows
        return Noise((p, n, d + 1), (p, m, d))

    def draw_marginally(self, process: Process, noise: Noise) -> Array:
        return self.joint(process).draw(noise)  # linear already

    def log_ratio(self, process: Process, noise: Noise) -> Array:
        joint = self.joint(process)
        sites = self.centred(process.means)
        values = joint.draw_own(noise)
        found = series_of(process, times_of(self.inputs)).smooth(sites)
        says = sites.linear * values - 0.5 * sites.quadratic * values**2
        return _log_z(found, sites) - says.sum((-2, -1))

    def covariance(self, one: Process, other: Process) -> Array:
        n, n1 = self.linear.shape[-1], one.rows
        both = jnp.concatenate([times_of(x) for x in (self.inputs, one.X, other.X)])
        series = series_of(one, both)
        quadratic = jnp.pad(self.quadratic, [(0, 0), (0, n1 + other.rows)])
        # The derivative of all means in the first number of a site is a column of it.
        rows = jnp.arange(n1)
        unit = jnp.zeros((n1, one.functions, both.shape[0]), self.linear.dtype)
        unit = unit.at[rows, :, n + rows].set(1.0)
        return jnp.moveaxis(series.means(quadratic, unit)[..., n + n1 :], 0, 1)

    def responses(self, process: Process) -> Array:
        r"""How the mean at each time answers to each data point, ``(p, n, n)``.

        The posterior covariance of all pairs of times is quadratic in their number, which is what
        was asked for; :func:`~numpyro_tsvgp.influence` without ``delta`` is linear.
        """
        return self.covariance(process, process)

    def dual_parameters(self, process: Process) -> Any:
        raise ValueError(
            "Markov sites have no inducing values, whose dual parameters these are. The sites "
            "themselves are the fields linear and quadratic, in params as '..._auto_linear' and "
            "'..._auto_quadratic'."
        )

    def factors(self, process: Process) -> Any:
        # Nothing is factorised; what could fail is the posterior itself.
        found = self.marginals_at_data(process)
        return found.mean, jnp.log(found.variance)


def _log_z(found: Smoothed, sites: PointCarry) -> Array:
    return chain.log_normaliser(found, *sites).sum()


def _local(found: Smoothed, process: Process, rows: slice) -> Local:
    mean, variance = found.mean[:, rows], found.variance[:, rows]
    variance = jnp.maximum(variance, _rounding(process, process.X))
    return Local(mean, variance, variance)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkovAtData:
    """Markov sites at their training times.

    Attributes:
      kept: the approximation.
      process: the prior at the training times.
      series: its chain of states.
      once: whether one first derivative is all that will be taken.
    """

    kept: Markov
    process: Process
    series: Series
    once: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def features(self) -> None:
        return None  # a site is at its time, and nothing has to be projected

    def start(self) -> PointCarry:
        return self.kept.centred(self.process.loc)

    def posterior(self, carry: PointCarry) -> MarkovPosterior:
        found = self.series.smooth(carry)
        divergence = _divergence(carry, found.mean, found.variance, _log_z(found, carry))
        return MarkovPosterior(found.mean, found.variance, divergence)

    def _least(self) -> Array:
        return _rounding(self.process, self.process.X)

    def point_sites(self, carry: PointCarry) -> PointSites:
        return PointSites(*carry)

    def local(self, posterior: MarkovPosterior) -> Local:
        variance = jnp.maximum(posterior.variance, self._least())
        return Local(posterior.mean, variance, variance)

    def divergence(self, posterior: MarkovPosterior) -> Array:
        return posterior.divergence

    def count_floored(self, posterior: MarkovPosterior) -> Array:
        return (posterior.variance < self._least()).sum()

    def keep(self, carry: PointCarry) -> Markov:
        linear = carry.linear + carry.quadratic * self.process.loc
        return dataclasses.replace(
            self.kept.synced(self.process), linear=linear, quadratic=carry.quadratic
        )

    def bound(self) -> tuple[Marginals, Array]:
        return self.fresh_bound(self.kept)

    def fresh_bound(self, kept: Markov) -> tuple[Marginals, Array]:
        sites = kept.centred(self.process.loc)
        if not self.once:
            q = self.posterior(sites)
            return Marginals(q.mean, jnp.maximum(q.variance, self._least())), q.divergence
        mean, variance, log_z = self.series.smooth_once(sites)
        divergence = _divergence(sites, mean, variance, log_z)
        return Marginals(mean, jnp.maximum(variance, self._least())), divergence


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkovAtNewData:
    """Markov sites at times that are new to them; E-steps are about sites of the new times alone.

    Attributes:
      kept: the approximation before.
      process: the prior at the new times.
      series: the chain of states of the old times and the new.
    """

    kept: Markov
    process: Process
    series: Series

    @property
    def features(self) -> None:
        return None

    def start(self) -> PointCarry:
        zero = jnp.zeros((self.process.functions, self.process.rows), self.process.loc.dtype)
        return PointCarry(zero, zero)

    def posterior(self, carry: PointCarry) -> MarkovPosterior:
        old = self.kept.centred(self.process.means)
        sites = PointCarry(*(jnp.concatenate(pair, 1) for pair in zip(old, carry, strict=True)))
        found = self.series.smooth(sites)
        divergence = _divergence(sites, found.mean, found.variance, _log_z(found, sites))
        new = slice(self.kept.linear.shape[-1], None)
        return MarkovPosterior(found.mean[:, new], found.variance[:, new], divergence)

    def _least(self) -> Array:
        return _rounding(self.process, self.process.X)

    def point_sites(self, carry: PointCarry) -> PointSites:
        return PointSites(*carry)

    def local(self, posterior: MarkovPosterior) -> Local:
        variance = jnp.maximum(posterior.variance, self._least())
        return Local(posterior.mean, variance, variance)

    def divergence(self, posterior: MarkovPosterior) -> Array:
        return posterior.divergence

    def count_floored(self, posterior: MarkovPosterior) -> Array:
        return (posterior.variance < self._least()).sum()

    def keep(self, carry: PointCarry) -> Markov:
        return self.kept.with_points(self.process, carry)

    def bound(self) -> tuple[Marginals, Array]:
        q = self.posterior(self.start())
        return Marginals(q.mean, jnp.maximum(q.variance, self._least())), q.divergence

    def fresh_bound(self, kept: Markov) -> tuple[Marginals, Array]:
        loc, new = self.process.loc, slice(self.kept.linear.shape[-1], None)
        linear, quadratic = kept.linear[:, new], kept.quadratic[:, new]
        q = self.posterior(PointCarry(linear - quadratic * loc, quadratic))
        return Marginals(q.mean, jnp.maximum(q.variance, self._least())), q.divergence


def initial_markov(process: Process) -> Markov:
    """Markov sites of zero, whose posterior is the prior.

    Args:
      process: the prior at the training times.

    Returns:
      The approximation.
    """
    zero: Any = np.zeros((process.functions, process.rows), process.loc.dtype)
    return Markov(zero, zero, process.X, process.loc)
