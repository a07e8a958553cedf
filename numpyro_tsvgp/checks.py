"""What a model must be for t-SVGP to fit it, found out before the first step.

Every message names the site, says what is wrong, and says what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.util import find_stack_level

from numpyro_tsvgp.coupling import quadrature_axes
from numpyro_tsvgp.extract import (
    GPSite,
    Message,
    Model,
    Reading,
    hyperparameter_names,
    is_gp,
    is_observed,
    log_likelihood,
    read,
)

__all__ = ["Structure", "check_inducing", "describe", "inspect"]


class Structure(NamedTuple):
    """What stays the same in every run of a model."""

    gps: dict[str, GPSite]
    hyperparameters: list[str]
    axes: dict[str, np.ndarray]  # for each latent function its coordinate in the quadrature
    dim: int  # how many latent functions meet in one likelihood term
    subsampling: float  # N / |M|, or 1
    batches: frozenset[int]  # sizes of subsamples
    draws_inputs: bool  # whether GPs are at a subsample of the inputs
    trace: Mapping[str, Message]

    @property
    def subsamples(self) -> bool:
        return self.subsampling > 1

    def is_hyper_or_frame(self, site: Message) -> bool:
        """Whether a site belongs to the model of the hyperparameters.

        Samplers and reparameterizations add sites of their own while they process one that they
        can see (the Jacobian of a transform, a decentred variable): those belong to it as well.
        """
        if site["type"] in ("param", "plate") or site.get("name") in self.hyperparameters:
            return True
        return site["type"] == "sample" and site["name"] not in self.trace


def inspect(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Structure:
    """Reads a model at its data, checks that t-SVGP fits it, and returns its structure.

    Args:
      model: the NumPyro model.
      args: its arguments, with the data.
      kwargs: its keyword arguments.

    Returns:
      The structure of the model.

    Raises:
      ValueError: if the model is one that sites cannot represent, saying which site and why.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
        raise ValueError(
            "The model is checked on its data before the first step, which cannot be done inside "
            "jax.jit or jax.vmap. Call init (or guide.setup) outside of it first."
        )
    try:
        reading = read(model, args, kwargs, key=jax.random.key(0), draw=False)
    except Exception as error:
        error.add_note(
            "The model was run once on its data, before the fit, with arguments "
            f"{describe(args, kwargs)}. Check that they are what it expects and that X and y "
            f"have the same number of rows.{_not_finite(args, kwargs)}"
        )
        raise
    trace = reading.trace
    _check_there_is_something_to_fit(trace)
    observed = {name: site for name, site in trace.items() if is_observed(site)}
    for name, site in reading.gps.items():
        _check_gp(name, site, trace[name], observed)
    for name in hyperparameter_names(trace):
        _check_hyperparameter(name, trace[name], observed)
    for name, message in observed.items():
        _check_data(name, message)
    _check_not_deep(model, reading, args, kwargs)
    axes, dim = quadrature_axes(log_likelihood(model, reading, args, kwargs), reading.gps)
    plates = [site for site in trace.values() if site["type"] == "plate"]
    ratios = [site["args"][0] / len(site["value"]) for site in plates]
    return Structure(
        gps=reading.gps,
        hyperparameters=hyperparameter_names(trace),
        axes=axes,
        dim=dim,
        subsampling=max([1.0, *ratios]),
        batches=frozenset(
            len(site["value"]) for site in plates if site["args"][0] != len(site["value"])
        ),
        draws_inputs=max([1.0, *ratios]) > 1 and _draws_inputs(model, reading, args, kwargs),
        trace=trace,
    )


