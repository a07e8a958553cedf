r"""Tied sites: sums over the sites of all data points, of a size that does not depend on the data.

The dual parameters of the paper are :math:`\lambda_1 = L^{-\top} \xi` and
:math:`\Lambda_2 = L^{-\top} G L^{-1}`. They are statements about :math:`f(Z)`, and they are what
stays fixed when the hyperparameters move. Storing them would cost twice the condition number of
:math:`K` in accuracy, which single precision does not have. Tied sites are stored as
:math:`(\xi, G)` together with the :math:`L_0^{-1}` they were made with, and move to another prior
by :math:`T = L_0^{-1} L`, which is near the identity:

.. math:: \xi \leftarrow T^\top \xi, \qquad G \leftarrow T^\top G \, T.

**The mean.** The sums are in coordinates about the prior mean. As the sites are statements about f
itself, a mean that moves from :math:`\mu_0` to :math:`\mu` changes them by

.. math:: \xi \leftarrow \xi + G L_0^{-1} (\mu_0(Z) - \mu(Z)).

**Inducing inputs.** When they move from :math:`Z_0` to :math:`Z`, tied sites remain statements
about :math:`f(Z_0)`, which the new inducing values predict:
:math:`T = L_0^{-1} K_{Z_0 Z} L^{-\top}`. No singular value of it exceeds one, so sites fade as the
inputs move away. The same numbers attached to other inputs would not: in the directions that
neighbouring inputs nearly share, :math:`\Lambda_2` is a difference quotient, and a small move makes
it arbitrarily large.

Shapes are those of :mod:`numpyro_tsvgp.gaussian.features`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian.features import Features, Prior, features_at
from numpyro_tsvgp.gaussian.fixed_coordinates import FreeAtData, MovingAtData
from numpyro_tsvgp.gaussian.inducing_values import (
    InducingAtData,
    InducingValues,
    approximation,
)
from numpyro_tsvgp.gaussian.linalg import congruence
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.whitened import PointSites, Sums

__all__ = ["MovingTied", "Tied", "initial_tied"]


@approximation
class Tied(InducingValues):
    """Tied sites at inducing inputs that stay where they are.

    Attributes:
      inducing: inducing inputs, ``(m, d)`` or ``(m,)``.
      linear: the sum xi over sites, ``(p, m)``.
      quadratic: the sum G over sites, ``(p, m, m)``.
      inverse: the inverse factor of the prior in whose coordinates the sums are, ``(k, m, m)``.
      prior_mean: the prior mean at the inducing inputs that the sums are about.
    """

    inducing: Array
    linear: Array
    quadratic: Array
    inverse: Array
    prior_mean: Array

    optimized: ClassVar[frozenset[str]] = frozenset()

    @property
    def known_means(self) -> Array:
        return self.prior_mean

    def information(self, process: Process) -> Array:
        r"""How much the sites say against the prior: :math:`\sum_i \beta_i k(x_i, x_i)`,
        as far as inducing inputs see it."""
        del process
        return jnp.trace(self.quadratic, axis1=-2, axis2=-1).sum()

    def transport(self, process: Process, prior: Prior) -> Array:
        """The matrix T that takes the sums to the coordinates of ``prior``."""
        del process
        return self.inverse @ prior.chol

    def about(self, process: Process) -> Array:
        """The sum xi about the current prior mean, in the coordinates it was made in."""
        moved = self.prior_mean - process.means[..., : self.prior_mean.shape[-1]]
        moved = jnp.einsum("kij,kj->ki", *_same_functions(self.inverse, moved))
        moved = jnp.broadcast_to(moved, self.linear.shape)
        return self.linear + jnp.einsum("pij,pj->pi", self.quadratic, moved)

    def sums(self, process: Process, prior: Prior) -> Sums:
        move = self.transport(process, prior)
        rows = "kij,pi->pj" if move.shape[0] == 1 else "pij,pi->pj"
        xi = jnp.einsum(rows, move, self.about(process))
        return Sums(xi, congruence(self.quadratic, move))

    def remade(self, sums: Sums, process: Process, prior: Prior) -> Self:
        """Tied sites with sums in the coordinates of ``prior``."""
        return dataclasses.replace(
            self,
            linear=sums.xi,
            quadratic=sums.gram,
            inverse=prior.inverse,
            prior_mean=process.means,
        )

    def at_data(self, process: Process) -> InducingAtData:
        prior = self.prior(process)
        at = features_at(process, self.inducing, process.X, prior)
        return InducingAtData(self, process, prior, at)

    def at_data_for_gradient(self, process: Process) -> FreeAtData:
        return FreeAtData.of(self, process)

    def remains(self, carry: Sums, posterior: Any, taken: PointSites, at: Features) -> Array:
        return jnp.isfinite(posterior.mean).all() & carry.can_be_left(taken, at)

    def without_data(self) -> Self:
        zero = jnp.zeros_like(self.linear), jnp.zeros_like(self.quadratic)
        return dataclasses.replace(self, linear=zero[0], quadratic=zero[1])


@approximation
class MovingTied(Tied):
    """Tied sites at inducing inputs that the optimizer moves.

    Attributes:
      inducing: inducing inputs, ``(m, d)`` or ``(m,)``.
      linear: the sum xi over sites, ``(p, m)``.
      quadratic: the sum G over sites, ``(p, m, m)``.
      inverse: the inverse factor of the prior in whose coordinates the sums are, ``(k, m, m)``.
      prior_mean: the prior mean at ``anchor`` that the sums are about.
      anchor: the inducing inputs that the sites were made at.
    """

    anchor: Array

    optimized: ClassVar[frozenset[str]] = frozenset({"inducing"})

    @property
    def mean_inputs(self) -> Array:
        # Where the sites are, and where they will be after the next E-step.
        return jnp.concatenate([self.anchor, self.inducing])

    @property
    def known_means(self) -> Array:
        return jnp.concatenate([self.prior_mean, self.prior_mean], -1)

    def shift(self, process: Process, prior: Prior) -> Array:
        r""":math:`(K_{Z_0 Z} - K_{Z Z}) L^{-\top}`, which is zero while nothing has moved."""
        Z, kernel = self.inducing, process.kernel
        # A copy of Z: noise of a kernel, like jitter, belongs to an inducing value and moves with
        # it, so it must be in neither term.
        return (kernel(self.anchor, Z) - kernel(jnp.copy(Z), Z)) @ prior.inverse.mT

    def transport(self, process: Process, prior: Prior) -> Array:
        # Written so that it is exactly that of inputs that stay while nothing has moved.
        return self.inverse @ (prior.chol + self.shift(process, prior))

    def remade(self, sums: Sums, process: Process, prior: Prior) -> Self:
        new = super().remade(sums, process, prior)
        here = process.means[..., self.prior_mean.shape[-1] :]
        return dataclasses.replace(new, prior_mean=here, anchor=self.inducing)

    def process_there(self, process: Process, prior_mean: Array) -> Process:
        here = process.means[..., : self.prior_mean.shape[-1]]
        k = max(here.shape[0], prior_mean.shape[0])
        both = (jnp.broadcast_to(x, (k, x.shape[-1])) for x in (here, prior_mean))
        return dataclasses.replace(process, means=jnp.concatenate(list(both), -1))

    def at_data_for_gradient(self, process: Process) -> MovingAtData:
        return MovingAtData.of(self, process)


def _same_functions(matrices: Array, vectors: Array) -> tuple[Array, Array]:
    """Matrices and vectors with as many functions each."""
    k = max(matrices.shape[0], vectors.shape[0])
    return (
        jnp.broadcast_to(matrices, (k, *matrices.shape[1:])),
        jnp.broadcast_to(vectors, (k, *vectors.shape[1:])),
    )


def initial_tied(
    process: Process, inducing: Array, prior_mean: Array, *, moving: bool
) -> Tied | MovingTied:
    """Tied sites of zero, whose posterior is the prior.

    Args:
      process: the prior.
      inducing: inducing inputs.
      prior_mean: the prior mean there.
      moving: whether an optimizer will move the inducing inputs.

    Returns:
      The approximation.
    """
    p, m, dtype = process.functions, inducing.shape[0], process.loc.dtype
    k = process.kernel_axis(inducing)
    fields: dict[str, Any] = {  # of NumPy, which has nothing to compile
        "inducing": inducing,
        "linear": np.zeros((p, m), dtype),
        "quadratic": np.zeros((p, m, m), dtype),
        "inverse": np.broadcast_to(np.eye(m, dtype=dtype), (k, m, m)),
        "prior_mean": prior_mean,
    }
    return MovingTied(**fields, anchor=inducing) if moving else Tied(**fields)
