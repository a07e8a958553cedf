r"""The dual parameters: how sites become a posterior, how they are blended, what they cost.

Everything is in whitened coordinates :math:`v = L^{-1} u` with :math:`L L^\top = K`, the prior
covariance of the inducing values. There the prior is standard normal and the posterior is

.. math::
  q(v) = \mathcal{N}(B^{-1} \xi, \; B^{-1}), \qquad B = I + G, \qquad
  \xi = \sum_i w_i (\alpha_i + \beta_i m_i), \qquad G = \sum_i \beta_i w_i w_i^\top,

with features :math:`w_i = L^{-1} k_Z(x_i)`. All eigenvalues of :math:`B` are at least one, so its
Cholesky is safe in single precision.

The dual parameters of the paper are :math:`\lambda_1 = L^{-\top} \xi` and
:math:`\Lambda_2 = L^{-\top} G L^{-1}`. They are what stays fixed when the hyperparameters move.
Storing them would cost twice the condition number of :math:`K` in accuracy, which single
precision does not have. *Tied* sites are stored as :math:`(\xi, G)` together with the
:math:`L_0^{-1}` they were made with, and move to another prior by :math:`T = L_0^{-1} L`, which is
near the identity. *Point* sites keep one pair for each data point and rebuild the sums.

When the inducing inputs move from :math:`Z_0` to :math:`Z`, tied sites remain statements about
:math:`f(Z_0)`, which the new inducing values predict: :math:`T = L_0^{-1} K_{Z_0 Z} L^{-\top}`. No
singular value of it exceeds one, so sites fade as the inputs move away. The same numbers attached
to other inputs would not: in the directions that neighbouring inputs nearly share,
:math:`\Lambda_2` is a difference quotient, and a small move makes it arbitrarily large.

Shapes are those of :mod:`numpyro_tsvgp.features`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.expectations import Marginals, SiteGradients
from numpyro_tsvgp.features import (
    Features,
    Prior,
    means_of,
    project,
    rounding,
    sum_columns,
    sum_linear,
    sum_quadratic,
)
from numpyro_tsvgp.linalg import cholesky_and_inverse, congruence

__all__ = [
    "PointSites",
    "Posterior",
    "TiedSites",
    "Whitened",
    "blend",
    "blend_riemannian",
    "carry",
    "count_floored",
    "explained_variance",
    "kl_divergence",
    "marginals",
    "means",
    "posterior",
    "whiten",
]


class TiedSites(NamedTuple):
    """Sums over sites, in the coordinates of the prior whose inverse factor is ``inverse``."""

    linear: Array  # (p, m)
    quadratic: Array  # (p, m, m)
    inverse: Array  # (k, m, m)
    anchor: Array | None = None  # (m, d), the inducing inputs they were made at if those can move


class PointSites(NamedTuple):
    """One pair for each data point: alpha_i + beta_i m_i and beta_i."""

    linear: Array  # (p, n)
    quadratic: Array  # (p, n)


class Whitened(NamedTuple):
    """The sums over sites in the coordinates of the current prior."""

    xi: Array  # (p, m)
    gram: Array  # (p, m, m)


class Posterior(NamedTuple):
    """Whitened posterior: mean ``B^-1 xi``, and the inverse of a factor ``C`` of ``B = C C^T``."""

    mean: Array  # (p, m)
    inverse: Array  # (p, m, m), triangular
    half_log_det: Array  # (p,), that of B: sum_j log |C_jj|


def carry(sites: TiedSites, prior: Prior, shift: Array | None = None) -> Array:
    r"""The matrix :math:`T = L_0^{-1} K_{Z_0 Z} L^{-\top}` that takes tied sites to ``prior``.

    It is written so that it is exactly :math:`L_0^{-1} L` while nothing has moved.
    """
    return sites.inverse @ (prior.chol if shift is None else prior.chol + shift)


def whiten(
    sites: TiedSites | PointSites,
    prior: Prior,
    training: Features | None,
    shift: Array | None = None,
) -> Whitened:
    r"""The sums :math:`(\xi, G)` in the coordinates of ``prior``.

    The dual parameters are what is held: differentiating through this function with respect to
    ``prior`` and ``training`` is 'the prior left free' of the M-step.

    Args:
      sites: tied or point sites.
      prior: the current prior at the inducing inputs.
      training: the current features at the training inputs; only point sites need them.
      shift: :math:`(K_{Z_0 Z} - K_{Z Z}) L^{-\top}`, if the inducing inputs of tied sites have
        moved.

    Returns:
      The sums over sites.
    """
    if isinstance(sites, TiedSites):
        move = carry(sites, prior, shift)
        xi = jnp.einsum("kij,pi->pj" if move.shape[0] == 1 else "pij,pi->pj", move, sites.linear)
        return Whitened(xi, congruence(sites.quadratic, move))
    if training is None:
        raise ValueError("Point sites need the features at the training inputs.")
    return Whitened(
        sum_linear(training.w, sites.linear), sum_quadratic(training.w, sites.quadratic)
    )


def blend(
    sites: TiedSites | PointSites,
    gradients: SiteGradients,
    mean: Array,
    prior: Prior,
    training: Features,
    rate: Any,
) -> TiedSites | PointSites:
    r"""One E-step: blends the sites with those that the likelihood asks for.

    .. math::
      \xi \leftarrow (1-r)\,\xi + r \sum_i w_i (\alpha_i + \beta_i m_i), \qquad
      G \leftarrow (1-r)\,G + r \sum_i \beta_i w_i w_i^\top

    The factor :math:`N/|M|` of a minibatch is already in the gradients, since the
    log-likelihood carries its scale. The prior is not differentiated. A negative
    :math:`\beta_i`, which likelihoods that are not log-concave can ask for, counts as zero, so
    that G stays positive semi-definite under any prior.

    Args:
      sites: the sites before the step. Tied sites must be in the coordinates of ``prior``.
      gradients: alpha and beta at the current marginals.
      mean: marginal means without the prior mean, ``(p, n)``.
      prior: the current prior.
      training: features of the data points in the gradients.
      rate: the step size r in (0, 1].

    Returns:
      The sites after the step.

    References:
      V. Adam, P. E. Chang, M. E. Khan, A. Solin, *Dual parameterization of sparse variational
      Gaussian processes*, NeurIPS 2021, Eq. 20 to 22.
    """
    quadratic = jnp.maximum(gradients.beta, 0.0)
    linear = gradients.alpha + quadratic * mean
    if isinstance(sites, TiedSites):
        return TiedSites(
            (1 - rate) * sites.linear + rate * sum_linear(training.w, linear),
            (1 - rate) * sites.quadratic + rate * sum_quadratic(training.w, quadratic),
            prior.inverse,
            sites.anchor,
        )
    return PointSites(
        (1 - rate) * sites.linear + rate * linear,
        (1 - rate) * sites.quadratic + rate * quadratic,
    )


def blend_riemannian(
    sites: TiedSites, gradients: SiteGradients, q: Posterior, training: Features, rate: Any
) -> TiedSites:
    r"""One E-step whose precision is positive definite by construction, whatever beta is.

    With :math:`\Delta = \sum_i \beta_i w_i w_i^\top - G` and :math:`\mu = B^{-1}\xi`,

    .. math::
      B_{\text{new}} = B + r \Delta + \tfrac{r^2}{2} \Delta B^{-1} \Delta, \qquad
      \mu_{\text{new}} = \mu + r B_{\text{new}}^{-1} \Big(\sum_i \alpha_i w_i - \mu\Big).

    The second-order term, the only difference from the natural-gradient step, keeps B positive
    definite and vanishes at the fixed point, which is that
    of the bound itself: negative :math:`\beta_i` are kept, not clipped.

    Args:
      sites: tied sites in the coordinates of the current prior.
      gradients: alpha and beta at the current marginals.
      q: the posterior of the sites.
      training: features of the data points in the gradients.
      rate: the step size r in (0, 1].

    Returns:
      The sites after the step.

    References:
      W. Lin, M. Schmidt, M. E. Khan, *Handling the positive-definite constraint in the Bayesian
      learning rule*, ICML 2020.
    """
    delta = sum_quadratic(training.w, gradients.beta) - sites.quadratic
    half = q.inverse @ delta
    gram = sites.quadratic + rate * delta + 0.5 * rate**2 * half.mT @ half
    pull = sum_linear(training.w, gradients.alpha) - q.mean
    xi = q.mean + jnp.einsum("pij,pj->pi", gram, q.mean) + rate * pull
    return TiedSites(xi, gram, sites.inverse, sites.anchor)


def posterior(whitened: Whitened) -> Posterior:
    r"""The whitened posterior of the sites: :math:`B = I + G = C C^\top`, mean :math:`B^{-1}\xi`.

    Args:
      whitened: the sums over sites in the coordinates of the current prior.

    Returns:
      The mean, the inverse of C and half the log determinant of B.
    """
    identity = jnp.eye(whitened.gram.shape[-1], dtype=whitened.gram.dtype)
    _, inverse = cholesky_and_inverse(identity + whitened.gram)
    half = jnp.einsum("pij,pj->pi", inverse, whitened.xi)
    # Of the inverse, so that nothing is differentiated through the factor itself.
    log_det = -jnp.log(jnp.diagonal(inverse, axis1=-2, axis2=-1)).sum(-1)
    return Posterior(jnp.einsum("pij,pi->pj", inverse, half), inverse, log_det)


def means(q: Posterior, at: Features) -> Array:
    r"""Posterior means :math:`m_i = w_i^\top B^{-1} \xi`, shape ``(p, n)``."""
    return means_of(q.mean, at.w)


def marginals(q: Posterior, at: Features) -> Marginals:
    r"""Posterior mean and variance of the function without its prior mean.

    .. math:: m_i = w_i^\top B^{-1} \xi, \qquad v_i = k_{ii} - |w_i|^2 + |C^{-1} w_i|^2

    Args:
      q: the whitened posterior.
      at: features of the inputs.

    Returns:
      Means and variances of shape ``(p, n)``. Variances are at least the rounding error of the
      prior variance.
    """
    return Marginals(means(q, at), jnp.maximum(_raw_variance(q, at), rounding(at)))


def count_floored(q: Posterior, at: Features) -> Array:
    """How many variances of :func:`marginals` rounded to nothing and were floored.

    Args:
      q: the whitened posterior.
      at: features of the inputs.

    Returns:
      A whole number.
    """
    return (_raw_variance(q, at) < rounding(at)).sum()


def _raw_variance(q: Posterior, at: Features) -> Array:
    return jnp.maximum(at.residual, 0.0) + explained_variance(q, at)


def explained_variance(q: Posterior, at: Features) -> Array:
    r"""The part of the variance that depends on the sites, :math:`|C^{-1} w_i|^2`: ``(p, n)``."""
    return sum_columns(project(at.w, q.inverse) ** 2, at.w)


def kl_divergence(q: Posterior) -> Array:
    r"""Kullback-Leibler divergence from the prior, summed over latent functions.

    .. math::
      \mathrm{KL}(q(u) \,\|\, p(u)) =
      \tfrac12 \big[\operatorname{tr} B^{-1} - m + |B^{-1}\xi|^2\big] + \sum_j \log C_{jj}

    Args:
      q: the whitened posterior.

    Returns:
      A scalar.
    """
    p, m = q.mean.shape
    trace = (q.inverse**2).sum()
    return 0.5 * (trace - p * m + (q.mean**2).sum()) + q.half_log_det.sum()
