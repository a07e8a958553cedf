"""Laplace's method as a site rule."""

from __future__ import annotations

from dataclasses import dataclass

from numpyro_tsvgp.gaussian.quadrature import SiteGradients
from numpyro_tsvgp.infer.steps.query import Query
from numpyro_tsvgp.infer.steps.rules import Blending, clipped

__all__ = ["Laplace"]


@dataclass(frozen=True)
class Laplace(Blending):
    r"""Newton steps to the mode of the posterior: derivatives at the mean, no expectations.

    .. math::
      \alpha_i = \frac{\partial \log p(y_i \mid f)}{\partial f} \Big|_{f = m_i}, \qquad
      \beta_i = \max\Big(-\frac{\partial^2 \log p(y_i \mid f)}{\partial f^2} \Big|_{f = m_i},
      0\Big)

    At its fixed point the mean is the mode, :math:`m = K \alpha`, and the covariance that of
    Laplace's approximation, negative curvature counted as zero. A step needs three evaluations
    of the likelihood where expectations need twenty. Where the posterior is skewed, its mode is not
    its mean: the default rule is more accurate, and the bound is no higher at this fixed point. In
    measurements it did not pay (see 'Which option?' in the documentation), so that it is here to
    compare with, and not in the namespace of the package.

    Examples:
      >>> from numpyro_tsvgp.infer.steps.laplace import Laplace
      >>> Laplace()
      Laplace()

    References:
      C. E. Rasmussen, C. K. I. Williams, *Gaussian processes for machine learning*, 2006,
      section 3.4.
    """

    def asks(self, query: Query) -> dict[str, SiteGradients]:
        return {name: clipped(gradients) for name, gradients in query.at_means().items()}
