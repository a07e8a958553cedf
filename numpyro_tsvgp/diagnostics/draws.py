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
from numpyro import handlers

from numpyro_tsvgp import extract, features, posterior
from numpyro_tsvgp.bound import refresh_sites
from numpyro_tsvgp.expectations import Rule
from numpyro_tsvgp.extract import GPSite
from numpyro_tsvgp.guide import AutoDualGaussian, Params
from numpyro_tsvgp.pointwise import data_sites, log_prob
from numpyro_tsvgp.posterior import Fitted

__all__ = ["Draws", "Noise", "draw", "prior_hyperparameters", "standard_normals"]

# Rows up to which f is drawn with its joint covariance unless told otherwise.
_JOINT_ROWS = 2048
_JOINT_ROWS_EACH = 512
# Numbers on the device at once: draws of a block times the values of all GPs.
_BLOCK_ELEMENTS = 2**23
_CHUNK_ELEMENTS = 2**22


Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class Draws(NamedTuple):
    """Draws by site, with a leading axis of draws."""

    hyper: dict[str, np.ndarray]
    gps: dict[str, np.ndarray]
    other: dict[str, np.ndarray]  # deterministic sites
    predictive: dict[str, np.ndarray]
    log_likelihood: dict[str, np.ndarray]


def prior_hyperparameters(
    guide: AutoDualGaussian,
    params: Params,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    key: Array,
    num: int,
) -> dict[str, Array]:
    """Draws of the hyperparameters from their prior, with ``numpyro.param`` values held."""

    def one(key: Array) -> dict[str, Array]:
        trace = extract.read(guide.model, args, kwargs, values=params, key=key).trace
        return {name: trace[name]["value"] for name in guide.structure.hyperparameters}

    return lax.map(one, jax.random.split(key, num))


