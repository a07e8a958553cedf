"""What a run was started with, in a few short strings, so that another run is not taken for it."""

from __future__ import annotations

import dataclasses
import hashlib
import types
from typing import Any

import jax
import numpy as np
from jax import Array

__all__ = ["fingerprint"]

# Larger arrays are looked at in so many evenly spaced places.
_BYTES = 2**24
_DEPTH = 6


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
      >>> from numpyro_tsvgp.infer.fingerprint import fingerprint
      >>> fingerprint(jnp.zeros(3)) == fingerprint(jnp.zeros(3))
      True
      >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 2)
      False
    """
    digest = hashlib.sha256()
    _add(digest, value, _DEPTH, set())
    return digest.hexdigest()[:16]


def _add(digest: Any, value: Any, depth: int, seen: set[int]) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, Array | np.ndarray | np.generic):
        _add_array(digest, value)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        digest.update(repr(value).encode())
    elif depth == 0 or id(value) in seen:
        return
    elif isinstance(value, types.CodeType):
        digest.update(value.co_code)
        _add(digest, (value.co_names, value.co_varnames), depth, seen)
        for constant in value.co_consts:
            _add(digest, constant, depth, seen)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            _add(digest, (str(key), value[key]), depth - 1, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        items = value if isinstance(value, list | tuple) else sorted(value, key=str)
        for item in items:
            _add(digest, item, depth, seen | {id(value)})
    elif isinstance(value, types.ModuleType | type):
        digest.update(value.__name__.encode())
    else:
        _add_object(digest, value, depth - 1, seen | {id(value)})


def _add_array(digest: Any, value: Any) -> None:
    if isinstance(value, Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    digest.update(f"{array.dtype} {array.shape}".encode())
    if array.dtype.kind == "O":
        return
    flat = np.ravel(array)
    if flat.nbytes > _BYTES:
        flat = flat[:: -(-flat.nbytes // _BYTES)]
    digest.update(np.ascontiguousarray(flat).tobytes())


def _add_object(digest: Any, value: Any, depth: int, seen: set[int]) -> None:
    """Functions by code and closure, other objects by their attributes."""
    if isinstance(value, types.MethodType):
        _add(digest, (value.__func__, value.__self__), depth, seen)
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        used = [
            value.__globals__[name]
            for name in value.__code__.co_names
            if name in value.__globals__
            and not isinstance(value.__globals__[name], types.ModuleType | type)
        ]
        for part in (value.__code__, value.__defaults__, value.__kwdefaults__, cells, used):
            _add(digest, part, depth, seen)
    elif dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        _add(digest, fields, depth, seen)
    elif hasattr(value, "func") and hasattr(value, "args"):  # functools.partial
        _add(digest, (value.func, value.args, getattr(value, "keywords", None)), depth, seen)
    elif hasattr(value, "__wrapped__"):  # a compiled function
        _add(digest, value.__wrapped__, depth, seen)
    elif hasattr(value, "__dict__"):
        public = {k: v for k, v in vars(value).items() if not k.startswith("_")}
        _add(digest, public, depth, seen)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
