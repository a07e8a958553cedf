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

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian.approximation import Local
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.quadrature import Marginals, SiteGradients
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.steps.density import Scene
from numpyro_tsvgp.infer.steps.query import Query
from numpyro_tsvgp.infer.steps.rules import SiteRule

__all__ = [
    "Here",
    "Settled",
    "Sites",
    "asked_for",
    "carries_of",
    "climb",
    "locals_of",
    "masked",
    "no_sites",
    "settle",
    "slopes",
]

# Steps, those that are taken back included.
MOST_STEPS = 100
Sites = dict[str, PointSites]


class Settled(NamedTuple):
    """Sites of some points after steps.

    Attributes:
      sites: for each GP site the sites of the points, about the function without its mean.
      error: how far the last step would have gone on: the largest shift of a mean in standard
        deviations, or of a variance relative to it.
      steps: how many were taken or tried.
    """

    sites: Sites
    error: Array
    steps: Array


class Here(NamedTuple):
    """Some sites, and what they lead to.

    Attributes:
      sites: for each GP site the sites of the points, about the function without its mean.
      slopes: derivatives of what steps improve, in the mean and the explained variance of each
        point.
      mean: centred posterior means at the points.
      explained: explained variances there.
      rest: anything else that the last sites are wanted with.
    """

    sites: Sites
    slopes: dict[str, tuple[Array, Array]]
    mean: dict[str, Array]
    explained: dict[str, Array]
    rest: Any = None


def carries_of(scene: Scene, base: Mapping[str, Any], sites: Sites) -> dict[str, Any]:
    """What was there, with sites of the points of a scene added."""
    return {name: base[name].add(sites[name], at.features) for name, at in scene.at.items()}


def locals_of(scene: Scene, carries: Mapping[str, Any]) -> dict[str, Local]:
    """The posterior of carries at the points of a scene."""
    return {name: at.local(at.posterior(carries[name])) for name, at in scene.at.items()}


def asked_for(
    scene: Scene, rule: SiteRule, local: Mapping[str, Local], sites: Sites
) -> tuple[dict[str, SiteGradients], Sites]:
    """What a rule asks for at given marginals, of which some sites of the points are a part."""
    loc = {name: scene.at[name].process.loc for name in local}
    marginals = {name: Marginals(q.mean + loc[name], q.variance) for name, q in local.items()}
    about_f = {
        n: PointSites(s.linear + s.quadratic * loc[n], s.quadratic) for n, s in sites.items()
    }
    query = Query(
        scene.likelihood,
        marginals,
        scene.nodes,
        local,
        about_f if rule.needs_rows else None,
        scene.rows if rule.needs_rows else None,
        scene.information if rule.needs_information else None,
    )
    gradients = rule.asks(query)
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

    def at(sites: Sites) -> Here:
        local = locals_of(scene, carries_of(scene, base, sites))
        _, asked = asked_for(scene, rule, local, sites)
        mean = {name: q.mean for name, q in local.items()}
        explained = {name: q.explained for name, q in local.items()}
        return Here(sites, slopes(sites, masked(asked, counted), mean), mean, explained)

    here, steps = climb(at, masked(start, counted))
    return Settled(here.sites, error(here), steps)


def slopes(sites: Sites, asked: Sites, mean: Mapping[str, Array]) -> dict[str, Any]:
    """Derivatives of what steps improve, from the sites that are there and those asked for."""
    found = {}
    for name, own in sites.items():
        linear, quadratic = (a - b for a, b in zip(asked[name], own, strict=True))
        found[name] = linear - quadratic * mean[name], -0.5 * quadratic
    return found


def climb(at: Callable[[Sites], Here], start: Sites) -> tuple[Here, Array]:
    """Steps towards the sites that are asked for, shorter where they would go too far.

    Args:
      at: what some sites lead to.
      start: sites to start from, whose posterior must exist.

    Returns:
      The last sites with what they lead to, and the number of steps.
    """
    first = at(start)
    dtype = jnp.result_type(*jax.tree.leaves(first.sites))
    tolerance = jnp.finfo(dtype).eps ** 0.6

    def going(state: tuple[Here, Array, Array]) -> Array:
        here, rate, steps = state
        return (error(here) > tolerance) & (steps < MOST_STEPS) & (rate > tolerance)

    def step(state: tuple[Here, Array, Array]) -> tuple[Here, Array, Array]:
        here, rate, steps = state
        sites = {}
        for name, (linear, quadratic) in here.sites.items():
            by_mean, by_variance = here.slopes[name]
            more = -2.0 * by_variance
            towards = by_mean + more * here.mean[name]
            sites[name] = PointSites(linear + rate * towards, quadratic + rate * more)
        new = at(sites)
        # Near the end both are rounding errors, and a step that is no worse is as good.
        better = (_gain(here, new) >= 0) | (error(new) < 0.5 * error(here))
        better &= jnp.isfinite(error(new))
        kept = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, here)
        return kept, jnp.where(better, jnp.minimum(2 * rate, 1.0), 0.5 * rate), steps + 1

    here, _, steps = lax.while_loop(going, step, (first, jnp.ones((), dtype), jnp.zeros((), int)))
    return here, steps


def error(here: Here) -> Array:
    """How much the posterior at the points would still move."""
    worst = []
    for name, (by_mean, by_variance) in here.slopes.items():
        s = here.explained[name]
        shift = jnp.abs(by_mean) * jnp.sqrt(s) + 2 * jnp.abs(by_variance) * s
        worst.append(jnp.max(shift, initial=0.0))
    return jnp.stack(worst).max()


def _gain(old: Here, new: Here) -> Array:
    """What a step gained, by the trapezoidal rule."""
    total: Any = 0.0
    for name in old.slopes:
        by_mean, by_variance = map(jnp.add, old.slopes[name], new.slopes[name])
        moved = by_mean * (new.mean[name] - old.mean[name])
        moved += by_variance * (new.explained[name] - old.explained[name])
        total += 0.5 * jnp.sum(moved)
    return total


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
