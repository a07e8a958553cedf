"""A batch of a stream beside its memory, as compiled functions take them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.infer.new_data.conditioning import NewData
from numpyro_tsvgp.infer.replay import Memory
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.data_rows import appended

__all__ = ["Batch"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["call", "memory", "new", "weights", "old_count", "new_count", "past"],
    meta_fields=["rows"],
)
@dataclass(frozen=True)
class Batch:
    """Points of the memory and new data, in one call and apart.

    Attributes:
      call: memory and new data together.
      memory: the memory alone.
      new: the new data alone.
      weights: how many data points of the past each point of the memory stands for.
      old_count: how many rows of the memory are not repeated.
      new_count: how many rows of the new data are not repeated.
      past: how many data points there were before.
      rows: which arrays of the arguments have a row for each data point.
    """

    call: Call
    memory: Call
    new: Call
    weights: Array
    old_count: Array
    new_count: Array
    past: Array
    rows: tuple[bool, ...]

    @staticmethod
    def of(memory: Memory, new: NewData) -> Batch:
        return Batch(
            appended(memory.call, new.call, memory.rows),
            memory.call,
            new.call,
            memory.weights,
            memory.count,
            jnp.asarray(new.points),
            memory.past,
            memory.rows,
        )

    def length(self, call: Call) -> int:
        """How many rows one of its calls has."""
        pairs = zip(jax.tree.leaves(call), self.rows, strict=True)
        return next(leaf.shape[0] for leaf, yes in pairs if yes)

    def last(self, call: Call) -> Call:
        """The last row of one of its calls."""
        leaves = jax.tree.leaves(call)
        some = [x[-1:] if yes else x for x, yes in zip(leaves, self.rows, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(call), some)

    def counted(self) -> Array:
        """Which rows of the memory and the new data are not repeated."""
        size = self.length(self.memory)
        rows = jnp.arange(self.length(self.call))
        return jnp.where(rows < size, rows < self.old_count, rows - size < self.new_count)
