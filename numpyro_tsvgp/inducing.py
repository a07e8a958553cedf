"""Choosing inducing inputs.

Three ways, from the cheapest to the most informed: :func:`subset` draws rows of the data,
:func:`kmeans` spreads centres over them, and :func:`greedy` asks the kernel which rows matter.
"""

import functools
import math
import operator
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_tsvgp.kernels import Kernel, as_kernel
from numpyro_tsvgp.kernels.distance import squared_distance

# Rows that k-means++ looks at: more of them do not make better seeds, only slower ones.
_SEEDING_ROWS = 50_000
# Entries of the largest block of distances held in memory at once.
_BLOCK_ENTRIES = 2**22


def subset(key: Array, X: ArrayLike, m: int) -> Array:
    """Draws inducing inputs from the rows of the data, at random and without repetition.

    Rows that are equal to each other count as one, since two equal inducing inputs make a
    singular covariance matrix.

    Args:
      key: a random key.
      X: inputs of shape ``(n, d)`` or ``(n,)``.
      m: the number of inducing inputs.

    Returns:
      Inducing inputs of shape ``(m, d)``, or ``(m,)`` for inputs of shape ``(n,)``.

    Raises:
      ValueError: if there are fewer than ``m`` distinct rows.

    Examples:
      >>> import jax
      >>> from numpyro_tsvgp import inducing
      >>> Z = inducing.subset(jax.random.key(0), [1.0, 1.0, 1.0, 2.0, 3.0], 3)
      >>> sorted(Z.tolist())
      [1.0, 2.0, 3.0]
    """
    X, m = _checked(X, m)
    _, first = np.unique(np.asarray(X), axis=0, return_index=True)
    if len(first) < m:
        raise ValueError(f"m = {m} inducing inputs, but X has only {len(first)} distinct rows")
    return X[jax.random.choice(key, jnp.asarray(first), (m,), replace=False)]


