"""What a run was started with, in a few short strings, so that another run is not taken for it."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

__all__ = ["fingerprint"]

# Larger arrays are looked at in so many evenly spaced places.
_BYTES = 2**24
_DEPTH = 24
# Code in these folders is known by its versions, and what it refers to need not be looked at.
_LIBRARIES = tuple({*sysconfig.get_paths().values(), str(Path(__file__).parents[1])})


def fingerprint(value: Any) -> str:
    """A short string that changes with arrays, numbers and code, and with nothing else.

    Functions are known by their code and by what they close over, so that a model with another
    kernel, or an optimizer with another learning rate, is another one.

    Args:
      value: anything: arrays, containers, functions, dataclasses.

    Returns:
      Sixteen hexadecimal digits, the same in every process.

    Examples:
      >>> import jax.numpy as jnp
      >>> from numpyro_tsvgp.infer.files.fingerprint import fingerprint
      >>> fingerprint(jnp.zeros(3)) == fingerprint(jnp.zeros(3))
      True
      >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 2)
      False
    """
    return _Digest().of(value)


class _Digest:
    """A walk over a value and all that it is made of, each object once."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # or another object could get the place of one that is gone

    def of(self, value: Any) -> str:
        self._add(value, _DEPTH)
        return self._hash.hexdigest()[:16]

    def _say(self, text: str) -> None:
        self._hash.update(text.encode() + b";")

    def _add(self, value: Any, depth: int) -> None:
        self._say(type(value).__name__)
        if isinstance(value, Array | np.ndarray | np.generic):
            self._add_array(value)
        elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self._say(repr(value))
        elif isinstance(value, types.ModuleType | type):
            self._say(value.__name__)
        elif id(value) in self._seen:
            self._say(str(self._seen[id(value)]))
        elif depth:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self._add_parts(value, depth - 1)

    def _add_all(self, values: Any, depth: int) -> None:
        for value in values:
            self._add(value, depth)
        self._say("end")

    def _add_parts(self, value: Any, depth: int) -> None:
        if isinstance(value, types.CodeType):
            self._hash.update(value.co_code)
            self._add_all((*value.co_names, "", *value.co_varnames), depth)
            self._add_all(value.co_consts, depth)
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                self._say(str(key))
                self._add(value[key], depth)
        elif isinstance(value, list | tuple):
            self._add_all(value, depth)
        elif isinstance(value, set | frozenset):
            self._add_all(sorted(value, key=str), depth)
        elif isinstance(value, types.MethodType):
            self._add_all((value.__func__, value.__self__), depth)
        elif isinstance(value, types.FunctionType):
            self._add_function(value, depth)
        else:
            self._add_object(value, depth)

    def _add_function(self, value: types.FunctionType, depth: int) -> None:
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        for part in (value.__code__, value.__defaults__, value.__kwdefaults__):
            self._add(part, depth)
        self._add_all(cells, depth)
        if not value.__code__.co_filename.startswith(_LIBRARIES):
            names = [name for name in value.__code__.co_names if name in value.__globals__]
            self._add_all([value.__globals__[name] for name in names], depth)

    def _add_object(self, value: Any, depth: int) -> None:
        if dataclasses.is_dataclass(value):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            self._add_all(fields, depth)
        elif hasattr(value, "func") and hasattr(value, "args"):  # functools.partial
            self._add_all((value.func, value.args, getattr(value, "keywords", None)), depth)
        else:
            if hasattr(value, "__wrapped__"):  # a compiled function, or a handler around one
                self._add(value.__wrapped__, depth)
            for name in sorted(getattr(value, "__dict__", {})):
                if not name.startswith("_"):
                    self._say(name)
                    self._add(vars(value)[name], depth)

    def _add_array(self, value: Any) -> None:
        if isinstance(value, Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        self._say(f"{array.dtype} {array.shape}")
        if array.dtype.kind == "O":
            return
        flat = np.ravel(array)
        if flat.nbytes > _BYTES:
            flat = flat[:: -(-flat.nbytes // _BYTES)]
        self._hash.update(np.ascontiguousarray(flat).tobytes())


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
