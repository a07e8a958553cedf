"""Where a warning comes from, as its reader sees it."""

from __future__ import annotations

import contextlib
import inspect
import os
from importlib.util import find_spec
from pathlib import Path

__all__ = ["stack_level"]


def _folder(package: str) -> str:
    spec = find_spec(package)
    return "" if spec is None or spec.origin is None else os.path.dirname(spec.origin) + os.sep


# Code that stands between a user's line and a warning.
_INSIDE = (
    str(Path(__file__).parents[1]) + os.sep,
    *filter(None, map(_folder, ("numpyro", "jax"))),
    contextlib.__file__,
)


def stack_level() -> int:
    """The ``stacklevel`` with which ``warnings.warn`` points at the line of a user.

    Returns:
      How many frames above that of the caller it is, counted as ``warnings.warn`` does.

    Examples:
      >>> from numpyro_tsvgp.gaussian.caller import stack_level
      >>> stack_level()
      1
    """
    frame = inspect.currentframe()
    assert frame is not None
    level, frame = 1, frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level
