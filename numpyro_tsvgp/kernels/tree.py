"""Kernels as pytrees: hyperparameters are leaves, choices of columns are structure."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, TypeVar, dataclass_transform

import jax

__all__ = ["Dims", "Slice", "pytree", "static"]

_T = TypeVar("_T")


def static(*, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(static,))
def pytree(cls: type[_T]) -> type[_T]:
    # No field-wise `==`: the fields are arrays, and arrays have no single truth value.
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    data = tuple(field.name for field in fields if not field.metadata.get("static"))
    static = tuple(field.name for field in fields if field.metadata.get("static"))

    def flatten(kernel: _T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(kernel, n) for n in data), tuple(getattr(kernel, n) for n in static)

    def flatten_with_keys(kernel: _T) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        leaves, meta = flatten(kernel)
        keys = (jax.tree_util.GetAttrKey(n) for n in data)
        return tuple(zip(keys, leaves, strict=True)), meta

    def unflatten(meta: tuple[Any, ...], leaves: Any) -> _T:
        # Not by the constructor, which refuses what cannot be a hyperparameter: the gradient of a
        # kernel is a kernel too, and may well be negative.
        kernel = object.__new__(cls)
        for name, value in (*zip(data, leaves, strict=True), *zip(static, meta, strict=True)):
            object.__setattr__(kernel, name, value)
        return kernel

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of columns that can be hashed, which before Python 3.12 a ``slice`` cannot."""

    start: int | None
    stop: int | None
    step: int | None

    @classmethod
    def of(cls, columns: slice) -> Slice:
        limits = (columns.start, columns.stop, columns.step)
        return cls(*(None if limit is None else operator.index(limit) for limit in limits))

    def __repr__(self) -> str:
        return repr(slice(self.start, self.stop, self.step))

    def columns(self, d: int) -> tuple[int, ...]:
        return tuple(range(*slice(self.start, self.stop, self.step).indices(d)))


Dims = int | Sequence[int] | slice | None
