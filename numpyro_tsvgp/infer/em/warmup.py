"""The start of a fit, where the first E-steps may overshoot.

An E-step is a Newton step in the marginals. From the prior it can be far too long: with a count of
80 and a log rate of 0 it asks for a log rate near 50, and a bound of that size leaves an adaptive
optimizer with step sizes near zero for thousands of updates. Likelihoods with narrow peaks go wrong
more slowly, each step a little further than the one before. Where that happens, the sites are
first brought near their optimum at the initial hyperparameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["overshoots", "settle"]

# Nats a data point. Ordinary losses are a few; a start without need costs some E-steps.
_TOO_MANY = 50.0
# Above the best loss so far, where all data are in each of them; minibatches differ by more.
_TOO_MANY_MORE = 3.0
_ATTEMPTS = 200


def overshoots(losses: Sequence[float], points: float, *, subsampled: bool) -> bool:
    """Whether the losses of the first updates say that E-steps went too far.

    Args:
      losses: the losses so far.
      points: the number of data points.
      subsampled: whether each loss is that of another minibatch.

    Returns:
      True if the last one is not finite or out of proportion.

    Examples:
      >>> from numpyro_tsvgp.infer.em.warmup import overshoots
      >>> [overshoots(losses, 40, subsampled=False) for losses in ([522.5], [522.5, 1277.8])]
      [False, True]
    """
    first, last, best = losses[0], losses[-1], min(losses)
    if not math.isfinite(last):
        return True
    if len(losses) == 1:
        return not first < _TOO_MANY * points
    more = _TOO_MANY if subsampled else _TOO_MANY_MORE
    return not last - best < more * points + 0.5 * abs(best)


def settle(attempt: Callable[[Any, float], tuple[Any, Any]], start: Any, rate: float) -> Any:
    """E-steps alone, each as long as it can be without making the bound worse.

    Args:
      attempt: takes a state and a rate; gives the state after an E-step and its loss.
      start: the state to start from.
      rate: the largest rate.

    Returns:
      A state from which an E-step improves the loss by less than a percent, or where it cannot.
    """
    best, largest = start, rate
    loss = float(attempt(start, 0.0)[1])
    for _ in range(_ATTEMPTS):
        state, new = attempt(best, rate)
        new = float(new)
        if math.isfinite(new) and not new >= loss:  # a loss that was not finite is always beaten
            settled = rate == largest and loss - new < 0.01 * (1 + abs(new))
            best, loss, rate = state, new, min(2 * rate, largest)
            if settled:
                break
        else:
            rate /= 2
            if rate < 1e-6 * largest:
                break
    return best
