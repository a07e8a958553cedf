r"""What the kernel says: the prior at the inducing inputs, and features of the data points.

With :math:`L L^\top = K`, the prior covariance of the inducing values, their whitened values
:math:`v = L^{-1} u` are standard normal, and a data point has features
:math:`w_i = L^{-1} k_Z(x_i)`. Everything that inference does with data are products with them.

Shapes: ``p`` latent functions, ``m`` inducing inputs, ``n`` data points, and a leading kernel axis
``k`` that is 1 when the latent functions share a kernel and ``p`` when each has its own. Data
points are rows: products over them are fastest so.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.gaussian.linalg import add_jitter, cholesky_and_inverse
from numpyro_tsvgp.gaussian.process import Process

__all__ = [
    "Features",
    "Prior",
    "at_inducing",
    "blocks",
    "features_at",
    "means_of",
    "prior_at",
    "project",
    "rounding",
    "sum_columns",
    "sum_linear",
    "sum_quadratic",
]


class Prior(NamedTuple):
    """Cholesky factor of the prior at the inducing inputs and its inverse, ``(k, m, m)``."""

    chol: Array
    inverse: Array


class Features(NamedTuple):
    """Whitened features ``(k, n, m)``, the prior variance and what they leave of it, ``(k, n)``."""

    w: Array
    variance: Array
    residual: Array


def prior_at(process: Process, inducing: Array) -> Prior:
    """Factorises the prior covariance at the inducing inputs, with its jitter.

    Args:
      process: the prior of a GP.
      inducing: inducing inputs, ``(m, d)`` or ``(m,)``.

    Returns:
      The factor :math:`L` and its inverse.
    """
    covariance = process.kernel(inducing, inducing)
    return Prior(*cholesky_and_inverse(add_jitter(covariance, process.jitter)))


def features_at(process: Process, inducing: Array, X: Array, prior: Prior) -> Features:
    r"""Whitened features :math:`w_i = L^{-1} k_Z(x_i)` and residuals :math:`k_{ii} - |w_i|^2`.

    Args:
      process: the prior of a GP.
      inducing: inducing inputs.
      X: inputs, ``(n, d)`` or ``(n,)``.
      prior: the factorised prior at ``inducing``.

    Returns:
      The features. A residual may round below zero;
      :func:`~numpyro_tsvgp.gaussian.whitened.marginals` takes care of it.
    """
    variance = process.kernel.diag(X)
    w = process.kernel(X, inducing) @ prior.inverse.mT
    return Features(w, variance, variance - (w**2).sum(-1))


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
