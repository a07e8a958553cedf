"""Batches from any iterable: loaded ahead, checked as they arrive, replayed where a run goes back.

A run asks a :class:`Feed` for the arguments of each update. The feed of arrays in memory gives the
same ones each time; the feed of an iterable is :class:`Batches`.
"""

from __future__ import annotations

import base64
import copy
import json
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax
import numpy as np

from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.infer.feed.prefetch import Prefetched
from numpyro_tsvgp.infer.feed.sharding import agreed_arrival
from numpyro_tsvgp.model.arguments import Call, as_call
from numpyro_tsvgp.model.glance import is_spread, sampled_rows

__all__ = ["Batches", "BatchesEnded", "Feed", "Same", "call_of"]

# Batches that are loaded ahead of the one that is computed with.
_AHEAD = 2
# Rows of data on several devices by which a run is told from another.
_ROWS_COMPARED = 1024
# Bytes of batches that are kept to go back to, where an update turns out not to be finite.
_KEPT_BYTES = 2**28


class BatchesEnded(Exception):
    """There are no more batches."""


class Feed(Protocol):
    """Where the arguments of each update come from."""

    first: Call
    """The arguments that the fit is started with."""
    current: Call
    """Those of the update that was taken last."""
    has_all_data: bool
    """Whether the first ones hold all data."""

    @property
    def signature(self) -> Any:
        """What another run must have in common to go on from a checkpoint of this one."""
        ...

    def next(self) -> Call:
        """Those of the next update."""
        ...

    def rewind(self, step: int) -> None:
        """Goes back to where ``step`` updates had been taken."""
        ...

    def forget(self, step: int) -> None:
        """Nothing before the update ``step`` will be gone back to."""
        ...

    def place(self) -> Any:
        """What :meth:`seek` wants to know, as JSON has it."""
        ...

    def seek(self, place: Any, step: int) -> None:
        """Goes on where another feed was after ``step`` updates."""
        ...

    def report_every(self, usual: int) -> int:
        """How often a run must look at its state, at least, where it would do so as ``usual``."""
        ...


class Same:
    """The feed of a run on arguments that stay the same."""

    has_all_data = True

    def __init__(self, call: Call) -> None:
        self.first = self.current = call

    @property
    def signature(self) -> Any:
        leaves, structure = jax.tree.flatten(self.first)
        if any(is_spread(leaf) for leaf in leaves):  # a sample that all processes have
            leaves = [leaf.shape for leaf in leaves] + jax.tree.leaves(
                sampled_rows(self.first, _ROWS_COMPARED)
            )
        return leaves, structure

    def next(self) -> Call:
        return self.first

    def rewind(self, step: int) -> None:
        del step

    def forget(self, step: int) -> None:
        del step

    def place(self) -> Any:
        return None

    def seek(self, place: Any, step: int) -> None:
        del place, step

    def report_every(self, usual: int) -> int:
        return usual


class _Entry(NamedTuple):
    """One batch: the arguments, and the place of the loader after it."""

    call: Call
    place: Any


