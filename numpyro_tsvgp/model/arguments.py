"""The arguments of a model as one value, that compiled functions can take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding

__all__ = ["Call", "as_call", "has_explicit_axes"]


@jax.tree_util.register_pytree_node_class
class Call:
    """The arguments that a model is called with.

    It is a pytree of the arrays among them. Everything else, such as numbers, strings, functions
    and None, belongs to its structure: a compiled function sees it as it is.

    Args:
      args: positional arguments.
      kwargs: keyword arguments.
      whole: whether plates that draw a subsample get all of their indices instead.
      alone: whether the rows in the arguments count once each, where plates would have them stand
        for more.
      factors: by observed site, what its scale is multiplied by, for rows that stand for more.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from numpyro_tsvgp.model.arguments import Call
      >>> call = Call((jnp.ones(3), "linear"), {"order": 2})
      >>> [leaf.shape for leaf in jax.tree.leaves(call)]
      [(3,)]
      >>> call.describe()
      '(of shape (3,), of type str, order of type int)'
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Any,
        *,
        whole: bool = False,
        alone: bool = False,
        factors: tuple[tuple[str, float], ...] = (),
    ) -> None:
        self.args = tuple(args)
        self.kwargs = dict(kwargs)
        self.whole = whole
        self.alone = alone
        self.factors = factors

    def run(self, model: Callable[..., Any]) -> Any:
        """Calls a model."""
        return model(*self.args, **self.kwargs)

    def of_all_data(self) -> Call:
        """The same arguments, with all indices for plates that draw a subsample."""
        if self.alone:
            return self
        return Call(self.args, self.kwargs, whole=True)

    def of_these_rows(self) -> Call:
        """The same arguments, a batch, whose rows count once each."""
        return Call(self.args, self.kwargs, alone=True)

    def standing_for_more(self, factors: tuple[tuple[str, float], ...]) -> Call:
        """The same arguments with other scales of observed sites."""
        return Call(self.args, self.kwargs, whole=self.whole, alone=self.alone, factors=factors)

    def on_device(self) -> Call:
        """The same with NumPy arrays and data frames as arrays of JAX."""

        def convert(leaf: Any) -> Any:
            if hasattr(leaf, "to_numpy"):  # pandas and its like, as NumPy takes them
                leaf = leaf.to_numpy()
            numeric = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
            return jnp.asarray(leaf) if numeric else _with_auto_axes(leaf)

        with jax.ensure_compile_time_eval():  # numbers stay numbers inside of a trace
            args, kwargs = jax.tree.map(convert, (self.args, self.kwargs))
        return Call(args, kwargs, whole=self.whole, alone=self.alone, factors=self.factors)

    @property
    def is_mapped(self) -> bool:
        """Whether arrays are memory maps of files."""
        return any(isinstance(leaf, np.memmap) for leaf in jax.tree.leaves(self))

    @property
    def is_traced(self) -> bool:
        """Whether a transformation of JAX stands between the arrays and their values."""
        return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(self))

    def describe(self) -> str:
        """The shapes of the arguments, for messages."""

        def one(value: Any) -> str:
            if hasattr(value, "shape"):
                return f"of shape {tuple(value.shape)}"
            return "None" if value is None else f"of type {type(value).__name__}"

        parts = [one(value) for value in self.args]
        parts += [f"{name} {one(value)}" for name, value in self.kwargs.items()]
        return f"({', '.join(parts)})"

    @property
    def _options(self) -> tuple[Any, ...]:
        return self.whole, self.alone, self.factors

    def tree_flatten(self) -> tuple[list[Any], tuple[Any, ...]]:
        leaves, treedef = jax.tree.flatten((self.args, self.kwargs))
        is_array = tuple(_is_array(leaf) for leaf in leaves)
        arrays = [leaf for leaf, yes in zip(leaves, is_array, strict=True) if yes]
        others = tuple(leaf for leaf, yes in zip(leaves, is_array, strict=True) if not yes)
        return arrays, (treedef, is_array, others, self._options)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], arrays: Any) -> Call:
        treedef, is_array, others, options = aux
        remaining, fixed = iter(arrays), iter(others)
        leaves = [next(remaining) if yes else next(fixed) for yes in is_array]
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        whole, alone, factors = options
        return cls(args, kwargs, whole=whole, alone=alone, factors=factors)


def _with_auto_axes(leaf: Any) -> Any:
    """An array on a mesh with explicit axes, whose types models do not follow, on the same devices.

    No data move: only the label of the axes is another.
    """
    if not isinstance(leaf, Array) or isinstance(leaf, jax.core.Tracer):
        return leaf
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding) or not has_explicit_axes(sharding.mesh):
        return leaf
    mesh = sharding.mesh
    types = (AxisType.Auto,) * len(mesh.axis_names)
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return jax.device_put(leaf, NamedSharding(auto, sharding.spec))


def has_explicit_axes(mesh: Any) -> bool:
    """Whether a mesh has axes of the explicit type."""
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in "biufc"
    return isinstance(leaf, Array | np.generic)


def as_call(given: Any) -> Call:
    """Arguments of a model given as a tuple, as a dict of keyword ones, or as a single one."""
    if isinstance(given, Call):
        return given
    if isinstance(given, dict):
        return Call((), given)
    return Call(given if isinstance(given, tuple) else (given,), {})
