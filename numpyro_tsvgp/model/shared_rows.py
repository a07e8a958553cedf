"""Data points that read any rows of the GPs, and may share them: effects of groups, f[group].

Where each data point has a row of every GP to itself, what is known of a row is known of its point.
Where several points read one row, a density that is to be evaluated at values of each point's own
is evaluated in turns: the points of one turn have no row in common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

__all__ = ["SharedRows", "shared_rows"]


class SharedRows(NamedTuple):
    """Which row of each latent function each data point reads.

    Attributes:
      rows: by GP site, row numbers ``(latents, points)``, zero where nothing is read.
      is_read: by GP site, whether a point reads a latent function, ``(latents, points)``.
      first: by GP site, a point that reads each row, ``(latents, rows)``; zero if none does.
      turns: numbers of points ``(turns, most)``, of points with no row in common; shorter turns
        repeat one of their points.
      place: where each point is in the flattened turns, ``(points,)``.
    """

    rows: Mapping[str, np.ndarray]
    is_read: Mapping[str, np.ndarray]
    first: Mapping[str, np.ndarray]
    turns: np.ndarray
    place: np.ndarray

    def take(self, gp: str, values: Array) -> Array:
        """Values at the rows of a GP, ``(latents, rows)``, at those that the points read."""
        latents = np.arange(len(self.rows[gp]))[:, None]
        return jnp.broadcast_to(values, (len(latents), values.shape[-1]))[latents, self.rows[gp]]

    def put(self, gp: str, values: Array, point: Array) -> Array:
        """What one point says, ``(latents,)``, at the row that it reads, ``(latents, rows)``."""
        rows, is_read = jnp.asarray(self.rows[gp]), jnp.asarray(self.is_read[gp])
        zero = jnp.zeros(self.first[gp].shape, values.dtype)
        said = jnp.where(is_read[:, point], values, 0.0)
        return zero.at[jnp.arange(len(rows)), rows[:, point]].set(said)

    def in_turns(self, function: Callable[[Array], Mapping[str, Array]]) -> dict[str, Array]:
        """A function of the points of a turn, ``(most,)``, for all points.

        Args:
          function: gives arrays whose last axis is that of the points it was given.

        Returns:
          The same arrays with all points along their last axis.
        """
        found = lax.map(function, jnp.asarray(self.turns))
        return {
            name: jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)[..., self.place]
            for name, x in found.items()
        }

    def at_own_values(
        self, function: Callable[[Mapping[str, Array]], Array], values: Mapping[str, Array]
    ) -> Array:
        """A function of values at rows, for each point at values of its own.

        Args:
          function: from values at rows, ``{site: (latents, rows)}``, to ``(..., points)``.
          values: values of each point's own, ``{site: (latents, points)}``.

        Returns:
          An array ``(..., points)``.
        """
        base = {
            name: value[np.arange(len(value))[:, None], self.first[name]]
            for name, value in values.items()
        }

        def turn(points: Array) -> dict[str, Array]:
            here = {}
            for name, value in values.items():
                # Where a point reads nothing there is no row to set.
                nowhere = self.first[name].shape[1]
                rows = jnp.where(self.is_read[name], self.rows[name], nowhere)[:, points]
                latents = np.arange(len(value))[:, None]
                here[name] = base[name].at[latents, rows].set(value[:, points], mode="drop")
            return {"": function(here)[..., points]}

        return self.in_turns(turn)[""]


def shared_rows(
    read: np.ndarray, rows: np.ndarray, functions: Mapping[str, tuple[int, int]]
) -> SharedRows:
    """Puts points into turns.

    Args:
      read: whether a point reads a latent function, ``(points, latents)``.
      rows: the row that it reads, ``(points, latents)``.
      functions: by GP site, the numbers of its latent functions and of its rows.

    Returns:
      The rows and the turns.
    """
    by_rows, by_read, first, start = {}, {}, {}, 0
    for name, (latents, count) in functions.items():
        own = slice(start, start + latents)
        by_read[name] = read[:, own].T
        by_rows[name] = np.where(by_read[name], rows[:, own].T, 0)
        first[name] = np.zeros((latents, count), int)
        for p in range(latents):
            points = np.flatnonzero(by_read[name][p])
            first[name][p, by_rows[name][p, points]] = points
        start += latents
    turn = _turns(read, rows)
    members = [np.flatnonzero(turn == k) for k in range(turn.max(initial=0) + 1)]
    most = max(map(len, members))
    turns = np.stack([np.append(m, np.repeat(m[0], most - len(m))) for m in members])
    place = np.empty(len(turn), int)
    for k, m in enumerate(members):
        place[m] = k * most + np.arange(len(m))
    return SharedRows(by_rows, by_read, first, turns, place)


def _turns(read: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A number for each point, which differs for points that share a row."""
    turn = np.zeros(len(read), int)
    several = [p for p in range(read.shape[1]) if len(set(rows[read[:, p], p])) < read[:, p].sum()]
    later: dict[tuple[int, int], int] = {}  # by latent function and row, the next turn
    for i in range(len(read)):
        own = [(p, int(rows[i, p])) for p in several if read[i, p]]
        turn[i] = max((later.get(key, 0) for key in own), default=0)
        later.update(dict.fromkeys(own, turn[i] + 1))
    return turn
