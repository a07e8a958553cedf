"""What a model must be for t-SVGP to fit it, found out before the first step.

Every message names the site, says what is wrong, and says what to do.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

import jax
import numpy as np

from numpyro_tsvgp.distributions import GP, is_masked
from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.batches import of_all_rows, readings_of_all_rows
from numpyro_tsvgp.model.coupling import couplings
from numpyro_tsvgp.model.data_checks import (
    check_order,
    check_shape,
    check_values,
    where_not_finite,
)
from numpyro_tsvgp.model.density_checks import (
    check_density,
    check_differentiable,
    check_ranges,
)
from numpyro_tsvgp.model.first_look import Latents, Looks, is_noise, latents_of
from numpyro_tsvgp.model.read import (
    GPSite,
    Message,
    Model,
    Reading,
    is_gp,
    is_latent,
    is_observed,
    read,
)
from numpyro_tsvgp.model.scale_checks import check_scales
from numpyro_tsvgp.model.structure import Structure, hyper_sites
from numpyro_tsvgp.model.sums import reads_sums
from numpyro_tsvgp.model.wrapped import unwrapped

__all__ = ["inspect"]

# Inputs at which a kernel is looked at.
_SOME = 8


def inspect(model: Model, call: Call, looks: Looks | None = None) -> tuple[Structure, Reading]:
    """Reads a model at its data, checks that t-SVGP fits it, and returns its structure.

    Args:
      model: the NumPyro model.
      call: its arguments, with the data.
      looks: compiled programs of the model, from an earlier call.

    Returns:
      The structure of the model, and the reading it was found in.

    Raises:
      ValueError: if the model is one that sites cannot represent, saying which site and why.
    """
    if call.is_traced:
        raise ValueError(
            "The model is checked on its data before the first step, which cannot be done inside "
            "jax.jit or jax.vmap where the data are arguments of it. Call init outside, on one "
            "data set: with tied sites its state holds nothing of the data, so that "
            "jax.vmap(lambda y: svi.update(state, X, y))(many) goes on from it. A random key may "
            "be traced: jax.vmap(lambda key: svi.init(key, X, y))(keys)."
        )
    # Where a key is traced, the data are not. Where nothing is, the analyses below are not to
    # evaluate what they only trace.
    traced = isinstance(jax.random.key(0), jax.core.Tracer)
    with jax.ensure_compile_time_eval() if traced else nullcontext():
        return _inspect(model, call, Looks(model) if looks is None else looks)


def _inspect(model: Model, call: Call, looks: Looks) -> tuple[Structure, Reading]:
    try:
        reading = read(model, call, key=jax.random.key(0), first_rows=True)
    except Exception as error:
        error.add_note(
            "The model was run once on its data, before the fit, with arguments "
            f"{call.describe()}. Check that they are what it expects and that X and y "
            f"have the same number of rows.{where_not_finite(call)}{_not_sampled(error)}"
            f"{_out_of_range(error)}"
        )
        raise
    trace = reading.trace
    _check_there_is_something_to_fit(trace)
    observed = {name: site for name, site in trace.items() if is_observed(site)}
    for name, site in reading.gps.items():
        _check_gp(name, site, trace[name], observed)
    for name, message in observed.items():
        check_shape(name, message, reading)
    check_values(reading)
    for name, message in observed.items():
        check_order(name, message, reading)
    for rows in readings_of_all_rows(model, reading, call):
        check_values(rows)
    found = latents_of(model, reading, call)
    below = found.below
    latents = [
        name for name, site in trace.items() if is_latent(site) and name not in found.ignored
    ]
    for name in latents:
        _check_hyperparameter(name, trace[name], observed, below=name in below)
    _check_not_deep(found)
    # What the first batch does not show, another one may.
    everywhere, all_rows = of_all_rows(model, reading, call)
    try:
        axes, dim, proven = couplings(everywhere, all_rows, call, sorted(below))
        check_ranges(everywhere, all_rows, call, below)
        check_density(everywhere, all_rows, call, below, partial(looks.slopes, call, below=below))
    except Exception as error:
        check_differentiable(everywhere, all_rows, call, below, error)
        raise
    check_scales(model, reading, call)
    structure = Structure(
        gps=tuple(reading.gps),
        hyper=hyper_sites(reading, latents),
        below=tuple(name for name in latents if name in below),
        coordinates=tuple((name, tuple(int(i) for i in axes[name])) for name in reading.gps),
        dim=dim,
        proven=proven,
        reads_sums=dim > 1 and proven and reads_sums(model, reading, call, below),
    )
    return structure, reading


def _not_sampled(error: Exception) -> str:
    """A hint for a GP that stands where its values are meant."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("numpyro.distributions", "jax")):
            continue  # a model may well hold a GP that it goes on to sample
        given = {name: value for name, value in frame.f_locals.items() if name != "self"}
        if any(isinstance(value, GP) for value in given.values()):
            return (
                " A GP stands where its values are meant: sample it, as in "
                'f = numpyro.sample("f", GP(kernel, X)).'
            )
    return ""


def _out_of_range(error: Exception) -> str:
    """A hint for a parameter of a likelihood that is not valid where a GP is zero."""
    if "got invalid" not in str(error):
        return ""
    return (
        " GPs were at their prior mean, which is zero unless the model says otherwise. A GP takes "
        "all real values: use a link function, such as jnp.exp(f) for a rate or a scale."
    )


