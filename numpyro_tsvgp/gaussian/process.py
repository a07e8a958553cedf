"""The prior of one GP site, as one run of a model gives it: kernel, inputs and mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["FlatKernel", "Process", "flatten_functions"]


def flatten_functions(values: Array, batch_shape: tuple[int, ...], tail: int) -> Array:
    """Values with the axes of a batch of functions flattened to one, of size 1 if it is shared.

    Args:
      values: an array of shape ``batch + tail``, whose batch broadcasts to ``batch_shape``.
      batch_shape: shape of the batch of functions.
      tail: how many axes there are after those of the batch.

    Returns:
      An array of shape ``(1, ...)`` or ``(functions, ...)``.
    """
    batch, tail_shape = values.shape[:-tail], values.shape[-tail:]
    if math.prod(batch) > 1:
        values = jnp.broadcast_to(values, batch_shape + tail_shape)
    return values.reshape((-1, *tail_shape))


class FlatKernel:
    """A kernel whose batch axes are flattened: covariances have shape ``(k, n1, n2)``.

    The kernel axis ``k`` is 1 when the latent functions share the kernel and their number when each
    has its own.
    """

    def __init__(self, kernel: Any, batch_shape: tuple[int, ...]) -> None:
        self.kernel = kernel
        self.batch_shape = batch_shape

    def __call__(self, X1: Array, X2: Array) -> Array:
        return flatten_functions(self.kernel(X1, X2), self.batch_shape, 2)

    def scaled(self, X1: Array, X2: Array) -> tuple[Array, Array]:
        """Factors of shapes ``(k,)`` and ``(k, n1, n2)`` that multiply to the covariance."""
        scale, matrix = self.kernel.scaled(X1, X2)
        dtype = jnp.result_type(scale, matrix)
        scale = flatten_functions(jnp.asarray(scale, dtype)[..., None], self.batch_shape, 1)[:, 0]
        matrix = flatten_functions(matrix.astype(dtype), self.batch_shape, 2)
        k = max(scale.shape[0], matrix.shape[0])
        return jnp.broadcast_to(scale, (k,)), jnp.broadcast_to(matrix, (k, *matrix.shape[1:]))

    def diag(self, X: Array) -> Array:
        return flatten_functions(self.kernel.diag(X), self.batch_shape, 1)

    def noise(self, X: Array) -> Array:
        return flatten_functions(self.kernel.noise(X), self.batch_shape, 1)

    def state_space(self) -> Any:
        """The state-space form, whose hyperparameters have the kernel axis alone."""

        def flatten(values: Array) -> Array:
            return flatten_functions(values[..., None], self.batch_shape, 1)[:, 0]

        return self.kernel.state_space().flattened(flatten)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["kernel_of_batch", "X", "loc", "means", "jitter"],
    meta_fields=["batch_shape"],
)
@dataclass(frozen=True)
class Process:
    r"""The prior :math:`f_p \sim \mathcal{GP}(\mu, k)` of the latent functions of one GP site.

    Attributes:
      kernel_of_batch: the kernel, with the batch axes that the model gives it.
      X: inputs of this run, ``(n, d)`` or ``(n,)``.
      loc: the prior mean there, ``(functions, n)`` or ``(1, n)``.
      means: the prior mean at the inputs that an approximation asks for
        (:attr:`~numpyro_tsvgp.gaussian.approximation.Approximation.mean_inputs`).
      jitter: relative jitter of covariances, None for the default of the precision.
      batch_shape: the shape that plates give to the latent functions.
    """

    kernel_of_batch: Any
    X: Array
    loc: Array
    means: Array
    jitter: Any
    batch_shape: tuple[int, ...]

    @property
    def kernel(self) -> FlatKernel:
        return FlatKernel(self.kernel_of_batch, self.batch_shape)

    @property
    def functions(self) -> int:
        """How many latent functions there are."""
        return math.prod(self.batch_shape)

    @property
    def rows(self) -> int:
        return self.X.shape[0]

    def kernel_axis(self, X: Array) -> int:
        """The size of the kernel axis: 1 where the functions share their kernel."""
        return jax.eval_shape(self.kernel.diag, X).shape[0]

    def unflatten(self, values: Array) -> Array:
        """From ``(..., functions, n)`` to the shape of the site's value in the model."""
        return values.reshape((*values.shape[:-2], *self.batch_shape, values.shape[-1]))
