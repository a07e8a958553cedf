"""What a model must be for t-SVGP to fit it, found out before the first step.

Every message names the site, says what is wrong, and says what to do.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.primitives import Messenger
from numpyro.util import find_stack_level

from numpyro_tsvgp.distributions import is_masked
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.coupling import couplings, hyper_values, nudged
from numpyro_tsvgp.model.likelihood import log_likelihood
from numpyro_tsvgp.model.read import (
    GPSite,
    Message,
    Model,
    Reading,
    is_gp,
    is_latent,
    is_observed,
    read,
    run_with,
)
from numpyro_tsvgp.model.structure import Structure, hyper_sites, latents_below, moves_with, unread

__all__ = ["check_inducing", "check_parameters", "check_values", "inspect"]

# So many rows of data that plates draw batches of are looked at in one run of the model.
_ROWS_AT_ONCE = 2**16
# So many of them are there when it is found out what the likelihood reads.
_ROWS_ANALYSED = 2**14
# Inputs at which a kernel is looked at.
_SOME = 8
# Constraints that are known once other parameters are, and that wrap around.
_UNRANGED = (type(dist.constraints.dependent), type(dist.constraints.circular))
# So many values are not sorted by chance.
_SORTED = 10


def inspect(model: Model, call: Call) -> tuple[Structure, Reading]:
    """Reads a model at its data, checks that t-SVGP fits it, and returns its structure.

    Args:
      model: the NumPyro model.
      call: its arguments, with the data.

    Returns:
      The structure of the model, and the reading it was found in.

    Raises:
      ValueError: if the model is one that sites cannot represent, saying which site and why.
    """
    if call.is_traced:
        raise ValueError(
            "The model is checked on its data before the first step, which cannot be done inside "
            "jax.jit or jax.vmap. Call init outside of it first."
        )
    try:
        reading = read(model, call, key=jax.random.key(0), first_rows=True)
    except Exception as error:
        error.add_note(
            "The model was run once on its data, before the fit, with arguments "
            f"{call.describe()}. Check that they are what it expects and that X and y "
            f"have the same number of rows.{_not_finite(call)}"
        )
        raise
    trace = reading.trace
    _check_there_is_something_to_fit(trace)
    observed = {name: site for name, site in trace.items() if is_observed(site)}
    for name, site in reading.gps.items():
        _check_gp(name, site, trace[name], observed)
    for name, message in observed.items():
        _check_shape(name, message, reading)
    check_values(reading)
    for name, message in observed.items():
        _check_order(name, message, reading)
    _check_other_rows(model, reading, call)
    below = latents_below(model, reading, call)
    ignored = unread(model, reading, call, below)
    below -= ignored
    latents = [name for name, site in trace.items() if is_latent(site) and name not in ignored]
    for name in latents:
        _check_hyperparameter(name, trace[name], observed, below=name in below)
    _check_not_deep(model, reading, call)
    # What the first batch does not show, another one may.
    everywhere, all_rows = _of_all_rows(model, reading, call)
    axes, dim, proven = couplings(everywhere, all_rows, call, sorted(below))
    _check_ranges(everywhere, all_rows, call, below)
    _check_density(everywhere, all_rows, call, below)
    structure = Structure(
        gps=tuple(reading.gps),
        hyper=hyper_sites(reading, latents),
        below=tuple(name for name in latents if name in below),
        coordinates=tuple((name, tuple(int(i) for i in axes[name])) for name in reading.gps),
        dim=dim,
        proven=proven,
    )
    return structure, reading


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


@jax.jit
def _is_noise(kernel: Any, X: Array) -> Array:
    diagonal = kernel.diag(X)
    return (diagonal > 0).any() & (kernel.noise(X) == diagonal).all()


def _check_kernel(name: str, site: GPSite) -> None:
    """A kernel that is noise alone says nothing of the same inputs in another array."""
    if _is_noise(site.gp.kernel, site.gp.X[:_SOME]):
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
        kind = type(_base(site["fn"])).__name__
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
            stacklevel=find_stack_level(),
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
                stacklevel=find_stack_level(),
            )


def _check_shape(name: str, site: Message, reading: Reading) -> None:
    """Data must be numbers, one for each of their distribution."""
    fn, _ = _unmasked(site["fn"])
    value = np.asarray(site["value"])
    if isinstance(fn, dist.Unit) or value.size == 0:
        return
    if value.dtype.kind not in "biufc":
        raise TypeError(
            f"The data of site '{name}' are not numbers, but of type {value.dtype} with values "
            f"such as {str(value.flat[0])!r}. Give classes numbers, as in "
            "names, y = np.unique(y, return_inverse=True)."
        )
    shape = fn.shape()
    count = int(np.prod(shape))
    if value.size == 1 < count:
        raise ValueError(
            f"The data of site '{name}' are one number, of shape {value.shape}, but its "
            f"distribution has shape {shape}. Pass one value for each data point; if the same is "
            f"meant for all of them, jnp.full({shape}, value)."
        )
    # Many numbers for one distribution without plates are meant; an axis of length one that would
    # be repeated is not.
    tail = shape[max(len(shape) - value.ndim, 0) :]
    if len(shape) != 0 and value.shape != tail:
        raise ValueError(
            f"The data of site '{name}' have shape {value.shape}, but its distribution has shape "
            f"{shape}. " + _shape_advice(value.shape, shape, reading)
        )


def _check_order(name: str, site: Message, reading: Reading) -> None:
    """Data that are sorted where the inputs are not are likely to be inputs."""
    value = np.asarray(site["value"])
    for gp, found in reading.gps.items():
        X = np.asarray(found.gp.X)
        if X.size == value.size >= _SORTED and _is_sorted(value) and not _is_sorted(X):
            warnings.warn(
                f"The data of site '{name}' are sorted and the inputs X of GP site '{gp}' are not: "
                "are X and y swapped? (If not, pass the rows in another order.)",
                stacklevel=find_stack_level(),
            )


def _is_sorted(values: np.ndarray) -> bool:
    steps = np.diff(values.ravel())
    return bool((steps > 0).all() or (steps < 0).all())


def check_values(reading: Reading) -> None:
    """Inputs must be finite, and data must be there and in the support of their distribution.

    Args:
      reading: a reading of a model, of any rows of its data.

    Raises:
      ValueError: if a value is not, naming the site and the row.
    """
    for name, site in reading.gps.items():
        X = np.asarray(site.gp.X)
        where = _first(~np.isfinite(X))
        if where is not None:
            row = _row_of_all(reading, len(X), where[0])
            raise ValueError(
                f"The inputs X of GP site '{name}' have the value {X[where]} at index "
                f"{_index((row, *where[1:]))}. Remove or impute rows with missing inputs."
            )
    for name, message in reading.trace.items():
        if is_observed(message):
            _check_values(name, message, reading)


def _check_values(name: str, site: Message, reading: Reading) -> None:
    fn, mask = _unmasked(site["fn"])
    value = np.asarray(site["value"])
    if isinstance(fn, dist.Unit) or value.size == 0 or fn.support is None:
        return  # a distribution of the user's own need not have a support
    value = np.broadcast_to(value, np.broadcast_shapes(value.shape, fn.shape()))
    in_support = np.asarray(fn.support(jnp.asarray(value)))  # one entry for each event
    event_axes = tuple(range(in_support.ndim, value.ndim))
    missing = np.isnan(value).any(event_axes) if value.dtype.kind == "f" else False
    for bad, problem in (
        (missing, "is missing (NaN). Use obs_mask, handlers.mask or drop the rows"),
        (~in_support, f"lies outside of the support of {type(_base(fn)).__name__}"),
    ):
        where = _first(np.broadcast_to(bad, in_support.shape) & mask)
        if where is not None:
            at = list(where)
            for frame in site["cond_indep_stack"]:  # from rows of a batch to those of all data
                axis, rows = in_support.ndim + frame.dim, reading.trace[frame.name]["value"]
                if axis >= 0 and in_support.shape[axis] == len(rows):
                    at[axis] = int(rows[where[axis]])
            hint = _swapped(fn, value.shape, reading) if bad is not missing else ""
            raise ValueError(
                f"The data of site '{name}' at index {_index(tuple(at))}: the value {value[where]} "
                f"{problem}.{hint}"
            )


def _swapped(fn: Any, shape: tuple[int, ...], reading: Reading) -> str:
    """A hint for data that lie outside of the support, if the inputs do lie in it."""
    for name, site in reading.gps.items():
        X = site.gp.X
        if X.size == np.prod(shape) and bool(jnp.all(fn.support(X.reshape(shape)))):
            return f" The inputs of GP site '{name}' do lie in it: are X and y swapped?"
    return ""


def _unmasked(fn: Any) -> tuple[Any, Any]:
    mask: Any = True
    while isinstance(fn, dist.MaskedDistribution):
        mask = mask & np.asarray(fn._mask)
        fn = fn.base_dist
    return fn, mask


def _row_of_all(reading: Reading, rows: int, row: int) -> int:
    """The row of all data that a row of a batch is."""
    drawn = [p["value"] for p in reading.plates.values() if len(p["value"]) == rows]
    return int(drawn[0][row]) if drawn else row


class _GivenRows(Messenger):
    """Gives plates the indices that are wanted."""

    def __init__(self, fn: Model, rows: Mapping[str, np.ndarray]) -> None:
        super().__init__(fn)
        self.rows = rows

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "plate" and msg["name"] in self.rows:
            rows = self.rows[msg["name"]]
            msg["args"] = (msg["args"][0], len(rows))
            msg["value"] = jnp.asarray(rows)


def _drawn(reading: Reading) -> dict[str, tuple[int, int]]:
    """Sizes of the plates that draw batches, and of their batches."""
    return {
        name: (site["args"][0], len(site["value"]))
        for name, site in reading.plates.items()
        if len(site["value"]) < site["args"][0]
    }


def _of_all_rows(model: Model, reading: Reading, call: Call) -> tuple[Model, Reading]:
    """The model where plates do not draw batches: with all rows, or many spread over them."""
    drawn = _drawn(reading)
    if not drawn:
        return model, reading
    most = int(_ROWS_ANALYSED ** (1 / len(drawn)))
    rows = {
        name: np.unique(np.linspace(0, size - 1, min(size, max(batch, most))).astype(int))
        for name, (size, batch) in drawn.items()
    }
    whole = _GivenRows(model, rows)
    try:
        return whole, read(whole, call, key=jax.random.key(0), first_rows=True)
    except Exception:  # what the model is given is one batch, or it counts on its size
        return model, reading


def _check_other_rows(model: Model, reading: Reading, call: Call) -> None:
    """Where plates draw batches, the values of all rows, not only of those in the reading."""
    drawn = _drawn(reading)
    if not drawn:
        return
    for rows in _batches_of_all(drawn):
        try:
            found = read(_GivenRows(model, rows), call, key=jax.random.key(0), first_rows=True)
        except Exception:  # what the model is given is one batch, or it counts on its size
            return
        check_values(found)


def _batches_of_all(drawn: Mapping[str, tuple[int, int]]) -> Iterator[dict[str, np.ndarray]]:
    """All rows in batches of one size: the last one overlaps the one before."""
    most = int(_ROWS_AT_ONCE ** (1 / len(drawn)))
    batches = []
    for size, batch in drawn.values():
        length = min(size, max(batch, most))
        starts = [*range(0, size - length, length), size - length]
        batches.append([start + np.arange(length) for start in starts])
    for rows in itertools.product(*batches):
        yield dict(zip(drawn, rows, strict=True))


def _shape_advice(value: tuple[int, ...], shape: tuple[int, ...], reading: Reading) -> str:
    rows = {site.rows for site in reading.gps.values() if site.gp.X.ndim == 1}
    swapped = " (Or are X and y swapped?)" if len(value) == 2 and value[0] in rows else ""
    if len(value) == len(shape) + 1 and value[-1] == 1 and value[:-1] == shape:
        return f"Drop the last axis: y[:, 0].{swapped}"
    return (
        "Check that X and y have the same number of rows and that plates have the size of y."
        f"{swapped}"
    )


def _check_density(model: Model, reading: Reading, call: Call, below: set[str]) -> None:
    """The log-likelihood must have a finite gradient near the prior mean of the GPs."""
    rng = np.random.RandomState(0)
    values = {
        name: site.loc
        + jnp.asarray(0.5 * rng.standard_normal((site.functions, site.rows)), site.loc.dtype)
        for name, site in reading.gps.items()
    }

    @jax.jit
    def gradient(values: dict[str, Array], hyper: dict[str, Any]) -> dict[str, Array]:
        here = reading._replace(pinned={**reading.pinned, **hyper})
        return jax.grad(log_likelihood(model, here, call, below))(values)

    hyper = hyper_values(reading)
    found = gradient(values, hyper)
    if not all(bool(jnp.isfinite(g).all()) for g in found.values()):
        raise ValueError(
            "The log-likelihood has no finite gradient at values of the GPs near their prior "
            "mean. Check that the data lie in the support of the likelihood and that its "
            "parameters are valid for every real value of f (a scale needs jnp.exp(f), a "
            "probability a link function)."
        )
    flat = [name for name, g in found.items() if not bool((g != 0).any())]
    if flat:  # unless a coefficient that happens to start at zero is why
        found = gradient(values, {name: nudged(value, rng) for name, value in hyper.items()})
        flat = [name for name in flat if not bool((found[name] != 0).any())]
    if flat:
        raise ValueError(
            f"The likelihood does not depend on GP site '{flat[0]}', or is constant wherever it "
            "was looked at: its gradient is zero at every data point, so the posterior would be "
            "the prior. Check that the value of the GP enters the likelihood, and that it does so "
            "smoothly (jax.nn.sigmoid(f) rather than jnp.where(f > 0, ...))."
        )


def _check_ranges(model: Model, reading: Reading, call: Call, below: set[str]) -> None:
    """Parameters of the likelihood must be valid at draws of the GPs, where they depend on them."""
    rng = np.random.RandomState(0)
    draws = {}
    for name, site in reading.gps.items():
        sd = jnp.sqrt(jnp.atleast_2d(site.process().kernel.diag(site.gp.X)))
        noise = jnp.asarray(rng.standard_normal((site.functions, site.rows)), site.loc.dtype)
        draws[name] = site.unflatten(site.loc + sd * noise)
    with numpyro.validation_enabled(False):  # which would say less of what to do
        trace = run_with(model, call, {**reading.pinned, **draws})
    for name, message in trace.items():
        if not (is_observed(message) or name in below):
            continue
        outer, mask = _unmasked(message["fn"])
        fn = _base(outer)
        mask = np.expand_dims(mask, tuple(range(fn.event_dim - outer.event_dim, 0)))
        for parameter, constraint in getattr(fn, "arg_constraints", {}).items():
            # Vectors on a simplex and the like have tolerances of their own.
            scalar = not isinstance(constraint, _UNRANGED) and constraint.event_dim == 0
            if not scalar or not hasattr(fn, parameter):
                continue
            valid = np.asarray(constraint(getattr(fn, parameter)))
            if (~valid & mask).any():
                raise ValueError(
                    f"Site '{name}' is a {type(fn).__name__} whose {parameter} leaves its range at "
                    "values of the GPs that their prior calls likely. A GP takes all real values: "
                    "use a link function, such as logits=f or jax.nn.sigmoid(f) for a probability "
                    "and jnp.exp(f) for a rate or a scale."
                )


def _check_not_deep(model: Model, reading: Reading, call: Call) -> None:
    """The prior of a GP must not depend on the values of GPs."""
    values = {name: reading.trace[name]["value"] for name in reading.gps}
    for name, parts in moves_with(model, reading, call, values).items():
        if any(parts.values()):
            raise ValueError(
                f"The inputs, mean or kernel of GP site '{name}' depend on the value of another "
                "GP. Deep GPs are not supported: t-SVGP needs GPs whose priors are independent."
            )


def check_parameters(
    reading: Reading, params: Mapping[str, Any], needed: Iterable[str] = ()
) -> None:
    """Checks that fitted parameters are those of the model.

    Args:
      reading: a reading of the model.
      params: fitted parameters by name.
      needed: names of those of the guide.

    Raises:
      ValueError: if one is missing.
    """
    declared = [name for name, site in reading.trace.items() if site["type"] == "param"]
    missing = sorted({*declared, *needed} - set(params))
    if missing:
        raise ValueError(
            f"The parameters have no {missing}, which the model of {_names(reading)} has: they are "
            f"those of another model, or incomplete. Pass those of a fit of this model, as in "
            f"result.params; these are {sorted(params)}."
        )


def check_inducing(name: str, Z: Array, site: GPSite, reading: Reading) -> None:
    """Checks inducing inputs against the inputs of their GP.

    Args:
      name: the GP site.
      Z: inducing inputs, as many axes as the inputs.
      site: the GP at its data.
      reading: the reading of the model that the GP is of.

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
    size = round(site.rows * reading.subsampling)
    if len(values) > size:
        raise ValueError(
            f"GP site '{name}' has {len(values)} inducing inputs but only {size} data points. Use "
            "fewer, or inducing=None, which needs none. (With minibatches passed as arguments, "
            "give the plate its full size: numpyro.plate('data', N, subsample_size=len(y)).)"
        )


def _not_finite(call: Call) -> str:
    """Where an argument first has NaN or infinity, for messages."""
    for name, value in [*enumerate(call.args), *call.kwargs.items()]:
        if isinstance(value, np.ndarray | Array) and jnp.issubdtype(value.dtype, jnp.floating):
            where = _first(~np.isfinite(np.asarray(value)))
            if where is not None:
                return f" Argument {name} has the value {value[where]} at index {_index(where)}."
    return ""


def _names(reading: Reading) -> str:
    return " and ".join(f"GP site '{name}'" for name in reading.gps)


def _base(fn: Any) -> Any:
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return fn


def _first(bad: np.ndarray) -> tuple[int, ...] | None:
    found = np.argwhere(bad)
    return tuple(int(i) for i in found[0]) if len(found) else None


def _index(where: tuple[int, ...]) -> int | tuple[int, ...]:
    return where[0] if len(where) == 1 else where
