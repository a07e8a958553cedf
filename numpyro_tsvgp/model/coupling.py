r"""Which function values meet in one likelihood term.

A site is right when each likelihood term reads at most one value of each latent function. That is
proven, not assumed: :mod:`numpyro_tsvgp.model.reads` reads it off the program, for all values of f
and of the hyperparameters. The same analysis tells which latent functions meet in a term, and so
how many dimensions a quadrature rule needs.

Where a program has an operation that cannot be looked into, values are moved instead: if moving
:math:`f_j` moves :math:`\partial \log p / \partial f_i`, some term reads both. That is done at
several random values of f and of the hyperparameters, and a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import (
    GPSite,
    Model,
    Reading,
    is_observed,
    on_some_rows,
    run_with,
)
from numpyro_tsvgp.model.reads import Source, Terms, terms
from numpyro_tsvgp.model.wrapped import unwrapped

__all__ = ["Couplings", "couplings", "hyper_values", "nudged", "sources"]

# Numbers that the analysis holds for one array; with more, it looks at some of the rows.
_NUMBERS = 2**25
_ROWS = 512
_PROBES = 4
_OF_CLASSES = (
    dist.CategoricalLogits,
    dist.CategoricalProbs,
    dist.MultinomialLogits,
    dist.MultinomialProbs,
)


class Couplings(NamedTuple):
    """What was found out about the terms of a likelihood.

    Attributes:
      axes: for each GP site the coordinate of the quadrature that each latent function uses.
      dim: how many latent functions meet in one term at the most.
      proven: whether it was read off the program rather than probed.
    """

    axes: dict[str, np.ndarray]
    dim: int
    proven: bool


def couplings(model: Model, reading: Reading, call: Call, below: Sequence[str]) -> Couplings:
    r"""Checks additivity and gives latent functions that meet in a term different coordinates.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.
      below: latent variables that are terms of the likelihood.

    Returns:
      What was found.

    Raises:
      ValueError: if one term reads two values of one latent function, naming both.
    """
    latents = [(name, p) for name, site in reading.gps.items() for p in range(site.functions)]
    meets, unclear = _proof(model, *_of_bounded_size(model, reading, call), below, latents)
    if unclear:
        names = ", ".join(sorted(unclear))
        warnings.warn(
            f"The likelihood has operations that cannot be analysed ({names}). That its terms read "
            f"one value of each GP was probed at {_PROBES} random values, not proven. Check the "
            "fit with fit.audit(key).",
            stacklevel=stack_level(),
        )
        meets = np.zeros((len(latents), len(latents)), bool)
        for seed in range(_PROBES):
            meets |= _Probe(model, reading, call, below, seed).meets(latents)
    groups = _components(meets)
    axes = {name: np.zeros(site.functions, int) for name, site in reading.gps.items()}
    for group in groups:
        for axis, member in enumerate(group):
            name, p = latents[member]
            axes[name][p] = axis
    return Couplings(axes, max(len(group) for group in groups), not unclear)


def sources(gps: Mapping[str, GPSite]) -> dict[str, Source]:
    """Where values ``{site: (functions, n)}`` come from: all latent functions are numbered."""
    out, first = {}, 0
    for name, site in gps.items():
        latent, row = np.indices((site.functions, site.rows))
        out[name] = Source(first + latent, row)
        first += site.functions
    return out


def hyper_values(reading: Reading) -> dict[str, Any]:
    """Values that a fit may change: everything that is pinned but the indices of plates."""
    return {k: v for k, v in reading.pinned.items() if reading.trace[k]["type"] != "plate"}


def _values(gps: Mapping[str, GPSite]) -> dict[str, Array]:
    return {
        name: jnp.zeros((site.functions, site.rows), site.loc.dtype) for name, site in gps.items()
    }


def _densities(
    model: Model, reading: Reading, call: Call, below: Sequence[str], values: Any, hyper: Any
) -> dict[str, Array]:
    """Log densities of all sites that are terms of the likelihood, before they are summed."""
    gps = {name: reading.gps[name].unflatten(value) for name, value in values.items()}
    trace = run_with(model, call, {**reading.pinned, **hyper, **gps})
    return {
        name: site["fn"].log_prob(site["value"])
        for name, site in trace.items()
        if is_observed(site) or name in below
    }


# ---- by proof --------------------------------------------------------------------------------


def _proof(
    model: Model,
    reading: Reading,
    call: Call,
    below: Sequence[str],
    latents: list[tuple[str, int]],
) -> tuple[np.ndarray, frozenset[str]]:
    """Which latent functions meet, and the operations that leave it unclear."""
    gps = reading.gps
    found = terms(
        lambda values, hyper: _densities(model, reading, call, below, values, hyper),
        _values(gps),
        sources(gps),
        hyper_values(reading),
    )
    meets = np.eye(len(latents), dtype=bool)
    for observed, term in found.results.items():
        if term.offence is not None:
            if found.opaque:
                return meets, found.opaque
            fn = unwrapped(reading.trace[observed]["fn"])
            _refuse(observed, term, latents, of_classes=isinstance(fn, _OF_CLASSES))
        meets |= term.meets
    return meets, frozenset()


def _refuse(
    observed: str, term: Terms, latents: list[tuple[str, int]], *, of_classes: bool
) -> None:
    offence = term.offence
    assert offence is not None
    name, p = latents[offence.latent]
    several = sum(other == name for other, _ in latents) > 1
    value = f"{name}[{p}, {{}}]" if several else f"{name}[{{}}]"
    hint = "(Select values by index, f[group], rather than by products with masks.)"
    if of_classes:
        hint = (
            "(The last axis of its probabilities is that of the classes, and each class has a "
            "function: `with numpyro.plate('classes', C): f = numpyro.sample('f', GP(kernel, X))`, "
            "and then logits=f.T.)"
        )
    raise ValueError(
        f"The likelihood is not a sum over data points: one term of site '{observed}' reads both "
        f"{value.format(offence.low)} and {value.format(offence.high)} of GP site '{name}'. "
        "t-SVGP needs likelihood terms that read one value of each GP. Use NUTS or another guide "
        f"for this model, or give the correlation to the kernel. {hint}"
    )


def _of_bounded_size(model: Model, reading: Reading, call: Call) -> tuple[Reading, Call]:
    """The model on some of its rows, where the analysis of all would not fit in memory."""
    functions = sum(site.functions for site in reading.gps.values())
    numbers = sum(site.functions * site.rows for site in reading.gps.values()) * (2 * functions + 1)
    sizes = {site.rows for site in reading.gps.values()}
    if numbers <= _NUMBERS or len(sizes) != 1:
        return reading, call
    return on_some_rows(model, reading, call, _ROWS) or (reading, call)


def _components(meets: np.ndarray) -> list[list[int]]:
    """Latent functions that meet, directly or through others."""
    unseen, groups = set(range(len(meets))), []
    while unseen:
        group, stack = [], [min(unseen)]
        while stack:
            a = stack.pop()
            if a in unseen:
                unseen.remove(a)
                group.append(a)
                stack.extend(b for b in unseen if meets[a, b] or meets[b, a])
        groups.append(sorted(group))
    return groups


# ---- by probing ------------------------------------------------------------------------------


class _Probe:
    """Moves some function values and tells which gradients of each site's density moved."""

    def __init__(
        self, model: Model, reading: Reading, call: Call, below: Sequence[str], seed: int
    ) -> None:
        self.gps = reading.gps
        rng = np.random.RandomState(seed)
        self.base, self.shift = {}, {}
        for name, site in self.gps.items():
            noise = rng.standard_normal((2, site.functions, site.rows))
            # Apart from one another and from zero, where likelihoods can be symmetric.
            self.base[name] = site.loc + jnp.asarray(0.5 * noise[0], site.loc.dtype)
            self.shift[name] = jnp.asarray(0.25 * np.abs(noise[1]) + 0.1, site.loc.dtype)
        hyper = {
            k: nudged(v, rng) if seed else v  # the values it starts from are among those tried
            for k, v in hyper_values(reading).items()
        }

        def gradients(values: Any) -> Any:
            # One gradient a site: a precise one must not hide what another does.
            return jax.jacrev(
                lambda f: {
                    k: jnp.sum(v)
                    for k, v in _densities(model, reading, call, below, f, hyper).items()
                }
            )(values)

        self._gradients = jax.jit(gradients)
        self._still = jax.tree.map(np.asarray, self._gradients(self.base))

    def _changes(self, masks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        moved = self._gradients(
            {
                name: base + self.shift[name] * masks.get(name, False)
                for name, base in self.base.items()
            }
        )
        out = {name: np.zeros(base.shape, bool) for name, base in self.base.items()}
        for site, still in self._still.items():
            for name, before in still.items():
                after, eps = np.asarray(moved[site][name]), np.finfo(before.dtype).eps
                scale = np.maximum(np.abs(before), np.abs(after)) + np.median(np.abs(before))
                out[name] |= np.abs(after - before) > 1e3 * eps * scale
        return out

    def meets(self, latents: list[tuple[str, int]]) -> np.ndarray:
        """Which latent functions meet in a term; raises where one meets itself at two rows."""
        for bit in range(max(max(s.rows - 1, 1).bit_length() for s in self.gps.values())):
            for name, p in latents:
                rows = (np.arange(self.gps[name].rows) >> bit) & 1 == 1
                mask = np.zeros(self.base[name].shape, bool)
                mask[p] = rows
                wrong = np.flatnonzero(self._changes({name: mask})[name][p] & ~rows)
                if len(wrong):
                    raise ValueError(
                        "The likelihood is not a sum over data points: changing other values of "
                        f"GP site '{name}' changes how the log-density depends on "
                        f"{name}[{wrong[0]}] (this was found by probing). t-SVGP needs likelihood "
                        "terms that read one value of each GP. Use NUTS or another guide for this "
                        "model, or give the correlation to the kernel."
                    )
        touches = np.eye(len(latents), dtype=bool)
        for row, (name, p) in enumerate(latents):
            mask = np.zeros(self.base[name].shape, bool)
            mask[p] = True
            changed = self._changes({name: mask})
            touches[row] |= np.concatenate([changed[other].any(-1) for other in self.gps])
        return touches


def nudged(value: Any, rng: np.random.RandomState) -> Any:
    """A hyperparameter at another value, of the same sign and order of magnitude."""
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    noise = jnp.asarray(rng.standard_normal(value.shape), value.dtype)
    return value * jnp.exp(0.1 * noise) + jnp.where(value == 0, 0.1 * noise, 0.0)
