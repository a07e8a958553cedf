"""Predictions from a fit of which everything is computed that new inputs do not enter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array, lax

from numpyro_tsvgp.gaussian.linalg import full_precision
from numpyro_tsvgp.gaussian.quadrature import Marginals, Quadrature
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.guides.prediction import read_to_predict
from numpyro_tsvgp.infer.predictions.filling import Filled, bucket, filled, first_rows
from numpyro_tsvgp.infer.predictions.site_prior import SitePrior, parameters_of
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import Model
from numpyro_tsvgp.model.structure import Structure

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.fit import Fit
    from numpyro_tsvgp.infer.guides.guide import Latent
    from numpyro_tsvgp.infer.predictions.predictive import Predictions

__all__ = ["Predictor", "SitePredictor", "make_predictor"]


@partial(jax.tree_util.register_dataclass, data_fields=["prior", "ready"], meta_fields=["stacked"])
@dataclass(frozen=True)
class SitePredictor:
    """The posterior of one GP site as a function of its inputs, without the model: a pytree.

    Attributes:
      prior: kernel and mean.
      ready: the posterior; see :class:`~numpyro_tsvgp.gaussian.approximation.Ready`.
      stacked: whether both have a leading axis, of draws of the hyperparameters.
    """

    prior: SitePrior
    ready: Any
    stacked: bool = False

    def __call__(self, X: Any) -> Marginals:
        """Posterior mean and variance at inputs of the site, each ``batch + (n,)``."""
        return self._at(X, _site_marginals)

    def mean(self, X: Any) -> Array:
        """Posterior mean alone, at a cost of m for each input."""
        return self._at(X, _site_means)

    def _at(self, X: Any, function: Callable[..., Any]) -> Any:
        X = self.prior.inputs(X)
        if isinstance(X, jax.core.Tracer):
            return function(self, X)
        return first_rows(function(self, _padded(X, 0)), X.shape[0])

    def local(self, X: Array, loc: Array) -> Marginals:
        """Marginals, ``(functions, n)``, at inputs with a prior mean, of one draw of the stack."""
        local = self.ready.marginals(self.prior.process(X, loc))
        return Marginals(loc + local.mean, local.variance)

    def _shaped(self, values: Array) -> Array:
        return values.reshape((*values.shape[:-2], *self.prior.batch_shape, values.shape[-1]))


@jax.jit
@full_precision()
def _site_marginals(site: SitePredictor, X: Array) -> Marginals:
    def at(one: SitePredictor) -> Marginals:
        return one.local(X, one.prior.mean_at(X))

    found = _averaged(lax.map(at, site)) if site.stacked else at(site)
    return Marginals(*map(site._shaped, found))


@jax.jit
@full_precision()
def _site_means(site: SitePredictor, X: Array) -> Array:
    def at(one: SitePredictor) -> Array:
        loc = one.prior.mean_at(X)
        return loc + one.ready.means(one.prior.process(X, loc))

    return site._shaped(lax.map(at, site).mean(0) if site.stacked else at(site))


def _averaged(parts: Marginals) -> Marginals:
    """The moments of a mixture along the first axis."""
    return Marginals(parts.mean.mean(0), parts.variance.mean(0) + parts.mean.var(0))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["sites", "parameters", "hyper"],
    meta_fields=["model", "structure", "quadrature", "stacked"],
)
@dataclass(frozen=True)
class Predictor:
    """A fit, ready to predict: what does not depend on new inputs is computed once.

    A pytree, that can be jitted, saved and loaded. It holds the kernel and the posterior, and no
    training data, except that point sites without inducing inputs are about the values of f at the
    training inputs. Called with arguments of the model it gives posterior means and variances of
    the GP sites; :meth:`predict` gives the distribution of the data there. ``predictor["f"]`` is
    one GP site as a function of its own inputs, and needs no model.

    Rows are padded to one of a few sizes, so that another number of inputs compiles a small program
    at most; for :meth:`predict` none, unless the model looks at all of its rows at once. Where
    hyperparameters have a distribution, predictions are mixtures over draws of them, as those of
    ``fit.marginals`` are.

    Attributes:
      sites: the posterior of each GP site.
      parameters: the parameters of the model.
      hyper: hyperparameters, with a leading axis of draws where there are several.
      model: the NumPyro model, or None after loading without one.
      structure: what the model is made of.
      quadrature: the quadrature rule of the fit, or None for the default.
      stacked: whether there are several draws of hyperparameters.
    """

    sites: dict[str, SitePredictor]
    parameters: Params
    hyper: Params
    model: Model | None
    structure: Structure
    quadrature: Quadrature | None
    stacked: bool

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Marginals]:
        """Posterior mean and variance of each GP site.

        Args:
          *args: arguments of the model; the data may be left out.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from GP site to a named tuple ``(mean, variance)``, each of the site's shape.
        """
        return self._marginals(self.call(args, kwargs), average=True)

    def predict(self, *args: Any, **kwargs: Any) -> Predictions:
        """The distribution of the data; see :meth:`numpyro_tsvgp.Fit.predict`."""
        from numpyro_tsvgp.infer.predictions.predictive import (
            predictions,  # it is made of predictors
        )

        return predictions(self, self.filled(self.call(args, kwargs)))

    def call(self, args: tuple[Any, ...], kwargs: Any) -> Call:
        """Arguments of the model.

        Raises:
          ValueError: if there is no model.
        """
        if self.model is None:
            raise ValueError(
                "This predictor was loaded without its model, which knows where its GP sites are "
                "for given arguments: load(path, model=model). One GP site alone needs no model: "
                f"predictor['{next(iter(self.sites))}'](inputs of the site)."
            )
        return Call(args, kwargs).on_device()

    def filled(self, call: Call) -> Filled:
        """Arguments of the model with rows filled up to one of a few numbers of them."""
        assert self.model is not None
        hyper = jax.tree.map(lambda x: x[0], self.draws())
        return filled(self.model, call, {**self.parameters, **hyper})

    def marginals(self, call: Call) -> dict[str, Marginals]:
        """Marginals of each GP site for each draw of hyperparameters, ``(draws, functions, n)``."""
        return self._marginals(call, average=False)

    @full_precision(on_cpu=False)
    def _marginals(self, call: Call, *, average: bool) -> dict[str, Marginals]:
        places = _places(self, call)
        if call.is_traced:
            return _local(self.sites, places, stacked=self.stacked, average=average)
        rows = {name: X.shape[-1 if X.ndim == 2 else -2] for name, (X, _) in places.items()}
        padded = {
            name: (_padded(X, 1), _padded(loc, loc.ndim - 1)) for name, (X, loc) in places.items()
        }
        found = _local(self.sites, padded, stacked=self.stacked, average=average)
        return {name: first_rows(q, rows[name]) for name, q in found.items()}

    def draws(self) -> Any:
        """Hyperparameters with a leading axis of draws."""
        return self.hyper if self.stacked else jax.tree.map(lambda x: x[None], dict(self.hyper))

    def __getitem__(self, name: str) -> SitePredictor:
        if name not in self.sites:
            raise KeyError(f"no GP site '{name}'; the GP sites are {sorted(self.sites)}")
        return self.sites[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        sites = ", ".join(
            f"{name} by {site.ready.inducing.shape[-1 if site.prior.columns == 1 else -2]} "
            "inducing values"
            for name, site in self.sites.items()
        )
        return f"Predictor({sites})"


@jax.jit
@full_precision()
def _places(predictor: Predictor, call: Call) -> dict[str, tuple[Array, Array]]:
    """Inputs and prior mean of each GP site, by draw of the hyperparameters."""

    def at(hyper: Params) -> dict[str, tuple[Array, Array]]:
        assert predictor.model is not None
        values = {**predictor.parameters, **hyper}
        reading, _ = read_to_predict(predictor.model, call, values)
        return {
            name: (predictor.sites[name].prior.inputs(site.gp.X), site.loc)
            for name, site in reading.gps.items()
        }

    if predictor.stacked:
        return lax.map(at, dict(predictor.hyper))
    return jax.tree.map(lambda x: x[None], at(predictor.hyper))


@partial(jax.jit, static_argnames=("stacked", "average"))
@full_precision()
def _local(sites: Any, places: Any, *, stacked: bool, average: bool) -> dict[str, Marginals]:
    """Marginals by draw, or those of the mixture of all draws, in the shape of the sites."""

    def at(one: Any) -> dict[str, Marginals]:
        sites, places = one
        return {name: sites[name].local(*place) for name, place in places.items()}

    if stacked:
        found = lax.map(at, (sites, places))
    else:
        found = at((sites, jax.tree.map(lambda x: x[0], places)))
        found = jax.tree.map(lambda x: x[None], found)
    if not average:
        return found
    return {name: Marginals(*map(sites[name]._shaped, _averaged(q))) for name, q in found.items()}


# ---- rows in few sizes -----------------------------------------------------------------------


def _padded(array: Array, axis: int) -> np.ndarray:
    """An array with its last row repeated; by NumPy, which has nothing to compile."""
    rows = array.shape[axis]
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, bucket(rows) - rows)
    return np.pad(np.asarray(array), widths, mode="edge")


@full_precision(on_cpu=False)
def make_predictor(fit: Fit, call: Call, num_hyper: int) -> Predictor:
    """Makes a fit ready to predict.

    Args:
      fit: the fit.
      call: arguments that the model runs with; of their inputs nothing is kept.
      num_hyper: how many draws of variational hyperparameters predictions average over.

    Returns:
      The predictor.
    """
    hyper_guide = fit.hyper_guide_at(call).without(fit.structure.below)

    def at(hyper: Params, keep_function: bool) -> Any:
        reading = fit.guide.read(call, fit.params, hyper)
        sites = {}
        for name, latent in fit.guide.latents(reading, fit.params).items():
            prior = SitePrior.of(
                name,
                reading.gps[name],
                latent.approximation.input_columns,
                keep_function=keep_function,
            )
            sites[name] = SitePredictor(prior, _ready(latent))
        return sites, parameters_of(reading), hyper

    if hyper_guide.is_point:
        sites, parameters, hyper = at(hyper_guide.point(fit.params), True)
    else:
        keys = jax.random.split(jax.random.key(0), num_hyper)
        sites, parameters, hyper = lax.map(
            lambda key: at(hyper_guide.draw(key, fit.params, call)[0], False), keys
        )
        sites = {name: dataclasses.replace(site, stacked=True) for name, site in sites.items()}
        parameters = jax.tree.map(lambda x: x[0], parameters)
    return Predictor(
        sites,
        parameters,
        hyper,
        fit.model,
        fit.structure,
        fit.quadrature,
        not hyper_guide.is_point,
    )


@jax.jit
@full_precision()
def _ready(latent: Latent) -> Any:
    return latent.approximation.ready(latent.process)
