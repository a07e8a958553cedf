"""What the losses of a run say against its result."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["complaint"]

# Nats a data point above the best block of losses. Minibatch losses are those of other rows each,
# and flatter more where rates are larger, so that a schedule alone makes them rise.
_FAR = 0.1
_FAR_SUBSAMPLED = 1.0
# Standard errors of the medians of two blocks.
_ERRORS = 8.0
_ALTERNATIONS = 20
# Nats a data point at the end of a run that no density of one has.
_ABSURD = 1e7
# Nats a data point by which a loss of all data rises, twice among the last.
_RESTLESS = 0.3
# A loss at a draw of d variational hyperparameters has noise: log densities of d normal numbers
# have a standard deviation of sqrt(d / 2), and the difference of two losses one of sqrt(d).
_DRAWN = 6.0


def complaint(
    losses: Any, points: float, *, subsampled: bool, rate: float | None, drawn: int = 0
) -> str | None:
    """Why the result of a run should not be trusted, or None.

    The run is cut into ten blocks. A last block whose median is far above the best of them, in
    nats for each data point and in standard errors, is a divergence. Losses that go up and down in
    turn, by steps that do not get smaller, are a cycle of E-steps that are too long. Losses of all
    data that still jump up by much at the end are those of a fit that has not converged.

    Args:
      losses: the losses of a run.
      points: the number of data points.
      subsampled: whether each loss is that of another minibatch.
      rate: the rate of the E-steps at the end, or None if there are none.
      drawn: how many variational hyperparameters each loss is at a draw of.

    Returns:
      A sentence with what to do.

    Examples:
      >>> import numpy as np
      >>> from numpyro_tsvgp.infer.em.convergence import complaint
      >>> complaint(1.0 + np.exp(-np.arange(50.0)), 10, subsampled=False, rate=0.5) is None
      True
      >>> complaint(np.tile([1.0, 2.0], 25), 10, subsampled=False, rate=0.5)[:34]
      'The losses alternate between 1 and'
    """
    losses = np.asarray(losses, float)
    losses = losses[np.isfinite(losses)]
    found = _divergence(losses, points, subsampled, rate, drawn) or _cycle(losses, rate)
    if found is None and not subsampled:
        found = _restlessness(losses, _RESTLESS * points + _DRAWN * drawn**0.5, rate)
    if found is None and len(losses) and np.median(losses[-5:]) > _ABSURD * points:
        found = (
            f"The last loss is {losses[-1]:.3g}, more than {_ABSURD:.0e} nats for each data point: "
            "this is no fit. The density overflows at values of f that the posterior still thinks "
            "possible (a link function such as jnp.exp(50 * f)), or the data are of another scale "
            "than the model."
        )
    return found


def _divergence(
    losses: np.ndarray, points: float, subsampled: bool, rate: float | None, drawn: int
) -> str | None:
    first = losses[0] if len(losses) and not subsampled else np.inf
    losses = (losses[1:] + losses[:-1]) / 2  # those that alternate have a rule of their own
    size = max(len(losses) // 10, min(5, len(losses) // 3))
    if size < 2:
        return None
    count = len(losses) // size
    blocks = losses[len(losses) - count * size :].reshape(count, size)
    # Medians: one minibatch with an outlier is no divergence.
    medians = np.median(blocks, 1)
    errors = 1.25 * 1.48 * np.median(np.abs(blocks - medians[:, None]), 1) / np.sqrt(size)
    best = int(np.argmin(medians))
    excess = medians[-1] - medians[best]
    far = (_FAR_SUBSAMPLED if subsampled else _FAR) * points
    # A divergence has a spread of its own, which must not excuse it.
    noise = min(errors[best], errors[-1]) if not subsampled else np.hypot(errors[best], errors[-1])
    if not excess > far + _ERRORS * noise:
        if medians[-1] - first > far + _ERRORS * errors[-1] + _DRAWN * drawn**0.5:
            return (
                f"The fit ended worse than it started: the last losses are near {medians[-1]:.6g} "
                f"and the first was {first:.6g}. The first steps went too far. {_advice(rate)}"
            )
        return None
    return (
        f"The fit has diverged: the last losses are near {medians[-1]:.6g}, far above the "
        f"{medians[best]:.6g} of earlier ones. {_advice(rate)}"
    )


def _cycle(losses: np.ndarray, rate: float | None) -> str | None:
    count = min(_ALTERNATIONS, len(losses) // 2)
    if count < 6:
        return None
    recent = losses[-count - 1 :]
    steps, sizes = np.diff(recent), np.abs(np.diff(recent))
    if not (steps[1:] * steps[:-1] < 0).all():
        return None
    # Noise alternates too, for a while; a few steps count if they come back to where they were.
    returns = np.abs(recent[2:] - recent[:-2]) < 0.2 * np.maximum(sizes[1:], sizes[:-1])
    lasting = np.median(sizes[count // 2 :]) > 0.7 * np.median(sizes[: count // 2])
    visible = sizes.min() > 1e-3 + 1e-5 * np.abs(recent).max()
    if not (lasting and visible and (count == _ALTERNATIONS or returns.all())):
        return None
    low, high = sorted(recent[-2:])
    return (
        f"The losses alternate between {low:.6g} and {high:.6g}: steps overshoot, one to either "
        f"side, and the fit does not converge. {_advice(rate)}"
    )


def _restlessness(losses: np.ndarray, much: float, rate: float | None) -> str | None:
    recent = losses[-max(len(losses) // 5, min(5, len(losses) // 3), 1) :]
    rises = np.diff(recent)
    if (rises > much).sum() < 2:
        return None
    return (
        f"The fit has not converged: the last losses jump between {recent.min():.6g} and "
        f"{recent.max():.6g}. {_advice(rate)}"
    )


def _advice(rate: float | None) -> str:
    if rate is None:
        return "Try a smaller learning rate."
    return (
        f"Try a smaller site_lr, such as {rate / 5:.1g} (it was {rate:.2g}), and if that does not "
        "help a smaller learning rate."
    )
