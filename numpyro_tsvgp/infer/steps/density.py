"""A model at given hyperparameters, and the two halves of the method there.

Both halves start from a :class:`Scene`. An E-step takes the gradient of the expected log-likelihood
in the marginals; an M-step takes the gradient of the objective, with sites constant, in everything
else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian.approximation import Approximation, AtData
from numpyro_tsvgp.gaussian.quadrature import (
    LogLikelihood,
    Marginals,
    Nodes,
    Quadrature,
    expect,
    nodes_for,
)
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.steps.objective import Evaluated, Objective, Parts
from numpyro_tsvgp.infer.steps.query import Query
from numpyro_tsvgp.infer.steps.row_densities import RowDensities, row_densities
from numpyro_tsvgp.infer.steps.rules import Asked, SiteRule
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.information import information
from numpyro_tsvgp.model.likelihood import log_likelihood
from numpyro_tsvgp.model.read import Model, Reading, read
from numpyro_tsvgp.model.structure import Structure
from numpyro_tsvgp.model.sums import along_sums

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.guides.guide import GPGuide, Params

__all__ = [
    "Scene",
    "Updated",
    "asked_at",
    "bound_at",
    "e_steps",
    "nodes_of",
    "objective_of",
    "own_sites",
    "refreshed",
    "scene_at",
    "sites_of_points",
]


class Scene(NamedTuple):
    """A model at given hyperparameters: its GPs at the data, and what scores them.

    Attributes:
      model: the NumPyro model.
      structure: its structure.
      call: its arguments.
      reading: one run of it, whose values are pinned.
      at: every approximation at the data.
      nodes: nodes of the quadrature.
    """

    model: Model
    structure: Structure
    call: Call
    reading: Reading
    at: dict[str, AtData]
    nodes: Nodes

    @property
    def likelihood(self) -> LogLikelihood:
        """The log-likelihood as a function of the values of every GP."""
        make = along_sums if self.structure.reads_sums else log_likelihood
        return make(self.model, self.reading, self.call, self.structure.below)

    @property
    def rows(self) -> RowDensities:
        """The log density of each row of the data."""
        return row_densities(self.model, self.structure, self.reading, self.call, self.nodes)

    @property
    def information(self) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """The Fisher information of the data about each function value."""
        return information(self.model, self.structure, self.reading, self.call)

    def still(self) -> Scene:
        """The same as constants, for steps that are not differentiated."""
        at, pinned = lax.stop_gradient((self.at, self.reading.pinned))
        return self._replace(at=at, reading=self.reading._replace(pinned=pinned))


def nodes_of(structure: Structure, quadrature: Quadrature | None, key: Array) -> Nodes:
    """The nodes of a rule for a model of some structure."""
    return nodes_for(
        quadrature, structure.axes, structure.dim, key, along_sums=structure.reads_sums
    )


def scene_at(
    guide: GPGuide,
    structure: Structure,
    call: Call,
    params: Params,
    hyper: Params,
    nodes: Nodes,
    *,
    key: Array,
    for_gradient: bool = False,
) -> Scene:
    """Reads a model at given hyperparameters and puts its approximations there.

    Args:
      guide: the guide.
      structure: the structure of the model.
      call: arguments of the model.
      params: parameters of model and guide.
      hyper: values of the sampled hyperparameters.
      nodes: nodes of the quadrature.
      key: seed for what the model draws, such as a subsample.
      for_gradient: whether one first derivative of the objective is all that will be taken.

    Returns:
      The scene.
    """
    reading = read(guide.model, call, values={**params, **hyper}, key=key)
    at = {}
    for name, (process, approximation) in guide.latents(reading, params).items():
        put = approximation.at_data_for_gradient if for_gradient else approximation.at_data
        at[name] = put(process)
    return Scene(guide.model, structure, call, reading, at, nodes)


class Updated(NamedTuple):
    """What site updates led to.

    Attributes:
      kept: the approximations after them.
      floored: how many marginal variances were floored on the way.
      before: the bound before the first of them, on the same data.
    """

    kept: dict[str, Approximation]
    floored: Array
    before: Array


class AskedAll(NamedTuple):
    """What a site rule asks for at some carries.

    Attributes:
      by_gp: for every GP.
      bound: the bound there.
      floored: how many marginal variances were floored.
    """

    by_gp: dict[str, Asked]
    bound: Array
    floored: Array

    def step(self, rule: SiteRule, carries: Mapping[str, Any], rate: Any) -> dict[str, Any]:
        """The carries after a step."""
        if isinstance(rate, Array):  # of a schedule, and perhaps of another precision
            rate = rate.astype(self.bound.dtype)
        return {name: rule.step(carries[name], asked, rate) for name, asked in self.by_gp.items()}


def asked_at(scene: Scene, rule: SiteRule, carries: Mapping[str, Any]) -> AskedAll:
    """What a site rule asks the likelihood for.

    Args:
      scene: the model at the current hyperparameters.
      rule: the site rule.
      carries: what E-steps carry, by GP.

    Returns:
      What a step is made of, and the bound.
    """
    posteriors = {name: at.posterior(carries[name]) for name, at in scene.at.items()}
    local = {name: at.local(posteriors[name]) for name, at in scene.at.items()}
    marginals = {
        name: Marginals(local[name].mean + at.process.loc, local[name].variance)
        for name, at in scene.at.items()
    }
    query = Query(
        scene.likelihood,
        marginals,
        scene.nodes,
        local,
        own_sites(scene.at, carries) if rule.needs_rows else None,
        scene.rows if rule.needs_rows else None,
        scene.information if rule.needs_information else None,
    )
    gradients = rule.asks(query)
    divergences = [at.divergence(posteriors[name]) for name, at in scene.at.items()]
    floored = [at.count_floored(posteriors[name]) for name, at in scene.at.items()]
    asked = {
        name: Asked(gradients[name], local[name], posteriors[name], at)
        for name, at in scene.at.items()
    }
    return AskedAll(asked, query.expected - sum(divergences), sum(floored, jnp.zeros((), int)))


def bound_at(scene: Scene, carries: Mapping[str, Any]) -> Array:
    """The bound, and nothing else.

    Args:
      scene: the model at the current hyperparameters.
      carries: what E-steps carry, by GP.

    Returns:
      A scalar.
    """
    marginals, divergence = {}, jnp.zeros(())
    for name, at in scene.at.items():
        q = at.posterior(carries[name])
        mean, variance, _ = at.local(q)
        marginals[name] = Marginals(mean + at.process.loc, variance)
        divergence = divergence + at.divergence(q)
    return expect(scene.likelihood, marginals, scene.nodes) - divergence


def own_sites(at_data: Mapping[str, AtData], carries: Mapping[str, Any]) -> dict[str, PointSites]:
    """The sites of the data points, about f, of approximations that keep them.

    Args:
      at_data: approximations at the data.
      carries: what E-steps carry.

    Returns:
      Sites by GP.
    """
    out = {}
    for name, at in at_data.items():
        sites = at.point_sites(carries[name])
        if sites is None:
            raise TypeError(f"The approximation of GP site '{name}' keeps no sites of data points.")
        linear, quadratic = sites
        out[name] = PointSites(linear + quadratic * at.process.loc, quadratic)
    return out


# A leverage that a site in the posterior cannot have, and what such a site is shortened to.
_NOT_IN_IT, _SHORTENED = 1.0, 0.5


def sites_of_points(scene: Scene, rule: SiteRule) -> dict[str, PointSites]:
    r"""The site of each data point, about f, without the factor of a subsample.

    Where an approximation keeps them, they are those. Tied sites are sums: of these, a point is
    taken to have contributed what it asks for at the posterior itself, as at a fixed point. Early
    in a fit it may not yet be in the sums. It then asks for more than the posterior holds,
    :math:`\beta_i s_i \ge 1`, and counts with a part of its site.

    Args:
      scene: the model at the current hyperparameters.
      rule: the site rule.

    Returns:
      Sites by GP, each ``(functions, n)``.
    """
    carries = {name: at.start() for name, at in scene.at.items()}
    if all(at.point_sites(carries[name]) is not None for name, at in scene.at.items()):
        return own_sites(scene.at, carries)
    out = {}
    for name, asked in asked_at(scene, rule, carries).by_gp.items():
        (alpha, beta), local = asked.gradients, asked.local
        alpha, beta = alpha / scene.reading.subsampling, beta / scene.reading.subsampling
        leverage = beta * local.explained
        share = jnp.where(leverage < _NOT_IN_IT, 1.0, _SHORTENED / jnp.maximum(leverage, 1.0))
        alpha, beta = share * alpha, share * beta
        out[name] = PointSites(alpha + beta * (local.mean + asked.at.process.loc), beta)
    return out


def e_steps(scene: Scene, rule: SiteRule, rate: Any, steps: int) -> Updated:
    """Site updates of every GP at fixed hyperparameters.

    Features are computed once, and in whitened coordinates nothing is solved in between.

    Args:
      scene: the model at the current hyperparameters.
      rule: what is made of the gradients.
      rate: step size.
      steps: number of updates.

    Returns:
      The approximations after the updates.
    """

    def step(i: Any, state: tuple[dict[str, Any], Array, Array]) -> Any:
        carries, floored, before = state
        asked = asked_at(scene, rule, carries)
        before = jnp.where(i == 0, asked.bound, before)
        return asked.step(rule, carries, rate), floored + asked.floored, before

    # To the coordinates of the current prior once, before the first update, and back at the end.
    carries = {name: at.start() for name, at in scene.at.items()}
    dtype = jnp.result_type(*(at.process.loc for at in scene.at.values()))
    start = carries, jnp.zeros((), int), jnp.zeros((), dtype)
    carries, floored, before = (
        step(0, start) if steps == 1 else lax.fori_loop(0, steps, step, start)
    )
    kept = {name: at.keep(carries[name]) for name, at in scene.at.items()}
    return Updated(kept, floored, before)


def objective_of(
    scene: Scene,
    objective: Objective,
    fresh: Mapping[str, Approximation] | None = None,
    wanted: Any = None,
    sites: Mapping[str, PointSites] | None = None,
) -> Array:
    """The objective of a scene, to be differentiated.

    Args:
      scene: the model at the current hyperparameters.
      objective: what scores it. One that needs parts needs a scene that was not made for a single
        first derivative.
      fresh: what E-steps on this very scene led to, if it is to be scored in place of what the
        scene was made with; not for an objective that needs parts.
      wanted: see :class:`~numpyro_tsvgp.infer.steps.objective.Evaluated`.
      sites: the site of each data point, for an objective that needs rows; see
        :func:`sites_of_points`.

    Returns:
      A scalar, without the log prior of the hyperparameters.
    """
    divergence: Any = 0.0
    marginals, explained = {}, {}
    for name, at in scene.at.items():
        if objective.needs_parts:
            q = at.posterior(at.start())
            (mean, variance, explained[name]), kl = at.local(q), at.divergence(q)
        else:
            (mean, variance), kl = at.bound() if fresh is None else at.fresh_bound(fresh[name])
        marginals[name] = Marginals(mean + at.process.loc, variance)
        divergence = divergence + kl
    parts = None
    if objective.needs_parts:
        rows = scene.rows if objective.needs_rows else None
        parts = Parts(explained, scene.reading.subsampling, sites, rows)
    return objective(Evaluated(scene.likelihood, marginals, divergence, scene.nodes, wanted, parts))


def refreshed(
    guide: GPGuide,
    structure: Structure,
    call: Call,
    params: Params,
    hyper: Params,
    nodes: Nodes,
    *,
    rule: SiteRule,
    steps: int,
) -> dict[str, Any]:
    """Parameters with sites made anew at given hyperparameters.

    Args:
      guide: the guide.
      structure: the structure of the model.
      call: arguments of the model, with the training data.
      params: fitted parameters.
      hyper: one value of each hyperparameter that the model samples.
      nodes: nodes of the quadrature.
      rule: the site rule.
      steps: number of site updates at rate 1; with none the sites stay as they are.

    Returns:
      All parameters.
    """
    key = jax.random.key(0)
    if not steps:
        reading = read(guide.model, call, values={**params, **hyper}, key=key)
        kept = {name: a.synced(p) for name, (p, a) in guide.latents(reading, params).items()}
    else:
        scene = scene_at(guide, structure, call, params, hyper, nodes, key=key)
        kept = e_steps(scene, rule, 1.0, steps).kept
    return {**params, **guide.pack(kept)}
