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


class _PointSites(InducingValues):
    """What point sites with and without inducing inputs have in common."""

    linear: Array
    quadratic: Array
    inputs: Array
    prior_mean: Array

    keeps_sums: ClassVar[bool] = False
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

    def fresh_bound(self, kept: Any) -> tuple[Marginals, Array]:
        q = self.posterior(kept.centred(self.process.loc))
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
