r"""The posterior of the inducing values in whitened coordinates.

In the coordinates :math:`v = L^{-1} (u - \mu)` with :math:`L L^\top = K`, the prior covariance of
the inducing values, the prior is standard normal and the posterior is

.. math::
  q(v) = \mathcal{N}(B^{-1} \xi, \; B^{-1}), \qquad B = I + G, \qquad
  \xi = \sum_i w_i (\alpha_i + \beta_i m_i), \qquad G = \sum_i \beta_i w_i w_i^\top,

with features :math:`w_i = L^{-1} k_Z(x_i)`. All eigenvalues of :math:`B` are at least one, so its
Cholesky is safe in single precision.

Shapes are those of :mod:`numpyro_tsvgp.gaussian.features`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.gaussian.features import (
    Features,
    means_of,
    project,
    rounding,
    sum_columns,
    sum_linear,
    sum_quadratic,
)
from numpyro_tsvgp.gaussian.linalg import cholesky, cholesky_and_inverse
from numpyro_tsvgp.gaussian.quadrature import Marginals, SiteGradients

__all__ = [
    "PointSites",
    "Posterior",
    "Sums",
    "count_floored",
    "explained_variance",
    "kl_divergence",
    "marginals",
    "means",
    "posterior",
    "sum_sites",
]


class PointSites(NamedTuple):
    """One site for each data point, about the function without its mean, each ``(p, n)``."""

    linear: Array  # alpha_i + beta_i m_i
    quadratic: Array  # beta_i


class Sums(NamedTuple):
    """The sums over sites in the coordinates of the current prior."""

    xi: Array  # (p, m)
    gram: Array  # (p, m, m)

    def add(self, sites: PointSites, at: Features) -> Sums:
        """The sums with more sites in them; negative ones take sites away."""
        more = sum_sites(sites, at)
        return Sums(self.xi + more.xi, self.gram + more.gram)

    def blend(self, sites: PointSites, at: Features, rate: Any) -> Sums:
        r"""The sums after a step of size r towards those of other sites.

        .. math::
          \xi \leftarrow (1-r)\,\xi + r \sum_i w_i \lambda_i, \qquad
          G \leftarrow (1-r)\,G + r \sum_i \beta_i w_i w_i^\top
        """
        new = sum_sites(sites, at)
        return Sums((1 - rate) * self.xi + rate * new.xi, (1 - rate) * self.gram + rate * new.gram)

    def can_be_left(self, taken: PointSites, at: Features) -> Array:
        r"""Whether these sums can be what is left after sites of some points were taken away.

        The sums of other points have a positive semi-definite :math:`G`. Sites that are not
        Gaussian may have moved a little since they were added, so a tenth of the largest of them is
        allowed for, and rounding.
        """
        largest = jnp.abs(taken.quadratic * (at.w**2).sum(-1)).max(initial=0.0)
        size = jnp.abs(jnp.diagonal(self.gram, axis1=-2, axis2=-1)).max()
        slack = 0.1 * largest + 1e3 * jnp.finfo(self.gram.dtype).eps * (1 + size)
        identity = jnp.eye(self.gram.shape[-1], dtype=self.gram.dtype)
        return jnp.isfinite(cholesky(self.gram + slack * identity)).all()

    def riemannian(self, gradients: SiteGradients, q: Posterior, at: Features, rate: Any) -> Sums:
        r"""The sums after a step whose precision is positive definite, whatever beta is.

        With :math:`\Delta = \sum_i \beta_i w_i w_i^\top - G` and :math:`\mu = B^{-1}\xi`,

        .. math::
          B_{\text{new}} = B + r \Delta + \tfrac{r^2}{2} \Delta B^{-1} \Delta, \qquad
          \mu_{\text{new}} = \mu + r B_{\text{new}}^{-1} \Big(\sum_i \alpha_i w_i - \mu\Big).
        """
        delta = sum_quadratic(at.w, gradients.beta) - self.gram
        half = q.inverse @ delta
        gram = self.gram + rate * delta + 0.5 * rate**2 * half.mT @ half
        pull = sum_linear(at.w, gradients.alpha) - q.mean
        return Sums(q.mean + jnp.einsum("pij,pj->pi", gram, q.mean) + rate * pull, gram)


class Posterior(NamedTuple):
    """Whitened posterior: mean ``B^-1 xi``, and the inverse of a factor ``C`` of ``B = C C^T``."""

    mean: Array  # (p, m)
    inverse: Array  # (p, m, m), triangular
    half_log_det: Array  # (p,), that of B: sum_j log |C_jj|


def sum_sites(sites: PointSites, at: Features) -> Sums:
    r"""The sums :math:`(\xi, G)` over sites of data points with features ``at``."""
    return Sums(sum_linear(at.w, sites.linear), sum_quadratic(at.w, sites.quadratic))


def posterior(sums: Sums) -> Posterior:
    r"""The posterior of sites: :math:`B = I + G = C C^\top`, mean :math:`B^{-1}\xi`.

    Args:
      sums: the sums over sites in the coordinates of the current prior.

    Returns:
      The mean, the inverse of C and half the log determinant of B.
    """
    identity = jnp.eye(sums.gram.shape[-1], dtype=sums.gram.dtype)
    _, inverse = cholesky_and_inverse(identity + sums.gram)
    half = jnp.einsum("pij,pj->pi", inverse, sums.xi)
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
