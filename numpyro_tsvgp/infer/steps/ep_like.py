"""The EP-like log partition function as an objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_tsvgp.infer.steps.objective import Evaluated
from numpyro_tsvgp.infer.steps.propagation import cavity_of, leverage_of
from numpyro_tsvgp.model.read import is_observed
from numpyro_tsvgp.model.wrapped import unwrapped

if TYPE_CHECKING:
    from numpyro_tsvgp.model.arguments import Call
    from numpyro_tsvgp.model.read import Model, Reading
    from numpyro_tsvgp.model.structure import Structure

__all__ = ["EPLike"]


@dataclass(frozen=True)
class EPLike:
    r"""The log partition function of expectation propagation, at whatever sites there are.

    For each data point the approximation of :math:`p(y_i \mid f)` by its site is corrected over the
    *cavity* of the point, the posterior :math:`\mathcal{N}(m_c, v_c)` without its site:

    .. math::
      \log Z = -\mathrm{KL}(q \,\|\, p) + \sum_i \Big[
        \log \int p(y_i \mid f) \, \mathcal{N}(f;\, m_c, v_c) \, \mathrm{d}f
        + \mathrm{KL}(q_i \,\|\, c_i) \Big]

    with :math:`\mathrm{KL}(q_i \| c_i) = \tfrac12 [s_c \alpha_i^2 - \log(1 - \beta_i s_i) - \beta_i
    s_i]`, the divergence between posterior and cavity at :math:`x_i`, of the part of f there that
    sites can change. The result is never below the bound, by Jensen's inequality in each of its
    terms, and is no bound itself. For
    a Gaussian likelihood without inducing inputs it is the log evidence. Hyperparameters learned
    with it have less of the bias that the bound has to posteriors that are easy to approximate.

    E-steps stay what they are. In M-steps the sites are held, :math:`\alpha_i = \lambda_i - \beta_i
    m_i` with the current mean :math:`m_i`. With tied sites, which are sums, a point is taken to
    have contributed what it asks for at the posterior before the M-steps. On a minibatch the sum
    over points carries :math:`N/|M|`.

    It needs the density of each data point by itself. Models with terms of ``numpyro.factor``, with
    latent variables below a GP, and with data that are not laid out along the rows of the GPs are
    refused.

    Examples:
      >>> from numpyro_tsvgp import EPLike
      >>> EPLike()
      EPLike()

    References:
      R. Li, S. T. John, A. Solin, *Improving hyperparameter learning under approximate inference in
      Gaussian process models*, ICML 2023.
    """

    is_bound: ClassVar[bool] = False
    needs_parts: ClassVar[bool] = True
    needs_rows: ClassVar[bool] = True

    def refuses(
        self, model: Model, structure: Structure, reading: Reading, call: Call
    ) -> str | None:
        for name, site in reading.trace.items():
            if is_observed(site) and isinstance(unwrapped(site["fn"]), dist.Unit):
                return (
                    f"site '{name}' is a term of numpyro.factor, which belongs to no data point. "
                    "Observe the data with obs=y, or use the bound"
                )
        return None

    def __call__(self, evaluated: Evaluated) -> Array:
        parts = evaluated.parts
        assert parts is not None and parts.rows is not None and parts.sites is not None
        cavities = {}
        divergence: Any = 0.0
        for name, q in evaluated.marginals.items():
            site, explained = parts.sites[name], parts.explained[name]
            cavities[name], without = cavity_of(q, explained, site)
            alpha = site.linear - site.quadratic * q.mean
            leverage = leverage_of(explained, site)
            terms = without * alpha**2 - jnp.log1p(-leverage) - leverage
            divergence = divergence + 0.5 * terms.sum()
        total = parts.rows.log_partition(cavities, parts.sites).sum() + divergence
        return parts.subsampling * total - evaluated.divergence
