"""From a fitted model to an ArviZ object."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, lax

from numpyro_tsvgp.diagnostics import compat
from numpyro_tsvgp.diagnostics.draws import Draws, draw, prior_hyperparameters
from numpyro_tsvgp.diagnostics.labels import Labels, Shape, shape_of
from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.infer.collapse import collapsed_of
from numpyro_tsvgp.infer.evidence import evidence_of
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.model.arguments import as_call
from numpyro_tsvgp.model.likelihood import data_sites

__all__ = ["to_arviz"]

# Parameters with more numbers than this, such as the weights of a network, are left out.
_LARGEST_PARAM = 1000


@blas_threads()
@full_precision(on_cpu=False)
def to_arviz(
    rng_key: Array,
    fit: Fit,
    *,
    num_samples: int = 1000,
    predictions: Any = None,
    prior: bool = True,
    predictive: bool = True,
    log_likelihood: bool = True,
    mcmc: Any = None,
    result: Any = None,
    rows: Any = None,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Sequence[str]] | str | None = None,
    pred_coords: Mapping[str, Any] | None = None,
    joint: bool | None = None,
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
    - ``fit_data``, with ``result``: the losses, the bound, the number of rejected steps and the
      inducing inputs.
    - ``sample_stats``, with ``mcmc``: the statistics of the sampler.

    Dims are ``chain`` and ``draw`` and then those that ``az.from_numpyro`` gives to draws of the
    same model: the names of plates, and ``f_dim_0`` for the rows of a GP, unless the model says
    ``numpyro.sample("f", GP(...), infer={"event_dims": ["data"]})``. So what NUTS found and what a
    fit found can be subtracted and concatenated. Plates that subsample get all of their data.

    Memory is that of the groups asked for, ``num_samples`` times n each. To look at a part of
    large data, pass ``fit.with_data(X[:100], y[:100])`` (a fit follows its data), or keep some of f
    with ``rows``; :func:`~numpyro_tsvgp.loo` needs no draws at all.

    Args:
      rng_key: random key.
      fit: the fit, with its data.
      num_samples: number of draws; an MCMC has its own.
      predictions: arguments of the model to predict at: a tuple of positional ones, a dict of
        keyword ones, or a single one, as in ``predictions=X_new``.
      prior: whether to draw from the prior too.
      predictive: whether to draw new data.
      log_likelihood: whether to compute log densities of the data.
      mcmc: an ``MCMC`` that was run on ``NUTS(collapse(fit))``. Then f is drawn
        given each of its draws, and chains are real.
      result: what ``svi.run`` returned.
      rows: which rows of GP sites (and of deterministic sites along them) to keep in
        ``posterior`` and ``prior``: indices, a slice or a mask; all by default.
      coords: labels by the name of a dim, as in ``az.from_numpyro``: ``coords={"data": years}``.
        Labels of the rows of the data are not those of predictions.
      dims: names of dims by site, as in ``az.from_numpyro``, where plates give none:
        ``dims={"b": ["covariate"]}``; or ``"plates"``, which gives the axis of a GP, and of
        deterministic sites along it, the name of the plate of the data along its rows, so that f,
        y and X have it in common. (Two arrays with different dims do not subtract: xarray makes the
        outer product of them.)
      pred_coords: labels of the groups of predictions, ``pred_coords={"data": coming_years}``.
      joint: whether draws of f have their joint covariance, which costs the cube of n. Without,
        they are correlated through the inducing values alone; each marginal is exact either way.
        By default jointly up to 2048 rows, or up to 512 where every draw has its own
        hyperparameters.

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
      >>> data = to_arviz(jax.random.key(1), result.fit, num_samples=50, prior=False)
      >>> data.posterior["f"].dims
      ('chain', 'draw', 'f_dim_0')
      >>> data.log_likelihood["y"].shape
      (1, 50, 20)
    """
    check_fit("to_arviz(key, result.fit)", fit)
    if mcmc is not None or result is not None:
        fit.check_has_all_rows("to_arviz with mcmc or result")
    fit = fit.of_all_data()
    key_hyper, key_posterior, key_prior, key_new = jax.random.split(rng_key, 4)
    # Given a draw of the hyperparameters the posterior of f is made as their density has it.
    chains, hyper, refresh = 1, None, None
    if mcmc is not None:
        collapsed = collapsed_of(mcmc)
        refresh = collapsed.refresh
        grouped = collapsed.hyperparameters_among(mcmc.get_samples(group_by_chain=True))
        chains, per_chain = next(iter(grouped.values())).shape[:2]
        num_samples = chains * per_chain
        hyper = {k: jnp.reshape(v, (num_samples, *v.shape[2:])) for k, v in grouped.items()}
    elif not fit.hyper_guide.is_point:
        hyper = _draw_hyperparameters(fit, jax.random.split(key_hyper, num_samples))
    given = {"hyper": hyper, "refresh": refresh}

    def drawn(key: Array, shape: Shape, **options: Any) -> Draws:
        return draw(
            fit, shape.call, key=key, num=num_samples, joint=joint, kept=shape.kept, **options
        )

    here = shape_of(fit, fit.data, rows)
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
        groups["fit_data"] = _fit_group(fit, result)
    if prior:
        try:
            from_prior = drawn(
                key_prior,
                here,
                hyper=prior_hyperparameters(fit, key_prior, num_samples),
                of_prior=True,
                predictive=predictive,
            )
        except NotImplementedError:
            warnings.warn(
                "A prior of the model cannot be sampled, so the groups prior and "
                "prior_predictive are left out.",
                stacklevel=stack_level(),
            )
        else:
            named = here.named(1)
            groups["prior"] = named({**from_prior.hyper, **from_prior.gps, **from_prior.other})
            groups["prior_predictive"] = named(from_prior.predictive)
    if predictions is not None:
        there = shape_of(fit, as_call(predictions).on_device())
        new = drawn(key_new, there, predictive=True, **given)
        groups["predictions"] = there.named(chains)({**new.gps, **new.other, **new.predictive})
        groups["predictions_constant_data"] = there.inputs()
    if mcmc is not None:
        groups["sample_stats"] = _sample_stats(mcmc)
    if isinstance(dims, str) and dims not in ("numpyro", "plates"):
        raise ValueError(
            f'dims takes names by site, "numpyro" (the default) or "plates", got {dims!r}.'
        )
    names = {} if dims == "plates" else here.names_of_numpyro()
    along_rows = here.along_rows(names)
    if isinstance(dims, Mapping):
        names |= {name: list(given) for name, given in dims.items()}
    groups = {name: group for name, group in groups.items() if group}
    labels = Labels(names, dict(coords or {}), dict(pred_coords or {}))
    return compat.build(labels.on(groups, along_rows))


