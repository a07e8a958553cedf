r"""Site rules: what an E-step makes of what the likelihood says.

At the current marginals a site rule asks the likelihood for :math:`\alpha_i` and :math:`\beta_i`, a
slope and a curvature for each data point, and takes a step of the sites towards

.. math:: \lambda_i = \alpha_i + \beta_i m_i, \qquad \beta_i .

Rules differ in what they ask for, and in what becomes of negative curvature, which likelihoods that
are not log-concave can ask for.

To add one, write a class with these methods, most easily by way of :class:`Blending`, and pass an
instance as ``rule``: see 'Add a site rule' in the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp

from numpyro_tsvgp.gaussian.approximation import Approximation, AtData, Carry, Local
from numpyro_tsvgp.gaussian.quadrature import SiteGradients
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.steps.query import Query

__all__ = ["Asked", "Blending", "NaturalGradient", "Riemannian", "SiteRule", "clipped"]


class Asked(NamedTuple):
    """What a step of the sites of one GP is made of.

    Attributes:
      gradients: alpha and beta that the rule asks for, each ``(functions, n)``.
      local: the posterior at the data points, without the prior mean.
      posterior: the posterior that the approximation made of what E-steps carry.
      at: the approximation at the data.
    """

    gradients: SiteGradients
    local: Local
    posterior: Any
    at: AtData


@runtime_checkable
class SiteRule(Protocol):
    """The contract of a site rule: a frozen, hashable value.

    Attributes:
      climbs: whether short steps increase the bound, so that ``site_lr="auto"`` can choose their
        length by it.
      needs_rows: whether the rule asks for the density and the site of each data point by itself.
      needs_information: whether it asks for the Fisher information of the data.
    """

    climbs: ClassVar[bool]
    needs_rows: ClassVar[bool]
    needs_information: ClassVar[bool]

    def refuses(self, approximation: Approximation) -> str | None:
        """Why the rule cannot be used with an approximation, or None if it can."""
        ...

    def asks(self, query: Query) -> dict[str, SiteGradients]:
        """Alpha and beta for every GP, as the sites of a fit hold them.

        They are more than a step is made of: leaving a data point out takes its site away.

        Args:
          query: the likelihood at the current posterior.

        Returns:
          By GP site, each ``(functions, n)``.
        """
        ...

    def step(self, carry: Any, asked: Asked, rate: Any) -> Any:
        """One step of size ``rate``.

        Args:
          carry: what E-steps carry; see :class:`~numpyro_tsvgp.gaussian.approximation.Carry`.
          asked: what :meth:`asks` gave for the GP, and where.
          rate: the step size r in (0, 1].

        Returns:
          The carry after the step.
        """
        ...


class Blending:
    r"""Base of rules whose steps move a share of the way to the sites that they ask for.

    .. math::
      \lambda \leftarrow (1-r) \, \lambda + r \sum_i \lambda_i, \qquad
      \lambda_i = \big(\alpha_i + \beta_i m_i, \; \beta_i\big)

    A subclass has a method ``asks``.
    """

    climbs: ClassVar[bool] = False
    needs_rows: ClassVar[bool] = False
    needs_information: ClassVar[bool] = False

    def refuses(self, approximation: Approximation) -> str | None:
        return None

    def step(self, carry: Carry, asked: Asked, rate: Any) -> Any:
        alpha, beta = asked.gradients
        sites = PointSites(alpha + beta * asked.local.mean, beta)
        return carry.blend(sites, asked.at.features, rate)


def clipped(gradients: SiteGradients) -> SiteGradients:
    """The same with negative curvature counted as zero.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp.gaussian.quadrature import SiteGradients
      >>> from numpyro_tsvgp.infer.steps.rules import clipped
      >>> asked = SiteGradients(jnp.array([0.3, 0.1]), jnp.array([1.0, -0.5]))
      >>> clipped(asked).beta.tolist()
      [1.0, 0.0]
    """
    return SiteGradients(gradients.alpha, jnp.maximum(gradients.beta, 0.0))


@dataclass(frozen=True)
class NaturalGradient(Blending):
    r"""Natural-gradient steps that count negative curvature as zero: the default.

    .. math::
      \lambda \leftarrow (1-r) \, \lambda + r \sum_i \lambda_i, \qquad
      \lambda_i = \big(\alpha_i + \beta_i^+ m_i, \; \beta_i^+\big), \qquad
      \beta_i^+ = \max(\beta_i, 0)

    The factor :math:`N/|M|` of a minibatch is already in the gradients, since the log-likelihood
    carries its scale. With clipped curvature the posterior precision is positive definite under any
    prior. For a Gaussian likelihood one full-batch step of rate 1 is exact.

    Examples:
      >>> from numpyro_tsvgp import NaturalGradient
      >>> NaturalGradient()
      NaturalGradient()

    References:
      V. Adam, P. E. Chang, M. E. Khan, A. Solin, *Dual parameterization of sparse variational
      Gaussian processes*, NeurIPS 2021, Eq. 20 to 22.
    """

    climbs: ClassVar[bool] = True
    averages: ClassVar[bool] = True  # steps on batches average to the step on all of them

    def asks(self, query: Query) -> dict[str, SiteGradients]:
        return {name: clipped(gradients) for name, gradients in query.gradients.items()}


@dataclass(frozen=True)
class Riemannian(Blending):
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

    climbs: ClassVar[bool] = True

    def refuses(self, approximation: Approximation) -> str | None:
        if approximation.keeps_sums:
            return None
        return (
            'it needs sums over sites, so inducing inputs and sites="tied". Give the GP site '
            "inducing inputs, or use the default rule, which counts negative curvature as zero"
        )

    def asks(self, query: Query) -> dict[str, SiteGradients]:
        return query.gradients

    def step(self, carry: Any, asked: Asked, rate: Any) -> Any:
        return carry.riemannian(asked.gradients, asked.posterior, asked.at.features, rate)
