r"""Which points a stream keeps, and how many of the past each of them stands for.

Points are drawn without replacement, with a probability that is larger the more a point narrows the
posterior at its own input, :math:`\beta_i v_i`, and the more points it stands for. Drawn like that
they are not typical of the past. The estimate of a sum over it that is right on average gives each
of them the weight of what it stands for, divided by the probability that it was drawn: with the
largest of all keys that were not drawn, :math:`\kappa`, that is

.. math:: \pi_i = 1 - \exp(-e^{\log p_i - \kappa}).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax import Array

__all__ = ["SELECTIONS", "Kept", "kept_points"]

SELECTIONS = ("leverage", "importance", "random")


class Kept(NamedTuple):
    """Points that are kept.

    Attributes:
      rows: which of the points, the last one repeated where there are fewer than asked for.
      stays: which of these rows are not repeated.
      weights: how many points of the past each row stands for; zero where it is repeated.
    """

    rows: np.ndarray
    stays: np.ndarray
    weights: np.ndarray


def kept_points(
    key: Array, select: str, score: np.ndarray, stands_for: np.ndarray, size: int
) -> Kept:
    """Draws points to keep.

    Args:
      key: random key.
      select: ``"random"`` for equal probabilities of all points of the past; ``"leverage"`` for
        those that the score asks for, where each point kept then stands for equally many;
        ``"importance"`` for the same with weights that undo it.
      score: how much each point narrows the posterior.
      stands_for: how many points of the past each point stands for; zero for those that do not
        count.
      size: how many to keep.

    Returns:
      The points.

    Examples:
      >>> import jax, numpy as np
      >>> from numpyro_tsvgp.infer.new_data.remembering import kept_points
      >>> kept = kept_points(jax.random.key(0), "leverage", np.ones(5), np.ones(5), 2)
      >>> len(kept.rows), kept.weights.tolist()
      (2, [2.5, 2.5])
    """
    chance = stands_for
    if select != "random":
        chance = chance * np.maximum(score, np.finfo(float).tiny)
    with np.errstate(divide="ignore"):
        log_chance = np.log(chance)
    # The largest of log chances with Gumbel noise are a draw without replacement.
    keys = log_chance + np.asarray(jax.random.gumbel(key, chance.shape))
    order = np.argsort(-keys)
    there = int((chance > 0).sum())
    count = min(size, there)
    if select == "importance":
        drawn = -np.expm1(-np.exp(log_chance - keys[order[count]])) if count < there else 1.0
        weights = stands_for / np.where(chance > 0, drawn, 1.0)
    else:
        weights = (chance > 0).astype(float)
    rows = np.sort(order[: max(count, 1)])
    rows = np.concatenate([rows, np.repeat(rows[-1:], max(size, 1) - len(rows))])
    stays = np.arange(len(rows)) < count
    kept = np.where(stays, weights[rows], 0.0)
    return Kept(rows, stays, kept * stands_for.sum() / kept.sum() if count else kept)
