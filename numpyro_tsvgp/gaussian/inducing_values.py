r"""What approximations by the values of f at inducing inputs have in common.

.. math:: q(f) = \int p(f \mid u) \, q(u) \, \mathrm{d}u

Such an approximation says what q(u) is, as a whitened posterior. Marginals, draws and divergences
at any inputs follow from that here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.gaussian import whitened
from numpyro_tsvgp.gaussian.approximation import Approximation, Local, Noise
from numpyro_tsvgp.gaussian.features import Features, Prior, features_at, means_of, prior_at
from numpyro_tsvgp.gaussian.linalg import (
    add_jitter,
    cholesky_and_inverse,
    cholesky_of_residual,
    congruence,
    default_jitter,
    full_precision,
)
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.quadrature import Marginals
from numpyro_tsvgp.gaussian.rows import map_rows
from numpyro_tsvgp.gaussian.whitened import PointSites, Posterior, Sums

_T = TypeVar("_T")

__all__ = [
    "NOT_THERE",
    "InducingAtData",
    "InducingJoint",
    "InducingReady",
    "InducingValues",
    "approximation",
    "local_of",
]

NOT_THERE = (
    "These data points are not in the fit, so they cannot be taken out: without them less than "
    "nothing would be left of what it has seen there. Pass rows that it was fitted to or "
    "conditioned on."
)
NOT_LEFT = (
    f"{NOT_THERE} If these are such rows, other data came after them, and what they contributed "
    "can no longer be told from the posterior alone. Give the fit all of its data, and the sites "
    "of the remaining ones are made anew: fit.with_data(X, y).without(X_old, y_old)."
)


@dataclass_transform(frozen_default=True, eq_default=False)
def approximation(cls: type[_T]) -> type[_T]:
    """Makes a class a frozen dataclass of arrays and a pytree."""
    return jax.tree_util.register_dataclass(dataclass(frozen=True, eq=False)(cls))


def local_of(q: Posterior, at: Features) -> Local:
    """The posterior at data points with given features."""
    mean, variance = whitened.marginals(q, at)
    return Local(mean, variance, jnp.minimum(whitened.explained_variance(q, at), variance))


class InducingJoint(NamedTuple):
    r"""The joint posterior of function values, as draws need it.

    .. math:: f = \mu + W s + R^{1/2} \varepsilon, \qquad s \sim \mathcal{N}(B^{-1}\xi, B^{-1})

    The inducing values :math:`s` are drawn in ``m`` dimensions; the residual covariance
    :math:`R = k(X, X) - W W^\top` does not depend on the data, so latent functions that share a
    kernel share its factor, and it is made once for any number of draws.

    Attributes:
      mean: prior mean plus :math:`W B^{-1} \xi`, shape ``(p, n)``.
      w: whitened features, ``(k, n, m)``.
      inverse: inverse of the Cholesky factor of B, shape ``(p, m, m)``.
      residual_chol: Cholesky factor of R, ``(k, n, n)``.
    """

    mean: Array
    w: Array
    inverse: Array
    residual_chol: Array

    @property
    def variance(self) -> Array:
        return (self.residual_chol**2).sum(-1) + ((self.w @ self.inverse.mT) ** 2).sum(-1)

    def noise_shape(self) -> Noise:
        p, n = self.mean.shape
        return Noise((p, self.inverse.shape[-1]), (p, n))

    def draw(self, noise: Noise) -> Array:
        s = jnp.einsum("pij,...pi->...pj", self.inverse, noise.inner)
        return self.mean + _apply(self.w, s) + _apply(self.residual_chol, noise.rest)

    def log_prob(self, values: Array) -> Array:
        explained = self.w @ self.inverse.mT
        covariance = self.residual_chol @ self.residual_chol.mT + explained @ explained.mT
        chol, inverse = cholesky_and_inverse(covariance)
        half_log_det = jnp.log(jnp.diagonal(chol, axis1=-2, axis2=-1)).sum(-1)
        constant = 0.5 * values.shape[-1] * math.log(2 * math.pi)
        z = _apply(inverse, values - self.mean)
        return -0.5 * (z**2).sum(-1) - half_log_det - constant


@approximation
class InducingReady:
    r"""A posterior by inducing values, ready to predict at any inputs.

    A mean is :math:`k(x, Z) \, L^{-\top} B^{-1} \xi`, m products; a variance takes the products
    of two triangular matrices with a vector.

    Attributes:
      inducing: inducing inputs Z, ``(m, d)`` or ``(m,)``.
      prior: the factorised prior there.
      posterior: the whitened posterior of the inducing values.
      mean_weights: weights of the kernel in the posterior mean, ``(p, m)``.
      jitter: what the prior covariance has on its diagonal beyond the kernel, ``(k,)``.
    """

    inducing: Array
    prior: Prior
    posterior: Posterior
    mean_weights: Array
    jitter: Array

    def marginals(self, process: Process) -> Local:
        def at(X: Array) -> Local:
            return local_of(self.posterior, features_at(process, self.inducing, X, self.prior))

        return map_rows(at, process.X, numbers_per_row=math.prod(self.mean_weights.shape))

    def means(self, process: Process) -> Array:
        def at(X: Array) -> Array:
            return means_of(self.mean_weights, process.kernel(X, self.inducing))

        return map_rows(at, process.X, numbers_per_row=math.prod(self.mean_weights.shape))

    def weights(self, noise: Noise, values: Array) -> Array:
        drawn = jnp.einsum("pij,...pi->...pj", self.posterior.inverse, noise.inner)
        # Where inputs are near each other, differences of values are as small as the jitter, and
        # extrapolation sees them enlarged.
        values = values + jnp.sqrt(self.jitter)[:, None] * noise.rest
        whitened_values = self.posterior.mean + drawn - _apply(self.prior.inverse, values)
        return _apply(self.prior.inverse.mT, whitened_values)


def _apply(matrices: Array, vectors: Array) -> Array:
    """``matrix @ vector`` for each function; one product when they share the matrix."""
    if matrices.shape[0] == 1:
        return vectors @ matrices[0].T
    return jnp.einsum("pij,...pj->...pi", matrices, vectors)


class InducingValues:
    """Base of approximations by inducing values; a subclass says what q(u) is."""

    inducing: Array
    optimized: ClassVar[frozenset[str]] = frozenset({"inducing"})
    keeps_sums: ClassVar[bool] = True
    keeps_points: ClassVar[bool] = False
    follows_inputs: ClassVar[bool] = False

    def prior(self, process: Process) -> Prior:
        """The prior of the inducing values."""
        return prior_at(process, self.inducing)

    def sums(self, process: Process, prior: Prior) -> Sums:
        """The sums over sites that give q(u), in the coordinates of ``prior``."""
        raise NotImplementedError

    def posterior(self, process: Process, prior: Prior) -> Posterior:
        """The whitened posterior of the inducing values."""
        return whitened.posterior(self.sums(process, prior))

    def at_data(self, process: Process) -> Any:
        """At the training inputs; see :class:`~numpyro_tsvgp.gaussian.approximation.AtData`."""
        raise NotImplementedError

    def at_data_for_gradient(self, process: Process) -> Any:
        return self.at_data(process)

    def at_new_data(self, process: Process) -> Any:
        return self.at_data(process)  # sums over sites do not know which data they are of

    def without_points(self, process: Process, sites: PointSites) -> Self:
        kept, remains = _without(self, process, sites)
        if not remains:
            raise ValueError(NOT_LEFT)
        return kept

    def remains(self, carry: Any, posterior: Any, taken: PointSites, at: Any) -> Array:
        """Whether what is left without some points can be the sum of other points' sites."""
        del carry, taken, at
        return jnp.isfinite(posterior.mean).all()

    def with_inducing(self, process: Process, inducing: Array, prior_mean: Array) -> Self:
        old, new = self.prior(process), prior_at(process, inducing)
        move = _transport(process, self.inducing, inducing, old, new)
        xi, gram = self.sums(process, old)
        rows = "kij,pi->pj" if move.shape[0] == 1 else "pij,pi->pj"
        sums = Sums(jnp.einsum(rows, move, xi), congruence(gram, move))
        there = dataclasses.replace(self, inducing=inducing)  # type: ignore[type-var]
        return there.remade(sums, self.process_there(process, prior_mean), new)

    def process_there(self, process: Process, prior_mean: Array) -> Process:
        """The prior with its mean at other inducing inputs, as :meth:`remade` wants it."""
        return dataclasses.replace(process, means=prior_mean)

    def remade(self, carry: Any, process: Process, prior: Prior) -> Self:
        """The approximation that a carry in the coordinates of ``prior`` stands for."""
        raise NotImplementedError

    def covariance(self, one: Process, other: Process) -> Array:
        prior = self.prior(one)
        q = self.posterior(one, prior)

        def root(process: Process) -> Array:
            return features_at(process, self.inducing, process.X, prior).w @ q.inverse.mT

        return root(one) @ root(other).mT

    def synced(self, process: Process) -> Self:
        del process  # nothing is kept that moves with hyperparameters
        return self

    @property
    def mean_inputs(self) -> Array:
        return self.inducing

    @property
    def largest_factor(self) -> int:
        return self.inducing.shape[0]

    @property
    def input_columns(self) -> int:
        return 1 if self.inducing.ndim == 1 else self.inducing.shape[1]

    def ready(self, process: Process) -> InducingReady:
        prior = self.prior(process)
        q = self.posterior(process, prior)
        weights = _apply(prior.inverse.mT, q.mean)
        variance = process.kernel.diag(self.inducing).mean(-1)
        jitter = default_jitter(variance.dtype) if process.jitter is None else process.jitter
        return InducingReady(self.inducing, prior, q, weights, jitter * variance)

    def marginals(self, process: Process) -> Local:
        return self.ready(process).marginals(process)

    def marginals_at_data(self, process: Process) -> Local:
        return self.marginals(process)

    def kl(self, process: Process) -> Array:
        return whitened.kl_divergence(self.posterior(process, self.prior(process)))

    def joint(self, process: Process) -> InducingJoint:
        prior = self.prior(process)
        q = self.posterior(process, prior)
        X, kernel = process.X, process.kernel
        at = features_at(process, self.inducing, X, prior)
        residual = kernel(X, X) - at.w @ at.w.mT
        chol = cholesky_of_residual(residual, kernel.diag(X).mean(-1), process.jitter)
        return InducingJoint(process.loc + whitened.means(q, at), at.w, q.inverse, chol)

    def joint_factor(self, process: Process) -> int:
        return process.rows

    def noise_shape(self, process: Process) -> Noise:
        p = process.functions
        return Noise((p, self.inducing.shape[0]), (p, process.rows))

    def draw_marginally(self, process: Process, noise: Noise) -> Array:
        prior = self.prior(process)
        q = self.posterior(process, prior)
        s = q.mean + jnp.einsum("pij,...pi->...pj", q.inverse, noise.inner)

        def at(X: Array, rest: Array) -> Array:
            w, _, residual = features_at(process, self.inducing, X, prior)
            w = jnp.broadcast_to(w, (process.functions, *w.shape[1:]))
            return (
                jnp.einsum("...pm,pnm->...pn", s, w) + jnp.sqrt(jnp.maximum(residual, 0.0)) * rest
            )

        per_row = math.prod(q.mean.shape) + math.prod(s.shape)
        return process.loc + map_rows(at, process.X, noise.rest, numbers_per_row=per_row)

    def log_ratio(self, process: Process, noise: Noise) -> Array:
        q = self.posterior(process, self.prior(process))
        s = q.mean + jnp.einsum("pij,...pi->...pj", q.inverse, noise.inner)
        squares = (noise.inner**2).sum((-2, -1)) - (s**2).sum((-2, -1))
        return 0.5 * squares - q.half_log_det.sum()

    def factors(self, process: Process) -> Any:
        prior = self.prior(process)
        return prior, self.posterior(process, prior)

    def dual_parameters(self, process: Process) -> tuple[Array, Array]:
        r"""The dual parameters :math:`L^{-\top}\xi` and :math:`L^{-\top}GL^{-1}`.

        Returns:
          Arrays of shape ``batch + (m,)`` and ``batch + (m, m)``.
        """
        prior = self.prior(process)
        xi, gram = self.sums(process, prior)
        m, batch = xi.shape[-1], process.batch_shape
        lambda_1 = jnp.einsum("...ij,...i->...j", prior.inverse, xi)
        lambda_2 = prior.inverse.mT @ gram @ prior.inverse
        return lambda_1.reshape(*batch, m), lambda_2.reshape(*batch, m, m)

    def responses(self, process: Process) -> Array:
        r"""How the mean of the inducing values answers to each data point.

        Returns:
          The vectors :math:`S a_i` for the inputs of ``process``, shape ``(p, n, m)``.
        """
        prior = self.prior(process)
        q = self.posterior(process, prior)
        w = features_at(process, self.inducing, process.X, prior).w
        return w @ (prior.chol @ q.inverse.mT @ q.inverse).mT


