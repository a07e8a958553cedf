"""A fit with more data in it, or with less, at fixed hyperparameters and without fitting again."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array

from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.gaussian.inducing_values import NOT_THERE
from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.new_data.new_sites import asked_for, carries_of, masked, no_sites, settle
from numpyro_tsvgp.infer.standing import warn_of_doubts
from numpyro_tsvgp.infer.steps.density import Scene
from numpyro_tsvgp.infer.steps.rules import NaturalGradient
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.data_rows import (
    appended,
    canonical,
    find_rows,
    is_rows,
    on_device,
    on_host,
    padded,
    taken,
)
from numpyro_tsvgp.model.new_data import EachOnce, check_new_data, sizes_of
from numpyro_tsvgp.model.processes import is_divided
from numpyro_tsvgp.model.read import read

__all__ = ["NewData", "bare", "condition", "prepared", "scene_of", "without"]

# Sites that would still move the posterior by more than this, in standard deviations.
_UNSETTLED = 1e-3


class NewData(NamedTuple):
    """New data that were checked, as compiled functions take them.

    Attributes:
      call: the arguments, whose last row may be repeated.
      given: the arguments as they were given.
      points: how many rows are data.
      rows: which arrays of the arguments have a row for each data point, or None if not known.
      once: whether the scale of plates is to be left out.
      hyper: the hyperparameters that the data are looked at with.
    """

    call: Call
    given: Call
    points: int
    rows: tuple[bool, ...] | None
    once: bool
    hyper: dict[str, Array]

    @property
    def is_padded(self) -> bool:
        return self.call is not self.given

    def unpadded(self) -> NewData:
        return self._replace(call=self.given)


@full_precision(on_cpu=False)
def prepared(fit: Fit, call: Call, *, pad: bool = True) -> NewData:
    """Checks new data for a fit and brings them to one of a few sizes.

    Programs are compiled for shapes. Rows are repeated up to the next power of two, so that
    batches of any size share a few programs; the sites of repeated rows are zero.

    Args:
      fit: the fit.
      call: arguments of the model with the new data.
      pad: whether rows may be repeated.

    Returns:
      The data.

    Raises:
      ValueError: if they are not what the model takes.
    """
    call = on_host(canonical(fit.model, call))
    if call.is_traced:
        raise ValueError(
            "New data are checked before they are used, which cannot be done inside jax.jit or "
            "jax.vmap. Call condition and without outside of it."
        )
    call, sizes, once = sizes_of(fit.model, fit.structure, call)
    rows = max(sizes.values())
    flags = None
    if fit.example is not None:
        flags = is_rows(canonical(fit.model, fit.example), call, rows)
    kinds = [fit.guide.kind(name) for name in fit.structure.gps]
    # Sites of points are kept one by one, so that programs change with their number anyway.
    regular = set(sizes.values()) == {rows} and not any(kind.follows_inputs for kind in kinds)
    given = call = on_device(call)
    size = 1 << (rows - 1).bit_length()
    if pad and regular and flags is not None and size > rows:
        call = padded(given, flags, size)
    hyper = fit.hyper_at(call)
    model = EachOnce(fit.model) if once else fit.model
    values = {**fit.params, **hyper}
    with numpyro.validation_enabled(False):  # which would say less of what to do
        reading = read(model, call, values=values, key=jax.random.key(0), first_rows=True)
    fit.guide.latents(reading, fit.params)  # which sees whether inputs have as many columns
    check_new_data(reading)
    return NewData(call, given, rows, flags, once, hyper)


def bare(fit: Fit) -> Fit:
    """A fit without data, for compiled functions that do not look at them."""
    return dataclasses.replace(fit, call=None, memory=None)


def scene_of(fit: Fit, call: Call, hyper: Params, once: bool) -> Scene:
    """The model of a fit at new data."""
    model = EachOnce(fit.model) if once else fit.model
    values = {**fit.params, **hyper}
    reading = read(model, call, values=values, key=jax.random.key(0), first_rows=True)
    at = {
        name: approximation.at_new_data(process)
        for name, (process, approximation) in fit.guide.latents(reading, fit.params).items()
    }
    return Scene(model, fit.structure, call, reading, at, fit.nodes())


def _counted(scene: Scene, count: Array) -> dict[str, Array]:
    """Which rows of each GP are data: all of them, where none is repeated."""
    rows = {name: at.process.rows for name, at in scene.at.items()}
    most = max(rows.values())
    return {name: (jnp.arange(n) < count) | (n != most) for name, n in rows.items()}


class _Found(NamedTuple):
    kept: dict[str, Any]
    error: Array
    repeated_alike: Array  # whether rows that were repeated say what the last row says


@partial(jax.jit, static_argnames="once")
@full_precision()
def _conditioned(fit: Fit, call: Call, hyper: Params, count: Array, once: bool) -> _Found:
    scene = scene_of(fit, call, hyper, once)
    counted = _counted(scene, count)
    base = {name: at.start() for name, at in scene.at.items()}
    zero = {name: no_sites(at.process) for name, at in scene.at.items()}
    local = {name: at.local(at.posterior(base[name])) for name, at in scene.at.items()}
    gradients, _ = asked_for(scene, fit.rule, local, zero)
    settled = settle(scene, fit.rule, base, zero, counted)
    carries = carries_of(scene, base, settled.sites)
    kept = {name: at.keep(carries[name]) for name, at in scene.at.items()}
    return _Found(kept, settled.error, _alike(gradients, count))


def _alike(gradients: Mapping[str, Any], count: Array) -> Array:
    """Whether what the likelihood says of rows after the last one of the data is the same."""
    same = []
    for found in jax.tree.leaves(gradients):
        rows = jnp.arange(found.shape[-1])
        last = jnp.take(found, count - 1, axis=-1)[..., None]
        close = jnp.abs(found - last) <= jnp.finfo(found.dtype).eps ** 0.5 * (1 + jnp.abs(last))
        same.append(jnp.where(rows >= count, close, True).all())
    return jnp.stack(same).all()


@blas_threads()
@full_precision(on_cpu=False)
def condition(fit: Fit, call: Call) -> Fit:
    """A fit with more data in it; see :meth:`numpyro_tsvgp.Fit.condition`."""
    check_fit("condition(result.fit, call)", fit)
    new = prepared(fit, call)

    def run(new: NewData) -> _Found:
        return _conditioned(bare(fit), new.call, new.hyper, jnp.asarray(new.points), new.once)

    found = run(new)
    if (
        new.is_padded and not found.repeated_alike
    ):  # a term reads other rows of the GPs than its own
        new = new.unpadded()
        found = run(new)
    warn_unsettled(float(found.error))
    params = {**fit.params, **fit.guide.pack(found.kept)}
    longer = dataclasses.replace(fit, params=params, call=_joined(fit, new))
    if fit.guide.approximates_prior:
        warn_of_doubts(longer)
    return longer


def warn_unsettled(error: float) -> None:
    """Refuses sites that do not exist, and warns of those that have not settled."""
    if not np.isfinite(error):
        raise ValueError(
            "The sites of the new data points are not finite. Check that the likelihood is finite "
            "at them, and that the fit itself is: fit.marginals(X_new)."
        )
    if error > _UNSETTLED:
        warnings.warn(
            f"The sites of the new data points have not settled: the next step would move the "
            f"posterior there by {error:.2g} standard deviations. Are they far outside of what the "
            "fit expects? Fit all data again if so, or add them in smaller batches.",
            stacklevel=stack_level(),
        )


def _joined(fit: Fit, new: NewData) -> Call | None:
    """The training data with the new data after them, or None if there is no way to join them."""
    if fit.call is None or is_divided(fit.call):
        return None
    if new.rows is None or new.once:
        warnings.warn(
            "The fit with the new data in it predicts, but does not have its training data: the "
            f"arguments {canonical(fit.model, fit.call).describe()} of the fit and "
            f"{new.given.describe()} of the new data differ in more than the number of rows. "
            "Where diagnostics are wanted, give it all of them: fit.with_data(X, y).",
            stacklevel=stack_level(),
        )
        return None
    whole = fit.call.whole
    joined = appended(canonical(fit.model, fit.call), new.given, new.rows)
    return joined.of_all_data() if whole else Call(joined.args, joined.kwargs)


@partial(jax.jit, static_argnames="once")
@full_precision()
def _sites_at(
    fit: Fit, call: Call, hyper: Params, count: Array, once: bool
) -> tuple[dict[str, Any], dict[str, PointSites], Array]:
    """The prior at some points, what the posterior asks of them, and whether repeats agree."""
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
    gradients, sites = asked_for(scene, rule, local, none)
    processes = {name: process for name, (process, _) in latents.items()}
    return processes, masked(sites, _counted(scene, count)), _alike(gradients, count)


class _AtPoints(NamedTuple):
    """As much of a scene as gradients need."""

    process: Any


@blas_threads()
@full_precision(on_cpu=False)
def without(fit: Fit, call: Call) -> Fit:
    """A fit with less data in it; see :meth:`numpyro_tsvgp.Fit.without`."""
    check_fit("without(result.fit, call)", fit)
    old = prepared(fit, call)
    left = _left(fit, old)

    def run(old: NewData) -> Any:
        return _sites_at(bare(fit), old.call, old.hyper, jnp.asarray(old.points), old.once)

    processes, sites, alike = run(old)
    if old.is_padded and not alike:
        processes, sites, _ = run(old.unpadded())
    kept = {}
    for name in fit.structure.gps:
        approximation = fit.guide.unpack(name, fit.params)
        kept[name] = approximation.without_points(processes[name], sites[name])
    return dataclasses.replace(fit, params={**fit.params, **fit.guide.pack(kept)}, call=left)


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
