"""Plain NumPy formulas for what the library computes, written without looking at how.

Everything is dense, in moments and in the original coordinates: no whitening, no shared factors,
no JAX. Tests compare the library with these.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.integrate import simpson

JITTER = 1e-8  # the library's default in float64, relative to the mean of the diagonal


def rbf(A, B, lengthscale=1.0, variance=1.0):
    """Squared-exponential covariances of the rows of A and B, shape (n1, n2)."""
    A, B = (np.asarray(x, float).reshape(len(x), -1) for x in (A, B))
    scaled = (A[:, None, :] - B[None, :, :]) / np.asarray(lengthscale)
    return np.asarray(variance) * np.exp(-0.5 * (scaled**2).sum(-1))


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
    linear, quadratic = (np.asarray(x) for x in dual)
    K = kernel(Z, Z)
    m = len(K)
    K = K + jitter * np.trace(K) / m * np.eye(m)
    S = np.linalg.solve(np.eye(m) + K @ quadratic, K)
    S = 0.5 * (S + S.T)
    mu = S @ linear
    A = np.linalg.solve(K, kernel(Z, X)).T
    covariance = kernel(X, X) - A @ K @ A.T + A @ S @ A.T
    kl = 0.5 * (
        np.trace(np.linalg.solve(K, S))
        + mu @ np.linalg.solve(K, mu)
        - m
        + np.linalg.slogdet(K)[1]
        - np.linalg.slogdet(S)[1]
    )
    return Posterior(mean + A @ mu, covariance, kl)


def gauss_hermite(log_prob: Callable, mean, variance, order=20) -> float:
    """Sum over points of E[log_prob(f)] by the rule that the library documents as its default."""
    x, w = np.polynomial.hermite.hermgauss(order)
    values = log_prob(mean + np.sqrt(2 * variance) * x[:, None])
    return float((w @ values).sum() / np.sqrt(np.pi))


def integral(log_prob: Callable, mean, variance) -> float:
    """The same expectation by Simpson's rule on a fine grid over 12 standard deviations."""
    z = np.linspace(-12, 12, 4001)
    values = log_prob(mean + np.sqrt(variance) * z[:, None])
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return float(simpson(values * density[:, None], x=z, axis=0).sum())


def normal_expectation(y, mean, variance, scale) -> float:
    """E[log N(y | f, scale^2)] in closed form, summed."""
    return float(
        np.sum(-0.5 * np.log(2 * np.pi * scale**2) - 0.5 * ((y - mean) ** 2 + variance) / scale**2)
    )
