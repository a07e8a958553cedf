"""Kernels of inputs that name things: groups, and outputs that are correlated."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_tsvgp.kernels.base import Constant
from numpyro_tsvgp.kernels.distance import inner, pair
from numpyro_tsvgp.kernels.leaf import Leaf
from numpyro_tsvgp.kernels.spectral import Term
from numpyro_tsvgp.kernels.tree import Dims, pytree, static

__all__ = ["Categorical", "Coregion", "Group"]


@pytree
class Group(Leaf):
    r"""Kernel of independent effects of groups: inputs covary if they are equal, and only then.

    .. math:: k(x, x') = \sigma^2 \, [x = x']

    The inputs are names of groups, as numbers; with several columns all of them must be equal.
    Unlike :class:`White` this is a function of the values: two data points of one group share its
    effect, and so do data and predictions.

    Random effects of ``G`` groups are a GP at the names of the groups, and ``b[g]`` in the
    likelihood for data with names ``g``::

        b = numpyro.sample("b", GP(tau**2 * kernels.Group(), jnp.arange(G)))

    Products with other kernels vary by group: for inputs with the columns ``(group, x)``,
    ``Group(active_dims=0) * Linear(active_dims=1)`` are random slopes, and with :class:`RBF` in
    place of :class:`Linear` there is one smooth function for each group.

    The derivative in the inputs is zero. Put inducing inputs at names of groups and keep them
    there (``learn_inducing=False``).

    Args:
      variance: :math:`\sigma^2`, of shape ``batch``.
      active_dims: the columns of the inputs to use; all of them by default.

    Examples:
      >>> from numpyro_tsvgp import kernels
      >>> kernels.Group(0.5)([3, 4, 3], [3, 5]).tolist()
      [[0.5, 0.0], [0.0, 0.0], [0.5, 0.0]]
      >>> slopes = kernels.Group(active_dims=0) * kernels.Linear(active_dims=1)
      >>> slopes([[0, 2.0], [1, 2.0]], [[0, 3.0]]).tolist()
      [[6.0], [0.0]]

    References:
      Gelman and Hill, *Data Analysis Using Regression and Multilevel/Hierarchical Models*, 2007,
      chapters 12 and 13.
    """

    variance: ArrayLike = 1.0
    active_dims: Dims = static(default=None)

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        raise ValueError(
            "The kernel Group has no random features, because it knows no list of its groups, so "
            "that no functions can be drawn. Write it as Coregion(W=jnp.zeros((P, 1)), "
            "kappa=variance) for the P groups 0, ..., P - 1. Values can be drawn of any kernel: "
            "fit.sample(key, X_new)."
        )

    def diag(self, X: ArrayLike) -> Array:
        return Constant(self.variance).diag(X)

    def _correlation(self, A: Array, B: Array) -> Array:
        # One column after the other: no array of shape (n1, n2, d).
        equal = (A[:, None, i] == B[None, :, i] for i in range(A.shape[1]))
        return functools.reduce(operator.and_, equal).astype(A.dtype)


@pytree
class Categorical(Leaf):
    r"""Kernel of categories, whose levels all covary alike.

    .. math:: k(x, x') = \sigma^2 \exp\left(-\sum_d [x_d \neq x'_d] / \ell_d\right)

    Inputs are names of levels, as numbers, in any number of columns. Two that differ in one column
    have correlation :math:`e^{-1/\ell_d}`: as :math:`\ell_d` goes to zero this is :class:`Group`,
    and as it grows the column ceases to matter. Times a kernel of other columns it is one for
    inputs of both kinds, ``Categorical(active_dims=0) * RBF(active_dims=1)``.

    The derivative in the inputs is zero. Put inducing inputs at names of levels and keep them there
    (``learn_inducing=False``).

    Args:
      lengthscale: :math:`\ell`, of shape ``()``, ``(d,)``, ``batch + (1,)`` or ``batch + (d,)``.
      variance: :math:`\sigma^2`, of shape ``batch``.
      active_dims: the columns of the inputs to use; all of them by default.

    Examples:
      >>> from numpyro_tsvgp import kernels
      >>> K = kernels.Categorical(lengthscale=2.0)([3, 4, 3], [3])
      >>> [round(k, 4) for k in K[:, 0].tolist()]
      [1.0, 0.6065, 1.0]

    References:
      Qian, Wu and Wu, *Gaussian Process Models for Computer Experiments With Qualitative and
      Quantitative Factors*, Technometrics 2008.
    """

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0
    active_dims: Dims = static(default=None)

    def diag(self, X: ArrayLike) -> Array:
        X = self._inputs(X)
        batch = self._per_input("lengthscale", X).shape[:-2]
        variance = Constant(self.variance).diag(X)
        return jnp.broadcast_to(
            variance, (*jnp.broadcast_shapes(batch, variance.shape[:-1]), len(X))
        )

    def _correlation(self, A: Array, B: Array) -> Array:
        rates = jnp.broadcast_to(
            1.0 / self._per_input("lengthscale", A)[..., 0, :],
            (*jnp.shape(self._per_input("lengthscale", A))[:-2], A.shape[1]),
        )
        differ = (A[:, None, i] != B[None, :, i] for i in range(A.shape[1]))
        terms = (rates[..., i, None, None] * d for i, d in enumerate(differ))
        return jnp.exp(-functools.reduce(operator.add, terms))


@pytree
class Coregion(Leaf):
    r"""Covariance between levels of a category, which is the input: a matrix of any kind.

    .. math:: k(x, x') = B_{x x'}, \quad B = W W^\top + \operatorname{diag}(\kappa)

    The input is one column of whole numbers from 0 to P - 1, rounded to the nearest. Times another
    kernel it is the intrinsic model of coregionalization, of P outputs that are mixtures of R
    functions: for inputs with the columns ``(output, x)``,
    ``Coregion(W, kappa, active_dims=0) * RBF(active_dims=1)``.

    As with :class:`Group`, which it is for ``W = 0``, the derivative in the inputs is zero.

    Args:
      W: :math:`W`, of shape ``(P, R)`` or ``batch + (P, R)``: levels with similar rows covary.
      kappa: :math:`\kappa`, not negative: a number, or of shape ``(P,)``, ``batch + (1,)`` or
        ``batch + (P,)``. It is what a level has for itself.
      active_dims: the column of the inputs to use, if they have more than one.

    Raises:
      IndexError: if an input is none of 0, ..., P - 1. Inside of ``jax.jit``, where values are
        not known, its covariances are NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp import kernels
      >>> kernel = kernels.Coregion(W=jnp.array([[1.0], [2.0], [0.0]]), kappa=0.5)
      >>> kernel([0, 1, 2], [0, 1, 2]).tolist()
      [[1.5, 2.0, 0.0], [2.0, 4.5, 0.0], [0.0, 0.0, 0.5]]

    References:
      Álvarez, Rosasco and Lawrence, `Kernels for Vector-Valued Functions: a Review
      <https://arxiv.org/abs/1106.6251>`_, 2012, section 4.2.
    """

    variance = 1.0  # not a field: `W` and `kappa` have it

    W: ArrayLike
    kappa: ArrayLike = 0.0
    active_dims: Dims = static(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if jnp.ndim(self.W) < 2:
            raise ValueError(
                f"Coregion: W has shape {jnp.shape(self.W)}, but must have shape (P, R), with one "
                "row for each level. One column is written W[:, None]."
            )
        levels = jnp.shape(self.W)[-2]
        if jnp.ndim(self.kappa) and jnp.shape(self.kappa)[-1] not in (1, levels):
            raise ValueError(
                f"Coregion: kappa has shape {jnp.shape(self.kappa)}, but its last axis must have "
                f"size 1 or {levels}, the number of rows of W"
            )

    def spectral_terms(self, columns: int) -> tuple[Term, ...]:
        self._columns(columns)  # which must be there
        return (Term(1.0, exact=(self,)),)

    def exact_features(self, X: ArrayLike) -> Array:
        """Features whose products are the kernel, ``batch + (n, R + P)``."""
        w, kappa, index = self._at(self._inputs(X))
        own = jax.nn.one_hot(index, jnp.shape(self.W)[-2], dtype=w.dtype)
        own = jnp.sqrt(kappa)[..., None] * own
        batch = jnp.broadcast_shapes(w.shape[:-2], own.shape[:-2])
        return jnp.concatenate(
            [jnp.broadcast_to(part, batch + part.shape[-2:]) for part in (w, own)], -1
        )

    def diag(self, X: ArrayLike) -> Array:
        w, kappa, _ = self._at(self._inputs(X))
        return jnp.sum(jnp.square(w), -1) + kappa

    def _correlation(self, A: Array, B: Array) -> Array:
        (a, kappa, i), (b, _, j) = pair(self._at, A, B)
        # Products of rows of W rather than entries of B: their gradient has n R numbers to add up
        # where that of the entries has n^2.
        return inner(a, b) + kappa[..., None] * (i[:, None] == j)

    def _at(self, X: Array) -> tuple[Array, Array, Array]:
        """Rows of W, entries of kappa, and levels, at inputs of shape ``(n, 1)``."""
        if X.shape[1] != 1:
            raise ValueError(
                f"Coregion: inputs have {X.shape[1]} columns, but the level is one; name it by "
                "active_dims"
            )
        W, kappa = (jnp.asarray(x, jnp.result_type(x, float)) for x in (self.W, self.kappa))
        levels = W.shape[-2]
        index = jnp.rint(X[:, 0])
        known = (index >= 0) & (index < levels)
        if not isinstance(known, jax.core.Tracer) and not known.all():
            wrong = X[~known, 0][0]
            raise IndexError(
                f"Coregion: {wrong} is not a level, which are 0, ..., {levels - 1} for W of shape "
                f"{W.shape}"
            )
        index = jnp.where(known, index, levels).astype(int)
        kappa = jnp.broadcast_to(kappa, (*kappa.shape[:-1], levels))
        # A level that does not exist is a NaN, and not, as JAX would have it, the last one.
        return (
            jnp.take(W, index, axis=-2, mode="fill", fill_value=jnp.nan),
            jnp.take(kappa, index, axis=-1, mode="fill", fill_value=jnp.nan),
            index,
        )