@jax.jit
@full_precision()
def _without(kept: Any, process: Process, sites: PointSites) -> tuple[Any, Array]:
    """An approximation without points, and whether what is left makes sense."""
    at = kept.at_new_data(process)
    taken = PointSites(-sites.linear, -sites.quadratic)
    carry = at.start().add(taken, at.features)
    remains = kept.remains(carry, at.posterior(carry), sites, at.features)
    return at.keep(carry), remains


def _transport(process: Process, Z0: Array, Z: Array, old: Prior, new: Prior) -> Array:
    r"""The matrix :math:`T = L_0^{-1} K_{Z_0 Z} L^{-\top}`, shape ``(k, m0, m)``.

    Jitter and noise of the kernel belong to an inducing value. One that stays where it is keeps
    them, so that nothing is lost where all of the old inducing inputs are among the new.
    """
    kernel = process.kernel
    rows = (Z0[:, None], Z[:, None]) if Z.ndim == 1 else (Z0, Z)
    same = (rows[0][:, None, :] == rows[1][None, :, :]).all(-1)
    whole = add_jitter(kernel(Z, Z), process.jitter)
    cross = kernel(jnp.copy(Z0), Z)
    cross = jnp.where(same.any(-1)[:, None], same.astype(whole.dtype) @ whole, cross)
    return old.inverse @ cross @ new.inverse.mT


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class InducingAtData:
    """An approximation by inducing values at its training inputs.

    Attributes:
      kept: the approximation.
      process: the prior at the training inputs.
      prior: the factorised prior of the inducing values.
      features: the features of the training inputs.
    """

    kept: Any
    process: Process
    prior: Any
    features: Any

    def start(self) -> Any:
        return self.kept.sums(self.process, self.prior)

    def posterior(self, carry: Any) -> Posterior:
        return whitened.posterior(carry)

    def local(self, posterior: Posterior) -> Local:
        return local_of(posterior, self.features)

    def point_sites(self, carry: Any) -> PointSites | None:
        del carry  # sums do not tell
        return None

    def divergence(self, posterior: Posterior) -> Array:
        return whitened.kl_divergence(posterior)

    def count_floored(self, posterior: Posterior) -> Array:
        return whitened.count_floored(posterior, self.features)

    def keep(self, carry: Any) -> Approximation:
        return self.kept.remade(carry, self.process, self.prior)

    def bound(self) -> tuple[Marginals, Array]:
        return self.fresh_bound(self.kept)

    def fresh_bound(self, kept: Any) -> tuple[Marginals, Array]:
        q = kept.posterior(self.process, self.prior)
        return whitened.marginals(q, self.features), whitened.kl_divergence(q)