def _draws_inputs(
    model: Model, reading: Reading, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether GPs are at inputs that plates draw (X[rows]), and not at those in the arguments."""
    values = dict(reading.pinned)
    for name, site in reading.trace.items():
        if site["type"] == "plate" and len(site["value"]) < site["args"][0]:
            # Other rows, one by one: the reading has the first.
            size, number = site["args"][0], len(site["value"])
            values[name] = jnp.asarray(np.arange(size - number, size))
    others = read(model, args, kwargs, values=values, key=jax.random.key(1)).gps
    return any(
        not np.array_equal(site.gp.X, reading.gps[name].gp.X) for name, site in others.items()
    )


def _check_there_is_something_to_fit(trace: Mapping[str, Message]) -> None:
    gps = {name: site for name, site in trace.items() if is_gp(site)}
    if not gps:
        raise ValueError(
            "The model has no GP site. Write one as "
            'f = numpyro.sample("f", numpyro_tsvgp.GP(kernel, X)).'
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
            "svi.run(key, steps, X, y), and give it to the likelihood with obs=y. (To predict with "
            "a guide that was not fitted in this process, call guide.setup(X, y) with the data of "
            "the fit first.)"
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
    where = _first(~np.isfinite(np.asarray(site.gp.X)))
    if where is not None:
        raise ValueError(
            f"The inputs X of GP site '{name}' have the value {np.asarray(site.gp.X)[where]} at "
            f"index {_index(where)}. Remove or impute rows with missing inputs."
        )


def _check_hyperparameter(name: str, site: Message, observed: Mapping[str, Message]) -> None:
    if site["fn"].support.is_discrete:
        kind = type(_base(site["fn"])).__name__
        raise ValueError(
            f"Site '{name}' is a discrete latent variable ({kind}), which "
            "t-SVGP cannot fit. Sum it out, for example with dist.MixtureSameFamily or a "
            "zero-inflated distribution, or observe it."
        )
    data_plates = {f.name: f.size for data in observed.values() for f in data["cond_indep_stack"]}
    largest = max(data_plates.values(), default=0)
    for frame in site["cond_indep_stack"]:
        if frame.name in data_plates and frame.size == largest > 1:
            warnings.warn(
                f"Site '{name}' is a latent variable for each of the {frame.size} points of plate "
                f"'{frame.name}' and not a GP. It is treated as a hyperparameter: with the default "
                "hyper_guide each point gets a point estimate (MAP). If it stands for noise, put "
                "it into the likelihood instead.",
                stacklevel=find_stack_level(),
            )


def _check_data(name: str, site: Message) -> None:
    fn, value = site["fn"], np.asarray(site["value"])
    mask: Any = True
    while isinstance(fn, dist.MaskedDistribution):
        mask = mask & np.asarray(fn._mask)
        fn = fn.base_dist
    if isinstance(fn, dist.Unit) or value.size == 0:
        return
    shape = fn.shape()
    # One number for all points is meant, as are many for one distribution without plates; an
    # axis of length one that would be repeated is not.
    tail = shape[max(len(shape) - value.ndim, 0) :]
    fits = 0 in (value.ndim, len(shape)) or value.shape == tail
    if not fits:
        raise ValueError(
            f"The data of site '{name}' have shape {value.shape}, but its distribution has shape "
            f"{shape}. " + _shape_advice(value.shape, shape)
        )
    value = np.broadcast_to(value, np.broadcast_shapes(value.shape, shape))
    if fn.support is None:  # a distribution of the user's own that does not say
        return
    in_support = np.asarray(fn.support(jnp.asarray(value)))  # one entry for each event
    event_axes = tuple(range(in_support.ndim, value.ndim))
    missing = np.isnan(value).any(event_axes) if value.dtype.kind == "f" else False
    for bad, problem in (
        (missing, "is missing (NaN). Use obs_mask, handlers.mask or drop the rows"),
        (~in_support, f"lies outside of the support of {type(_base(fn)).__name__}"),
    ):
        where = _first(np.broadcast_to(bad, in_support.shape) & mask)
        if where is not None:
            raise ValueError(
                f"The data of site '{name}' at index {_index(where)}: the value {value[where]} "
                f"{problem}."
            )


def _shape_advice(value: tuple[int, ...], shape: tuple[int, ...]) -> str:
    if len(value) == len(shape) + 1 and value[-1] == 1 and value[:-1] == shape:
        return "Drop the last axis: y[:, 0]."
    return "Check that X and y have the same number of rows and that plates have the size of y."


def _check_not_deep(
    model: Model, reading: Reading, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """The prior of a GP must not move when the values of the others do."""
    if len(reading.gps) < 2:
        return

    @jax.jit
    def priors(values: dict[str, Array]) -> dict[str, list[Array]]:
        values = {name: reading.gps[name].unflatten(value) for name, value in values.items()}
        pinned = {**reading.pinned, **values}
        gps = read(model, args, kwargs, values=pinned, key=jax.random.key(0)).gps
        out = {}
        for name, site in gps.items():
            rows = site.gp.X[:8]
            out[name] = [site.gp.X, site.loc, site.kernel(rows, rows), site.kernel.diag(rows)]
        return out

    rng = np.random.RandomState(1)
    shapes = {name: (site.latents, site.rows) for name, site in reading.gps.items()}
    there, elsewhere = (
        priors({name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()})
        for _ in range(2)
    )
    for name in reading.gps:
        pairs = zip(there[name], elsewhere[name], strict=True)
        if not all(np.array_equal(a, b) for a, b in pairs):
            raise ValueError(
                f"The inputs, mean or kernel of GP site '{name}' depend on the value of another "
                "GP. Deep GPs are not supported: t-SVGP needs GPs whose priors are independent."
            )


def check_inducing(name: str, Z: Array, site: GPSite, structure: Structure) -> None:
    """Checks inducing inputs against the inputs of their GP.

    Args:
      name: the GP site.
      Z: inducing inputs, as many axes as the inputs.
      site: the GP at its data.
      structure: the structure of the model.

    Raises:
      ValueError: if they cannot be what was meant.
    """
    X = site.gp.X
    if Z.shape[1:] != X.shape[1:]:
        raise ValueError(
            f"The inducing inputs of GP site '{name}' have shape {Z.shape} but its inputs have "
            f"shape {X.shape}: they must have the same number of columns."
        )
    if Z.shape[0] == 0:
        raise ValueError(f"The inducing inputs of GP site '{name}' are empty. Pass at least one.")
    values = np.asarray(Z)
    where = _first(~np.isfinite(values))
    if where is not None:
        raise ValueError(
            f"The inducing inputs of GP site '{name}' have the value {values[where]} at index "
            f"{_index(where)}."
        )
    distinct = len(np.unique(values, axis=0))
    if distinct < len(values):
        raise ValueError(
            f"The inducing inputs of GP site '{name}' have {len(values) - distinct} duplicate "
            "rows, which make their covariance singular. inducing.greedy and inducing.subset "
            "return distinct rows."
        )
    size = round(site.rows * structure.subsampling)
    if len(values) > size:
        raise ValueError(
            f"GP site '{name}' has {len(values)} inducing inputs but only {size} data points. Use "
            "fewer, or inducing=None, which needs none. (With minibatches passed as arguments, "
            "give the plate its full size: numpyro.plate('data', N, subsample_size=len(y)).)"
        )


def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The shapes of a model's arguments, for messages."""

    def one(value: Any) -> str:
        if hasattr(value, "shape"):
            return f"of shape {tuple(value.shape)}"
        return "None" if value is None else f"of type {type(value).__name__}"

    parts = [one(value) for value in args]
    parts += [f"{name} {one(value)}" for name, value in kwargs.items()]
    return f"({', '.join(parts)})"


def _not_finite(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Where an argument first has NaN or infinity, for messages."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, np.ndarray | Array) and jnp.issubdtype(value.dtype, jnp.floating):
            where = _first(~np.isfinite(np.asarray(value)))
            if where is not None:
                return f" Argument {name} has the value {value[where]} at index {_index(where)}."
    return ""


def _base(fn: Any) -> Any:
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return fn


def _first(bad: np.ndarray) -> tuple[int, ...] | None:
    found = np.argwhere(bad)
    return tuple(int(i) for i in found[0]) if len(found) else None


def _index(where: tuple[int, ...]) -> int | tuple[int, ...]:
    return where[0] if len(where) == 1 else where
