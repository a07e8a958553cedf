"""Importance weights between a fit and the model's joint density."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_tsvgp.gaussian.approximation import Noise
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.guides.guide import Latent
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.model.likelihood import log_likelihood

__all__ = ["log_weights", "standard_normals"]


def standard_normals(key: Array, size: int, latents: Mapping[str, Latent]) -> dict[str, Noise]:
    """Standard normal numbers for draws of every GP.

    Args:
      key: random key.
      size: number of draws.
      latents: the GPs, at the inputs to draw at.

    Returns:
      Noise with a leading axis of draws.
    """
    # From NumPy: compiling JAX's generator for every new shape takes seconds.
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
    out = {}
    for name, (process, approximation) in latents.items():
        shapes, dtype = approximation.noise_shape(process), process.loc.dtype
        out[name] = Noise(
            rng.standard_normal((size, *shapes.inner)).astype(dtype),
            rng.standard_normal((size, *shapes.rest)).astype(dtype),
        )
    return out


def log_weights(fit: Fit, hyper: Params, noise: Mapping[str, Any]) -> Array:
    r"""Log weights of draws of the GPs at given hyperparameters.

    .. math::
      \log w = \log p(y \mid f, \theta) + \log \frac{p(u \mid \theta)}{q(u \mid \theta)}

    :math:`p(f \mid u, \theta)` is in both the model and the guide and cancels. The mean of
    :math:`w` is the evidence :math:`p(y \mid \theta)`.

    Args:
      fit: the fit, with its training data.
      hyper: one value of each hyperparameter that the model samples.
      noise: standard normal numbers for each GP, with a leading axis of draws.

    Returns:
      One log weight a draw.
    """
    reading = fit.read(hyper=hyper)
    values, total = {}, jnp.zeros(())
    for name, (process, approximation) in fit.guide.latents(reading, fit.params).items():
        values[name] = approximation.joint(process).draw(noise[name])
        total = total + approximation.log_ratio(process, noise[name])
    likelihood = log_likelihood(fit.model, reading, fit.data, fit.structure.below)
    return total + lax.map(likelihood, values)
