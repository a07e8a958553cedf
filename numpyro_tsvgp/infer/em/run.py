"""A run of many updates: a careful start, the loop, and what is said at its end."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.gaussian.linalg import blas_threads
from numpyro_tsvgp.infer.em.checks import check_rate, check_state
from numpyro_tsvgp.infer.em.chunks import plan_of
from numpyro_tsvgp.infer.em.convergence import complaint
from numpyro_tsvgp.infer.em.failures import diagnose
from numpyro_tsvgp.infer.em.interrupts import Interrupts
from numpyro_tsvgp.infer.em.loop import run_steps
from numpyro_tsvgp.infer.em.warmup import overshoots, settle
from numpyro_tsvgp.infer.feed.batches import Feed
from numpyro_tsvgp.infer.files.fingerprint import fingerprint
from numpyro_tsvgp.infer.standing import warn_of_doubts
from numpyro_tsvgp.infer.state import TSVGPRunResult, TSVGPState
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.glance import numbers_of
from numpyro_tsvgp.model.structure import without_slope
from numpyro_tsvgp.model.validation import unvalidated

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.em.driver import Driver

__all__ = ["RunOptions", "attempt", "check_num_steps", "run", "settled"]

# Seconds from which on a run is audited at its end.
_LONG = 60.0


class RunOptions(NamedTuple):
    """The options of a run, as :meth:`Driver.run` documents them."""

    progress_bar: bool
    stable_update: bool
    init_state: TSVGPState | None
    init_params: Mapping[str, Any] | None
    checkpoint: str | os.PathLike[str] | None
    checkpoint_every: int | None
    audit: bool | None


def check_num_steps(num_steps: Any) -> None:
    """The number of updates must be one, and not an argument of the model."""
    if not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(
            "num_steps must be a positive integer, got "
            f"{num_steps if isinstance(num_steps, int) else _kind(num_steps)}. The "
            "arguments are svi.run(rng_key, num_steps, *arguments of the model)."
        )


def run(
    driver: Driver, rng_key: Array, num_steps: int, feed: Feed, options: RunOptions
) -> TSVGPRunResult:
    """Runs ``num_steps`` updates; see :meth:`Driver.run`."""
    with Interrupts() as interrupts:
        return _run(driver, rng_key, num_steps, feed, options, interrupts)


def _run(
    driver: Driver,
    rng_key: Array,
    num_steps: int,
    feed: Feed,
    options: RunOptions,
    interrupts: Interrupts,
) -> TSVGPRunResult:
    call = feed.first
    if options.init_state is None:
        state = driver.init(rng_key, *call.args, init_params=options.init_params, **call.kwargs)
    else:
        state = options.init_state
        check_state(driver, state, call)
    check_rate(driver.site_lr, state, num_steps)
    step = driver.compiled_stable_update if options.stable_update else driver.compiled_update
    params = driver.get_params(state)
    start = _hyperparameters(driver, state, params)
    largest = max(driver.guide.unpack(name, params).largest_factor for name in state.structure.gps)
    started = time.monotonic()
    points, subsampling = count_points(driver, call)
    has_rate = driver.e_steps and (driver.adaptive is None or subsampling > 1)  # to give advice on
    rate = float(driver.rate(state.step + num_steps - 1, subsampling)) if has_rate else None
    hyper = state.structure.hyper
    is_point = driver.guide.hyper_guide(hyper, call).is_point
    drawn = 0 if is_point else sum(math.prod(shape) for shape, _ in hyper.signature)

    def careful_start(losses: Sequence[float]) -> TSVGPState | None:
        if options.init_state is not None or (driver.adaptive is not None and subsampling == 1):
            return None
        if overshoots(losses, points, subsampled=subsampling > 1):
            return settled(driver, state, call)
        return None

    interrupts.check()  # one of the start means that there shall be no run
    with blas_threads(largest):
        result = run_steps(
            lambda state: step(state, feed.next()),
            state,
            num_steps,
            result=partial(_result, driver, feed),
            usable=partial(_is_usable, driver, feed, options),
            diagnose=lambda state: diagnose(driver, state, feed.current),
            judge=lambda losses: complaint(
                losses, points, subsampled=subsampling > 1, rate=rate, drawn=drawn
            ),
            careful_start=careful_start,
            fingerprint=_fingerprint(driver, state, feed) if options.checkpoint is not None else {},
            feed=feed,
            interrupts=interrupts,
            progress_bar=options.progress_bar,
            checkpoint=options.checkpoint,
            checkpoint_every=options.checkpoint_every,
        )
    warn_of_doubts(result.fit)
    _warn_of_what_cannot_move(driver, start, result)
    audit = options.audit
    if audit is None and result.fit.call is None:
        audit = False  # the data are not here any more
    if audit is None:
        audit = not state.structure.proven or time.monotonic() - started > _LONG
    if audit:
        fit = result.fit.with_data(*feed.current.args, **feed.current.kwargs).of_this_process()
        try:
            found = fit.audit(jax.random.fold_in(rng_key, 0), hyperparameters=False)
            concerns = [words for words in found.concerns if words not in found.doubts]  # said
        except KeyboardInterrupt:  # the fit is done, and need not be lost
            interrupts.taken()
            concerns = ["It was interrupted, so that nothing is known. Try fit.audit(key)."]
        for concern in concerns:
            warnings.warn(f"Audit of the fit: {concern}", stacklevel=stack_level())
    return result


def _is_usable(driver: Driver, feed: Feed, options: RunOptions, state: TSVGPState) -> bool:
    """Whether one can go on from a state.

    The next step tells, by a program that is compiled already. A longer answer is asked for where
    it has a program of its own in any case, or where a step of many rows would take longer.
    """
    call = feed.current
    is_short = not options.stable_update and options.checkpoint is None
    if is_short and plan_of(driver, state, call) is None:
        _, loss = driver.compiled_update(state, call)
        if np.isfinite(jax.device_get(loss)):
            return True
    return bool(driver.compiled_usable(state, call))


def _hyperparameters(
    driver: Driver, state: TSVGPState, params: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Copies of the optimizer's parameters but those of GPs; a step may take the arrays away."""
    of_gps = {key for name in state.structure.gps for key in driver.guide.fields_of(name)}
    return {
        key: np.array(params[key])
        for key in state.transforms
        if key not in of_gps and params[key].is_fully_addressable
    }


