"""From a NumPyro model to its GP sites and one scalar log-likelihood of their values.

The model is run as it is. A handler gives every GP site a value (its prior mean at first), so
that no covariance is ever built, and everything else that the run decided, hyperparameters,
parameters, subsample indices, is recorded and pinned when the likelihood is evaluated at other
values of the GPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_tsvgp.distributions import GP, find_gp

__all__ = ["FlatKernel", "GPSite", "Reading", "hyperparameter_names", "log_likelihood", "read"]

Model = Callable[..., Any]
Message = dict[str, Any]


class FlatKernel:
    """A kernel whose batch axes are flattened: ``(k, n1, n2)`` with k one or all latents."""

    def __init__(self, kernel: Any, batch_shape: tuple[int, ...]) -> None:
        self.kernel = kernel
        self.batch_shape = batch_shape

    def _flatten(self, values: Array, tail: int) -> Array:
        batch, tail_shape = values.shape[:-tail], values.shape[-tail:]
        if math.prod(batch) > 1:
            values = jnp.broadcast_to(values, self.batch_shape + tail_shape)
        return values.reshape((-1, *tail_shape))

    def __call__(self, X1: Array, X2: Array) -> Array:
        return self._flatten(self.kernel(X1, X2), 2)

    def scaled(self, X1: Array, X2: Array) -> tuple[Array, Array]:
        """Factors of shapes ``(k,)`` and ``(k, n1, n2)`` that multiply to the covariance."""
        scale, matrix = self.kernel.scaled(X1, X2)
        dtype = jnp.result_type(scale, matrix)
        scale = self._flatten(jnp.asarray(scale, dtype)[..., None], 1)[:, 0]
        matrix = self._flatten(matrix.astype(dtype), 2)
        k = max(scale.shape[0], matrix.shape[0])
        return jnp.broadcast_to(scale, (k,)), jnp.broadcast_to(matrix, (k, *matrix.shape[1:]))

    def diag(self, X: Array) -> Array:
        return self._flatten(self.kernel.diag(X), 1)

    def noise(self, X: Array) -> Array:
        return self._flatten(self.kernel.noise(X), 1)


@partial(jax.tree_util.register_dataclass, data_fields=["gp"], meta_fields=["batch_shape"])
@dataclass(frozen=True)
class GPSite:
    """A GP site of a model: its prior at the inputs of this run, and the shape of its plates."""

    gp: GP
    batch_shape: tuple[int, ...]

    @property
    def kernel(self) -> FlatKernel:
        return FlatKernel(self.gp.kernel, self.batch_shape)

    @property
    def latents(self) -> int:
        """How many functions the plates around the site make."""
        return math.prod(self.batch_shape)

    @property
    def rows(self) -> int:
        return self.gp.event_shape[0]

    @property
    def loc(self) -> Array:
        """The prior mean at the inputs, shape ``(latents, n)`` or one that broadcasts to it."""
        if self.gp.loc.ndim <= 1:
            return jnp.broadcast_to(self.gp.loc, (1, self.rows))
        shape = (*self.batch_shape, self.rows)
        return jnp.broadcast_to(self.gp.loc, shape).reshape(-1, self.rows)

    def unflatten(self, values: Array) -> Array:
        """From ``(..., latents, n)`` to the shape of the site's value in the model."""
        return values.reshape((*values.shape[:-2], *self.batch_shape, values.shape[-1]))


class Reading(NamedTuple):
    """What one run of a model shows: its GP sites, the values to pin, and the full trace."""

    gps: dict[str, GPSite]
    pinned: dict[str, Any]
    trace: Mapping[str, Message]


class _MeansForGPs(handlers.substitute):
    """Gives GP sites their prior mean, so that none is sampled and no covariance is built."""

    def __init__(self, fn: Model | None = None) -> None:
        super().__init__(fn, substitute_fn=self._mean)

    @staticmethod
    def _mean(msg: Message) -> Array | None:
        gp = find_gp(msg["fn"]) if msg["type"] == "sample" and msg["value"] is None else None
        return None if gp is None else jnp.broadcast_to(gp.loc, msg["fn"].shape())


class WholePlates(Messenger):
    """Gives plates that would draw a subsample all of their indices."""

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "plate" and msg["value"] is None:
            size = msg["args"][0]
            msg["args"] = (size, size)
            with jax.ensure_compile_time_eval():  # a tracer could not index a NumPy array
                msg["value"] = jnp.arange(size)


