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
computed once for a run of steps and gradients in :math:`m` and :math:`S` are sums over site
gradients.

Shapes are those of :mod:`numpyro_tsvgp.sites`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.expectations import SiteGradients
from numpyro_tsvgp.features import Features, Prior, sum_linear, sum_quadratic
from numpyro_tsvgp.linalg import cholesky_and_inverse, triangular_inverse
from numpyro_tsvgp.sites import Posterior

__all__ = [
    "Moments",
    "Natural",
    "WhitenedMoments",
    "moments",
    "natural",
    "posterior",
    "posterior_of_natural",
    "step",
]


class Moments(NamedTuple):
    """Mean of the inducing values about the prior mean, and factor of their covariance."""

    loc: Array  # (p, m)
    scale_tril: Array  # (p, m, m)


class WhitenedMoments(NamedTuple):
    """The same of the whitened inducing values, ``v = L^-1 u``."""

    loc: Array  # (p, m)
    scale_tril: Array  # (p, m, m)


class Natural(NamedTuple):
    """Natural parameters of the whitened posterior, ``B m_v`` and ``-B / 2``."""

    linear: Array  # (p, m)
    quadratic: Array  # (p, m, m)


def _half_log_det(triangular: Array) -> Array:
    return jnp.log(jnp.diagonal(triangular, axis1=-2, axis2=-1)).sum(-1)


def posterior(value: Moments | WhitenedMoments, prior: Prior) -> Posterior:
    r"""The whitened posterior, :math:`m_v = L^{-1} m` and :math:`A_v = L^{-1} A`.

    Args:
      value: moments of either kind.
      prior: the current prior at the inducing inputs.

    Returns:
      The posterior, whose ``inverse`` is :math:`A_v^\top`.
    """
    loc, factor = value
    log_det = -_half_log_det(factor)
    if isinstance(value, Moments):
        loc = (prior.inverse @ loc[..., None])[..., 0]
        factor = prior.inverse @ factor
        log_det = log_det + _half_log_det(prior.chol)
    return Posterior(loc, factor.mT, log_det)


def moments(q: Posterior, prior: Prior, *, whiten: bool) -> Moments | WhitenedMoments:
    """The inverse of :func:`posterior`.

    Args:
      q: a whitened posterior whose ``inverse`` is upper triangular.
      prior: the current prior at the inducing inputs.
      whiten: which kind of moments.

    Returns:
      The moments.
    """
    if whiten:
        return WhitenedMoments(q.mean, q.inverse.mT)
    return Moments((prior.chol @ q.mean[..., None])[..., 0], prior.chol @ q.inverse.mT)


def natural(q: Posterior) -> Natural:
    """Natural parameters of a whitened posterior made by :func:`posterior`."""
    factor = triangular_inverse(q.inverse.mT)  # A^-1
    linear = jnp.einsum("pij,pj->pi", factor, q.mean)
    return Natural(jnp.einsum("pij,pi->pj", factor, linear), -0.5 * factor.mT @ factor)


def posterior_of_natural(value: Natural) -> Posterior:
    """The whitened posterior of natural parameters, with an upper triangular ``inverse``."""
    # A lower triangular factor of the covariance from one Cholesky of the precision: that of the
    # precision with its rows and columns in reverse order is upper triangular in theirs.
    chol, inverse = cholesky_and_inverse(-2.0 * value.quadratic[..., ::-1, ::-1])
    inverse = inverse[..., ::-1, ::-1]
    half = jnp.einsum("pij,pj->pi", inverse, value.linear)
    return Posterior(jnp.einsum("pij,pi->pj", inverse, half), inverse, _half_log_det(chol))


def step(
    value: Natural,
    gradients: SiteGradients,
    q: Posterior,
    training: Features,
    rate: Any,
    curvature: str = "clip",
) -> Natural:
    r"""One natural-gradient step, by the chain rule through the expectation parameters.

    In whitened coordinates, with :math:`B = S^{-1}`, the gradients of the bound are

    .. math::
      \frac{\partial \mathcal{L}}{\partial m} = \sum_i \alpha_i w_i - m, \qquad
      \frac{\partial \mathcal{L}}{\partial S}
      = -\tfrac12 \sum_i \beta_i w_i w_i^\top - \tfrac12 (I - B).

    Args:
      value: the natural parameters before the step.
      gradients: alpha and beta at the current marginals.
      q: the posterior of ``value``.
      training: features of the data points in the gradients.
      rate: the step size.
      curvature: ``"clip"`` to count negative beta as zero, or ``"riemannian"`` to keep it and
        correct the step as :func:`~numpyro_tsvgp.sites.blend_riemannian` does.

    Returns:
      The natural parameters after the step.

    References:
      H. Salimbeni, S. Eleftheriadis, J. Hensman, *Natural gradients in practice: non-conjugate
      variational inference in Gaussian process models*, AISTATS 2018.
    """
    clip = curvature == "clip"
    beta = jnp.maximum(gradients.beta, 0.0) if clip else gradients.beta
    identity = jnp.eye(q.mean.shape[-1], dtype=q.mean.dtype)
    by_mean = sum_linear(training.w, gradients.alpha) - q.mean
    by_covariance = -0.5 * sum_quadratic(training.w, beta) - 0.5 * identity - value.quadratic
    if clip:
        by_first = by_mean - 2.0 * jnp.einsum("pij,pj->pi", by_covariance, q.mean)
        return Natural(value.linear + rate * by_first, value.quadratic + rate * by_covariance)
    half = q.inverse @ by_covariance
    quadratic = value.quadratic + rate * by_covariance - rate**2 * half.mT @ half
    precision_mean = -2.0 * jnp.einsum("pij,pj->pi", quadratic, q.mean)
    return Natural(precision_mean + rate * by_mean, quadratic)
