"""The state that a fit starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.infer.util import transform_fn

from numpyro_tsvgp.infer.em.checks import (
    check_priors,
    check_rate,
    check_start,
    seen_rows,
)
from numpyro_tsvgp.infer.feed.sharding import agreed_error, check_same_everywhere
from numpyro_tsvgp.infer.standing import doubts
from numpyro_tsvgp.infer.state import Transforms, TSVGPState
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.checks import inspect
from numpyro_tsvgp.model.glance import check_all_rows
from numpyro_tsvgp.model.read import Reading, one_at_a_time, read
from numpyro_tsvgp.model.structure import Structure

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.em.driver import Driver
    from numpyro_tsvgp.infer.guides.guide import GPGuide
    from numpyro_tsvgp.infer.guides.hyper import HyperGuide

__all__ = ["declared_parameters", "initial_state"]

_split = jax.jit(lambda key: tuple(jax.random.split(key)))


def declared_parameters(
    guide: GPGuide, hyper_guide: HyperGuide, call: Call, key: Array
) -> tuple[Reading, dict[str, Any], dict[str, Any]]:
    """Parameters that a model and the guide of its hyperparameters declare.

    Args:
      guide: the guide.
      hyper_guide: the guide of the hyperparameters.
      call: arguments of the model.
      key: seed of initial values.

    Returns:
      The reading of the model that they were found in, initial values, and constraints.
    """
    with (
        one_at_a_time,
        handlers.block(),
        handlers.trace() as trace,
        handlers.seed(rng_seed=key),
    ):
        values = hyper_guide(call)
        reading = read(
            guide.model,
            call,
            values=values,
            expose=lambda site: site["type"] == "param",
            first_rows=True,
        )
    declared = {k: s for k, s in trace.items() if s["type"] == "param"}
    params = {k: site["value"] for k, site in declared.items()}
    kinds = {k: s["kwargs"].pop("constraint", constraints.real) for k, s in declared.items()}
    return reading, params, kinds


def initial_state(
    driver: Driver, rng_key: Array, call: Call, init_params: Mapping[str, Any]
) -> TSVGPState:
    """Checks a model on its data and makes the state before the first update.

    Args:
      driver: the driver.
      rng_key: random key.
      call: arguments of the model, with the data.
      init_params: initial values by parameter name, instead of the model's and guide's own.

    Returns:
      The state, with sites of zero, so that the posterior is the prior.
    """
    check_same_everywhere(driver, rng_key)
    rng_key, key = _split(rng_key)
    seen = seen_rows(driver, call)
    looks = driver.looks()
    structure, reading = inspect(driver.model, seen, looks)
    if seen is not call:
        wrong = agreed_error(check_all_rows(driver.model, call))
        if wrong:
            raise ValueError(wrong)
        call = seen
    hyper_guide = driver.guide.hyper_guide(structure.hyper, call, key)
    check_start(driver, structure, reading, hyper_guide, call)
    reading, params, kinds = declared_parameters(driver.guide, hyper_guide, call, key)
    fixed = set()
    for name, site in reading.gps.items():
        approximation = driver.guide.initial(name, site, reading)
        params |= driver.guide.pack({name: approximation})
        for k, field in driver.guide.fields_of(name).items():
            kinds[k] = driver.guide.constraint(field)
            if not driver.owns(name, field):
                fixed.add(k)
    unknown = set(init_params) - set(params)
    if unknown:
        raise ValueError(
            f"init_params has {sorted(unknown)}, which are not parameters. The parameters "
            f"are {sorted(params)}."
        )
    params |= {k: jnp.asarray(v, jnp.result_type(params[k])) for k, v in init_params.items()}
    transforms = Transforms({k: biject_to(kinds[k]) for k in params if k not in fixed})
    state = _state_of(driver, params, rng_key, structure, transforms)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
        return state  # whose values are not known: `run` and `svi.fit` look at them
    check_rate(driver.site_lr, state, 1)
    fit = driver.fit_of(state, call)
    check_priors(fit)
    for words in doubts(fit, at_point=True):
        raise ValueError(words)
    return state


def _state_of(
    driver: Driver,
    params: Mapping[str, Any],
    rng_key: Array,
    structure: Structure,
    transforms: Transforms,
) -> TSVGPState:
    """The state before the first update, of given parameters."""
    params = _owned(params)
    free = transform_fn(transforms, {k: params[k] for k in transforms}, invert=True)
    free = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), free)
    none, rate = _counters(0.5 if driver.adaptive is None else driver.adaptive.start)
    return TSVGPState(
        optim_state=free if driver.optim is None else driver.optim.init(free),
        approximation={k: params[k] for k in sorted(set(params) - set(transforms))},
        rng_key=rng_key,
        step=none[0],
        rejected=none[1],
        floored=none[2],
        rate=rate,
        structure=structure,
        transforms=transforms,
    )


@jax.jit
def _owned(params: Mapping[str, Any]) -> dict[str, Array]:
    # Weak types would make the second update compile anew, and buffers that are shared with
    # the user's arrays or with one another could not be donated.
    return {k: jnp.array(v, jnp.result_type(v)) for k, v in params.items()}


@jax.jit
def _counters(rate: Any) -> tuple[tuple[Array, ...], Array]:
    return tuple(jnp.zeros((), int) for _ in range(3)), jnp.asarray(rate, float)
