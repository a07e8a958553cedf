"""Kernels by their spectral density."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_tsvgp.kernels.distance import centred
from numpyro_tsvgp.kernels.leaf import Leaf
from numpyro_tsvgp.kernels.spectral import Frequencies, Term, wide_normal
from numpyro_tsvgp.kernels.tree import Dims, pytree, static

__all__ = ["SpectralMixture"]


@pytree
class SpectralMixture(Leaf):
    r"""Stationary kernel whose spectral density is a mixture of Gaussians.

    .. math:: k(x, x') = \sum_q w_q \prod_d \exp\left(-2 \pi^2 s_{qd}^2 \tau_d^2\right)
        \cos(2 \pi \mu_{qd} \tau_d), \quad \tau = x - x'

    With enough components it comes close to any stationary kernel. The bound has many local optima
    in the frequencies: start them at peaks of a periodogram of the data, and compare starts.

    Args:
      weights: :math:`w`, variances of the components, of shape ``(Q,)`` or ``batch + (Q,)``.
      means: :math:`\mu`, their frequencies, of shape ``(Q, d)`` or ``batch + (Q, d)``; ``(Q,)``
        where inputs have one column.
      scales: :math:`s`, standard deviations of the frequencies, of such a shape too.
      active_dims: the columns of the inputs to use; all of them by default.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp import kernels
      >>> weights, means = jnp.array([1.0, 0.5]), jnp.array([0.0, 2.0])
      >>> kernel = kernels.SpectralMixture(weights, means, scales=0.1 * jnp.ones(2))
      >>> kernel.diag([0.0, 1.0]).tolist()
      [1.5, 1.5]

    References:
      Wilson and Adams, *Gaussian Process Kernels for Pattern Discovery and Extrapolation*, ICML
      2013.
    """

    variance = 1.0  # not a field: `weights` have it

    weights: ArrayLike
    means: ArrayLike
    scales: ArrayLike
    active_dims: Dims = static(default=None)

    def _components(self, d: int) -> tuple[Array, Array, Array]:
        """Weights ``batch + (Q,)``, means and scales ``batch + (Q, d)``."""
        weights = jnp.asarray(self.weights)
        count = weights.shape[-1] if weights.ndim else 0
        if not count:
            raise ValueError(
                "SpectralMixture: weights must have shape (Q,), one for each component"
            )
        found = []
        for name in ("means", "scales"):
            value = jnp.asarray(getattr(self, name))
            value = value[:, None] if value.ndim == 1 else value
            if value.ndim < 2 or value.shape[-2] != count or value.shape[-1] not in (1, d):
                raise ValueError(
                    f"SpectralMixture: {name} has shape {jnp.shape(getattr(self, name))}, but must "
                    f"have shape (Q, d) = ({count}, {d}) for {count} weights and inputs with {d} "
                    "columns"
                )
            found.append(jnp.broadcast_to(value, (*value.shape[:-1], d)))
        return weights, found[0], found[1]

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        seen = self._columns(columns)
        weights, means, scales = self._components(len(seen))

        def term(q: int) -> Term:
            # A product of cosines: each column has its frequency or the negative of it.
            def of(u: Array) -> tuple[Array, Array]:
                normal, importance = wide_normal(u[:, : len(seen)])
                signs = jnp.where(u[:, len(seen) :] < 0.5, -1.0, 1.0)
                found = signs * means[..., q, None, :] + normal * scales[..., q, None, :]
                every = jnp.zeros((*found.shape[:-1], columns), found.dtype)
                return every.at[..., seen].add(2.0 * math.pi * found), importance

            return Term(weights[..., q], (Frequencies(2 * len(seen), of),))

        return tuple(term(q) for q in range(weights.shape[-1]))

    def diag(self, X: ArrayLike) -> Array:
        X = self._inputs(X)
        weights, means, scales = self._components(X.shape[1])
        batch = jnp.broadcast_shapes(weights.shape[:-1], means.shape[:-2], scales.shape[:-2])
        return jnp.broadcast_to(weights.sum(-1)[..., None], (*batch, len(X)))

    def _correlation(self, A: Array, B: Array) -> Array:
        weights, means, scales = self._components(A.shape[1])
        A, B = centred(A, B)
        total: Array | float = 0.0
        for q in range(weights.shape[-1]):  # one matrix after the other: no array of (Q, d, n, n)
            component = weights[..., q, None, None]
            decay: Array | float = 0.0
            for i in range(A.shape[1]):
                turn = 2.0 * math.pi * (A[:, None, i] - B[None, :, i])
                component = component * jnp.cos(turn * means[..., q, i, None, None])
                decay = decay + jnp.square(turn * scales[..., q, i, None, None])
            total = total + component * jnp.exp(-0.5 * decay)
        assert not isinstance(total, float)
        return total