class Batches:
    """The feed of an iterable of batches.

    A thread loads the next batches and moves them to the device while an update is computed. An
    iterable that is not its own iterator (a list, a class with ``__iter__``, a loader) is started
    again at its end; an iterator or a generator ends the run.

    Args:
      batches: an iterable of tuples of arguments, or of dicts of keyword arguments.
      kwargs: further keyword arguments of the model, the same for each batch.
      count: how many batches are wanted in all; no more are loaded.
      prepare: takes the arguments of a batch to where they are computed with, in the thread.
      accept: looks at a prepared batch and its number before it is used, and raises or gives the
        arguments of the update.
    """

    def __init__(
        self,
        batches: Any,
        kwargs: dict[str, Any],
        count: int,
        *,
        prepare: Callable[[Call], Any],
        accept: Callable[[Any, int], Call],
    ) -> None:
        if not hasattr(batches, "__iter__"):
            raise TypeError(
                "batches is an iterable of tuples of arguments of the model, such as a list, a "
                f"generator or a loader, got {type(batches).__name__}."
            )
        self._loader = _loader_of(batches)
        self._kwargs, self._count = kwargs, count
        self._prepare, self._accept = prepare, accept
        self._kept: deque[_Entry] = deque()
        self._kept_from = 0  # the number of the first batch that is kept
        self._next = 0  # the number of the batch that comes next
        self._loaded = 0  # how many came from the loader
        self._before = self._loader.place()  # of the loader, before all batches that are kept
        self._thread: Prefetched | None = None
        try:
            self.first = self.current = self.next()
        except BatchesEnded:
            raise ValueError(
                "batches is empty: there is no batch to start with. (A generator or an iterator "
                "can be gone through once.)"
            ) from None
        self.rewind(0)

    has_all_data = False

    @property
    def signature(self) -> Any:
        if self.tells_place:
            return Same(self.first).signature
        leaves, structure = jax.tree.flatten(self.first)
        # The first batch may be another one each time.
        return [(str(leaf.dtype), leaf.shape[1:]) for leaf in leaves], structure

    @property
    def tells_place(self) -> bool:
        """Whether the loader can tell its place, so that a run can go on from it."""
        return self._loader.tells_place

    def _load(self) -> Iterator[tuple[Any, Any]]:
        """Batches and the place after each, in the thread."""
        for _ in range(self._count - self._loaded):
            try:
                given = self._loader.next()
            except StopIteration:
                return
            call = call_of(given, self._kwargs)
            yield self._prepare(call), self._loader.place()

    def _source(self) -> Iterator[Any]:
        if not self._loaded:  # without a thread, which could be ahead of a place to go on from
            return self._load()
        if self._thread is None:
            self._thread = Prefetched(self._load(), _AHEAD)
        return self._thread

    def next(self) -> Call:
        at = self._next - self._kept_from
        if at == len(self._kept):
            try:
                prepared, place = next(self._source())
            except StopIteration:
                agreed_arrival("end")
                raise BatchesEnded from None
            except Exception as error:
                error.add_note(f"This was raised where batch {self._loaded} was loaded.")
                agreed_arrival("error", f"{type(error).__name__}: {error}")
                raise
            call = self._accept(prepared, self._loaded)
            self._kept.append(_Entry(call, place))
            self._loaded += 1
        self._next += 1
        self.current = self._kept[at].call
        return self.current

    def rewind(self, step: int) -> None:
        self._next = step

    def forget(self, step: int) -> None:
        while self._kept_from < step and self._kept:
            self._before = self._kept.popleft().place
            self._kept_from += 1

    def place(self) -> Any:
        at = self._next - self._kept_from
        return _encoded(self._kept[at - 1].place if at else self._before)

    def seek(self, place: Any, step: int) -> None:
        self.close()
        if place is None or not self.tells_place:
            warnings.warn(
                f"The batches cannot tell their place (they are a {self._loader.kind} without "
                f"get_state and set_state), so the run goes on after {step} updates with the "
                "batches that they give now, which need not be those that it would have seen. Give "
                "a list, or a loader whose iterator has both, such as one of grain.",
                stacklevel=stack_level(),
            )
            kept = [(entry.call, entry.place) for entry in self._kept]
        else:
            self._loader.seek(_decoded(place))
            kept = []
        self._before = self._loader.place() if not kept else self._before
        self._kept = deque(_Entry(*entry) for entry in kept)
        self._kept_from = self._next = step
        self._loaded = step + len(kept)

    def report_every(self, usual: int) -> int:
        bytes_ = sum(leaf.nbytes for leaf in jax.tree.leaves(self.first))
        return max(min(usual, _KEPT_BYTES // max(bytes_, 1)), 1)

    def close(self) -> None:
        """Stops the thread that loads batches."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def call_of(given: Any, kwargs: dict[str, Any]) -> Call:
    """The arguments of one batch."""
    if isinstance(given, list):  # as loaders stack the elements of a tuple
        given = tuple(given)
    call = as_call(given)
    return Call(call.args, {**kwargs, **call.kwargs})


# ---- loaders: what they give, and where they are -----------------------------------------------


class _Loader(Protocol):
    kind: str

    @property
    def tells_place(self) -> bool: ...

    def next(self) -> Any: ...

    def place(self) -> Any: ...

    def seek(self, place: Any) -> None: ...


def _loader_of(batches: Any) -> _Loader:
    return _Listed(batches) if isinstance(batches, Sequence) else _Iterated(batches)


class _Listed:
    """Batches in a list: the place is a number."""

    tells_place = True

    def __init__(self, batches: Sequence[Any]) -> None:
        self.kind = type(batches).__name__
        self._batches, self._at = batches, 0

    def next(self) -> Any:
        if not len(self._batches):
            raise StopIteration
        self._at += 1
        return self._batches[(self._at - 1) % len(self._batches)]

    def place(self) -> Any:
        return self._at

    def seek(self, place: Any) -> None:
        self._at = place


class _Iterated:
    """Batches of an iterable or an iterator: the place is what the iterator says."""

    def __init__(self, batches: Any) -> None:
        self.kind = type(batches).__name__
        self._batches = batches
        self._iterator = iter(batches)
        self._starts_again = self._iterator is not batches
        self._empty = True

    @property
    def _teller(self) -> Any:
        for candidate in (self._iterator, self._batches):
            if hasattr(candidate, "get_state") and hasattr(candidate, "set_state"):
                return candidate
        return None

    @property
    def tells_place(self) -> bool:
        return self._teller is not None

    def next(self) -> Any:
        try:
            found = next(self._iterator)
        except StopIteration:
            if not self._starts_again or self._empty:
                raise
            self._iterator, self._empty = iter(self._batches), True
            found = next(self._iterator)
        self._empty = False
        return found

    def place(self) -> Any:
        teller = self._teller
        return None if teller is None else copy.deepcopy(teller.get_state())

    def seek(self, place: Any) -> None:
        self._teller.set_state(place)
        self._empty = False  # it may be at the end of a pass


def _encoded(place: Any) -> Any:
    """A place as JSON has it."""
    if isinstance(place, bytes):
        return {"bytes": base64.b64encode(place).decode()}
    return {"value": json.loads(json.dumps(place, default=_number))}


def _number(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"The state of the loader holds a {type(value).__name__}, not plain numbers.")


def _decoded(place: Any) -> Any:
    return base64.b64decode(place["bytes"]) if "bytes" in place else place["value"]
