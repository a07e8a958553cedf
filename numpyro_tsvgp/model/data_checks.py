"""Whether data are what the model takes them for: their shape, their values, their order."""

from __future__ import annotations

import warnings
from inspect import getattr_static
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints

from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import Message, Reading, is_observed
from numpyro_tsvgp.model.wrapped import unmasked, unwrapped

__all__ = [
    "any_bad",
    "check_order",
    "check_shape",
    "check_values",
    "first_where",
    "shown_index",
    "where_not_finite",
]

# So many values are not sorted by chance.
_SORTED = 10


def check_shape(name: str, site: Message, reading: Reading) -> None:
    """Data must be numbers, one for each of their distribution.

    Args:
      name: the observed site.
      site: its message.
      reading: the reading of the model that it is of.

    Raises:
      TypeError: if the data are not numbers.
      ValueError: if their shape is not that of the distribution.
    """
    fn, _ = unmasked(site["fn"])
    value = np.asarray(site["value"])
    if isinstance(fn, dist.Unit) or value.size == 0:
        return
    if value.dtype.kind not in "biufc":
        raise TypeError(
            f"The data of site '{name}' are not numbers, but of type {value.dtype} with values "
            f"such as {str(value.flat[0])!r}. Give classes numbers, as in "
            "names, y = np.unique(y, return_inverse=True)."
        )
    shape = fn.shape()
    count = int(np.prod(shape))
    if value.size == 1 < count:
        raise ValueError(
            f"The data of site '{name}' are one number, of shape {value.shape}, but its "
            f"distribution has shape {shape}. Pass one value for each data point; if the same is "
            f"meant for all of them, jnp.full({shape}, value)."
        )
    # Many numbers for one distribution without plates are meant; an axis of length one that would
    # be repeated is not.
    tail = shape[max(len(shape) - value.ndim, 0) :]
    if len(shape) != 0 and value.shape != tail:
        raise ValueError(
            f"The data of site '{name}' have shape {value.shape}, but its distribution has shape "
            f"{shape}. " + _shape_advice(value.shape, shape, reading)
        )


def _shape_advice(value: tuple[int, ...], shape: tuple[int, ...], reading: Reading) -> str:
    rows = {site.rows for site in reading.gps.values() if site.gp.X.ndim == 1}
    swapped = " (Or are X and y swapped?)" if len(value) == 2 and value[0] in rows else ""
    if len(value) == len(shape) + 1 and value[-1] == 1 and value[:-1] == shape:
        return f"Drop the last axis: y[:, 0].{swapped}"
    return (
        "Check that X and y have the same number of rows and that plates have the size of y."
        f"{swapped}"
    )


def check_order(name: str, site: Message, reading: Reading) -> None:
    """Warns of data that are sorted where the inputs are not: they are likely to be inputs.

    Args:
      name: the observed site.
      site: its message.
      reading: the reading of the model that it is of.
    """
    value = np.asarray(site["value"])
    for gp, found in reading.gps.items():
        X = np.asarray(found.gp.X)
        if X.size == value.size >= _SORTED and _is_sorted(value) and not _is_sorted(X):
            warnings.warn(
                f"The data of site '{name}' are sorted and the inputs X of GP site '{gp}' are not: "
                "are X and y swapped? (If not, pass the rows in another order.)",
                stacklevel=stack_level(),
            )


def _is_sorted(values: np.ndarray) -> bool:
    steps = np.diff(values.ravel())
    return bool((steps > 0).all() or (steps < 0).all())


def _in_supports(reading: Reading) -> dict[str, Array]:
    """Which data lie in the support of their distribution.

    Args:
      reading: a reading of a model, traced or not.

    Returns:
      By observed site whose distribution has a support, one boolean for each event.
    """
    found = {}
    for name, site in reading.trace.items():
        fn = _with_support(site) if is_observed(site) else None
        if fn is not None:
            value = jnp.asarray(site["value"])
            value = jnp.broadcast_to(value, jnp.broadcast_shapes(value.shape, fn.shape()))
            found[name] = fn.support(value)
    return found


def _with_support(site: Message) -> Any:
    """The distribution of data inside of masks, or None where there is no support to lie in."""
    fn = site["fn"]
    while isinstance(fn, dist.MaskedDistribution):
        fn = fn.base_dist
    # A distribution of the user's own need not have a support.
    nothing = isinstance(fn, dist.Unit) or np.size(site["value"]) == 0 or fn.support is None
    return None if nothing else fn


