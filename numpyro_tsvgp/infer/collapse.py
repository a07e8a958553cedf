"""The posterior of the hyperparameters as a NumPyro model, and the GPs given draws of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, lax
from numpyro.primitives import Messenger

from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.gaussian.quadrature import Marginals
from numpyro_tsvgp.infer.em.checks import check_rows
from numpyro_tsvgp.infer.evidence import evidence_of
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.guides.prediction import joint_of, marginals_of
from numpyro_tsvgp.infer.importance import log_weights, standard_normals
from numpyro_tsvgp.infer.standing import warn_of_doubts
from numpyro_tsvgp.infer.steps.objective import Objective
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import Message, read

__all__ = ["Collapsed", "collapse", "collapsed_of"]


@full_precision(on_cpu=False)
def collapse(fit: Fit, *, refresh: int = 2, objective: Objective | None = None) -> Collapsed:
    r"""The NumPyro model of the hyperparameters alone, GPs integrated out.

    .. math::
      \log p(\theta \mid y) \approx \log p(\theta) + \mathcal{L}(\lambda(\theta), \theta)
      + \text{const}

    It is an ordinary NumPyro model: NUTS on it gives a hyperparameter posterior, any autoguide
    fits it, and its MAP is the M-step. Hyperparameters that the model samples stay sampled;
    ``numpyro.param`` values and the inducing inputs are held at those of the fit. Plates that
    subsample get all of their data.

    On CPU run the sampler under :func:`~numpyro_tsvgp.gaussian.linalg.blas_threads`: on a busy
    machine its many small factorisations are then several times faster.

    Args:
      fit: the fit.
      refresh: number of site updates, at rate 1, at each value of the hyperparameters. The sites of
        the fit were made at one value and are only approximately right at others, so the density
        makes them anew. One update is exact for a Gaussian likelihood (with the default site rule);
        with 0 the fitted sites are held. For f the updates matter more than for the density itself.
      objective: what stands in for the log evidence; that of the fit by default.

    Returns:
      A NumPyro model with the same arguments, which also predicts; see :class:`Collapsed`.

    Raises:
      ValueError: if the model samples no hyperparameters.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
      >>> from numpyro.infer import MCMC, NUTS
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, collapse, kernels
      >>> from numpyro_tsvgp.gaussian.linalg import blas_threads
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
      >>> collapsed = collapse(result.fit)
      >>> mcmc = MCMC(NUTS(collapsed), num_warmup=20, num_samples=10, progress_bar=False)
      >>> with blas_threads():
      ...     mcmc.run(jax.random.key(1), X, y)
      >>> mcmc.get_samples()["scale"].shape
      (10,)
      >>> q = collapsed.marginals(mcmc.get_samples(), jnp.linspace(0.0, 2.0, 7))["f"]
      >>> q.mean.shape, q.cdf(jnp.zeros(7)).shape
      ((7,), (7,))
    """
    check_fit("collapse(result.fit)", fit)
    if not fit.structure.hyperparameters:
        raise ValueError(
            "The model samples no hyperparameters, so there is no posterior of them. Give those of "
            "interest a prior: numpyro.sample('lengthscale', dist.LogNormal(0.0, 1.0)) instead of "
            "numpyro.param('lengthscale', ...)."
        )
    if refresh < 0 or refresh != int(refresh):
        raise ValueError(f"refresh is a number of site updates, 0 or more; got {refresh!r}.")
    fit.check_has_all_rows("The posterior of hyperparameters")
    fit = fit.of_all_data()
    if objective is not None:
        fit = dataclasses.replace(fit, objective=objective)
        check_rows(fit.rule, objective, fit.model, fit.structure, fit.data)
        why = objective.refuses(fit.model, fit.structure, fit.read(), fit.data)
        if why is not None:
            raise ValueError(f"The objective {objective!r} is not for this model: {why}.")
    return Collapsed(fit, int(refresh))


class _WithoutDensity(Messenger):
    """Hides the density of latent variables below GPs, which is part of the objective."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and msg["name"] in self.names:
            msg["fn"] = msg["fn"].mask(False)


