r"""Draws of a posterior that are functions.

A draw of the values of f at n inputs takes an n x n factor, and the next draw at other inputs is of
another function. A draw of the prior by random features is a function once and for all, and what
data say can be added to it (Matheron's rule):

.. math::
  f(x) = \mu(x) + \phi(x)^\top \theta + k(x, Z) \, L^{-\top} \big(v - L^{-1} \Phi_Z \theta\big),
  \qquad \theta \sim \mathcal{N}(0, I), \quad v \sim \mathcal{N}(B^{-1} \xi, B^{-1}).

The second part is exact. The covariance of the first is that of the kernel up to the error of the
random features, which are the same for all draws.

References:
  Wilson, Borovitskiy, Terenin, Mostowsky and Deisenroth, `Efficiently Sampling Functions from
  Gaussian Process Posteriors <https://arxiv.org/abs/2002.09309>`_, 2020.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian.approximation import Noise
from numpyro_tsvgp.gaussian.linalg import full_precision
from numpyro_tsvgp.gaussian.process import FlatKernel, flatten_functions
from numpyro_tsvgp.gaussian.rows import map_rows
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.guides.prediction import read_to_predict
from numpyro_tsvgp.infer.predictions.site_prior import SitePrior, parameters_of
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import Model

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.fit import Fit
    from numpyro_tsvgp.infer.guides.guide import Latent

__all__ = ["FunctionDraws", "SiteFunctions", "draw_functions"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["prior", "features", "coefficients", "inducing", "weights"],
    meta_fields=["stacked"],
)
@dataclass(frozen=True)
class SiteFunctions:
    """Draws of one GP site as functions of its inputs: a pytree.

    ``draws(X)`` has shape ``(num, *batch, n)``, and is the same at every call. It can be jitted
    and differentiated in the inputs; many inputs are taken in blocks, in bounded memory.

    Attributes:
      prior: kernel and mean.
      features: the random features of the kernel.
      coefficients: their coefficients, ``(num, functions, size)``.
      inducing: inputs whose function values carry what data say.
      weights: weights of the kernel there, ``(num, functions, m)``.
      stacked: whether each draw has hyperparameters of its own, along a leading axis of
        everything.
    """

    prior: SitePrior
    features: Any
    coefficients: Array
    inducing: Array
    weights: Array
    stacked: bool = False

    @full_precision()
    def __call__(self, X: Any) -> Array:
        X = self.prior.inputs(X)
        if not self.stacked:
            return self._shaped(self.prior.mean_at(X) + self.centred(X))
        each = jax.vmap(lambda one: one.prior.mean_at(X) + one.centred(X)[0])
        return self._shaped(each(self))

    def centred(self, X: Array) -> Array:
        """Values without the prior mean, ``(num, functions, n)``, of one set of hyperparameters."""
        batch = self.prior.batch_shape
        kernel = FlatKernel(self.prior.kernel, batch)

        def at(rows: Array) -> Array:
            phi = flatten_functions(self.features(rows), batch, 2)
            return _combine(self.coefficients, phi) + _combine(
                self.weights, kernel(rows, self.inducing)
            )

        num, p, size = self.coefficients.shape
        per_row = p * (size + self.weights.shape[-1] + num)
        return map_rows(at, X, numbers_per_row=per_row)

    def _shaped(self, values: Array) -> Array:
        return values.reshape((values.shape[0], *self.prior.batch_shape, values.shape[-1]))


def _combine(coefficients: Array, features: Array) -> Array:
    """Sums ``(num, p, n)`` of features ``(1 or p, n, r)`` with coefficients ``(num, p, r)``."""
    if features.shape[0] == 1:
        return coefficients @ features[0].T
    return jnp.einsum("spr,pnr->spn", coefficients, features)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["sites", "parameters", "hyper"],
    meta_fields=["model", "num", "stacked"],
)
@dataclass(frozen=True)
class FunctionDraws:
    """Joint draws of the functions of all GP sites, and of the hyperparameters: a pytree.

    Called with arguments of the model, it gives what ``fit.sample`` gives, and what
    ``Predictive(model, posterior_samples=...)`` takes. ``draws["f"]`` are those of one GP site, as
    functions of its own inputs.

    Attributes:
      sites: draws by GP site.
      parameters: the parameters of the model.
      hyper: hyperparameters of each draw, or of all of them.
      model: the NumPyro model.
      num: how many draws.
      stacked: whether each draw has hyperparameters of its own.
    """

    sites: dict[str, SiteFunctions]
    parameters: Params
    hyper: Params
    model: Model
    num: int
    stacked: bool

    @full_precision()
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Values at the inputs in arguments of the model.

        Args:
          *args: arguments of the model; the data may be left out.
          **kwargs: keyword arguments of the model.

        Returns:
          By site, values of shape ``(num, *shape of the site)``, hyperparameters included.
        """
        return _evaluate(self, Call(args, kwargs).on_device())

    def __getitem__(self, name: str) -> SiteFunctions:
        if name not in self.sites:
            raise KeyError(f"no GP site '{name}'; the GP sites are {sorted(self.sites)}")
        return self.sites[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        what = ", ".join(self.sites)
        return f"FunctionDraws({self.num} draws of {what})"


@jax.jit
@full_precision()
def _evaluate(draws: FunctionDraws, call: Call) -> dict[str, Array]:
    def at(sites: Mapping[str, SiteFunctions], hyper: Params) -> dict[str, Array]:
        reading, _ = read_to_predict(draws.model, call, {**draws.parameters, **hyper})
        found = {}
        for name, site in reading.gps.items():
            X = sites[name].prior.inputs(site.gp.X)
            found[name] = site.unflatten(site.loc + sites[name].centred(X))
        return found

    if draws.stacked:
        found = lax.map(lambda one: at(*one), (draws.sites, draws.hyper))
        return {**draws.hyper, **{name: values[:, 0] for name, values in found.items()}}
    hyper = {
        name: jnp.broadcast_to(value, (draws.num, *jnp.shape(value)))
        for name, value in draws.hyper.items()
    }
    return {**hyper, **at(draws.sites, draws.hyper)}


@full_precision(on_cpu=False)
def draw_functions(
    fit: Fit, rng_key: Array, num: int, call: Call, *, features: int
) -> FunctionDraws:
    """Draws functions from a fit.

    Args:
      fit: the fit.
      rng_key: random key.
      num: how many draws.
      call: arguments that the model runs with; of their inputs nothing is kept.
      features: how many random frequencies each stationary term of a kernel gets.

    Returns:
      The draws.

    Raises:
      ValueError: if a kernel has no random features, or ``num`` or ``features`` is below one.
    """
    for name, value in (("num", num), ("features", features)):
        if value < 1:
            raise ValueError(f"{name}={value}: it takes a number of at least one.")
    hyper_guide = fit.hyper_guide_at(call).without(fit.structure.below)
    key_features, key_draws = jax.random.split(rng_key)

    def drawn(key: Array, num: int, hyper: Params, keep_function: bool) -> Any:
        reading = fit.guide.read(call, fit.params, hyper)
        latents = fit.guide.latents(reading, fit.params)
        keys = jax.random.split(key, len(latents))
        sites = {}
        for i, (name, latent) in enumerate(latents.items()):
            prior = SitePrior.of(
                name,
                reading.gps[name],
                latent.approximation.input_columns,
                keep_function=keep_function,
            )
            key_site = jax.random.fold_in(key_features, i)
            parts = _draw_site(key_site, keys[i], latent, num, features)
            sites[name] = SiteFunctions(prior, *parts)
        return sites, parameters_of(reading)

    if hyper_guide.is_point:
        hyper = hyper_guide.point(fit.params)
        sites, parameters = drawn(key_draws, num, hyper, True)
        return FunctionDraws(sites, parameters, hyper, fit.model, num, False)

    def one(key: Array) -> Any:
        key_hyper, key_sites = jax.random.split(key)
        hyper, _ = hyper_guide.draw(key_hyper, fit.params, call)
        return drawn(key_sites, 1, hyper, False), hyper

    (sites, parameters), hyper = lax.map(one, jax.random.split(key_draws, num))
    made = {name: dataclasses.replace(site, stacked=True) for name, site in sites.items()}
    parameters = jax.tree.map(lambda x: x[0], parameters)
    return FunctionDraws(made, parameters, hyper, fit.model, num, True)


@partial(jax.jit, static_argnums=(3, 4))
@full_precision()
def _draw_site(key_features: Array, key: Array, latent: Latent, num: int, count: int) -> Any:
    """Features, coefficients, inducing inputs and weights of draws of one GP site."""
    process, approximation = latent
    ready = approximation.ready(process)
    Z = ready.inducing
    centre = lax.stop_gradient(Z.mean(0))
    features = process.kernel_of_batch.random_features(
        key_features, count, approximation.input_columns, centre
    )
    phi = flatten_functions(features(Z), process.batch_shape, 2)
    key_prior, key_posterior = jax.random.split(key)
    p, dtype = process.functions, process.loc.dtype
    coefficients = jax.random.normal(key_prior, (num, p, phi.shape[-1]), dtype)
    noise = jax.random.normal(key_posterior, (2, num, p, Z.shape[0]), dtype)
    weights = ready.weights(Noise(*noise), _combine(coefficients, phi))
    return features, coefficients, Z, weights
