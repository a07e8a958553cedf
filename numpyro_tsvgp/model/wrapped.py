"""Distributions that plates, masks and ``to_event`` have wrapped."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpyro.distributions as dist

__all__ = ["can_be_sampled", "unmasked", "unwrapped"]

_WRAPPERS = dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution


def unwrapped(fn: Any) -> Any:
    """The distribution inside all wrappers.

    Examples:
      >>> import numpyro.distributions as dist
      >>> from numpyro_tsvgp.model.wrapped import unwrapped
      >>> type(unwrapped(dist.Normal().mask(False).expand([3]).to_event(1))).__name__
      'Normal'
    """
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    return fn


def can_be_sampled(fn: Any) -> bool:
    """Whether a distribution has a method to draw from it: improper priors, for one, have none.

    Examples:
      >>> import numpyro.distributions as dist
      >>> from numpyro_tsvgp.model.wrapped import can_be_sampled
      >>> flat = dist.ImproperUniform(dist.constraints.real, (), ())
      >>> can_be_sampled(dist.Normal()), can_be_sampled(flat.expand([3]))
      (True, False)
    """
    fn = unwrapped(fn)
    while isinstance(fn, dist.TransformedDistribution):
        fn = unwrapped(fn.base_dist)
    return type(fn).sample is not dist.Distribution.sample


def unmasked(fn: Any) -> tuple[Any, Any]:
    """The distribution inside of masks, and which of its values count.

    Args:
      fn: the distribution of a sample site.

    Returns:
      The distribution, and True or a boolean array that broadcasts to its batch shape.
    """
    mask: Any = True
    while isinstance(fn, dist.MaskedDistribution):
        traced = isinstance(fn._mask, jax.core.Tracer)
        mask = mask & (fn._mask if traced else np.asarray(fn._mask))
        fn = fn.base_dist
    return fn, mask
