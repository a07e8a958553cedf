"""The rows of a model's arguments: which arguments have one for each data point, and some of them.

A fit that gets more data, or less, has to know which of the model's arguments are data. An argument
is, if its first axis is as long as the GPs have rows, in one call and in another with other data.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import Model

__all__ = [
    "appended",
    "canonical",
    "find_rows",
    "is_rows",
    "on_device",
    "on_host",
    "padded",
    "taken",
]


def canonical(model: Model, call: Call) -> Call:
    """Arguments in the form that all calls of a model share, whichever were given by keyword."""
    try:
        bound = inspect.signature(model).bind(*call.args, **call.kwargs)
    except (TypeError, ValueError):  # no signature, or arguments that the model will complain about
        return call
    bound.apply_defaults()
    return Call(bound.args, bound.kwargs, whole=call.whole)


def is_rows(old: Call, new: Call, rows: int) -> tuple[bool, ...] | None:
    """Which arrays of two calls of one model have a row for each data point.

    Args:
      old: canonical arguments with some data.
      new: canonical arguments with other data.
      rows: how many data points the new ones have.

    Returns:
      An entry for each array of the arguments, or None if there is no telling. What is not data
      differs, or arrays as long as the new data were of several lengths.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp.model.arguments import Call
      >>> from numpyro_tsvgp.model.data_rows import is_rows
      >>> old = Call((jnp.zeros((9, 2)), jnp.zeros(9), jnp.zeros(3)), {})
      >>> new = Call((jnp.zeros((3, 2)), jnp.zeros(3), jnp.zeros(3)), {})
      >>> is_rows(old, new, 3)
      (True, True, False)
    """
    old = Call(old.args, old.kwargs, whole=new.whole)
    structures: list[Any] = [jax.tree.structure(old), jax.tree.structure(new)]
    if structures[0] != structures[1]:
        return None
    pairs = list(zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))
    if any(np.shape(a)[1:] != np.shape(b)[1:] or np.ndim(a) != np.ndim(b) for a, b in pairs):
        return None
    long = [np.ndim(b) > 0 and b.shape[0] == rows for _, b in pairs]
    lengths = {a.shape[0] for (a, _), yes in zip(pairs, long, strict=True) if yes}
    if rows in lengths and len(lengths) > 1:  # as long as the data by chance
        lengths.remove(rows)
    if len(lengths) != 1:
        return None
    (length,) = lengths
    flags = tuple(yes and a.shape[0] == length for (a, _), yes in zip(pairs, long, strict=True))
    same = all(
        yes or (np.shape(a) == np.shape(b) and np.array_equal(a, b))
        for (a, b), yes in zip(pairs, flags, strict=True)
    )
    return flags if same else None


def _map(function: Any, flags: Sequence[bool], *calls: Call) -> Call:
    """Applies a function to those arrays of calls that have rows; the rest is that of the first."""
    leaves = [jax.tree.leaves(call) for call in calls]
    new = [
        function(*map(np.asarray, arrays)) if yes else arrays[0]
        for yes, arrays in zip(flags, zip(*leaves, strict=True), strict=True)
    ]
    return on_device(jax.tree.unflatten(jax.tree.structure(calls[0]), new))


def on_device(call: Call) -> Call:
    """The same with NumPy arrays as arrays of JAX, for which nothing is compiled."""
    return jax.tree.map(jax.device_put, call)


def on_host(call: Call) -> Call:
    """The same with data frames and arrays of JAX as NumPy arrays, which have any shape at once."""

    def convert(leaf: Any) -> Any:
        if hasattr(leaf, "to_numpy"):  # pandas and its like
            leaf = leaf.to_numpy()
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        return np.asarray(leaf) if is_array else leaf

    args, kwargs = jax.tree.map(convert, (call.args, call.kwargs))
    return Call(args, kwargs, whole=call.whole)


def padded(call: Call, flags: Sequence[bool], size: int) -> Call:
    """Arguments whose last row is repeated until there are so many."""
    return _map(lambda a: np.concatenate([a, np.repeat(a[-1:], size - len(a), 0)]), flags, call)


def appended(old: Call, new: Call, flags: Sequence[bool]) -> Call:
    """The rows of some arguments followed by those of others."""
    return _map(
        lambda a, b: np.concatenate([a, b.astype(np.promote_types(a.dtype, b.dtype))]),
        flags,
        old,
        new,
    )


def taken(call: Call, flags: Sequence[bool], rows: Any) -> Call:
    """Some rows of arguments."""
    return _map(lambda a: a[rows], flags, call)


def find_rows(old: Call, new: Call, flags: Sequence[bool]) -> np.ndarray | int:
    """Where the rows of some arguments are among those of others, each at another place.

    Args:
      old: the arguments to look in.
      new: the arguments whose rows are looked for.
      flags: which arrays have rows.

    Returns:
      Row numbers of ``old``, or the first row of ``new``, negative and minus one, that it has not.
    """

    def tables(call: Call) -> list[np.ndarray]:
        leaves = jax.tree.leaves(call)
        return [
            np.asarray(leaf).reshape(len(leaf), -1)
            for leaf, yes in zip(leaves, flags, strict=True)
            if yes
        ]

    places: dict[bytes, list[int]] = {}
    kinds = [
        np.promote_types(a.dtype, b.dtype) for a, b in zip(tables(old), tables(new), strict=True)
    ]

    def keys(call: Call) -> list[bytes]:
        columns = [t.astype(kind) + 0 for t, kind in zip(tables(call), kinds, strict=True)]
        return [b"".join(c[i].tobytes() for c in columns) for i in range(len(columns[0]))]

    for i, key in enumerate(keys(old)):
        places.setdefault(key, []).append(i)
    found = []
    for i, key in enumerate(keys(new)):
        if not places.get(key):
            return -1 - i
        found.append(places[key].pop())
    return np.array(found)
