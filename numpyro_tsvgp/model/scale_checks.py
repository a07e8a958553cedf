"""Whether data and inputs are of the scale that the prior of a model expects.

A fit of targets near 1e4 under a prior of scale 1 starts so far from its optimum that it ends far
from it, and inputs near 1e6 under a lengthscale of 1 make a function of independent values. Neither
is an error of the model, so both are warnings.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import GPSite, Model, Reading, is_observed, read
from numpyro_tsvgp.model.validation import unvalidated
from numpyro_tsvgp.model.wrapped import unmasked, unwrapped

__all__ = ["check_scales"]

# So many draws of the hyperparameters from their prior.
_DRAWS = 4
# So many times what the prior expects: two orders of magnitude.
_MUCH = 100.0
# Rows of inputs whose neighbours are looked for, and rows among which.
_SOME, _AMONG = 16, 20_000


def check_scales(model: Model, reading: Reading, call: Call) -> None:
    """Warns where data or inputs are orders of magnitude from what the prior expects.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.
    """
    try:  # hyperparameters drawn from their prior, which improper ones cannot be
        with unvalidated():
            others = [
                read(model, call, key=jax.random.key(seed), first_rows=True)
                for seed in range(1, _DRAWS)
            ]
    except (NotImplementedError, ValueError):
        others = []
    readings = [reading, *others]
    for name in reading.gps:
        _check_inputs(name, [found.gps[name] for found in readings])
    for name, message in reading.trace.items():
        if is_observed(message):
            _check_data(name, readings)


def _check_data(name: str, readings: list[Reading]) -> None:
    fn, mask = unmasked(readings[0].trace[name]["fn"])
    if isinstance(fn, dist.Unit) or fn.support is not dist.constraints.real:
        return  # counts and classes have no scale of their own
    y = np.asarray(readings[0].trace[name]["value"], float)
    if y.size == 0:
        return
    low, high = np.inf, -np.inf
    for found in readings:
        try:
            here = unwrapped(found.trace[name]["fn"])
            mean, variance = np.asarray(here.mean), np.asarray(here.variance)
        except NotImplementedError:  # nothing is known of its moments
            return
        # GPs stand at their mean: what they add is known up to the likelihood's use of them.
        added = sum(float(np.max(_variance(site))) for site in found.gps.values())
        sd = np.sqrt(np.where(np.isfinite(variance), variance, 0.0) + added)
        mean = np.where(np.isfinite(mean), mean, 0.0)
        low, high = np.minimum(low, mean - sd), np.maximum(high, mean + sd)
    width = np.maximum(0.5 * (high - low), np.finfo(float).tiny)
    score = np.broadcast_to(np.abs(y - 0.5 * (low + high)) / width, np.broadcast_shapes(y.shape))
    counted = score[np.broadcast_to(mask, score.shape)]
    if counted.size and np.median(counted) > _MUCH:
        warnings.warn(
            f"The data of site '{name}' are far from what the prior expects of them: values such "
            f"as {y.flat[0]:.4g}, where it expects {float(np.mean(0.5 * (low + high))):.3g} give "
            f"or take {float(np.mean(width)):.3g}. A fit that starts orders of magnitude away may "
            "end far from the optimum. Fit standardised data, (y - y.mean()) / y.std(), or give "
            "the mean, the variance and the noise priors (or initial values) of the scale of the "
            "data.",
            stacklevel=stack_level(),
        )


def _variance(site: GPSite) -> np.ndarray:
    return np.asarray(site.process().kernel.diag(site.gp.X[:_SOME]))


def _check_inputs(name: str, sites: list[GPSite]) -> None:
    X = np.asarray(sites[0].gp.X)
    if X.ndim == 1:
        X = X[:, None]
    if len(X) < 3:
        return
    rng = np.random.RandomState(0)
    rows = X[:: -(-len(X) // _AMONG)]
    # A few inputs with the nearest other one of each, and with the one that is furthest away.
    near, far = [], []
    for x in rows[rng.permutation(len(rows))[:_SOME]]:
        distances = np.abs(rows - x).sum(1)
        near.append((x, rows[np.where(distances > 0, distances, np.inf).argmin()]))
        far.append((x, rows[distances.argmax()]))
    centre = rows.mean(0)

    def largest(pairs: list[Any], factor: float) -> float:
        """The largest correlation of a typical pair, over draws of the hyperparameters."""
        a, b = (centre + factor * (np.array(side) - centre) for side in zip(*pairs, strict=True))
        return max(float(np.median(_correlations(site, a, b))) for site in sites)

    def smallest(pairs: list[Any], factor: float) -> float:
        a, b = (centre + factor * (np.array(side) - centre) for side in zip(*pairs, strict=True))
        return min(float(np.median(_correlations(site, a, b))) for site in sites)

    # A kernel that does not change when inputs are shrunk or stretched has no lengthscale, and one
    # that cannot take such inputs (levels of a category) has none either.
    what = how = ""
    with suppress(Exception):
        if (
            largest(near, 1.0) < 1e-3
            and largest(near, 0.3) < 1e-3
            and any(largest(near, 10.0**-i) > 0.5 for i in (2, 4, 6, 8))
        ):
            what = "far apart"
            how = "neighbouring inputs would have unrelated values of the function"
        elif (
            smallest(far, 1.0) > 1 - 1e-6
            and smallest(far, 3.0) > 1 - 1e-6
            and any(smallest(far, 10.0**i) < 0.99 for i in (2, 4, 6))
        ):
            what, how = "close together", "the function would be a constant"
    if not what:
        return
    spread = ", ".join(
        f"{low:.4g} to {high:.4g}" for low, high in zip(X.min(0), X.max(0), strict=True)
    )
    warnings.warn(
        f"The inputs X of GP site '{name}' are {what} for the lengthscales that the prior expects: "
        f"{how}. They go from {spread[:200]}. Scale them, (X - X.mean(0)) / X.std(0), or give the "
        "lengthscale a prior (or an initial value) of their scale.",
        stacklevel=stack_level(),
    )


@jax.jit
def _matrices(kernel: Any, X: jax.Array) -> jax.Array:
    return kernel(X, X)


def _correlations(site: GPSite, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    shape = site.gp.X.shape

    def inputs(x: np.ndarray) -> Any:
        return jnp.asarray(x[:, 0] if len(shape) == 1 else x, site.gp.X.dtype)

    both = np.asarray(_matrices(site.gp.kernel, inputs(np.concatenate([a, b]))))
    both = both.reshape(-1, *both.shape[-2:])[0]
    n = len(a)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.sqrt(np.diagonal(both)[:n] * np.diagonal(both)[n:])
        return np.nan_to_num(np.abs(np.diagonal(both[:n, n:])) / scale, nan=1.0)
