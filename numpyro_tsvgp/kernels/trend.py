"""Kernels of trends: functions of time that wander and do not come back."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_tsvgp.gaussian.state_space import StateSpace
from numpyro_tsvgp.kernels.distance import as_matrix
from numpyro_tsvgp.kernels.leaf import Leaf
from numpyro_tsvgp.kernels.state_space import IntegratedSpace
from numpyro_tsvgp.kernels.tree import Dims, pytree, static

__all__ = ["IntegratedBrownian"]


@pytree
class IntegratedBrownian(Leaf):
    r"""Kernel of functions whose slope is a random walk: cubic smoothing splines.

    .. math:: k(t, t') = \sigma^2 \left(\frac{s^3}{3} + \frac{s^2 |t - t'|}{2}\right), \quad
        s = \min(t, t') - t_0

    The function is zero before the origin :math:`t_0`, where it starts with slope zero, so choose
    one at or before the first time. A forecast goes on as a line. With an unknown level and slope
    at the start it is the trend of structural time series::

        IntegratedBrownian(0.1) + Constant(10.0) + Linear(variance=10.0)

    The prior variance grows with the cube of time: :math:`\sigma^2` in units of time is small.

    Args:
      variance: :math:`\sigma^2`, the variance that the slope gains in a unit of time, of shape
        ``batch``.
      origin: :math:`t_0`, of shape ``batch``.
      active_dims: the column of the inputs to use, if there are several.

    Examples:
      >>> from numpyro_tsvgp import kernels
      >>> kernels.IntegratedBrownian(6.0)([1.0, 2.0], [2.0]).tolist()
      [[5.0], [16.0]]

    References:
      G. Wahba, *Improper priors, spline smoothing and the problem of guarding against model
      errors in regression*, JRSS B, 1978.
    """

    variance: ArrayLike = 1.0
    origin: ArrayLike = 0.0
    active_dims: Dims = static(default=None)

    def _since(self, X: ArrayLike) -> Array:
        X = self._inputs(X)
        if X.shape[1] != 1:
            raise ValueError(
                f"IntegratedBrownian is a kernel of one input, the time, and got {X.shape[1]} "
                "columns: name the one to use, as in active_dims=0"
            )
        return jnp.maximum(X[:, 0] - jnp.asarray(self.origin)[..., None], 0.0)

    def diag(self, X: ArrayLike) -> Array:
        return jnp.asarray(self.variance)[..., None] * self._since(X) ** 3 / 3

    def scaled(self, X1: ArrayLike, X2: ArrayLike) -> tuple[ArrayLike, Array]:
        u, v = self._since(X1)[..., :, None], self._since(X2)[..., None, :]
        s = jnp.minimum(u, v)
        return self.variance, s**2 * (s / 3 + jnp.abs(u - v) / 2)

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        scale, matrix = self.scaled(X1, X2)
        return as_matrix(scale) * matrix

    def state_space(self) -> StateSpace:
        return IntegratedSpace(self.variance, self.origin)
