r"""The memory of a stream: a few points that stand for all data that are gone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
from jax import Array

from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.model.arguments import Call

__all__ = ["Memory"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["call", "sites", "count", "past"],
    meta_fields=["rows"],
)
@dataclass(frozen=True)
class Memory:
    """Points of the past, and what each of them contributed to a posterior.

    Attributes:
      call: the arguments of the model with the points; the last one may be repeated.
      sites: by GP site, the sites of the points, about f itself, each ``(functions, size)``; zero
        where points are repeated.
      count: how many of the points are not repeated.
      past: how many data points there have been.
      rows: which arrays of the arguments have a row for each point.
    """

    call: Call
    sites: dict[str, PointSites]
    count: Array
    past: Array
    rows: tuple[bool, ...]
