r"""Leave-one-out cross-validation and influence, from the sites and without refitting."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, lax
from numpyro.util import find_stack_level

from numpyro_tsvgp import arviz_versions, cavities, posterior
from numpyro_tsvgp.bound import refresh_sites
from numpyro_tsvgp.cavities import AtData, Frame, Given
from numpyro_tsvgp.expectations import Rule
from numpyro_tsvgp.guide import AutoDualGaussian, Params
from numpyro_tsvgp.hyperposterior import collapsed_of, hyperparameters_among
from numpyro_tsvgp.linalg import blas_threads

__all__ = ["influence", "loo"]


@blas_threads()
def loo(
    guide: AutoDualGaussian,
    params: Params,
    *args: Any,
    mcmc: Any = None,
    num_hyper: int = 100,
    refine: int = 0,
    quadrature: Rule | None = None,
    curvature: str = "clip",
    threshold: float = 0.7,
    **kwargs: Any,
) -> Any:
    r"""Leave-one-out predictive densities from the site cavities: no refit and no sampling.

    .. math::
      \mathrm{elpd}_i = \log \int p(y_i \mid f) \, \mathcal{N}(f;\, m_c, v_c) \, \mathrm{d}f

    in :math:`O(n m^2)` for all n points. A data point is a row of the GPs: everything that is
    observed at it is left out together, and terms of ``numpyro.factor`` stay in.

    For a Gaussian likelihood this equals refitting without each point. For others the cavity
    holds the sites of the other points, and ``refine`` moves them to where a refit would.

    The sites must have converged: finish a fit with a few E-steps at fixed hyperparameters,
    ``TSVGP(model, guide, None)``, if the last steps still moved them.

    Hyperparameters that are points are held. When they are distributions, from ``hyper_guide``
    or from ``mcmc``, the cavity densities given each draw are combined by Pareto-smoothed
    importance sampling, and the result has a Pareto k for each point.

    Args:
      guide: the fitted guide.
      params: fitted parameters.
      *args: arguments of the model, with the training data, all of it.
      mcmc: an ``MCMC`` that was run on ``NUTS(collapse(model, guide, params))``, whose
        hyperparameters are then used.
      num_hyper: the largest number of hyperparameter draws, where there are draws.
      refine: number of E-steps taken without each point, from its cavity. Two or three are
        close to a refit when the likelihood is log-concave. All points together cost n times
        as much as these E-steps, so this is for small data.
      quadrature: quadrature rule, or None for the default.
      curvature: what was given to :class:`~numpyro_tsvgp.TSVGP`.
      threshold: leverages :math:`\beta_i s_i` above this are reported. Near one, what is left
        without the point is mostly extrapolation.
      **kwargs: keyword arguments of the model.

    Returns:
      An ArviZ ELPD object as of ``az.loo(..., pointwise=True)``, for ``az.compare``. In addition
      ``result["leverage"]`` holds :math:`\beta_i s_i` of each point, the largest over latent
      functions, and ``result["flagged"]`` whether it exceeds ``threshold``. Rows that are masked
      out are left out.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, loo
      >>> def model(X, y=None):
      ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 20)
      >>> guide = AutoDualGaussian(model, inducing=X[::3])
      >>> svi = TSVGP(model, guide, None, site_lr=1.0)  # exact in one step
      >>> result = svi.run(jax.random.key(0), 1, X, jnp.sin(6.0 * X), progress_bar=False)
      >>> elpd = loo(guide, result.params, X, jnp.sin(6.0 * X))
      >>> int(elpd["n_data_points"]), bool(elpd["warning"])
      (20, False)

    References:
      V. Adam, P. E. Chang, M. E. Khan, A. Solin, *Dual parameterization of sparse variational
      Gaussian processes*, NeurIPS 2021.

      A. Vehtari, T. Mononen, V. Tolvanen, T. Sivula, O. Winther, *Bayesian leave-one-out
      cross-validation approximations for Gaussian latent variable models*, JMLR 2016.
    """
    frame = cavities.frame(guide, params, args, kwargs, quadrature, curvature)

    def at(given: Given) -> tuple[Array, Array, Array]:
        data = cavities.at_data(frame, given)
        without = {name: d.without for name, d in data.items()}
        if refine:
            without = cavities.refine(frame, given, data, refine)
        leverage = jnp.concatenate([d.leverage for d in data.values()]).max(0)
        return *cavities.log_densities(frame, given, data, without), leverage

    @jax.jit
    def at_each(given: Given) -> tuple[Array, Array, Array]:
        def one(hyper: Params) -> tuple[Array, Array, Array]:
            params, args, kwargs, _ = given
            fresh = refresh_sites(
                frame.guide, params, hyper, args, kwargs, steps=refresh, rule=quadrature
            )
            return at(given._replace(params=fresh, hyper=hyper))

        return lax.map(one, given.hyper)

    collapsed = collapsed_of(mcmc)
    refresh = 0 if collapsed is None else collapsed.refresh

    draws = _hyper_draws(frame.guide, params, args, kwargs, mcmc, num_hyper)
    if draws is None:
        hyper = frame.guide.sample_hyperparameters(jax.random.key(0), params, args, kwargs)
        without, density, leverage = jax.jit(at)(Given(params, args, kwargs, hyper))
    else:
        without, density, leverage = at_each(Given(params, args, kwargs, draws))
        leverage = leverage.mean(0)
    layout = frame.layout
    rows = np.flatnonzero(layout.observed)
    coords = {layout.dim: rows}

    def named(values: Array, *dims: str) -> xr.DataArray:
        return xr.DataArray(np.asarray(values)[..., rows], dims=(*dims, layout.dim), coords=coords)

    flagged = named(leverage) > threshold
    extra = {"leverage": named(leverage), "flagged": flagged}
    warning = bool(flagged.any())
    if warning:
        worst = rows[np.argsort(-np.asarray(leverage)[rows])][: min(int(flagged.sum()), 5)]
        warnings.warn(
            f"{int(flagged.sum())} of {len(rows)} points carry more than {threshold:.0%} of the "
            f"posterior precision at their own inputs (rows {', '.join(map(str, worst))}"
            f"{', ...' if int(flagged.sum()) > 5 else ''}). Their leave-one-out densities are "
            "extrapolations. Unless the likelihood is Gaussian, check them with refine=3.",
            stacklevel=find_stack_level(),
        )
    if draws is not None:
        log_predictive = named(without[None], "chain", "draw")
        within = named(density[None], "chain", "draw")
        return arviz_versions.psis_loo(log_predictive, within, warning=warning, extra=extra)
    p = float(named(density).sum() - named(without).sum())
    return arviz_versions.elpd(named(without), p, samples=1, warning=warning, extra=extra)


def _hyper_draws(
    guide: AutoDualGaussian,
    params: Params,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mcmc: Any,
    num: int,
) -> dict[str, Array] | None:
    """Draws of the hyperparameters, evenly spaced ones of an MCMC; None if they are points."""
    if mcmc is not None:
        samples = hyperparameters_among(guide, mcmc.get_samples())
        count = len(next(iter(samples.values())))
        keep = np.unique(np.linspace(0, count - 1, min(num, count)).round().astype(int))
        return {name: value[keep] for name, value in samples.items()}
    if guide.has_point_hyperparameters:
        return None
    keys = jax.random.split(jax.random.key(0), num)
    return lax.map(lambda key: guide.sample_hyperparameters(key, params, args, kwargs), keys)


@blas_threads()
def influence(
    guide: AutoDualGaussian,
    params: Params,
    *args: Any,
    quadrature: Rule | None = None,
    curvature: str = "clip",
    delta: bool = False,
    **kwargs: Any,
) -> xr.Dataset:
    r"""How much each data point moves the posterior, and the dual parameters themselves.

    Leaving out point i moves the mean of the inducing values by
    :math:`\delta_i = -S a_i \alpha_i / (1 - \beta_i s_i)` and the posterior by

    .. math::
      \mathrm{KL}(q_{-i} \,\|\, q) = \tfrac12 \Big[
      \frac{\beta_i s_i}{1 - \beta_i s_i} + \log(1 - \beta_i s_i)
      + \frac{\alpha_i^2 s_i}{(1 - \beta_i s_i)^2} \Big],

    summed over latent functions. Points with the largest divergence are worth a second look:
    outliers, label errors, and the only witnesses of a region.

    Args:
      guide: the fitted guide.
      params: fitted parameters. Variational hyperparameters are held at their median.
      *args: arguments of the model, with the training data, all of it.
      quadrature: quadrature rule, or None for the default.
      curvature: what was given to :class:`~numpyro_tsvgp.TSVGP`.
      delta: whether to return the vectors :math:`\delta_i` too, n times m numbers.
      **kwargs: keyword arguments of the model.

    Returns:
      A data set along the rows of the data with ``influence``, the divergence in nats. For each
      GP site f there are ``f_alpha`` and ``f_beta``, the dual parameters of each point,
      ``f_leverage`` (:math:`\beta_i s_i`), ``f_shift``, what the point adds to the posterior mean
      at its own input, and with ``delta`` also ``f_delta``. Rows that are masked out have zeros.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, influence, kernels
      >>> def model(X, y=None):
      ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 20)
      >>> y = jnp.sin(6.0 * X).at[7].set(-2.0)  # an outlier
      >>> guide = AutoDualGaussian(model, inducing=X[::3])
      >>> svi = TSVGP(model, guide, None, site_lr=1.0)
      >>> result = svi.run(jax.random.key(0), 1, X, y, progress_bar=False)
      >>> int(influence(guide, result.params, X, y).influence.argmax("data"))
      7
    """
    frame = cavities.frame(guide, params, args, kwargs, quadrature, curvature)
    guide, layout = frame.guide, frame.layout
    hyper = {} if guide.hyper_guide is None else dict(guide.hyper_guide.median(params))

    @jax.jit
    def compute(given: Given) -> tuple[dict[str, AtData], Array, dict[str, Array]]:
        at = cavities.at_data(frame, given)
        total = jnp.concatenate([_divergence(d) for d in at.values()]).sum(0)
        return at, total, _deltas(frame, given, at) if delta else {}

    at, total, moved = compute(Given(params, args, kwargs, hyper))
    reading = guide.read(params, args, kwargs, hyper)
    data: dict[str, Any] = {"influence": (layout.dim, np.asarray(total))}
    for name, d in at.items():
        dims = gp_batch_dims(reading.trace[name])
        unflatten = reading.gps[name].unflatten
        parts = {"alpha": d.alpha, "beta": d.beta, "leverage": d.leverage, "shift": d.shift}
        for what, value in parts.items():
            data[f"{name}_{what}"] = ((*dims, layout.dim), np.asarray(unflatten(value)))
        if delta:
            value = moved[name].reshape(*reading.gps[name].batch_shape, *moved[name].shape[1:])
            dims = (*dims, layout.dim, f"{name}_inducing")
            data[f"{name}_delta"] = (dims, np.asarray(value))
    return xr.Dataset(data, coords={layout.dim: np.arange(layout.rows)})


def gp_batch_dims(site: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the axes that plates around a GP make."""
    shape = site["fn"].batch_shape
    names = {frame.dim: frame.name for frame in site["cond_indep_stack"]}
    return tuple(names.get(i - len(shape), f"{site['name']}_dim_{i}") for i in range(len(shape)))


def _divergence(d: AtData) -> Array:
    r"""The divergence of the posterior without a point from the one with it: ``(latents, n)``."""
    x = d.leverage
    shift = d.alpha**2 * d.explained / (1 - x) ** 2
    # x / (1 - x) + log(1 - x) is a difference of near equals for small x.
    narrow = jnp.where(jnp.abs(x) < 1e-4, x**2 / 2, x / (1 - x) + jnp.log1p(-x))
    return 0.5 * (narrow + shift)


def _deltas(frame: Frame, given: Given, at: Mapping[str, AtData]) -> dict[str, Array]:
    """How leaving out each point moves the mean of the inducing values: ``(latents, n, m)``."""
    out = {}
    for name, site in frame.read(given)[0].gps.items():
        fitted = frame.guide.unpack(name, given.params)
        prior = posterior.prior(site, fitted)
        q = posterior.inducing_values(site, fitted, prior)
        w = posterior.training_features(site, fitted, prior, site.gp.X).w
        moved = w @ (prior.chol @ q.inverse.mT @ q.inverse).mT  # (p, n, m)
        out[name] = -moved * (at[name].alpha / (1 - at[name].leverage))[..., None]
    return out
