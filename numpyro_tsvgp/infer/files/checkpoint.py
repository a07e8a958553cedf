"""Pytrees in files: arrays with a description, and nothing that runs.

The file is a NumPy ``.npz`` archive. It is written next to its place and moved there in one step,
so a kill during writing leaves the old file whole; it is read without pickle, so a stranger's file
cannot run code.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["read_meta", "read_tree", "write_tree"]

_FORMAT = "numpyro_tsvgp fit"
_FORMAT_VERSION = 2
_DESCRIPTION = "description.json"
_VERSIONS = ("numpyro-tsvgp", "numpyro", "jax", "jaxlib", "numpy")


def write_tree(
    path: str | os.PathLike[str], tree: Any, meta: Mapping[str, Any] | None = None
) -> None:
    """Writes a pytree of arrays to one file.

    Args:
      path: where to; the file is replaced in one step.
      tree: the pytree.
      meta: what else to say in the description, as JSON has it.

    Examples:
      >>> import tempfile, pathlib, jax.numpy as jnp
      >>> from numpyro_tsvgp.infer.files.checkpoint import read_tree, write_tree
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "fit.npz"
      >>> write_tree(path, {"params": {"lengthscale": jnp.ones(2)}})
      >>> read_tree(path)["params"]["lengthscale"].tolist()
      [1.0, 1.0]
    """
    path = Path(path)
    arrays, entries = {}, []
    for i, (keys, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(tree)[0]):
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        value = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        if value.dtype.kind == "O":
            raise TypeError(f"{_join(_names(keys))} is not an array: {type(leaf).__name__}.")
        arrays[f"a{i}"] = value
        entries.append(
            {
                "path": _names(keys),
                "array": f"a{i}",
                "shape": list(value.shape),
                "dtype": str(value.dtype),
                "key": str(jax.random.key_impl(leaf)) if is_key else None,
            }
        )
    description = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "versions": {name: _version(name) for name in _VERSIONS},
        "entries": entries,
        "meta": dict(meta or {}),
    }
    text = np.frombuffer(json.dumps(description).encode(), np.uint8)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays, **{_DESCRIPTION: text})
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)  # its folder may be gone
        raise


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What else the description of a file says.

    Args:
      path: the file.

    Returns:
      The dict that :func:`write_tree` was given.
    """
    return _read(Path(path))[2]


def read_tree(path: str | os.PathLike[str], like: Any = None) -> Any:
    """Reads what :func:`write_tree` wrote.

    Args:
      path: the file.
      like: a result or state of the same fit, such as ``svi.init(key, X, y)``, whose structure
        the arrays take. A state may also be taken out of the file of a result. Without ``like``
        everything comes back as nested dicts, which is all that ``params`` need.

    Returns:
      A pytree like ``like``, or nested dicts of arrays.

    Raises:
      ValueError: if the file is damaged, is not a fit, or belongs to another fit than ``like``.
    """
    path = Path(path)
    entries, values, _ = _read(path)
    if like is None:
        return _nest(entries, values)
    wanted, treedef = jax.tree_util.tree_flatten_with_path(like)
    found = {_join(entry["path"]): value for entry, value in zip(entries, values, strict=True)}
    names = [_join(_names(keys)) for keys, _ in wanted]
    in_result = {k.removeprefix("state/"): v for k, v in found.items() if k.startswith("state/")}
    if in_result and not any(name.startswith("state/") for name in names):
        found = in_result
    missing, surplus = set(names) - set(found), set(found) - set(names)
    if missing or surplus:
        raise ValueError(
            f"'{path}' belongs to another fit: it lacks {sorted(missing)} and has "
            f"{sorted(surplus)} in their place. Load it with the model, guide and optimizer that "
            "it was saved with."
        )
    leaves = []
    for name, (_, leaf) in zip(names, wanted, strict=True):
        value = found[name]
        if (jnp.shape(leaf), jnp.result_type(leaf)) != (value.shape, value.dtype):
            raise ValueError(
                f"'{path}' belongs to another fit: {name} has shape {value.shape} and type "
                f"{value.dtype} in the file, but {jnp.shape(leaf)} and {jnp.result_type(leaf)} "
                "here. Check the data, the number of inducing inputs and jax_enable_x64."
            )
        leaves.append(value)
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _read(path: Path) -> tuple[list[dict[str, Any]], list[Any], dict[str, Any]]:
    with open(path, "rb") as file:
        try:
            entries, arrays, meta = _entries_and_arrays(file)
        except Exception as error:  # a stranger's file can be wrong in any way
            raise ValueError(f"'{path}' is not a complete numpyro_tsvgp fit: {error}.") from error
    values = []
    for entry, array in zip(entries, arrays, strict=True):
        value = jnp.asarray(array)
        if value.dtype != array.dtype:
            raise ValueError(
                f"{_join(entry['path'])} in '{path}' is {array.dtype}, which JAX does not keep at "
                "its current precision. Load it with jax.config.update('jax_enable_x64', True)."
            )
        is_key = entry["key"] is not None
        values.append(jax.random.wrap_key_data(value, impl=entry["key"]) if is_key else value)
    return entries, values, meta


