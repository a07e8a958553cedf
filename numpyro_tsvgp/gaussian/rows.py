"""Functions of data points, evaluated block by block so that memory is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = ["map_rows", "number_of_blocks"]

# Numbers held at once.
_ELEMENTS = 2**22
_FEWEST_ROWS = 256


def map_rows(function: Callable[..., Any], X: Array, *others: Array, numbers_per_row: int) -> Any:
    """Applies a function of some rows to all of them, in blocks if they are many.

    Args:
      function: takes rows of inputs, ``(rows, ...)``, and of the other arrays, ``(..., rows)``;
        gives arrays with an entry for each row along their last axis.
      X: inputs, one row a data point.
      *others: arrays with an entry for each data point along their last axis.
      numbers_per_row: how many numbers the function holds for each row.

    Returns:
      What the function gives for all rows.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp.gaussian.rows import map_rows
      >>> map_rows(lambda x, y: x + y, jnp.arange(3), jnp.ones(3), numbers_per_row=1).tolist()
      [1.0, 2.0, 3.0]
    """
    n = X.shape[0]
    size = max(_ELEMENTS // max(numbers_per_row, 1), _FEWEST_ROWS)
    if n <= size:
        return function(X, *others)
    count = number_of_blocks(n, -(-n // size))
    pad = -n % count
    if pad:
        X = jnp.concatenate([X, jnp.broadcast_to(X[:1], (pad, *X.shape[1:]))])
    # Row i is in block i modulo their number: of rows that are spread over devices each device has
    # its part of every block.
    blocks = X.reshape(-1, count, *X.shape[1:]).swapaxes(0, 1)

    def split(values: Array) -> Array:
        if pad:
            values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, pad)])
        return jnp.moveaxis(values.reshape(*values.shape[:-1], -1, count), -1, 0)

    parts = lax.map(lambda block: function(*block), (blocks, *map(split, others)))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, -1).reshape(*x.shape[1:-1], n + pad)[..., :n], parts
    )


def number_of_blocks(rows: int, least: int) -> int:
    """How many blocks to make of some rows.

    Args:
      rows: the number of rows.
      least: how many blocks there must be at least.

    Returns:
      A number that leaves no rows over, and whose blocks can be spread over all devices, if there
      is one that is not much larger than ``least``; else ``least``.

    Examples:
      >>> from numpyro_tsvgp.gaussian.rows import number_of_blocks
      >>> number_of_blocks(1000, 3)
      4
    """
    devices = jax.device_count()
    some = [count for count in range(least, min(4 * least, rows) + 1) if rows % count == 0]
    spread = [count for count in some if rows // count % devices == 0]
    return (spread or some or [least])[0]
