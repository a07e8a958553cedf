"""Whether the density of the data is one that sites can follow, at values that GPs may take."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.coupling import hyper_values, nudged
from numpyro_tsvgp.model.data_checks import first_where, shown_index
from numpyro_tsvgp.model.likelihood import log_likelihood
from numpyro_tsvgp.model.read import Message, Model, Reading, is_observed, run_with
from numpyro_tsvgp.model.validation import unvalidated
from numpyro_tsvgp.model.wrapped import unmasked, unwrapped

__all__ = ["check_density", "check_differentiable", "check_ranges", "leaves_range"]

Slopes = Callable[[Mapping[str, Any], Mapping[str, Array]], dict[str, Array] | None]

# Constraints that are known once other parameters are, and that wrap around.
_UNRANGED = (type(dist.constraints.dependent), type(dist.constraints.circular))
# Rounding of probabilities and of their sum.
_SIMPLEX = 1e-3
# Prior standard deviations that data take a GP to without trouble.
_FAR = 4.0
_LINKS = (
    "use a link function, such as logits=f or jax.nn.sigmoid(f) for a probability and jnp.exp(f) "
    "for a rate or a scale"
)


def _standard_scores(reading: Reading) -> dict[str, np.ndarray]:
    """Standard normal numbers for the values of all GP sites, the same in every call."""
    rng = np.random.RandomState(0)
    return {
        name: rng.standard_normal((site.functions, site.rows)) for name, site in reading.gps.items()
    }


def check_density(
    model: Model, reading: Reading, call: Call, below: Collection[str], slopes: Slopes
) -> None:
    """The log-likelihood must have a finite gradient near the prior mean of the GPs, not all zero.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.
      below: latent variables whose density depends on GPs.
      slopes: the gradient of the log-likelihood, a function of the values of hyperparameters and of
        GPs, or of None where the model cannot be traced.

    Raises:
      ValueError: if it has not.
    """

    def gradient(hyper: dict[str, Any]) -> dict[str, Array]:
        here = reading._replace(pinned={**reading.pinned, **hyper})
        return slopes(hyper, values) or jax.jit(jax.grad(log_likelihood(model, here, call, below)))(
            values
        )

    scores = _standard_scores(reading)
    values = {
        name: site.loc + jnp.asarray(0.5 * scores[name], site.loc.dtype)
        for name, site in reading.gps.items()
    }
    hyper = hyper_values(reading)
    found = gradient(hyper)
    if not all(bool(jnp.isfinite(g).all()) for g in found.values()):
        raise ValueError(
            "The log-likelihood has no finite gradient at values of the GPs near their prior "
            "mean. Check that the data lie in the support of the likelihood and that its "
            "parameters are valid for every real value of f (a scale needs jnp.exp(f), a "
            "probability a link function)."
        )
    _check_finite(model, reading, call, values)
    flat = [name for name, g in found.items() if not bool((g != 0).any())]
    if flat:  # unless a coefficient that happens to start at zero is why
        rng = np.random.RandomState(1)
        again = gradient({name: nudged(value, rng) for name, value in hyper.items()})
        flat = [name for name in flat if not bool((again[name] != 0).any())]
    if flat:
        raise ValueError(
            f"The likelihood does not depend on GP site '{flat[0]}', or is constant wherever it "
            "was looked at: its gradient is zero at every data point, so the posterior would be "
            "the prior. Check that the value of the GP enters the likelihood, and that it does so "
            "smoothly (jax.nn.sigmoid(f) rather than jnp.where(f > 0, ...))."
        )


def _check_finite(model: Model, reading: Reading, call: Call, values: Mapping[str, Any]) -> None:
    """The log density of every data point must be finite: of minus infinity there is no bound."""
    gps = {name: reading.gps[name].unflatten(value) for name, value in values.items()}
    with unvalidated():
        trace = run_with(model, call, {**reading.pinned, **gps})
    for name, site in trace.items():
        if not is_observed(site) or isinstance(unwrapped(site["fn"]), dist.Unit):
            continue
        log_prob = np.asarray(site["fn"].log_prob(site["value"]))
        where = first_where(np.isinf(log_prob))
        if where is None:
            continue
        data = np.asarray(site["value"])
        at = f", where its value is {data[where]}" if data.shape == log_prob.shape else ""
        raise ValueError(
            f"The log density of the data of site '{name}' is {log_prob[where]} at index "
            f"{shown_index(where)}{at}, at values of the GPs near their prior mean. The bound "
            "averages over all values of f, so that none may make a data point impossible, or "
            "infinitely likely: a Uniform whose ends depend on f does, and so does a Beta at the "
            "data 0 and 1 (move them inwards) or a Gamma at 0."
        )


def check_differentiable(
    model: Model, reading: Reading, call: Call, below: Collection[str], error: Exception
) -> None:
    """Says in words that JAX has no gradient of a density, if that is what an error was about.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.
      below: latent variables whose density depends on GPs.
      error: what went wrong.

    Raises:
      ValueError: if the density of a site cannot be differentiated.
    """
    values = {name: reading.trace[name]["value"] for name in reading.gps}
    for name, site in reading.trace.items():
        if not (is_observed(site) or name in below):
            continue

        def total(values: dict[str, Any], name: str = name) -> Array:
            trace = run_with(model, call, {**reading.pinned, **values})
            return jnp.sum(trace[name]["fn"].log_prob(trace[name]["value"]))

        try:
            jax.eval_shape(jax.grad(total), values)
        except Exception as why:
            told = str(why).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
            raise ValueError(
                f"JAX has no gradient of the log density of site '{name}' in the GPs, which every "
                f"step needs: {told}. Where it has a lax.while_loop, or a loop whose length is "
                "computed, write a lax.fori_loop or lax.scan of a fixed number of steps, with "
                "jnp.where for those that are done; a callback needs a jax.custom_jvp."
            ) from error


def check_ranges(model: Model, reading: Reading, call: Call, below: Collection[str]) -> None:
    """Parameters of the likelihood must be valid at draws of the GPs, where they depend on them.

    Where they are, but not a few standard deviations from the prior mean, there is a warning.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.
      below: latent variables whose density depends on GPs.

    Raises:
      ValueError: if one is not.
    """
    scores = _standard_scores(reading)
    far = {name: np.where(z > 0, _FAR, -_FAR) for name, z in scores.items()}
    likely, distant = (_at_scores(model, reading, call, given) for given in (scores, far))
    _check_support(reading, _inside(likely))
    _check_support(reading, _inside(distant))
    for outside, leaves in _outside_of_range(likely, below).items():
        if leaves:
            raise ValueError(
                f"{outside} leaves its range at values of the GPs that their prior calls likely. A "
                f"GP takes all real values: {_LINKS}."
            )
    distant_outside = _outside_of_range(distant, below, rounding=True)
    outside = next((words for words, leaves in distant_outside.items() if leaves), "")
    if outside:
        warnings.warn(
            f"{outside} leaves its range where a GP is {_FAR:g} prior standard deviations from its "
            f"mean. Data may take it there, and a step would then not be finite: {_LINKS}.",
            stacklevel=stack_level(),
        )


def leaves_range(model: Model, reading: Reading, call: Call, below: Collection[str]) -> str | None:
    """A parameter of the likelihood that is not valid at draws of the GPs, or None.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.
      below: latent variables whose density depends on GPs.

    Returns:
      The beginning of a sentence about it.
    """
    trace = _at_scores(model, reading, call, _standard_scores(reading))
    found = _outside_of_range(trace, below, rounding=True)
    return next((words for words, leaves in found.items() if leaves), None)


def _at_scores(
    model: Model, reading: Reading, call: Call, scores: Mapping[str, Any]
) -> Mapping[str, Message]:
    """The trace of a model where its GPs have given standard scores under their prior."""
    draws = {}
    for name, site in reading.gps.items():
        sd = jnp.sqrt(jnp.atleast_2d(site.process().kernel.diag(site.gp.X)))
        draws[name] = site.unflatten(site.loc + sd * jnp.asarray(scores[name], site.loc.dtype))
    with unvalidated():  # which would say less of what to do
        return run_with(model, call, {**reading.pinned, **draws})


def _inside(trace: Mapping[str, Message]) -> dict[str, Array]:
    """Which data of a trace lie in the support of their distribution, or do not count."""
    found = {}
    for name, message in trace.items():
        fn, mask = unmasked(message["fn"]) if is_observed(message) else (None, True)
        if fn is None or isinstance(fn, dist.Unit) or fn.support is None:
            continue
        found[name] = fn.support(jnp.asarray(message["value"])) | ~jnp.asarray(mask)
    return found


def _check_support(reading: Reading, inside: Mapping[str, Array]) -> None:
    """Data that lie in the support of their distribution must do so whatever the GPs are."""
    for name, found in inside.items():
        where = first_where(~np.asarray(found))
        if where is not None:
            kind = type(unwrapped(reading.trace[name]["fn"])).__name__
            raise ValueError(
                f"The support of site '{name}', a {kind}, moves with the "
                f"GPs: where they are a few standard deviations from their prior mean, the data at "
                f"index {shown_index(where)} lie outside of it. Their log density is minus "
                "infinity there, and so is the bound. Use a distribution whose support does not "
                "depend on f."
            )


def _outside_of_range(
    trace: Mapping[str, Message], below: Collection[str], *, rounding: bool = False
) -> OrderedDict[str, Array]:
    """Which parameters of the likelihood are not valid in a trace, by what messages call them.

    With ``rounding`` one that over- or underflows, such as exp(f), counts as valid.
    """
    found: OrderedDict[str, Array] = OrderedDict()
    for name, message in trace.items():
        if not (is_observed(message) or name in below):
            continue
        outer, mask = unmasked(message["fn"])
        fn = unwrapped(outer)
        mask = jnp.expand_dims(mask, tuple(range(fn.event_dim - outer.event_dim, 0)))
        for parameter, constraint in getattr(fn, "arg_constraints", {}).items():
            # Of vectors those on a simplex alone; others have tolerances of their own.
            simplex = isinstance(constraint, type(dist.constraints.simplex))
            scalar = not isinstance(constraint, _UNRANGED) and constraint.event_dim == 0
            if not (scalar or simplex) or not hasattr(fn, parameter):
                continue
            value = jnp.asarray(getattr(fn, parameter))
            if simplex:
                whole = (value > -_SIMPLEX).all(-1) & (jnp.abs(value.sum(-1) - 1) < _SIMPLEX)
                valid = whole | ~jnp.isfinite(value).all(-1)  # that is told elsewhere
            else:
                valid = constraint(value)
            if rounding and not simplex:
                valid = valid | ~jnp.isfinite(value) | (value == 0)
            words = f"Site '{name}' is a {type(fn).__name__} whose {parameter}"
            found[words] = (~jnp.asarray(valid) & mask).any()
    return found
