"""Dense formulas for what the library computes, written without looking at how.

Everything is in moments and in the original coordinates: no whitening, no shared factors. Tests
compare the library with these. Numbers are computed by NumPy; where an argument is an array of JAX,
so that a test can differentiate, by ``jax.numpy``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.integrate import simpson

JITTER = 1e-8  # the library's default in float64, relative to the mean of the diagonal


def _numpy(*values) -> Any:
    """NumPy, or that of JAX if one of the values is JAX's."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


# ---- priors ----------------------------------------------------------------------------------


def rbf(A, B, lengthscale=1.0, variance=1.0):
    """Squared-exponential covariances of the rows of A and B, shape (n1, n2)."""
    xp = _numpy(A, B, lengthscale, variance)
    A, B = (xp.asarray(x, float).reshape(len(x), -1) for x in (A, B))
    scaled = (A[:, None, :] - B[None, :, :]) / xp.asarray(lengthscale)
    return xp.asarray(variance) * xp.exp(-0.5 * (scaled**2).sum(-1))


def jittered(K, jitter=JITTER):
    """A covariance with jitter relative to the mean of its diagonal."""
    return K + jitter * _numpy(K).trace(K) / len(K) * np.eye(len(K))


# ---- Gaussian posteriors of the inducing values ----------------------------------------------


def moments_of_duals(dual, K):
    """Mean and covariance of q(u) about the prior mean: S^-1 = K^-1 + Lambda, S^-1 m = lambda."""
    xp = _numpy(K, *dual)
    linear, quadratic = (xp.asarray(x) for x in dual)
    S = xp.linalg.solve(np.eye(len(K)) + K @ quadratic, K)
    S = 0.5 * (S + S.T)
    return S @ linear, S


def marginals(m, S, K, Kzx, kxx):
    """Mean and variance of f(X), without its mean, under q(f) = int p(f | u) N(u; m, S) du."""
    A = _numpy(m, S, K, Kzx).linalg.solve(K, Kzx)
    return A.T @ m, kxx - (Kzx * A).sum(0) + (A * (S @ A)).sum(0)


def kl_divergence(m, S, K):
    """KL(N(m, S) || N(0, K))."""
    xp = _numpy(m, S, K)
    trace = xp.trace(xp.linalg.solve(K, S)) + m @ xp.linalg.solve(K, m)
    return 0.5 * (trace - len(m) + xp.linalg.slogdet(K)[1] - xp.linalg.slogdet(S)[1])


class Posterior(NamedTuple):
    mean: np.ndarray
    covariance: np.ndarray
    kl: float

    @property
    def variance(self):
        return np.diag(self.covariance)


def posterior(kernel: Callable, Z, X, dual, mean=0.0, jitter=JITTER) -> Posterior:
    """Moments of q(f(X)), and KL(q(u) || p(u)), from the dual parameters of one latent function.

    q(u) has covariance S = (K^-1 + Lambda)^-1 and mean S lambda (about the prior mean).
    """
    Z, X, dual = np.asarray(Z), np.asarray(X), [np.asarray(x) for x in dual]
    K = jittered(np.asarray(kernel(Z, Z)), jitter)
    mu, S = moments_of_duals(dual, K)
    A = np.linalg.solve(K, np.asarray(kernel(Z, X))).T
    covariance = np.asarray(kernel(X, X)) - A @ K @ A.T + A @ S @ A.T
    return Posterior(mean + A @ mu, covariance, kl_divergence(mu, S, K))


# ---- a Gaussian likelihood -------------------------------------------------------------------


def log_normal(y, covariance):
    """The log density of y under N(0, covariance)."""
    solved = y @ np.linalg.solve(covariance, y)
    return -0.5 * (solved + np.linalg.slogdet(covariance)[1] + len(y) * np.log(2 * np.pi))


def regression(K, k, kxx, y, noise):
    """Mean and variance of exact regression on y, from K of the data, k with new points."""
    C = K + noise**2 * np.eye(len(K))
    return k.T @ np.linalg.solve(C, y), kxx - (k * np.linalg.solve(C, k)).sum(0)


def normal_expectation(y, mean, variance, scale) -> float:
    """E[log N(y | f, scale^2)] in closed form, summed."""
    return float(
        np.sum(-0.5 * np.log(2 * np.pi * scale**2) - 0.5 * ((y - mean) ** 2 + variance) / scale**2)
    )


# ---- other likelihoods -----------------------------------------------------------------------


def hermite(order):
    """Nodes and weights for the standard normal, from the physicists' rule."""
    x, w = np.polynomial.hermite.hermgauss(order)
    return np.sqrt(2.0) * x, w / np.sqrt(np.pi)


def gauss_hermite(log_prob: Callable, mean, variance, order=20):
    """Sum over points of E[log_prob(f)] by the rule that the library documents as its default.

    The function gets values of shape (order, n).
    """
    x, w = hermite(order)
    values = log_prob(mean + _numpy(mean, variance).sqrt(variance) * x[:, None])
    return (w @ values).sum()


def integral(log_prob: Callable, mean, variance) -> float:
    """The same expectation by Simpson's rule on a fine grid over 12 standard deviations."""
    z = np.linspace(-12, 12, 4001)
    values = log_prob(mean + np.sqrt(variance) * z[:, None])
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return float(simpson(values * density[:, None], x=z, axis=0).sum())
