"""What a model is made of: computed from the model and its data, and remembered nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.dependence import depends
from numpyro_tsvgp.model.likelihood import density
from numpyro_tsvgp.model.read import Message, Model, Reading, is_latent, read, run_with

__all__ = [
    "HyperSites",
    "Structure",
    "draws_inputs",
    "hyper_sites",
    "latents_below",
    "moves_with",
    "unread",
    "without_slope",
]


class HyperSites(NamedTuple):
    """The sampled sites that a guide of hyperparameters holds.

    Attributes:
      names: their names.
      signature: shape and support of each, which decide what a guide of them looks like.
      sampled: names of all sampled sites of the model.
    """

    names: tuple[str, ...]
    signature: tuple[tuple[tuple[int, ...], str], ...]
    sampled: frozenset[str]


def hyper_sites(reading: Reading, names: Iterable[str]) -> HyperSites:
    """Some sampled sites of a reading as hyperparameters."""
    names = tuple(names)
    sites = [reading.trace[name] for name in names]
    return HyperSites(
        names,
        tuple((jnp.shape(site["value"]), str(site["fn"].support)) for site in sites),
        frozenset(name for name, site in reading.trace.items() if site["type"] == "sample"),
    )


@dataclass(frozen=True)
class Structure:
    """What stays the same in every run of a model on some data.

    Attributes:
      gps: names of the GP sites.
      hyper: the sampled sites that the guide of hyperparameters holds.
      below: names of those whose density depends on the values of GPs.
      coordinates: for each GP site the coordinate of the quadrature that each latent function uses.
      dim: how many latent functions meet in one likelihood term at the most.
      proven: whether that was read off the program, for all values, rather than probed.
      reads_sums: whether every term reads the functions through one sum of them.
    """

    gps: tuple[str, ...]
    hyper: HyperSites
    below: tuple[str, ...]
    coordinates: tuple[tuple[str, tuple[int, ...]], ...]
    dim: int
    proven: bool
    reads_sums: bool

    @property
    def axes(self) -> dict[str, np.ndarray]:
        """The coordinates, by GP site."""
        return {name: np.array(axes) for name, axes in self.coordinates}

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Names of the hyperparameters that the model samples."""
        return self.hyper.names

    @property
    def above(self) -> list[str]:
        """Hyperparameters whose prior does not depend on GPs."""
        return [name for name in self.hyperparameters if name not in self.below]

    def is_hyper_or_frame(self, site: Message) -> bool:
        """Whether a site belongs to the model of the hyperparameters.

        Samplers and reparameterizations add sites of their own while they process one that they
        can see (the Jacobian of a transform, a decentred variable): those belong to it as well.
        """
        if site["type"] in ("param", "plate") or site.get("name") in self.hyperparameters:
            return True
        return site["type"] == "sample" and site["name"] not in self.hyper.sampled


def _values_of_gps(reading: Reading) -> dict[str, Any]:
    return {name: reading.trace[name]["value"] for name in reading.gps}


def latents_below(model: Model, reading: Reading, call: Call) -> set[str]:
    """Latent variables whose density depends on the values of GPs, directly or through others.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.

    Returns:
      Their names.
    """
    latents = [name for name, site in reading.trace.items() if is_latent(site)]
    if not latents:
        return set()

    def densities(values: dict[str, Any]) -> dict[str, Any]:
        trace = run_with(model, call, {**reading.pinned, **values})
        return {name: density(trace[name]) for name in latents}

    found: set[str] = set()
    while True:
        values = _values_of_gps(reading) | {name: reading.pinned[name] for name in found}
        now = {name for name, yes in depends(densities, values).items() if yes}
        if now <= found:
            return found
        found = now


def unread(model: Model, reading: Reading, call: Call, names: set[str]) -> set[str]:
    """Latent variables that no density other than their own depends on.

    Such a variable integrates to one, whatever its value: data to impute, or to predict.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.
      names: the variables to look at.

    Returns:
      Those of them that nothing reads.
    """
    found = set()
    for name in names:

        def others(value: Any, name: str = name) -> list[Any]:
            values = {**reading.pinned, **_values_of_gps(reading), name: value}
            trace = run_with(model, call, values)
            return [
                density(site)
                for other, site in trace.items()
                if site["type"] == "sample" and other != name and other not in reading.gps
            ] + _priors(model, call, values)

        if not any(jax.tree.leaves(depends(others, jnp.asarray(reading.pinned[name])))):
            found.add(name)
    return found


def _priors(model: Model, call: Call, values: Mapping[str, Any]) -> list[Any]:
    """Inputs, means and kernels of all GP sites."""
    gps = read(model, call, values=values, key=jax.random.key(0)).gps
    return [jax.tree.leaves(site.gp) for site in gps.values()]


def moves_with(
    model: Model, reading: Reading, call: Call, values: Mapping[str, Any]
) -> dict[str, dict[str, bool]]:
    """Which parts of the prior of each GP site depend on the values of other sites.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.
      values: the values of the sites in question.

    Returns:
      By GP site, whether its ``inputs``, ``mean`` and ``kernel`` depend on them.
    """

    def priors(values: dict[str, Any]) -> dict[str, Any]:
        given = {**reading.pinned, **_values_of_gps(reading), **values}
        gps = read(model, call, values=given, key=jax.random.key(0)).gps
        return {
            name: {"inputs": gp.X, "mean": gp.loc, "kernel": jax.tree.leaves(gp.kernel)}
            for name, (gp, _) in gps.items()
        }

    if not values:
        return {name: dict.fromkeys(("inputs", "mean", "kernel"), False) for name in reading.gps}
    found = depends(priors, dict(values))
    return {
        name: {part: any(jax.tree.leaves(flags)) for part, flags in parts.items()}
        for name, parts in found.items()
    }


def without_slope(model: Model, reading: Reading, call: Call, names: Iterable[str]) -> list[str]:
    """Hyperparameters that a model reads, but that none of its densities has a slope in.

    Such as a threshold: ``jnp.where(X < c, ...)`` depends on c, and its derivative is zero wherever
    there is one. It is read off the program, for all values.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.
      names: hyperparameters to look at.

    Returns:
      Those of the names.
    """
    found = []
    for name in names:
        value = jnp.asarray(reading.pinned[name])
        if not jnp.issubdtype(value.dtype, jnp.floating):
            continue

        def densities(value: Any, name: str = name) -> list[Any]:
            values = {**reading.pinned, **_values_of_gps(reading), name: value}
            trace = run_with(model, call, values)
            sampled = [site for site in trace.values() if site["type"] == "sample"]
            others = [density(site) for site in sampled if site["name"] not in reading.gps]
            leaves = jax.tree.leaves([others, _priors(model, call, values)])
            return [leaf for leaf in leaves if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]

        def slopes(change: Any, value: Any = value, densities: Any = densities) -> list[Any]:
            return jax.jvp(densities, (value,), (change,))[1]

        read_at_all, moved = (
            any(jax.tree.leaves(depends(function, value))) for function in (densities, slopes)
        )
        if read_at_all and not moved:
            found.append(name)
    return found


def draws_inputs(model: Model, reading: Reading, call: Call) -> bool:
    """Whether GPs are at inputs that plates draw (X[rows]), and not at those in the arguments."""
    drawn = {
        name: site["value"]
        for name, site in reading.plates.items()
        if len(site["value"]) < site["args"][0]
    }
    return any(parts["inputs"] for parts in moves_with(model, reading, call, drawn).values())
