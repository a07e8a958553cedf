"""Whether inducing inputs and parameters are those of the model that a guide meets."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.gaussian.linalg import default_jitter
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.model.data_checks import first_where, shown_index
from numpyro_tsvgp.model.read import GPSite, Reading

__all__ = ["check_inducing", "check_parameters", "check_places", "doubt_jitter"]

# What jitter may be worth, in nats, in all and for each data point.
_NATS, _NATS_A_POINT = 1.0, 0.01
# Inputs that a variance is looked at.
_SOME = 64


def check_parameters(
    reading: Reading, params: Mapping[str, Any], needed: Iterable[str] = ()
) -> None:
    """Checks that fitted parameters are those of the model.

    Args:
      reading: a reading of the model.
      params: fitted parameters by name.
      needed: names of those of the guide.

    Raises:
      ValueError: if one is missing.
    """
    declared = [name for name, site in reading.trace.items() if site["type"] == "param"]
    missing = sorted({*declared, *needed} - set(params))
    if missing:
        raise ValueError(
            f"The parameters have no {missing}, which the model of {_names(reading)} has: they are "
            f"those of another model, or incomplete. Pass those of a fit of this model, as in "
            f"result.params; these are {sorted(params)}."
        )


def check_inducing(name: str, Z: Array, site: GPSite, reading: Reading) -> None:
    """Checks inducing inputs against the inputs of their GP.

    Args:
      name: the GP site.
      Z: inducing inputs, as many axes as the inputs.
      site: the GP at its data.
      reading: the reading of the model that the GP is of.

    Raises:
      ValueError: if they cannot be what was meant.
    """
    check_places(name, Z, site)
    X, values = site.gp.X, np.asarray(Z)
    size = round(site.rows * reading.subsampling)
    if len(values) > size:
        raise ValueError(
            f"GP site '{name}' has {len(values)} inducing inputs but only {size} data points. Use "
            "fewer, or inducing=None, which needs none. (With minibatches passed as arguments, "
            "give the plate its full size: numpyro.plate('data', N, subsample_size=len(y)).)"
        )
    # A batch need not have the range of all inputs, and what is traced has none yet.
    if reading.subsampling == 1 and not isinstance(X, jax.core.Tracer):
        _warn_if_far(name, values.reshape(len(values), -1), np.asarray(X).reshape(len(X), -1))


def check_places(name: str, Z: Array, site: GPSite) -> None:
    """Checks inducing inputs wherever the data are, and however many."""
    X = site.gp.X
    if Z.shape[1:] != X.shape[1:]:
        raise ValueError(
            f"The inducing inputs of GP site '{name}' have shape {Z.shape} but its inputs have "
            f"shape {X.shape}: they must have the same number of columns."
        )
    if Z.shape[0] == 0:
        raise ValueError(f"The inducing inputs of GP site '{name}' are empty. Pass at least one.")
    values = np.asarray(Z)
    where = first_where(~np.isfinite(values))
    if where is not None:
        raise ValueError(
            f"The inducing inputs of GP site '{name}' have the value {values[where]} at index "
            f"{shown_index(where)}."
        )
    distinct = len(np.unique(values, axis=0))
    if distinct < len(values):
        raise ValueError(
            f"The inducing inputs of GP site '{name}' have {len(values) - distinct} duplicate "
            "rows, which make their covariance singular. inducing.greedy and inducing.subset "
            "return distinct rows."
        )


def _warn_if_far(name: str, Z: np.ndarray, X: np.ndarray) -> None:
    """Inducing inputs beside the data say nothing about them."""
    low, high = X.min(0), X.max(0)
    width = high - low
    beside = (np.maximum(low - Z, Z - high) > width) & (width > 0)
    count = int(beside.any(1).sum())
    if 2 * count >= len(Z):
        column = int(beside.sum(0).argmax())
        warnings.warn(
            f"{count} of the {len(Z)} inducing inputs of GP site '{name}' lie further from its "
            f"inputs than these spread: in column {column} inputs go from {low[column]:.4g} to "
            f"{high[column]:.4g} and inducing inputs from {Z[:, column].min():.4g} to "
            f"{Z[:, column].max():.4g}. They would say nothing about the data. Choose them among "
            "the inputs, on the same scale, as inducing.kmeans(key, X, m) does.",
            stacklevel=stack_level(),
        )


def doubt_jitter(name: str, process: Process, approximation: Any) -> str | None:
    r"""Whether data are so precise that the jitter of a prior is noise that matters.

    Jitter adds a function of variance :math:`\epsilon \, k(x, x)` to a GP that has no smoothness.
    Sites of precision :math:`\beta_i` notice it by :math:`\tfrac12 \epsilon \sum_i \beta_i k(x_i,
    x_i)` nats, and so does the density of the data at joint draws.

    Args:
      name: the name of the GP site.
      process: its prior.
      approximation: what the guide keeps of it.

    Returns:
      A sentence with what to do, or None.
    """
    jitter = process.jitter
    jitter = float(default_jitter(process.loc.dtype) if jitter is None else jnp.max(jitter))
    worth = 0.5 * jitter * float(approximation.information(process))
    if not worth > max(_NATS, _NATS_A_POINT * process.rows):
        return None
    variance = float(jnp.max(process.kernel.diag(process.X[:_SOME])))
    return (
        f"The jitter of GP site '{name}', {jitter:.1g} of its variance of {variance:.2g}, is noise "
        f"that data as precise as these notice: it is worth about {worth:.2g} nats. Losses are off "
        "by up to that, and joint draws spread more than marginals say. Give the GP less jitter, "
        f"GP(kernel, X, jitter={max(jitter / (10 * worth), 1e-13):.0e}), in float64, or keep its "
        "variance and the noise of the data within a few orders of magnitude of each other."
    )


def _names(reading: Reading) -> str:
    return " and ".join(f"GP site '{name}'" for name in reading.gps)
