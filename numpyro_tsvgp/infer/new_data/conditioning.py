"""A fit with more data in it, at fixed hyperparameters and without fitting again."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.new_data.new_sites import carries_of, no_sites, settle
from numpyro_tsvgp.infer.standing import warn_of_doubts
from numpyro_tsvgp.infer.steps.density import Scene
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.data_rows import (
    appended,
    canonical,
    is_rows,
    on_device,
    on_host,
    padded,
)
from numpyro_tsvgp.model.new_data import EachOnce, check_new_data, sizes_of
from numpyro_tsvgp.model.padding import rows_stand_alone
from numpyro_tsvgp.model.processes import is_divided
from numpyro_tsvgp.model.read import read
from numpyro_tsvgp.model.validation import unvalidated

__all__ = [
    "NewData",
    "bare",
    "condition",
    "counted_rows",
    "prepared",
    "scene_of",
    "warn_unsettled",
]

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


@full_precision(on_cpu=False)
def prepared(fit: Fit, call: Call, *, pad: bool = True) -> NewData:
    """Checks new data for a fit and brings them to one of a few sizes.

    Programs are compiled for shapes. Rows are repeated up to the next power of two, so that
    batches of any size share a few programs; the sites of repeated rows are zero. It is done only
    where a proof says that the model makes of the other rows what it makes of them alone.

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
    hyper = fit.hyper_at(call)
    model = EachOnce(fit.model) if once else fit.model
    values = {**fit.params, **hyper}
    size = 1 << (rows - 1).bit_length()
    if pad and regular and flags is not None and size > rows:
        longer = padded(given, flags, size)
        if rows_stand_alone(model, given, longer, flags, values):
            call = longer
    with unvalidated():  # which would say less of what to do
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


def counted_rows(scene: Scene, count: Array) -> dict[str, Array]:
    """Which rows of each GP are data: all of them, where none is repeated."""
    rows = {name: at.process.rows for name, at in scene.at.items()}
    most = max(rows.values())
    return {name: (jnp.arange(n) < count) | (n != most) for name, n in rows.items()}


class _Found(NamedTuple):
    kept: dict[str, Any]
    error: Array


@partial(jax.jit, static_argnames="once")
@full_precision()
def _conditioned(fit: Fit, call: Call, hyper: Params, count: Array, once: bool) -> _Found:
    scene = scene_of(fit, call, hyper, once)
    base = {name: at.start() for name, at in scene.at.items()}
    zero = {name: no_sites(at.process) for name, at in scene.at.items()}
    settled = settle(scene, fit.rule, base, zero, counted_rows(scene, count))
    carries = carries_of(scene, base, settled.sites)
    kept = {name: at.keep(carries[name]) for name, at in scene.at.items()}
    return _Found(kept, settled.error)


@blas_threads()
@full_precision(on_cpu=False)
def condition(fit: Fit, call: Call) -> Fit:
    """A fit with more data in it; see :meth:`numpyro_tsvgp.Fit.condition`."""
    check_fit("condition(result.fit, call)", fit)
    new = prepared(fit, call)
    found = _conditioned(bare(fit), new.call, new.hyper, jnp.asarray(new.points), new.once)
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