def _is_small_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | float | int) and (
        np.size(value) <= _LARGEST_PARAM
    )


# ---- what is known about the fit -------------------------------------------------------------


def _fit_group(fit: Fit, result: Any) -> xr.Dataset:
    losses = np.asarray(result.losses)
    variables: dict[str, Any] = {
        "losses": ("step", losses),
        "bound": ((), float(_bound(fit))),
        "rejected": ((), int(np.isnan(losses).sum())),
        "floored_variances": ((), int(result.state.floored)),
    }
    for name in fit.structure.gps:
        Z = np.asarray(fit.guide.unpack(name, fit.params).inducing)
        dims = [f"{name}_inducing", *(f"X_dim_{i}" for i in range(1, Z.ndim))]
        variables[f"{name}_inducing_inputs"] = (dims, Z)
    return xr.Dataset(variables, {"step": np.arange(len(losses))})


@jax.jit
@full_precision()
def _bound(fit: Fit) -> Array:
    """The objective of the fit, with hyperparameters held at their median."""
    return evidence_of(fit, fit.hyper, 0)


@jax.jit
@full_precision()
def _draw_hyperparameters(fit: Fit, keys: Array) -> dict[str, Array]:
    return lax.map(lambda key: fit.hyper_guide.draw(key, fit.params, fit.data)[0], keys)


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
