"""Kernels with hyperparameters that look at the values of their inputs."""

from __future__ import annotations

import operator

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_tsvgp.kernels.base import Constant, Kernel
from numpyro_tsvgp.kernels.distance import as_matrix, as_rows
from numpyro_tsvgp.kernels.tree import Dims, Slice

__all__ = ["Leaf"]


class Leaf(Kernel):
    """A kernel with hyperparameters that looks at the values of its inputs."""

    lengthscale: ArrayLike
    variance: ArrayLike
    active_dims: Dims

    def __post_init__(self) -> None:
        super().__post_init__()
        # Static metadata of a pytree must be hashable.
        if isinstance(self.active_dims, slice):
            object.__setattr__(self, "active_dims", Slice.of(self.active_dims))
        elif self.active_dims is not None and not isinstance(self.active_dims, Slice):
            dims = tuple(operator.index(i) for i in np.atleast_1d(np.asarray(self.active_dims)))
            if not dims:
                raise ValueError(f"{type(self).__name__}: active_dims is empty")
            object.__setattr__(self, "active_dims", dims)

    def _inputs(self, X: ArrayLike) -> Array:
        X = as_rows(X)
        return X if self.active_dims is None else X[:, self._columns(X.shape[1])]

    def _columns(self, d: int) -> np.ndarray:
        """The columns that the kernel sees, of d."""
        dims = self.active_dims
        if dims is None:
            return np.arange(d)
        if isinstance(dims, Slice):
            name, dims = f"active_dims {dims}", dims.columns(d)
            if not dims:
                raise IndexError(
                    f"{type(self).__name__}: {name} names none of the {d} columns of the inputs"
                )
        assert isinstance(dims, tuple)
        if not all(-d <= i < d for i in dims):  # JAX would clamp in silence
            raise IndexError(
                f"{type(self).__name__}: active_dims {dims} out of range for inputs with "
                f"{d} columns"
            )
        return np.array(dims)

    def _per_input(self, name: str, X: Array) -> Array:
        """A lengthscale or period, of shape ``batch + (1, 1)`` or ``batch + (1, d)``."""
        value, d = jnp.atleast_1d(getattr(self, name)), X.shape[-1]
        if value.shape[-1] not in (1, d):
            raise ValueError(
                f"{type(self).__name__}: {name} has shape {value.shape}, but its last axis is the "
                f"input axis and must have size 1 or d = {d}. A batch of isotropic kernels is "
                f"written {name}[:, None]."
            )
        return value[..., None, :]

    def _of_one_input(self, name: str) -> Array:
        """A lengthscale or period of a kernel of one input, of shape ``batch``."""
        value = jnp.atleast_1d(getattr(self, name))
        if value.shape[-1] != 1:
            raise TypeError(
                f"the kernel {type(self).__name__} has a {name} of shape {value.shape}, one for "
                "each of several inputs, but a state-space form is of one input, the time"
            )
        return value[..., 0]

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        scale, matrix = self.scaled(X1, X2)
        return as_matrix(scale) * matrix

    def scaled(self, X1: ArrayLike, X2: ArrayLike) -> tuple[ArrayLike, Array]:
        same, A = X1 is X2, self._inputs(X1)
        B = A if same else self._inputs(X2)
        if A.shape[1] != B.shape[1]:
            raise ValueError(
                f"{type(self).__name__}: inputs have different numbers of columns, "
                f"{A.shape[1]} and {B.shape[1]}"
            )
        return self.variance, self._correlation(A, B)

    def noise(self, X: ArrayLike) -> Array:
        return Constant().noise(X)

    def _correlation(self, A: Array, B: Array) -> Array:
        raise NotImplementedError
