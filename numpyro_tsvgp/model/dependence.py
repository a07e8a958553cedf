"""Whether outputs of a function depend on its inputs, read off the program and not off numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["depends"]


def depends(function: Callable[[Any], Any], inputs: Any) -> Any:
    """Which outputs of a function can depend on its inputs, whatever their values are.

    Args:
      function: a function of one pytree of arrays.
      inputs: arguments of it, of which only shapes and types matter.

    Returns:
      A pytree like the function's output, with a boolean in place of each array.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp.model.dependence import depends
      >>> depends(lambda x: {"a": 0.0 * x, "b": jnp.ones(2)}, 1.0)
      {'a': True, 'b': False}
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(inputs)
    flags = _propagate(closed.jaxpr, [True] * len(closed.jaxpr.invars))
    return jax.tree.unflatten(jax.tree.structure(shapes), flags)


def _propagate(jaxpr: Any, depends: list[bool]) -> list[bool]:
    """Flags of the outputs of a jaxpr, from those of its inputs."""
    known = dict(zip(map(id, jaxpr.invars), depends, strict=True))

    def flag(variable: Any) -> bool:
        return known.get(id(variable), False)  # constants and literals depend on nothing

    for equation in jaxpr.eqns:
        flags = [flag(v) for v in equation.invars]
        outputs = [any(flags)] * len(equation.outvars)
        inner = _called(equation)
        if any(flags) and inner is not None:
            outputs = _propagate(inner, flags)
        known |= dict(zip(map(id, equation.outvars), outputs, strict=True))
    return [flag(v) for v in jaxpr.outvars]


def _called(equation: Any) -> Any:
    """The program that a call of another function runs, or None for any other operation."""
    if equation.primitive.name in ("scan", "while", "cond"):
        return None  # what is carried around depends on everything that goes in
    for value in equation.params.values():
        jaxpr = getattr(value, "jaxpr", value)
        if (
            hasattr(jaxpr, "eqns")
            and len(jaxpr.invars) == len(equation.invars)
            and len(jaxpr.outvars) == len(equation.outvars)
        ):
            return jaxpr
    return None