def _entries_and_arrays(
    file: Any,
) -> tuple[list[dict[str, Any]], list[np.ndarray], dict[str, Any]]:
    if not zipfile.is_zipfile(file):
        raise ValueError("it is not an archive, or is cut short")
    file.seek(0)
    with zipfile.ZipFile(file) as members:
        # What is written here is not compressed. So nothing can grow when it is read: a few
        # megabytes of a stranger's file could be as many gigabytes of memory.
        if any(m.compress_type != zipfile.ZIP_STORED for m in members.infolist()):
            raise ValueError("it is compressed, which what numpyro_tsvgp writes is not")
    file.seek(0)
    with np.load(file, allow_pickle=False) as archive:
        if _DESCRIPTION not in archive:
            raise ValueError("it has no description")
        description = json.loads(archive[_DESCRIPTION].tobytes())
        if description["format"] != _FORMAT:
            raise ValueError("it is an archive of something else")
        if description["format_version"] > _FORMAT_VERSION:
            raise ValueError("it was written by a newer version of numpyro_tsvgp")
        if description["format_version"] < _FORMAT_VERSION:
            raise ValueError(
                "it was written by version 0.1 of numpyro_tsvgp, whose parameters have another "
                "meaning; fit the model again"
            )
        entries = description["entries"]
        _check_paths([entry["path"] for entry in entries])
        arrays = [archive[entry["array"]] for entry in entries]
    for entry, array in zip(entries, arrays, strict=True):
        if (list(array.shape), str(array.dtype)) != (entry["shape"], entry["dtype"]):
            raise ValueError(f"{_join(entry['path'])} is not the array that its description says")
        if array.dtype.kind not in "biufcV" or (array.dtype.kind == "V" and array.dtype.names):
            raise ValueError(f"{_join(entry['path'])} is of type {array.dtype}, not of numbers")
        if entry["key"] is not None:
            jax.random.wrap_key_data(jnp.asarray(array), impl=entry["key"])
    return entries, arrays, dict(description["meta"])


def _check_paths(paths: list[Any]) -> None:
    """Paths are lists of names, and none leads through the end of another."""
    if not all(isinstance(path, list) and all(isinstance(p, str) for p in path) for path in paths):
        raise ValueError("its description has a path that is not a list of names")
    ends = {tuple(path) for path in paths}
    through = {tuple(path[:i]) for path in paths for i in range(1, len(path))}
    if len(ends) < len(paths) or ends & through:
        raise ValueError("its description has two arrays in one place")


@cache  # reading it takes longer than writing the file
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a source tree that is not installed
        return "unknown"


def _names(keys: Any) -> list[str]:
    """The path of a leaf, as strings: dict keys, field names and positions."""
    names = []
    for key in keys:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                names.append(str(getattr(key, attribute)))
                break
    return names


def _join(names: list[str]) -> str:
    return "/".join(names)


def _nest(entries: list[dict[str, Any]], values: list[Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for entry, value in zip(entries, values, strict=True):
        *parents, last = entry["path"] or ["value"]
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return root
