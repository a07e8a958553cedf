"""Arguments to predict at, filled up to one of a few numbers of rows.

Programs are compiled for shapes. Predictions at 97, 100 and 110 inputs share theirs where the last
row is repeated up to 112 and what belongs to the repeats is cut off again. It is done only where a
proof says that the model makes of the other rows what it makes of them alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.data_rows import on_host, padded
from numpyro_tsvgp.model.padding import rows_stand_alone
from numpyro_tsvgp.model.read import Model, read

__all__ = ["Filled", "Rows", "bucket", "filled", "first_rows"]

_FEWEST_ROWS = 16
# With more rows than these, a program takes longer than its compilation.
_MOST_ROWS = 2**16


def bucket(rows: int) -> int:
    """The size that some rows are filled up to: four sizes for each power of two.

    Examples:
      >>> from numpyro_tsvgp.infer.predictions.filling import bucket
      >>> [bucket(n) for n in (1, 16, 17, 100, 1000)]
      [16, 16, 20, 112, 1024]
    """
    if rows <= _FEWEST_ROWS:
        return _FEWEST_ROWS
    step = 2 ** max((rows - 1).bit_length() - 3, 0)
    return -(-rows // step) * step


class Filled(NamedTuple):
    """Arguments that may have more rows than were asked for.

    Attributes:
      call: the arguments, whose last row may be repeated.
      given: the arguments as they were given.
      rows: how many rows were asked for; None if none is repeated.
    """

    call: Call
    given: Call
    rows: int | None

    def unfilled(self) -> Filled:
        return Filled(self.given, self.given, None)


def filled(model: Model, call: Call, values: Params) -> Filled:
    """Fills arguments up, if that changes nothing of the rows that are there.

    Args:
      model: the NumPyro model.
      call: its arguments; the data may be left out.
      values: values of parameters and hyperparameters, by name.

    Returns:
      The arguments.
    """
    as_given = Filled(call, call, None)
    if call.is_traced or call.whole or call.alone or call.factors:
        return as_given
    try:
        rows, subsampling = _rows_of(model, call, values)
    except Exception:  # those who use the arguments say what is wrong with them
        return as_given
    if len(rows) != 1 or subsampling > 1:
        return as_given
    (count,) = rows
    size = bucket(count)
    flags = [np.ndim(leaf) > 0 and leaf.shape[0] == count for leaf in jax.tree.leaves(call)]
    if size == count or size > _MOST_ROWS or not any(flags):
        return as_given
    longer = padded(on_host(call), flags, size)
    if not rows_stand_alone(model, call, longer, flags, values):
        return as_given
    return Filled(longer, call, count)


def _rows_of(model: Model, call: Call, values: Params) -> tuple[set[int], float]:
    """Numbers of rows of the GPs, and how many more there are by the model's plates."""
    found = []

    def run(call: Call, values: Params) -> None:
        found.append(read(model, call, values=values, key=jax.random.key(0), first_rows=True))

    jax.eval_shape(run, call, dict(values))
    return {site.rows for site in found[0].gps.values()}, found[0].subsampling


class Rows(NamedTuple):
    """Where the rows of a result are, and how many of them were asked for.

    Attributes:
      axis: the axis of the rows.
      asked: how many there are without repeats.
      size: how many there are with them.
    """

    axis: int
    asked: int
    size: int

    def cut(self, array: Any, leading: int = 0) -> Array:
        """An array without repeated rows, which has further axes before its own."""
        index = (slice(None),) * (leading + self.axis) + (slice(self.asked),)
        if isinstance(array, jax.core.Tracer):
            return array[index]
        return jax.device_put(np.asarray(array)[index])  # for which nothing is compiled

    def fill(self, array: Array) -> Array:
        """An array with its last row repeated."""
        widths = [(0, 0)] * array.ndim
        widths[self.axis] = (0, self.size - self.asked)
        if isinstance(array, jax.core.Tracer):
            return jnp.pad(array, widths, mode="edge")
        return jax.device_put(np.pad(np.asarray(array), widths, mode="edge"))


def first_rows(tree: Any, rows: int) -> Any:
    """The first rows of arrays, along their last axis."""
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x)[..., :rows]), tree)