class FirstRows(Messenger):
    """Gives plates that would draw a subsample the first indices, where any will do.

    Drawing takes a second when it is not part of a compiled function.
    """

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "plate" and msg["value"] is None and msg["args"][1] < msg["args"][0]:
            with jax.ensure_compile_time_eval():
                msg["value"] = jnp.asarray(np.arange(msg["args"][1]))


def is_gp(site: Message) -> bool:
    return site["type"] == "sample" and find_gp(site["fn"]) is not None


def is_observed(site: Message) -> bool:
    return site["type"] == "sample" and site["is_observed"]


def is_hyperparameter(site: Message) -> bool:
    """A sampled site that is neither a GP, nor data, nor data to impute (``obs_mask``)."""
    return (
        site["type"] == "sample"
        and not site["is_observed"]
        and find_gp(site["fn"]) is None
        and not site["name"].endswith("_unobserved")
    )


def hyperparameter_names(trace: Mapping[str, Message]) -> list[str]:
    return [name for name, site in trace.items() if is_hyperparameter(site)]


def read(
    model: Model,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    expose: Callable[[Message], bool] = lambda site: False,
    values: Mapping[str, Any] | None = None,
    key: Array | None = None,
    whole: bool = False,
    draw: bool = True,
) -> Reading:
    """Runs a model and reads off its GP sites.

    Args:
      model: the NumPyro model.
      args: its arguments.
      kwargs: its keyword arguments.
      expose: which sites handlers outside of this call may see and set; all others are private
        to this run.
      values: values for sites, by name.
      key: seed for what the model draws; None for one of the seed handler around this call.
      whole: whether plates that subsample get all of their indices.
      draw: whether they draw them, rather than take the first, where what is read does not
        depend on it.

    Returns:
      The GP sites with their priors at the inputs of this run, the values of everything else
      that is not data, and the trace.
    """
    if key is None:
        key = numpyro.prng_key()
        key = jax.random.key(0) if key is None else key
    with (
        handlers.block(hide_fn=lambda site: not expose(site)),
        handlers.trace() as trace,
        handlers.seed(rng_seed=key),
        handlers.substitute(data=dict(values or {})),
        _MeansForGPs(),
        WholePlates() if whole else nullcontext() if draw else FirstRows(),
    ):
        model(*args, **kwargs)
    gps, pinned = {}, {}
    for name, site in trace.items():
        gp = find_gp(site["fn"]) if site["type"] == "sample" else None
        if gp is not None and not site["is_observed"]:
            gps[name] = GPSite(gp, site["fn"].batch_shape)
        elif site["type"] in ("param", "plate") or (
            site["type"] == "sample" and not site["is_observed"]
        ):
            pinned[name] = site["value"]
    return Reading(gps, pinned, trace)


def log_likelihood(
    model: Model, reading: Reading, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[Mapping[str, Array]], Array]:
    r"""The log-likelihood of all observed sites as one scalar function of the GP values.

    .. math:: \ell(f) = \sum_{\text{sites}} \text{scale} \cdot \log p(y \mid f)

    Each site counts with its own ``scale`` (of plates that subsample and of
    ``handlers.scale``) exactly once; masks and ``numpyro.factor`` are honoured.

    Args:
      model: the NumPyro model.
      reading: a reading of it, whose values are pinned.
      args: arguments of the model.
      kwargs: keyword arguments of the model.

    Returns:
      A function of ``{site: values of shape (latents, n)}``.
    """

    def evaluate(values: Mapping[str, Array]) -> Array:
        data = dict(reading.pinned)
        data |= {name: reading.gps[name].unflatten(value) for name, value in values.items()}
        with (
            handlers.block(),
            handlers.trace() as trace,
            handlers.seed(rng_seed=0),
            handlers.substitute(data=data),
        ):
            model(*args, **kwargs)
        total: Any = 0.0
        for site in trace.values():
            if is_observed(site):
                log_prob = site["fn"].log_prob(site["value"])
                scale = 1.0 if site["scale"] is None else site["scale"]
                total = total + jnp.sum(scale * log_prob)
        return jnp.asarray(total)

    return evaluate