def check_values(reading: Reading) -> None:
    """Inputs must be finite, and data must be there and in the support of their distribution.

    Args:
      reading: a reading of a model, of any rows of its data.

    Raises:
      ValueError: if a value is not, naming the site and the row.
    """
    for name, site in reading.gps.items():
        X = np.asarray(site.gp.X)
        where = first_where(~np.isfinite(X))
        if where is not None:
            row = _row_of_all(reading, len(X), where[0])
            raise ValueError(
                f"The inputs X of GP site '{name}' have the value {X[where]} at index "
                f"{shown_index((row, *where[1:]))}. Remove or impute rows with missing inputs."
            )
    for name, inside in _in_supports(reading).items():
        _check_values(name, reading.trace[name], reading, np.asarray(inside))


def _check_values(name: str, site: Message, reading: Reading, in_support: np.ndarray) -> None:
    fn, mask = unmasked(site["fn"])
    value = np.asarray(site["value"])
    value = np.broadcast_to(value, np.broadcast_shapes(value.shape, fn.shape()))
    event_axes = tuple(range(in_support.ndim, value.ndim))
    missing = np.isnan(value).any(event_axes) if value.dtype.kind == "f" else False
    infinite = np.isinf(value).any(event_axes) if value.dtype.kind == "f" else False
    for bad, problem in (
        (missing, "is missing (NaN). Use obs_mask, handlers.mask or drop the rows"),
        (infinite & ~in_support, "is infinite. Use obs_mask, handlers.mask or drop the rows"),
        (~in_support, f"lies outside of the support of {_named(unwrapped(fn))}"),
    ):
        where = first_where(np.broadcast_to(bad, in_support.shape) & mask)
        if where is not None:
            at = list(where)
            for frame in site["cond_indep_stack"]:  # from rows of a batch to those of all data
                axis, rows = in_support.ndim + frame.dim, reading.trace[frame.name]["value"]
                if axis >= 0 and in_support.shape[axis] == len(rows):
                    at[axis] = int(rows[where[axis]])
            # Swapped data are outside as a whole, and not here and there.
            outside = problem.startswith("lies") and in_support.mean() < 0.5
            hint = _swapped(fn, value.shape, reading) if outside else ""
            raise ValueError(
                f"The data of site '{name}' at index {shown_index(tuple(at))}: the value "
                f"{value[where]} {problem}.{hint}"
            )


def any_bad(reading: Reading) -> Array:
    """Whether :func:`check_values` would find anything, as a function that can be compiled.

    Args:
      reading: a reading of a model, of any rows of its data.

    Returns:
      A boolean scalar.
    """
    found = [~jnp.isfinite(site.gp.X).all() for site in reading.gps.values()]
    for name, in_support in _in_supports(reading).items():
        fn, mask = unmasked(reading.trace[name]["fn"])
        value = jnp.asarray(reading.trace[name]["value"])
        value = jnp.broadcast_to(value, jnp.broadcast_shapes(value.shape, fn.shape()))
        missing = jnp.isnan(value).any(tuple(range(in_support.ndim, value.ndim)))
        found.append(((missing | ~in_support) & mask).any())
    return jnp.stack(found).any()


def _named(fn: Any) -> str:
    """The name of a distribution, with a word on a support that depends on its parameters."""
    name = type(fn).__name__
    if isinstance(getattr_static(type(fn), "support", None), constraints.dependent_property):
        return f"{name}, which depends on its parameters, here at the prior mean of the GPs"
    return name


def _swapped(fn: Any, shape: tuple[int, ...], reading: Reading) -> str:
    """A hint for data that lie outside of the support, if the inputs do lie in it."""
    for name, site in reading.gps.items():
        X = site.gp.X
        if X.size == np.prod(shape) and bool(jnp.all(fn.support(X.reshape(shape)))):
            return f" The inputs of GP site '{name}' do lie in it: are X and y swapped?"
    return ""


def _row_of_all(reading: Reading, rows: int, row: int) -> int:
    """The row of all data that a row of a batch is."""
    drawn = [p["value"] for p in reading.plates.values() if len(p["value"]) == rows]
    return int(drawn[0][row]) if drawn else row


def where_not_finite(call: Call) -> str:
    """Where an argument first has NaN or infinity, as the end of a message; empty if nowhere."""
    for name, value in [*enumerate(call.args), *call.kwargs.items()]:
        if isinstance(value, np.ndarray | Array) and jnp.issubdtype(value.dtype, jnp.floating):
            where = first_where(~np.isfinite(np.asarray(value)))
            if where is not None:
                return (
                    f" Argument {name} has the value {value[where]} at index {shown_index(where)}."
                )
    return ""


def first_where(bad: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first True in an array, or None."""
    found = np.argwhere(bad)
    return tuple(int(i) for i in found[0]) if len(found) else None


def shown_index(where: tuple[int, ...]) -> int | tuple[int, ...]:
    """An index as messages show it: a number where there is one axis."""
    return where[0] if len(where) == 1 else where
