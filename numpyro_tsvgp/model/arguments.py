"""The arguments of a model as one value, that compiled functions can take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = ["Call", "as_call"]


@jax.tree_util.register_pytree_node_class
class Call:
    """The arguments that a model is called with.

    It is a pytree of the arrays among them. Everything else, such as numbers, strings, functions
    and None, belongs to its structure: a compiled function sees it as it is.

    Args:
      args: positional arguments.
      kwargs: keyword arguments.
      whole: whether plates that draw a subsample get all of their indices instead.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from numpyro_tsvgp.model.arguments import Call
      >>> call = Call((jnp.ones(3), "linear"), {"order": 2})
      >>> [leaf.shape for leaf in jax.tree.leaves(call)]
      [(3,)]
      >>> call.describe()
      '(of shape (3,), of type str, order of type int)'
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Any, *, whole: bool = False) -> None:
        self.args = tuple(args)
        self.kwargs = dict(kwargs)
        self.whole = whole

    def run(self, model: Callable[..., Any]) -> Any:
        """Calls a model."""
        return model(*self.args, **self.kwargs)

    def of_all_data(self) -> Call:
        """The same arguments, with all indices for plates that draw a subsample."""
        return Call(self.args, self.kwargs, whole=True)

    def on_device(self) -> Call:
        """The same with NumPy arrays and data frames as arrays of JAX."""

        def convert(leaf: Any) -> Any:
            if hasattr(leaf, "to_numpy"):  # pandas and its like, as NumPy takes them
                leaf = leaf.to_numpy()
            numeric = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
            return jnp.asarray(leaf) if numeric else leaf

        with jax.ensure_compile_time_eval():  # numbers stay numbers inside of a trace
            args, kwargs = jax.tree.map(convert, (self.args, self.kwargs))
        return Call(args, kwargs, whole=self.whole)

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

    def tree_flatten(self) -> tuple[list[Any], tuple[Any, ...]]:
        leaves, treedef = jax.tree.flatten((self.args, self.kwargs))
        is_array = tuple(_is_array(leaf) for leaf in leaves)
        arrays = [leaf for leaf, yes in zip(leaves, is_array, strict=True) if yes]
        others = tuple(leaf for leaf, yes in zip(leaves, is_array, strict=True) if not yes)
        return arrays, (treedef, is_array, others, self.whole)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], arrays: Any) -> Call:
        treedef, is_array, others, whole = aux
        remaining, fixed = iter(arrays), iter(others)
        leaves = [next(remaining) if yes else next(fixed) for yes in is_array]
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        return cls(args, kwargs, whole=whole)


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
