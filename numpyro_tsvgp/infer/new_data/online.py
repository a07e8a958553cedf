"""A fitted time series that takes in new data at its end, at a cost that does not grow with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian.linalg import full_precision
from numpyro_tsvgp.gaussian.markov import Markov
from numpyro_tsvgp.gaussian.markov_ready import MarkovEnd, end_of
from numpyro_tsvgp.gaussian.quadrature import Marginals
from numpyro_tsvgp.gaussian.series import times_of
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.infer.standing import warn_of_doubts
from numpyro_tsvgp.infer.steps.density import Scene, e_steps
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import Reading, read

__all__ = ["Online", "online"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "hyper", "ends"],
    meta_fields=["fit"],
)
@dataclasses.dataclass(frozen=True)
class Online:
    """The end of a fitted time series, made by :func:`online`: a value and a pytree.

    Attributes:
      params: parameters of the model.
      hyper: values of the sampled hyperparameters, which stay as they are.
      ends: the state of each GP at the end of the series.
      fit: model, guide, rule and quadrature of the fit.
    """

    params: dict[str, Any]
    hyper: dict[str, Any]
    ends: dict[str, MarkovEnd]
    fit: Any

    @property
    def time(self) -> float:
        """The last time that data have been taken in from."""
        return max(float(end.time) for end in self.ends.values())

    @full_precision(on_cpu=False)
    def update(self, *args: Any, steps: int = 10, **kwargs: Any) -> Online:
        """Takes in new data at the end of the series.

        Sites of the new points are made by E-steps at rate 1 given the state at the end; those of
        earlier points stay as they are, and so do hyperparameters. For a Gaussian likelihood that
        is exact. For others it is what fitting would give if earlier sites were held, as in
        assumed density filtering.

        Args:
          *args: arguments of the model with the new data alone.
          steps: number of E-steps.
          **kwargs: keyword arguments of the model.

        Returns:
          The end of the longer series.

        Raises:
          ValueError: if a time is earlier than the end of the series.

        Examples:
          >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
          >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, online
          >>> def model(t, y=None):
          ...     f = numpyro.sample("f", GP(kernels.Matern32(2.0), t))
          ...     with numpyro.plate("data", t.shape[0]):
          ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
          >>> t = jnp.arange(50.0)
          >>> y = jnp.round(2.0 + jnp.sin(t))
          >>> svi = TSVGP(model, AutoDualGaussian(model, markov=True), None, site_lr=1.0)
          >>> end = online(svi.run(jax.random.key(0), 10, t, y, progress_bar=False).fit)
          >>> end = end.update(t[:1] + 50.0, y[:1])
          >>> end.time, end.marginals(jnp.array([51.0, 52.0]))["f"].mean.shape
          (50.0, (2,))
        """
        call = Call(args, kwargs).on_device()
        self._check(call)
        return _updated(steps, self, call)

    @full_precision(on_cpu=False)
    def marginals(self, *args: Any, **kwargs: Any) -> dict[str, Marginals]:
        """Forecasts: mean and variance of each GP site at times after the end.

        Args:
          *args: arguments of the model with the times.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from GP site to a named tuple ``(mean, variance)``, each of the site's shape.
        """
        call = Call(args, kwargs).on_device()
        self._check(call)
        return _forecast(self, call)

    def _check(self, call: Call) -> None:
        for name, site in _reading(self, call).gps.items():
            first, end = float(np.min(np.asarray(times_of(site.gp.X)))), self.ends[name].time
            if first < float(end):
                raise ValueError(
                    f"GP site '{name}' has a time {first:g} before the end {float(end):g} of the "
                    "series: new data here come at the end. Elsewhere the fit itself takes them, "
                    "with all of the series."
                )


def _reading(end: Online, call: Call) -> Reading:
    values = {**end.params, **end.hyper}
    return read(end.fit.model, call, values=values, key=jax.random.key(0))


@partial(jax.jit, static_argnums=0)
@full_precision()
def _updated(steps: int, end: Online, call: Call) -> Online:
    reading, fit = _reading(end, call), end.fit
    at = {name: end.ends[name].at_new_data(site.process()) for name, site in reading.gps.items()}
    scene = Scene(fit.model, fit.structure, call, reading, at, fit.nodes())  # type: ignore[arg-type]
    kept: Mapping[str, Any] = e_steps(scene, fit.rule, 1.0, steps).kept
    return dataclasses.replace(end, ends=dict(kept))


@jax.jit
@full_precision()
def _forecast(end: Online, call: Call) -> dict[str, Marginals]:
    out = {}
    for name, site in _reading(end, call).gps.items():
        process = site.process()
        local = end.ends[name].marginals(process)
        mean: Array = process.loc + local.mean
        out[name] = Marginals(process.unflatten(mean), process.unflatten(local.variance))
    return out


@full_precision(on_cpu=False)
def online(fit: Fit) -> Online:
    """The end of a fitted time series, to take in new data there and to forecast.

    Filtering costs the same for each new point, however long the series is.

    Args:
      fit: a fit of ``AutoDualGaussian(model, markov=True)``.

    Returns:
      The end; see :meth:`Online.update`.

    Raises:
      ValueError: if the fit is of another kind, or hyperparameters are distributions.
    """
    check_fit("online(result.fit)", fit)
    if not fit.hyper_guide.is_point or fit.structure.below:
        raise ValueError(
            "online is for hyperparameters that are points: variational ones, and latent variables "
            "below GPs, would move with new data."
        )
    warn_of_doubts(fit)
    ends, hyper = {}, fit.hyper
    for name, (process, approximation) in fit.guide.latents(fit.read(), fit.params).items():
        if not isinstance(approximation, Markov):
            raise ValueError(
                f"online needs Markov sites, and the fit has {type(approximation).__name__} for GP "
                f"site '{name}': fit with AutoDualGaussian(model, markov=True)."
            )
        ends[name] = jax.jit(end_of)(approximation, process)
    fields = {key for name in ends for key in fit.guide.fields_of(name)}
    params = {key: value for key, value in fit.params.items() if key not in fields}
    settings = dataclasses.replace(fit, params={}, call=None)
    return Online(params, hyper, ends, _Settings(settings))


class _Settings:
    """A fit without arrays, which compares by identity of its parts as static data must."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._key = (fit.model, fit.guide, fit.structure, fit.rule, fit.quadrature)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fit, name)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self._key == other._key
