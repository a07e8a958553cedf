"""Where the likelihood terms of each data point are, and which values of the GPs they read.

A fit needs the sum of the log-likelihood alone. What is left out, weighted or compared afterwards
are its terms, one for each row of the data. Here they are found: the axis of each observed site
that runs along the rows of the GPs, and the latent functions that meet in a term, are read off the
program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.coupling import hyper_values, sources
from numpyro_tsvgp.model.likelihood import data_sites, pointwise_log_prob, terms
from numpyro_tsvgp.model.read import Message, Model, Reading
from numpyro_tsvgp.model.reads import Reads, reads
from numpyro_tsvgp.model.structure import Structure
from numpyro_tsvgp.model.wrapped import unmasked

__all__ = ["Layout", "find_layout", "observed_rows", "row_dim"]


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


def find_layout(model: Model, structure: Structure, reading: Reading, call: Call) -> Layout:
    """Finds the terms of each data point.

    Args:
      model: the NumPyro model.
      structure: its structure.
      reading: a reading of it, at all of its data.
      call: its arguments.

    Returns:
      The layout.

    Raises:
      ValueError: if the data are not laid out along the rows of the GPs.
    """
    if structure.below:
        raise ValueError(
            f"Site '{structure.below[0]}' is a latent variable that depends on a GP, and its value "
            "was found with all of the data: without a data point, what it said would still be in "
            "it. Put the variable into the likelihood, or take az.loo of "
            "to_arviz(key, fit, mcmc=mcmc), for an MCMC that was run on NUTS(collapse(fit))."
        )
    counts = {name: site.rows for name, site in reading.gps.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"Leaving out one data point needs GPs with a row for each, but the rows of the GP "
            f"sites differ: {counts}. Give each GP the inputs of every data point: effects of "
            "groups b[group] are numpyro.sample('b', GP(kernels.Group(), group)), with the names "
            "of the groups as inducing inputs and learn_inducing=False."
        )
    first, n = next(iter(counts.items()))
    found = _reads_of_terms(model, reading, call)
    if not found:
        raise ValueError(
            "The model has no observed site that holds data, only terms of numpyro.factor, which "
            "say nothing about single data points. Observe the data with obs=y."
        )
    axis = {}
    for name, read in found.items():
        shape = read.low.shape[:-1]
        aligned = [a for a in reversed(range(len(shape))) if _runs_along_rows(read, a, n)]
        if not aligned:
            raise ValueError(
                f"Observed site '{name}' has log densities of shape {shape}, and no axis of it "
                f"runs along the {n} rows of GP site '{first}', value by value. Leaving out one "
                "data point needs one row of the GP for each: give the GP the inputs of every "
                "data point (X[group] in place of f[group]), in the order of the data, and let "
                "the likelihood be batched over them rather than one event."
            )
        axis[name] = aligned[0]

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
    dim = row_dim(reading.trace, first, n)
    return Layout(n, dim, axis, term_group, latent_group, groups)


def observed_rows(layout: Layout, reading: Reading) -> np.ndarray:
    """Which rows are not masked out in all of their terms, ``(n,)``; the masks must be known."""
    observed = np.zeros(layout.rows, bool)
    for name, site in data_sites(reading.trace).items():
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
