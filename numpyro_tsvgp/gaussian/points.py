r"""Point sites: one pair of numbers for each data point.

The sums over sites are rebuilt at the current hyperparameters,

.. math::
  \xi = \sum_i w_i (\lambda_i - \beta_i \mu_i), \qquad G = \sum_i \beta_i w_i w_i^\top,

which is the tightest M-step and asks for all training inputs in each step. A site is a statement
about :math:`f(x_i)` itself, so the current prior mean :math:`\mu_i` is taken off here.

Shapes are those of :mod:`numpyro_tsvgp.gaussian.features`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian import whitened
from numpyro_tsvgp.gaussian.approximation import Local
from numpyro_tsvgp.gaussian.features import Features, Prior, at_inducing, features_at
from numpyro_tsvgp.gaussian.inducing_values import (
    NOT_THERE,
    InducingAtData,
    InducingValues,
    approximation,
    local_of,
)
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.quadrature import Marginals
from numpyro_tsvgp.gaussian.whitened import PointSites, Posterior, Sums, sum_sites

__all__ = ["FullPoints", "Points", "initial_full_points", "initial_points"]


class PointCarry(NamedTuple):
    """Point sites about the function without its current mean."""

    linear: Array
    quadratic: Array

    def add(self, sites: PointSites, at: Any) -> PointCarry:
        del at
        return PointCarry(self.linear + sites.linear, self.quadratic + sites.quadratic)

    def blend(self, sites: PointSites, at: Any, rate: Any) -> PointCarry:
        del at
        return PointCarry(
            (1 - rate) * self.linear + rate * sites.linear,
            (1 - rate) * self.quadratic + rate * sites.quadratic,
        )


class NewCarry(NamedTuple):
    """Sites of new points, about the function without its mean, and the sums of earlier ones."""

    linear: Array
    quadratic: Array
    earlier: Sums

    def add(self, sites: PointSites, at: Any) -> NewCarry:
        del at
        return self._replace(
            linear=self.linear + sites.linear, quadratic=self.quadratic + sites.quadratic
        )

    def blend(self, sites: PointSites, at: Any, rate: Any) -> NewCarry:
        """A step of the new points alone."""
        new = PointCarry(self.linear, self.quadratic).blend(sites, at, rate)
        return self._replace(linear=new.linear, quadratic=new.quadratic)


class _PointSites(InducingValues):
    """What point sites with and without inducing inputs have in common."""

    linear: Array
    quadratic: Array
    inputs: Array
    prior_mean: Array

    keeps_sums: ClassVar[bool] = False
    keeps_points: ClassVar[bool] = True
    follows_inputs: ClassVar[bool] = True

    @property
    def mean_inputs(self) -> Array:
        return self.inputs

    @property
    def known_means(self) -> Array:
        return self.prior_mean

    def training_features(self, process: Process, prior: Prior, X: Array) -> Features:
        """Features of the training inputs X."""
        return features_at(process, self.inducing, X, prior)

    def information(self, process: Process) -> Array:
        r"""How much the sites say against the prior: :math:`\sum_i \beta_i k(x_i, x_i)`."""
        variance = process.kernel.diag(self.inputs)
        return (jnp.maximum(self.quadratic, 0.0) * variance).sum()

    def centred(self, mean: Array) -> PointCarry:
        """The sites about the function without a mean."""
        return PointCarry(self.linear - self.quadratic * mean, self.quadratic)

    def sums(self, process: Process, prior: Prior) -> Sums:
        at = self.training_features(process, prior, self.inputs)
        return sum_sites(PointSites(*self.centred(process.means)), at)

    def remade(self, carry: PointCarry, process: Process, prior: Prior) -> Self:
        """The same with sites about the function without its current mean."""
        del prior
        linear = carry.linear + carry.quadratic * process.loc
        return dataclasses.replace(  # type: ignore[type-var]
            self.synced(process), linear=linear, quadratic=carry.quadratic
        )

    def synced(self, process: Process) -> Self:
        prior_mean = jnp.broadcast_to(process.loc, self.prior_mean.shape)
        return dataclasses.replace(  # type: ignore[type-var]
            self, inputs=process.X, prior_mean=prior_mean
        )

    def at_data(self, process: Process) -> PointsAtData:
        here = self.synced(process)  # hyperparameters may have moved the inputs
        prior = here.prior(process)
        at = here.training_features(process, prior, process.X)
        return PointsAtData(here, process, prior, at)

    def at_new_data(self, process: Process) -> NewPointsAtData:
        n = self.linear.shape[-1]
        here = self.appended(process)
        prior = here.prior(process)
        at = here.training_features(process, prior, here.inputs)
        old, new = (Features(*(x[:, rows] for x in at)) for rows in (slice(n), slice(n, None)))
        earlier = sum_sites(PointSites(*self.centred(process.means)), old)
        return NewPointsAtData(here, process, prior, new, earlier)

    def appended(self, process: Process) -> Self:
        """The same with sites of zero at new inputs after its own."""
        p = self.linear.shape[0]
        zero = jnp.zeros((p, process.rows), self.linear.dtype)
        k = max(self.prior_mean.shape[0], process.means.shape[0], process.loc.shape[0])
        n = self.linear.shape[-1]
        means = jnp.broadcast_to(process.means, (k, n))
        return dataclasses.replace(  # type: ignore[type-var]
            self,
            linear=jnp.concatenate([self.linear, zero], -1),
            quadratic=jnp.concatenate([self.quadratic, zero], -1),
            inputs=jnp.concatenate([self.inputs, process.X]),
            prior_mean=jnp.concatenate(
                [means, jnp.broadcast_to(process.loc, (k, process.rows))], -1
            ),
        )

    def without_points(self, process: Process, sites: PointSites) -> Self:
        """The same without rows, of those at the same inputs the ones with the nearest sites."""
        inputs = np.asarray(self.inputs).reshape(len(self.inputs), -1)
        own = np.concatenate([np.asarray(self.linear), np.asarray(self.quadratic)])
        linear = np.asarray(sites.linear + sites.quadratic * process.loc)
        theirs = np.concatenate([linear, np.asarray(sites.quadratic)])
        stays = np.ones(len(inputs), bool)
        for x, site in zip(np.asarray(process.X).reshape(process.rows, -1), theirs.T, strict=True):
            rows = np.flatnonzero(stays & (inputs == x).all(-1))
            if not len(rows):
                raise ValueError(NOT_THERE)
            stays[rows[np.abs(own[:, rows] - site[:, None]).sum(0).argmin()]] = False
        return dataclasses.replace(  # type: ignore[type-var]
            self,
            linear=self.linear[:, stays],
            quadratic=self.quadratic[:, stays],
            inputs=self.inputs[stays],
            prior_mean=self.prior_mean[:, stays],
        )

    def without_data(self) -> Self:
        zero = jnp.zeros_like(self.linear)
        return dataclasses.replace(self, linear=zero, quadratic=zero)  # type: ignore[type-var]


@approximation
class Points(_PointSites):
    """Point sites whose sums are taken through inducing inputs.

    Attributes:
      linear: first number of each site, about f, ``(p, n)``.
      quadratic: second number of each site, ``(p, n)``.
      inputs: the training inputs, ``(n, d)`` or ``(n,)``.
      prior_mean: the prior mean there, ``(p, n)`` or ``(1, n)``.
      inducing: inducing inputs, ``(m, d)`` or ``(m,)``.
    """

    linear: Array
    quadratic: Array
    inputs: Array
    prior_mean: Array
    inducing: Array

    def with_inducing(self, process: Process, inducing: Array, prior_mean: Array) -> Self:
        del process, prior_mean  # sites are about f at the data, wherever inducing inputs are
        return dataclasses.replace(self, inducing=inducing)


@approximation
class FullPoints(_PointSites):
    """Point sites without inducing inputs (t-VGP): every data point is its own.

    Attributes:
      linear: first number of each site, about f, ``(p, n)``.
      quadratic: second number of each site, ``(p, n)``.
      inputs: the training inputs, ``(n, d)`` or ``(n,)``.
      prior_mean: the prior mean there, ``(p, n)`` or ``(1, n)``.
    """

    linear: Array
    quadratic: Array
    inputs: Array
    prior_mean: Array

    optimized: ClassVar[frozenset[str]] = frozenset()

    @property
    def inducing(self) -> Array:  # type: ignore[override]
        return self.inputs

    def training_features(self, process: Process, prior: Prior, X: Array) -> Features:
        return at_inducing(prior)

    def with_inducing(self, process: Process, inducing: Array, prior_mean: Array) -> Self:
        raise ValueError(
            "This GP has no inducing inputs that could be moved: it was fitted with inducing=None, "
            "where every data point is its own."
        )

    def covariance(self, one: Process, other: Process) -> Array:
        prior = self.prior(one)

        def features(process: Process) -> Array:
            return features_at(process, self.inputs, process.X, prior).w

        # A new point becomes an inducing input: sites there act on all of its variance.
        X = other.X if one is other else jnp.copy(other.X)  # noise of a kernel is a point's own
        rest = one.kernel(one.X, X) - features(one) @ features(other).mT
        return rest + super().covariance(one, other)

    def marginals_at_data(self, process: Process) -> Local:
        here = self.synced(process)
        prior = here.prior(process)
        return local_of(here.posterior(process, prior), at_inducing(prior))


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class PointsAtData(InducingAtData):
    """Point sites at their training inputs."""

    def start(self) -> PointCarry:
        return self.kept.centred(self.process.loc)

    def posterior(self, carry: PointCarry) -> Posterior:
        return whitened.posterior(sum_sites(PointSites(*carry), self.features))

    def point_sites(self, carry: PointCarry) -> PointSites:
        return PointSites(*carry)

    def fresh_bound(self, kept: Any) -> tuple[Marginals, Array]:
        q = self.posterior(kept.centred(self.process.loc))
        return whitened.marginals(q, self.features), whitened.kl_divergence(q)


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class NewPointsAtData(InducingAtData):
    """Point sites at inputs of new data points, which come after those that they have.

    Attributes:
      kept: the point sites, with sites of zero at the new points.
      process: the prior at the new points.
      prior: the factorised prior of the inducing values.
      features: the features of the new points.
      earlier: the sums over the sites of earlier points.
    """

    earlier: Sums

    def point_sites(self, carry: NewCarry) -> PointSites:
        return PointSites(carry.linear, carry.quadratic)

    def start(self) -> NewCarry:
        zero = jnp.zeros((self.kept.linear.shape[0], self.process.rows), self.kept.linear.dtype)
        return NewCarry(zero, zero, self.earlier)

    def posterior(self, carry: NewCarry) -> Posterior:
        sites = PointSites(carry.linear, carry.quadratic)
        return whitened.posterior(carry.earlier.add(sites, self.features))

    def keep(self, carry: NewCarry) -> Any:
        n = self.kept.linear.shape[-1] - self.process.rows
        linear = carry.linear + carry.quadratic * self.process.loc
        return dataclasses.replace(
            self.kept,
            linear=jnp.concatenate([self.kept.linear[:, :n], linear], -1),
            quadratic=jnp.concatenate([self.kept.quadratic[:, :n], carry.quadratic], -1),
        )

    def bound(self) -> tuple[Marginals, Array]:
        return self.fresh_bound(self.kept)

    def fresh_bound(self, kept: Any) -> tuple[Marginals, Array]:
        k = self.process.rows
        linear, quadratic = kept.linear[:, -k:], kept.quadratic[:, -k:]
        new = NewCarry(linear - quadratic * self.process.loc, quadratic, self.earlier)
        q = self.posterior(new)
        return whitened.marginals(q, self.features), whitened.kl_divergence(q)


def initial_points(process: Process, inducing: Array) -> Points:
    """Point sites of zero, whose posterior is the prior.

    Args:
      process: the prior at the training inputs.
      inducing: inducing inputs.

    Returns:
      The approximation.
    """
    return Points(*_initial(process), inducing)


def initial_full_points(process: Process) -> FullPoints:
    """Point sites of zero without inducing inputs.

    Args:
      process: the prior at the training inputs.

    Returns:
      The approximation.
    """
    return FullPoints(*_initial(process))


def _initial(process: Process) -> tuple[Any, Any, Array, Array]:
    zero = np.zeros((process.functions, process.rows), process.loc.dtype)  # nothing to compile
    return zero, zero, process.X, process.loc
