"""Where the likelihood terms of each data point are, and which values of the GPs they read.

A fit needs the sum of the log-likelihood alone. What is left out, weighted or compared afterwards
are its terms, one for each row of the data. Here they are found: the axis of each observed site
that runs along the rows of the GPs, and the latent functions that meet in a term, are read off the
program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.coupling import hyper_values, sources
from numpyro_tsvgp.model.likelihood import point_sites, pointwise_log_prob, terms
from numpyro_tsvgp.model.read import Message, Model, Reading
from numpyro_tsvgp.model.reads import Reads, reads
from numpyro_tsvgp.model.shared_rows import SharedRows, shared_rows
from numpyro_tsvgp.model.structure import Structure
from numpyro_tsvgp.model.wrapped import unmasked

__all__ = ["Layout", "event_dims", "find_layout", "observed_rows", "row_dim"]


def event_dims(site: Message) -> list[str]:
    """Names that a model gives to the event axes of a site for ArviZ, in ``infer``."""
    return list((site.get("infer") or {}).get("event_dims", []))


def row_dim(trace: Mapping[str, Message], gp: str, rows: int) -> str:
    """The name of the axis of a GP: its own, the plate of the data along it, or a made one."""
    if event_dims(trace[gp]):
        return event_dims(trace[gp])[0]
    own = {frame.name for frame in trace[gp]["cond_indep_stack"]}
    along = {
        frame.name
        for site in trace.values()
        if site["type"] == "sample"
        for frame in site["cond_indep_stack"]
        if frame.size == rows and frame.name not in own
    }
    return along.pop() if len(along) == 1 else f"{gp}_dim_{len(trace[gp]['fn'].batch_shape)}"


class Layout(NamedTuple):
    """Where the terms of each data point are, and which latent functions they read.

    Latent functions that meet in a term share a group; an integral over them factorises over
    groups.
    """

    rows: int
    dim: str  # name of the axis along the rows
    axis: dict[str, int]  # of each observed site, the axis along the rows
    term_group: dict[str, np.ndarray]  # (terms, n); the number of groups where no GP is read
    latent_group: dict[str, np.ndarray]  # (latents,)
    groups: int
    # The rows that each data point reads, where points are not rows: "rows" above are then points.
    shared: SharedRows | None = None

    @property
    def frame(self) -> LayoutFrame:
        """What is the same for other batches of as many rows."""
        return LayoutFrame(
            self.rows,
            self.dim,
            tuple(self.axis.items()),
            tuple((name, tuple(group.tolist())) for name, group in self.latent_group.items()),
            self.groups,
        )

    def by_row(self, name: str, values: Any) -> Any:
        """Values shaped like an observed site as ``(terms, n)``."""
        xp = jnp if isinstance(values, jax.Array) else np
        return xp.moveaxis(values, self.axis[name], -1).reshape(-1, self.rows)

    def take(self, gp: str, values: Array) -> Array:
        """Values at the rows of a GP, ``(latents, rows)``, for each data point."""
        return values if self.shared is None else self.shared.take(gp, values)

    def put(self, gp: str, values: Array, point: Array) -> Array:
        """What one data point says, of values ``(latents, n)``, at rows: ``(latents, rows)``."""
        if self.shared is None:
            return jnp.where(jnp.arange(self.rows) == point, values, 0.0)
        return self.shared.put(gp, values[:, point], point)

    def at_own_values(
        self, function: Callable[[Mapping[str, Array]], Array], values: Mapping[str, Array]
    ) -> Array:
        """A function of values at rows, to ``(..., n)``, for each point at values of its own."""
        if self.shared is None:
            return function(values)
        return self.shared.at_own_values(function, values)

    def sum_terms(self, log_probs: Mapping[str, Array]) -> Array:
        """Log densities by site, summed over the terms of each group: ``(groups + 1, n)``."""
        out = jnp.zeros((self.groups + 1, self.rows))
        columns = jnp.arange(self.rows)
        for name, log_prob in log_probs.items():
            out = out.at[self.term_group[name], columns].add(self.by_row(name, log_prob))
        return out

    def sum_latents(self, values: Mapping[str, Array]) -> Array:
        """Values of each latent function summed over those of each group: ``(groups + 1, n)``."""
        out = jnp.zeros((self.groups + 1, self.rows))
        for name, value in values.items():
            out = out.at[self.latent_group[name]].add(value)
        return out


class LayoutFrame(NamedTuple):
    """A layout without the arrays that have a value for each row: a value to compile with."""

    rows: int
    dim: str
    axis: tuple[tuple[str, int], ...]
    latent_group: tuple[tuple[str, tuple[int, ...]], ...]
    groups: int

    def with_rows(self, term_group: Any) -> Layout:
        """The layout of given rows."""
        latent_group = {name: np.array(group) for name, group in self.latent_group}
        return Layout(
            self.rows,
            self.dim,
            dict(self.axis),
            term_group,
            latent_group,
            self.groups,
        )


def find_layout(
    model: Model, structure: Structure, reading: Reading, call: Call, *, shared: bool = False
) -> Layout:
    """Finds the terms of each data point.

    Args:
      model: the NumPyro model.
      structure: its structure.
      reading: a reading of it, at all of its data.
      call: its arguments.
      shared: whether a data point may be other than a row of the GPs, and share rows with others.

    Returns:
      The layout.

    Raises:
      ValueError: if the data are not laid out along the rows of the GPs, or along an axis of their
        own.
    """
    if structure.below:
        raise ValueError(
            f"Site '{structure.below[0]}' is a latent variable that depends on a GP, and its value "
            "was found with all of the data: without a data point, what it said would still be in "
            "it. Put the variable into the likelihood, or take az.loo of "
            "to_arviz(key, fit, mcmc=mcmc), for an MCMC that was run on NUTS(collapse(fit))."
        )
    found = _reads_of_terms(model, reading, call)
    if not found:
        raise ValueError(
            "The model has no observed site that holds data, and its terms of numpyro.factor are "
            "single numbers, which say nothing about single data points. Observe the data with "
            "obs=y, or give numpyro.factor one number for each data point and not their sum."
        )
    counts = {name: site.rows for name, site in reading.gps.items()}
    axis = _axes_along_rows(found, counts)
    along_rows = not isinstance(axis, str)
    if isinstance(axis, str):
        if not shared:
            raise ValueError(axis)
        axis = _axes_of_points(found)
    n = next(iter(found.values())).low.shape[next(iter(axis.values()))]
    which = {
        name: np.moveaxis(read.which, axis[name], -2).reshape(-1, n, read.which.shape[-1])
        for name, read in found.items()
    }  # (terms, n, latents)
    labels, groups = _groups(which)
    term_group = {
        name: np.where(x.any(-1), labels[x.argmax(-1)], groups) for name, x in which.items()
    }
    latent_group, start = {}, 0
    for name, site in reading.gps.items():
        latent_group[name] = labels[start : start + site.functions]
        start += site.functions
    coordinates = np.concatenate([structure.axes[name] for name in reading.gps])
    for group in range(groups):
        own = coordinates[labels == group]
        if len(np.unique(own)) < len(own):
            raise ValueError(
                "A term of the likelihood is a sum of functions of several GPs. Leaving out a "
                "data point needs terms that couple the GPs they read, or that read one."
            )
    if along_rows:
        dim = row_dim(reading.trace, next(iter(counts)), n)
        return Layout(n, dim, axis, term_group, latent_group, groups)
    low, high = _rows_of_points(found, axis)
    sizes = {name: (site.functions, site.rows) for name, site in reading.gps.items()}
    own_rows = shared_rows(high >= low, high, sizes)
    dim = _point_dim(reading.trace, axis, n)
    return Layout(n, dim, axis, term_group, latent_group, groups, own_rows)


def _axes_along_rows(found: Mapping[str, Reads], counts: Mapping[str, int]) -> dict[str, int] | str:
    """Of each observed site the axis along the rows of all GPs, or what is in the way."""
    if len(set(counts.values())) > 1:
        return (
            f"The rows of the GP sites differ: {dict(counts)}, but here each GP must have a row "
            "for each data point. Give each GP the inputs of every data point: effects of groups "
            "b[group] are numpyro.sample('b', GP(kernels.Group(), group)), with the names of the "
            "groups as inducing inputs and learn_inducing=False."
        )
    first, n = next(iter(counts.items()))
    axis = {}
    for name, read in found.items():
        shape = read.low.shape[:-1]
        aligned = [a for a in reversed(range(len(shape))) if _runs_along_rows(read, a, n)]
        if not aligned:
            return (
                f"Observed site '{name}' has log densities of shape {shape}, and no axis of it "
                f"runs along the {n} rows of GP site '{first}', value by value. Here each data "
                "point must have a row of the GP: give the GP the inputs of every data point "
                "(X[group] in place of f[group]), in the order of the data, and let the likelihood "
                "be batched over them rather than one event."
            )
        axis[name] = aligned[0]
    return axis


def _axes_of_points(found: Mapping[str, Reads]) -> dict[str, int]:
    """Of each observed site an axis of data points that read one row of each function at most."""
    axis = {}
    for name, read in found.items():
        shape = read.low.shape[:-1]
        fitting = [
            a for a in reversed(range(len(shape))) if np.less_equal(*_along(read, a)[::-1]).all()
        ]
        if not fitting:
            raise ValueError(
                f"Observed site '{name}' has log densities of shape {shape}, and along no axis of "
                "it does each data point read one row of each GP. Let the likelihood be batched "
                "over the data points rather than one event, and numpyro.factor have one number "
                "for each of them."
            )
        axis[name] = fitting[0]
    sizes = {name: found[name].low.shape[a] for name, a in axis.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"The observed sites have different numbers of data points, {sizes}, so that there is "
            "no telling which belong together and are left out at once. Fit a model of each, or "
            "observe all of them as one site."
        )
    return axis


def _along(read: Reads, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest row of each function read at each index, ``(n, latents)``."""
    others = tuple(a for a in range(read.low.ndim - 1) if a != axis)
    return read.low.min(others), read.high.max(others)


