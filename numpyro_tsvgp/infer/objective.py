r"""Objectives: what an M-step improves, as a function of marginals and divergences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax import Array

from numpyro_tsvgp.gaussian.quadrature import LogLikelihood, Marginals, Nodes, expect

__all__ = ["Bound", "Evaluated", "Objective"]


class Evaluated(NamedTuple):
    """A posterior, and what scores it.

    Attributes:
      likelihood: the log-likelihood as a function of the values of every GP.
      marginals: mean and variance of every GP at the data, each ``(functions, n)``.
      divergence: the divergence of the posterior from the prior, summed over GPs.
      nodes: nodes of the quadrature.
      wanted: whether the value is wanted or its gradient alone; None for both. See
        :func:`~numpyro_tsvgp.gaussian.quadrature.expect`.
    """

    likelihood: LogLikelihood
    marginals: Mapping[str, Marginals]
    divergence: Array
    nodes: Nodes
    wanted: Any = None


@runtime_checkable
class Objective(Protocol):
    """The contract of an objective: a frozen, hashable value."""

    def __call__(self, evaluated: Evaluated) -> Array:
        """The scalar to make large, without the log prior of the hyperparameters."""
        ...


@dataclass(frozen=True)
class Bound:
    r"""The evidence lower bound, :math:`\mathbb{E}_q \log p(y \mid f) - \mathrm{KL}(q \,\|\, p)`.

    Examples:
      >>> from numpyro_tsvgp.infer.objective import Bound
      >>> Bound()
      Bound()
    """

    def __call__(self, evaluated: Evaluated) -> Array:
        likelihood, marginals, divergence, nodes, wanted = evaluated
        return expect(likelihood, marginals, nodes, wanted=wanted) - divergence
