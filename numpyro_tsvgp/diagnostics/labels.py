"""Names for the axes of everything in a model, from its plates, its data and its user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from numpyro_tsvgp.diagnostics import compat
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.layout import event_dims, row_dim
from numpyro_tsvgp.model.read import GPSite, Message, is_latent

__all__ = ["Labels", "Shape", "shape_of"]


class Shape(NamedTuple):
    """What a model looks like at some arguments."""

    trace: Mapping[str, Message]
    gps: Mapping[str, GPSite]
    row_dims: Mapping[str, str]  # of each GP, the name of its axis
    kept: Mapping[str, tuple[int, np.ndarray]]  # by site, the axis of its rows and those to keep
    call: Call
    keep: Mapping[str, np.ndarray]  # by name of an axis, the rows to keep

    def dims(self, name: str, shape: tuple[int, ...], event_dim: int | None = None) -> list[str]:
        """Names of the axes of a site's value."""
        site = self.trace[name]
        out = [f"{name}_dim_{i}" for i in range(len(shape))]
        if event_dim is None:
            event_dim = site["fn"].event_dim if site["type"] == "sample" else 0
        for frame in site.get("cond_indep_stack", []):
            axis = len(shape) + frame.dim - event_dim
            if 0 <= axis < len(shape) and shape[axis] == frame.size:
                out[axis] = frame.name
        if event_dim and site["type"] == "sample":
            given = event_dims(site)
            out[len(shape) - event_dim : len(shape) - event_dim + len(given)] = given
        if name in self.gps:
            out[-1] = self.row_dims[name]
        elif site["type"] == "deterministic":  # most are functions of a GP: same rows, same name
            for gp, dim in self.row_dims.items():
                if shape == np.shape(self.trace[gp]["value"]):
                    return self.dims(gp, shape)
                axes = [i for i, size in enumerate(shape) if size == self.gps[gp].rows]
                if dim not in out and len(axes) == 1 and out[axes[0]] == f"{name}_dim_{axes[0]}":
                    out[axes[0]] = dim
        return out

    def names_of_numpyro(self) -> dict[str, list[str]]:
        """Names that ``az.from_numpyro`` gives to the axes of every site."""
        out = {}
        for name, site in self.trace.items():
            shape = np.shape(site["value"])
            event_dim = site["fn"].event_dim if site["type"] == "sample" else 0
            plates = {f.dim - event_dim: f.name for f in site.get("cond_indep_stack", [])}
            found = [plates.get(axis - len(shape)) for axis in range(len(shape))]
            for axis, given in enumerate(event_dims(site)):
                found[len(shape) - event_dim + axis] = given
            out[name] = compat.numbered(name, found)
        return out

    def along_rows(self, names: Mapping[str, Sequence[str]]) -> set[str]:
        """Names of the axes along the rows of GPs, under other names of the axes of sites."""
        own = set(self.row_dims.values())
        out = set(own)
        for name, given in names.items():
            here = self.dims(name, np.shape(self.trace[name]["value"]))
            out |= {new for new, old in zip(given, here, strict=True) if old in own}
        return out

    def _coords(self, dims: Mapping[str, int]) -> dict[str, np.ndarray]:
        out = {}
        for dim, size in dims.items():
            plate = self.trace.get(dim)
            whole_plate = plate is not None and plate["type"] == "plate"
            values = np.asarray(plate["value"]) if whole_plate else np.arange(size)  # type: ignore[index]
            kept = values[self.keep[dim]] if dim in self.keep else values
            out[dim] = next((v for v in (values, kept) if len(v) == size), np.arange(size))
        return out

    def named(self, chains: int) -> Any:
        """A function from draws by site, ``(chains * draws, ...)``, to a data set."""

        def dataset(values: Mapping[str, Any], log_density: bool = False) -> xr.Dataset:
            variables: dict[str, Any] = {}
            sizes: dict[str, int] = {}
            for name, value in values.items():
                value = np.asarray(value)
                shape = value.shape[1:]
                dims = self.dims(name, self._full(name, shape), 0 if log_density else None)
                sizes |= dict(zip(dims, shape, strict=True))
                value = value.reshape(chains, -1, *shape)
                variables[name] = (("chain", "draw", *dims), value)
            if not variables:
                return xr.Dataset()
            draws = next(iter(variables.values()))[1].shape[1]
            coords = {"chain": np.arange(chains), "draw": np.arange(draws), **self._coords(sizes)}
            return xr.Dataset(variables, coords)

        return dataset

    def _full(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape before rows were picked."""
        if name not in self.kept:
            return shape
        axis = self.kept[name][0]
        full = np.shape(self.trace[name]["value"])[axis]
        return (*shape[:axis], full, *shape[axis + 1 :])

    def fixed(self, values: Mapping[str, Any]) -> xr.Dataset:
        """A data set of values without draws."""
        variables: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        for name, value in values.items():
            dims = self.dims(name, np.shape(value))
            sizes |= dict(zip(dims, np.shape(value), strict=True))
            variables[name] = (dims, np.asarray(value))
        return xr.Dataset(variables, self._coords(sizes))

    def inputs(self) -> xr.Dataset:
        """The inputs of the GPs: ``X`` where all have the same, ``X_f`` of site f otherwise."""
        all_X = {name: np.asarray(site.gp.X) for name, site in self.gps.items()}
        first = next(iter(all_X.values()))
        shared = all(np.array_equal(first, X) for X in all_X.values())
        variables: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        for name, X in all_X.items():
            label = "X" if shared else f"X_{name}"
            dims = [self.row_dims[name], *(f"{label}_dim_{i}" for i in range(1, X.ndim))]
            variables.setdefault(label, (dims, X))
            sizes |= dict(zip(dims, X.shape, strict=True))
            if shared:
                break
        return xr.Dataset(variables, self._coords(sizes))


def shape_of(fit: Fit, call: Call, rows: Any = None) -> Shape:
    """What the model of a fit looks like at some arguments.

    Args:
      fit: the fit.
      call: arguments of the model.
      rows: which rows of GP sites to keep: indices, a slice or a mask; None for all.

    Returns:
      Names and coordinates of the axes of every site.
    """
    reading = fit.read(call, fit.hyper_at(call))
    trace, gps = reading.trace, reading.gps
    row_dims = {name: row_dim(trace, name, site.rows) for name, site in gps.items()}
    shape = Shape(trace, gps, row_dims, {}, call, {})
    if rows is None:
        return shape
    keep = {row_dims[name]: np.arange(site.rows)[rows] for name, site in gps.items()}
    kept = {}
    for name, site in trace.items():
        if name in gps or site["type"] == "deterministic" or is_latent(site):
            dims = shape.dims(name, np.shape(site["value"]))
            for dim in set(dims) & set(keep):
                kept[name] = (dims.index(dim), keep[dim])
    return shape._replace(kept=kept, keep=keep)


class Labels(NamedTuple):
    """Names and labels of axes that a user gives."""

    dims: Mapping[str, Sequence[str]]
    coords: Mapping[str, Any]
    pred_coords: Mapping[str, Any]

    def on(self, groups: Mapping[str, xr.Dataset], rows: set[str]) -> dict[str, xr.Dataset]:
        """Groups of an ArviZ object with them.

        Args:
          groups: data sets by the name of their group.
          rows: names of the axes along the data, whose labels are not those of predictions.

        Returns:
          The same groups, renamed and labelled.

        Raises:
          ValueError: if names or labels do not fit anything.
        """
        out = {name: self._renamed(data) for name, data in groups.items()}
        used: set[str] = set()
        for name, data in out.items():
            new = name.startswith("predictions")
            kept = {k: v for k, v in self.coords.items() if not (new and k in rows)}
            labels = {**kept, **(self.pred_coords if new else {})}
            for dim in sorted(set(labels) & set(data.sizes)):
                values = np.asarray(labels[dim])
                if len(values) != data.sizes[dim]:
                    raise ValueError(
                        f"coords has {len(values)} labels for the dim '{dim}', which has size "
                        f"{data.sizes[dim]} in the group '{name}'."
                    )
                out[name] = out[name].assign_coords({dim: values})
                used.add(dim)
        known = {str(dim) for data in out.values() for dim in data.sizes}
        self._check("coords", {*self.coords, *self.pred_coords} - used, known, "dims")
        return out

    @staticmethod
    def _check(what: str, unknown: set[str], known: set[str], kind: str) -> None:
        if unknown:
            raise ValueError(f"{what} has {sorted(unknown)}, but the {kind} are {sorted(known)}.")

    def _renamed(self, data: xr.Dataset) -> xr.Dataset:
        variables: dict[str, Any] = {}
        labels: dict[str, Any] = {}  # of dims under their new names
        changed = False
        for key, array in data.data_vars.items():
            name = str(key)
            draws = [d for d in array.dims if d in ("chain", "draw")]
            own = [d for d in array.dims if d not in ("chain", "draw")]
            given = list(self.dims.get(name, own))
            if len(given) != len(own):
                raise ValueError(
                    f"dims has {given} for '{name}', which has {len(own)} axes besides chain and "
                    f"draw, of shape {array.shape[len(draws) :]}."
                )
            changed |= given != own
            for old, new in zip(own, given, strict=True):
                if old in data.coords:
                    labels.setdefault(str(new), data.coords[old].values)
            variables[name] = ((*draws, *given), array.values)
        if not changed:
            return data
        sizes = {d: n for dims, v in variables.values() for d, n in zip(dims, v.shape, strict=True)}
        labels |= {d: data.coords[d].values for d in sizes if d in data.coords}
        coords = {d: labels.get(d, np.arange(n)) for d, n in sizes.items()}
        return xr.Dataset(variables, coords, data.attrs)
