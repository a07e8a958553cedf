r"""The mean and covariance of the inducing values: the parameterization of q-SVGP.

Where sites keep what the data say and let the prior follow the hyperparameters, moments keep the
posterior itself,

.. math::
  q(u) = \mathcal{N}(m, A A^\top) \qquad \text{or, whitened,} \qquad
  q(v) = \mathcal{N}(m_v, A_v A_v^\top), \quad u = L v,

so that it stays where it is when the hyperparameters move. An E-step is the natural-gradient step
of Salimbeni et al.: with natural parameters :math:`\theta = (S^{-1} m, -\tfrac12 S^{-1})` and
expectation parameters :math:`\eta = (m, S + m m^\top)`,

.. math::
  \theta \leftarrow \theta + \rho \, \frac{\partial \mathcal{L}}{\partial \eta}, \qquad
  \frac{\partial \mathcal{L}}{\partial \eta_1}
  = \frac{\partial \mathcal{L}}{\partial m} - 2 \frac{\partial \mathcal{L}}{\partial S} m, \qquad
  \frac{\partial \mathcal{L}}{\partial \eta_2} = \frac{\partial \mathcal{L}}{\partial S},

the gradients being those of the whole bound, prior included. Natural gradients do not depend on
the coordinates, so both kinds of moments take the step in whitened ones, where features are
computed once for a run of steps. There the natural parameters are :math:`(\xi, -\tfrac12 (I + G))`,
and the step is that of the sums over sites: :math:`\xi` and :math:`G` are blended with the sites
that the likelihood asks for.

Shapes are those of :mod:`numpyro_tsvgp.gaussian.features`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.gaussian.features import Features, Prior, features_at
from numpyro_tsvgp.gaussian.inducing_values import (
    InducingAtData,
    InducingValues,
    approximation,
)
from numpyro_tsvgp.gaussian.linalg import cholesky_and_inverse, triangular_inverse
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.whitened import PointSites, Posterior, Sums

__all__ = ["Moments", "WhitenedMoments"]


class _Moments(InducingValues):
    """What both kinds of moments have in common."""

    inducing: Array
    loc: Array
    scale_tril: Array

    optimized: ClassVar[frozenset[str]] = frozenset({"inducing", "loc", "scale_tril"})

    @property
    def known_means(self) -> Array:
        return jnp.zeros((1, self.inducing.shape[0]), self.loc.dtype)  # moments are about any mean

    def sums(self, process: Process, prior: Prior) -> Sums:
        """The sums over sites that would give these moments."""
        q = self.posterior(process, prior)
        factor = triangular_inverse(q.inverse.mT)
        linear = jnp.einsum("pij,pj->pi", factor, q.mean)
        identity = jnp.eye(linear.shape[-1], dtype=linear.dtype)
        return Sums(jnp.einsum("pij,pi->pj", factor, linear), factor.mT @ factor - identity)

    def at_data(self, process: Process) -> InducingAtData:
        prior = self.prior(process)
        at = features_at(process, self.inducing, process.X, prior)
        return InducingAtData(self, process, prior, at)

    def remains(self, carry: Sums, posterior: Any, taken: PointSites, at: Features) -> Array:
        return jnp.isfinite(posterior.mean).all() & carry.can_be_left(taken, at)

    def without_data(self) -> WhitenedMoments:
        identity = jnp.eye(self.loc.shape[-1], dtype=self.loc.dtype)
        factor = jnp.broadcast_to(identity, self.scale_tril.shape)
        return WhitenedMoments(self.inducing, jnp.zeros_like(self.loc), factor)


def _lower_posterior(sums: Sums) -> Posterior:
    """The whitened posterior of sums, with a lower triangular factor of its covariance."""
    # From one Cholesky of the precision: that of the precision with its rows and columns in reverse
    # order is upper triangular in theirs.
    precision = sums.gram + jnp.eye(sums.gram.shape[-1], dtype=sums.gram.dtype)
    chol, inverse = cholesky_and_inverse(precision[..., ::-1, ::-1])
    inverse = inverse[..., ::-1, ::-1]
    half = jnp.einsum("pij,pj->pi", inverse, sums.xi)
    return Posterior(jnp.einsum("pij,pi->pj", inverse, half), inverse, _half_log_det(chol))


def _half_log_det(triangular: Array) -> Array:
    return jnp.log(jnp.diagonal(triangular, axis1=-2, axis2=-1)).sum(-1)


@approximation
class Moments(_Moments):
    """Mean of the inducing values about the prior mean, and factor of their covariance.

    Attributes:
      inducing: inducing inputs, ``(m, d)`` or ``(m,)``.
      loc: the mean, ``(p, m)``.
      scale_tril: a lower triangular factor of the covariance, ``(p, m, m)``.
    """

    inducing: Array
    loc: Array
    scale_tril: Array

    def posterior(self, process: Process, prior: Prior) -> Posterior:
        loc = (prior.inverse @ self.loc[..., None])[..., 0]
        log_det = _half_log_det(prior.chol) - _half_log_det(self.scale_tril)
        return Posterior(loc, (prior.inverse @ self.scale_tril).mT, log_det)

    def remade(self, sums: Sums, process: Process, prior: Prior) -> Self:
        """Moments of sums over sites."""
        q = _lower_posterior(sums)
        loc = (prior.chol @ q.mean[..., None])[..., 0]
        return dataclasses.replace(self, loc=loc, scale_tril=prior.chol @ q.inverse.mT)

    @classmethod
    def initial(cls, process: Process, inducing: Array) -> Self:
        """The moments of the prior."""
        m = inducing.shape[0]
        loc = jnp.zeros((process.functions, m), process.loc.dtype)
        made = cls(inducing, loc, loc)
        factor = jnp.broadcast_to(made.prior(process).chol, (process.functions, m, m))
        return dataclasses.replace(made, scale_tril=factor)


@approximation
class WhitenedMoments(_Moments):
    """The same of the whitened inducing values, ``v = L^-1 (u - mu)``.

    Attributes:
      inducing: inducing inputs, ``(m, d)`` or ``(m,)``.
      loc: the mean of v, ``(p, m)``.
      scale_tril: a lower triangular factor of the covariance of v, ``(p, m, m)``.
    """

    inducing: Array
    loc: Array
    scale_tril: Array

    def posterior(self, process: Process, prior: Prior) -> Posterior:
        return Posterior(self.loc, self.scale_tril.mT, -_half_log_det(self.scale_tril))

    def remade(self, sums: Sums, process: Process, prior: Prior) -> Self:
        """Moments of sums over sites."""
        q = _lower_posterior(sums)
        return dataclasses.replace(self, loc=q.mean, scale_tril=q.inverse.mT)

    @classmethod
    def initial(cls, process: Process, inducing: Array) -> Self:
        """The moments of the prior."""
        m, dtype = inducing.shape[0], process.loc.dtype
        loc = jnp.zeros((process.functions, m), dtype)
        factor = jnp.broadcast_to(jnp.eye(m, dtype=dtype), (process.functions, m, m))
        return cls(inducing, loc, factor)
