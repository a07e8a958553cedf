"""What the checks before a fit find out of a model, and the programs they compile for it.

Operations of checks run one by one: their small programs serve every model of a process, where one
program for all of them would be compiled anew for each. One is worth a program of its own, kept for
further data of the same shape: the gradient of the density.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.batches import of_all_rows
from numpyro_tsvgp.model.likelihood import log_likelihood
from numpyro_tsvgp.model.read import Model, Reading, read
from numpyro_tsvgp.model.structure import latents_below, moves_with, unread

__all__ = [
    "Latents",
    "Looks",
    "is_noise",
    "latents_of",
    "looks_of",
]


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


@jax.jit
def is_noise(kernel: Any, X: Array) -> Array:
    """Whether a kernel is noise alone, at some inputs."""
    diagonal = kernel.diag(X)
    return (diagonal > 0).any() & (kernel.noise(X) == diagonal).all()


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


class Looks:
    """The compiled programs of one model, for data of any shape.

    Args:
      model: the NumPyro model.
    """

    def __init__(self, model: Model) -> None:
        of = _held_weakly(model)

        def slopes(
            call: Call, pinned: dict[str, Any], values: dict[str, Array], below: frozenset[str]
        ) -> dict[str, Array]:
            reading = read(of(), call, values=pinned, key=jax.random.key(0), first_rows=True)
            everywhere, all_rows = of_all_rows(of(), reading, call)
            return jax.grad(log_likelihood(everywhere, all_rows, call, below))(values)

        self._slopes = jax.jit(slopes, static_argnames="below")

    def slopes(
        self,
        call: Call,
        hyper: Mapping[str, Any],
        values: Mapping[str, Array],
        below: frozenset[str],
    ) -> dict[str, Array] | None:
        """The gradient of the log-likelihood of all rows, or None if it cannot be traced.

        Args:
          call: arguments of the model.
          hyper: values of all sites but plates, GPs and data.
          values: values of the GPs, ``{site: (functions, n)}``.
          below: latent variables whose density depends on GPs.

        Returns:
          The gradient in the values.
        """
        try:
            return self._slopes(call, dict(hyper), dict(values), below=below)
        except Exception:  # whatever a model raises, it raises again where messages are made of it
            return None


def _held_weakly(model: Model) -> Callable[[], Any]:
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
