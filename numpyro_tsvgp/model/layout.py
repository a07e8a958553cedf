"""The log-likelihood of each data point on its own, and which values of the GPs it reads.

A fit needs the sum of the log-likelihood alone. What is left out, weighted or compared afterwards
are its terms, one for each row of the data. Here the terms are found: the axis of each observed
site that runs along the rows of the GPs is tested by moving some rows and looking at which terms
move, and latent functions that meet in a term are put into one group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from numpyro_tsvgp.extract import Message, Model, Reading, WholePlates, is_observed
from numpyro_tsvgp.guide import AutoDualGaussian

__all__ = ["Layout", "Terms", "data_sites", "find_layout", "log_prob", "row_dim", "terms", "whole"]


def whole(
    guide: AutoDualGaussian, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> AutoDualGaussian:
    """The guide on a model that does not subsample, whatever its plates say.

    Args:
      guide: a fitted guide; it is not changed.
      args: arguments of the model, with the data.
      kwargs: keyword arguments of the model.

    Returns:
      A guide with the same parameters.
    """
    guide.setup(*args, **kwargs)
    twin = vars(guide).get("_whole")
    if twin is None:  # kept, so that what was compiled for it serves again
        twin = copy.copy(guide)
        twin.model = WholePlates(guide.model)
        twin._whole = twin
        guide._whole = twin
    return twin


# ---- observed sites --------------------------------------------------------------------------


def data_sites(trace: Mapping[str, Message]) -> dict[str, Message]:
    """Observed sites that hold data; those of ``numpyro.factor`` hold none."""
    return {
        name: site
        for name, site in trace.items()
        if is_observed(site) and not isinstance(_base(site["fn"]), dist.Unit)
    }


def _base(fn: Any) -> Any:
    while isinstance(fn, dist.MaskedDistribution | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn


def log_prob(site: Message) -> Array:
    """Log density of each data point of an observed site, without its scale.

    Where ``to_event`` made one event of all data, it is taken apart again.
    """
    fn = site["fn"]
    if isinstance(fn, dist.Independent) and not fn.batch_shape:
        fn = fn.base_dist
    return fn.log_prob(site["value"])


def _mask(site: Message, shape: tuple[int, ...]) -> np.ndarray:
    fn, mask = site["fn"], np.ones(shape, bool)
    while isinstance(fn, dist.MaskedDistribution):
        mask = mask & np.broadcast_to(np.asarray(fn._mask), shape)
        fn = fn.base_dist
    return mask


def row_dim(trace: Mapping[str, Message], gp: str, rows: int) -> str:
    """The name of the axis of a GP: the plate of the data along it, or one made of its name."""
    own = {frame.name for frame in trace[gp]["cond_indep_stack"]}
    along = {
        frame.name
        for site in trace.values()
        if site["type"] == "sample"
        for frame in site["cond_indep_stack"]
        if frame.size == rows and frame.name not in own
    }
    return along.pop() if len(along) == 1 else f"{gp}_dim_{len(trace[gp]['fn'].batch_shape)}"


# ---- the terms -------------------------------------------------------------------------------


class Terms(NamedTuple):
    """Log densities of one observed site and their scale, as the model shapes them."""

    log_prob: Array
    scale: Any


def terms(
    model: Model, reading: Reading, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[Mapping[str, Array]], dict[str, Terms]]:
    """The terms of the log-likelihood as a function of the values of the GPs.

    Args:
      model: the NumPyro model.
      reading: a reading of it, whose values are pinned.
      args: arguments of the model.
      kwargs: keyword arguments of the model.

    Returns:
      A function from ``{GP site: values of shape (latents, n)}`` to the terms of each observed
      site that holds data.
    """

    def evaluate(values: Mapping[str, Array]) -> dict[str, Terms]:
        data = dict(reading.pinned)
        data |= {name: reading.gps[name].unflatten(value) for name, value in values.items()}
        with (
            handlers.block(),
            handlers.trace() as trace,
            handlers.seed(rng_seed=0),
            handlers.substitute(data=data),
        ):
            model(*args, **kwargs)
        return {
            name: Terms(log_prob(site), 1.0 if site["scale"] is None else site["scale"])
            for name, site in data_sites(trace).items()
        }

    return evaluate


class Layout(NamedTuple):
    """Where the terms of each data point are, and which latent functions they read.

    Latent functions that meet in a term share a group; an integral over them factorises over
    groups.
    """

    rows: int
    dim: str  # name of the axis along the rows
    observed: np.ndarray  # (n,), rows that are not masked out
    axis: dict[str, int]  # of each observed site, the axis along the rows
    term_group: dict[str, np.ndarray]  # (terms, n); the number of groups where no GP is read
    latent_group: dict[str, np.ndarray]  # (latents,)
    groups: int

    def by_row(self, name: str, values: Any) -> Any:
        """Values shaped like an observed site as ``(terms, n)``."""
        xp = jnp if isinstance(values, jax.Array) else np
        return xp.moveaxis(values, self.axis[name], -1).reshape(-1, self.rows)

    def sum_terms(self, terms: Mapping[str, Terms]) -> Array:
        """Log densities summed over the terms of each group: ``(groups + 1, n)``."""
        out = jnp.zeros((self.groups + 1, self.rows))
        columns = jnp.arange(self.rows)
        for name, term in terms.items():
            out = out.at[self.term_group[name], columns].add(self.by_row(name, term.log_prob))
        return out

    def sum_latents(self, values: Mapping[str, Array]) -> Array:
        """Values of each latent function summed over those of each group: ``(groups + 1, n)``."""
        out = jnp.zeros((self.groups + 1, self.rows))
        for name, value in values.items():
            out = out.at[self.latent_group[name]].add(value)
        return out


def find_layout(
    guide: AutoDualGaussian, reading: Reading, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Layout:
    """Finds the terms of each data point by moving values of the GPs.

    Args:
      guide: a guide from :func:`whole`.
      reading: a reading of its model.
      args: arguments of the model, with the data.
      kwargs: keyword arguments of the model.

    Returns:
      The layout.

    Raises:
      ValueError: if the data are not laid out along the rows of the GPs.
    """
    counts = {name: site.rows for name, site in reading.gps.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"Leaving out one data point needs GPs with a row for each, but the rows of the GP "
            f"sites differ: {counts}."
        )
    first, n = next(iter(counts.items()))
    probe = _Probe(guide.model, reading, args, kwargs)
    data = data_sites(reading.trace)
    axis = {}
    for name, shape in probe.shapes.items():
        candidates = [a for a in reversed(range(len(shape))) if shape[a] == n]
        aligned = [a for a in candidates if probe.runs_along_rows(name, a)]
        if not aligned:
            raise ValueError(
                f"Observed site '{name}' has log densities of shape {shape}, and no axis of it "
                f"runs along the {n} rows of GP site '{first}', value by value. Leaving out one "
                "data point needs one row of the GP for each: give the GP the inputs of every "
                "data point (X[group] in place of f[group]), in the order of the data, and let "
                "the likelihood be batched over them rather than one event."
            )
        axis[name] = aligned[0]

    labels, groups, term_group = probe.groups(axis)
    latent_group, start = {}, 0
    for name, site in reading.gps.items():
        latent_group[name] = labels[start : start + site.latents]
        start += site.latents
    coordinates = np.concatenate([guide.structure.axes[name] for name in reading.gps])
    for group in range(groups):
        own = coordinates[labels == group]
        if len(np.unique(own)) < len(own):
            raise ValueError(
                "A term of the likelihood is a sum of functions of several GPs. Leaving out a "
                "data point needs terms that couple the GPs they read, or that read one."
            )

    observed = np.zeros(n, bool)
    for name, shape in probe.shapes.items():
        mask = np.moveaxis(_mask(data[name], shape), axis[name], -1)
        observed |= mask.reshape(-1, n).any(0)
    dim = row_dim(reading.trace, first, n)
    return Layout(n, dim, observed, axis, term_group, latent_group, groups)


class _Probe:
    """Moves values of the GPs and tells which terms moved."""

    def __init__(
        self,
        model: Model,
        reading: Reading,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.gps = reading.gps
        self.rows = next(iter(reading.gps.values())).rows
        rng = np.random.RandomState(0)
        self.base, self.shift = {}, {}
        for name, site in reading.gps.items():
            noise = rng.standard_normal((2, site.latents, site.rows))
            # Apart from one another and from zero, where likelihoods can be symmetric.
            self.base[name] = site.loc + jnp.asarray(0.5 * noise[0], site.loc.dtype)
            self.shift[name] = jnp.asarray(0.25 * np.abs(noise[1]) + 0.1, site.loc.dtype)

        @jax.jit
        def evaluate(values: Mapping[str, Array], data: Any) -> dict[str, Array]:
            found = terms(model, reading, *data)(values)
            return {name: term.log_prob for name, term in found.items()}

        self._evaluate = lambda values: evaluate(values, (args, dict(kwargs)))
        self._still = {name: np.asarray(v) for name, v in self._evaluate(self.base).items()}
        self.shapes = {name: v.shape for name, v in self._still.items()}
        self._by_rows: list[tuple[np.ndarray, dict[str, np.ndarray]]] | None = None

    def _changes(self, masks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        moved = self._evaluate(
            {name: self.base[name] + self.shift[name] * mask for name, mask in masks.items()}
        )
        # A term that does not read a value is computed from the same numbers as before.
        return {
            name: ~np.isclose(v, self._still[name], 8 * jnp.finfo(v.dtype).eps, 0, equal_nan=True)
            for name, v in moved.items()
        }

    def runs_along_rows(self, name: str, axis: int) -> bool:
        """Whether moving some rows of the GPs moves no term at other indices of an axis."""
        if self._by_rows is None:
            self._by_rows = []
            # Every pair of rows differs in some bit; each bit is tried set and unset, because a
            # term may read a row without the reverse being true.
            for bit in range(max(self.rows - 1, 1).bit_length()):
                for value in (0, 1):
                    rows = (np.arange(self.rows) >> bit) & 1 == value
                    masks = {k: np.broadcast_to(rows, v.shape) for k, v in self.base.items()}
                    self._by_rows.append((rows, self._changes(masks)))
        return not any(
            np.moveaxis(changed[name], axis, -1)[..., ~rows].any()
            for rows, changed in self._by_rows
        )

    def groups(self, axis: Mapping[str, int]) -> tuple[np.ndarray, int, dict[str, np.ndarray]]:
        """Groups of latent functions that meet in a term, and the group that each term reads."""
        from scipy.sparse.csgraph import connected_components

        reads: dict[str, list[np.ndarray]] = {name: [] for name in self.shapes}
        for gp, site in self.gps.items():
            for latent in range(site.latents):
                masks = {k: np.zeros(v.shape, bool) for k, v in self.base.items()}
                masks[gp][latent] = True
                for name, changed in self._changes(masks).items():
                    by_row = np.moveaxis(changed, axis[name], -1).reshape(-1, self.rows)
                    reads[name].append(by_row)
        stacked = {name: np.stack(parts) for name, parts in reads.items()}
        flat = np.concatenate([x.reshape(len(x), -1) for x in stacked.values()], -1)
        meet = flat.astype(np.float32) @ flat.T.astype(np.float32) > 0
        count, labels = connected_components(meet, directed=False)
        term_group = {
            name: np.where(x.any(0), labels[x.argmax(0)], count) for name, x in stacked.items()
        }
        return labels, count, term_group
