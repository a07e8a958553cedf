r"""The bound as an M-step differentiates it: with the prior left free and the coordinates held.

The whitening is a choice of coordinates, and neither the posterior nor the bound depends on it.
Where an M-step differentiates the bound it is therefore *held*: :math:`L` is a constant, and the
prior precision of :math:`v` is a matrix :math:`J = L^\top K^{-1} L` that is the identity in value
and carries the derivative. Then

.. math::
  B = J + G, \qquad m_i = w_i^\top J \mu, \qquad
  v_i = k_{ii} - w_i^\top J w_i + w_i^\top J B^{-1} J w_i.

and a gradient needs one product with the features of all data points besides that of the
variances, and no derivative of a Cholesky factor.

Shapes are those of :mod:`numpyro_tsvgp.sites`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp import sites
from numpyro_tsvgp.expectations import Marginals
from numpyro_tsvgp.linalg import congruence_of_identity, differentiated_once, identity_along
from numpyro_tsvgp.sites import (
    Features,
    Prior,
    TiedSites,
    Whitened,
    blocks,
    project,
    sum_columns,
)

__all__ = ["free_bound", "whiten_fresh"]


def whiten_fresh(tied: TiedSites, prior: Prior, departure: Array | None) -> Whitened:
    r"""What :func:`~numpyro_tsvgp.sites.whiten` gives of tied sites made at this very prior.

    Args:
      tied: tied sites in the coordinates of ``prior``.
      prior: the prior, with a factor that is held.
      departure: a matrix whose derivative, whatever its value, is that of
        :math:`K_{Z_0 Z} - K_{Z Z}` as the inducing inputs begin to move, or None if they do not.

    Returns:
      The sums over sites: those of ``tied``, with their derivatives.
    """
    if departure is None:
        return Whitened(tied.linear, tied.quadratic)
    move = identity_along(departure, prior.inverse)
    xi = (tied.linear[:, None, :] @ move)[:, 0]
    return Whitened(xi, congruence_of_identity(tied.quadratic, move))


def free_bound(prior: Prior, whitened: Whitened, at: Features) -> tuple[Marginals, Array]:
    r"""Marginals and divergence of the posterior as functions of the prior, to be differentiated.

    They are those of :func:`~numpyro_tsvgp.sites.marginals` and
    :func:`~numpyro_tsvgp.sites.kl_divergence`. Their derivatives are written
    out, in coordinates that are held, so that with cotangents :math:`\bar m_i` and
    :math:`\bar v_i` of the marginals a gradient is

    .. math::
      \bar w_i = \bar m_i \mu - 2 \bar v_i (I - S) w_i, \qquad
      \bar S = \sum_i \bar v_i w_i w_i^\top + \tfrac12 \bar\kappa I, \qquad
      \bar B = -S \bar S S + \dots,

    whose :math:`S w_i` are known from the variances and whose sum over data points is the only one.

    Args:
      prior: a prior whose factor is held.
      whitened: the sums over sites in its coordinates.
      at: features of the data points.

    Returns:
      The marginals without the prior mean, and the divergence.
    """
    assert prior.precision is not None
    precision, p = prior.precision, whitened.xi.shape[0]
    if precision.shape[0] < p:  # a product, so that its gradient is one, too, and not a sum
        precision = jnp.tensordot(jnp.ones(p, precision.dtype), precision[0], 0)
    mean, explained, kl = _free_posterior(precision, *whitened)
    variance = _free_variance(precision, explained, at.w, at.variance)
    return Marginals(sites.means_of(mean, at.w), jnp.maximum(variance, sites.rounding(at))), kl


@jax.custom_jvp
def _free_posterior(precision: Array, xi: Array, gram: Array) -> tuple[Array, Array, Array]:
    """``J mu``, ``J S J`` and the divergence, with J the prior precision, of value I."""
    del precision
    q = sites.posterior(Whitened(xi, gram))
    return q.mean, q.inverse.mT @ q.inverse, sites.kl_divergence(q)


@_free_posterior.defjvp
def _free_posterior_jvp(
    primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    out = _free_posterior(*primals)
    mu, S, _ = differentiated_once(out)
    mu = mu[:, None, :]  # vectors are rows
    by_J, by_xi, by_gram = tangents
    by_B = by_J + by_gram
    by_S = -(S @ by_B @ S)
    by_mu = (by_xi[:, None, :] - mu @ by_B) @ S
    half = by_J @ S
    # KL = (tr JS + mu^T J mu - log|J| + log|B| - m) / 2
    by_trace = jnp.sum(S * by_J) + jnp.trace(by_S, axis1=-2, axis2=-1).sum()
    by_square = jnp.sum(mu * (mu @ by_J + 2.0 * by_mu))
    by_log_det = jnp.sum(S * by_B) - jnp.trace(by_J, axis1=-2, axis2=-1).sum()
    return out, (
        (mu @ by_J + by_mu)[:, 0],
        half + half.mT + by_S,
        0.5 * (by_trace + by_square + by_log_det),
    )


@jax.custom_jvp
def _free_variance(precision: Array, explained: Array, w: Array, prior_variance: Array) -> Array:
    """``k_ii - w_i^T J w_i + w_i^T (J S J) w_i``, for each latent function: ``(p, n)``."""
    del precision
    residual = prior_variance - (w**2).sum(-1)
    return jnp.maximum(residual, 0.0) + sum_columns(project(w, explained) * blocks(w), w)


@_free_variance.defjvp
def _free_variance_jvp(
    primals: tuple[Array, Array, Array, Array], tangents: tuple[Array, Array, Array, Array]
) -> tuple[Array, Array]:
    _, explained, w, _ = differentiated_once(primals)
    by_J, by_explained, by_w, by_prior_variance = tangents
    through_w = sum_columns((blocks(w) - project(w, explained)) * blocks(by_w), w)
    through_q = sum_columns(project(w, by_J - by_explained) * blocks(w), w)
    return _free_variance(*primals), by_prior_variance - 2.0 * through_w - through_q
