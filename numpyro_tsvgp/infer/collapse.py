"""The posterior of the hyperparameters as a NumPyro model, and the GPs given draws of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax
from numpyro import handlers

from numpyro_tsvgp import posterior
from numpyro_tsvgp.bound import collapsed_model, refresh_sites
from numpyro_tsvgp.expectations import Marginals, Rule
from numpyro_tsvgp.guide import AutoDualGaussian, Params
from numpyro_tsvgp.importance import log_weights
from numpyro_tsvgp.linalg import blas_threads
from numpyro_tsvgp.pointwise import whole
from numpyro_tsvgp.simulation import Noise, standard_normals

__all__ = ["Collapsed", "as_arguments", "collapse", "collapsed_of", "hyperparameters_among"]


def collapse(
    model: Callable[..., Any],
    guide: AutoDualGaussian,
    params: Params,
    *,
    quadrature: Rule | None = None,
    refresh: int = 2,
) -> Collapsed:
    r"""The NumPyro model of the hyperparameters alone, GPs integrated out.

    .. math::
      \log p(\theta \mid y) \approx \log p(\theta) + \mathcal{L}(\lambda(\theta), \theta)
      + \text{const}

    It is an ordinary NumPyro model: NUTS on it gives a hyperparameter posterior, any autoguide
    fits it, and its MAP is the M-step. Hyperparameters that the model samples stay sampled;
    ``numpyro.param`` values and the inducing inputs are held at ``params``. Plates that subsample
    get all of their data.

    On CPU run the sampler under :func:`~numpyro_tsvgp.linalg.blas_threads`: on a busy machine its
    many small factorisations are then several times faster.

    Args:
      model: the NumPyro model.
      guide: the guide that was fitted to it.
      params: fitted parameters.
      quadrature: quadrature rule, or None for the default.
      refresh: sites made at one value of the hyperparameters are only locally right. This many
        site updates at rate 1 inside the density, differentiated through, make them anew at each
        value. One is exact for a Gaussian likelihood, and with 0 the fitted sites are held. For
        f the updates matter more than for the density itself.

    Returns:
      A NumPyro model with the same arguments, which also predicts; see :class:`Collapsed`.

    Raises:
      ValueError: if the model samples no hyperparameters, or the guide is not the model's.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
      >>> from numpyro.infer import MCMC, NUTS
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, collapse, kernels
      >>> from numpyro_tsvgp.linalg import blas_threads
      >>> def model(X, y=None):
      ...     scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
      ...     f = numpyro.sample("f", GP(kernels.RBF(scale), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 15)
      >>> y = jnp.sin(6.0 * X)
      >>> guide = AutoDualGaussian(model, inducing=X[::3], learn_inducing=False)
      >>> result = TSVGP(model, guide, optax.adam(0.1)).run(
      ...     jax.random.key(0), 20, X, y, progress_bar=False
      ... )
      >>> collapsed = collapse(model, guide, result.params)
      >>> mcmc = MCMC(NUTS(collapsed), num_warmup=20, num_samples=10, progress_bar=False)
      >>> with blas_threads():
      ...     mcmc.run(jax.random.key(1), X, y)
      >>> mcmc.get_samples()["scale"].shape
      (10,)
      >>> q = collapsed.marginals(mcmc.get_samples(), (X, y), jnp.linspace(0.0, 2.0, 7))["f"]
      >>> q.mean.shape, q.cdf(jnp.zeros(7)).shape
      ((7,), (7,))
    """
    if model is not guide.model:
        raise ValueError("collapse needs the model that the guide was made for.")
    if not guide.structure.hyperparameters:
        raise ValueError(
            "The model samples no hyperparameters, so there is no posterior of them. Give those of "
            "interest a prior: numpyro.sample('lengthscale', dist.LogNormal(0.0, 1.0)) instead of "
            "numpyro.param('lengthscale', ...)."
        )
    missing = [name for name in guide.structure.gps if guide._name(name, "inducing") not in params]
    if missing:
        raise ValueError(
            f"params has no sites of {missing}: pass the params of the fit, as in result.params."
        )
    if refresh < 0 or refresh != int(refresh):
        raise ValueError(f"refresh is a number of site updates, 0 or more; got {refresh!r}.")
    return Collapsed(guide, dict(params), quadrature, int(refresh))


class Collapsed:
    """The model that :func:`collapse` makes, and the GPs given draws of its hyperparameters.

    Attributes:
      guide: the fitted guide.
      params: fitted parameters.
      quadrature: the quadrature rule, or None for the default.
      refresh: number of site updates inside the density.
    """

    def __init__(
        self, guide: AutoDualGaussian, params: Params, quadrature: Rule | None, refresh: int
    ) -> None:
        self.guide = guide
        self.params = params
        self.quadrature = quadrature
        self.refresh = refresh

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        density = collapsed_model(
            whole(self.guide, args, kwargs), self.quadrature, refresh=self.refresh
        )
        handlers.substitute(density, data=self.params)(*args, **kwargs)

    def marginals(
        self, samples: Mapping[str, Any], data: Any, *args: Any, **kwargs: Any
    ) -> dict[str, dist.MixtureSameFamily]:
        """Posterior marginals of each GP site: mixtures of one Gaussian a draw.

        Args:
          samples: draws of the hyperparameters, as of ``mcmc.get_samples()``. Thin them to save
            time and memory, which grow with their number.
          data: the arguments that the sampler was run with, as a tuple, or a dict of keyword ones.
          *args: arguments of the model to predict at; those in ``data`` if there are none.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from GP site to a NumPyro distribution with ``mean``, ``variance``, ``cdf``,
          ``log_prob`` and ``sample``, its batch shape that of the site.
        """
        found = self._map(_marginals, samples, data, args, kwargs)

        def mixture(q: Marginals) -> dist.MixtureSameFamily:
            mean, variance = (jnp.moveaxis(x, 0, -1) for x in q)
            count = mean.shape[-1]
            weights = jnp.full((count,), 1.0 / count, mean.dtype)
            return dist.MixtureSameFamily(
                dist.Categorical(weights), dist.Normal(mean, jnp.sqrt(variance))
            )

        return {name: mixture(q) for name, q in found.items()}

    def sample_posterior(
        self, rng_key: Array, samples: Mapping[str, Any], data: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Array]:
        """One joint draw of each GP site for each draw of the hyperparameters.

        Args:
          rng_key: random key.
          samples: draws of the hyperparameters, as of ``mcmc.get_samples()``.
          data: the arguments that the sampler was run with, as a tuple, or a dict of keyword ones.
          *args: arguments of the model to predict at; those in ``data`` if there are none.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from GP site to draws, with a leading axis as long as that of ``samples``.
        """
        count = len(next(iter(samples.values())))
        keys = jax.random.split(rng_key, count)
        return self._map(_draw, samples, data, args, kwargs, keys)

    def log_weights(
        self,
        rng_key: Array,
        samples: Mapping[str, Any],
        *args: Any,
        num_draws: int = 64,
        **kwargs: Any,
    ) -> Array:
        r"""Importance weights of hyperparameter draws, from the bound to the evidence itself.

        .. math::
          \log w(\theta) = \log \frac1D \sum_{d=1}^D
          \frac{p(y, u_d \mid \theta)}{q(u_d \mid \theta)} - \mathcal{L}(\theta)

        Where the bound is not equally tight for all hyperparameters, weighted draws are closer to
        the posterior. Their spread tells whether that matters: a standard deviation of 0.1 does
        not. The same standard normal numbers serve every draw, so that their noise cancels.

        Args:
          rng_key: random key.
          samples: draws of the hyperparameters, as of ``mcmc.get_samples()``.
          *args: the arguments that the sampler was run with.
          num_draws: D, the number of draws of the GPs for each draw of the hyperparameters.
          **kwargs: keyword arguments that the sampler was run with.

        Returns:
          Log weights, normalised to sum to one as weights. To use them, resample:
          ``jax.random.categorical(key, log_weights, shape=(1000,))`` are indices of draws.
        """
        guide = whole(self.guide, args, kwargs)
        hyper = _as_arrays(hyperparameters_among(guide, samples))
        first = {name: value[0] for name, value in hyper.items()}
        gps = guide.read(self.params, args, kwargs, first).gps
        noise = standard_normals(rng_key, num_draws, guide, self.params, gps)
        settings = (guide, self.refresh, self.quadrature)
        with blas_threads():
            found = _log_weights(settings, self.params, hyper, (args, dict(kwargs)), noise)
            jax.block_until_ready(found)
        return found - jax.nn.logsumexp(found)

    def _map(
        self,
        one: Callable[..., Any],
        samples: Mapping[str, Any],
        data: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *extra: Any,
    ) -> Any:
        """Applies a function to the GP sites given each draw of the hyperparameters."""
        trained = as_arguments(data)
        there = (args, dict(kwargs)) if args or kwargs else trained
        guide = whole(self.guide, *trained)
        hyper = _as_arrays(hyperparameters_among(guide, samples))
        settings = (one, guide, self.refresh, self.quadrature)
        with blas_threads():
            found = _at_each(settings, self.params, hyper, trained, there, extra)
            return jax.block_until_ready(found)


@partial(jax.jit, static_argnums=0)
def _at_each(
    settings: tuple[Callable[..., Any], AutoDualGaussian, int, Rule | None],
    params: Params,
    hyper: Params,
    data: tuple[tuple[Any, ...], dict[str, Any]],
    there: tuple[tuple[Any, ...], dict[str, Any]],
    extra: tuple[Any, ...],
) -> Any:
    one, guide, refresh, rule = settings

    def given(inputs: tuple[Params, tuple[Any, ...]]) -> dict[str, Any]:
        hyper, extra = inputs
        here = refresh_sites(guide, params, hyper, *data, steps=refresh, rule=rule)
        gps = guide.read(here, *there, hyper).gps
        return {
            name: one(i, site, guide.unpack(name, here), *extra)
            for i, (name, site) in enumerate(gps.items())
        }

    return lax.map(given, (hyper, extra))


@partial(jax.jit, static_argnums=0)
def _log_weights(
    settings: tuple[AutoDualGaussian, int, Rule | None],
    params: Params,
    hyper: Params,
    data: tuple[tuple[Any, ...], dict[str, Any]],
    noise: Mapping[str, Noise],
) -> Array:
    guide, refresh, rule = settings
    bound = handlers.seed(collapsed_model(guide, rule), 0)

    def one(hyper: Params) -> Array:
        here = refresh_sites(guide, params, hyper, *data, steps=refresh, rule=rule)
        weights = log_weights(guide, here, hyper, *data, noise)
        given = handlers.substitute(bound, data={**here, **hyper})
        trace = handlers.trace(given).get_trace(*data[0], **data[1])
        return jax.nn.logsumexp(weights) - trace["bound"]["fn"].log_factor

    return lax.map(one, hyper)


def _as_arrays(values: Mapping[str, Any]) -> dict[str, Array]:
    return {name: jnp.asarray(value) for name, value in values.items()}


def _marginals(_: int, site: Any, fitted: posterior.Fitted) -> Marginals:
    return posterior.marginals(site, fitted)


def _draw(i: int, site: Any, fitted: posterior.Fitted, key: Array) -> Array:
    return posterior.joint(site, fitted).sample(jax.random.fold_in(key, i))


def as_arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a model given as a tuple, as a dict of keyword ones, or as a single one."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return (given if isinstance(given, tuple) else (given,)), {}


def collapsed_of(mcmc: Any) -> Collapsed | None:
    """The collapsed model that an ``MCMC`` samples, perhaps through handlers around it."""
    model = getattr(getattr(mcmc, "sampler", None), "model", None)
    while model is not None and not isinstance(model, Collapsed):
        model = getattr(model, "fn", None)
    return model


def hyperparameters_among(guide: AutoDualGaussian, samples: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters among the draws of an MCMC on the collapsed model."""
    names = guide.structure.hyperparameters
    missing = [name for name in names if name not in samples]
    if missing or not names:
        raise ValueError(
            f"The MCMC has draws of {sorted(samples)}, but the hyperparameters that the model "
            f"samples are {names}. Run it on NUTS(collapse(model, guide, params))."
        )
    return {name: samples[name] for name in names}
