"""Whether the density of the data is one that sites can follow, at values that GPs may take."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.coupling import hyper_values, nudged
from numpyro_tsvgp.model.likelihood import log_likelihood
from numpyro_tsvgp.model.read import Model, Reading, is_observed, run_with
from numpyro_tsvgp.model.wrapped import unmasked, unwrapped

__all__ = ["check_density", "check_ranges"]

# Constraints that are known once other parameters are, and that wrap around.
_UNRANGED = (type(dist.constraints.dependent), type(dist.constraints.circular))


def check_density(model: Model, reading: Reading, call: Call, below: set[str]) -> None:
    """The log-likelihood must have a finite gradient near the prior mean of the GPs, not all zero.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.
      below: latent variables whose density depends on GPs.

    Raises:
      ValueError: if it has not.
    """
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


def check_ranges(model: Model, reading: Reading, call: Call, below: set[str]) -> None:
    """Parameters of the likelihood must be valid at draws of the GPs, where they depend on them.

    Args:
      model: the NumPyro model.
      reading: a reading of it.
      call: its arguments.
      below: latent variables whose density depends on GPs.

    Raises:
      ValueError: if one is not.
    """
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
        outer, mask = unmasked(message["fn"])
        fn = unwrapped(outer)
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
