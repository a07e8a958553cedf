"""The Gaussian process as a NumPyro distribution: the only new word in a model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from numpyro.util import is_prng_key

from numpyro_tsvgp.kernels import as_kernel
from numpyro_tsvgp.linalg import add_jitter, cholesky, cholesky_and_inverse

__all__ = ["GP", "GPPosterior", "as_inputs", "find_gp"]


class GP(dist.Distribution):
    r"""The values of a Gaussian process at the rows of ``X``.

    .. math:: f \sim \mathcal{N}\big(\mu(X), \; k(X, X) + \epsilon I\big)

    The distribution is lazy: no covariance is built until it is sampled or scored. Under
    :class:`~numpyro_tsvgp.TSVGP` it never is, so ``X`` may have millions of rows. Under
    ``NUTS``, ``SVI`` with any autoguide and prior ``Predictive`` it is an ordinary multivariate
    normal.

    A plate around the site makes a batch of independent functions that share the kernel. A
    kernel whose hyperparameters carry a leading axis makes a batch with one kernel each.

    Args:
      kernel: a :mod:`numpyro_tsvgp.kernels` kernel, a ``tinygp`` kernel, or any callable of two
        input matrices that returns their covariance.
      X: inputs, shape ``(n, d)``, or ``(n,)`` for one dimension.
      mean: the prior mean: None for zero, a number, an array that broadcasts to ``(n,)``, or a
        callable of ``X``.
      jitter: what is added to the diagonal of the covariance, relative to its mean; None for
        1e-8 in float64 and 1e-5 in float32.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro
      >>> from numpyro_tsvgp import GP, kernels
      >>> X = jnp.linspace(0.0, 1.0, 5)
      >>> gp = GP(kernels.Matern52(0.3), X, mean=lambda x: 2.0 * x)
      >>> gp.event_shape
      (5,)
      >>> gp.sample(jax.random.key(0), (3,)).shape
      (3, 5)
      >>> def model(X):
      ...     with numpyro.plate("classes", 10):
      ...         return numpyro.sample("f", GP(kernels.RBF(0.3), X))
      >>> numpyro.handlers.seed(model, 0)(X).shape
      (10, 5)
    """

    support = constraints.real_vector
    pytree_data_fields = ("kernel", "X", "loc", "jitter")

    def __init__(
        self,
        kernel: Any,
        X: Any,
        mean: Any = None,
        *,
        jitter: Any = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = as_kernel(kernel)
        self.X = as_inputs(X)
        self.jitter = jitter
        n = self.X.shape[0]
        if n == 0:
            raise ValueError(f"The inputs X of a GP are empty: their shape is {self.X.shape}.")
        block = jax.eval_shape(lambda x: self.kernel(x, x), self.X[:1])
        if block.shape[-2:] != (1, 1):
            raise ValueError(
                f"The kernel returned shape {block.shape} for one row of inputs; a kernel maps "
                "inputs of n1 and n2 rows to a covariance of shape (..., n1, n2)."
            )
        # Sites act on the function without its mean, so the mean is needed at X alone and
        # there is nothing to keep lazy about it.
        loc = mean(self.X) if callable(mean) else mean
        loc = jnp.zeros((), block.dtype) if loc is None else jnp.asarray(loc)
        loc = loc.astype(jnp.result_type(loc, block.dtype))
        if loc.ndim and loc.shape[-1] not in (1, n):
            raise ValueError(
                f"The mean of the GP has shape {loc.shape}, which does not broadcast to the "
                f"{n} rows of X. Pass a number, an array of shape ({n},) or a callable of X "
                "that returns one."
            )
        batch_shape = lax.broadcast_shapes(block.shape[:-2], loc.shape[:-1])
        self.loc = loc
        super().__init__(batch_shape, (n,), validate_args=validate_args)

    @property
    def mean(self) -> Array:
        return jnp.broadcast_to(self.loc, self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Array:
        return jnp.broadcast_to(self.kernel.diag(self.X), self.batch_shape + self.event_shape)

    @property
    def covariance_matrix(self) -> Array:
        """The prior covariance at ``X`` with its jitter, shape ``(..., n, n)``."""
        return add_jitter(self.kernel(self.X, self.X), self.jitter)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        assert is_prng_key(key)
        shape = sample_shape + self.batch_shape + self.event_shape
        noise = jax.random.normal(key, shape, self.loc.dtype)
        chol = cholesky(self.covariance_matrix)
        return self.loc + _apply(chol, noise)

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        return _normal_log_prob(value - self.loc, *cholesky_and_inverse(self.covariance_matrix))


def as_inputs(X: Any) -> Array:
    """Inputs as a floating-point array of shape ``(n,)`` or ``(n, d)``."""
    X = jnp.asarray(X)
    if X.ndim not in (1, 2):
        raise ValueError(
            f"Inputs of a GP have shape (n, d) or (n,); got {X.shape}. Flatten the features of "
            "each data point into one row."
        )
    return X if jnp.issubdtype(X.dtype, jnp.floating) else X.astype(jnp.result_type(float))


def find_gp(fn: Any) -> GP | None:
    """The :class:`GP` inside a distribution that plates and masks may have wrapped, or None."""
    while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution | dist.Independent):
        fn = fn.base_dist
    return fn if isinstance(fn, GP) else None


def _apply(matrix: Array, vectors: Array) -> Array:
    """``matrix @ vector`` over trailing axes; one product when the matrix is shared."""
    if matrix.ndim == 2:
        return vectors @ matrix.T
    return jnp.einsum("...ij,...j->...i", matrix, vectors)


class GPPosterior(dist.Distribution):
    r"""The joint posterior of function values, as draws need it.

    .. math:: f = \mu + W s + R^{1/2} \varepsilon, \qquad s \sim \mathcal{N}(B^{-1}\xi, B^{-1})

    The inducing values :math:`s` are drawn in ``m`` dimensions; the residual covariance
    :math:`R = k(X, X) - W W^\top` does not depend on the sites, so latent functions that share a
    kernel share its factor, and it is made once for any number of draws.

    Args:
      loc: prior mean plus :math:`W B^{-1} \xi`, shape ``batch + (n,)``.
      w: whitened features, ``(n, m)`` or ``batch + (n, m)``.
      inverse: inverse of the Cholesky factor of B, shape ``batch + (m, m)``.
      residual_chol: Cholesky factor of R, ``(n, n)`` or ``batch + (n, n)``.
    """

    support = constraints.real_vector
    pytree_data_fields = ("loc", "w", "inverse", "residual_chol")

    def __init__(
        self,
        loc: Array,
        w: Array,
        inverse: Array,
        residual_chol: Array,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.loc, self.w, self.inverse, self.residual_chol = loc, w, inverse, residual_chol
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=validate_args)

    @property
    def mean(self) -> Array:
        return self.loc

    @property
    def variance(self) -> Array:
        residual = (self.residual_chol**2).sum(-1)
        return residual + ((self.w @ self.inverse.mT) ** 2).sum(-1)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        assert is_prng_key(key)
        key_s, key_r = jax.random.split(key)
        shape = sample_shape + self.batch_shape
        s = jax.random.normal(key_s, (*shape, self.inverse.shape[-1]), self.loc.dtype)
        r = jax.random.normal(key_r, shape + self.event_shape, self.loc.dtype)
        return self.from_noise(s, r)

    def from_noise(self, s: Array, r: Array) -> Array:
        """Draws from standard normal numbers of shape ``(..., m)`` and ``(..., n)``."""
        s = jnp.einsum("...ij,...i->...j", self.inverse, s)
        return self.loc + _apply(self.w, s) + _apply(self.residual_chol, r)

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        explained = self.w @ self.inverse.mT
        covariance = self.residual_chol @ self.residual_chol.mT + explained @ explained.mT
        return _normal_log_prob(value - self.loc, *cholesky_and_inverse(covariance))


def _normal_log_prob(centred: Array, chol: Array, inverse: Array) -> Array:
    half_log_det = jnp.log(jnp.diagonal(chol, axis1=-2, axis2=-1)).sum(-1)
    constant = 0.5 * centred.shape[-1] * jnp.log(2 * jnp.pi)
    return -0.5 * (_apply(inverse, centred) ** 2).sum(-1) - half_log_det - constant