def kmeans(key: Array, X: ArrayLike, m: int, num_iters: int = 20) -> Array:
    r"""Places inducing inputs at the centres of clusters of the data.

    .. math:: \min_{z_1, \dots, z_m} \sum_i \min_j |x_i - z_j|^2

    The centres are seeded by greedy k-means++ and moved by Lloyd's iterations until they rest.
    A centre that loses all of its points moves to the point farthest from its own centre.
    Memory is of order ``n d + m d`` and a block of fixed size. The distance is Euclidean: bring the
    inputs to comparable scales first, for instance by dividing them by the lengthscales.

    Args:
      key: a random key.
      X: inputs of shape ``(n, d)`` or ``(n,)``.
      m: the number of inducing inputs.
      num_iters: the largest number of Lloyd's iterations; with 0 the seeds are returned.

    Returns:
      Inducing inputs of shape ``(m, d)``, or ``(m,)`` for inputs of shape ``(n,)``.

    Examples:
      >>> import jax
      >>> from numpyro_tsvgp import inducing
      >>> Z = inducing.kmeans(jax.random.key(0), [0.0, 1.0, 10.0, 11.0, 20.0, 21.0], 3)
      >>> sorted(Z.tolist())
      [0.5, 10.5, 20.5]

    References:
      Arthur and Vassilvitskii, `k-means++: The Advantages of Careful Seeding
      <http://ilpubs.stanford.edu:8090/778/>`_, 2007.
    """
    X, m = _checked(X, m)
    rows = X[:, None] if X.ndim == 1 else X
    # Distances do not see a shift, but rounding does.
    centre = jnp.mean(rows, axis=0)
    rows = rows - centre
    key_rows, key_seeds = jax.random.split(key)
    sample, limit = rows, max(_SEEDING_ROWS, 5 * m)
    if len(rows) > limit:
        sample = rows[jax.random.choice(key_rows, len(rows), (limit,), replace=False)]
    seeds = _plus_plus(key_seeds, sample, m)
    Z = _lloyd(rows, seeds, num_iters, max(1, _BLOCK_ENTRIES // m)) + centre
    distinct = len(np.unique(np.asarray(Z), axis=0))
    if distinct < m:
        warnings.warn(
            f"kmeans found only {distinct} distinct centres for m = {m}: X repeats its rows. Equal "
            "inducing inputs make a singular covariance matrix; choose a smaller m.",
            stacklevel=2,
        )
    return Z[:, 0] if X.ndim == 1 else Z


def greedy(kernel: Any, X: ArrayLike, m: int) -> Array:
    r"""Chooses the rows of the data that a Gaussian process is least sure of, one after another.

    Each row chosen is the one with the largest variance conditional on the rows before it,

    .. math:: z_{j+1} = \arg\max_{x \in X}\; k(x, x) - k_Z(x)^\top K_{ZZ}^{-1} k_Z(x)

    This is a pivoted Cholesky factorisation of the covariance matrix, which needs its diagonal and
    m of its columns: time is of order ``n m^2`` and memory of order ``n m``. There is no
    randomness. The kernel's hyperparameters matter, so use it once they are about right, and leave
    :class:`~numpyro_tsvgp.kernels.White` out: noise is a variance that no inducing input explains.

    Args:
      kernel: what :func:`~numpyro_tsvgp.kernels.as_kernel` accepts, without batch axes.
      X: inputs of shape ``(n, d)`` or ``(n,)``.
      m: the number of inducing inputs.

    Returns:
      Inducing inputs of shape ``(m, d)``, or ``(m,)`` for inputs of shape ``(n,)``, in the order
      they were chosen. Fewer rows are returned, with a warning, if these already explain all of
      the variance to rounding error.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp import inducing, kernels
      >>> inducing.greedy(kernels.RBF(1.0), jnp.linspace(0.0, 4.0, 9), 3).tolist()
      [0.0, 4.0, 2.0]

    References:
      Burt, Rasmussen and van der Wilk, `Convergence of Sparse Variational Inference in Gaussian
      Processes Regression <https://jmlr.org/papers/v21/19-1015.html>`_, 2020.
    """
    X, m = _checked(X, m)
    kernel = as_kernel(kernel)
    batch = jax.eval_shape(kernel.diag, X).shape[:-1]
    if batch:
        raise ValueError(f"greedy takes one kernel, but this is a batch of shape {batch}")
    chosen, count = pivots(kernel, X, m)
    if count < m:
        warnings.warn(
            f"greedy found {count} inducing inputs instead of m = {m}: they explain the variance "
            "of all of the inputs to rounding error, and more would only make the covariance "
            "matrix singular.",
            stacklevel=2,
        )
    return X[chosen[: int(count)]]


def _checked(X: ArrayLike, m: int) -> tuple[Array, int]:
    X, m = jnp.asarray(X), operator.index(m)
    if X.ndim not in (1, 2):
        raise ValueError(f"X must have shape (n,) or (n, d), got {X.shape}")
    if not 1 <= m <= len(X):
        raise ValueError(f"m must be between 1 and the number of rows of X, {len(X)}, got {m}")
    X = X if jnp.issubdtype(X.dtype, jnp.floating) else X.astype(float)
    if not jnp.isfinite(X).all():
        raise ValueError("X has values that are not finite; remove or impute these rows")
    return X, m


@functools.partial(jax.jit, static_argnames="m")
def _plus_plus(key: Array, X: Array, m: int) -> Array:
    """Each seed is, of a few rows drawn by their squared distance, the one that helps the most."""
    trials = 2 + int(math.log(m))

    def add(j: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        Z, nearest = state
        total = jnp.cumsum(nearest)
        u = jax.random.uniform(jax.random.fold_in(key, j), (trials,), X.dtype)
        drawn = jnp.searchsorted(total, u * total[-1], side="right")
        tried = X[jnp.minimum(drawn, len(X) - 1)]
        distances = jnp.minimum(nearest[:, None], squared_distance(X, tried))
        best = jnp.argmin(jnp.sum(distances, axis=0))
        return Z.at[j].set(tried[best]), distances[:, best]

    first = X[jax.random.randint(key, (), 0, len(X))]
    Z = jnp.zeros((m, X.shape[1]), X.dtype).at[0].set(first)
    nearest = squared_distance(X, first[None])[:, 0]
    return lax.fori_loop(1, m, add, (Z, nearest))[0]


@functools.partial(jax.jit, static_argnames="block")
def _lloyd(X: Array, Z: Array, num_iters: int, block: int) -> Array:
    n, d = X.shape
    m = len(Z)
    block = min(block, n)
    padding = -n % block
    blocks = jnp.pad(X, ((0, padding), (0, 0))).reshape(-1, block, d)
    weights = jnp.pad(jnp.ones(n, X.dtype), (0, padding)).reshape(-1, block)

    def move(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, Z, _ = state

        def assign(
            sums: tuple[Array, Array], rows_and_weights: tuple[Array, Array]
        ) -> tuple[tuple[Array, Array], Array]:
            rows, weight = rows_and_weights
            distances = squared_distance(rows, Z)
            own = jnp.argmin(distances, axis=1)
            total = sums[0] + jax.ops.segment_sum(rows * weight[:, None], own, m)
            count = sums[1] + jax.ops.segment_sum(weight, own, m)
            return (total, count), jnp.min(distances, axis=1) * weight

        zeros = jnp.zeros((m, d), X.dtype), jnp.zeros(m, X.dtype)
        (total, count), distances = lax.scan(assign, zeros, (blocks, weights))
        empty = count == 0
        # The first empty cluster gets the farthest point, the second the next one, and so on.
        farthest = X[lax.top_k(distances.reshape(-1)[:n], m)[1]]
        spare = farthest[jnp.cumsum(empty) - 1]
        moved = jnp.where(empty[:, None], spare, total / jnp.maximum(count, 1)[:, None])
        return i + 1, moved, jnp.any(moved != Z)

    def going(state: tuple[Array, Array, Array]) -> Array:
        return (state[0] < num_iters) & state[2]

    return lax.while_loop(going, move, (jnp.array(0), Z, jnp.array(True)))[1]


@functools.partial(jax.jit, static_argnames="m")
def pivots(kernel: Kernel, X: Array, m: int) -> tuple[Array, Array]:
    """Rows that a pivoted Cholesky factorisation of ``kernel(X, X)`` chooses, one after another.

    Args:
      kernel: a kernel; of a batch of them, the mean.
      X: inputs.
      m: how many rows to choose.

    Returns:
      The rows, and how many of them have a pivot that is not zero up to rounding.
    """
    n = len(X)

    def mean(values: Array, tail: int) -> Array:
        return values.mean(tuple(range(values.ndim - tail)))

    variance = mean(kernel.diag(X), 1)
    # What m steps of rounding leave of a residual that is zero.
    floor = (10 + m) * jnp.finfo(variance.dtype).eps * jnp.max(variance)

    def going(state: tuple[Array, Array, Array, Array]) -> Array:
        j, _, _, residual = state
        return (j < m) & (jnp.max(residual) > floor)

    def choose(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        j, pivots, factor, residual = state
        p = jnp.argmax(residual)
        root = jnp.sqrt(residual[p])
        column = mean(kernel(X, lax.dynamic_slice_in_dim(X, p, 1)), 2)[:, 0]
        # Rows of the factor that are still to come are zero, so the product may include them.
        explained = jnp.matmul(factor[:, p], factor, precision=lax.Precision.HIGHEST)
        row = ((column - explained) / root).astype(variance.dtype)
        # A chosen row is out for good, whatever rounding says. It also has noise in common with
        # itself that `column`, between two sets of inputs, does not show.
        residual = jnp.maximum(residual - jnp.square(row), 0.0).at[p].set(0.0)
        return j + 1, pivots.at[j].set(p), factor.at[j].set(row.at[p].set(root)), residual

    empty = jnp.zeros(m, int), jnp.zeros((m, n), variance.dtype)
    count, pivots, _, _ = lax.while_loop(going, choose, (jnp.array(0), *empty, variance))
    return pivots, count
