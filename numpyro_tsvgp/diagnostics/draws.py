"""Draws of everything in a model, from its posterior or its prior, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_tsvgp.gaussian.approximation import Noise
from numpyro_tsvgp.gaussian.linalg import full_precision
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.importance import standard_normals
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.likelihood import data_sites, pointwise_log_prob
from numpyro_tsvgp.model.read import read, run_with
from numpyro_tsvgp.model.wrapped import can_be_sampled

__all__ = ["Draws", "draw", "prior_hyperparameters"]

# Rows up to which f is drawn with its joint covariance unless told otherwise.
_JOINT_ROWS = 2048
_JOINT_ROWS_EACH = 512
# Numbers on the device at once: draws of a block times the values of all GPs.
_BLOCK_ELEMENTS = 2**23


class Draws(NamedTuple):
    """Draws by site, with a leading axis of draws."""

    hyper: dict[str, np.ndarray]
    gps: dict[str, np.ndarray]
    other: dict[str, np.ndarray]  # deterministic sites
    predictive: dict[str, np.ndarray]
    log_likelihood: dict[str, np.ndarray]


def prior_hyperparameters(fit: Fit, key: Array, num: int) -> dict[str, Array]:
    """Draws of the hyperparameters from their prior, with ``numpyro.param`` values held.

    Latent variables below a GP are not among them: they follow from the draws of the GP.

    Args:
      fit: the fit.
      key: random key.
      num: number of draws.

    Returns:
      Draws by site.

    Raises:
      NotImplementedError: if a prior cannot be drawn from.
    """
    trace = fit.read().trace
    if not all(can_be_sampled(trace[name]["fn"]) for name in fit.structure.above):
        raise NotImplementedError("A prior of the model cannot be sampled.")

    return _from_prior(fit, jax.random.split(key, num))


@jax.jit
def _from_prior(fit: Fit, keys: Array) -> dict[str, Array]:
    def one(key: Array) -> dict[str, Array]:
        trace = read(fit.model, fit.data, values=fit.params, key=key).trace
        return {name: trace[name]["value"] for name in fit.structure.above}

    return lax.map(one, keys)


def draw(
    fit: Fit,
    call: Call,
    *,
    key: Array,
    num: int,
    hyper: Mapping[str, Array] | None,
    joint: bool | None,
    kept: Mapping[str, tuple[int, np.ndarray]],
    refresh: int | None = None,
    of_prior: bool = False,
    predictive: bool = False,
    log_likelihood: bool = False,
) -> Draws:
    """Draws GPs, and runs the model on each draw for all that follows from them.

    Args:
      fit: the fit.
      call: arguments of the model to draw at.
      key: random key.
      num: number of draws.
      hyper: draws of the hyperparameters, or None where they are points.
      joint: whether GPs are drawn with their joint covariance; None to decide by their size.
      kept: for each site, an axis and the indices to keep of it.
      refresh: number of site updates for each draw of the hyperparameters, on the training data;
        None where the sites are to be used as they are.
      of_prior: whether GPs are drawn from their prior.
      predictive: whether to draw data.
      log_likelihood: whether to compute log densities of the observed data.

    Returns:
      The draws, in the memory of the host.
    """
    each = bool(hyper)  # every draw has its own hyperparameters
    point = {} if each else fit.hyper
    # Below a GP everything follows from it, but for what was found with the training data.
    follows = fit.structure.below if of_prior or call is not fit.data else ()
    reading = fit.read(call, _without(follows, _first(hyper) if each else point))
    latents = fit.guide.latents(reading, fit.params)
    if joint is None:
        most = max(process.rows for process, _ in latents.values())
        joint = most <= (_JOINT_ROWS_EACH if each else _JOINT_ROWS)

    settings = _Settings(each, joint, refresh, of_prior, follows, predictive, log_likelihood)

    def block(key: Array, hyper: Params) -> dict[str, Any]:
        key_gps, key_rest = jax.random.split(key)
        keys = jax.random.split(key_rest, (size, 2))  # here: splitting compiles slowly in a loop
        noise = standard_normals(key_gps, size, latents)
        if each:
            return _run(settings, fit, call, keys, hyper, noise)
        return _run(settings, fit, call, keys, None, _draw_all(settings, fit, call, point, noise))

    per_draw = sum(process.functions * process.rows for process, _ in latents.values())
    blocks = -(-num // max(_BLOCK_ELEMENTS // per_draw, 1))
    size = -(-num // blocks)
    parts = []
    for i, key_block in enumerate(jax.random.split(key, blocks)):
        # The last block is as long as the others, so that nothing is compiled twice.
        which = jnp.arange(i * size, (i + 1) * size) % num
        values = {k: v[which] for k, v in hyper.items()} if hyper else {}
        found = block(key_block, values)
        # Data are kept whole: what is picked are rows of latent values.
        parts.append(
            {k: _to_host(v, kept if k in ("gps", "other") else {}) for k, v in found.items()}
        )
    groups = jax.tree.map(lambda *x: np.concatenate(x)[:num], *parts)
    repeated = {k: np.broadcast_to(v, (num, *np.shape(v))) for k, v in point.items()}
    return Draws(_to_host(hyper or repeated, kept), **groups)


class _Settings(NamedTuple):
    """What decides the program that draws, as in :func:`draw`."""

    each: bool
    joint: bool
    refresh: int | None
    of_prior: bool
    follows: tuple[str, ...]  # latent variables that are drawn given the GPs
    predictive: bool
    log_likelihood: bool


@partial(jax.jit, static_argnums=0)
@full_precision()
def _run(
    settings: _Settings,
    fit: Fit,
    call: Call,
    keys: Array,
    hyper: Params | None,
    gps: Mapping[str, Any],
) -> dict[str, Any]:
    """Runs the model on each draw; ``gps`` are values, or noise where hyperparameters vary."""

    def one(inputs: tuple[Array, Any, Any]) -> dict[str, Any]:
        key, hyper, gps = inputs
        here, values = fit, gps
        if hyper is None:
            hyper = fit.hyper
        if settings.each:
            if settings.refresh is not None:
                here = fit.refreshed(hyper, settings.refresh)
            values = _draw_gps(settings, here, call, hyper, gps)
        return {**_follow(settings, here, call, key, {**hyper, **values}), "gps": values}

    return lax.map(one, (keys, hyper, gps))


@full_precision()
def _draw_gps(
    settings: _Settings, fit: Fit, call: Call, hyper: Params, noise: Mapping[str, Noise]
) -> dict[str, Array]:
    out = {}
    reading = fit.read(call, _without(settings.follows, hyper))
    for name, (process, approximation) in fit.guide.latents(reading, fit.params).items():
        if settings.of_prior:
            approximation = approximation.without_data()
        if settings.joint:
            values = approximation.joint(process).draw(noise[name])
        else:
            values = approximation.draw_marginally(process, noise[name])
        out[name] = process.unflatten(values)
    return out


_draw_all = partial(jax.jit, static_argnums=0)(_draw_gps)


def _follow(
    settings: _Settings, fit: Fit, call: Call, key: Array, values: Mapping[str, Array]
) -> dict[str, Any]:
    """Runs the model with everything given, and collects what follows."""
    key_model, key_data = key
    values = _without(settings.follows, values)
    trace = run_with(fit.model, call, {**fit.params, **values}, key_model)
    data = data_sites(trace)
    out: dict[str, Any] = {"other": {}, "predictive": {}, "log_likelihood": {}}
    for name, site in trace.items():
        if site["type"] == "deterministic":
            out["other"][name] = site["value"]
        elif not settings.predictive or site["type"] != "sample" or name in values:
            continue
        elif name in data:
            k = jax.random.fold_in(key_data, len(out["predictive"])) if len(data) > 1 else key_data
            with suppress(NotImplementedError):  # a density one cannot draw from
                out["predictive"][name] = site["fn"].sample(k)
        elif not site["is_observed"] and can_be_sampled(site["fn"]):
            # Data left open, to predict or to impute.
            out["predictive"][name] = site["value"]
    if settings.log_likelihood:
        out["log_likelihood"] = {name: pointwise_log_prob(site) for name, site in data.items()}
    return out


def _without(names: tuple[str, ...], values: Params) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k not in names}


def _first(draws: Mapping[str, Array] | None) -> dict[str, Array]:
    return {k: v[0] for k, v in (draws or {}).items()}


def _to_host(
    group: Mapping[str, Any], kept: Mapping[str, tuple[int, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Moves draws off the device, of some sites a part of their rows."""
    out = {name: np.asarray(value) for name, value in group.items()}
    for name, (axis, rows) in kept.items():
        if name in out:
            out[name] = np.take(out[name], rows, axis + 1)
    return out
