r"""Integrals over the marginals of GPs, as mixtures over the nodes of a fine quadrature rule.

.. math:: p(y) = \int p(y \mid f) \, \mathcal{N}(f; m, v) \, \mathrm{d}f
  \approx \sum_s w_s \, p\big(y \mid m + \sqrt{v} \, z_s\big)

A log-likelihood is smooth in f and a few nodes integrate it. A likelihood may be much narrower than
the marginal it is integrated over, so here nodes are evenly spaced (the trapezoidal rule, which
for a Gaussian times a smooth function converges faster than any power), and each integral comes
with the one over every other node: where the two differ the rule is too coarse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian.quadrature import Marginals, QuasiMonteCarlo

__all__ = ["LEVELS", "FineNodes", "fine_nodes", "values_at_node"]


class FineNodes(NamedTuple):
    """Nodes of a fine rule, with three sets of weights.

    Attributes:
      points: ``(size, dim)``.
      log_weights: logarithms of weights, ``(3, size)``: of the rule; of a coarser rule, on some of
        the nodes; and of the rule at the outermost nodes alone.
    """

    points: np.ndarray
    log_weights: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        """The weights of the rule, whose sum is one."""
        return np.exp(self.log_weights[0])


# Half width and number of nodes on either side of zero, by dimension and level; beyond three
# dimensions the size of a quasi-Monte Carlo rule.
_GRIDS = {
    1: ((10.0, 100), (40.0, 800), (40.0, 3200), (40.0, 12800)),
    2: ((8.0, 20), (8.0, 40), (8.0, 80), (8.0, 160)),
    3: ((6.4, 8), (6.4, 16), (6.4, 24), (6.4, 32)),
}
_LATTICES = (2048, 4096, 8192, 16384)
LEVELS = 4


def fine_nodes(dim: int, level: int = 0) -> FineNodes:
    """Nodes for a standard normal in ``dim`` dimensions.

    Args:
      dim: how many latent functions meet in one term.
      level: how fine, from 0 to 3.

    Returns:
      The nodes.

    Examples:
      >>> from numpyro_tsvgp.infer.steps.mixture import fine_nodes
      >>> nodes = fine_nodes(1)
      >>> nodes.points.shape, round(float(nodes.weights @ nodes.points[:, 0] ** 2), 10)
      ((201, 1), 1.0)
    """
    if dim not in _GRIDS:
        size = _LATTICES[level]
        lattice, _ = QuasiMonteCarlo(size).nodes(jax.random.key(0), dim)
        log_weights = np.full((3, size), -np.inf)
        log_weights[0] = -np.log(size)
        first = np.arange(size) % (size // 2) < size // 4  # with their mirror images
        log_weights[1, first] = -np.log(size / 2)
        return FineNodes(np.asarray(lattice), log_weights)
    width, count = _GRIDS[dim][level]
    z = np.linspace(-width, width, 2 * count + 1)
    inner = np.where(np.arange(len(z)) % 2 == 0, 0.0, -np.inf)  # with zero and both ends
    points = np.stack([g.ravel() for g in np.meshgrid(*[z] * dim, indexing="ij")], -1)

    def tensor(log_weights: np.ndarray) -> np.ndarray:
        normed = log_weights - np.logaddexp.reduce(log_weights)
        return np.sum(np.meshgrid(*[normed] * dim, indexing="ij"), axis=0).ravel()

    rule = tensor(-0.5 * z**2)
    outermost = np.where(np.abs(points).max(-1) >= width, rule, -np.inf)
    return FineNodes(points, np.stack([rule, tensor(inner - 0.5 * z**2), outermost]))


def values_at_node(
    marginals: Mapping[str, Marginals], axes: Mapping[str, np.ndarray], node: Array
) -> dict[str, Array]:
    """Function values at one node: marginals ``(functions, n)`` shifted by their coordinate."""
    return {
        name: q.mean + jnp.sqrt(q.variance) * node[axes[name]].astype(q.mean.dtype)[:, None]
        for name, q in marginals.items()
    }
