"""Whether a model can be run on some rows of its arguments in place of all, proven.

It can if each row of what it computes reads one row of the arguments alone: inputs and means of
GPs, and the terms of its likelihood. A model that divides X by its standard deviation cannot, since
that of some rows is another. The program of the model is read for that
(:mod:`numpyro_tsvgp.model.reads`), on few rows and for all values.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import Model, Reading, is_latent, is_observed, read, run_with
from numpyro_tsvgp.model.reads import Source, reads

__all__ = ["RowFactors", "row_factors", "rows_of", "with_rows"]

# Rows that the program is read with; two numbers, to see what grows with them.
_FEW, _MORE = 6, 12

RowFactors = tuple[tuple[str, float], ...]
"""By observed site, what its scale on some of the rows must be multiplied by."""


class _Seen(NamedTuple):
    """What a model makes of so many rows."""

    batch_shapes: Any
    hyper: Any
    sizes: dict[str, int]
    scales: dict[str, float]
    constant: frozenset[str]


class _NotByRows(Exception):
    """The model cannot be run on some rows."""


def rows_of(call: Call) -> int:
    """The number of rows of the longest arrays among the arguments; zero if there are none."""
    return max((leaf.shape[0] for leaf in jax.tree.leaves(call) if leaf.ndim), default=0)


def with_rows(call: Call, rows: int, take: Any) -> Call:
    """Arguments with other rows.

    Args:
      call: the arguments.
      rows: how many rows those arrays have that have a row for each data point.
      take: what is made of each of them.

    Returns:
      The arguments.
    """
    return jax.tree.map(
        lambda leaf: take(leaf) if leaf.ndim and leaf.shape[0] == rows else leaf, call
    )


def row_factors(model: Model, reading: Reading, call: Call, block: int) -> RowFactors | None:
    """Proves that a model can be run on blocks of its rows, and says how they stand for all.

    Args:
      model: the NumPyro model.
      reading: a reading of it on all rows.
      call: its arguments, of which only shapes matter.
      block: how many rows a block has.

    Returns:
      For each observed site what its scale on a block must be multiplied by, so that the
      log-likelihood of the block is an estimate of that of all rows whose mean over blocks is
      exact; None if that cannot be proven.
    """
    rows = rows_of(call)
    if any(site.rows != rows for site in reading.gps.values()):
        return None
    try:
        few, more = (_seen(model, call, rows, count) for count in (_FEW, _MORE))
        part = _scales(model, call, rows, block)
    except _NotByRows:
        return None
    except Exception:  # the model knows the number of its rows from elsewhere
        return None
    if (few.batch_shapes, few.hyper) != (more.batch_shapes, more.hyper):
        return None
    whole = _scales_of(reading)
    factors = []
    for name, size in few.sizes.items():
        if name in few.constant and name in more.constant and size == more.sizes[name]:
            factors.append((name, whole[name] / part[name]))
        elif size * _MORE == more.sizes[name] * _FEW:
            factors.append((name, whole[name] / part[name] * (rows / block)))
        else:
            return None
    return tuple(factors)


def _scales(model: Model, call: Call, rows: int, count: int) -> dict[str, float]:
    """The scales of observed sites at so many rows; only shapes of arguments matter."""
    found: dict[str, float] = {}
    leaves, structure = jax.tree.flatten(call)

    def run(leaves: list[Array]) -> int:
        call = jax.tree.unflatten(structure, leaves)
        found.update(_scales_of(read(model, call, key=jax.random.key(0), first_rows=True)))
        return 0

    def shape(leaf: Any) -> Any:
        is_row = leaf.ndim and leaf.shape[0] == rows
        return jax.ShapeDtypeStruct((count, *leaf.shape[1:]) if is_row else leaf.shape, leaf.dtype)

    jax.eval_shape(run, [shape(leaf) for leaf in leaves])
    return found


def _scales_of(reading: Reading) -> dict[str, float]:
    out = {}
    for name, site in reading.trace.items():
        if is_observed(site):
            scale = 1.0 if site["scale"] is None else site["scale"]
            if isinstance(scale, jax.core.Tracer) or np.ndim(scale):
                raise _NotByRows
            out[name] = float(scale)
    return out


def _seen(model: Model, call: Call, rows: int, count: int) -> _Seen:
    """Reads the program of a model on a few rows."""
    leaves, structure = jax.tree.flatten(call)
    is_row = [bool(leaf.ndim) and leaf.shape[0] == rows for leaf in leaves]
    tracked = [
        jnp.zeros((count, *leaf.shape[1:]), leaf.dtype)
        for leaf, yes in zip(leaves, is_row, strict=True)
        if yes
    ]
    others = [
        jnp.zeros(leaf.shape, leaf.dtype)
        for leaf, yes in zip(leaves, is_row, strict=True)
        if not yes
    ]
    found: dict[str, Any] = {}

    def outputs(tracked: Any, unknown: Any) -> Any:
        values, arrays = tracked
        rest, hyper = unknown
        taken, left = iter(arrays), iter(rest)
        few = jax.tree.unflatten(structure, [next(taken) if yes else next(left) for yes in is_row])
        reading = read(model, few, values=hyper, key=jax.random.key(0), first_rows=True)
        if any(site.rows != count for site in reading.gps.values()):
            raise _NotByRows
        gps = {name: reading.gps[name].unflatten(value) for name, value in values.items()}
        trace = run_with(model, few, {**reading.pinned, **gps})
        found["scales"] = _scales_of(reading)
        return {
            "terms": {
                name: site["fn"].log_prob(site["value"])
                for name, site in trace.items()
                if is_observed(site)
            },
            "inputs": {
                name: jnp.reshape(site.gp.X, (count, -1)) for name, site in reading.gps.items()
            },
            "means": {name: site.loc for name, site in reading.gps.items()},
            "kernels": {
                name: jax.tree.leaves(site.gp.kernel) for name, site in reading.gps.items()
            },
            "priors": {
                name: site["fn"].log_prob(site["value"])
                for name, site in reading.trace.items()
                if is_latent(site)
            },
            "params": {
                name: site["value"]
                for name, site in reading.trace.items()
                if site["type"] == "param"
            },
        }

    # Inside of a trace, too, a reading of zeros is one of numbers.
    with jax.ensure_compile_time_eval():
        start = with_rows(call, rows, lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype))
    reading = read(model, start, key=jax.random.key(0), first_rows=True)
    hyper = {
        name: reading.pinned[name]
        for name in reading.pinned
        if reading.trace[name]["type"] != "plate"
    }
    values = {
        name: jnp.zeros((site.functions, site.rows), site.loc.dtype)
        for name, site in reading.gps.items()
    }
    sources = (
        {name: _by_last(value) for name, value in values.items()},
        [_by_first(array) for array in tracked],
    )
    results = reads(outputs, (values, tracked), sources, (others, hyper)).results
    _check_reads(results, count)
    return _Seen(
        {name: site.batch_shape for name, site in reading.gps.items()},
        {name: (np.shape(value), str(jnp.result_type(value))) for name, value in hyper.items()},
        {name: int(np.prod(term.high.shape[:-1])) for name, term in results["terms"].items()},
        found["scales"],
        frozenset(name for name, term in results["terms"].items() if term.none.all()),
    )


def _by_first(array: Array) -> Source:
    rows = np.indices(array.shape)[0]
    return Source(np.zeros(array.shape, int), rows)


def _by_last(array: Array) -> Source:
    rows = np.indices(array.shape)[-1]
    return Source(np.zeros(array.shape, int), rows)


def _check_reads(results: Any, count: int) -> None:
    """Each row must read itself alone, and what is not along rows none."""
    number = np.arange(count)
    for found in results["inputs"].values():
        _require(_only(found, number[:, None]))
    for found in results["means"].values():
        _require(_only(found, number))
    for found in results["terms"].values():
        _require(bool(found.one.all()))
    rest: Collection[Any] = jax.tree.leaves(
        (results["kernels"], results["priors"], results["params"]),
        is_leaf=lambda x: hasattr(x, "which"),
    )
    for found in rest:
        _require(bool(found.none.all()))


def _only(found: Any, number: np.ndarray) -> bool:
    low, high = found.low[..., 0], found.high[..., 0]
    return bool((found.none[..., 0] | ((low == number) & (high == number))).all())


def _require(yes: bool) -> None:
    if not yes:
        raise _NotByRows