class Collapsed:
    """The model that :func:`collapse` makes, and the GPs given draws of its hyperparameters.

    Attributes:
      fit: the fit.
      refresh: number of site updates inside the density.
    """

    def __init__(self, fit: Fit, refresh: int) -> None:
        self.fit = fit
        self.refresh = refresh

    @full_precision()
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        fit = self.fit
        call = Call(args, kwargs, whole=True) if args or kwargs else fit.data
        structure = fit.structure
        before_gps = True

        def expose(site: Message) -> bool:
            # A deterministic site can only be shown while it cannot depend on a GP.
            nonlocal before_gps
            before_gps = before_gps and site.get("name") not in structure.gps
            if site["type"] == "deterministic":
                return before_gps
            return site["type"] != "param" and structure.is_hyper_or_frame(site)

        with _WithoutDensity(structure.below):
            reading = read(fit.model, call, values=fit.params, expose=expose)
        # Of the trace: under a reparameterization they are no longer sampled but computed.
        hyper = {name: reading.trace[name]["value"] for name in structure.hyperparameters}
        here = dataclasses.replace(fit, call=call)
        numpyro.factor("bound", evidence_of(here, hyper, self.refresh))

    def hyperparameters_among(self, samples: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters among the draws of a sampler of this model.

        Args:
          samples: draws by site, as of ``mcmc.get_samples()``.

        Returns:
          Those of the hyperparameters.
        """
        names = self.fit.structure.hyperparameters
        missing = [name for name in names if name not in samples]
        if missing:
            raise ValueError(
                f"There are draws of {sorted(samples)}, but the hyperparameters that the model "
                f"samples are {list(names)}. Run the sampler on NUTS(collapse(fit))."
            )
        found = {name: samples[name] for name in names}
        axes = self._axes_of_draws(found)
        flat = {k: jnp.reshape(v, (-1, *jnp.shape(v)[axes:])) for k, v in found.items()}
        warn_of_doubts(self.fit, flat)
        return found

    def _axes_of_draws(self, samples: Mapping[str, Any]) -> int:
        """How many axes draws have before those of a hyperparameter itself."""
        hyper = self.fit.structure.hyper
        name, (shape, _) = hyper.names[0], hyper.signature[0]
        return jnp.ndim(samples[name]) - len(shape)

    def given(self, hyper: Params) -> Fit:
        """The fit with sites as the density has them at one value of the hyperparameters."""
        return self.fit.refreshed(hyper, self.refresh)

    @full_precision(on_cpu=False)
    def marginals(
        self, samples: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, dist.MixtureSameFamily]:
        """Posterior marginals of each GP site: mixtures of one Gaussian a draw.

        Args:
          samples: draws of the hyperparameters, as of ``mcmc.get_samples()``. Thin them to save
            time and memory, which grow with their number.
          *args: arguments of the model to predict at; those of the fit if there are none.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from GP site to a NumPyro distribution with ``mean``, ``variance``, ``cdf``,
          ``log_prob`` and ``sample``, its batch shape that of the site.
        """
        found = self._map(_marginals, samples, args, kwargs)

        def mixture(q: Marginals) -> dist.MixtureSameFamily:
            mean, variance = (jnp.moveaxis(x, 0, -1) for x in q)
            count = mean.shape[-1]
            weights = jnp.full((count,), 1.0 / count, mean.dtype)
            return dist.MixtureSameFamily(
                dist.Categorical(weights), dist.Normal(mean, jnp.sqrt(variance))
            )

        return {name: mixture(q) for name, q in found.items()}

    @full_precision(on_cpu=False)
    def sample_posterior(
        self, rng_key: Array, samples: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Array]:
        """One joint draw of each GP site for each draw of the hyperparameters.

        Args:
          rng_key: random key.
          samples: draws of the hyperparameters, as of ``mcmc.get_samples()``.
          *args: arguments of the model to predict at; those of the fit if there are none.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from GP site to draws, with a leading axis as long as that of ``samples``.
        """
        count = len(next(iter(samples.values())))
        keys = jax.random.split(rng_key, count)
        return self._map(_draw, samples, args, kwargs, keys)

    @full_precision(on_cpu=False)
    def log_weights(
        self, rng_key: Array, samples: Mapping[str, Any], *, num_draws: int = 64
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
          num_draws: D, the number of draws of the GPs for each draw of the hyperparameters.

        Returns:
          Log weights, normalised to sum to one as weights. They resample the draws, of which
          ``jax.random.categorical(key, log_weights, shape=(1000,))`` are then indices.
        """
        fit = self.fit
        hyper = _as_arrays(self.hyperparameters_among(samples))
        first = {name: value[0] for name, value in hyper.items()}
        latents = fit.guide.latents(fit.read(hyper=first), fit.params)
        noise = standard_normals(rng_key, num_draws, latents)
        with blas_threads():
            found = _log_weights(self.refresh, fit, hyper, noise)
            jax.block_until_ready(found)
        return found - jax.nn.logsumexp(found)

    def _map(
        self,
        one: Callable[..., Any],
        samples: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *extra: Any,
    ) -> Any:
        """Applies a function to the GP sites given each draw of the hyperparameters."""
        hyper = _as_arrays(self.hyperparameters_among(samples))
        with blas_threads():
            there = self.fit.inputs(args, kwargs)
            # What is below GPs belongs to the training data.
            left_out = self.fit.structure.below if args or kwargs else ()
            found = _at_each((one, self.refresh, left_out), self.fit, hyper, there, extra)
            return jax.block_until_ready(found)


@partial(jax.jit, static_argnums=0)
@full_precision()
def _at_each(
    settings: tuple[Callable[..., Any], int, tuple[str, ...]],
    fit: Fit,
    hyper: Params,
    there: Call,
    extra: tuple[Any, ...],
) -> Any:
    one, refresh, left_out = settings

    def given(inputs: tuple[Params, tuple[Any, ...]]) -> dict[str, Any]:
        hyper, extra = inputs
        here = fit.refreshed(hyper, refresh)
        known = {name: value for name, value in hyper.items() if name not in left_out}
        latents = fit.guide.latents(here.read(there, known), here.params)
        return {name: one(i, latent, *extra) for i, (name, latent) in enumerate(latents.items())}

    return lax.map(given, (hyper, extra))


@partial(jax.jit, static_argnums=0)
@full_precision()
def _log_weights(refresh: int, fit: Fit, hyper: Params, noise: Mapping[str, Any]) -> Array:
    def one(hyper: Params) -> Array:
        here = fit.refreshed(hyper, refresh)
        weights = log_weights(here, hyper, noise)
        return jax.nn.logsumexp(weights) - evidence_of(here, hyper, 0)

    return lax.map(one, hyper)


def _as_arrays(values: Mapping[str, Any]) -> dict[str, Array]:
    return {name: jnp.asarray(value) for name, value in values.items()}


def _marginals(_: int, latent: Any) -> Marginals:
    return marginals_of(latent)


def _draw(i: int, latent: Any, key: Array) -> Array:
    return joint_of(latent).sample(jax.random.fold_in(key, i))


def collapsed_of(mcmc: Any) -> Collapsed:
    """The collapsed model that an ``MCMC`` samples, perhaps through handlers around it.

    Raises:
      ValueError: if it samples something else.
    """
    sampled = getattr(getattr(mcmc, "sampler", None), "model", None)
    model = sampled
    while model is not None and not isinstance(model, Collapsed):
        model = getattr(model, "fn", None)
    if model is None:
        raise ValueError(
            "mcmc must be an MCMC that was run on NUTS(collapse(fit)), whose draws of the "
            f"hyperparameters say which sites f has; it samples {sampled!r}."
        )
    return model
