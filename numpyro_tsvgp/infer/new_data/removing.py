r"""A fit with less data in it, at fixed hyperparameters.

What a data point contributed is its site. Point sites are kept one by one, so that it is known.
Sums over sites do not tell. Where they have converged, the site of each point is what the
posterior asks for,

.. math:: \lambda_i = \alpha_i + \beta_i m_i, \qquad \beta_i = -2\, \partial E_i / \partial v_i,

and where a likelihood is Gaussian, that is the same at every posterior. Elsewhere a site that was
made before other data came is another one than the posterior asks for now. So there are two ways. A
fit that has its data makes the sites of the remaining ones anew, starting from those that its
posterior asks for: the result is the fit to the remaining data, however it came about. A fit that
does not have them subtracts what its posterior asks for, and warns that this is not sure.
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian.approximation import Local
from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.gaussian.inducing_values import NOT_THERE
from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.new_data.conditioning import (
    NewData,
    bare,
    counted_rows,
    prepared,
    scene_of,
    warn_unsettled,
)
from numpyro_tsvgp.infer.new_data.new_sites import (
    Sites,
    asked_for,
    carries_of,
    locals_of,
    masked,
    no_sites,
    settle,
)
from numpyro_tsvgp.infer.steps.density import Scene
from numpyro_tsvgp.infer.steps.rules import NaturalGradient
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.data_rows import canonical, find_rows, is_rows, taken
from numpyro_tsvgp.model.new_data import EachOnce
from numpyro_tsvgp.model.processes import is_divided
from numpyro_tsvgp.model.read import read

__all__ = ["without"]


@blas_threads()
@full_precision(on_cpu=False)
def without(fit: Fit, call: Call) -> Fit:
    """A fit with less data in it; see :meth:`numpyro_tsvgp.Fit.without`."""
    check_fit("without(result.fit, call)", fit)
    old = prepared(fit, call)
    left = _left(fit, old)
    if left is not None and all(fit.guide.kind(name).keeps_sums for name in fit.structure.gps):
        return _of_the_rest(fit, left)
    return _subtracted(fit, old, left)


def _left(fit: Fit, old: NewData) -> Call | None:
    """The training data without some rows, which must be there."""
    if fit.call is None or is_divided(fit.call):
        return None
    data = canonical(fit.model, fit.call)
    if old.rows is None or old.once:
        raise ValueError(
            f"The arguments {old.given.describe()} differ in more than the number of rows from "
            f"those of the fit, {data.describe()}, so there is no way to see whether the fit has "
            "these data points. Pass all else as it was."
        )
    rows = find_rows(data, old.given, old.rows)
    if isinstance(rows, int):
        raise ValueError(f"Row {-1 - rows} is not among the training data. {NOT_THERE}")
    flags = is_rows(data, old.given, old.points) or old.rows
    total = next(
        leaf.shape[0] for leaf, yes in zip(jax.tree.leaves(data), flags, strict=True) if yes
    )
    if len(rows) == total:
        raise ValueError("These are all of the data; without them there is no fit.")
    stays = np.setdiff1d(np.arange(total), rows)
    remaining = taken(data, old.rows, stays)
    return remaining.of_all_data() if fit.call.whole else remaining


# ---- with the remaining data -----------------------------------------------------------------


def _of_the_rest(fit: Fit, left: Call) -> Fit:
    """The fit with the sites of the remaining data made anew."""
    rest = prepared(fit, left)
    count = jnp.asarray(rest.points)
    kept, error = _made_anew(bare(fit), rest.call, rest.hyper, count, rest.once)
    warn_unsettled(float(error))
    return dataclasses.replace(fit, params={**fit.params, **fit.guide.pack(kept)}, call=left)


@partial(jax.jit, static_argnames="once")
@full_precision()
def _made_anew(
    fit: Fit, call: Call, hyper: Params, count: Array, once: bool
) -> tuple[dict[str, Any], Array]:
    """Approximations with sites of some data alone, and how far these are from settled."""
    scene = scene_of(fit, call, hyper, once)
    counted = counted_rows(scene, count)
    with_all = {name: at.start() for name, at in scene.at.items()}
    nothing = jax.tree.map(jnp.zeros_like, with_all)
    zero = {name: no_sites(at.process) for name, at in scene.at.items()}
    _, asked = asked_for(scene, fit.rule, locals_of(scene, with_all), zero)
    start = _or_none(scene, nothing, masked(asked, counted))
    settled = settle(scene, fit.rule, nothing, start, counted)
    carries = carries_of(scene, nothing, settled.sites)
    return {name: at.keep(carries[name]) for name, at in scene.at.items()}, settled.error


def _or_none(scene: Scene, base: Any, sites: Sites) -> Sites:
    """Sites, or zero where negative ones among them leave no posterior to start from."""
    local = locals_of(scene, carries_of(scene, base, sites))
    exists = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(local)]).all()
    return jax.tree.map(lambda x: jnp.where(exists, x, 0.0), sites)


# ---- without them ----------------------------------------------------------------------------


def _subtracted(fit: Fit, old: NewData, left: Call | None) -> Fit:
    """The fit with what its posterior asks of some points subtracted."""

    def asked(fit: Fit) -> tuple[dict[str, Any], Sites]:
        return _sites_at(bare(fit), old.call, old.hyper, jnp.asarray(old.points), old.once)

    processes, sites = asked(fit)
    kept = {}
    for name in fit.structure.gps:
        approximation = fit.guide.unpack(name, fit.params)
        kept[name] = approximation.without_points(processes[name], sites[name])
    less = dataclasses.replace(fit, params={**fit.params, **fit.guide.pack(kept)}, call=left)
    sums = [name for name in kept if kept[name].keeps_sums]
    if sums:
        then = asked(less)[1]
        shifts = [_shift(kept[name], processes[name], sites[name], then[name]) for name in sums]
        _warn_unsure(jnp.stack(shifts).max())
    return less


def _warn_unsure(shift: Array) -> None:
    """Warns where sites depend on the posterior: of which one they were made at, sums do not tell.

    With a Gaussian likelihood they do not, but for rounding errors.
    """
    if not shift <= jnp.finfo(shift.dtype).eps ** 0.25:
        far = f"{shift:.1g} standard deviations" if np.isfinite(shift) else "arbitrarily far"
        warnings.warn(
            "What these data points contributed is not known for sure: sums over sites do not "
            "tell, and with this likelihood it depends on what else was known. The posterior with "
            f"them and that without them ask for sites of theirs that put the result {far} apart. "
            "The first were taken out, which is right to first order if the fit had converged with "
            "all of its data; where data were added to it later, it may be off by several times "
            "that. Give the fit its data, and sites of the remaining ones are made anew: "
            "fit.with_data(X, y).without(X_old, y_old).",
            stacklevel=stack_level(),
        )


@partial(jax.jit, static_argnames="once")
@full_precision()
def _sites_at(
    fit: Fit, call: Call, hyper: Params, count: Array, once: bool
) -> tuple[dict[str, Any], Sites]:
    """The prior at some points, and what the posterior asks of them."""
    model = EachOnce(fit.model) if once else fit.model
    values = {**fit.params, **hyper}
    reading = read(model, call, values=values, key=jax.random.key(0), first_rows=True)
    latents = fit.guide.latents(reading, fit.params)
    local = {name: a.marginals(process) for name, (process, a) in latents.items()}
    at = {name: _AtPoints(process) for name, (process, _) in latents.items()}
    scene = Scene(model, fit.structure, call, reading, at, fit.nodes())  # type: ignore[arg-type]
    # Approximations for rules that need the sites of points keep these and need not be told.
    rule = NaturalGradient() if fit.rule.needs_rows else fit.rule
    none = {name: no_sites(process) for name, (process, _) in latents.items()}
    _, sites = asked_for(scene, rule, local, none)
    processes = {name: process for name, (process, _) in latents.items()}
    return processes, masked(sites, counted_rows(scene, count))


class _AtPoints(NamedTuple):
    """As much of a scene as gradients need."""

    process: Any


@jax.jit
@full_precision()
def _shift(less: Any, process: Any, taken: PointSites, then: PointSites) -> Array:
    """How far the posterior would be elsewhere at points, had other sites of them been taken."""
    at = less.at_new_data(process)
    carry = at.start()
    more = PointSites(taken.linear - then.linear, taken.quadratic - then.quadratic)
    here: Local = at.local(at.posterior(carry))
    there: Local = at.local(at.posterior(carry.add(more, at.features)))
    sd = jnp.sqrt(here.variance)
    apart = jnp.abs(there.mean - here.mean) / sd + jnp.abs(jnp.sqrt(there.variance) / sd - 1)
    return jnp.max(jnp.where(jnp.isnan(apart), jnp.inf, apart))
