"""The joint posterior of a GP site as a NumPyro distribution."""

from __future__ import annotations

from typing import Any

import jax
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from numpyro.util import is_prng_key

from numpyro_tsvgp.gaussian.approximation import Noise
from numpyro_tsvgp.gaussian.linalg import full_precision

__all__ = ["GPPosterior"]


class GPPosterior(dist.Distribution):
    """The joint posterior of function values at some inputs.

    Args:
      joint: the posterior of the latent functions, flattened; see
        :class:`~numpyro_tsvgp.gaussian.approximation.Joint`.
      functions_shape: the shape that plates give to the latent functions.
    """

    support = constraints.real_vector
    pytree_data_fields = ("joint",)

    def __init__(
        self, joint: Any, functions_shape: tuple[int, ...], *, validate_args: bool | None = None
    ) -> None:
        self.joint = joint
        super().__init__(functions_shape, joint.mean.shape[-1:], validate_args=validate_args)

    def _shaped(self, values: Array) -> Array:
        return values.reshape((*values.shape[:-2], *self.batch_shape, values.shape[-1]))

    def _flat(self, values: Array) -> Array:
        outer = values.shape[: values.ndim - 1 - len(self.batch_shape)]
        return values.reshape((*outer, -1, values.shape[-1]))

    @property
    def mean(self) -> Array:
        return self._shaped(self.joint.mean)

    @property
    def variance(self) -> Array:
        return self._shaped(self.joint.variance)

    @full_precision()
    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        assert is_prng_key(key)
        key_inner, key_rest = jax.random.split(key)
        shapes, dtype = self.joint.noise_shape(), self.joint.mean.dtype
        noise = Noise(
            jax.random.normal(key_inner, (*sample_shape, *shapes.inner), dtype),
            jax.random.normal(key_rest, (*sample_shape, *shapes.rest), dtype),
        )
        return self._shaped(self.joint.draw(noise))

    @validate_sample
    @full_precision()
    def log_prob(self, value: Array) -> Array:
        found = self.joint.log_prob(self._flat(value))
        return found.reshape((*found.shape[:-1], *self.batch_shape))
