"""Runs of a model without NumPyro's own validation, in any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpyro

__all__ = ["unvalidated"]

_lock = threading.Lock()
_inside = 0
_off = ExitStack()


@contextmanager
def unvalidated() -> Iterator[None]:
    """Leaves out NumPyro's validation of parameters, where our own checks say what to do.

    NumPyro keeps one flag for all threads. It is put back when the last thread leaves: if each put
    back what it had found, the last would put back what it had found inside of another.
    """
    global _inside
    with _lock:
        if not _inside:
            _off.enter_context(numpyro.validation_enabled(False))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _off.close()
