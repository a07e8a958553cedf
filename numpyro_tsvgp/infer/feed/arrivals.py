"""What becomes of a batch between the loader and the update: a device, a check, an agreement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.infer.feed.sharding import agreed_arrival, placed
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.by_rows import rows_of
from numpyro_tsvgp.model.data_checks import any_bad, check_values
from numpyro_tsvgp.model.read import Model, read

__all__ = ["Arrivals"]


class _Prepared(NamedTuple):
    local: Call  # the rows of this process
    placed: Call  # those of all of them, on their devices
    bad: Array | None  # whether a value is bad, or None if that is not known yet


class Arrivals:
    """Moves batches to where they are computed with, and checks their values.

    The check is a compiled function of a batch, made once for each shape of batches. It runs in the
    thread that loads them, beside the updates; models are traced by the calling thread alone, since
    handlers of NumPyro belong to all threads.

    Args:
      model: the NumPyro model.
      sharding: how rows are spread over devices, or None.
      agree: whether all processes take the same batches together, so that what is wrong with one
        of them stops all. Without, a process is by itself and never waits for another.
    """

    def __init__(self, model: Model, sharding: Any = None, *, agree: bool = True) -> None:
        self._model, self._sharding = model, sharding
        self._agree = agree and jax.process_count() > 1
        self._checks: dict[Any, Callable[[Call], Array]] = {}

    def prepare(self, call: Call) -> _Prepared:
        """Moves a batch to its devices, and looks at its values if its shape is known."""
        local = call.on_device()
        check = self._checks.get(_signature(local))
        bad = None if check is None else check(local)
        return _Prepared(local, placed(local, self._sharding), bad)

    def accept(self, prepared: _Prepared, number: int) -> Call:
        """The arguments of an update, if the values of a batch are as they should be.

        Args:
          prepared: from :meth:`prepare`.
          number: how many batches came before.

        Raises:
          ValueError: if a value is missing or outside of the support, naming its row.
        """
        local, there, bad = prepared
        message = ""
        try:
            if bad is None:
                bad = self._check_of(local)(local)
            if bool(bad):
                message = self._what_is_wrong(local)
        except Exception as error:  # of the model on a batch of a new shape
            if not self._agree:
                error.add_note(f"This was raised for batch {number}, {local.describe()}.")
                raise
            message = f"{type(error).__name__}: {error}"
        status = "error" if message else "batch"
        if self._agree:
            message = agreed_arrival(status, message, rows_of(local))
        if message:
            raise ValueError(f"Batch {number} (counted from zero): {message}")
        return there

    def _check_of(self, call: Call) -> Callable[[Call], Array]:
        """The compiled check of batches of this shape."""
        key = _signature(call)
        if key not in self._checks:
            leaves, structure = jax.tree.flatten(call)

            def check(leaves: list[Array]) -> Array:
                call = jax.tree.unflatten(structure, leaves)
                return any_bad(read(self._model, call, key=jax.random.key(0), first_rows=True))

            compiled = jax.jit(check).lower(leaves).compile()
            self._checks[key] = lambda call: compiled(jax.tree.leaves(call))
        return self._checks[key]

    def _what_is_wrong(self, call: Call) -> str:
        try:
            check_values(read(self._model, call, key=jax.random.key(0), first_rows=True))
        except ValueError as error:
            return str(error)
        return ""


def _signature(call: Call) -> Any:
    leaves, structure = jax.tree.flatten(call)
    return structure, tuple((leaf.shape, jnp.result_type(leaf)) for leaf in leaves)
