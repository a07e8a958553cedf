"""The Gaussian process as a NumPyro distribution: the only new word in a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from numpyro.distributions import constraints, kl_divergence
from numpyro.distributions.batch_util import promote_batch_shape
from numpyro.distributions.util import validate_sample
from numpyro.util import is_prng_key

from numpyro_tsvgp.gaussian.linalg import add_jitter, cholesky, cholesky_and_inverse, full_precision
from numpyro_tsvgp.kernels import as_kernel

__all__ = ["GP", "ConstantMean", "as_inputs", "find_gp", "functions_shape", "is_masked"]


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
      X: inputs, shape ``(n, d)``, or ``(n,)`` for one dimension; data frames are taken as NumPy
        takes them.
      mean: the prior mean: None for zero, a number, an array that broadcasts to ``(n,)``, or a
        callable of ``X``.
      jitter: what is added to the diagonal of the covariance, relative to its mean; None for
        1e-8 in float64 and 1e-5 in float32.

    Attributes:
      mean_function: the prior mean as a function of inputs, of which it returns an array that
        broadcasts to ``(..., m)`` for ``m`` of them. It is the callable ``mean``, or a constant
        for None, a number and an array whose last axis has size 1; it is None if ``mean`` is an
        array with one entry for each row of ``X``, from which nothing is known elsewhere. Only a
        GP fresh from its constructor has it: in one that went through ``jax.jit`` it is None.

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
    pytree_aux_fields = ("_own_ndims",)

    # NumPyro collects fields in a set, whose order is another in each process. Programs would be,
    # too, and a cache of compiled ones would not find them.
    @classmethod
    def gather_pytree_data_fields(cls) -> tuple[str, ...]:
        return tuple(sorted(super().gather_pytree_data_fields()))

    @classmethod
    def gather_pytree_aux_fields(cls) -> tuple[str, ...]:
        return tuple(sorted(super().gather_pytree_aux_fields()))

    # Not a field of the pytree, as it may close over tracers: a GP rebuilt from one has this.
    mean_function: Callable[[Any], Any] | None = None

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
        one = jax.ShapeDtypeStruct((1, *self.X.shape[1:]), self.X.dtype)
        block = jax.eval_shape(lambda x: self.kernel(x, x), one)
        if block.shape[-2:] != (1, 1):
            raise ValueError(
                f"The kernel returned shape {block.shape} for one row of inputs; a kernel maps "
                "inputs of n1 and n2 rows to a covariance of shape (..., n1, n2)."
            )
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
        if callable(mean):
            self.mean_function = mean
        elif loc.ndim == 0 or loc.shape[-1] != n:
            self.mean_function = ConstantMean(loc)
        # Without the axes that `scan` and `vmap` put in front of every array.
        self._own_ndims = (self.X.ndim, len(batch_shape))
        super().__init__(batch_shape, (n,), validate_args=validate_args)

    @property
    def stacked(self) -> int:
        """How many axes ``scan`` or ``vmap`` have put in front of every array in here."""
        return self.X.ndim - self._own_ndims[0]

    @property
    @full_precision()
    def mean(self) -> Array:
        return jnp.broadcast_to(self._loc, self.batch_shape + self.event_shape)

    @property
    @full_precision()
    def variance(self) -> Array:
        variance = self._each(lambda kernel, X, loc, jitter: kernel.diag(X))
        return jnp.broadcast_to(variance, self.batch_shape + self.event_shape)

    @property
    @full_precision()
    def covariance_matrix(self) -> Array:
        """The prior covariance at ``X`` with its jitter, shape ``(..., n, n)``."""
        return self._each(lambda kernel, X, loc, jitter: add_jitter(kernel(X, X), jitter))

    @property
    @full_precision()
    def scale_tril(self) -> Array:
        """The Cholesky factor of :attr:`covariance_matrix`, shape ``(..., n, n)``."""
        return cholesky(self.covariance_matrix)

    @property
    @full_precision()
    def precision_matrix(self) -> Array:
        """The inverse of :attr:`covariance_matrix`, shape ``(..., n, n)``."""
        _, inverse = cholesky_and_inverse(self.covariance_matrix)
        return inverse.mT @ inverse

    @full_precision()
    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        assert is_prng_key(key)
        shape = sample_shape + self.batch_shape + self.event_shape
        return self.from_noise(jax.random.normal(key, shape, self.loc.dtype))

    @full_precision()
    def from_noise(self, noise: Array) -> Array:
        r"""Draws :math:`\mu + L \varepsilon` from standard normal numbers of shape ``(..., n)``."""
        return self._loc + _apply(self.scale_tril, noise)

    @validate_sample
    @full_precision()
    def log_prob(self, value: Array) -> Array:
        return _normal_log_prob(value - self._loc, *cholesky_and_inverse(self.covariance_matrix))

    @full_precision()
    def entropy(self) -> Array:
        n = self.event_shape[0]
        entropy = 0.5 * n * (1 + jnp.log(2 * jnp.pi)) + _half_log_det(self.scale_tril)
        return jnp.broadcast_to(entropy, self.batch_shape)

    @property
    def _loc(self) -> Array:
        """The mean in a shape that broadcasts to values of the GP, or of a stack of them."""
        if not self.stacked:
            return self.loc
        own = self.batch_shape[len(self.batch_shape) - self._own_ndims[1] :] + self.event_shape
        return self._each(lambda kernel, X, loc, jitter: jnp.broadcast_to(loc, own))

    def _each(self, function: Callable[..., Array]) -> Array:
        """``function(kernel, X, loc, jitter)``, or as many of them as the stack is high."""
        for _ in range(self.stacked):
            function = jax.vmap(function)
        return function(self.kernel, self.X, self.loc, self.jitter)


@promote_batch_shape.register(GP)
def _promote_gp(gp: GP) -> GP:
    # `scan` stacks the arrays of what it collects and then asks what batch that makes. NumPyro
    # answers by `arg_constraints`, which know nothing of kernels.
    promoted = copy.copy(gp)
    own = gp.batch_shape[len(gp.batch_shape) - gp._own_ndims[1] :]
    promoted._batch_shape = gp.X.shape[: gp.stacked] + own
    return promoted


@kl_divergence.register(GP, GP)
@full_precision()
def _kl_divergence(p: GP, q: GP) -> Array:
    r"""Kullback-Leibler divergence between two GPs at the same inputs, by ``kl_divergence``.

    .. math:: \tfrac12 \left( \operatorname{tr} K_q^{-1} K_p + \delta^\top K_q^{-1} \delta - n
        + \log |K_q| - \log |K_p| \right), \quad \delta = \mu_p - \mu_q

    Args:
      p: the GP whose values are averaged over.
      q: the other one.

    Returns:
      The divergences, of the shape that the batch shapes broadcast to.

    Raises:
      ValueError: if the inputs differ in shape.
    """

    def shape(gp: GP) -> tuple[int, int]:
        return gp.event_shape[0], gp.X.shape[-1] if gp._own_ndims[0] == 2 else 1

    if shape(p) != shape(q):
        raise ValueError(
            "The divergence of two GPs is that of their values at the same inputs, but these have "
            f"inputs of shapes {p.X.shape} and {q.X.shape}."
        )
    chol_p = p.scale_tril
    chol_q, inverse_q = cholesky_and_inverse(q.covariance_matrix)
    trace = ((inverse_q @ chol_p) ** 2).sum((-2, -1))
    distance = (_apply(inverse_q, p.mean - q.mean) ** 2).sum(-1)
    log_det = _half_log_det(chol_q) - _half_log_det(chol_p)
    divergence = 0.5 * (trace + distance - p.event_shape[0]) + log_det
    return jnp.broadcast_to(divergence, lax.broadcast_shapes(p.batch_shape, q.batch_shape))


@dataclass(frozen=True, eq=False)
class ConstantMean:
    """The mean function that is ``value``, of shape ``()`` or ``batch + (1,)``, at all inputs."""

    value: Array

    def __call__(self, Z: Any) -> Array:
        return jnp.broadcast_to(self.value, (*self.value.shape[:-1], len(Z)))


def as_inputs(X: Any) -> Array:
    """Inputs as a floating-point array of shape ``(n,)`` or ``(n, d)``."""
    if not isinstance(X, jax.Array) and hasattr(X, "__array__"):
        X = np.asarray(X)  # data frames and series, and what else NumPy understands
        if (
            X.dtype.kind in "OUS"
        ):  # strings, columns of several types, or with values that may be missing
            X = _as_numbers(X)
    X = jnp.asarray(X)
    if X.ndim not in (1, 2):
        raise ValueError(
            f"Inputs of a GP have shape (n, d) or (n,); got {X.shape}. Flatten the features of "
            "each data point into one row."
        )
    return X if jnp.issubdtype(X.dtype, jnp.floating) else X.astype(jnp.result_type(float))


def _as_numbers(X: np.ndarray) -> np.ndarray:
    try:
        return X.astype(float)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Inputs of a GP are numbers, but these have a value that is not one: {error}. Give "
            "categories numbers, and remove or impute rows with missing values."
        ) from error


_WRAPPERS = dist.ExpandedDistribution | dist.MaskedDistribution | dist.Independent


def find_gp(fn: Any) -> GP | None:
    """The :class:`GP` inside a distribution that plates and masks may have wrapped, or None."""
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    return fn if isinstance(fn, GP) else None


def functions_shape(fn: Any) -> tuple[int, ...]:
    """The shape of the batch of independent functions that one site draws.

    Plates, ``expand`` and batches of kernels or means make several functions of one GP, and
    ``to_event`` does not make one of several: it only adds up their densities. All axes but the
    last one, of the inputs, number functions.

    Args:
      fn: the distribution of a site, a :class:`GP` as :func:`find_gp` finds it.

    Returns:
      All axes of ``fn.shape()`` but the last. The ``sample_shape`` of ``numpyro.sample`` is not
      known here: whoever reads a message puts ``msg["kwargs"]["sample_shape"]`` in front.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp import GP, kernels
      >>> from numpyro_tsvgp.distributions import functions_shape
      >>> gp = GP(kernels.RBF(), jnp.linspace(0.0, 1.0, 5))
      >>> functions_shape(gp), functions_shape(gp.expand([2, 3]).to_event(1))
      ((), (2, 3))
    """
    return tuple(fn.shape()[:-1])


def is_masked(fn: Any) -> bool:
    """Whether a mask other than True is among what wraps a distribution.

    An array counts as one whatever is in it: inside of ``jax.jit`` its values are not known.

    Args:
      fn: the distribution of a site.

    Returns:
      Whether the density of some values is left out.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp import GP, kernels
      >>> from numpyro_tsvgp.distributions import is_masked
      >>> gp = GP(kernels.RBF(), jnp.linspace(0.0, 1.0, 5))
      >>> is_masked(gp.mask(True)), is_masked(gp.mask(False).expand([3]))
      (False, True)
    """
    while isinstance(fn, _WRAPPERS):
        if isinstance(fn, dist.MaskedDistribution) and fn._mask is not True:
            return True
        fn = fn.base_dist
    return False


def _apply(matrix: Array, vectors: Array) -> Array:
    """``matrix @ vector`` over trailing axes; one product when the matrix is shared."""
    if matrix.ndim == 2:
        return vectors @ matrix.T
    return jnp.einsum("...ij,...j->...i", matrix, vectors)


def _half_log_det(chol: Array) -> Array:
    return jnp.log(jnp.diagonal(chol, axis1=-2, axis2=-1)).sum(-1)


def _normal_log_prob(centred: Array, chol: Array, inverse: Array) -> Array:
    constant = 0.5 * centred.shape[-1] * jnp.log(2 * jnp.pi)
    return -0.5 * (_apply(inverse, centred) ** 2).sum(-1) - _half_log_det(chol) - constant
