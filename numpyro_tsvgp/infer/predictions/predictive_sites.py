"""Which sites of a model hold data to predict, and which values of GPs each number reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_tsvgp.infer.guides.prediction import read_to_predict
from numpyro_tsvgp.infer.predictions.predictor import Predictor
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.coupling import hyper_values, sources
from numpyro_tsvgp.model.read import Model, Reading, is_gp, on_some_rows, run_with
from numpyro_tsvgp.model.reads import reads
from numpyro_tsvgp.model.structure import unread
from numpyro_tsvgp.model.wrapped import unwrapped

__all__ = ["Targets", "find_targets"]

# What numbers read is found on that many rows where a model can be run on fewer than it has.
_SOME_ROWS = 32


class Targets(NamedTuple):
    """Sites to predict.

    Attributes:
      names: the names of the sites.
      call: the arguments of the model, with all data where plates draw some.
      coordinates: the coordinate of the nodes that each latent function uses, by GP site.
      dim: how many of them there are.
    """

    names: tuple[str, ...]
    call: Call
    coordinates: tuple[tuple[str, tuple[int, ...]], ...]
    dim: int


def find_targets(predictor: Predictor, call: Call) -> Targets:
    """Finds the sites to predict at some arguments.

    Args:
      predictor: a fit that is ready to predict.
      call: arguments of the model.

    Returns:
      The sites.

    Raises:
      ValueError: in words, if there are none, or if one is not an integral over marginals.
    """
    model, structure = predictor.model, predictor.structure
    assert model is not None
    if structure.below:
        raise ValueError(
            f"Site '{structure.below[0]}' is a latent variable that depends on a GP, and at new "
            "inputs it has a distribution of its own, which predict does not integrate over. Draw "
            "instead: Predictive(model, posterior_samples=fit.sample(key, X_new, "
            "sample_shape=(1000,)))(key, X_new)."
        )
    hyper = jax.tree.map(lambda x: x[0], predictor.draws())
    reading, call = read_to_predict(model, call, {**predictor.parameters, **hyper})
    names = tuple(
        name
        for name, site in reading.trace.items()
        if site["type"] == "sample"
        and not is_gp(site)
        and name not in structure.hyperparameters
        and not isinstance(unwrapped(site["fn"]), dist.Unit)
    )
    if not names:
        raise ValueError(
            "The model has no site that holds data, only terms of numpyro.factor, which have no "
            "distribution to predict. Observe the data with numpyro.sample('y', ..., obs=y), or "
            "use fit.marginals, which are about f."
        )
    drawn = {name for name in names if name in reading.pinned}
    if len(names) > 1 and drawn:
        used = sorted(drawn - unread(model, reading, call, drawn))
        if used:
            raise ValueError(
                f"The distribution of another site depends on the value of site '{used[0]}', so "
                "that it is not an integral over GPs alone. Draw instead: Predictive(model, "
                "posterior_samples=fit.sample(key, X_new, sample_shape=(1000,)))(key, X_new), or "
                f"pass data for '{used[0]}'."
            )
    coordinates, dim = structure.coordinates, structure.dim
    if structure.proven and not call.is_traced:
        coordinates, dim = _coordinates(model, reading, call, names, coordinates, dim)
    return Targets(names, call, coordinates, dim)


def _coordinates(
    model: Model, reading: Reading, call: Call, names: tuple[str, ...], coordinates: Any, dim: int
) -> tuple[Any, int]:
    """The coordinates of the fit, or one for each function where a number reads two that share.

    A fit integrates a log-likelihood, a sum, in which functions of two GPs can share a coordinate.
    The likelihood itself is their product.
    """
    fewer = on_some_rows(model, reading, call, _SOME_ROWS)
    here, some = (reading, call) if fewer is None else fewer

    def log_probs(values: Mapping[str, Array], hyper: Any) -> dict[str, Array]:
        gps = {name: here.gps[name].unflatten(value) for name, value in values.items()}
        trace = run_with(model, some, {**here.pinned, **hyper, **gps})
        return {name: unwrapped(trace[name]["fn"]).log_prob(trace[name]["value"]) for name in names}

    values = {
        name: jnp.zeros((site.functions, site.rows), site.loc.dtype)
        for name, site in here.gps.items()
    }
    found = reads(log_probs, values, sources(here.gps), hyper_values(here)).results
    order = dict(coordinates)
    of_functions = np.concatenate([np.array(order[name]) for name in here.gps])
    shared = False
    for name in names:
        if not found[name].one.all():
            raise ValueError(
                f"A number of site '{name}' depends on the values of a GP at several inputs, so "
                "that its distribution is not an integral over marginals. Draw instead: "
                "Predictive(model, posterior_samples=fit.sample(key, X_new, "
                "sample_shape=(1000,)))(key, X_new)."
            )
        which = found[name].which.reshape(-1, len(of_functions))
        for coordinate in range(dim):
            shared |= bool((which[:, of_functions == coordinate].sum(-1) > 1).any())
    if not shared:
        return coordinates, dim
    first, separate = 0, []
    for name, site in here.gps.items():
        separate.append((name, tuple(range(first, first + site.functions))))
        first += site.functions
    return tuple(separate), first
