"""Expectation propagation as a site rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.gaussian.approximation import Approximation
from numpyro_tsvgp.gaussian.quadrature import Marginals, SiteGradients
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.steps.query import Query
from numpyro_tsvgp.infer.steps.rules import Blending

__all__ = ["ExpectationPropagation", "cavity_of", "leverage_of"]


def leverage_of(explained: Array, site: PointSites, power: float = 1.0) -> Array:
    r"""How much of its own marginal a point accounts for: :math:`\eta \beta_i s_i`, below one."""
    # At one there is no cavity: without the point nothing would hold the posterior there.
    return jnp.minimum(power * site.quadratic * explained, 1 - jnp.finfo(explained.dtype).eps)


def cavity_of(
    marginals: Marginals, explained: Array, site: PointSites, power: float = 1.0
) -> tuple[Marginals, Array]:
    r"""The posterior at each data point without a power of the point's own site.

    .. math::
      s_c = \frac{s_i}{1 - \eta \beta_i s_i}, \qquad m_c = m_i - \eta s_c \alpha_i, \qquad
      v_c = v_i - s_i + s_c, \qquad \alpha_i = \lambda_i - \beta_i m_i

    Args:
      marginals: mean and variance, ``(functions, n)``.
      explained: the part of the variance that sites move.
      site: the sites, about what ``marginals`` are about.
      power: :math:`\eta`.

    Returns:
      Mean and variance of the cavity, and :math:`s_c`.
    """
    mean, variance = marginals
    without = explained / (1 - leverage_of(explained, site, power))
    alpha = site.linear - site.quadratic * mean
    cavity = Marginals(mean - power * without * alpha, variance - explained + without)
    return cavity, without


@dataclass(frozen=True)
class ExpectationPropagation(Blending):
    r"""Sites that match moments: (power) expectation propagation, all sites at once.

    The *cavity* of a data point is the posterior without the power :math:`\eta` of its site, and
    the *tilted* distribution is the cavity times :math:`p(y_i \mid f)^\eta`. With the derivatives
    of its logarithmic normaliser,

    .. math::
      g = \frac{\partial \log Z_i}{\partial m_c} = \frac{\hat m - m_c}{v_c}, \qquad
      h = -\frac{\partial^2 \log Z_i}{\partial m_c^2} = \frac{v_c - \hat v}{v_c^2},

    a point asks for :math:`\eta \beta_i = h / (1 - s_c h)` and
    :math:`\eta \lambda_i = g + \eta \beta_i (m_c + s_c g)`, so that the posterior has the mean and
    the variance of the tilted distribution. The rate of the E-steps, ``site_lr``, is the damping.
    Negative curvature counts as zero; the mean is matched all the same.

    At power 1 its marginals are often the best there are for binary data and counts. As the power
    goes to zero it becomes the default rule. With inducing inputs and a Gaussian likelihood power
    1 is FITC. The bound is not what it climbs, so that ``site_lr="auto"`` is not for it; take
    :class:`~numpyro_tsvgp.EPLike` as objective, whose maximum belongs to these sites.

    It needs the site of each data point: no inducing inputs, or ``sites="untied"``.

    Args:
      power: :math:`\eta` in (0, 1].

    Examples:
      >>> from numpyro_tsvgp import ExpectationPropagation
      >>> ExpectationPropagation(power=0.5)
      ExpectationPropagation(power=0.5)

    References:
      T. P. Minka, *Expectation propagation for approximate Bayesian inference*, UAI 2001.

      T. D. Bui, J. Yan, R. E. Turner, *A unifying framework for Gaussian process pseudo-point
      approximations using power expectation propagation*, JMLR 2017.
    """

    power: float = 1.0

    needs_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.power <= 1:
            raise ValueError(f"power must lie in (0, 1], got {self.power}.")

    def refuses(self, approximation: Approximation) -> str | None:
        if approximation.keeps_points:
            return None
        return (
            "it takes the site of one data point out of the posterior at a time, and sums over "
            'sites do not tell what it was. Use a guide with sites="untied", or without inducing '
            "inputs, or the default rule"
        )

    def asks(self, query: Query) -> dict[str, SiteGradients]:
        assert (
            query.rows is not None and query.sites is not None
        )  # a rule that needs them gets them
        cavities, explained = {}, {}
        for name, q in query.marginals.items():
            cavities[name], explained[name] = cavity_of(
                q, query.local[name].explained, query.sites[name], self.power
            )
        tilted = query.rows.moments(cavities, query.sites, self.power)
        return {
            name: _matching(cavities[name], explained[name], tilted[name], q.mean, self.power)
            for name, q in query.marginals.items()
        }


def _matching(
    cavity: Marginals, explained: Array, tilted: Marginals, mean: Array, power: float
) -> SiteGradients:
    """The site that gives the cavity the moments of the tilted distribution, about ``mean``."""
    slope = (tilted.mean - cavity.mean) / cavity.variance
    bend = (cavity.variance - tilted.variance) / cavity.variance**2
    # At most what leaves no variance of its own to what sites move.
    most = (1 - jnp.finfo(mean.dtype).eps ** 0.5) / explained
    bend = jnp.minimum(bend, most)
    beta = jnp.maximum(bend, 0.0) / (1 - explained * jnp.maximum(bend, 0.0))
    linear = slope + beta * (cavity.mean + explained * slope)
    return SiteGradients((linear - beta * mean) / power, beta / power)
