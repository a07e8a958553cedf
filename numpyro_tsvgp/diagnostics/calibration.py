"""How good is the guide? Importance weights against the model, and simulated data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array, lax
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_tsvgp import arviz_versions
from numpyro_tsvgp.bound import collapsed_model
from numpyro_tsvgp.guide import AutoDualGaussian, Params
from numpyro_tsvgp.importance import log_weights
from numpyro_tsvgp.linalg import blas_threads
from numpyro_tsvgp.naming import shape_of
from numpyro_tsvgp.pointwise import data_sites, whole
from numpyro_tsvgp.simulation import draw, prior_hyperparameters, standard_normals
from numpyro_tsvgp.svi import TSVGP

__all__ = ["Khat", "psis_khat", "sbc"]


class Khat(NamedTuple):
    """Pareto k of the guide against its model; print it for a verdict.

    Attributes:
      joint: of all latent values together, the GPs and the variational hyperparameters.
      hyperparameters: of the hyperparameters alone, or None where they are points.
      log_weights: logarithms of the importance weights behind ``joint``, one a draw.
    """

    joint: float
    hyperparameters: float | None
    log_weights: np.ndarray

    def __str__(self) -> str:
        lines = [f"Pareto k of the joint posterior: {self.joint:.2f} ({_verdict(self.joint)})"]
        if self.hyperparameters is None:
            lines.append("Hyperparameters are points, which have no Pareto k.")
        else:
            k = self.hyperparameters
            lines.append(f"Pareto k of the hyperparameters: {k:.2f} ({_verdict(k)})")
        return "\n".join(lines)


def _verdict(k: float) -> str:
    for limit, text in ((0.5, "good"), (0.7, "ok"), (1.0, "bad")):
        if k <= limit:
            return text
    return "very bad"


@blas_threads()
def psis_khat(
    rng_key: Array,
    guide: AutoDualGaussian,
    params: Params,
    *args: Any,
    num_samples: int = 1000,
    **kwargs: Any,
) -> Khat:
    r"""The Pareto k of importance weights between the guide and the model's joint density.

    .. math::
      \log w = \log p(y \mid f, \theta) + \log \frac{p(u \mid \theta)}{q(u \mid \theta)}
      + \log \frac{p(\theta)}{q(\theta)}

    at draws from the guide; :math:`p(f \mid u, \theta)` is in both and cancels. A small k says
    that the guide covers the posterior, so that expectations under it can be trusted and
    importance sampling would correct what is left: up to 0.5 good, up to 0.7 ok, above bad, and
    above 1 very bad. It is strict, and stricter the more latent values there are: with many data
    points a k of the joint posterior above 0.7 is common while every marginal is fine.

    For the hyperparameters the GPs are integrated out, with the bound in place of the evidence.

    Args:
      rng_key: random key.
      guide: the fitted guide.
      params: fitted parameters.
      *args: arguments of the model, with the data. The covariance of f at all rows is factorised.
      num_samples: number of draws.
      **kwargs: keyword arguments of the model.

    Returns:
      The Pareto k, whole and for the hyperparameters.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, psis_khat
      >>> def model(X, y=None):
      ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 20)
      >>> y = (X > 0.5).astype(int)
      >>> guide = AutoDualGaussian(model, inducing=X[::2])
      >>> svi = TSVGP(model, guide, None)
      >>> result = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
      >>> psis_khat(jax.random.key(1), guide, result.params, X, y).joint < 0.7
      True

    References:
      Y. Yao, A. Vehtari, D. Simpson, A. Gelman, *Yes, but did it work? Evaluating variational
      inference*, ICML 2018.
    """
    guide = whole(guide, args, kwargs)
    variational = not guide.has_point_hyperparameters
    hyper = {} if guide.hyper_guide is None else dict(guide.hyper_guide.median(params))
    gps = guide.read(params, args, kwargs, hyper).gps

    prior_model = partial(guide._prior_of_hyperparameters, guide.structure)
    collapsed = collapsed_model(guide)

    def one(inputs: tuple[Any, Array, Params]) -> tuple[Array, Array]:
        (params, args, kwargs), key, noise = inputs
        hyper, log_q = _draw_hyperparameters(guide, params, args, kwargs, key)
        values = {**params, **hyper}
        log_p, _ = log_density(handlers.seed(prior_model, 0), args, kwargs, values)
        log_evidence, _ = log_density(handlers.seed(collapsed, 0), args, kwargs, values)
        alone = jax.tree.map(lambda x: x[None], noise)
        (weight,) = log_weights(guide, params, hyper, args, kwargs, alone)
        return weight + log_p - log_q, log_evidence - log_q

    @jax.jit
    def run(given: Any, hyper: Params, keys: Array, noise: Params) -> tuple[Array, Array]:
        if variational:
            return lax.map(lambda x: one((given, *x)), (keys, noise))
        params, args, kwargs = given
        return log_weights(guide, params, hyper, args, kwargs, noise), jnp.zeros(())

    key_noise, key_hyper = jax.random.split(rng_key)
    noise = standard_normals(key_noise, num_samples, guide, params, gps)
    keys = jax.random.split(key_hyper, num_samples)
    whole_weights, hyper_weights = run((dict(params), args, dict(kwargs)), hyper, keys, noise)
    return Khat(
        arviz_versions.pareto_k(np.asarray(whole_weights)),
        arviz_versions.pareto_k(np.asarray(hyper_weights)) if variational else None,
        np.asarray(whole_weights),
    )


def _draw_hyperparameters(
    guide: AutoDualGaussian,
    params: Params,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    key: Array,
) -> tuple[dict[str, Array], Array]:
    """One draw of variational hyperparameters and its log density under their guide."""
    with handlers.block(), handlers.trace() as trace, handlers.seed(rng_seed=key):
        handlers.substitute(guide.hyper_guide, data=dict(params))(*args, **kwargs)
    total = jnp.zeros(())
    for site in trace.values():
        if site["type"] == "sample":  # with those of the autoguide itself
            scale = 1.0 if site["scale"] is None else site["scale"]
            total = total + jnp.sum(scale * site["fn"].log_prob(site["value"]))
    return {name: trace[name]["value"] for name in guide.structure.hyperparameters}, total


def sbc(
    rng_key: Array,
    svi: TSVGP,
    *args: Any,
    num_simulations: int = 100,
    num_steps: int = 100,
    num_samples: int = 100,
    to_args: Callable[..., tuple[tuple[Any, ...], Mapping[str, Any]]] | None = None,
    **kwargs: Any,
) -> Any:
    r"""Simulation-based calibration: does the fit recover what made the data?

    Latent values are drawn from the prior and data from them, each data set is fitted, and the
    place of every true value among draws from its fit is recorded,

    .. math:: \mathrm{PIT} = \frac{\#\{\text{draws} < \text{truth}\} + U}{\text{draws} + 1},
      \qquad U \sim \mathcal{U}(0, 1).

    If posteriors are right, these are uniform. NumPyro's ``vsbc_diagnostic`` is the same idea for
    ``SVI``; this one runs the steps of :class:`~numpyro_tsvgp.TSVGP`.

    Values of ``numpyro.param`` are those that the fit starts from. Pass ``optim=None`` to the
    ``TSVGP`` to look at the posterior of the GPs alone.

    Args:
      rng_key: random key.
      svi: the driver of the fits.
      *args: arguments of the model, with data of the right shape; their values do not matter.
      num_simulations: number of data sets.
      num_steps: number of updates in each fit.
      num_samples: number of draws from each fit.
      to_args: a function ``to_args(data, *args, **kwargs)`` that puts simulated data, a dict from
        observed site to values, into the arguments and returns ``(args, kwargs)``. By default
        arguments with the names of observed sites are replaced.
      **kwargs: keyword arguments of the model.

    Returns:
      An ArviZ object with the group ``prior_sbc``, one draw a simulation, for
      ``az.plot_ecdf_pit`` (ArviZ 1.x). Hyperparameters that are points are left out.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, sbc
      >>> def model(X, y=None):
      ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 5)
      >>> svi = TSVGP(model, AutoDualGaussian(model, inducing=X), None, site_lr=1.0)
      >>> pit = sbc(jax.random.key(0), svi, X, y=jnp.zeros(5), num_simulations=20, num_steps=1)
      >>> pit.prior_sbc["f"].shape
      (1, 20, 5)

    References:
      S. Talts, M. Betancourt, D. Simpson, A. Vehtari, A. Gelman, *Validating Bayesian inference
      algorithms with simulation-based calibration*, 2018.
    """
    key_init, key_prior, key_truth, key_fit, key_ties = jax.random.split(rng_key, 5)
    start = svi.init(key_init, *args, **kwargs)
    params = svi.get_params(start)
    guide = whole(svi.guide, args, kwargs)
    truth = draw(
        guide,
        params,
        args,
        kwargs,
        key=key_truth,
        num=num_simulations,
        hyper=prior_hyperparameters(guide, params, args, kwargs, key_prior, num_simulations),
        joint=True,
        kept={},
        of_prior=True,
        predictive=True,
    )
    shape = shape_of(guide, params, args, kwargs, None)
    data = {name: truth.predictive[name] for name in data_sites(shape.trace)}
    latents = dict(truth.gps)
    if not guide.has_point_hyperparameters:
        latents |= truth.hyper
    inject = _by_name(svi.model, list(data)) if to_args is None else to_args

    @jax.jit
    def one(inputs: tuple[Array, Params, Params]) -> dict[str, Array]:
        key, data, latents = inputs
        key_steps, key_draws = jax.random.split(key)
        fit_args, fit_kwargs = inject(data, *args, **kwargs)
        state, _ = lax.scan(
            lambda state, _: svi.update(state, *fit_args, **fit_kwargs),
            start._replace(rng_key=key_steps),
            length=num_steps,
        )
        draws = svi.guide.sample_posterior(
            key_draws, svi.get_params(state), *fit_args, sample_shape=(num_samples,), **fit_kwargs
        )
        return {name: (draws[name] < value).sum(0) for name, value in latents.items()}

    ranks = lax.map(one, (jax.random.split(key_fit, num_simulations), data, latents))
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key_ties)).ravel().tolist())
    pit = {k: (v + rng.uniform(size=v.shape)) / (num_samples + 1) for k, v in ranks.items()}
    group: xr.Dataset = shape.named(1)(pit)
    return arviz_versions.build({"prior_sbc": group})


def _by_name(model: Callable[..., Any], observed: list[str]) -> Callable[..., Any]:
    """Puts data into the arguments of a model that have the names of its observed sites."""
    signature = inspect.signature(model)
    missing = [name for name in observed if name not in signature.parameters]
    if missing:
        raise ValueError(
            f"The model has no arguments with the names of its observed sites {missing}, so it is "
            "not clear where simulated data belong. Pass to_args, for example "
            "to_args=lambda data, X, labels: ((X, data['y']), {})."
        )

    def inject(data: Params, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(data)
        return bound.args, bound.kwargs

    return inject