def _rows_of_points(
    found: Mapping[str, Reads], axis: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The same over all observed sites; each point must read one row of a function at most."""
    both = [_along(read, axis[name]) for name, read in found.items()]
    low, high = np.min([x for x, _ in both], 0), np.max([x for _, x in both], 0)
    wrong = np.flatnonzero((low < high).any(-1))
    if len(wrong):
        raise ValueError(
            f"Data point {wrong[0]} of the observed sites {list(found)} reads different rows of "
            "one GP in each of them, and is left out of both at once. Fit a model of each, or give "
            "the sites the same order."
        )
    return low, high


def _point_dim(trace: Mapping[str, Message], axis: Mapping[str, int], points: int) -> str:
    """The name of the axis of data points: the plate along it, or one made of a site's name."""
    name, number = next(iter(axis.items()))
    shape = pointwise_log_prob(trace[name]).shape
    for frame in trace[name]["cond_indep_stack"]:
        if frame.size == points and len(shape) + frame.dim == number:
            return str(frame.name)
    return f"{name}_dim_{number}"


def observed_rows(layout: Layout, reading: Reading) -> np.ndarray:
    """Which rows are not masked out in all of their terms, ``(n,)``; the masks must be known."""
    observed = np.zeros(layout.rows, bool)
    for name, site in point_sites(reading.trace).items():
        mask = np.broadcast_to(unmasked(site["fn"])[1], pointwise_log_prob(site).shape)
        observed |= layout.by_row(name, np.array(mask)).any(0)
    return observed


def _reads_of_terms(model: Model, reading: Reading, call: Call) -> dict[str, Reads]:
    """What the log density of each data point reads, by observed site."""

    def log_probs(values: Mapping[str, Array], hyper: Any) -> dict[str, Array]:
        here = reading._replace(pinned={**reading.pinned, **hyper})
        return {name: term.log_prob for name, term in terms(model, here, call)(values).items()}

    values = {
        name: jnp.zeros((site.functions, site.rows), site.loc.dtype)
        for name, site in reading.gps.items()
    }
    return reads(log_probs, values, sources(reading.gps), hyper_values(reading)).results


def _runs_along_rows(read: Reads, axis: int, rows: int) -> bool:
    """Whether terms read no other rows of the GPs than their own index along an axis."""
    if read.low.shape[axis] != rows:
        return False
    index = np.arange(rows).reshape(-1, *[1] * (read.low.ndim - axis - 1))
    own = (read.low == index) & (read.high == index)
    return bool((own | read.none).all())


def _groups(which: Mapping[str, np.ndarray]) -> tuple[np.ndarray, int]:
    """A label for each latent function, shared by those that meet in a term, and their number."""
    from scipy.sparse.csgraph import connected_components

    flat = np.concatenate([x.reshape(-1, x.shape[-1]) for x in which.values()]).astype(np.float32)
    count, labels = connected_components(flat.T @ flat > 0, directed=False)
    return labels, count
