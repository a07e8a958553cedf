"""An iterator that is advanced by a thread, ahead of whoever uses it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["Prefetched"]

# Seconds between looks at whether the thread shall stop, and that it is given to do so.
_LOOK = 0.1
_STOP = 5.0


class Prefetched:
    """What an iterator gives, computed ahead in a thread.

    An exception of the iterator is raised where its value would have come. The thread holds
    ``ahead`` values and one more at the most, and is a daemon: it never keeps a process alive.

    Args:
      iterator: the iterator.
      ahead: how many values may wait.

    Examples:
      >>> from numpyro_tsvgp.infer.feed.prefetch import Prefetched
      >>> values = Prefetched(iter([1, 2, 3]), 2)
      >>> list(values)
      [1, 2, 3]
      >>> values.close()
    """

    def __init__(self, iterator: Iterator[Any], ahead: int) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(iterator,), name="batches", daemon=True
        )
        self._thread.start()

    def _work(self, iterator: Iterator[Any]) -> None:
        try:
            for value in iterator:
                if not self._put(("value", value)):
                    return
            self._put(("end", None))
        except BaseException as error:  # it belongs to whoever asks for the value
            self._put(("error", error))

    def _put(self, item: tuple[str, Any]) -> bool:
        """Waits for room; False if nobody wants the item any more."""
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_LOOK)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Prefetched:
        return self

    def __next__(self) -> Any:
        if self._stopped.is_set():
            raise StopIteration
        kind, value = self._queue.get()
        if kind == "value":
            return value
        self._stopped.set()
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """Stops the thread; one that waits for its source is left to itself."""
        self._stopped.set()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._thread.join(_STOP)
