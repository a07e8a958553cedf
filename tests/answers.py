"""Posterior moments by other means than the library's: Gaussian algebra, grids and slice sampling.

NumPy and SciPy alone, in the original coordinates; nothing of the package is imported here.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import block_diag

JITTER = 1e-8  # relative to the mean of the diagonal, as the library has it in float64


class Moments(NamedTuple):
    """Mean and standard deviation of each of some numbers; None for one that has no spread."""

    mean: Any
    sd: Any


class Prior(NamedTuple):
    """Independent Gaussian vectors, by name: their covariances and means."""

    covariance: Mapping[str, np.ndarray]
    mean: Mapping[str, ArrayLike] = {}

    @property
    def blocks(self) -> dict[str, slice]:
        sizes = [len(K) for K in self.covariance.values()]
        ends = np.cumsum(sizes)
        starts = ends - sizes
        return {n: slice(a, b) for n, a, b in zip(self.covariance, starts, ends, strict=True)}

    def joint(self) -> tuple[np.ndarray, np.ndarray]:
        means = [
            np.broadcast_to(np.asarray(self.mean.get(name, 0.0), float), (len(K),))
            for name, K in self.covariance.items()
        ]
        return np.concatenate(means), block_diag(*self.covariance.values())


# ---- Gaussian likelihoods --------------------------------------------------------------------


def _noise_covariance(noise, size: int) -> np.ndarray:
    """From a covariance matrix, or from one standard deviation or one for each observation."""
    noise = np.asarray(noise, float)
    return noise if noise.ndim == 2 else np.diag(np.broadcast_to(noise**2, (size,)))


def gaussian(
    prior: Prior, y, noise, design: Mapping[str, np.ndarray] | None = None, *, factorised=False
) -> dict[str, Moments]:
    """The posterior of f given y = sum_k A_k f_k + noise, in closed form.

    Args:
      prior: prior of the vectors f_k.
      y: observations.
      noise: standard deviation of the noise, one for each observation, or a covariance matrix.
      design: the matrices A_k by name; identities by default.
      factorised: whether to give, instead of the marginals of the posterior, those of the Gaussian
        nearest to it (in KL(q || p)) under which the vectors are independent of one another. Its
        means are the same; the precision of a vector is the block of the posterior precision.
    """
    y = np.asarray(y, float)
    A = (
        np.hstack([np.eye(len(y)) for _ in prior.covariance])
        if design is None
        else np.hstack([design[name] for name in prior.covariance])
    )
    R = _noise_covariance(noise, len(y))
    mean, K = prior.joint()
    gain = np.linalg.solve(A @ K @ A.T + R, A @ K).T
    mean, covariance = mean + gain @ (y - A @ mean), K - gain @ A @ K
    out = {}
    for name, block in prior.blocks.items():
        S = covariance[block, block]
        if factorised:
            Kb, Ab = prior.covariance[name], A[:, block]
            S = Kb - Kb @ Ab.T @ np.linalg.solve(Ab @ Kb @ Ab.T + R, Ab @ Kb)
        out[name] = Moments(mean[block], np.sqrt(np.diag(S)))
    return out


def log_evidence(K, y, noise) -> float:
    """The log density of y under N(0, K + noise covariance)."""
    C = K + _noise_covariance(noise, len(y))
    L = np.linalg.cholesky(C)
    white = np.linalg.solve(L, y)
    return float(-0.5 * white @ white - np.log(np.diag(L)).sum() - 0.5 * len(y) * np.log(2 * np.pi))


# ---- a few numbers: grids --------------------------------------------------------------------


def on_grid(log_density: Callable[..., float], axes: Mapping[str, np.ndarray]):
    """Weights of the points of a grid, for a density in the coordinates of the grid.

    Returns:
      The points, ``(size, number of axes)``, and weights that sum to one. Points at the edge of the
      grid must not matter, or the grid is too small.
    """
    mesh = np.meshgrid(*axes.values(), indexing="ij")
    points = np.stack([m.ravel() for m in mesh], -1)
    values = np.array([log_density(**dict(zip(axes, p, strict=True))) for p in points])
    weights = np.exp(values - values.max())
    weights /= weights.sum()
    edge = np.any(
        [(p == a[0]) | (p == a[-1]) for p, a in zip(points.T, axes.values(), strict=True)], 0
    )
    assert weights[edge].sum() < 1e-3, "the grid cuts off part of the density"
    return points, weights


def weighted(values, weights) -> Moments:
    """Moments of values ``(size, ...)`` with weights ``(size,)``."""
    mean = np.tensordot(weights, values, 1)
    return Moments(mean, np.sqrt(np.tensordot(weights, (values - mean) ** 2, 1)))


def mixed(parts: list[dict[str, Moments]], weights) -> dict[str, Moments]:
    """Moments of a mixture of distributions whose moments are known."""
    out = {}
    for name in parts[0]:
        means = np.stack([p[name].mean for p in parts])
        variances = np.stack([p[name].sd ** 2 for p in parts])
        spread = weighted(means, weights)
        out[name] = Moments(
            spread.mean, np.sqrt(np.tensordot(weights, variances, 1) + spread.sd**2)
        )
    return out


# ---- other likelihoods: slice sampling -------------------------------------------------------


class Draws(NamedTuple):
    """Moments of Gaussian vectors given data, by Markov chains."""

    mean: np.ndarray
    covariance: np.ndarray
    error: float  # standard error of a mean in posterior standard deviations, the largest


def slice_sample(
    prior: Prior,
    log_likelihood: Callable[[dict[str, np.ndarray]], np.ndarray],
    *,
    chains: int = 200,
    steps: int = 3000,
    warmup: int = 1000,
    seed: int = 0,
) -> Draws:
    """Elliptical slice sampling of Gaussian vectors with any likelihood.

    It has no step size, and needs neither gradients nor a likelihood that is log-concave.

    Args:
      prior: prior of the vectors.
      log_likelihood: a function of values ``{name: (chains, n)}`` that gives ``(chains,)``.
      chains: number of independent chains, from draws of the prior.
      steps: steps of each chain that count.
      warmup: steps before them.
      seed: seed.

    References:
      I. Murray, R. P. Adams, D. J. C. MacKay, *Elliptical slice sampling*, AISTATS 2010.
    """
    rng = np.random.default_rng(seed)
    mean, K = prior.joint()
    L = np.linalg.cholesky(K + JITTER * np.diag(np.diag(K)))
    blocks = prior.blocks

    def score(f):
        return log_likelihood({name: mean[block] + f[:, block] for name, block in blocks.items()})

    def noise():
        return rng.standard_normal((chains, len(K))) @ L.T

    f = noise()
    current = score(f)
    sums, squares = np.zeros((chains, len(K))), np.zeros((len(K), len(K)))
    for step in range(warmup + steps):
        nu = noise()
        level = current - rng.exponential(size=chains)
        angle = rng.uniform(0.0, 2 * np.pi, chains)
        low, high = angle - 2 * np.pi, angle.copy()
        waiting = np.arange(chains)
        while len(waiting):
            a = angle[waiting, None]
            proposed = np.cos(a) * f[waiting] + np.sin(a) * nu[waiting]
            found = score(proposed)
            good = found > level[waiting]
            f[waiting[good]], current[waiting[good]] = proposed[good], found[good]
            waiting = waiting[~good]
            below = angle[waiting] < 0
            low[waiting[below]] = angle[waiting[below]]
            high[waiting[~below]] = angle[waiting[~below]]
            angle[waiting] = rng.uniform(low[waiting], high[waiting])
        if step >= warmup:
            sums += f
            squares += f.T @ f
    means = sums / steps
    centre = means.mean(0)
    covariance = squares / (steps * chains) - np.outer(centre, centre)
    error = means.std(0, ddof=1) / np.sqrt(chains) / np.sqrt(np.diag(covariance))
    return Draws(mean + centre, covariance, float(error.max()))
