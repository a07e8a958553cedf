r"""Objectives: what an M-step improves, as a function of marginals and divergences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from jax import Array

from numpyro_tsvgp.gaussian.quadrature import LogLikelihood, Marginals, Nodes, expect
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.steps.row_densities import RowDensities

if TYPE_CHECKING:
    from numpyro_tsvgp.model.arguments import Call
    from numpyro_tsvgp.model.read import Model, Reading
    from numpyro_tsvgp.model.structure import Structure

__all__ = ["Bound", "Evaluated", "Objective", "Parts"]


class Parts(NamedTuple):
    """The posterior at the data in its parts, for objectives with ``needs_parts``.

    Attributes:
      explained: for every GP the part :math:`s_i` of its variances that sites move,
        ``(functions, n)``. The rest of a variance, :math:`d_i`, is what inducing values leave of
        the prior.
      subsampling: how many times as many data points there are as in this evaluation.
      sites: the site of each data point, about f and held, for objectives with ``needs_rows``.
      rows: the log density of each row of the data, for objectives with ``needs_rows``.
    """

    explained: Mapping[str, Array]
    subsampling: float
    sites: Mapping[str, PointSites] | None
    rows: RowDensities | None


class Evaluated(NamedTuple):
    """A posterior, and what scores it.

    Attributes:
      likelihood: the log-likelihood as a function of the values of every GP.
      marginals: mean and variance of every GP at the data, each ``(functions, n)``.
      divergence: the divergence of the posterior from the prior, summed over GPs.
      nodes: nodes of the quadrature.
      wanted: whether the value is wanted or its gradient alone; None for both. See
        :func:`~numpyro_tsvgp.gaussian.quadrature.expect`.
      parts: the posterior in its parts, for an objective that needs them; else None.
    """

    likelihood: LogLikelihood
    marginals: Mapping[str, Marginals]
    divergence: Array
    nodes: Nodes
    wanted: Any = None
    parts: Parts | None = None


@runtime_checkable
class Objective(Protocol):
    """The contract of an objective: a frozen, hashable value.

    Attributes:
      is_bound: whether it is the bound that E-steps climb.
      needs_parts: whether it asks for the parts of the posterior at the data. Then the M-step is
        differentiated in the plain way and cannot share an evaluation with the E-step.
      needs_rows: whether it asks for the density and the site of each data point by itself.
    """

    is_bound: ClassVar[bool]
    needs_parts: ClassVar[bool]
    needs_rows: ClassVar[bool]

    def refuses(
        self, model: Model, structure: Structure, reading: Reading, call: Call
    ) -> str | None:
        """Why the objective is not defined for a model, or None if it is."""
        ...

    def __call__(self, evaluated: Evaluated) -> Array:
        """The scalar to make large, without the log prior of the hyperparameters."""
        ...


@dataclass(frozen=True)
class Bound:
    r"""The evidence lower bound, :math:`\mathbb{E}_q \log p(y \mid f) - \mathrm{KL}(q \,\|\, p)`.

    Examples:
      >>> from numpyro_tsvgp.infer.steps.objective import Bound
      >>> Bound()
      Bound()
    """

    is_bound: ClassVar[bool] = True
    needs_parts: ClassVar[bool] = False
    needs_rows: ClassVar[bool] = False

    def refuses(
        self, model: Model, structure: Structure, reading: Reading, call: Call
    ) -> str | None:
        return None

    def __call__(self, evaluated: Evaluated) -> Array:
        likelihood, marginals, divergence, nodes, wanted, _ = evaluated
        return expect(likelihood, marginals, nodes, wanted=wanted) - divergence
