"""What a site rule can ask a likelihood at the current posterior."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian.approximation import Local
from numpyro_tsvgp.gaussian.quadrature import (
    LogLikelihood,
    Marginals,
    Nodes,
    SiteGradients,
    site_gradients,
)
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.steps.row_densities import RowDensities

__all__ = ["Query"]


@dataclass(frozen=True, eq=False)
class Query:
    """The likelihood at the current posterior, for a site rule to ask.

    Attributes:
      likelihood: the log-likelihood as a function of the values ``{site: (latents, n)}``.
      marginals: mean, with the prior mean, and variance of every GP at the data.
      nodes: nodes of the quadrature.
      local: the posterior of every GP at the data without the prior mean, in its parts.
      sites: the site of each data point, about f, for a rule with ``needs_rows``.
      rows: the log density of each row of the data, for a rule with ``needs_rows``.
      information: the Fisher information of the data about each function value, as a function of
        the values, for a rule with ``needs_information``.
    """

    likelihood: LogLikelihood
    marginals: Mapping[str, Marginals]
    nodes: Nodes
    local: Mapping[str, Local]
    sites: Mapping[str, PointSites] | None = None
    rows: RowDensities | None = None
    information: Callable[[Mapping[str, Array]], dict[str, Array]] | None = None

    @cached_property
    def _expectation(self) -> tuple[Array, dict[str, SiteGradients]]:
        return site_gradients(self.likelihood, self.marginals, self.nodes)

    @property
    def expected(self) -> Array:
        """The expected log-likelihood."""
        return self._expectation[0]

    @property
    def gradients(self) -> dict[str, SiteGradients]:
        r"""Its gradients :math:`\\alpha_i` and :math:`\\beta_i`, for every GP ``(latents, n)``."""
        return self._expectation[1]

    def at_means(self) -> dict[str, SiteGradients]:
        """First derivatives of the log-likelihood at the means, and minus the second ones."""
        means = {name: q.mean for name, q in self.marginals.items()}
        slope = jax.grad(lambda values: self.likelihood(values))
        axes = self.nodes.axes
        beta = jax.tree.map(jnp.zeros_like, means)
        # Functions that share a coordinate never meet in a term, so that one product with the
        # Hessian gives the second derivatives of all of them.
        for axis in range(self.nodes.points.shape[1]):
            along = {name: jnp.asarray(axes[name] == axis)[:, None] for name in means}
            tangent = {
                k: jnp.broadcast_to(on, means[k].shape).astype(means[k].dtype)
                for k, on in along.items()
            }
            change = jax.jvp(slope, (means,), (tangent,))[1]
            beta = {k: jnp.where(along[k], -change[k], beta[k]) for k in means}
        alpha = slope(means)
        return {name: SiteGradients(alpha[name], beta[name]) for name in means}

    def expected_information(self) -> dict[str, Array]:
        """The expected Fisher information of the data about each function value."""
        assert self.information is not None  # a rule that needs it gets it
        axes, points, weights, _ = self.nodes

        def at(node: Array) -> dict[str, Array]:
            values = {
                name: q.mean + jnp.sqrt(q.variance) * node[np.asarray(axes[name])][:, None]
                for name, q in self.marginals.items()
            }
            return self.information(values)  # type: ignore[misc]

        each = jax.lax.map(at, points.astype(next(iter(self.marginals.values())).mean.dtype))
        return {name: jnp.tensordot(weights.astype(x.dtype), x, 1) for name, x in each.items()}
