"""Fisher scoring as a site rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from numpyro_tsvgp.gaussian.quadrature import SiteGradients
from numpyro_tsvgp.infer.steps.query import Query
from numpyro_tsvgp.infer.steps.rules import Blending

__all__ = ["FisherScoring"]


@dataclass(frozen=True)
class FisherScoring(Blending):
    r"""Gauss-Newton steps: curvature by the Fisher information, which is never negative.

    .. math::
      \alpha_i = \frac{\partial E_i}{\partial m_i}, \qquad
      \beta_i = \mathbb{E}_{q(f)} \, \mathbb{E}_{y \sim p(\cdot \mid f)}
      \Big[\Big(\frac{\partial \log p(y \mid f)}{\partial f}\Big)^2\Big]

    The curvature is that of data which the likelihood itself would make, so that an outlier counts
    like any other point: for a Student-t it is :math:`(\nu + 1) / ((\nu + 3) \sigma^2)` everywhere.
    At the fixed point the mean is the best one for its variances, :math:`m = K \alpha`, and the
    variances are those of the information. For a Gaussian likelihood, and for Bernoulli with
    logits, it is the default rule. In measurements it did not pay (see 'Which option?' in the
    documentation), so that it is here to compare with, and not in the namespace of the package.

    The average over data needs a distribution of NumPyro with finitely many values
    (``enumerate_support``), with a location and a scale on the real line, or with quantiles
    (``icdf``), and one data point for each function value. Others are refused.

    Examples:
      >>> from numpyro_tsvgp.infer.steps.fisher import FisherScoring
      >>> FisherScoring()
      FisherScoring()

    References:
      M. Hartmann, J. Vanhatalo, *Laplace approximation and natural gradient for Gaussian process
      regression with heteroscedastic Student-t model*, Statistics and Computing 2019.
    """

    needs_information: ClassVar[bool] = True

    def asks(self, query: Query) -> dict[str, SiteGradients]:
        beta = query.expected_information()
        return {name: SiteGradients(g.alpha, beta[name]) for name, g in query.gradients.items()}
