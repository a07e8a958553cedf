r"""The bound of tied sites as an M-step differentiates it: prior left free, coordinates fixed.

The whitening is a choice of coordinates, and neither the posterior nor the bound depends on it.
Where an M-step differentiates the bound, :math:`L` is therefore a constant, and what carries the
derivative are the covariances themselves, :math:`K` of the inducing values and :math:`k_i` of them
with a function value. With :math:`S = B^{-1}` and

.. math::
  a = L^{-\top} \mu, \qquad A = (I - S) L^{-1}, \qquad p_i = A^\top w_i

the mean is :math:`a^\top k_i` and the variance :math:`k_{ii} - p_i^\top k_i`. Their values are
computed once, as constants; their derivatives are written out below. There is no derivative of a
Cholesky factor in them, and one product with all data points besides the two that give their
features and their variances. Only first derivatives are right, and others raise an exception.

Shapes are those of :mod:`numpyro_tsvgp.gaussian.features`. In formulas :math:`\mu` is the mean of
the whitened posterior and :math:`\mu_Z` the prior mean at the inducing inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian import whitened
from numpyro_tsvgp.gaussian.features import (
    Features,
    Prior,
    blocks,
    means_of,
    project,
    rounding,
    sum_columns,
)
from numpyro_tsvgp.gaussian.inducing_values import InducingAtData
from numpyro_tsvgp.gaussian.linalg import add_jitter, cholesky_and_inverse, differentiated_once
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.quadrature import Marginals
from numpyro_tsvgp.gaussian.whitened import Sums

__all__ = ["FreeAtData", "MovingAtData"]


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class FreeAtData(InducingAtData):
    """Tied sites at their training inputs, whose bound has cheap first derivatives.

    Attributes:
      kept: the tied sites.
      process: the prior at the training inputs.
      prior: the factorised prior of the inducing values, a constant.
      features: the features of the training inputs, constants but for the prior variance.
      cross: the covariances of data points and inducing values, which carry the derivative. They
        are kept in two factors, ``(k,)`` and ``(k, n, m)``, because the derivative in the first
        needs no sum over all of the second.
    """

    cross: tuple[Array, Array]

    @classmethod
    def of(cls, kept: Any, process: Process) -> Self:
        """An approximation by tied sites at the inputs of ``process``."""
        prior = Prior(*cholesky_and_inverse(lax.stop_gradient(_covariance(process, kept.inducing))))
        variance = process.kernel.diag(process.X)
        cross = process.kernel.scaled(process.X, kept.inducing)
        scale, matrix = lax.stop_gradient(cross)
        w = matrix @ (scale[:, None, None] * prior.inverse.mT)
        features = Features(w, variance, variance - (w**2).sum(-1))
        return cls(kept, process, prior, features, cross)

    def bound(self) -> tuple[Marginals, Array]:
        covariance = _covariance(self.process, self.kept.inducing)
        return self.free(self.start(), covariance, self.process.means, None)

    def fresh_bound(self, kept: Any) -> tuple[Marginals, Array]:
        covariance = _covariance(self.process, self.kept.inducing)
        # They are in the coordinates of this very prior.
        return self.free(Sums(kept.linear, kept.quadratic), covariance, self.process.means, None)

    def free(
        self, sums: Sums, covariance: Array, means: Array, departure: Array | None
    ) -> tuple[Marginals, Array]:
        r"""Marginals and divergence as functions of the prior, to be differentiated.

        They are those of :func:`~numpyro_tsvgp.gaussian.whitened.marginals` and
        :func:`~numpyro_tsvgp.gaussian.whitened.kl_divergence`. Sites are constant statements about
        f, so that

        .. math::
          \mathrm{d}m_i &= a^\top \mathrm{d}k_i - p_i^\top (\mathrm{d}K a + \mathrm{d}\mu_Z), \\
          \mathrm{d}v_i &= \mathrm{d}k_{ii} - 2 p_i^\top \mathrm{d}k_i
            + p_i^\top \mathrm{d}K p_i, \\
          \mathrm{d}\mathrm{KL} &= \tfrac12 \operatorname{tr}(A \, \mathrm{d}K A^\top)
            + \tfrac12 a^\top \mathrm{d}K a - \mu^\top A (\mathrm{d}K a + \mathrm{d}\mu_Z) .

        Where sites have just been made at inducing inputs that may now move, they stay statements
        about the function where it was. Then :math:`\mathrm{d}K` is the derivative in
        hyperparameters alone, and with the matrix :math:`D = K_{Z Z}` of which only the first
        argument moves, :math:`\mathrm{d}k_i` is to be read as
        :math:`\mathrm{d}k_i - \mathrm{d}D \, K^{-1} k_i`.

        Args:
          sums: the sums over sites in the coordinates of the prior.
          covariance: K, which carries the derivative.
          means: the prior mean at the inducing inputs.
          departure: D if the inducing inputs can move, else None.

        Returns:
          The marginals without the prior mean, and the divergence.
        """
        values, q = _posterior(*lax.stop_gradient((self, sums)))
        free = covariance, self.cross, self.features.variance, means, departure
        return _floored(_along(values, q, free), self.features)


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class MovingAtData(FreeAtData):
    """The same for inducing inputs that the optimizer moves."""

    def fresh_bound(self, kept: Any) -> tuple[Marginals, Array]:
        Z = self.kept.inducing
        still = lax.stop_gradient(Z)
        # Where the inputs begin to move, minus the departure is K_{Z0 Z} - K_{ZZ}: derivatives in
        # the second argument and in hyperparameters cancel.
        departure = lax.stop_gradient(self.process).kernel(Z, still)
        covariance = _covariance(self.process, still, variance_at=Z)
        here = self.process.means[..., Z.shape[0] :]
        return self.free(Sums(kept.linear, kept.quadratic), covariance, here, departure)

    def bound(self) -> tuple[Marginals, Array]:
        r"""The bound of sites that were made at other inducing inputs :math:`Z_0`.

        By :math:`T = L_0^{-1} K_{Z_0 Z} L^{-\top}` the sums :math:`(\xi_0, G_0)` become those of
        the current coordinates, and T has a derivative. With :math:`s_i = S w_i`,
        :math:`W = L_0^{-\top} G_0 T`, :math:`g = L_0^{-\top} (\xi_0 - G_0 T \mu)` and

        .. math::
          N = L^{-1} \mathrm{d}K L^{-\top}, \qquad
          X = \mathrm{d}K_{Z_0 Z} L^{-\top}, \qquad
          \Theta = W^\top X, \qquad
          h = X^\top g - \Theta \mu - N \mu - W^\top \mathrm{d}\mu_{Z_0}

        the derivatives are

        .. math::
          \mathrm{d}m_i &= a^\top \mathrm{d}k_i + s_i^\top h, \\
          \mathrm{d}v_i &= \mathrm{d}k_{ii} - 2 p_i^\top \mathrm{d}k_i + w_i^\top N w_i
            - s_i^\top (N + 2 \Theta) s_i, \\
          \mathrm{d}\mathrm{KL} &= \operatorname{tr}\big(S (N + \Theta) - \tfrac12 N
            - \tfrac12 S (N + 2 \Theta) S\big) + \tfrac12 \mu^\top N \mu + \mu^\top S h.
        """
        process, Z = self.process, self.kept.inducing
        still = lax.stop_gradient(self)
        made = still.kept
        move = made.transport(still.process, still.prior)
        values, q = _posterior(still, made.sums(still.process, still.prior))
        half = made.quadratic @ move
        left = made.about(still.process) - (half @ q.mu[..., None])[..., 0]
        carried = _Carried(made.inverse.mT @ half, _rows_times(left, made.inverse))
        # As jitter and noise of K belong to an inducing value and move with it, they are in the
        # derivative of the covariance with where it was, too.
        kernel = process.kernel
        cross = add_jitter(kernel(self.kept.anchor, Z), process.jitter, kernel.diag(Z))
        cross = cross + kernel.noise(Z)[..., None] * jnp.eye(Z.shape[0], dtype=cross.dtype)
        means = process.means[..., : Z.shape[0]]
        free = _covariance(process, Z), cross, self.cross, self.features.variance, means
        return _floored(_carried_along(values, (q, carried), free), self.features)


def _covariance(process: Process, Z: Array, variance_at: Array | None = None) -> Array:
    """The prior covariance at inducing inputs, with its jitter."""
    variance = process.kernel.diag(Z if variance_at is None else variance_at)
    return add_jitter(process.kernel(Z, Z), process.jitter, variance)


class _Values(NamedTuple):
    """What an M-step wants."""

    mean: Array  # (p, n)
    variance: Array  # (p, n)
    kl: Array


class _Posterior(NamedTuple):
    """The constants in the derivatives."""

    inverse: Array  # L^-1, (k, m, m)
    w: Array  # (k, n, m)
    mu: Array  # (p, m)
    S: Array  # (p, m, m)
    A: Array  # (p, m, m)
    P: Array  # the p_i, in blocks
    mean: Array  # a^T k_i, (p, n)
    explained: Array  # p_i^T k_i, (p, n)
    scale: Array  # (k, 1, 1), what multiplies the second factor of k_i


def _posterior(at_data: FreeAtData, sums: Sums) -> tuple[_Values, _Posterior]:
    """The values, and the constants in their derivatives."""
    prior, at = at_data.prior, at_data.features
    q = whitened.posterior(sums)
    S = q.inverse.mT @ q.inverse
    A = prior.inverse - S @ prior.inverse
    P = project(at.w, A.mT)
    mean = whitened.means(q, at)
    scale, matrix = at_data.cross
    explained = scale[:, None] * sum_columns(P * blocks(matrix), at.w)
    values = _Values(mean, at.variance - explained, whitened.kl_divergence(q))
    scale = scale[:, None, None]
    return values, _Posterior(prior.inverse, at.w, q.mean, S, A, P, mean, explained, scale)


def _along_scale(q: _Posterior, by_scale: Array) -> tuple[Array, Array]:
    """The derivatives of mean and explained variance in the first factor of all k_i."""
    relative = by_scale[:, None] / q.scale[:, 0]
    return relative * q.mean, relative * q.explained


def _rows_times(vectors: Array, matrix: Array) -> Array:
    """``M^T v`` of a vector for each latent function: ``(p, m)``."""
    return vectors @ matrix[0] if matrix.shape[0] == 1 else (vectors[:, None] @ matrix)[:, 0]


def _floored(values: _Values, at: Features) -> tuple[Marginals, Array]:
    return Marginals(values.mean, jnp.maximum(values.variance, rounding(at))), values.kl


# ---- derivatives where sites stay where they were made ---------------------------------------


@jax.custom_jvp
def _along(values: _Values, q: _Posterior, free: tuple[Any, ...]) -> _Values:
    """The values, with their derivatives."""
    del q, free
    return values


@_along.defjvp
def _along_jvp(primals: Any, tangents: Any) -> tuple[_Values, _Values]:
    q, _ = differentiated_once(primals[1:])
    inverse, w, mu, A, P = q.inverse, q.w, q.mu, q.A, q.P
    by_K, (by_scale, by_matrix), by_k_ii, by_means, by_departure = tangents[2]
    by_mean, by_explained = _along_scale(q, by_scale)
    by_k = q.scale * by_matrix
    if by_departure is not None:
        by_k = by_k - w @ (inverse @ by_departure.mT)
    a, b = _rows_times(mu, inverse), (mu[:, None] @ A)[:, 0]
    shared = by_K.shape[0] == 1
    matrix = by_K[0] if shared else by_K
    # Both derivatives from one array, so that in a gradient one product gives that of K.
    by_P = P @ matrix
    pulls = by_P * (a if shared else a[:, None]) + P * (by_means if shared else by_means[:, None])
    return primals[0], _Values(
        by_mean + means_of(a, by_k) - sum_columns(pulls, w),
        by_k_ii
        - 2.0 * (by_explained + sum_columns(P * blocks(by_k), w))
        + sum_columns(by_P * P, w),
        0.5 * jnp.sum((A @ matrix) * A)
        + jnp.sum((0.5 * a - b) * _rows_times(a, by_K))
        - jnp.sum(b * by_means),
    )


# ---- derivatives where sites are carried along as the inducing inputs move -------------------


class _Carried(NamedTuple):
    """The constants in the derivatives that come from carrying sites to new inducing inputs."""

    W: Array  # L_0^-T G_0 T, (p, m, m)
    g: Array  # L_0^-T (xi_0 - G_0 T mu), (p, m)


@jax.custom_jvp
def _carried_along(
    values: _Values, constants: tuple[_Posterior, _Carried], free: tuple[Any, ...]
) -> _Values:
    """The values, with their derivatives."""
    del constants, free
    return values


@_carried_along.defjvp
def _carried_along_jvp(primals: Any, tangents: Any) -> tuple[_Values, _Values]:
    (q, (W, g)), _ = differentiated_once(primals[1:])
    inverse, w, mu, S, P = q.inverse, q.w, q.mu, q.S, q.P
    by_K, by_cross, (by_scale, by_matrix), by_k_ii, by_means = tangents[2]
    by_mean, by_explained = _along_scale(q, by_scale)
    by_k = q.scale * by_matrix
    N = inverse @ by_K @ inverse.mT
    X = by_cross @ inverse.mT
    theta = W.mT @ X
    pull = _rows_times(g, X) - ((theta + N) @ mu[..., None])[..., 0]
    pull = pull - (W.mT @ by_means[..., None])[..., 0]
    by_S = S @ (N + 2.0 * theta) @ S
    s = (S @ mu[..., None])[..., 0]
    c = (S @ pull[..., None])[..., 0]
    half = 0.5 * jnp.eye(S.shape[-1], dtype=S.dtype)
    return primals[0], _Values(
        by_mean + means_of(_rows_times(mu, inverse), by_k) + means_of(c, w),
        by_k_ii
        - 2.0 * (by_explained + sum_columns(P * blocks(by_k), w))
        + sum_columns(project(w, N - by_S) * blocks(w), w),
        jnp.sum(S * theta)
        + jnp.sum((S - half) * N)
        - jnp.sum(half * by_S)
        + jnp.sum(mu * (0.5 * _rows_times(mu, N)) + s * pull),
    )
