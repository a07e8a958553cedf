"""What an update of a stream is made of: sites made anew, scores of points, and the objective."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions.transforms import biject_to

from numpyro_tsvgp.gaussian.linalg import full_precision
from numpyro_tsvgp.gaussian.quadrature import Marginals, expect
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.em.start import declared_parameters
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.new_data.conditioning import NewData, bare, scene_of, warn_unsettled
from numpyro_tsvgp.infer.new_data.moving import chosen_inducing, with_inducing
from numpyro_tsvgp.infer.new_data.new_sites import Sites, asked_for, carries_of, no_sites, settle
from numpyro_tsvgp.infer.new_data.stream_batch import Batch
from numpyro_tsvgp.infer.state import Transforms
from numpyro_tsvgp.infer.steps.density import e_steps, scene_at
from numpyro_tsvgp.infer.steps.row_densities import row_densities
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.data_rows import on_device
from numpyro_tsvgp.model.likelihood import log_likelihood, log_prior
from numpyro_tsvgp.model.read import read

__all__ = [
    "at_new_places",
    "in_posterior",
    "objective",
    "processes",
    "resettled",
    "settled",
    "transforms",
    "with_none",
]

# E-steps at the end of the first batch, whose sites the next ones build on.
_SETTLING_STEPS = 20


@jax.jit
@full_precision()
def settled(fit: Fit, call: Call, hyper: Params) -> dict[str, Any]:
    """The approximations of the first batch after E-steps at its hyperparameters."""
    key = jax.random.key(0)
    scene = scene_at(fit.guide, fit.structure, call, fit.params, hyper, fit.nodes(), key=key)
    return e_steps(scene, fit.rule, 0.5, _SETTLING_STEPS).kept


def processes(fit: Fit, call: Call, new: NewData) -> dict[str, Any]:
    values = {**fit.params, **new.hyper}
    reading = read(fit.model, on_device(call), values=values, key=jax.random.key(0))
    return {name: site.process() for name, site in reading.gps.items()}


def at_new_places(fit: Fit, new: NewData, most: int) -> Fit:
    """The fit with inducing inputs chosen among its own and the new inputs."""
    reading = fit.guide.read(new.call, fit.params, new.hyper)
    places = {}
    for name, site in reading.gps.items():
        Z = fit.guide.unpack(name, fit.params).inducing
        places[name] = chosen_inducing(site, Z, most)
    return with_inducing(fit, places, new.call)


def with_none(sites: Sites, batch: Batch) -> Sites:
    """Sites of the memory, followed by those of zero of the new points."""
    more = batch.length(batch.new)
    return jax.tree.map(lambda x: jnp.asarray(np.pad(x, ((0, 0), (0, more)))), sites)


def resettled(fit: Fit, batch: Batch, hyper: Params, sites: Sites) -> tuple[Fit, Sites]:
    """The fit with the sites of all points of a batch made anew, and these, about f."""
    kept, sites, error = _found(bare(fit), batch, hyper, sites)
    warn_unsettled(float(error))
    return dataclasses.replace(fit, params={**fit.params, **fit.guide.pack(kept)}), sites


@jax.jit
@full_precision()
def _found(
    fit: Fit, batch: Batch, hyper: Params, about_f: Sites
) -> tuple[dict[str, Any], Sites, Array]:
    scene = scene_of(fit, batch.call, hyper, False)
    loc = {name: at.process.loc for name, at in scene.at.items()}
    sites = {
        n: PointSites(s.linear - s.quadratic * loc[n], s.quadratic) for n, s in about_f.items()
    }
    base = {
        name: at.start().add(PointSites(-sites[name].linear, -sites[name].quadratic), at.features)
        for name, at in scene.at.items()
    }
    settled = settle(scene, fit.rule, base, sites, dict.fromkeys(sites, batch.counted()))
    carries = carries_of(scene, base, settled.sites)
    kept = {name: at.keep(carries[name]) for name, at in scene.at.items()}
    return kept, _about_f(settled.sites, loc), settled.error


def _about_f(sites: Sites, loc: dict[str, Array]) -> Sites:
    return {n: PointSites(s.linear + s.quadratic * loc[n], s.quadratic) for n, s in sites.items()}


@jax.jit
@full_precision()
def in_posterior(fit: Fit, batch: Batch, hyper: Params) -> tuple[Sites, Array]:
    r"""Sites that the posterior asks for, about f, and how much each point narrows it there.

    The second is :math:`\sum \beta_i v_i` over latent functions.
    """
    scene = scene_of(fit, batch.call, hyper, False)
    local = {name: at.local(at.posterior(at.start())) for name, at in scene.at.items()}
    none = {name: no_sites(at.process) for name, at in scene.at.items()}
    _, sites = asked_for(scene, fit.rule, local, none)
    scores = [jnp.maximum(sites[name].quadratic, 0.0) * q.variance for name, q in local.items()]
    loc = {name: at.process.loc for name, at in scene.at.items()}
    return _about_f(sites, loc), jnp.concatenate(scores).sum(0)


def transforms(fit: Fit, call: Call) -> Transforms:
    """Transforms of everything that the optimizer owns in a stream: all but the guide's own."""
    hyper_guide = fit.hyper_guide_at(call)
    _, params, kinds = declared_parameters(fit.guide, hyper_guide, call, jax.random.key(0))
    return Transforms({name: biject_to(kinds[name]) for name in params})


def objective(fit: Fit, batch: Batch, key: Array, remembers: bool, weighted: bool = False) -> Array:
    """The bound where points of the memory stand for all data that are gone."""
    hyper_guide = fit.hyper_guide_at(batch.new)
    hyper, log_q = hyper_guide.draw(key, fit.params, batch.new)
    model, values = fit.model, {**fit.params, **hyper}

    def at(call: Call) -> Any:
        return read(model, call, values=values, key=jax.random.key(0), first_rows=True)

    reading = at(batch.call)
    marginals = {}
    divergence: Any = 0.0
    for name, (process, approximation) in fit.guide.latents(reading, fit.params).items():
        (mean, variance), kl = approximation.at_data_for_gradient(process).bound()
        marginals[name] = Marginals(mean + process.loc, variance)
        divergence = divergence + kl
    size = batch.length(batch.memory)
    nodes = fit.nodes()

    def expected(call: Call, rows: slice, count: Array) -> Array:
        """The sum over rows that are not repeated: of all, without the repeats of the last."""
        there = {n: Marginals(*(x[:, rows] for x in q)) for n, q in marginals.items()}
        last = {n: Marginals(*(x[:, -1:] for x in q)) for n, q in there.items()}
        one, repeats = batch.last(call), batch.length(call) - count
        every = expect(log_likelihood(model, at(call), call), there, nodes)
        return every - repeats * expect(log_likelihood(model, at(one), one), last, nodes)

    total = expected(batch.new, slice(size, None), batch.new_count)
    if remembers and weighted:
        there = {n: Marginals(*(x[:, :size] for x in q)) for n, q in marginals.items()}
        rows = row_densities(model, fit.structure, at(batch.memory), batch.memory, nodes)
        total = total + expect(lambda f: (rows.log_prob(f) * batch.weights).sum(), there, nodes)
    elif remembers:
        ratio = batch.past / jnp.maximum(batch.old_count, 1)
        total = total + ratio * expected(batch.memory, slice(size), batch.old_count)
    else:
        total = total * (batch.past + batch.new_count) / batch.new_count
    return total - divergence + log_prior(reading, fit.structure.above) - log_q
