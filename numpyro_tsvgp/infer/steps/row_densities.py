r"""The likelihood of each data point by itself, and its integrals over a cavity.

A *cavity* is the posterior without what one data point said about it. Leaving a point out, the
EP-like objective and expectation propagation all ask for the same integral, of the density of the
point over its cavity,

.. math::
  Z_i = \int p(y_i \mid f)^\eta \, \mathcal{N}(f;\, m_c, v_c) \, \mathrm{d}f,

and the last one for the moments of its integrand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian.quadrature import Marginals, Nodes
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.steps.mixture import fine_nodes
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.layout import Layout, find_layout
from numpyro_tsvgp.model.likelihood import terms
from numpyro_tsvgp.model.read import Model, Reading
from numpyro_tsvgp.model.structure import Structure

__all__ = ["RowDensities", "row_densities"]

# Numbers at nodes that are held side by side; more of them are visited in turn.
_NUMBERS_AT_ONCE = 2**19
# The logarithm of a weight that counts for nothing, and of which differences are finite.
_NO_WEIGHT = -1e9


class RowDensities(NamedTuple):
    """The log density of each row of the data as a function of the values of every GP.

    Attributes:
      log_prob: from values ``{site: (latents, n)}`` to ``(groups + 1, n)``: the latent functions
        that meet in a term are a group, and an integral over them factorises over groups. The last
        entry is of terms that read no GP.
      layout: where the terms of each row are.
      nodes: nodes of the integrals, for a standard normal.
    """

    log_prob: Callable[[Mapping[str, Array]], Array]
    layout: Layout
    nodes: Nodes

    def without(self, rows: Array) -> RowDensities:
        """The same where some rows, a boolean ``(n,)``, say nothing."""
        return self._replace(log_prob=lambda f: jnp.where(rows, 0.0, self.log_prob(f)))

    def log_partition(
        self, cavities: Mapping[str, Marginals], sites: Mapping[str, PointSites]
    ) -> Array:
        """The log integral of the density of each row over its cavity, ``(n,)``.

        The nodes are those of the cavity times the site, a Gaussian near where the integrand is,
        and their weights are corrected for it. What is integrated is the density over the site,
        which for a Gaussian likelihood is a constant and integrated exactly. In derivatives the
        nodes are held.

        Args:
          cavities: mean, with the prior mean, and variance of every GP, ``(latents, n)``.
          sites: sites of the data points, about f.

        Returns:
          The log integrals.
        """
        around = _around(cavities, sites, 1.0)
        parts = self._over_chunks(
            lambda *nodes: jax.nn.logsumexp(self._integrand(cavities, around, 1.0, *nodes)[0], 0)
        )
        return jax.nn.logsumexp(parts, 0).sum(0)

    def moments(
        self, cavities: Mapping[str, Marginals], sites: Mapping[str, PointSites], power: float
    ) -> dict[str, Marginals]:
        """Mean and variance of every GP under its cavity times a power of the density.

        Args:
          cavities: mean, with the prior mean, and variance of every GP, ``(latents, n)``.
          sites: sites of the data points, about f; see :meth:`log_partition`.
          power: the power of the density.

        Returns:
          The moments, by GP ``(latents, n)``.
        """
        around = _around(cavities, sites, power)

        def chunk(*nodes: Array) -> tuple[Array, dict[str, tuple[Array, Array]]]:
            log_prob, values = self._integrand(cavities, around, power, *nodes)
            total = jax.nn.logsumexp(log_prob, 0)
            share = jnp.exp(log_prob - total)
            found = {}
            for name, f in values.items():
                weight = share[:, self.layout.latent_group[name]]
                f = f - around[name].mean  # so that nothing is lost in the squares
                found[name] = ((weight * f).sum(0), (weight * f**2).sum(0))
            return total, found

        totals, found = self._over_chunks(chunk)
        share = jax.nn.softmax(totals, 0)  # (chunks, groups + 1, n)
        out = {}
        for name, (first, second) in found.items():
            weight = share[:, self.layout.latent_group[name]]
            mean = (weight * first).sum(0)
            variance = (weight * second).sum(0) - mean**2
            out[name] = Marginals(around[name].mean + mean, variance)
        return out

    def _integrand(
        self,
        cavities: Mapping[str, Marginals],
        around: Mapping[str, Marginals],
        power: float,
        points: Array,
        log_weights: Array,
    ) -> tuple[Array, dict[str, Array]]:
        """Log weights of nodes, ``(nodes, groups + 1, n)``, and the values of every GP there."""
        values, log_ratio = {}, {}
        for name, (mean, variance) in around.items():
            z = points[:, self.nodes.axes[name]].astype(mean.dtype)[..., None]
            m_c, v_c = cavities[name]
            values[name] = mean + jnp.sqrt(variance) * z
            square = (values[name] - m_c) ** 2 / v_c
            log_ratio[name] = 0.5 * (z**2 - square + jnp.log(variance / v_c))
        log_prob = power * jax.vmap(self.log_prob)(values)
        log_prob = log_prob + jax.vmap(self.layout.sum_latents)(log_ratio)
        return log_prob + log_weights[:, None, None], values

    def _over_chunks(self, chunk: Callable[[Array, Array], Any]) -> Any:
        """A function of some nodes for all of them, with a leading axis of chunks."""
        _, points, weights, _ = self.nodes
        numbers = self.layout.rows * (self.layout.groups + 1 + points.shape[1])
        chunks = -(-points.shape[0] * numbers // _NUMBERS_AT_ONCE)
        log_weights = jnp.log(weights)
        if chunks == 1:
            return jax.tree.map(lambda x: x[None], chunk(points, log_weights))
        pad = -points.shape[0] % chunks
        some = jnp.pad(points, ((0, pad), (0, 0))).reshape(chunks, -1, points.shape[1])
        log_weights = jnp.pad(log_weights, (0, pad), constant_values=_NO_WEIGHT)
        inputs = some, log_weights.reshape(chunks, -1)
        return lax.map(lambda nodes: chunk(*nodes), inputs)


def _around(
    cavities: Mapping[str, Marginals], sites: Mapping[str, PointSites], power: float
) -> dict[str, Marginals]:
    """Cavities times sites, as constants."""
    found = {name: _times_site(cavities[name], sites[name], power) for name in cavities}
    return lax.stop_gradient(found)


def _times_site(cavity: Marginals, site: PointSites, power: float) -> Marginals:
    m_c, v_c = cavity
    variance = v_c / (1 + power * jnp.maximum(site.quadratic, 0.0) * v_c)
    return Marginals(m_c + variance * power * (site.linear - site.quadratic * m_c), variance)


def row_densities(
    model: Model,
    structure: Structure,
    reading: Reading,
    call: Call,
    nodes: Nodes,
    *,
    layout: Layout | None = None,
    scaled: bool = True,
) -> RowDensities:
    """The log density of each row of the data of a model.

    Args:
      model: the NumPyro model.
      structure: its structure.
      reading: a reading of it, whose values are pinned.
      call: its arguments.
      nodes: nodes of the quadrature of expectations.
      layout: where the terms of each row are, if that is known.
      scaled: whether densities have the scale that the model gives them (``handlers.scale``), but
        for that of subsampling.

    Returns:
      The densities.

    Raises:
      ValueError: if the data are not laid out along the rows of the GPs.
    """
    evaluate = terms(model, reading, call)
    found = find_layout(model, structure, reading, call) if layout is None else layout

    def at_rows(values: Mapping[str, Array]) -> Array:
        return found.sum_terms(
            {
                name: (t.scale / reading.subsampling) * t.log_prob if scaled else t.log_prob
                for name, t in evaluate(values).items()
            }
        )

    def log_prob(values: Mapping[str, Array]) -> Array:
        return found.at_own_values(at_rows, values)

    return RowDensities(log_prob, found, _for_densities(nodes, structure.dim))


def _for_densities(nodes: Nodes, dim: int) -> Nodes:
    """Nodes for integrals of a density, which may be narrow where its logarithm is smooth."""
    if dim > 1:
        return nodes
    # Evenly spaced ones do not thin out where a narrow likelihood may stand.
    fine = fine_nodes(1)
    return Nodes(nodes.axes, jnp.asarray(fine.points), jnp.asarray(fine.weights))
