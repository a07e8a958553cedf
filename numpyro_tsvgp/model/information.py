r"""The Fisher information of the data about the values of GPs.

.. math::
  I_i(f) = \mathbb{E}_{y \sim p(\cdot \mid f)}
  \Big[\Big(\frac{\partial \log p(y \mid f_i)}{\partial f_i}\Big)^2\Big]

It is an average over data that the likelihood itself would make, and not below zero for any
likelihood. The average is taken over all values where they are finitely many
(``enumerate_support``), over a grid around the location of a distribution on the real line that has
a location and a scale, and else over quantiles (``icdf``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import ndtr
from numpyro.distributions import constraints

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.layout import Layout, find_layout
from numpyro_tsvgp.model.likelihood import data_sites, pointwise_log_prob
from numpyro_tsvgp.model.read import Message, Model, Reading, run_with
from numpyro_tsvgp.model.structure import Structure
from numpyro_tsvgp.model.wrapped import unwrapped

__all__ = ["information"]

_QUANTILES = 16
# Values of a distribution with a location and a scale: loc + scale * sinh(t), which reaches far
# into heavy tails, at an even number of t, so that none is at the location itself, where some
# densities have a kink.
_GRID = np.linspace(-8.0, 8.0, 96)
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
      ValueError: if a distribution has neither finitely many values nor a location and a scale nor
        quantiles, or if several data points read the same function value.
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
        possible, log_weights, is_density = _possible(name, site)
        possible = lax.stop_gradient(possible)

        def squared(value: Array, log_weight: Array) -> dict[str, Array]:
            def log_prob(values: Mapping[str, Array]) -> Array:
                return pointwise_log_prob({**sites_at(values)[name], "value": value})

            score = jax.grad(lambda values: jnp.sum(log_prob(values)))(dict(values))
            if is_density:
                log_weight = log_weight + log_prob(values)
            weight = layout.sum_terms({name: jnp.broadcast_to(jnp.exp(log_weight), shape)})
            return {gp: weight[layout.latent_group[gp]] * s**2 for gp, s in score.items()}

        shape = pointwise_log_prob(site).shape
        each = jax.vmap(squared)(possible, log_weights)
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


def _possible(name: str, site: Message) -> tuple[Array, Array, bool]:
    """Values that data could have.

    Returns:
      The values, along a leading axis; log weights of them; and whether these are to be multiplied
      by the density of the values.
    """
    fn: Any = unwrapped(site["fn"])
    value = jnp.asarray(site["value"])
    if fn.event_shape:
        raise ValueError(
            f"The distribution {type(fn).__name__} of observed site '{name}' has events of several "
            "numbers, whose Fisher information is not known. Use another site rule."
        )

    def along_first(values: Array) -> Array:
        return jnp.broadcast_to(values, (values.shape[0], *value.shape))

    def column(values: Any) -> Array:
        return jnp.asarray(values).reshape(-1, *[1] * value.ndim)

    if fn.has_enumerate_support:
        support = fn.enumerate_support(expand=False)
        if support.shape[0] <= _MANY:
            return along_first(column(support)), jnp.zeros_like(column(support), float), True
    if fn.support is constraints.real and hasattr(fn, "loc") and hasattr(fn, "scale"):
        values = fn.loc + fn.scale * column(np.sinh(_GRID))
        step = _GRID[1] - _GRID[0]
        log_weights = jnp.log(fn.scale * step * column(np.cosh(_GRID)))
        return along_first(values), along_first(lax.stop_gradient(log_weights)), True
    if jnp.issubdtype(value.dtype, jnp.floating):
        z, weights = np.polynomial.hermite_e.hermegauss(_QUANTILES)
        try:
            values = fn.icdf(ndtr(column(z)))
        except (NotImplementedError, ImportError):
            pass
        else:
            return along_first(values), jnp.log(column(weights / weights.sum())), False
    raise ValueError(
        f"The Fisher information of the distribution {type(fn).__name__} of observed site '{name}' "
        "is not known: it has neither finitely many values (enumerate_support) nor a location and "
        "a scale on the real line nor, as a continuous one, quantiles (icdf). Use another site "
        "rule; counts with a log link have positive curvature without it."
    )
