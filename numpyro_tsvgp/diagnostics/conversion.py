"""From a fitted model to an ArviZ object."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, lax
from numpyro.util import find_stack_level

from numpyro_tsvgp import arviz_versions, extract, sites
from numpyro_tsvgp.cavities import marginals_at_data
from numpyro_tsvgp.expectations import choose_rule, expect
from numpyro_tsvgp.guide import AutoDualGaussian, Params
from numpyro_tsvgp.hyperposterior import (
    as_arguments,
    collapsed_of,
    hyperparameters_among,
)
from numpyro_tsvgp.linalg import blas_threads
from numpyro_tsvgp.naming import Shape, shape_of
from numpyro_tsvgp.pointwise import data_sites, whole
from numpyro_tsvgp.simulation import Draws, draw, prior_hyperparameters

__all__ = ["to_arviz"]

# Parameters with more numbers than this, such as the weights of a network, are left out.
_LARGEST_PARAM = 1000


@blas_threads()
def to_arviz(
    rng_key: Array,
    guide: AutoDualGaussian,
    params: Params,
    *args: Any,
    num_samples: int = 1000,
    predictions: Any = None,
    prior: bool = True,
    predictive: bool = True,
    log_likelihood: bool = True,
    mcmc: Any = None,
    result: Any = None,
    svi: Any = None,
    rows: Any = None,
    joint: bool | None = None,
    **kwargs: Any,
) -> Any:
    """A fitted model as an ArviZ object, ready for everything ArviZ does.

    The groups are

    - ``posterior``: hyperparameters, GP sites and deterministic sites. Hyperparameters that are
      points (``numpyro.param``, or sampled ones under the default ``hyper_guide``) repeat.
    - ``posterior_predictive`` and ``log_likelihood``: new data and the log density of the data
      at each draw, one entry a data point. Sites of ``numpyro.factor`` are not data.
    - ``prior`` and ``prior_predictive``, ``observed_data``, and ``constant_data`` with the inputs
      of the GPs.
    - ``predictions`` and ``predictions_constant_data`` at the arguments in ``predictions``. Draws
      are paired with those of the posterior in their hyperparameters.
    - ``fit``, with ``result``: the losses, the bound, the number of rejected steps, the inducing
      inputs, and with ``svi`` also the rates of the E-steps.
    - ``sample_stats``, with ``mcmc``: the statistics of the sampler.

    Dims are ``chain`` and ``draw`` and then the names of the model's plates; the axis of a GP is
    named after the plate of the data along it. Plates that subsample get all of their data.

    Memory is that of the groups asked for, ``num_samples`` times n each. To look at a part of
    large data, pass that part as arguments (the guide follows them), or keep some of f with
    ``rows``; :func:`~numpyro_tsvgp.loo` needs no draws at all.

    Args:
      rng_key: random key.
      guide: the fitted guide.
      params: fitted parameters.
      *args: arguments of the model, with the data.
      num_samples: number of draws; an MCMC has its own.
      predictions: arguments of the model to predict at: a tuple of positional ones, a dict of
        keyword ones, or a single one, as in ``predictions=X_new``.
      prior: whether to draw from the prior too.
      predictive: whether to draw new data.
      log_likelihood: whether to compute log densities of the data.
      mcmc: an ``MCMC`` that was run on ``NUTS(collapse(model, guide, params))``. Then f is drawn
        given each of its draws, and chains are real.
      result: what ``svi.run`` returned.
      svi: the :class:`~numpyro_tsvgp.TSVGP` of the fit.
      rows: which rows of GP sites (and of deterministic sites along them) to keep in
        ``posterior`` and ``prior``: indices, a slice or a mask; all by default.
      joint: whether draws of f have their joint covariance, which costs the cube of n. Without,
        they are correlated through the inducing values alone; each marginal is exact either way.
        By default jointly up to 2048 rows, or up to 512 where every draw has its own
        hyperparameters.
      **kwargs: keyword arguments of the model.

    Returns:
      An ``InferenceData`` under ArviZ 0.x and an ``xarray.DataTree`` under ArviZ 1.x.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, to_arviz
      >>> def model(X, y=None):
      ...     scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
      ...     f = numpyro.sample("f", GP(kernels.RBF(scale), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 20)
      >>> y = (X > 0.5).astype(int)
      >>> guide = AutoDualGaussian(model, inducing=X[::4])
      >>> result = TSVGP(model, guide, optax.adam(0.1)).run(
      ...     jax.random.key(0), 20, X, y, progress_bar=False
      ... )
      >>> data = to_arviz(
      ...     jax.random.key(1), guide, result.params, X, y, num_samples=50, prior=False
      ... )
      >>> data.posterior["f"].dims
      ('chain', 'draw', 'data')
      >>> data.log_likelihood["y"].shape
      (1, 50, 20)
    """
    guide = whole(guide, args, kwargs)
    key_hyper, key_posterior, key_prior, key_new = jax.random.split(rng_key, 4)
    chains, hyper = 1, None
    if mcmc is not None:
        grouped = hyperparameters_among(guide, mcmc.get_samples(group_by_chain=True))
        chains, per_chain = next(iter(grouped.values())).shape[:2]
        num_samples = chains * per_chain
        hyper = {k: jnp.reshape(v, (num_samples, *v.shape[2:])) for k, v in grouped.items()}
    elif not guide.has_point_hyperparameters:
        hyper = lax.map(
            lambda key: guide.sample_hyperparameters(key, params, args, kwargs),
            jax.random.split(key_hyper, num_samples),
        )

    # The posterior of f given each draw is made as the density of the hyperparameters has it.
    collapsed = collapsed_of(mcmc)
    refresh = (0, None) if collapsed is None else (collapsed.refresh, collapsed.quadrature)
    given = {"hyper": hyper, "refresh": refresh, "training": (args, kwargs)}

    def drawn(key: Array, shape: Shape, **options: Any) -> Draws:
        return draw(
            guide,
            params,
            shape.args,
            shape.kwargs,
            key=key,
            num=num_samples,
            joint=joint,
            kept=shape.kept,
            **options,
        )

    here = shape_of(guide, params, args, kwargs, rows)
    posterior = drawn(
        key_posterior, here, predictive=predictive, log_likelihood=log_likelihood, **given
    )
    data = here.named(chains)
    constants = {
        name: np.broadcast_to(site["value"], (num_samples, *np.shape(site["value"])))
        for name, site in here.trace.items()
        if site["type"] == "param" and _is_small_array(site["value"])
    }
    groups = {
        "posterior": data({**constants, **posterior.hyper, **posterior.gps, **posterior.other}),
        "posterior_predictive": data(posterior.predictive),
        "log_likelihood": data(posterior.log_likelihood, log_density=True),
        "observed_data": here.fixed({k: s["value"] for k, s in data_sites(here.trace).items()}),
        "constant_data": here.inputs(),
    }
    if result is not None:
        groups["fit"] = _fit(guide, params, here, result, svi)
    if prior:
        try:
            from_prior = drawn(
                key_prior,
                here,
                hyper=prior_hyperparameters(guide, params, args, kwargs, key_prior, num_samples),
                of_prior=True,
                predictive=predictive,
            )
        except NotImplementedError:
            warnings.warn(
                "A prior of the model cannot be sampled, so the groups prior and "
                "prior_predictive are left out.",
                stacklevel=find_stack_level(),
            )
        else:
            named = here.named(1)
            groups["prior"] = named({**from_prior.hyper, **from_prior.gps, **from_prior.other})
            groups["prior_predictive"] = named(from_prior.predictive)
    if predictions is not None:
        there = shape_of(guide, params, *as_arguments(predictions), None)
        new = drawn(key_new, there, predictive=True, **given)
        groups["predictions"] = there.named(chains)({**new.gps, **new.other, **new.predictive})
        groups["predictions_constant_data"] = there.inputs()
    if mcmc is not None:
        groups["sample_stats"] = _sample_stats(mcmc)
    return arviz_versions.build({name: group for name, group in groups.items() if group})


def _is_small_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | float | int) and (
        np.size(value) <= _LARGEST_PARAM
    )


# ---- what is known about the fit -------------------------------------------------------------


def _fit(
    guide: AutoDualGaussian, params: Params, shape: Shape, result: Any, svi: Any
) -> xr.Dataset:
    losses = np.asarray(result.losses)
    variables: dict[str, Any] = {
        "losses": ("step", losses),
        "bound": ((), _bound(guide, params, shape, svi)),
        "rejected": ((), int(np.isnan(losses).sum())),
        "floored_variances": ((), int(result.state.floored)),
    }
    if svi is not None:
        last = int(result.state.step)
        rates = [float(svi._rate(jnp.asarray(i))) for i in range(last - len(losses), last)]
        variables["site_lr"] = ("step", np.array(rates))
    for name in shape.gps:
        Z = np.asarray(guide.unpack(name, params).inducing)
        dims = [f"{name}_inducing", *(f"X_dim_{i}" for i in range(1, Z.ndim))]
        variables[f"{name}_inducing_inputs"] = (dims, Z)
    return xr.Dataset(variables, {"step": np.arange(len(losses))})


def _bound(guide: AutoDualGaussian, params: Params, shape: Shape, svi: Any) -> float:
    """The bound on the log evidence, with hyperparameters held at their median."""
    structure = guide.structure
    rule = getattr(svi, "quadrature", None) or choose_rule(structure.dim)
    nodes, weights = rule.nodes(jax.random.key(0), structure.dim)
    hyper = {} if guide.hyper_guide is None else dict(guide.hyper_guide.median(params))

    return float(
        _compute_bound(guide, dict(params), shape.args, dict(shape.kwargs), hyper, nodes, weights)
    )


@partial(jax.jit, static_argnums=0)
def _compute_bound(
    guide: AutoDualGaussian,
    params: Params,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    hyper: Params,
    nodes: Array,
    weights: Array,
) -> Array:
    reading = guide.read(params, args, kwargs, hyper)
    likelihood = extract.log_likelihood(guide.model, reading, args, kwargs)
    marginals, divergence = {}, jnp.zeros(())
    for name, site in reading.gps.items():
        marginals[name], _, q = marginals_at_data(site, guide.unpack(name, params))
        divergence = divergence + sites.kl_divergence(q)
    return expect(likelihood, marginals, guide.structure.axes, nodes, weights) - divergence


_STATISTICS = {
    "potential_energy": "lp",
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}


def _sample_stats(mcmc: Any) -> xr.Dataset:
    variables: dict[str, Any] = {}
    for name, value in mcmc.get_extra_fields(group_by_chain=True).items():
        value = np.asarray(value) if hasattr(value, "shape") else np.zeros(0)
        if value.ndim != 2:
            continue
        variables[_STATISTICS.get(name, name)] = (
            ("chain", "draw"),
            -value if name == "potential_energy" else value,
        )
        if name == "num_steps":
            variables["tree_depth"] = (("chain", "draw"), np.log2(value).astype(int) + 1)
    if not variables:
        return xr.Dataset()
    chains, draws = next(iter(variables.values()))[1].shape
    return xr.Dataset(variables, {"chain": np.arange(chains), "draw": np.arange(draws)})
