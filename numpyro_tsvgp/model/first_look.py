"""What the checks before a fit need to know of a model, computed by two compiled programs.

Run as it is, a model is dozens of small programs, one for each operation, and the checks run it
many times. Here the numbers that they judge come out of two programs, which are kept for
further data of the same shape. A model that cannot be traced with data whose values are not known
(it may ask for the largest label) is looked at operation by operation, with the same result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.batches import of_all_rows
from numpyro_tsvgp.model.data_checks import in_supports
from numpyro_tsvgp.model.density_checks import Densities, Ranges, densities_at, ranges_at
from numpyro_tsvgp.model.read import Model, Reading, read
from numpyro_tsvgp.model.scale_checks import may_be_off_scale
from numpyro_tsvgp.model.structure import latents_below, moves_with, unread

__all__ = [
    "FirstLook",
    "Latents",
    "Likelihood",
    "Looks",
    "held_weakly",
    "is_noise",
    "latents_of",
    "look_at",
    "looks_of",
]

# Inputs at which a kernel is looked at.
_SOME = 8


@dataclass(frozen=True)
class Latents:
    """What the program of a model says of its latent variables, whatever their values are.

    Attributes:
      below: names of those whose density depends on GPs.
      ignored: names of those that depend on GPs and that nothing reads.
      deep: the GP sites whose prior depends on the value of a GP.
    """

    below: frozenset[str]
    ignored: frozenset[str]
    deep: tuple[str, ...]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "supports", "noise", "off_scale"],
    meta_fields=["latents"],
)
@dataclass(frozen=True)
class FirstLook:
    """What one run of a model on its data shows.

    Attributes:
      values: of all sites but plates, GPs and data.
      supports: by observed site, which data lie in the support.
      noise: by GP site, whether its kernel is noise alone.
      off_scale: whether data or inputs may be far from what the prior expects.
      latents: what is known of the latent variables.
    """

    values: dict[str, Any]
    supports: dict[str, Array]
    noise: dict[str, Array]
    off_scale: Array
    latents: Latents


class Likelihood(NamedTuple):
    """The likelihood of a model at values of its GPs: see the checks of ranges and densities."""

    ranges: Ranges
    densities: Densities


def is_noise(kernel: Any, X: Array) -> Array:
    """Whether a kernel is noise alone, at the first of some inputs."""
    diagonal = kernel.diag(X[:_SOME])
    return (diagonal > 0).any() & (kernel.noise(X[:_SOME]) == diagonal).all()


def latents_of(model: Model, reading: Reading, call: Call) -> Latents:
    """Finds out which latent variables depend on GPs.

    Args:
      model: the NumPyro model.
      reading: a reading of it, traced or not.
      call: its arguments.

    Returns:
      What was found.
    """
    below = latents_below(model, reading, call)
    ignored = unread(model, reading, call, below)
    values = {name: reading.trace[name]["value"] for name in reading.gps}
    moves = moves_with(model, reading, call, values)
    deep = tuple(name for name, parts in moves.items() if any(parts.values()))
    return Latents(frozenset(below - ignored), frozenset(ignored), deep)


def look_at(model: Model, call: Call) -> FirstLook:
    """Runs a model on its data.

    Args:
      model: the NumPyro model.
      call: its arguments, traced.

    Returns:
      What the run shows.
    """
    reading = read(model, call, key=jax.random.key(0), first_rows=True)
    return FirstLook(
        values={k: v for k, v in reading.pinned.items() if reading.trace[k]["type"] != "plate"},
        supports=in_supports(reading),
        noise={name: is_noise(site.gp.kernel, site.gp.X) for name, site in reading.gps.items()},
        off_scale=may_be_off_scale(model, reading, call),
        latents=latents_of(model, reading, call),
    )


def _likelihood(
    model: Model,
    call: Call,
    values: Mapping[str, Any],
    below: frozenset[str],
    scores: Mapping[str, Array],
) -> Likelihood:
    reading = read(model, call, values=values, key=jax.random.key(0), first_rows=True)
    everywhere, all_rows = of_all_rows(model, reading, call)
    return Likelihood(
        ranges_at(everywhere, all_rows, call, below, scores),
        densities_at(everywhere, all_rows, call, below, scores),
    )


class Looks:
    """The compiled programs of one model, for data of any shape.

    Args:
      model: the NumPyro model.
    """

    def __init__(self, model: Model) -> None:
        of = held_weakly(model)
        self.points: dict[Any, Any] = {}  # where guides of hyperparameters start
        self._first = jax.jit(lambda call: look_at(of(), call))
        self._likelihood = jax.jit(
            lambda call, values, below, scores: _likelihood(of(), call, values, below, scores),
            static_argnames="below",
        )

    def first(self, call: Call) -> FirstLook | None:
        """What one run of the model shows, or None if it cannot be traced."""
        return _or_none(self._first, call)

    def likelihood(
        self,
        call: Call,
        values: Mapping[str, Any],
        below: frozenset[str],
        scores: Mapping[str, Any],
    ) -> Likelihood | None:
        """The likelihood at values of the GPs, or None if it cannot be traced.

        Args:
          call: arguments of the model.
          values: of the sites of the model, as a first look has them.
          below: latent variables whose density depends on GPs.
          scores: standard scores of the values of the GPs.

        Returns:
          What the checks of the density look at.
        """
        return _or_none(self._likelihood, call, values, below=below, scores=scores)


def held_weakly(model: Model) -> Callable[[], Any]:
    """A function that gives the model for as long as somebody else has it."""
    try:
        return weakref.ref(model)
    except TypeError:
        return lambda: model


_looks: weakref.WeakKeyDictionary[Any, tuple[str, Looks]] = weakref.WeakKeyDictionary()


def looks_of(model: Model, mark: str) -> Looks:
    """The compiled programs of a model, the same for all drivers of it and gone with it.

    Args:
      model: the NumPyro model.
      mark: what changes with the model's code and all that it refers to, so that one whose
        surroundings have changed is looked at afresh.

    Returns:
      The programs.
    """
    try:
        known = _looks.get(model)
        if known is None or known[0] != mark:
            _looks[model] = known = (mark, Looks(model))
    except TypeError:  # it cannot be hashed, or not be referred to weakly
        return Looks(model)
    return known[1]


def _or_none(program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return program(*args, **kwargs)
    except Exception:  # whatever a model raises, it raises again where messages are made of it
        return None
