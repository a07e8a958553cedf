"""Arrays of which each of several processes has a part, or a copy.

JAX computes with such arrays where all processes take part. What one process does by itself, such
as predictions, needs its own rows of the data and its own copy of what is the same everywhere.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tsvgp.model.arguments import Call

__all__ = ["copy_here", "is_divided", "rows_here"]


def _is_elsewhere(leaf: Any) -> bool:
    """Whether an array lies on devices of other processes too; one that is traced lies nowhere."""
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return concrete and not leaf.is_fully_addressable


def is_divided(tree: Any) -> bool:
    """Whether some array has parts that this process does not have.

    Args:
      tree: arguments of a model, or any pytree.

    Returns:
      True if so.
    """
    return any(
        _is_elsewhere(leaf) and not leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)
    )


def copy_here(tree: Any) -> Any:
    """The same pytree with the copies of this process of what is the same in all of them.

    Args:
      tree: a pytree, such as parameters or a state.

    Returns:
      The pytree; arrays that are divided, and those of this process alone, stay as they are.
    """
    return jax.tree.map(_copied, tree)


def _copied(leaf: Any) -> Any:
    if not _is_elsewhere(leaf) or not leaf.is_fully_replicated:
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf))


def rows_here(call: Call) -> tuple[Call, int]:
    """The rows that this process has.

    Args:
      call: arguments of a model.

    Returns:
      The arguments with these rows, and the number of the first of them among all rows.
    """
    start = 0

    def local(leaf: Any) -> Any:
        nonlocal start
        if not is_divided(leaf):
            return _copied(leaf)
        parts = {}
        for shard in leaf.addressable_shards:
            parts[shard.index[0].start or 0] = np.asarray(shard.data)
        start = min(parts)
        return jnp.asarray(np.concatenate([parts[at] for at in sorted(parts)]))

    return jax.tree.map(local, call), start
