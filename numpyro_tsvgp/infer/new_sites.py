r"""Sites of some data points, found with what all other data say held.

With the posterior of the others as prior, the sites of the points are where the gradients of
their expected log-likelihood ask them to be, at the marginals that they themselves lead to:

.. math:: \lambda_i = \alpha_i + \beta_i m_i, \qquad \beta_i = -2\, \partial E_i / \partial v_i .

Each step goes from the sites :math:`\theta` towards those that are asked for,
:math:`\hat\theta`. It is a natural-gradient step of :math:`\sum_i E_i - \mathrm{KL}(q \,\|\,
q_{\text{others}})`, whose derivatives in mean and explained variance are

.. math::
  r_m = \hat\lambda - \lambda - (\hat\beta - \beta) \, m, \qquad
  r_s = -\tfrac12 (\hat\beta - \beta) .

What a step gains is therefore, by the trapezoidal rule, half the sum of the derivatives before and
after it times what it moved. A step that gains nothing, because it went too far, is taken back and
tried at half the length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian.approximation import Local
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.quadrature import Marginals, SiteGradients, site_gradients
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.density import Scene
from numpyro_tsvgp.infer.rules import SiteRule

__all__ = ["Settled", "asked_for", "carries_of", "locals_of", "masked", "no_sites", "settle"]

# Steps, those that are taken back included.
MOST_STEPS = 100
Sites = dict[str, PointSites]


class Settled(NamedTuple):
    """Sites of some points after steps.

    Attributes:
      sites: by GP site, about the function without its mean.
      error: how far the last step would have gone on: the largest shift of a mean in standard
        deviations, or of a variance relative to it.
      steps: how many were taken or tried.
    """

    sites: Sites
    error: Array
    steps: Array


class _Here(NamedTuple):
    """Some sites, the marginals they lead to, and what is asked for there."""

    sites: Sites
    asked: Sites
    local: dict[str, Local]


def carries_of(scene: Scene, base: Mapping[str, Any], sites: Sites) -> dict[str, Any]:
    """What was there, with sites of the points of a scene added."""
    return {name: base[name].add(sites[name], at.features) for name, at in scene.at.items()}


def locals_of(scene: Scene, carries: Mapping[str, Any]) -> dict[str, Local]:
    """The posterior of carries at the points of a scene."""
    return {name: at.local(at.posterior(carries[name])) for name, at in scene.at.items()}


def asked_for(
    scene: Scene, rule: SiteRule, local: Mapping[str, Local]
) -> tuple[dict[str, SiteGradients], Sites]:
    """The gradients at given marginals, and the sites that they ask for."""
    marginals = {
        name: Marginals(q.mean + scene.at[name].process.loc, q.variance)
        for name, q in local.items()
    }
    _, found = site_gradients(scene.likelihood, marginals, scene.nodes)
    gradients = {name: rule.curvature(gradients) for name, gradients in found.items()}
    return gradients, {
        name: PointSites(alpha + beta * local[name].mean, beta)
        for name, (alpha, beta) in gradients.items()
    }


def settle(
    scene: Scene,
    rule: SiteRule,
    base: Mapping[str, Any],
    start: Sites,
    counted: Mapping[str, Array],
) -> Settled:
    """Finds the sites of the points of a scene.

    Args:
      scene: the model at these points.
      rule: the site rule, for what becomes of negative curvature.
      base: what all other data say, by GP site, as E-steps carry it.
      start: sites to start from, whose posterior must exist.
      counted: by GP site, which of the points count; the sites of the others are zero.

    Returns:
      The sites.
    """

    def at(sites: Sites) -> _Here:
        local = locals_of(scene, carries_of(scene, base, sites))
        _, asked = asked_for(scene, rule, local)
        return _Here(sites, masked(asked, counted), local)

    first = at(masked(start, counted))
    dtype = jnp.result_type(*jax.tree.leaves(first.sites))
    tolerance = jnp.finfo(dtype).eps ** 0.6

    def going(state: tuple[_Here, Array, Array]) -> Array:
        here, rate, steps = state
        return (_error(here) > tolerance) & (steps < MOST_STEPS) & (rate > tolerance)

    def step(state: tuple[_Here, Array, Array]) -> tuple[_Here, Array, Array]:
        here, rate, steps = state
        new = at(jax.tree.map(lambda a, b: a + rate * (b - a), here.sites, here.asked))
        # Near the end both are rounding errors, and a step that is no worse is as good.
        better = (_gain(here, new) >= 0) | (_error(new) < 0.5 * _error(here))
        better &= jnp.isfinite(_error(new))
        kept = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, here)
        return kept, jnp.where(better, jnp.minimum(2 * rate, 1.0), 0.5 * rate), steps + 1

    state = first, jnp.ones((), dtype), jnp.zeros((), int)
    here, _, steps = lax.while_loop(going, step, state)
    return Settled(here.sites, _error(here), steps)


def no_sites(process: Process) -> PointSites:
    """Sites of zero at the inputs of a process."""
    zero = jnp.zeros((process.functions, process.rows), process.loc.dtype)
    return PointSites(zero, zero)


def masked(sites: Sites, counted: Mapping[str, Array]) -> Sites:
    """Sites, zero where points do not count."""
    return {
        name: PointSites(*(jnp.where(counted[name], x, 0.0) for x in pair))
        for name, pair in sites.items()
    }


def _slopes(here: _Here, name: str) -> tuple[Array, Array]:
    """Derivatives of what steps improve, in the mean and the explained variance of each point."""
    linear, quadratic = (a - b for a, b in zip(here.asked[name], here.sites[name], strict=True))
    return linear - quadratic * here.local[name].mean, -0.5 * quadratic


def _gain(old: _Here, new: _Here) -> Array:
    """What a step gained, by the trapezoidal rule."""
    total: Any = 0.0
    for name, a in old.local.items():
        b = new.local[name]
        by_mean, by_variance = map(jnp.add, _slopes(old, name), _slopes(new, name))
        moved = by_mean * (b.mean - a.mean) + by_variance * (b.explained - a.explained)
        total += 0.5 * jnp.sum(moved)
    return total


def _error(here: _Here) -> Array:
    """How much the posterior at the points would still move."""
    worst = []
    for name, q in here.local.items():
        by_mean, by_variance = _slopes(here, name)
        shift = jnp.abs(by_mean) * jnp.sqrt(q.explained)
        worst.append(jnp.max(shift + 2 * jnp.abs(by_variance) * q.explained, initial=0.0))
    return jnp.stack(worst).max()
