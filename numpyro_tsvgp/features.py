r"""What the kernel says: the prior at the inducing inputs, and features of the data points.

With :math:`L L^\top = K`, the prior covariance of the inducing values, their whitened values
:math:`v = L^{-1} u` are standard normal, and a data point has features
:math:`w_i = L^{-1} k_Z(x_i)`. Everything that inference does with data are products with them.

Shapes: ``p`` latent functions, ``m`` inducing inputs, ``n`` data points, and a leading kernel axis
``k`` that is 1 when the latent functions share a kernel and ``p`` when each has its own. Data
points are rows: products over them are fastest so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.linalg import add_jitter, cholesky_and_inverse

__all__ = [
    "Features",
    "Prior",
    "at",
    "at_inducing",
    "blocks",
    "means_of",
    "prior",
    "project",
    "rounding",
    "sum_columns",
    "sum_linear",
    "sum_quadratic",
]


class Prior(NamedTuple):
    """Cholesky factor of the prior at the inducing inputs and its inverse, ``(k, m, m)``.

    Where the factor is held, the covariance itself carries the derivative.
    """

    chol: Array
    inverse: Array
    covariance: Array | None = None


class Features(NamedTuple):
    """Whitened features ``(k, n, m)``, the prior variance and what they leave of it, ``(k, n)``.

    Where the factor of the prior is held, the covariances with the inducing values carry the
    derivative. They are kept in two factors, ``(k,)`` and ``(k, n, m)``, because the derivative in
    the first needs no sum over all of the second.
    """

    w: Array
    variance: Array
    residual: Array
    covariance: tuple[Array, Array] | None = None


def prior(
    kernel: Any, inducing: Array, jitter: Any = None, *, held: bool = False, departs: bool = False
) -> Prior:
    r"""Factorises the prior covariance at the inducing inputs, with its jitter.

    Args:
      kernel: a kernel of covariances with one leading axis, ``(k, ., .)``.
      inducing: inducing inputs, ``(m, d)`` or ``(m,)``.
      jitter: relative jitter, see :func:`numpyro_tsvgp.linalg.add_jitter`.
      held: whether the factor is a constant, as :mod:`numpyro_tsvgp.held` wants it.
      departs: whether the derivative in the inducing inputs is left to what holds the factor.

    Returns:
      The factor :math:`L` and its inverse, and the covariance if the factor is held.
    """
    if not held:
        return Prior(*cholesky_and_inverse(add_jitter(kernel(inducing, inducing), jitter)))
    variance = kernel.diag(inducing)
    if departs:
        inducing = lax.stop_gradient(inducing)
    covariance = add_jitter(kernel(inducing, inducing), jitter, variance)
    return Prior(*cholesky_and_inverse(lax.stop_gradient(covariance)), covariance)


def at(kernel: Any, inducing: Array, X: Array, prior: Prior) -> Features:
    r"""Whitened features :math:`w_i = L^{-1} k_Z(x_i)` and residuals :math:`k_{ii} - |w_i|^2`.

    Args:
      kernel: a kernel of covariances with one leading axis, ``(k, ., .)``.
      inducing: inducing inputs.
      X: inputs, ``(n, d)`` or ``(n,)``.
      prior: the factorised prior at ``inducing``.

    Returns:
      The features. A residual may round below zero; :func:`~numpyro_tsvgp.sites.marginals` takes
      care of it.
    """
    variance = kernel.diag(X)
    if prior.covariance is None:
        w = kernel(X, inducing) @ prior.inverse.mT
        return Features(w, variance, variance - (w**2).sum(-1))
    covariance = kernel.scaled(X, inducing)
    scale, matrix = lax.stop_gradient(covariance)
    w = matrix @ (scale[:, None, None] * prior.inverse.mT)
    return Features(w, variance, variance - (w**2).sum(-1), covariance)


def at_inducing(prior: Prior) -> Features:
    r"""Features at the inducing inputs themselves, :math:`w_i^\top = L_i`, which leave no residual.

    This is the case without inducing points: every data point is its own.
    """
    w = prior.chol
    return Features(w, (w**2).sum(-1), jnp.zeros(w.shape[:-1], w.dtype))


# Arrays with a row for each data point and a block of columns for each latent function are
# (n, p, m) where the functions share their features and (p, n, m) where they do not, because that
# is what a single large product gives.


def project(w: Array, matrices: Array) -> Array:
    """``M_p w_i`` for each latent function and data point: ``(n, p, m)`` or ``(p, n, m)``."""
    if w.shape[0] > 1:
        return w @ matrices.mT
    p, m, _ = matrices.shape
    return (w[0] @ matrices.reshape(p * m, m).T).reshape(-1, p, m)


def sum_columns(array: Array, w: Array) -> Array:
    """Sums over the columns of each block, by latent function: ``(p, n)``."""
    sums = array.sum(-1)
    return sums if w.shape[0] > 1 else sums.T


def blocks(w: Array) -> Array:
    """Features in the shape of such an array."""
    return w if w.shape[0] > 1 else w[0][:, None, :]


def _weights(values: Array, w: Array) -> Array:
    """Numbers ``(p, n)`` in the shape of such an array."""
    return (values if w.shape[0] > 1 else values.T)[..., None]


def sum_linear(w: Array, values: Array) -> Array:
    """``sum_i values_i w_i`` for each latent function: (p, m)."""
    if w.shape[0] == 1:
        return values @ w[0]
    return jnp.einsum("pnm,pn->pm", w, values)


def sum_quadratic(w: Array, values: Array) -> Array:
    """``sum_i values_i w_i w_i^T`` for each latent function: (p, m, m)."""
    weighted = blocks(w) * _weights(values, w)
    if w.shape[0] > 1:
        return weighted.mT @ w
    n, p, m = weighted.shape
    return (weighted.reshape(n, p * m).T @ w[0]).reshape(p, m, m)


def means_of(mean: Array, w: Array) -> Array:
    """``w_i^T mean_p`` for each latent function and data point: ``(p, n)``."""
    return (w[0] @ mean.T).T if w.shape[0] == 1 else jnp.einsum("pm,pnm->pn", mean, w)


def rounding(features: Features) -> Array:
    """The rounding error of the prior variance."""
    return jnp.finfo(features.w.dtype).eps * jnp.abs(features.variance)
