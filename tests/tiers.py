"""Cases of one test in two tiers."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["cases"]


def cases(names: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Parameters of a test, of which some are in the fast tier and the others are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in fast)) for name in names]
