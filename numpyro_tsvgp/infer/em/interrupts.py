"""Ctrl-C that is not lost.

Python raises ``KeyboardInterrupt`` wherever the main thread happens to be. Where that is a callback
of the garbage collector or of a weak reference, of which JAX has several, the exception has nowhere
to go: Python prints "Exception ignored in ..." and goes on, and so would a run.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

__all__ = ["Interrupts"]


class Interrupts:
    """A context that remembers interrupts, so that a loop inside of it can ask for them.

    They are raised as ever. Nothing is changed outside of the main thread, or where a program
    handles interrupts in a way of its own.

    Examples:
      >>> from numpyro_tsvgp.infer.em.interrupts import Interrupts
      >>> with Interrupts() as interrupts:
      ...     interrupts.check()  # raises KeyboardInterrupt if one was lost
    """

    def __init__(self) -> None:
        self._pressed = self._seen = 0
        self._is_ours = False

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._pressed += 1
        signal.default_int_handler(signum, frame)

    def __enter__(self) -> Self:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            signal.signal(signal.SIGINT, self._note)
            self._is_ours = True
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._is_ours and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # One that comes when all is done need not cost the fit; whoever presses twice wants out.
        if exception[0] is None and self._pressed > max(self._seen, 1):
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raises an interrupt that was lost."""
        if self._pressed > self._seen:
            raise KeyboardInterrupt

    def taken(self) -> None:
        """Says that the interrupts so far have been seen to."""
        self._seen = self._pressed
