"""The likelihood of a model as a function of the values of its GPs, in one sum or term by term."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import Message, Model, Reading, is_observed, run_with
from numpyro_tsvgp.model.wrapped import unwrapped

__all__ = [
    "Below",
    "Terms",
    "data_sites",
    "density",
    "log_likelihood",
    "log_prior",
    "point_sites",
    "pointwise_log_prob",
    "probabilities",
    "terms",
]


def density(site: Message) -> Array:
    """The log density of a sampled site times its scale, summed."""
    log_prob = site["fn"].log_prob(site["value"])
    return jnp.sum(log_prob if site["scale"] is None else site["scale"] * log_prob)


def log_likelihood(
    model: Model, reading: Reading, call: Call, below: Collection[str] = ()
) -> Callable[[Mapping[str, Array]], Array]:
    r"""The log-likelihood of all data as one scalar function of the GP values.

    .. math:: \ell(f) = \sum_{\text{sites}} \text{scale} \cdot \log p(y \mid f)

    Each site counts with its own ``scale`` (of plates that subsample and of ``handlers.scale``)
    exactly once; masks and ``numpyro.factor`` are honoured.

    Args:
      model: the NumPyro model.
      reading: a reading of it, whose values are pinned.
      call: the arguments of the model.
      below: latent variables whose density depends on GPs. Given their values, which are pinned,
        they are data like any other.

    Returns:
      A function of ``{site: values of shape (functions, n)}``.
    """

    def evaluate(values: Mapping[str, Array]) -> Array:
        trace = run_with(model, call, _with(reading, values))
        total: Any = 0.0
        for name, site in trace.items():
            if is_observed(site) or name in below:
                total = total + density(site)
        return jnp.asarray(total)

    return evaluate


def log_prior(reading: Reading, hyperparameters: Collection[str]) -> Array:
    """The log prior density of hyperparameters at the values of a reading."""
    total: Any = 0.0
    for name in hyperparameters:
        total = total + density(reading.trace[name])
    return jnp.asarray(total)


def _with(reading: Reading, values: Mapping[str, Array]) -> dict[str, Any]:
    gps = {name: reading.gps[name].unflatten(value) for name, value in values.items()}
    return {**reading.pinned, **gps}


# ---- term by term ----------------------------------------------------------------------------


class Terms(NamedTuple):
    """Log densities of one observed site and their scale, as the model shapes them."""

    log_prob: Array
    scale: Any


def data_sites(trace: Mapping[str, Message]) -> dict[str, Message]:
    """Observed sites that hold data; those of ``numpyro.factor`` hold none."""
    return {
        name: site
        for name, site in trace.items()
        if is_observed(site) and not isinstance(unwrapped(site["fn"]), dist.Unit)
    }


def point_sites(trace: Mapping[str, Message]) -> dict[str, Message]:
    """Observed sites whose terms are about data points, one by one.

    Those that hold data. In a model without any the likelihood is written with
    ``numpyro.factor``, and its terms with one number for each data point are meant.
    """
    found = data_sites(trace)
    if found:
        return found
    return {k: s for k, s in trace.items() if is_observed(s) and s["fn"].batch_shape}


def pointwise_log_prob(site: Message) -> Array:
    """Log density of each data point of an observed site, without its scale.

    Where ``to_event`` made one event of all data, it is taken apart again.
    """
    fn = site["fn"]
    if isinstance(fn, dist.Independent) and not fn.batch_shape:
        fn = fn.base_dist
    return fn.log_prob(site["value"])


class Below(NamedTuple):
    """Probabilities of data below one that was seen, and of such data or that one."""

    below: Array
    up_to: Array


def probabilities(
    model: Model, reading: Reading, call: Call
) -> Callable[[Mapping[str, Array]], dict[str, Below]]:
    """The distribution function of each data point as a function of the GP values.

    Args:
      model: the NumPyro model.
      reading: a reading of it, whose values are pinned.
      call: the arguments of the model.

    Returns:
      A function of ``{site: values of shape (functions, n)}`` that gives, for each observed site
      that holds data, the probabilities of less and of no more than was seen. For a continuous
      distribution these are the same.
    """

    def evaluate(values: Mapping[str, Array]) -> dict[str, Below]:
        trace = run_with(model, call, _with(reading, values))
        return {name: _below(name, site) for name, site in data_sites(trace).items()}

    return evaluate


def _below(name: str, site: Message) -> Below:
    fn, value = unwrapped(site["fn"]), site["value"]
    if fn.event_dim:
        raise ValueError(
            f"Site '{name}' is a {type(fn).__name__}, whose data are vectors, which are not below "
            "or above one another."
        )
    if fn.is_discrete and fn.has_enumerate_support:
        levels = fn.enumerate_support(expand=False)
        probability = jnp.exp(fn.log_prob(levels))
        return Below(
            jnp.sum(jnp.where(levels < value, probability, 0.0), 0),
            jnp.sum(jnp.where(levels <= value, probability, 0.0), 0),
        )
    try:
        up_to = fn.cdf(value)
        below = jnp.where(value > 0, fn.cdf(value - 1), 0.0) if fn.is_discrete else up_to
    except NotImplementedError as error:
        raise ValueError(
            f"Site '{name}' is a {type(fn).__name__}, of which NumPyro has no distribution "
            "function (cdf)."
        ) from error
    return Below(jnp.asarray(below), jnp.asarray(up_to))


def terms(
    model: Model, reading: Reading, call: Call
) -> Callable[[Mapping[str, Array]], dict[str, Terms]]:
    """The log-likelihood of each data point as a function of the GP values.

    Args:
      model: the NumPyro model.
      reading: a reading of it, whose values are pinned.
      call: the arguments of the model.

    Returns:
      A function of ``{site: values of shape (functions, n)}`` that gives the terms of each observed
      site that holds data, or else of ``numpyro.factor`` with a number for each data point.
    """

    def evaluate(values: Mapping[str, Array]) -> dict[str, Terms]:
        trace = run_with(model, call, _with(reading, values))
        return {
            name: Terms(pointwise_log_prob(site), 1.0 if site["scale"] is None else site["scale"])
            for name, site in point_sites(trace).items()
        }

    return evaluate
