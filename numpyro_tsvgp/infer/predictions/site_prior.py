"""The prior of one GP site at given hyperparameters, as a value apart from its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.distributions import ConstantMean, as_inputs
from numpyro_tsvgp.gaussian.process import Process, flatten_functions
from numpyro_tsvgp.model.read import GPSite, Reading

__all__ = ["SitePrior", "parameters_of"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["kernel", "mean"],
    meta_fields=["name", "columns", "batch_shape", "mean_function"],
)
@dataclass(frozen=True)
class SitePrior:
    """What is known of a GP site wherever it is evaluated.

    Attributes:
      kernel: the kernel at the hyperparameters of a fit.
      mean: the prior mean where it is a constant, ``()`` or ``batch + (1,)``; otherwise None.
      name: the name of the site.
      columns: how many columns its inputs have.
      batch_shape: the shape that plates give to its latent functions.
      mean_function: the prior mean where it is a function of inputs, otherwise None.
    """

    kernel: Any
    mean: Array | None
    name: str
    columns: int
    batch_shape: tuple[int, ...]
    mean_function: Callable[[Any], Any] | None = None

    @classmethod
    def of(cls, name: str, site: GPSite, columns: int, *, keep_function: bool) -> SitePrior:
        """The prior of a site of a reading.

        Args:
          name: the name of the site.
          site: the site.
          columns: how many columns its inputs have.
          keep_function: whether a mean that is a function can be kept, which it cannot if it
            belongs to a trace of JAX.

        Returns:
          The prior.
        """
        function = site.gp.mean_function
        if isinstance(function, ConstantMean):
            return cls(site.gp.kernel, function.value, name, columns, site.batch_shape)
        function = function if keep_function else None
        return cls(site.gp.kernel, None, name, columns, site.batch_shape, function)

    def inputs(self, X: Any) -> Array:
        """Inputs of the site, as an array with the right number of columns.

        Raises:
          ValueError: if they have another number of columns.
        """
        X = as_inputs(X)
        columns = 1 if X.ndim == 1 else X.shape[1]
        if columns != self.columns:
            raise ValueError(
                f"GP site '{self.name}' was fitted to inputs with {self.columns} columns, but the "
                f"new inputs have shape {X.shape}: they must have the same number of columns."
            )
        return X

    def mean_at(self, X: Array) -> Array:
        """The prior mean at inputs, ``(functions, n)`` or ``(1, n)``.

        Raises:
          ValueError: if the model alone knows it.
        """
        if self.mean is not None:
            mean = jnp.asarray(self.mean)
        elif self.mean_function is not None:
            mean = jnp.asarray(self.mean_function(X))
        else:
            raise ValueError(
                f"The prior mean of GP site '{self.name}' is not known apart from the model: it is "
                "an array with an entry for each row, or a function that could not be kept (of "
                "hyperparameters with a distribution, or after loading). Pass the arguments of "
                "the model in place of the inputs of the site, as in fit.functions(key, 10)(X_new) "
                "or fit.predictor()(X_new)."
            )
        mean = jnp.broadcast_to(mean, (*mean.shape[:-1], X.shape[0]))
        return flatten_functions(mean, self.batch_shape, 1)

    def process(self, X: Array, loc: Array) -> Process:
        """The prior at inputs where its mean is ``loc``."""
        return Process(self.kernel, X, loc, loc, None, self.batch_shape)


def parameters_of(reading: Reading) -> dict[str, Any]:
    """The values of the model's own parameters, ``numpyro.param``."""
    return {k: v for k, v in reading.pinned.items() if reading.trace[k]["type"] == "param"}
