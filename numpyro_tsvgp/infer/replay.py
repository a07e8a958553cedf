r"""The memory of a stream: a few points that stand for all data that are gone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array

from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.model.arguments import Call

__all__ = ["Memory", "describe_memory", "rebuild_memory"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["call", "sites", "weights", "count", "past"],
    meta_fields=["rows"],
)
@dataclass(frozen=True)
class Memory:
    """Points of the past, and what each of them contributed to a posterior.

    Attributes:
      call: the arguments of the model with the points; the last one may be repeated.
      sites: by GP site, the sites of the points, about f itself, each ``(functions, size)``; zero
        where points are repeated.
      weights: how many data points of the past each of the points stands for, ``(size,)``; zero
        where points are repeated. They add up to ``past``.
      count: how many of the points are not repeated.
      past: how many data points there have been.
      rows: which arrays of the arguments have a row for each point.
    """

    call: Call
    sites: dict[str, PointSites]
    weights: Array
    count: Array
    past: Array
    rows: tuple[bool, ...]


def describe_memory(memory: Memory) -> tuple[dict[str, Any], dict[str, Any]]:
    """A memory as arrays and as words, for a file.

    Args:
      memory: the memory.

    Returns:
      Nested dicts of arrays, and what else there is, of numbers and strings.

    Raises:
      ValueError: if the model's arguments are more than arrays, numbers, strings and None.
    """
    arrays = {}

    def one(place: str, value: Any) -> Any:
        if hasattr(value, "shape"):
            arrays[place] = value
            return {"array": place}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        raise ValueError(
            "The memory of a stream is saved with the arguments of the model, which may be arrays, "
            f"numbers, strings and None, but one is of type {type(value).__name__}."
        )

    call = memory.call
    words = {
        "args": [one(f"arg{i}", value) for i, value in enumerate(call.args)],
        "kwargs": {name: one(f"kwarg {name}", value) for name, value in call.kwargs.items()},
        "rows": list(memory.rows),
    }
    sites = {
        name: {"linear": s.linear, "quadratic": s.quadratic} for name, s in memory.sites.items()
    }
    numbers = {"weights": memory.weights, "count": memory.count, "past": memory.past}
    return {"call": arrays, "sites": sites, **numbers}, words


def rebuild_memory(arrays: Any, words: Any) -> Memory | None:
    """A memory out of what :func:`describe_memory` made of it; None out of nothing."""
    if words is None:
        return None

    def one(value: Any) -> Any:
        return arrays["call"][value["array"]] if "array" in value else value["value"]

    args = tuple(one(value) for value in words["args"])
    kwargs = {name: one(value) for name, value in words["kwargs"].items()}
    return Memory(
        Call(args, kwargs),
        {name: PointSites(s["linear"], s["quadratic"]) for name, s in arrays["sites"].items()},
        arrays["weights"],
        arrays["count"],
        arrays["past"],
        tuple(words["rows"]),
    )
