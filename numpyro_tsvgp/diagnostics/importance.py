"""Importance weights between the guide and the model's joint density."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp import extract, posterior
from numpyro_tsvgp.guide import AutoDualGaussian, Params
from numpyro_tsvgp.simulation import Noise

__all__ = ["log_weights"]


def log_weights(
    guide: AutoDualGaussian,
    params: Params,
    hyper: Params,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    noise: Mapping[str, Noise],
) -> Array:
    r"""Log weights of draws of the GPs at given hyperparameters.

    .. math::
      \log w = \log p(y \mid f, \theta) + \log \frac{p(u \mid \theta)}{q(u \mid \theta)}

    :math:`p(f \mid u, \theta)` is in both the model and the guide and cancels. The mean of
    :math:`w` is the evidence :math:`p(y \mid \theta)`.

    Args:
      guide: the guide.
      params: fitted parameters.
      hyper: one value of each hyperparameter that the model samples.
      args: arguments of the model, with the data.
      kwargs: keyword arguments of the model.
      noise: standard normal numbers for each GP, with a leading axis of draws.

    Returns:
      One log weight a draw.
    """
    reading = guide.read(params, args, kwargs, hyper)
    values, total = {}, jnp.zeros(())
    for name, site in reading.gps.items():
        eps, rest = noise[name]  # (draws, latents, m) and (draws, latents, n)
        fitted = guide.unpack(name, params)
        q = posterior.inducing_values(site, fitted, posterior.prior(site, fitted))
        f = posterior.joint(site, fitted).from_noise(site.unflatten(eps), site.unflatten(rest))
        values[name] = f.reshape(-1, site.latents, site.rows)
        s = q.mean + jnp.einsum("pij,dpi->dpj", q.inverse, eps)
        ratio = 0.5 * ((eps**2).sum((1, 2)) - (s**2).sum((1, 2))) - q.half_log_det.sum()
        total = total + ratio
    return total + lax.map(extract.log_likelihood(guide.model, reading, args, kwargs), values)
