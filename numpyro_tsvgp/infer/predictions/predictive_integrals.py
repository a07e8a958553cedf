"""Integrals of the distribution of data over the marginals of GPs and hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_tsvgp.gaussian.linalg import full_precision
from numpyro_tsvgp.gaussian.quadrature import Marginals
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.guides.prediction import read_to_predict
from numpyro_tsvgp.infer.steps.mixture import FineNodes, values_at_node
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import Model, run_with
from numpyro_tsvgp.model.wrapped import unmasked, unwrapped

__all__ = [
    "Kind",
    "Source",
    "bisect",
    "cdf",
    "draw",
    "integral",
    "kind_of",
    "log_prob",
    "mean",
    "probabilities",
    "spread",
]

# Numbers held at once.
_ELEMENTS = 2**20


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["call", "parameters", "hyper", "marginals"],
    meta_fields=["model", "coordinates", "dim"],
)
@dataclass(frozen=True)
class Source:
    """What predictive distributions are integrals of: a pytree.

    Attributes:
      call: arguments of the model.
      parameters: the parameters of the model.
      hyper: hyperparameters, with a leading axis of draws.
      marginals: the marginals of each GP, ``(draws, functions, n)``.
      model: the NumPyro model.
      coordinates: the coordinate of the nodes that each latent function uses, by GP site.
      dim: how many there are.
    """

    call: Call
    parameters: Params
    hyper: Params
    marginals: dict[str, Marginals]
    model: Model
    coordinates: tuple[tuple[str, tuple[int, ...]], ...]
    dim: int

    @property
    def axes(self) -> dict[str, np.ndarray]:
        return {name: np.array(axes) for name, axes in self.coordinates}

    def sites(self, hyper: Params) -> Callable[[dict[str, Array]], Any]:
        """The sites of the model as a function of GP values ``(functions, n)``."""
        values = {**self.parameters, **hyper}
        reading, call = read_to_predict(self.model, self.call, values)

        def at(gps: dict[str, Array]) -> Any:
            shaped = {name: reading.gps[name].unflatten(value) for name, value in gps.items()}
            return run_with(self.model, call, {**reading.pinned, **shaped})

        return at


class Kind(NamedTuple):
    """What is known of the distribution of a site before any integral.

    Attributes:
      family: name of its class.
      shape: the shape of the data.
      event_dim: how many of its last axes are those of one number of the distribution.
      discrete: whether data are whole numbers.
      has_cdf: whether it has a cumulative distribution function.
      enumerable: whether its values can be listed.
      values: that list, if so.
    """

    family: str
    shape: tuple[int, ...]
    event_dim: int
    discrete: bool
    has_cdf: bool
    enumerable: bool
    values: Any


def kind_of(source: Source, name: str) -> Kind:
    """Looks at the distribution of a site, without computing anything."""
    found: list[Any] = []

    def look(source: Source) -> Any:
        hyper, marginals = jax.tree.map(lambda x: x[0], (source.hyper, source.marginals))
        trace = source.sites(hyper)({k: q.mean for k, q in marginals.items()})
        site = trace[name]
        fn, shape = unwrapped(site["fn"]), tuple(site["fn"].shape())
        values = None
        if fn.event_dim == 0 and getattr(fn, "has_enumerate_support", False):
            try:
                with jax.ensure_compile_time_eval():
                    values = np.asarray(fn.enumerate_support(expand=False)).ravel()
            except Exception:  # of numbers that differ, of a base that has none
                values = None
        has_cdf = fn.event_dim == 0
        if has_cdf:
            try:
                fn.cdf(jnp.broadcast_to(fn.mean, shape))
            except (NotImplementedError, TypeError, AttributeError):
                has_cdf = False
        discrete = bool(fn.support.is_discrete)
        family = type(fn).__name__.removesuffix("Logits").removesuffix("Probs")
        found.append(
            Kind(family, shape, fn.event_dim, discrete, has_cdf, values is not None, values)
        )
        return jnp.zeros(())

    jax.eval_shape(look, source)
    return found[0]


# ---- what is integrated: functions of a site ---------------------------------------------------


def mean(site: Any) -> Array:
    fn, shape = _of(site)
    return jnp.broadcast_to(fn.mean, shape)


def spread(site: Any, centre: Array) -> Array:
    """The squared distance from a centre."""
    fn, shape = _of(site)
    return jnp.broadcast_to(fn.variance + jnp.square(fn.mean - centre), shape)


def log_prob(site: Any, y: Array) -> Array:
    return _of(site)[0].log_prob(y)


def cdf(site: Any, y: Array) -> Array:
    """The cumulative probability at values ``(..., *shape)``."""
    fn, _ = _of(site)
    found = fn.cdf(y)
    low, high = _bounds(fn)
    below = y < low if fn.support.is_discrete else y <= low
    return jnp.where(below, 0.0, jnp.where(y >= high, 1.0, found))


def probabilities(site: Any) -> Array:
    fn, shape = _of(site)
    values = fn.enumerate_support(expand=False).ravel()
    values = values.reshape(-1, *[1] * len(shape))
    found = jnp.exp(fn.log_prob(jnp.broadcast_to(values, (values.shape[0], *shape))))
    return jnp.moveaxis(found, 0, -1)


def _of(site: Any) -> tuple[Any, tuple[int, ...]]:
    return unwrapped(site["fn"]), tuple(site["fn"].shape())


def _bounds(fn: Any) -> tuple[Any, Any]:
    support = fn.support
    return getattr(support, "lower_bound", -jnp.inf), getattr(support, "upper_bound", jnp.inf)


# ---- integrals --------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("name", "visit", "log"))
@full_precision()
def integral(
    source: Source,
    nodes: FineNodes,
    arrays: tuple[Array, ...],
    *,
    name: str,
    visit: Callable[..., Array],
    log: bool,
) -> Array:
    """An integral of a function of a site, by all weights of some nodes.

    Args:
      source: the marginals of the GPs.
      nodes: the nodes of the quadrature.
      arrays: further arguments of the function.
      name: the name of the site.
      visit: the function.
      log: whether what it gives is a logarithm.

    Returns:
      An array with a leading axis of the weights.
    """
    return _integral(source, nodes, lambda site: visit(site, *arrays), name, log)


def _integral(
    source: Source, nodes: FineNodes, function: Callable[[Any], Array], name: str, log: bool
) -> Array:
    axes = source.axes

    def of_draw(one: Any) -> Array:
        hyper, marginals = one
        sites = source.sites(hyper)

        def at(node: Array) -> Array:
            return function(sites(values_at_node(marginals, axes, node))[name])

        points = jnp.asarray(nodes.points)
        shape = jax.eval_shape(at, points[0])
        per_node = max(shape.size, sum(q.mean.size for q in marginals.values()), 1)
        size = points.shape[0]
        at_once = min(max(_ELEMENTS // per_node, 1), size)
        pad = -size % at_once
        points = jnp.pad(points, ((0, pad), (0, 0))).reshape(-1, at_once, points.shape[1])
        log_weights = jnp.pad(
            jnp.asarray(nodes.log_weights), ((0, 0), (0, pad)), constant_values=-jnp.inf
        )
        log_weights = jnp.moveaxis(log_weights.reshape(3, -1, at_once), 1, 0)

        def step(total: Array, inputs: Any) -> tuple[Array, None]:
            points, log_weights = inputs
            found = jax.vmap(at)(points)
            weights = log_weights.astype(shape.dtype).reshape(3, -1, *[1] * len(shape.shape))
            if log:
                return jnp.logaddexp(total, jax.nn.logsumexp(weights + found, axis=1)), None
            # Where there is no weight there is nothing, even of what is infinite.
            parts = jnp.where(jnp.isneginf(weights), 0.0, jnp.exp(weights) * found)
            return total + parts.sum(1), None

        start = jnp.full((3, *shape.shape), -jnp.inf if log else 0.0, shape.dtype)
        return lax.scan(step, start, (points, log_weights))[0]

    found = lax.map(of_draw, (dict(source.hyper), source.marginals))
    if not log:
        return found.mean(0)
    return jax.nn.logsumexp(found, axis=0) - jnp.log(found.shape[0])


@partial(jax.jit, static_argnames=("name", "discrete"))
@full_precision()
def bisect(
    source: Source,
    nodes: FineNodes,
    q: Array,
    centre: Array,
    scale: Array,
    *,
    name: str,
    discrete: bool,
) -> Array:
    """Quantiles ``(len(q), *shape)`` by bisection of the mixture's cumulative probability.

    Args:
      source: the marginals of the GPs.
      nodes: the nodes of the quadrature.
      q: probabilities.
      centre: where to begin.
      scale: how far to go at first.
      name: the name of the site.
      discrete: whether data are whole numbers.

    Returns:
      For whole numbers the smallest whose cumulative probability is at least q.
    """
    shape = centre.shape
    wanted = q.astype(centre.dtype).reshape(-1, *[1] * len(shape))

    def cumulative(y: Array) -> Array:
        return _integral(source, nodes, lambda site: cdf(site, y), name, False)[0]

    def whole(y: Array, up: bool) -> Array:
        return (jnp.ceil(y) if up else jnp.floor(y)) if discrete else y

    every = (len(q), *shape)

    def widen(state: Any) -> Any:
        step, low, high, _, _ = state
        low, high = whole(centre - step * scale, False), whole(centre + step * scale, True)
        low, high = jnp.broadcast_to(low, every), jnp.broadcast_to(high, every)
        return 4.0 * step, low, high, cumulative(low) >= wanted, cumulative(high) < wanted

    def goes_on(state: Any) -> Array:
        return (state[0] < 1e18) & (state[3].any() | state[4].any())

    start = (
        jnp.asarray(4.0, centre.dtype),
        jnp.zeros(every, centre.dtype),
        jnp.zeros(every, centre.dtype),
        jnp.ones(every, bool),
        jnp.ones(every, bool),
    )
    _, low, high, too_high, too_low = lax.while_loop(goes_on, widen, start)
    tolerance = 1.5 if discrete else 16 * jnp.finfo(centre.dtype).eps ** 0.75 * scale

    def halve(state: Any) -> Any:
        i, low, high = state
        middle = whole(0.5 * (low + high), False)
        below = cumulative(middle) < wanted
        return i + 1, jnp.where(below, middle, low), jnp.where(below, high, middle)

    def apart(state: Any) -> Array:
        return (state[0] < 100) & ((state[2] - state[1]) > tolerance).any()

    _, low, high = lax.while_loop(apart, halve, (0, low, high))
    found = high if discrete else 0.5 * (low + high)
    return jnp.where(too_high | too_low, jnp.nan, found)


@partial(jax.jit, static_argnames=("name", "num"))
@full_precision()
def draw(source: Source, key: Array, *, name: str, num: int) -> Array:
    """Draws of each number of a site by itself, ``(num, *shape)``."""
    draws = jax.tree.leaves(source.marginals)[0].shape[0]

    def one(inputs: tuple[Array, Array]) -> Array:
        key, index = inputs
        hyper, marginals = jax.tree.map(lambda x: x[index], (source.hyper, source.marginals))
        keys = jax.random.split(key, len(marginals) + 1)
        gps = {
            gp: q.mean + jnp.sqrt(q.variance) * jax.random.normal(k, q.mean.shape, q.mean.dtype)
            for k, (gp, q) in zip(keys[1:], marginals.items(), strict=True)
        }
        fn, _ = unmasked(source.sites(hyper)(gps)[name]["fn"])
        return fn.sample(keys[0])

    return lax.map(one, (jax.random.split(key, num), jnp.arange(num) % draws), batch_size=64)