def _warn_of_what_cannot_move(
    driver: Driver, start: Mapping[str, Any], result: TSVGPRunResult
) -> None:
    """Says which parameters no gradient reaches, of those that have not moved at all."""
    fit = result.fit
    if driver.optim is None or fit.call is None:
        return
    still = [key for key, value in start.items() if np.array_equal(value, result.params[key])]
    if not still:
        return
    suffix = f"_{driver.guide.prefix}_loc"
    with unvalidated():
        reading = fit.read()
        names = {key.removesuffix(suffix) for key in still} & set(reading.pinned)
        fixed = without_slope(driver.model, reading, fit.data, sorted(names))
    for name in fixed:
        warnings.warn(
            f"'{name}' has not moved from where it started, and cannot: the model reads it only "
            "where it has no slope, such as in a comparison (jnp.where(X < c, ...)) or by "
            "rounding. Make the step smooth, jax.nn.sigmoid((c - X) / width), or compare fits at "
            "several values of it.",
            stacklevel=stack_level(),
        )


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"an array of shape {shape}"


def settled(driver: Driver, state: TSVGPState, call: Call) -> TSVGPState:
    """The state with sites that suit its hyperparameters, reached without overshooting."""
    key = state.rng_key
    _, subsampling = numbers_of(driver.model, call)
    rate = float(driver.rate(state.step, subsampling))
    return settle(lambda state, r: driver.compiled_attempt(state, key, r, call), state, rate)


def attempt(
    driver: Driver, state: TSVGPState, key: Array, rate: Any, call: Call
) -> tuple[TSVGPState, Array]:
    """The state after site updates at a rate, and its loss."""
    new, *_ = driver.e_step(state, key, call, rate)
    return new, driver.loss(new, driver.free(new.optim_state), key, call)


def _fingerprint(driver: Driver, state: TSVGPState, feed: Feed) -> dict[str, str]:
    settings = (
        *(driver.site_lr, driver.e_steps, driver.m_steps),
        *(driver.quadrature, driver.rule, driver.objective, driver.optim),
    )
    return {
        "the data": fingerprint(feed.signature),
        "the model": fingerprint(driver.model),
        "the settings of the driver": fingerprint(settings),
        "the start (random key, initial values or inducing inputs)": fingerprint(
            (driver.get_params(state), state.rng_key)
        ),
    }


def _result(driver: Driver, feed: Feed, state: TSVGPState, losses: Any) -> TSVGPRunResult:
    call = feed.first
    fit = driver.fit_of(state, call)
    result = TSVGPRunResult(fit.params, state, losses)
    result.fit = fit if feed.has_all_data else dataclasses.replace(fit, call=None)
    return result


def count_points(driver: Driver, call: Call) -> tuple[float, float]:
    """How many data points there are, subsampled or not, and how many times those of a batch."""
    return numbers_of(driver.model, call)
