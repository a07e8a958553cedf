r"""Which function values meet in one likelihood term.

A site is right when each likelihood term reads at most one value of each latent function. That
is tested, not assumed: if moving :math:`f_j` moves :math:`\partial \log p / \partial f_i`, some
term reads both. Moving all indices that have a given bit set, for each bit in turn, separates
every pair in about :math:`\log_2 n` gradients. The same test between latent functions tells
which of them meet in a term, and so how many dimensions a quadrature rule needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.likelihood import log_likelihood
from numpyro_tsvgp.model.read import GPSite, Model, Reading

__all__ = ["couplings"]


def couplings(
    model: Model, reading: Reading, call: Call, below: list[str]
) -> tuple[dict[str, np.ndarray], int, bool]:
    r"""Checks additivity and gives latent functions that meet in a term different coordinates.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.
      below: latent variables that are terms of the likelihood.

    Returns:
      For each GP the coordinate of each latent function, the number of coordinates, and whether
      it was proven.

    Raises:
      ValueError: if one term reads two values of one latent function, naming both.
    """
    gps = reading.gps
    probe = _Probe(log_likelihood(model, reading, call, below), gps)
    probe.check_additive()
    groups = probe.groups()
    axes = {name: np.zeros(site.functions, int) for name, site in gps.items()}
    for group in groups:
        for axis, (name, latent) in enumerate(group):
            axes[name][latent] = axis
    return axes, max(len(group) for group in groups), False


class _Probe:
    """Moves some function values and tells which gradients of the likelihood moved."""

    def __init__(self, likelihood: Any, gps: Mapping[str, GPSite]) -> None:
        self.gps = gps
        rng = np.random.RandomState(0)
        self.base, self.shift = {}, {}
        for name, site in gps.items():
            shape = (site.functions, site.rows)
            noise = rng.standard_normal((2, *shape))
            # Apart from one another and from zero, where likelihoods can be symmetric.
            self.base[name] = site.loc + jnp.asarray(0.5 * noise[0], site.loc.dtype)
            step = 0.25 * np.abs(noise[1]) + 0.1
            self.shift[name] = jnp.asarray(step, site.loc.dtype)
        gradient = jax.grad(lambda values: likelihood(values))

        def moved(masks: Mapping[str, Array]) -> dict[str, Array]:
            values = jax.tree.map(lambda b, s, m: b + s * m, self.base, self.shift, dict(masks))
            return gradient(values)

        self._moved = jax.jit(moved)
        still = self._moved({name: jnp.zeros_like(v) for name, v in self.base.items()})
        self.still = {name: np.asarray(v) for name, v in still.items()}
        largest = max(float(np.max(np.abs(v))) for v in self.still.values())
        if not np.isfinite(largest):
            raise ValueError(
                "The log-likelihood has no finite gradient at values of the GPs near their prior "
                "mean. Check that the data lie in the support of the likelihood and that its "
                "parameters are valid for every real value of f (a scale needs jnp.exp(f), a "
                "probability a link function)."
            )
        dtype = next(iter(self.base.values())).dtype
        self.tolerance = (1e-8 if jnp.finfo(dtype).bits >= 64 else 1e-3) * (largest + 1e-12)

    def changes(self, masks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Which gradients change when the masked values, each ``(latents, n)``, are moved."""
        every = {name: masks.get(name, np.zeros(v.shape, bool)) for name, v in self.base.items()}
        moved = self._moved(
            {name: jnp.asarray(mask, self.base[name].dtype) for name, mask in every.items()}
        )
        return {
            name: np.abs(np.asarray(v) - self.still[name]) > self.tolerance
            for name, v in moved.items()
        }

    def check_additive(self) -> None:
        bits = max(max(site.rows - 1, 1).bit_length() for site in self.gps.values())
        for bit in range(bits):
            in_set = {
                name: np.broadcast_to((np.arange(site.rows) >> bit) & 1 == 1, self.base[name].shape)
                for name, site in self.gps.items()
            }
            changed = self.changes(in_set)
            if any((changed[name] & ~in_set[name]).any() for name in self.gps):
                # Some value moved the gradient at another index. Between latent functions that
                # is a matter of indexing (f2[group]) and allowed; within one it is not.
                for name, site in self.gps.items():
                    for latent in range(site.functions):
                        self._check_latent(name, latent, in_set[name][0])

    def _check_latent(self, name: str, latent: int, in_set: np.ndarray) -> None:
        def moved_by(rows: np.ndarray) -> np.ndarray:
            mask = np.zeros(self.base[name].shape, bool)
            mask[latent] = rows
            return self.changes({name: mask})[name][latent]

        wrong = np.flatnonzero(moved_by(in_set) & ~in_set)
        if len(wrong) == 0:
            return
        i, suspects = wrong[0], np.flatnonzero(in_set)
        while len(suspects) > 1:  # bisect for one index that moves the gradient at i
            half = suspects[: len(suspects) // 2]
            found = moved_by(np.isin(np.arange(in_set.size), half))[i]
            suspects = half if found else suspects[len(suspects) // 2 :]
        raise ValueError(
            f"The likelihood is not a sum over data points: changing {name}[{suspects[0]}] "
            f"changes how the log-density depends on {name}[{i}], so one term reads both values "
            f"of GP site '{name}'. t-SVGP needs likelihood terms that read one value of each GP. "
            "Use NUTS or another guide for this model, or give the correlation to the kernel."
        )

    def groups(self) -> list[list[tuple[str, int]]]:
        """Latent functions that meet in likelihood terms, as connected components."""
        latents = [(name, p) for name, site in self.gps.items() for p in range(site.functions)]
        if len(latents) == 1:
            return [latents]
        touches = np.zeros((len(latents), len(latents)), bool)
        for row, (name, p) in enumerate(latents):
            mask = np.zeros(self.base[name].shape, bool)
            mask[p] = True
            changed = self.changes({name: mask})
            touches[row] = np.concatenate([changed[other].any(-1) for other in self.gps])
        unseen, groups = set(range(len(latents))), []
        while unseen:
            group, stack = [], [min(unseen)]
            while stack:
                a = stack.pop()
                if a in unseen:
                    unseen.remove(a)
                    group.append(a)
                    stack.extend(b for b in unseen if touches[a, b] or touches[b, a])
            groups.append([latents[a] for a in sorted(group)])
        return groups
