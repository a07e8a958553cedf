"""Functions of data points, evaluated block by block so that memory is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = ["map_rows"]

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
    pad = -n % size
    blocks = jnp.concatenate([X, jnp.broadcast_to(X[:1], (pad, *X.shape[1:]))])
    blocks = blocks.reshape(-1, size, *X.shape[1:])

    def split(values: Array) -> Array:
        values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, pad)])
        return jnp.moveaxis(values.reshape(*values.shape[:-1], -1, size), -2, 0)

    parts = lax.map(lambda block: function(*block), (blocks, *map(split, others)))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], n + pad)[..., :n], parts
    )