def _check_there_is_something_to_fit(trace: Mapping[str, Message]) -> None:
    gps = {name: site for name, site in trace.items() if is_gp(site)}
    if not gps:
        raise ValueError(
            "The model has no GP site. Write one as "
            'f = numpyro.sample("f", numpyro_tsvgp.GP(kernel, X)).'
        )
    for name, site in trace.items():
        if site["type"] == "mutable":
            raise ValueError(
                f"The model has mutable state, '{name}'. A step evaluates the model many times, at "
                "nodes of a quadrature and for checks, and there is no one of these whose state is "
                "the next. Keep the numbers in an argument of the model that you change between "
                "calls of svi.update, or in numpyro.param."
            )
    for name, site in gps.items():
        if site["is_observed"]:
            raise ValueError(
                f"GP site '{name}' is observed. A GP is the latent function; observe it through a "
                f"likelihood, as in numpyro.sample('y', dist.Normal({name}, noise), obs=y), or "
                "use handlers.substitute where handlers.condition was used."
            )
    if not any(is_observed(site) for site in trace.values()):
        raise ValueError(
            "The model has no observed site, so there is nothing to fit. Pass the data, as in "
            "svi.run(key, steps, X, y), and give it to the likelihood with obs=y."
        )


def _check_gp(name: str, site: GPSite, message: Message, observed: Mapping[str, Message]) -> None:
    for frame in message["cond_indep_stack"]:
        # A plate of the data's size around the GP, whose size no other plate of the data has.
        if frame.size == site.rows > 1 and any(
            frame.name in [f.name for f in data["cond_indep_stack"]]
            and [f.size for f in data["cond_indep_stack"]].count(frame.size) == 1
            for data in observed.values()
        ):
            raise ValueError(
                f"GP site '{name}' stands inside the data plate '{frame.name}', which makes "
                f"{frame.size} independent functions of {site.rows} values each. Sample the GP "
                "outside of the plate, before `with numpyro.plate(...)`: it is one function, with "
                "all rows of X in it."
            )
    scale = message["scale"]
    if scale is not None and not np.all(np.asarray(scale) == 1):
        raise ValueError(
            f"GP site '{name}' has scale {np.asarray(scale)}. A scale (of handlers.scale or of a "
            "plate that subsamples) belongs around the likelihood, not around the GP."
        )
    if is_masked(message["fn"]):
        raise ValueError(
            f"GP site '{name}' stands under a mask, which would leave out the prior of some of its "
            "values. Put the mask around the likelihood: `with handlers.mask(mask=seen), plate:`."
        )
    shape = site.gp.X.shape
    if len(shape) == 2 and shape[0] == 1 < shape[1]:
        lengths = {n for data in observed.values() for n in np.shape(data["value"])}
        if shape[1] in lengths:
            raise ValueError(
                f"The inputs X of GP site '{name}' have shape {shape}, one row of {shape[1]} "
                f"columns, so that one value of the GP would stand for all {shape[1]} data points. "
                "Rows are data points: pass X.T."
            )
    _check_kernel(name, site)


def _check_kernel(name: str, site: GPSite) -> None:
    """A kernel that is noise alone says nothing of the same inputs in another array."""
    if is_noise(site.gp.kernel, site.gp.X[:_SOME]):
        raise ValueError(
            f"The kernel of GP site '{name}' is noise alone: kernel(X, X) is not zero, but "
            "kernel(X, X.copy()) is, so the GP has no value at given inputs that predictions could "
            "read. For one effect for each group write GP(kernels.Group(variance), groups); noise "
            "of the data belongs into the likelihood."
        )


def _check_hyperparameter(
    name: str, site: Message, observed: Mapping[str, Message], *, below: bool
) -> None:
    support = site["fn"].support
    if support is not None and support.is_discrete:
        kind = type(unwrapped(site["fn"])).__name__
        raise ValueError(
            f"Site '{name}' is a discrete latent variable ({kind}), which "
            "t-SVGP cannot fit. Sum it out, for example with dist.MixtureSameFamily or a "
            "zero-inflated distribution, or observe it."
        )
    if below and site["scale"] is not None and not np.all(np.asarray(site["scale"]) == 1):
        raise ValueError(
            f"Site '{name}' is a latent variable that depends on a GP, inside a plate that draws a "
            "subsample or under handlers.scale. Its values belong to data points that a step does "
            "not see. Put it into the likelihood instead, or pass all rows in each step."
        )
    if below:
        warnings.warn(
            f"Site '{name}' is a latent variable that depends on a GP and is not one. Its density "
            "is a term of the likelihood at the value that hyper_guide holds, so the GP's means "
            "are right (nearly, where data are not Gaussian) and its variances are those given "
            "that value: too small. If it stands for noise, put it into the likelihood instead; "
            "if it is a random effect, make it a GP with kernels.Group; or sample it with NUTS on "
            "collapse(fit), given which the GP is right.",
            stacklevel=stack_level(),
        )
        return
    data_plates = {f.name: f.size for data in observed.values() for f in data["cond_indep_stack"]}
    largest = max(data_plates.values(), default=0)
    for frame in site["cond_indep_stack"]:
        if frame.name in data_plates and frame.size == largest > 1:
            warnings.warn(
                f"Site '{name}' is a latent variable for each of the {frame.size} points of plate "
                f"'{frame.name}' and not a GP. It is treated as a hyperparameter: with the default "
                "hyper_guide each point gets a point estimate (MAP). If it stands for noise, put "
                "it into the likelihood instead.",
                stacklevel=stack_level(),
            )


def _check_not_deep(found: Latents) -> None:
    """The prior of a GP must not depend on the values of GPs."""
    for name in found.deep:
        raise ValueError(
            f"The inputs, mean or kernel of GP site '{name}' depend on the value of another "
            "GP. Deep GPs are not supported: t-SVGP needs GPs whose priors are independent."
        )
