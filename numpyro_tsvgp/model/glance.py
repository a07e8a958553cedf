"""Some rows of data that are many, or that are spread over devices and hosts.

What a model is made of shows on a few rows as well as on all. Where there are many rows, the checks
before a fit look at a sample of them, on one device; the values of all rows are looked at by one
compiled function, where the rows are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.by_rows import rows_of, with_rows
from numpyro_tsvgp.model.data_checks import any_bad, check_values
from numpyro_tsvgp.model.processes import is_divided, rows_here
from numpyro_tsvgp.model.read import Model, is_latent, read

__all__ = ["check_all_rows", "glance", "is_spread", "numbers_of", "sampled_rows"]

# With more rows than this, a sample of so many is looked at.
_LARGE = 2**17
_SAMPLE = 2**12


def is_spread(leaf: Any) -> bool:
    """Whether an array lies on several devices; one that is traced lies nowhere."""
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return concrete and len(leaf.sharding.device_set) > 1


def glance(model: Model, call: Call, needs_all: Callable[[str], bool] = lambda name: False) -> Call:
    """Arguments to find out with what a model is made of: those given, or some rows of them.

    Args:
      model: the NumPyro model.
      call: its arguments. Arrays of NumPy may be memory maps, of which some rows are read.
      needs_all: whether a GP site must have all of its rows.

    Returns:
      The arguments as they are if their rows are few, or if the model is another one on fewer rows.
    """
    leaves = jax.tree.leaves(call)
    rows = rows_of(call)
    if rows <= _LARGE and not any(is_spread(leaf) for leaf in leaves):
        return call
    small = sampled_rows(call, min(_SAMPLE, rows))
    count = rows_of(small)
    try:
        whole, part = _shapes(model, call), _shapes(model, small)
    except Exception:  # whatever the model may raise where it knows the number of its rows
        return call
    gps, hyper = whole
    if hyper != part[1] or set(gps) != set(part[0]) or any(needs_all(name) for name in gps):
        return call
    for name, (batch, found) in gps.items():
        if part[0][name] != (batch, count if found == rows else found):
            return call
    return small


def sampled_rows(call: Call, count: int) -> Call:
    """Evenly spaced rows of arguments, on one device of this process, the same in all of them."""
    rows = rows_of(call)
    some = np.unique(np.linspace(0, rows - 1, count).astype(int))

    def fetched(leaf: Any) -> Any:
        return jnp.asarray(np.asarray(_everywhere(leaf))) if is_spread(leaf) else leaf

    return jax.tree.map(fetched, with_rows(call, rows, lambda leaf: _taken(leaf, some)))


def _taken(leaf: Any, rows: np.ndarray) -> Any:
    if not is_spread(leaf):
        return leaf[rows]
    return jax.jit(lambda x: x[rows], out_shardings=_replicated(leaf))(leaf)


def _everywhere(leaf: Array) -> Array:
    if leaf.is_fully_replicated:
        return leaf
    return jax.jit(lambda x: x, out_shardings=_replicated(leaf))(leaf)


def _replicated(leaf: Array) -> Any:
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    devices = np.array(sorted(sharding.device_set, key=_device_id))
    return NamedSharding(Mesh(devices, ("rows",), axis_types=(AxisType.Auto,)), PartitionSpec())


def _device_id(device: Any) -> int:
    return device.id


def _shapes(model: Model, call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes of GP sites and of hyperparameters, from a run in which nothing is computed."""
    found: list[Any] = []
    leaves, structure = jax.tree.flatten(call)

    def run(leaves: list[Array]) -> int:
        call = jax.tree.unflatten(structure, leaves)
        reading = read(model, call, key=jax.random.key(0), first_rows=True)
        gps = {name: (site.batch_shape, site.rows) for name, site in reading.gps.items()}
        hyper = {
            name: jnp.shape(site["value"])
            for name, site in reading.trace.items()
            if is_latent(site) or site["type"] == "param"
        }
        found.append((gps, hyper))
        return 0

    jax.eval_shape(run, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])
    return found[0]


def numbers_of(model: Model, call: Call) -> tuple[float, float]:
    """How many data points there are, subsampled or not, and how many times those of a batch."""
    found: list[tuple[float, float]] = []
    leaves, structure = jax.tree.flatten(call)

    def run(leaves: list[Array]) -> int:
        call = jax.tree.unflatten(structure, leaves)
        reading = read(model, call, key=jax.random.key(0), first_rows=True)
        rows = max(site.rows for site in reading.gps.values())
        found.append((reading.subsampling * rows, reading.subsampling))
        return 0

    jax.eval_shape(run, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])
    return found[0]


def check_all_rows(model: Model, call: Call) -> str:
    """Looks at the values of all rows where they are.

    Args:
      model: the NumPyro model.
      call: its arguments, on devices.

    Returns:
      What is wrong with the rows of this process, naming the first that is; empty if nothing is.
    """
    bad, everything = True, call  # unless a compiled function says otherwise
    for tried in (call.of_all_data(), call):
        try:
            bad, everything = bool(_any_bad(model, tried)), tried
            break
        except Exception:  # the arguments are one batch, or the model cannot be compiled
            continue
    if not bad:
        return ""
    mine, start = rows_here(everything)
    if is_divided(everything):  # a part of the rows, whatever the size of a plate is
        mine = mine.of_these_rows()
    try:
        check_values(read(model, mine, key=jax.random.key(0), first_rows=True))
    except ValueError as error:
        return f"{error}{_counted_from(start)}"
    return ""


def _counted_from(start: int) -> str:
    return f" (Rows are counted from the first of this process, {start:,}.)" if start else ""


def _any_bad(model: Model, call: Call) -> Array:
    leaves, structure = jax.tree.flatten(call)

    def found(leaves: list[Array]) -> Array:
        call = jax.tree.unflatten(structure, leaves)
        return any_bad(read(model, call, key=jax.random.key(0), first_rows=True))

    return jax.jit(found)(leaves)
