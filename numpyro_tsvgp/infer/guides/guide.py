"""What guides of GPs have in common: the guide as NumPyro sees it, for any approximation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from jax.scipy.special import ndtri
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import init_to_median
from numpyro.infer.autoguide import AutoDelta, AutoGuide

from numpyro_tsvgp.distributions import as_inputs
from numpyro_tsvgp.gaussian.approximation import Approximation
from numpyro_tsvgp.gaussian.linalg import full_precision
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.quadrature import Marginals
from numpyro_tsvgp.infer.guides import prediction
from numpyro_tsvgp.infer.guides.guide_checks import check_inducing, check_parameters
from numpyro_tsvgp.infer.guides.hyper import (
    HyperGuide,
    Params,
    starting_at,
)
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import GPSite, Reading, is_latent, read
from numpyro_tsvgp.model.structure import (
    HyperSites,
    draws_inputs,
    hyper_sites,
    latents_below,
)

__all__ = ["GPGuide", "Latent", "Params"]


class Latent(NamedTuple):
    """One GP site: its prior at the inputs of a run, and the approximation of its posterior."""

    process: Process
    approximation: Approximation


class GPGuide(AutoGuide):
    r"""Base of guides over GP sites.

    A subclass says which approximation it keeps of each GP site (:meth:`initial`) and of which
    class it is (:meth:`kind`). The guide holds configuration alone: everything that depends on data
    comes with its arguments, and it always follows them. Called with new inputs it gives the
    posterior there. Latent functions are independent of one another under it.

    Args:
      model: a NumPyro model with one or more :class:`~numpyro_tsvgp.GP` sites.
      inducing: inducing inputs of shape ``(m, d)``, a dict from GP site to such an array, or None.
      learn_inducing: whether the M-step moves the inducing inputs.
      hyper_guide: the guide of hyperparameters that the model samples, as a function of a model:
        ``AutoDelta`` (the default, MAP), ``AutoNormal``, or another autoguide class.
      init_loc_fn: where hyperparameters start, as in NumPyro's autoguides: ``init_to_median`` by
        default, ``init_to_value(values={...})`` and the like.
      prefix: the middle part of the names of the guide's parameters, as in NumPyro's autoguides.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        inducing: Any = None,
        *,
        learn_inducing: bool = True,
        hyper_guide: Callable[..., AutoGuide] | None = None,
        init_loc_fn: Callable[..., Any] | None = None,
        prefix: str = "auto",
    ) -> None:
        super().__init__(model, prefix=prefix)
        if isinstance(inducing, int | float):
            raise TypeError(
                f"inducing={inducing} is a number; it takes the inducing inputs themselves, an "
                f"array of shape (m, d), as in inducing=inducing.kmeans(key, X, {inducing})."
            )
        self.inducing = inducing
        self.learn_inducing = learn_inducing
        self.make_hyper_guide = AutoDelta if hyper_guide is None else hyper_guide
        self.init_loc_fn = init_to_median if init_loc_fn is None else init_loc_fn
        # Autoguides keep the shapes of their sites; one serves all data that give the same shapes.
        self._hyper_guides: dict[Any, HyperGuide] = {}

    # ---- to be said by a subclass ------------------------------------------------------------

    def kind(self, name: str) -> type[Approximation]:
        """The class of the approximation of a GP site."""
        raise NotImplementedError

    def initial(self, name: str, site: GPSite, reading: Reading) -> Approximation:
        """The approximation of a GP site before any data: its prior."""
        raise NotImplementedError

    def constraint(self, field: str) -> Any:
        """The constraint of a field of the approximation."""
        del field
        return constraints.real

    def refuses(self, name: str, site: GPSite, reading: Reading) -> str | None:
        """Why the approximation cannot be fitted to these data, or None if it can."""
        del name, site, reading
        return None

    @property
    def approximates_prior(self) -> bool:
        """Whether the prior itself is approximated, well for some hyperparameters alone."""
        return False

    def doubt(self, name: str, process: Process, approximation: Any) -> str | None:
        """What an approximation is not good for at the hyperparameters of a prior, or None.

        Args:
          name: the name of the GP site.
          process: its prior.
          approximation: what the guide keeps of it.

        Returns:
          A sentence with what to do.
        """
        del name, process, approximation
        return None

    # ---- parameters by name ------------------------------------------------------------------

    def _name(self, site: str, field: str) -> str:
        return f"{site}_{self.prefix}_{field}"

    def pack(self, kept: Mapping[str, Approximation]) -> dict[str, Array]:
        """Parameters by name that hold approximations by GP site."""
        return {
            self._name(name, field.name): getattr(approximation, field.name)
            for name, approximation in kept.items()
            for field in dataclasses.fields(approximation)  # type: ignore[arg-type]
        }

    def unpack(self, name: str, params: Params) -> Approximation:
        """The approximation of one GP site, out of all parameters."""
        kind = self.kind(name)
        fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        missing = [self._name(name, f) for f in fields if self._name(name, f) not in params]
        if missing:
            raise ValueError(
                f"The parameters have no {missing}, which {type(self).__name__} keeps of GP site "
                f"'{name}'. Pass those of a fit with this guide, as in result.params; they have "
                f"{sorted(params)}."
            )
        return kind(**{field: params[self._name(name, field)] for field in fields})

    def fields_of(self, name: str) -> dict[str, str]:
        """The fields of the approximation of a GP site, by the name of their parameter."""
        fields = dataclasses.fields(self.kind(name))  # type: ignore[arg-type]
        return {self._name(name, field.name): field.name for field in fields}

    def learns(self, name: str, field: str) -> bool:
        """Whether a field of an approximation is the optimizer's."""
        return field == "inducing" and self.learn_inducing and field in self.kind(name).optimized

    def inducing_of(self, name: str, site: GPSite, reading: Reading) -> Array | None:
        """The inducing inputs of a GP site, checked against its data; None for none."""
        given = self.inducing
        if isinstance(given, Mapping):
            unknown = sorted(set(given) - set(reading.gps))
            if unknown:
                raise ValueError(
                    f"inducing has inputs for {unknown}, but the GP sites of the model are "
                    f"{sorted(reading.gps)}."
                )
            given = given.get(name)
        if given is None:
            return None
        with jax.ensure_compile_time_eval():  # known, also where a key is traced
            Z = as_inputs(given)
        X = site.gp.X
        if X.ndim == 1 and Z.ndim == 2 and Z.shape[1] == 1:
            Z = Z[:, 0]
        if X.ndim == 2 and Z.ndim == 1 and X.shape[1] == 1:
            Z = Z[:, None]
        check_inducing(name, Z, site, reading)
        return Z.astype(X.dtype)

    def has_inducing(self, name: str) -> bool:
        """Whether a GP site has inducing inputs."""
        given = self.inducing
        return (given.get(name) if isinstance(given, Mapping) else given) is not None

    def factorises_rows(self, name: str) -> bool:
        """Whether the covariance of all rows of a GP site is factorised."""
        return not self.has_inducing(name)

    # ---- hyperparameters ---------------------------------------------------------------------

    def hyper_guide(
        self,
        sites: HyperSites,
        call: Call,
        key: Array | None = None,
    ) -> HyperGuide:
        """The guide of some hyperparameters.

        Args:
          sites: the hyperparameters.
          call: arguments of the model.
          key: seed of initial values; None where they do not matter.

        Returns:
          The guide.
        """
        signature = (sites, call.whole)
        if key is not None or signature not in self._hyper_guides:
            make = starting_at(self.make_hyper_guide, self.init_loc_fn)
            made = HyperGuide(make, self.model, sites, self.prefix, call, key)
            if key is not None and _traced(key):  # its initial values belong to the trace
                return made
            self._hyper_guides[signature] = made
        return self._hyper_guides[signature]

    def _hyper_guide_at(self, reading: Reading, call: Call) -> HyperGuide:
        """The guide of the hyperparameters that a model has at any inputs."""
        return self.hyper_guide(self._hyper_sites_at(reading, call), call)

    def _hyper_sites_at(self, reading: Reading, call: Call) -> HyperSites:
        names = [name for name, site in reading.trace.items() if is_latent(site)]
        below = latents_below(self.model, reading, call) if names else set()
        return hyper_sites(reading, [name for name in names if name not in below])

    # ---- reading the model -------------------------------------------------------------------

    def latents(self, reading: Reading, params: Params) -> dict[str, Latent]:
        """Every GP site of a reading with its approximation."""
        out = {}
        for name, site in reading.gps.items():
            approximation = self.unpack(name, params)
            now = 1 if site.gp.X.ndim == 1 else site.gp.X.shape[1]
            if approximation.input_columns != now:
                raise ValueError(
                    f"GP site '{name}' was fitted to inputs with {approximation.input_columns} "
                    f"columns, but the new inputs have shape {site.gp.X.shape}: they must have the "
                    "same number of columns."
                )
            out[name] = Latent(site.process(approximation), approximation)
        return out

    def read(self, call: Call, params: Params, hyper: Params | None = None) -> Reading:
        """Reads the model at inputs that need not be those of the fit.

        Args:
          call: arguments of the model; the data may be left out.
          params: parameters of model and guide.
          hyper: values of the sampled hyperparameters, or None where they do not matter.

        Returns:
          The reading. Where plates draw the inputs of GPs, all inputs are in it.
        """
        return self.read_all(call, params, hyper)[0]

    def read_all(
        self, call: Call, params: Params, hyper: Params | None = None
    ) -> tuple[Reading, Call]:
        """The reading, and the arguments that it is of."""
        reading, call = prediction.read_to_predict(self.model, call, {**params, **(hyper or {})})
        needed = [key for name in reading.gps for key in self.fields_of(name)]
        check_parameters(reading, params, needed)
        return reading, call

    def _at(self, params: Params, args: Any, kwargs: Any) -> tuple[Call, HyperGuide]:
        if not isinstance(params, Mapping):
            raise TypeError(
                f"params is a {type(params).__name__}; it takes the fitted parameters, a dict, as "
                "in guide.marginals(result.params, X_new). A fit has them already: "
                "result.fit.marginals(X_new)."
            )
        call = Call(args, kwargs).on_device()
        sites: list[tuple[HyperSites, bool]] = []

        def look(call: Call, params: Params) -> int:
            reading, here = self.read_all(call, params)
            sites.append((self._hyper_sites_at(reading, here), here.whole))
            return 0

        try:  # names and shapes are enough, for which nothing is computed
            jax.eval_shape(look, call, dict(params))
        except (jax.errors.JAXTypeError, TypeError):  # unless the model asks for values
            sites.clear()
        if not sites or any("Trace" in support for _, support in sites[0][0].signature):
            sites.clear()
            look(call, params)
        found, whole = sites[0]
        hyper_guide = self.hyper_guide(found, call.of_all_data() if whole else call)
        hyper_guide.check(params)
        return call, hyper_guide

    # ---- NumPyro's interface -----------------------------------------------------------------

    @full_precision(on_cpu=False)
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Samples hyperparameters and the GP sites at the inputs in the arguments."""
        call = Call(args, kwargs).on_device()
        reading = read(self.model, call, key=jax.random.key(0), first_rows=True)
        hyper_guide = self._hyper_guide_at(reading, call)
        with handlers.trace() as trace:
            values = hyper_guide(call)
            for name, site in reading.gps.items():
                for key, field in self.fields_of(name).items():
                    numpyro.param(
                        key,
                        lambda _, name=name, site=site, field=field: getattr(
                            self.initial(name, site, reading), field
                        ),
                        constraint=self.constraint(field),
                    )
        params = {k: s["value"] for k, s in trace.items() if s["type"] == "param"}
        result = dict(values)
        if hyper_guide.is_point:
            values = hyper_guide.point(params)
        # Parameters of the model itself are declared to the handlers around this call, too.
        with handlers.trace() as trace:
            read(
                self.model,
                call,
                values={**params, **values},
                key=jax.random.key(0),
                expose=lambda site: site["type"] == "param",
                first_rows=True,
            )
        params |= {k: s["value"] for k, s in trace.items() if s["type"] == "param"}
        # `Predictive` calls the guide inside a loop over draws. When nothing but the random key
        # is traced, the factors are computed here and now, once, and enter the loop as constants.
        concrete = not _traced((params, values, call))
        with jax.ensure_compile_time_eval() if concrete else nullcontext():
            here = self._reading_for_draws(call, {**params, **values})
            joint = {
                name: prediction.joint_of(latent)
                for name, latent in self.latents(here, params).items()
            }
        for name, q in joint.items():
            result[name] = numpyro.sample(name, q)
        return result

    def _reading_for_draws(self, call: Call, values: Params) -> Reading:
        """A reading at the inputs that the model has in this very call, drawn or not."""
        reading = read(
            self.model,
            call,
            values=values,
            expose=lambda site: site["type"] == "plate",
            key=jax.random.key(0),
            first_rows=True,
        )
        if reading.subsampling > 1 and draws_inputs(self.model, reading, call):
            return read(
                self.model, call, values=values, expose=lambda site: site["type"] == "plate"
            )
        return reading

    def sample_posterior(
        self,
        rng_key: Array,
        params: Params,
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Array]:
        """Joint draws of hyperparameters, GP sites and deterministic sites at given inputs.

        The covariance is factorised once for all draws when hyperparameters are points, and
        once for each draw when they are variational.

        Args:
          rng_key: random key.
          params: fitted parameters.
          *args: arguments of the model; the data may be left out.
          sample_shape: shape of the draws.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from site to draws of shape ``sample_shape + shape of the site``.
        """
        call, hyper_guide = self._at(params, args, kwargs)
        return prediction.sample(self, hyper_guide, rng_key, params, call, tuple(sample_shape))

    def marginals(
        self, params: Params, *args: Any, num_hyper: int = 16, **kwargs: Any
    ) -> dict[str, Marginals]:
        """Posterior mean and variance of each GP site at the inputs in the arguments.

        Memory is bounded whatever the number of inputs: features are made in blocks of rows.

        Args:
          params: fitted parameters.
          *args: arguments of the model; the data may be left out.
          num_hyper: how many draws of variational hyperparameters the moments average over.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from GP site to a named tuple ``(mean, variance)``, each of the site's shape.
        """
        call, hyper_guide = self._at(params, args, kwargs)
        return prediction.marginals(self, hyper_guide, params, call, num_hyper)

    def median(self, params: Params, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Posterior median of every site, GPs at the inputs in the arguments.

        Hyperparameters that are points have no median: what is here is the point, under the default
        ``hyper_guide`` the mode of their posterior (MAP) in the space in which the model samples
        them. Deterministic sites are those of a model with all of these values.

        Args:
          params: fitted parameters.
          *args: arguments of the model; the data may be left out.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from site to its median.
        """
        call, hyper_guide = self._at(params, args, kwargs)
        marginals = prediction.marginals(self, hyper_guide, params, call)
        found = hyper_guide.point(params) | {name: q.mean for name, q in marginals.items()}
        call = self.read_all(call, params)[1]
        return found | prediction.deterministic(self, params, call, found)

    def quantiles(
        self, params: Params, quantiles: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Array]:
        """Posterior quantiles of every site, GPs at the inputs in the arguments.

        Args:
          params: fitted parameters.
          quantiles: one or more numbers between 0 and 1.
          *args: arguments of the model; the data may be left out.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from site to quantiles, with a leading axis when several are asked for.
        """
        call, hyper_guide = self._at(params, args, kwargs)
        q = jnp.asarray(quantiles)

        def normal(marginal: Marginals) -> Array:
            z = ndtri(q).reshape(q.shape + (1,) * marginal.mean.ndim).astype(marginal.mean.dtype)
            return marginal.mean + z * jnp.sqrt(marginal.variance)

        marginals = prediction.marginals(self, hyper_guide, params, call)
        return hyper_guide.quantiles(params, quantiles) | {
            name: normal(marginal) for name, marginal in marginals.items()
        }

    def dual_parameters(
        self, params: Params, *args: Any, **kwargs: Any
    ) -> dict[str, tuple[Array, Array]]:
        r"""The dual parameters :math:`(\lambda_1, \Lambda_2)` of each GP site.

        Args:
          params: fitted parameters.
          *args: arguments of the model.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from GP site to arrays of shape ``batch + (m,)`` and ``batch + (m, m)``.
        """
        call, hyper_guide = self._at(params, args, kwargs)
        reading = self.read(call, params, hyper_guide.point(params))
        return {
            name: prediction.dual_parameters(process, approximation)
            for name, (process, approximation) in self.latents(reading, params).items()
        }


def _traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
