r"""The Fisher information of the data about the values of GPs.

.. math::
  I_i(f) = \mathbb{E}_{y \sim p(\cdot \mid f)}
  \Big[\Big(\frac{\partial \log p(y \mid f_i)}{\partial f_i}\Big)^2\Big]

It is an average over data that the likelihood itself would make, and not below zero for any
likelihood. The average is taken over all values where they are finitely many
(``enumerate_support``), and else over quantiles of a distribution that has them (``icdf``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import ndtr

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.layout import Layout, find_layout
from numpyro_tsvgp.model.likelihood import data_sites, pointwise_log_prob
from numpyro_tsvgp.model.read import Message, Model, Reading, run_with
from numpyro_tsvgp.model.structure import Structure
from numpyro_tsvgp.model.wrapped import unwrapped

__all__ = ["information"]

_QUANTILES = 16
# More values than these are not visited one by one.
_MANY = 256


def information(
    model: Model, structure: Structure, reading: Reading, call: Call
) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """The Fisher information of the data about each function value.

    Args:
      model: the NumPyro model.
      structure: its structure.
      reading: a reading of it, whose values are pinned.
      call: its arguments.

    Returns:
      A function of values ``{site: (latents, n)}`` that gives arrays of the same shapes, each site
      with its scale.

    Raises:
      ValueError: if a distribution has neither finitely many values nor quantiles, or if several
        data points read the same function value.
    """
    layout = find_layout(model, structure, reading, call)
    data = data_sites(reading.trace)
    for name in data:
        _check_one_term(name, layout)
    names = list(data)

    def sites_at(values: Mapping[str, Array]) -> dict[str, Message]:
        gps = {name: reading.gps[name].unflatten(value) for name, value in values.items()}
        trace = run_with(model, call, {**reading.pinned, **gps})
        return {name: trace[name] for name in names}

    def one_site(name: str, values: Mapping[str, Array]) -> dict[str, Array]:
        site = sites_at(values)[name]
        possible, log_weights = _possible(name, site)
        possible = lax.stop_gradient(possible)

        def squared(value: Array, log_weight: Array) -> dict[str, Array]:
            def log_prob(values: Mapping[str, Array]) -> Array:
                return pointwise_log_prob({**sites_at(values)[name], "value": value})

            score = jax.grad(lambda values: jnp.sum(log_prob(values)))(dict(values))
            if log_weights is None:
                log_weight = log_prob(values)
            weight = layout.sum_terms({name: jnp.broadcast_to(jnp.exp(log_weight), shape)})
            return {gp: weight[layout.latent_group[gp]] * s**2 for gp, s in score.items()}

        shape = pointwise_log_prob(site).shape
        weights = jnp.zeros(len(possible)) if log_weights is None else log_weights
        each = jax.vmap(squared)(possible, weights)
        scale = 1.0 if site["scale"] is None else site["scale"]
        scale = layout.sum_terms({name: jnp.broadcast_to(jnp.asarray(scale), shape)})
        return {gp: scale[layout.latent_group[gp]] * x.sum(0) for gp, x in each.items()}

    def evaluate(values: Mapping[str, Array]) -> dict[str, Array]:
        parts = [one_site(name, values) for name in names]
        return jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *parts)

    return evaluate


def _check_one_term(name: str, layout: Layout) -> None:
    groups = np.sort(layout.term_group[name], 0)
    if ((groups[1:] == groups[:-1]) & (groups[1:] < layout.groups)).any():
        raise ValueError(
            f"Several data points of observed site '{name}' read the same function value, so that "
            "their Fisher information cannot be told from the score of their sum. Give each its "
            "own row of the GP, or use another site rule."
        )


def _possible(name: str, site: Message) -> tuple[Array, Array | None]:
    """Values that data could have, along a leading axis, and log weights where those are known."""
    fn: Any = unwrapped(site["fn"])
    value = jnp.asarray(site["value"])
    if fn.event_shape:
        raise ValueError(
            f"The distribution {type(fn).__name__} of observed site '{name}' has events of several "
            "numbers, whose Fisher information is not known. Use another site rule."
        )
    if fn.has_enumerate_support:
        support = fn.enumerate_support(expand=False)
        if support.shape[0] <= _MANY:
            support = support.reshape(support.shape[0], *[1] * value.ndim)
            return jnp.broadcast_to(support, (support.shape[0], *value.shape)), None
    if jnp.issubdtype(value.dtype, jnp.floating):
        z, weights = np.polynomial.hermite_e.hermegauss(_QUANTILES)
        uniform = ndtr(jnp.asarray(z, value.dtype)).reshape(-1, *[1] * len(fn.batch_shape))
        try:
            values = fn.icdf(uniform)
        except NotImplementedError:
            pass
        else:
            values = jnp.broadcast_to(values, (len(z), *value.shape))
            return values, jnp.log(jnp.asarray(weights / weights.sum()))
    raise ValueError(
        f"The Fisher information of the distribution {type(fn).__name__} of observed site '{name}' "
        "is not known: it has neither finitely many values (enumerate_support) nor, as a "
        "continuous one, quantiles (icdf). Use another site rule; counts with a log link have "
        "positive curvature without it."
    )
