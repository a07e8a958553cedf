r"""Site rules: what an E-step makes of the gradients of the likelihood.

The E-step asks the likelihood, at the current marginals, for :math:`\alpha_i` and
:math:`\beta_i`. A site rule turns them into a step of the sites, and says what becomes of negative
curvature :math:`\beta_i`, which likelihoods that are not log-concave can ask for.

To add one, write a class with these three methods and pass an instance as ``rule``: see
'Add a site rule' in the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from numpyro_tsvgp.gaussian.approximation import Approximation, AtData, Carry, Local
from numpyro_tsvgp.gaussian.quadrature import SiteGradients
from numpyro_tsvgp.gaussian.whitened import PointSites

__all__ = ["NaturalGradient", "Riemannian", "SiteRule"]


@runtime_checkable
class SiteRule(Protocol):
    """The contract of a site rule: a frozen, hashable value."""

    def refuses(self, approximation: Approximation) -> str | None:
        """Why the rule cannot be used with an approximation, or None if it can."""
        ...

    def curvature(self, gradients: SiteGradients) -> SiteGradients:
        """The gradients as the sites of a fit hold them, which leaving one out must know."""
        ...

    def step(
        self,
        carry: Any,
        gradients: SiteGradients,
        local: Local,
        posterior: Any,
        at: AtData,
        rate: Any,
    ) -> Any:
        """One step of size ``rate``.

        Args:
          carry: what E-steps carry; see :class:`~numpyro_tsvgp.gaussian.approximation.Carry`.
          gradients: alpha and beta at the current marginals, each ``(functions, n)``.
          local: the centred posterior at the data points.
          posterior: the posterior that the approximation made of ``carry``.
          at: the approximation at the data.
          rate: the step size r in (0, 1].

        Returns:
          The carry after the step.
        """
        ...


@dataclass(frozen=True)
class NaturalGradient:
    r"""Natural-gradient steps that count negative curvature as zero: the default.

    .. math::
      \lambda \leftarrow (1-r) \, \lambda + r \sum_i \lambda_i, \qquad
      \lambda_i = \big(\alpha_i + \beta_i^+ m_i, \; \beta_i^+\big), \qquad
      \beta_i^+ = \max(\beta_i, 0)

    The factor :math:`N/|M|` of a minibatch is already in the gradients, since the log-likelihood
    carries its scale. With clipped curvature the posterior precision is positive definite under any
    prior. For a Gaussian likelihood one full-batch step of rate 1 is exact.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp import NaturalGradient
      >>> from numpyro_tsvgp.gaussian.quadrature import SiteGradients
      >>> asked = SiteGradients(jnp.array([0.3, 0.1]), jnp.array([1.0, -0.5]))
      >>> NaturalGradient().curvature(asked).beta.tolist()
      [1.0, 0.0]

    References:
      V. Adam, P. E. Chang, M. E. Khan, A. Solin, *Dual parameterization of sparse variational
      Gaussian processes*, NeurIPS 2021, Eq. 20 to 22.
    """

    def refuses(self, approximation: Approximation) -> str | None:
        return None

    def curvature(self, gradients: SiteGradients) -> SiteGradients:
        return SiteGradients(gradients.alpha, jnp.maximum(gradients.beta, 0.0))

    def step(
        self,
        carry: Carry,
        gradients: SiteGradients,
        local: Local,
        posterior: Any,
        at: AtData,
        rate: Any,
    ) -> Any:
        alpha, beta = self.curvature(gradients)
        return carry.blend(PointSites(alpha + beta * local.mean, beta), at.features, rate)


@dataclass(frozen=True)
class Riemannian:
    r"""Steps that keep negative curvature and a positive definite posterior precision.

    With :math:`\Delta = \sum_i \beta_i w_i w_i^\top - G` and :math:`\mu = B^{-1}\xi`,

    .. math::
      B_{\text{new}} = B + r \Delta + \tfrac{r^2}{2} \Delta B^{-1} \Delta, \qquad
      \mu_{\text{new}} = \mu + r B_{\text{new}}^{-1} \Big(\sum_i \alpha_i w_i - \mu\Big).

    The second-order term, the only difference from the natural-gradient step, keeps B positive
    definite and vanishes at the fixed point, which is that of the bound itself. Because of it one
    step of rate 1 is not exact for a Gaussian likelihood. It needs sums over sites, so inducing
    inputs and tied sites.

    Examples:
      >>> from numpyro_tsvgp import Riemannian
      >>> Riemannian()
      Riemannian()

    References:
      W. Lin, M. Schmidt, M. E. Khan, *Handling the positive-definite constraint in the Bayesian
      learning rule*, ICML 2020.
    """

    def refuses(self, approximation: Approximation) -> str | None:
        if approximation.keeps_sums:
            return None
        return (
            'it needs sums over sites, so inducing inputs and sites="tied". Give the GP site '
            "inducing inputs, or use the default rule, which counts negative curvature as zero"
        )

    def curvature(self, gradients: SiteGradients) -> SiteGradients:
        return gradients

    def step(
        self,
        carry: Any,
        gradients: SiteGradients,
        local: Local,
        posterior: Any,
        at: AtData,
        rate: Any,
    ) -> Any:
        return carry.riemannian(gradients, posterior, at.features, rate)
