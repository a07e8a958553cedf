"""The state of a fit, its result, and the error of one that cannot go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import Array

from numpyro_tsvgp.model.structure import Structure

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.fit import Fit

__all__ = ["FitError", "TSVGPRunResult", "TSVGPState", "Transforms"]


class Transforms(Mapping[str, Any]):
    """Transforms to the constrained space by parameter, as a value that can be compared."""

    def __init__(self, transforms: Mapping[str, Any]) -> None:
        self._transforms = dict(transforms)

    def __getitem__(self, name: str) -> Any:
        return self._transforms[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._transforms)

    def __len__(self) -> int:
        return len(self._transforms)

    def __hash__(self) -> int:
        return hash(tuple(sorted((k, type(t).__name__) for k, t in self._transforms.items())))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transforms) or set(self) != set(other):
            return False
        return all(t is other[k] or bool(t == other[k]) for k, t in self._transforms.items())


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["optim_state", "approximation", "rng_key", "step", "rejected", "floored", "rate"],
    meta_fields=["structure", "transforms"],
)
@dataclass(frozen=True)
class TSVGPState:
    """Everything that a run needs to go on: a pytree of arrays.

    Attributes:
      optim_state: the optimizer's state; it holds the unconstrained hyperparameters.
      approximation: parameters of the guide that E-steps set, and inducing inputs that are not
        learned.
      rng_key: random key of the next update.
      step: number of updates so far.
      rejected: how many of them ``stable_update`` rejected.
      floored: how many marginal variances rounded to nothing and were floored, over all updates.
      rate: the rate of the next E-step, where the library chooses it (``site_lr="auto"``).
      structure: what the model is made of on these data.
      transforms: transforms of the optimizer's parameters to their constrained space.
    """

    optim_state: Any
    approximation: dict[str, Array]
    rng_key: Array
    step: Array
    rejected: Array
    floored: Array
    rate: Array
    structure: Structure
    transforms: Transforms


class _Fields(NamedTuple):
    params: dict[str, Any]
    state: TSVGPState
    losses: Array


class TSVGPRunResult(_Fields):
    """The result of a run, with the fields of NumPyro's ``SVIRunResult`` and the fit.

    Attributes:
      params: fitted parameters of the model and the guide, constrained.
      state: the last :class:`TSVGPState`.
      losses: the loss of every step.
      fit: the :class:`~numpyro_tsvgp.Fit`, which diagnostics and predictions take.
    """

    fit: Fit


class FitError(RuntimeError):
    """A fit that cannot go on. What was fitted before is in ``result``.

    Attributes:
      result: a :class:`TSVGPRunResult` up to the last state that was finite.
    """

    def __init__(self, message: str, result: TSVGPRunResult | None = None) -> None:
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        # Models and guides need not be picklable, and another process wants the reason.
        return type(self), (str(self),)
