r"""Leave-one-out cross-validation and influence, from the sites and without refitting."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, lax

from numpyro_tsvgp.diagnostics import cavities, compat
from numpyro_tsvgp.diagnostics.cavities import AtPoints, Frame
from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.infer.collapse import Collapsed, collapsed_of
from numpyro_tsvgp.infer.em.passes import fits_of_batches
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.model.layout import Layout, LayoutFrame, observed_rows

__all__ = ["influence", "loo"]

# The Pareto tail of importance weights is a fifth of them, and fitted to five at least.
_FEWEST_DRAWS = 25


@blas_threads()
@full_precision(on_cpu=False)
def loo(
    fit: Fit,
    *,
    mcmc: Any = None,
    num_hyper: int = 100,
    refine: int = 0,
    threshold: float = 0.7,
    batches: Any = None,
    out: np.ndarray | None = None,
) -> Any:
    r"""Leave-one-out predictive densities, without a refit and without sampling.

    The posterior without data point i is the posterior with the site of that point taken away. At
    the input of the point it has mean :math:`m_c` and variance :math:`v_c` (its *cavity*), and the
    density of the point is

    .. math::
      \mathrm{elpd}_i = \log \int p(y_i \mid f) \, \mathcal{N}(f;\, m_c, v_c) \, \mathrm{d}f

    in :math:`O(n m^2)` for all n points. A data point is a row of the GPs: everything that is
    observed at it is left out together. Where several data points share a row of a GP (effects of
    groups, ``f[group]``, GPs with different numbers of rows), a data point is an entry of the
    observed sites, and what it alone says about the shared row is taken away. This costs as many
    evaluations of the likelihood as the largest group has points. A likelihood may also be written
    with ``numpyro.factor``, one number for each data point; if the model observes data as well, its
    factors stay in.

    For a Gaussian likelihood of one GP this equals refitting without each point. For other
    likelihoods, and where several GPs meet in a likelihood term, it is approximate: the sites of
    the other points are held, which a refit would move. ``refine`` moves them.

    The sites must have converged: finish a fit with a few E-steps at fixed hyperparameters,
    ``TSVGP(model, guide, None)``, if the last steps still moved them.

    Hyperparameters that are points are held. When they are distributions, from ``hyper_guide``
    or from ``mcmc``, the cavity densities given each draw are combined by Pareto-smoothed
    importance sampling, and the result has a Pareto k for each point.

    Args:
      fit: the fit, with its training data, all of it.
      mcmc: an ``MCMC`` that was run on ``NUTS(collapse(fit))``, whose
        hyperparameters are then used.
      num_hyper: the largest number of hyperparameter draws, where there are draws.
      refine: number of E-steps taken without each point, from its cavity. Two or three are
        close to a refit when the likelihood is log-concave and reads one GP. Where several GPs
        meet in a term the steps are half as long and ten to forty are needed. All points together
        cost n times as much as these E-steps, so this is for small data.
      threshold: leverages :math:`\beta_i s_i` above this are reported. Near one, what is left
        without the point is mostly extrapolation.
      batches: an iterable of the arguments of batches, for data that do not fit in memory; the fit
        then needs no data. Hyperparameters must be points.
      out: with ``batches``, an array of shape ``(3, N)`` such as a memory map, which is filled
        with the log densities without each row, those with it, and the leverages.

    Returns:
      An ArviZ ELPD object as of ``az.loo(..., pointwise=True)``, for ``az.compare``. In addition
      ``result["leverage"]`` holds :math:`\beta_i s_i` of each point, the largest over latent
      functions, and ``result["flagged"]`` whether it exceeds ``threshold``. Where nothing was
      weighted there is no Pareto k, and the leverage takes its place: ``az.plot_khat`` plots it.
      Data points that are masked out are left out.

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
      >>> elpd = loo(result.fit)
      >>> int(elpd["n_data_points"]), bool(elpd["warning"])
      (20, False)

    References:
      V. Adam, P. E. Chang, M. E. Khan, A. Solin, *Dual parameterization of sparse variational
      Gaussian processes*, NeurIPS 2021.

      A. Vehtari, T. Mononen, V. Tolvanen, T. Sivula, O. Winther, *Bayesian leave-one-out
      cross-validation approximations for Gaussian latent variable models*, JMLR 2016.
    """
    check_fit("loo(result.fit)", fit)
    if batches is not None:
        if mcmc is not None or refine:
            raise ValueError(
                "loo over batches takes neither mcmc nor refine, which need all data at once."
            )
        return _summary(*_over_batches(fit, batches, out), threshold, is_drawn=False)
    if mcmc is not None or refine:
        fit.check_has_all_rows("loo with mcmc or refine")
    fit = fit.of_all_data()
    collapsed = None if mcmc is None else collapsed_of(mcmc)
    draws = _hyper_draws(fit, collapsed, mcmc, num_hyper)
    refresh = None if collapsed is None else collapsed.refresh
    layout = Frame.of(fit, fit.hyper).layout

    # Rows that data points share are a part of the program, which is then made anew.
    given = layout.term_group, layout.frame
    if draws is None and layout.shared is None:
        without, density, leverage = _at_point(fit, *given, refine)
    elif draws is None:
        at = jax.jit(lambda fit: densities_at(fit, fit.hyper, layout, refine))
        without, density, leverage = at(fit)
    else:
        if layout.shared is None:
            found = _at_each(fit, draws, *given, refine, refresh)
        else:
            found = jax.jit(lambda fit, draws: _each(fit, draws, layout, refine, refresh))(
                fit, draws
            )
        without, density, leverage = found[0], found[1], found[2].mean(0)
    rows = np.flatnonzero(observed_rows(layout, fit.read()))
    without, density, leverage = (np.asarray(x)[..., rows] for x in (without, density, leverage))
    return _summary(
        without, density, leverage, rows, layout.dim, threshold, is_drawn=draws is not None
    )


@full_precision()
def densities_at(
    fit: Fit, hyper: Params, layout: Layout, refine: int
) -> tuple[Array, Array, Array]:
    """Log densities without each row, those under the posterior itself, and leverages: ``(n,)``."""
    frame = Frame(fit, layout, hyper)
    data = cavities.at_points(frame)
    without = {name: d.without for name, d in data.items()}
    if refine:
        without = cavities.refine(frame, data, refine)
    leverage = jnp.concatenate([d.leverage for d in data.values()]).max(0)
    return *cavities.log_densities(frame, data, without), leverage


def _summary(
    without: np.ndarray,
    density: np.ndarray,
    leverage: np.ndarray,
    rows: np.ndarray,
    dim: str,
    threshold: float,
    *,
    is_drawn: bool,
) -> Any:
    """An ELPD object of the log densities of some rows, with or without a first axis of draws."""

    def named(values: np.ndarray, *dims: str) -> xr.DataArray:
        return xr.DataArray(values, dims=(*dims, dim), coords={dim: rows})

    flagged = named(leverage) > threshold
    extra = {"leverage": named(leverage), "flagged": flagged}
    warning = bool(flagged.any())
    if warning:
        worst = rows[np.argsort(-leverage)][: min(int(flagged.sum()), 5)]
        warnings.warn(
            f"{int(flagged.sum())} of {len(rows)} points carry more than {threshold:.0%} of the "
            f"posterior precision at their own inputs (rows {', '.join(map(str, worst))}"
            f"{', ...' if int(flagged.sum()) > 5 else ''}). Their leave-one-out densities are "
            "extrapolations. Unless the likelihood is Gaussian, check them with refine=3.",
            stacklevel=stack_level(),
        )
    if is_drawn:
        log_predictive = named(without[None], "chain", "draw")
        within = named(density[None], "chain", "draw")
        return compat.psis_loo(log_predictive, within, warning=warning, extra=extra)
    p = float(named(density).sum() - named(without).sum())
    return compat.elpd(
        named(without),
        p,
        warning=warning,
        leverage=named(leverage),
        threshold=threshold,
        extra=extra,
    )


@partial(jax.jit, static_argnames=("frame", "refine"))
def _at_point(
    fit: Fit, term_group: Any, frame: LayoutFrame, refine: int
) -> tuple[Array, Array, Array]:
    return densities_at(fit, fit.hyper, frame.with_rows(term_group), refine)


@partial(jax.jit, static_argnames=("frame", "refine", "refresh"))
def _at_each(
    fit: Fit, draws: Params, term_group: Any, frame: LayoutFrame, refine: int, refresh: int | None
) -> tuple[Array, Array, Array]:
    return _each(fit, draws, frame.with_rows(term_group), refine, refresh)


def _each(
    fit: Fit, draws: Params, layout: Layout, refine: int, refresh: int | None
) -> tuple[Array, Array, Array]:
    def one(hyper: Params) -> tuple[Array, Array, Array]:
        here = fit if refresh is None else fit.refreshed(hyper, refresh)
        return densities_at(here, hyper, layout, refine)

    return lax.map(one, draws)


def _over_batches(
    fit: Fit, batches: Any, out: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, str]:
    """Log densities, leverages and numbers of the rows of all batches, and the name of the axis."""
    parts, rows, start, dim = [], [], 0, ""
    for one in fits_of_batches(fit, batches):
        if not one.hyper_guide.is_point:
            raise ValueError(
                "loo over batches needs hyperparameters that are points, and the hyper_guide of "
                "this fit makes them distributions. Use loo on a part of the data, fit.with_data."
            )
        layout = Frame.of(one, one.hyper).layout
        if layout.shared is not None:
            raise ValueError(
                "loo over batches needs GPs with a row for each data point, and here data points "
                "share rows of a GP. Use loo on a part of the data, fit.with_data."
            )
        found = _at_point(one, layout.term_group, layout.frame, 0)
        observed = observed_rows(layout, one.read())
        here = start + np.flatnonzero(observed)
        part = np.stack([np.asarray(values) for values in found])
        if out is None:
            parts.append(part[:, observed])
        else:
            out[:, start : start + layout.rows] = part
        rows.append(here)
        start, dim = start + layout.rows, layout.dim
    if not rows:
        raise ValueError("batches is empty: there is nothing to leave out.")
    everything = np.concatenate(rows)
    if out is None:
        values = np.concatenate(parts, -1)
    else:
        values = out[:, :start] if len(everything) == start else out[:, everything]
    return values[0], values[1], values[2], everything, dim


def _hyper_draws(
    fit: Fit, collapsed: Collapsed | None, mcmc: Any, num: int
) -> dict[str, Array] | None:
    """Draws of the hyperparameters, evenly spaced ones of an MCMC; None if they are points."""
    if collapsed is not None:
        samples = collapsed.hyperparameters_among(mcmc.get_samples())
        size = len(next(iter(samples.values())))
        _check_number(min(num, size))
        keep = np.unique(np.linspace(0, size - 1, min(num, size)).round().astype(int))
        return {name: value[keep] for name, value in samples.items()}
    hyper_guide = fit.hyper_guide
    if hyper_guide.is_point:
        return None
    _check_number(num)
    keys = jax.random.split(jax.random.key(0), num)
    return lax.map(lambda key: hyper_guide.draw(key, fit.params, fit.data)[0], keys)


def _check_number(draws: int) -> None:
    if draws < _FEWEST_DRAWS:
        raise ValueError(
            f"Weighting draws of the hyperparameters needs {_FEWEST_DRAWS} of them at least, for a "
            f"tail to look at; there are {draws}. Draw more, or raise num_hyper."
        )


@blas_threads()
@full_precision(on_cpu=False)
def influence(fit: Fit, *, delta: bool = False, batches: Any = None) -> Any:
    r"""How much each data point moves the posterior, and the dual parameters themselves.

    Leaving out point i moves the mean of the inducing values by
    :math:`\delta_i = -S a_i \alpha_i / (1 - \beta_i s_i)` and the posterior by

    .. math::
      \mathrm{KL}(q_{-i} \,\|\, q) = \tfrac12 \Big[
      \frac{\beta_i s_i}{1 - \beta_i s_i} + \log(1 - \beta_i s_i)
      + \frac{\alpha_i^2 s_i}{(1 - \beta_i s_i)^2} \Big],

    summed over latent functions. Points with the largest divergence are worth a second look:
    outliers, label errors, and points that alone inform a region.

    Args:
      fit: the fit, with its training data, all of it. Variational hyperparameters are held at
        their median.
      delta: whether to return the vectors :math:`\delta_i` too, n times m numbers.
      batches: an iterable of the arguments of batches, for data that do not fit in memory; the fit
        then needs no data.

    Returns:
      A data set along the rows of the data with ``influence``, the divergence in nats. For each
      GP site f there are ``f_alpha`` and ``f_beta``, the dual parameters of each point,
      ``f_leverage`` (:math:`\beta_i s_i`), ``f_shift``, what the point adds to the posterior mean
      at its own input, and with ``delta`` also ``f_delta``. Rows that are masked out have zeros.
      With ``batches``, an iterator of such data sets, one for each batch.

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
      >>> int(influence(result.fit).influence.argmax("data"))
      7
    """
    check_fit("influence(result.fit)", fit)
    if batches is not None:
        return _influence_over(fit, batches, delta)
    return _influence_of(fit.of_all_data(), delta, 0)


def _influence_over(fit: Fit, batches: Any, delta: bool) -> Iterator[xr.Dataset]:
    start = 0
    for one in fits_of_batches(fit, batches):
        with blas_threads():
            found = _influence_of(one, delta, start)
        yield found
        start += found.influence.size


@full_precision()
def _influences(
    fit: Fit, delta: bool, layout: Layout | None
) -> tuple[dict[str, AtPoints], Array, dict[str, Array]]:
    frame = Frame(fit, layout, fit.hyper)  # type: ignore[arg-type]  # sites of rows need no layout
    at = cavities.at_points(frame)
    total = jnp.concatenate([_divergence(d) for d in at.values()]).sum(0)
    return at, total, _deltas(frame, at) if delta else {}


@partial(jax.jit, static_argnums=1)
def _points(fit: Fit, delta: bool) -> tuple[dict[str, AtPoints], Array, dict[str, Array]]:
    return _influences(fit, delta, None)


@full_precision(on_cpu=False)
def _influence_of(fit: Fit, delta: bool, start: int) -> xr.Dataset:
    """The influence of the rows of one call, the first of which has the number ``start``."""
    layout = Frame.of(fit, fit.hyper).layout
    if layout.shared is None:
        at, total, moved = _points(fit, delta)
    else:
        at, total, moved = jax.jit(lambda fit: _influences(fit, delta, layout))(fit)
    reading = fit.read()
    data: dict[str, Any] = {"influence": (layout.dim, np.asarray(total))}
    for name, d in at.items():
        dims = gp_batch_dims(reading.trace[name])
        batch_shape = reading.gps[name].batch_shape
        parts = {"alpha": d.alpha, "beta": d.beta, "leverage": d.leverage, "shift": d.shift}
        for what, value in parts.items():
            data[f"{name}_{what}"] = (
                (*dims, layout.dim),
                np.asarray(value).reshape(*batch_shape, -1),
            )
        if delta:
            value = moved[name].reshape(*batch_shape, *moved[name].shape[1:])
            dims = (*dims, layout.dim, f"{name}_inducing")
            data[f"{name}_delta"] = (dims, np.asarray(value))
    return xr.Dataset(data, coords={layout.dim: start + np.arange(layout.rows)})


def gp_batch_dims(site: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the axes that plates around a GP make."""
    shape = site["fn"].batch_shape
    names = {frame.dim: frame.name for frame in site["cond_indep_stack"]}
    return tuple(names.get(i - len(shape), f"{site['name']}_dim_{i}") for i in range(len(shape)))


def _divergence(d: AtPoints) -> Array:
    r"""The divergence of the posterior without a point from the one with it: ``(latents, n)``."""
    x = d.leverage
    shift = d.alpha**2 * d.explained / (1 - x) ** 2
    # x / (1 - x) + log(1 - x) is a difference of near equals for small x.
    narrow = jnp.where(jnp.abs(x) < 1e-4, x**2 / 2, x / (1 - x) + jnp.log1p(-x))
    return 0.5 * (narrow + shift)


def _deltas(frame: Frame, at: Mapping[str, AtPoints]) -> dict[str, Array]:
    """How leaving out each point moves the mean of the inducing values: ``(functions, n, m)``."""
    out, fit = {}, frame.fit
    latents = fit.guide.latents(fit.read(hyper=frame.hyper), fit.params)
    for name, (process, approximation) in latents.items():
        answer = approximation.responses(process)
        if frame.layout is not None and frame.layout.shared is not None:
            rows = frame.layout.shared.rows[name]
            answer = answer[np.arange(len(rows))[:, None], rows]
        out[name] = -answer * (at[name].alpha / (1 - at[name].leverage))[..., None]
    return out
