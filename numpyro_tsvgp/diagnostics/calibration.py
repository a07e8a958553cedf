"""How good is the guide? Importance weights against the model, and simulated data."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import xarray as xr
from jax import Array, lax

from numpyro_tsvgp.diagnostics import compat
from numpyro_tsvgp.diagnostics.draws import draw, prior_hyperparameters
from numpyro_tsvgp.diagnostics.labels import shape_of
from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.infer.em.driver import Driver
from numpyro_tsvgp.infer.evidence import evidence_of
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.importance import log_weights, standard_normals
from numpyro_tsvgp.model.likelihood import data_sites, log_prior

__all__ = ["Khat", "psis_khat", "sbc"]


# Sites are made anew at each draw of the hyperparameters: with those of the fit, a guide whose
# sites pin the hyperparameters would vouch for itself.
_KHAT_REFRESH = 3


class Khat(NamedTuple):
    """Pareto k of the guide against its model; print it for a verdict.

    Attributes:
      joint: the Pareto k of all latent values together, GPs and variational hyperparameters.
      hyperparameters: that of the hyperparameters alone, or None where they are points.
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
@full_precision(on_cpu=False)
def psis_khat(
    rng_key: Array,
    fit: Fit,
    *,
    num_samples: int = 1000,
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
      fit: the fit, with its data. The covariance of f at all rows is factorised.
      num_samples: number of draws.

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
      >>> psis_khat(jax.random.key(1), result.fit).joint < 0.7
      True

    References:
      Y. Yao, A. Vehtari, D. Simpson, A. Gelman, *Yes, but did it work? Evaluating variational
      inference*, ICML 2018.
    """
    check_fit("psis_khat(key, result.fit)", fit)
    fit.check_has_all_rows("The Pareto k of the joint posterior")
    fit = fit.of_all_data()
    key_noise, key_hyper = jax.random.split(rng_key)
    latents = fit.guide.latents(fit.read(), fit.params)
    noise = standard_normals(key_noise, num_samples, latents)
    variational = not fit.hyper_guide.is_point
    if variational:
        keys = jax.random.split(key_hyper, num_samples)
        joint, alone = _weights_of_both(fit, keys, noise)
    else:
        joint = _weights(fit, noise)
    return Khat(
        compat.pareto_k(np.asarray(joint)),
        compat.pareto_k(np.asarray(alone)) if variational else None,
        np.asarray(joint),
    )


@jax.jit
@full_precision()
def _weights(fit: Fit, noise: Params) -> Array:
    """Log weights of draws of the GPs, hyperparameters being points."""
    return log_weights(fit, fit.hyper, noise)


@jax.jit
@full_precision()
def _weights_of_both(fit: Fit, keys: Array, noise: Params) -> tuple[Array, Array]:
    """Log weights of draws of everything, and of the hyperparameters with GPs integrated out."""

    def one(inputs: tuple[Array, Params]) -> tuple[Array, Array]:
        key, noise = inputs
        hyper, log_q = fit.hyper_guide.draw(key, fit.params, fit.data)
        prior = log_prior(fit.read(hyper=hyper), fit.structure.above)
        (weight,) = log_weights(fit, hyper, jax.tree.map(lambda x: x[None], noise))
        return weight + prior - log_q, evidence_of(fit, hyper, _KHAT_REFRESH) + prior - log_q

    return lax.map(one, (keys, noise))


@full_precision(on_cpu=False)
def sbc(
    rng_key: Array,
    svi: Driver,
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
    fit = svi.fit(start, *args, **kwargs).of_all_data()
    truth = draw(
        fit,
        fit.data,
        key=key_truth,
        num=num_simulations,
        hyper=prior_hyperparameters(fit, key_prior, num_simulations),
        joint=True,
        kept={},
        of_prior=True,
        predictive=True,
    )
    shape = shape_of(fit, fit.data)
    data = {name: truth.predictive[name] for name in data_sites(shape.trace)}
    latents = dict(truth.gps)
    if not fit.hyper_guide.is_point:
        latents |= truth.hyper
    inject = _by_name(svi.model, list(data)) if to_args is None else to_args

    @jax.jit
    def one(inputs: tuple[Array, Params, Params]) -> dict[str, Array]:
        key, data, latents = inputs
        key_steps, key_draws = jax.random.split(key)
        fit_args, fit_kwargs = inject(data, *args, **kwargs)
        state, _ = lax.scan(
            lambda state, _: svi.update(state, *fit_args, **fit_kwargs),
            dataclasses.replace(start, rng_key=key_steps),
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
    return compat.build({"prior_sbc": group})


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
