"""Fits moved to other inducing inputs, and where to move them when data come from elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.distributions import as_inputs
from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.inducing import pivots
from numpyro_tsvgp.infer.em.loop import all_finite
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.infer.guides.guide_checks import check_places
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import GPSite

__all__ = ["chosen_inducing", "with_inducing"]


@jax.jit
@full_precision()
def _moved(approximation: Any, process: Process, Z: Array, prior_mean: Array) -> Any:
    return approximation.with_inducing(process, Z, prior_mean)


@blas_threads()
@full_precision(on_cpu=False)
def with_inducing(fit: Fit, Z: Any, call: Call | None = None) -> Fit:
    """A fit by other inducing inputs; see :meth:`numpyro_tsvgp.Fit.with_inducing`.

    Args:
      fit: the fit.
      Z: inducing inputs, or a dict of them by GP site.
      call: arguments that the model can be run with, if the fit has no data.

    Returns:
      The fit.
    """
    check_fit("with_inducing(result.fit, Z)", fit)
    guide, names = fit.guide, fit.structure.gps
    given = dict(Z) if isinstance(Z, Mapping) else {n: Z for n in names if guide.has_inducing(n)}
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(
            f"There are inducing inputs for {unknown}, but the GP sites of the fit are "
            f"{list(names)}."
        )
    if not given:
        raise ValueError(
            "The fit has no inducing inputs that could be moved: it was fitted with inducing=None, "
            "where every data point is its own."
        )
    if call is None:
        call = fit.data if fit.example is None else fit.example
    reading = guide.read(call, fit.params, fit.hyper_at(call))
    latents, kept = guide.latents(reading, fit.params), {}
    for name, places in given.items():
        site = reading.gps[name]
        inputs = _like(as_inputs(places), site)
        check_places(name, inputs, site)
        process, approximation = latents[name]
        mean = site.mean_at(inputs)
        new = _moved(approximation, process, inputs, mean)
        if not all_finite(new):
            raise ValueError(
                f"The covariance of the {len(inputs)} new inducing inputs of GP site '{name}' is "
                "not positive definite. They may be too close for the lengthscale: use fewer."
            )
        kept[name] = new
    return dataclasses.replace(fit, params={**fit.params, **guide.pack(kept)})


def _like(Z: Array, site: GPSite) -> Array:
    X = site.gp.X
    if X.ndim == 1 and Z.ndim == 2 and Z.shape[1] == 1:
        Z = Z[:, 0]
    if X.ndim == 2 and Z.ndim == 1 and X.shape[1] == 1:
        Z = Z[:, None]
    return Z.astype(X.dtype)


def chosen_inducing(site: GPSite, Z: Array, most: int) -> Array:
    r"""Inducing inputs among those that are there and the inputs of new data.

    A pivoted Cholesky factorisation chooses, one after another, the input with the largest
    variance given those chosen before. There are at most twice as many as before, so that
    programs are compiled for a few numbers of them only.

    Args:
      site: the GP at the new data.
      Z: the inducing inputs that are there.
      most: the largest number of inducing inputs.

    Returns:
      The inducing inputs, in the order they were chosen.
    """
    candidates = jnp.concatenate([Z, site.gp.X.astype(Z.dtype)])
    m = min(most, max(2 * len(Z), 8), len(candidates))
    rows, found = pivots(site.gp.kernel, candidates, m)
    chosen = np.asarray(candidates)[np.asarray(rows)[: int(found)]]
    # Equal rows have no variance given one another, but noise of a kernel is each one's own.
    _, first = np.unique(chosen, axis=0, return_index=True)
    return jnp.asarray(chosen[np.sort(first)])
