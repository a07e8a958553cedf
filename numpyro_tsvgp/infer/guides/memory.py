"""Whether a matrix fits in memory, asked before it is made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["memory", "refuses_matrix"]

_CGROUP = Path("/sys/fs/cgroup/memory.max")  # of containers, which have less than the machine


def memory() -> int | None:
    """Bytes of memory of the device that JAX computes on, or None if it does not say."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        statistics = device.memory_stats() or {}
        return statistics.get("bytes_limit")
    try:
        bytes_ = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    try:
        return min(bytes_, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # no such limit
        return bytes_


def refuses_matrix(rows: int, dtype: Any) -> str | None:
    """Why a square matrix cannot be worked with, or None.

    Factorising it needs room for two of its kind, so more than half of the memory is too much.

    Args:
      rows: its number of rows.
      dtype: the type of its entries.

    Returns:
      The beginning of a sentence.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp.infer.guides.memory import refuses_matrix
      >>> refuses_matrix(100, jnp.float32) is None
      True
      >>> refuses_matrix(10_000_000, jnp.float32)[:48]
      'a matrix of 10,000,000 by 10,000,000, 400,000 GB'
    """
    needed, available = rows**2 * jnp.dtype(dtype).itemsize, memory()
    if available is None or 2 * needed <= available:
        return None
    return (
        f"a matrix of {rows:,} by {rows:,}, {needed / 1e9:,.0f} GB, and there are "
        f"{available / 1e9:,.0f} GB of memory"
    )
