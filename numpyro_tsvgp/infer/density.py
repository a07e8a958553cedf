"""A model at given hyperparameters, and the two halves of the method there.

Both halves start from a :class:`Scene`. An E-step takes the gradient of the expected log-likelihood
in the marginals; an M-step takes the gradient of the objective, with sites constant, in everything
else.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    nodes_for,
    site_gradients,
)
from numpyro_tsvgp.infer.objective import Evaluated, Objective
from numpyro_tsvgp.infer.rules import SiteRule
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.likelihood import log_likelihood
from numpyro_tsvgp.model.read import Model, Reading, read
from numpyro_tsvgp.model.structure import Structure

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.guide import GPGuide, Params

__all__ = ["Scene", "Updated", "e_steps", "nodes_of", "objective_of", "refreshed", "scene_at"]


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
        return log_likelihood(self.model, self.reading, self.call, self.structure.below)

    def still(self) -> Scene:
        """The same as constants, for steps that are not differentiated."""
        at, pinned = lax.stop_gradient((self.at, self.reading.pinned))
        return self._replace(at=at, reading=self.reading._replace(pinned=pinned))


def nodes_of(structure: Structure, quadrature: Quadrature | None, key: Array) -> Nodes:
    """The nodes of a rule for a model of some structure."""
    return nodes_for(quadrature, structure.axes, structure.dim, key)


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
    likelihood = scene.likelihood

    def step(i: Any, state: tuple[dict[str, Any], Array, Array]) -> Any:
        carries, floored, before = state
        posteriors = {name: at.posterior(carries[name]) for name, at in scene.at.items()}
        local = {name: at.local(posteriors[name]) for name, at in scene.at.items()}
        marginals = {
            name: Marginals(local[name].mean + at.process.loc, local[name].variance)
            for name, at in scene.at.items()
        }
        expected, gradients = site_gradients(likelihood, marginals, scene.nodes)
        divergences = [at.divergence(posteriors[name]) for name, at in scene.at.items()]
        before = jnp.where(i == 0, expected - sum(divergences), before)
        new = {}
        for name, at in scene.at.items():
            q = posteriors[name]
            new[name] = rule.step(carries[name], gradients[name], local[name], q, at, rate)
            floored = floored + at.count_floored(q)
        return new, floored, before

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
) -> Array:
    """The objective of a scene, to be differentiated.

    Args:
      scene: the model at the current hyperparameters.
      objective: what scores it.
      fresh: what E-steps on this very scene led to, if it is to be scored in place of what the
        scene was made with.
      wanted: see :class:`~numpyro_tsvgp.infer.objective.Evaluated`.

    Returns:
      A scalar, without the log prior of the hyperparameters.
    """
    divergence: Any = 0.0
    marginals = {}
    for name, at in scene.at.items():
        (mean, variance), kl = at.bound() if fresh is None else at.fresh_bound(fresh[name])
        marginals[name] = Marginals(mean + at.process.loc, variance)
        divergence = divergence + kl
    return objective(Evaluated(scene.likelihood, marginals, divergence, scene.nodes, wanted))


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