def draw(
    guide: AutoDualGaussian,
    params: Params,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    key: Array,
    num: int,
    hyper: Mapping[str, Array] | None,
    joint: bool | None,
    kept: Mapping[str, tuple[int, np.ndarray]],
    refresh: tuple[int, Rule | None] = (0, None),
    training: Arguments = ((), {}),
    of_prior: bool = False,
    predictive: bool = False,
    log_likelihood: bool = False,
) -> Draws:
    """Draws GPs, and runs the model on each draw for all that follows from them.

    Args:
      guide: the guide.
      params: fitted parameters.
      args: arguments of the model.
      kwargs: keyword arguments of the model.
      key: random key.
      num: number of draws.
      hyper: draws of the hyperparameters, or None where they are points.
      joint: whether GPs are drawn with their joint covariance; None to decide by their size.
      kept: by site, an axis and the indices to keep of it.
      refresh: number of site updates for each draw of the hyperparameters, and their quadrature.
      training: the arguments with the training data that these updates take.
      of_prior: whether GPs are drawn from their prior.
      predictive: whether to draw data.
      log_likelihood: whether to compute log densities of the observed data.

    Returns:
      The draws, in the memory of the host.
    """
    each = bool(hyper)  # every draw has its own hyperparameters
    point = {} if each else guide.sample_hyperparameters(key, params, args, kwargs)
    gps = guide.read(params, args, kwargs, _first(hyper) if each else point).gps
    if joint is None:
        most = max(site.rows for site in gps.values())
        joint = most <= (_JOINT_ROWS_EACH if each else _JOINT_ROWS)

    settings = _Settings(guide, each, joint, refresh, of_prior, predictive, log_likelihood)

    def block(key: Array, given: _Given) -> dict[str, Any]:
        key_gps, key_rest = jax.random.split(key)
        keys = jax.random.split(key_rest, (size, 2))  # here: splitting compiles slowly in a loop
        noise = standard_normals(key_gps, size, guide, params, gps)
        if each:
            return _run(settings, given, keys, given.hyper, noise)
        return _run(settings, given, keys, None, _draw_gps(settings, given, noise))

    per_draw = sum(site.latents * site.rows for site in gps.values())
    blocks = -(-num // max(_BLOCK_ELEMENTS // per_draw, 1))
    size = -(-num // blocks)
    parts = []
    for i, key_block in enumerate(jax.random.split(key, blocks)):
        # The last block is as long as the others, so that nothing is compiled twice.
        which = jnp.arange(i * size, (i + 1) * size) % num
        values = {k: v[which] for k, v in hyper.items()} if hyper else point
        found = block(key_block, _Given(dict(params), args, dict(kwargs), values, training))
        parts.append({k: _to_host(group, kept) for k, group in found.items()})
    groups = jax.tree.map(lambda *x: np.concatenate(x)[:num], *parts)
    repeated = {k: np.broadcast_to(v, (num, *np.shape(v))) for k, v in point.items()}
    return Draws({k: np.asarray(v) for k, v in (hyper or repeated).items()}, **groups)


class _Settings(NamedTuple):
    """What decides the program that draws, as in :func:`draw`."""

    guide: AutoDualGaussian
    each: bool
    joint: bool
    refresh: tuple[int, Rule | None]  # site updates for each draw, and their quadrature
    of_prior: bool
    predictive: bool
    log_likelihood: bool


class _Given(NamedTuple):
    """The values that it draws with."""

    params: Params
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    hyper: Params
    training: Arguments


@partial(jax.jit, static_argnums=0)
def _run(
    settings: _Settings,
    given: _Given,
    keys: Array,
    hyper: Params | None,
    gps: Mapping[str, Any],
) -> dict[str, Any]:
    """Runs the model on each draw; ``gps`` are values, or noise where hyperparameters vary."""

    def one(inputs: tuple[Array, Any, Any]) -> dict[str, Any]:
        key, hyper, gps = inputs
        here = given if hyper is None else _given_hyperparameters(settings, given, hyper)
        values = _draw_gps(settings, here, gps) if settings.each else gps
        return {**_follow(settings, here, key, values), "gps": values}

    return lax.map(one, (keys, hyper, gps))


def _given_hyperparameters(settings: _Settings, given: _Given, hyper: Params) -> _Given:
    steps, rule = settings.refresh
    params = refresh_sites(
        settings.guide, given.params, hyper, *given.training, steps=steps, rule=rule
    )
    return given._replace(params=params, hyper=hyper)


def _draw_gps(settings: _Settings, given: _Given, noise: Mapping[str, Noise]) -> dict[str, Array]:
    guide = settings.guide
    out = {}
    for name, site in guide.read(given.params, given.args, given.kwargs, given.hyper).gps.items():
        fitted = guide.unpack(name, given.params)
        if settings.of_prior:  # with sites of zero the posterior is the prior
            fitted = posterior.without_data(fitted)
        sampler = _draw_jointly if settings.joint else _draw_through_inducing
        out[name] = sampler(site, fitted, noise[name])
    return out


def _follow(
    settings: _Settings, given: _Given, key: Array, values: Mapping[str, Array]
) -> dict[str, Any]:
    """Runs the model with everything given, and collects what follows."""
    guide = settings.guide
    key_model, key_data = key
    with (
        handlers.block(),
        handlers.trace() as trace,
        handlers.seed(rng_seed=key_model),
        handlers.substitute(data={**given.params, **given.hyper, **values}),
    ):
        guide.model(*given.args, **given.kwargs)
    data = data_sites(trace)
    known = {*values, *guide.structure.hyperparameters}
    out: dict[str, Any] = {"other": {}, "predictive": {}, "log_likelihood": {}}
    for name, site in trace.items():
        if site["type"] == "deterministic":
            out["other"][name] = site["value"]
        elif not settings.predictive or site["type"] != "sample" or name in known:
            continue
        elif name in data:
            k = jax.random.fold_in(key_data, len(out["predictive"])) if len(data) > 1 else key_data
            with suppress(NotImplementedError):  # a density one cannot draw from
                out["predictive"][name] = site["fn"].sample(k)
        elif not site["is_observed"]:  # data left open, to predict or to impute
            out["predictive"][name] = site["value"]
    if settings.log_likelihood:
        out["log_likelihood"] = {name: log_prob(site) for name, site in data.items()}
    return out


def _first(draws: Mapping[str, Array] | None) -> dict[str, Array]:
    return {k: v[0] for k, v in (draws or {}).items()}


def _to_host(
    group: Mapping[str, Array], kept: Mapping[str, tuple[int, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Moves draws off the device, of some sites a part of their rows."""
    out = {name: np.asarray(value) for name, value in group.items()}
    for name, (axis, rows) in kept.items():
        if name in out:
            out[name] = np.take(out[name], rows, axis + 1)
    return out


class Noise(NamedTuple):
    """Standard normal numbers for the inducing values and for the rest of f."""

    inducing: Any  # (..., latents, m)
    rest: Any  # (..., latents, n)


def standard_normals(
    key: Array,
    size: int,
    guide: AutoDualGaussian,
    params: Params,
    gps: Mapping[str, GPSite],
) -> dict[str, Noise]:
    """Standard normal numbers for draws of every GP."""
    # From NumPy: compiling JAX's generator for every new shape takes seconds.
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
    out = {}
    for name, site in gps.items():
        m, dtype = guide.unpack(name, params).inducing.shape[0], site.gp.loc.dtype
        out[name] = Noise(
            rng.standard_normal((size, site.latents, m)).astype(dtype),
            rng.standard_normal((size, site.latents, site.rows)).astype(dtype),
        )
    return out


@jax.jit
def _draw_jointly(site: GPSite, fitted: Fitted, noise: Noise) -> Array:
    return posterior.joint(site, fitted).from_noise(*map(site.unflatten, noise))


@jax.jit
def _draw_through_inducing(site: GPSite, fitted: Fitted, noise: Noise) -> Array:
    """Draws whose values are independent given the inducing values, in chunks of rows."""
    prior = posterior.prior(site, fitted)
    q = posterior.inducing_values(site, fitted, prior)
    s = q.mean + jnp.einsum("pij,...pi->...pj", q.inverse, noise.inducing)
    X, n = site.gp.X, site.rows
    chunk = min(max(_CHUNK_ELEMENTS // (q.mean.size + s.size), 256), n)
    pad = -n % chunk

    def at(inputs: tuple[Array, Array]) -> Array:
        X, rest = inputs
        w, _, residual, _ = features.at(site.kernel, fitted.inducing, X, prior)
        w = jnp.broadcast_to(w, (site.latents, *w.shape[1:]))
        return jnp.einsum("...pm,pnm->...pn", s, w) + jnp.sqrt(jnp.maximum(residual, 0.0)) * rest

    padded = jnp.concatenate([X, jnp.broadcast_to(X[:1], (pad, *X.shape[1:]))])
    rest = jnp.concatenate([noise.rest, jnp.zeros((*noise.rest.shape[:-1], pad))], -1)
    rest = jnp.moveaxis(rest.reshape(*rest.shape[:-1], -1, chunk), -2, 0)
    parts = lax.map(at, (padded.reshape(-1, chunk, *X.shape[1:]), rest))
    values = jnp.moveaxis(parts, 0, -2).reshape(*s.shape[:-1], n + pad)[..., :n]
    return site.unflatten(site.loc + values)
