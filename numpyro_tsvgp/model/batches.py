"""All rows of data that plates draw batches of, for checks that one batch is not enough for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import Message, Model, Reading, read

__all__ = ["of_all_rows", "readings_of_all_rows"]

# So many rows of data that plates draw batches of are looked at in one run of the model.
_ROWS_AT_ONCE = 2**16
# So many of them are there when it is found out what the likelihood reads.
_ROWS_ANALYSED = 2**14


class _GivenRows(Messenger):
    """Gives plates the indices that are wanted."""

    def __init__(self, fn: Model, rows: Mapping[str, np.ndarray]) -> None:
        super().__init__(fn)
        self.rows = rows

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "plate" and msg["name"] in self.rows:
            rows = self.rows[msg["name"]]
            msg["args"] = (msg["args"][0], len(rows))
            msg["value"] = jnp.asarray(rows)


def _drawn(reading: Reading) -> dict[str, tuple[int, int]]:
    """Sizes of the plates that draw batches, and of their batches."""
    return {
        name: (site["args"][0], len(site["value"]))
        for name, site in reading.plates.items()
        if len(site["value"]) < site["args"][0]
    }


def of_all_rows(model: Model, reading: Reading, call: Call) -> tuple[Model, Reading]:
    """The model where plates do not draw batches: with all rows, or many spread over them.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.

    Returns:
      The model with given rows, and a reading of it. They are those in the arguments if the model
      cannot be run on other rows.
    """
    drawn = _drawn(reading)
    if not drawn:
        return model, reading
    most = int(_ROWS_ANALYSED ** (1 / len(drawn)))
    rows = {
        name: np.unique(np.linspace(0, size - 1, min(size, max(batch, most))).astype(int))
        for name, (size, batch) in drawn.items()
    }
    whole = _GivenRows(model, rows)
    try:
        return whole, read(whole, call, key=jax.random.key(0), first_rows=True)
    except Exception:  # what the model is given is one batch, or it counts on its size
        return model, reading


def readings_of_all_rows(model: Model, reading: Reading, call: Call) -> Iterator[Reading]:
    """Readings that together have all rows; none where plates do not draw batches.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.

    Yields:
      Readings of batches of rows, as far as the model can be run on them.
    """
    drawn = _drawn(reading)
    if not drawn:
        return
    for rows in _batches_of_all(drawn):
        try:
            found = read(_GivenRows(model, rows), call, key=jax.random.key(0), first_rows=True)
        except Exception:  # what the model is given is one batch, or it counts on its size
            return
        yield found


def _batches_of_all(drawn: Mapping[str, tuple[int, int]]) -> Iterator[dict[str, np.ndarray]]:
    """All rows in batches of one size: the last one overlaps the one before."""
    most = int(_ROWS_AT_ONCE ** (1 / len(drawn)))
    batches = []
    for size, batch in drawn.values():
        length = min(size, max(batch, most))
        starts = [*range(0, size - length, length), size - length]
        batches.append([start + np.arange(length) for start in starts])
    for rows in itertools.product(*batches):
        yield dict(zip(drawn, rows, strict=True))
