"""The guide of the hyperparameters: any NumPyro autoguide, on the model without GPs and data."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.infer import autoguide
from numpyro.infer.autoguide import AutoDelta, AutoGuide
from numpyro.infer.util import initialize_model

from numpyro_tsvgp.infer.guides.delta import AutoUnconstrainedDelta
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.first_look import held_weakly
from numpyro_tsvgp.model.likelihood import density
from numpyro_tsvgp.model.read import Message, Model, one_at_a_time, read
from numpyro_tsvgp.model.structure import HyperSites

__all__ = ["HyperGuide", "InitialPoint", "Params", "initial_point", "starting_at"]

Params = Mapping[str, Any]

# Guides that look at the density of the model they are made for, which here has no data in it.
_NEED_DENSITY = ("AutoLaplaceApproximation", "AutoDAIS", "AutoSurrogateLikelihoodDAIS")


def starting_at(
    make: Callable[..., AutoGuide], init_loc_fn: Callable[..., Any]
) -> Callable[..., AutoGuide]:
    """An autoguide class that starts where it is told, unless it says so itself.

    NumPyro's own start of a distribution of hyperparameters is uniform in (-2, 2) on the
    unconstrained scale, whatever the prior is, which for a lengthscale can be far from anywhere
    that it allows.

    Args:
      make: an autoguide class, or any function of a model that makes one.
      init_loc_fn: an initialization strategy of NumPyro.

    Returns:
      The same with the strategy, where it takes one and was not given another.
    """
    given = make.keywords if isinstance(make, partial) else {}
    try:
        takes = "init_loc_fn" in inspect.signature(make).parameters
    except (TypeError, ValueError):
        takes = False
    return partial(make, init_loc_fn=init_loc_fn) if takes and "init_loc_fn" not in given else make


class HyperGuide:
    """A distribution or a point estimate of the hyperparameters that a model samples.

    Args:
      make: the autoguide, as a function of a model.
      model: the NumPyro model.
      sites: the hyperparameters.
      prefix: of the names of parameters.
      call: arguments of the model, of which shapes matter.
      key: seed of initial values.
      start: the compiled :func:`initial_point` of these sites, if there is one.
    """

    def __init__(
        self,
        make: Callable[..., AutoGuide],
        model: Model,
        sites: HyperSites,
        prefix: str,
        call: Call,
        key: Array,
        start: InitialPoint | None = None,
    ) -> None:
        self.names = sites.names
        self.autoguide: AutoGuide | None = None
        if not self.names:
            return
        self.autoguide = make(partial(_prior, model, sites, call.whole), prefix=prefix)
        kinds = tuple(getattr(autoguide, kind) for kind in _NEED_DENSITY)
        if isinstance(self.autoguide, kinds):
            raise TypeError(
                f"hyper_guide={type(self.autoguide).__name__} looks at the density of the data, "
                "which the guide of hyperparameters does not have. Use AutoNormal or "
                "AutoMultivariateNormal, or sample the hyperparameters with NUTS on collapse(fit)."
            )
        with jax.ensure_compile_time_eval():
            still = _concrete(call)
        # Not where constants are evaluated: in there, tracing a program would compile its parts.
        compiled = None if isinstance(key, jax.core.Tracer) else start
        if compiled is not None and _start_at_point(self.autoguide, compiled, still, key):
            return
        with (
            one_at_a_time,
            jax.ensure_compile_time_eval(),
            handlers.block(),
            handlers.seed(rng_seed=key),
        ):
            self.autoguide(*still.args, **still.kwargs)

    @property
    def is_point(self) -> bool:
        """Whether hyperparameters are points (MAP, or none sampled) and not distributions."""
        return self.autoguide is None or isinstance(self.autoguide, AutoDelta)

    def without(self, names: Collection[str]) -> HyperGuide:
        """The same guide, of which some hyperparameters are not asked for."""
        other = copy.copy(self)
        other.names = tuple(name for name in self.names if name not in names)
        return other

    def check(self, params: Params) -> None:
        """Whether parameters are of as many hyperparameters as the guide has.

        Raises:
          ValueError: if an autoguide that keeps one vector of all of them has another number.
        """
        size = getattr(self.autoguide, "latent_dim", None)
        key = f"{getattr(self.autoguide, 'prefix', '')}_loc"
        if size is not None and key in params and params[key].shape != (size,):
            raise ValueError(
                f"hyper_guide={type(self.autoguide).__name__} keeps {params[key].size} numbers for "
                f"the hyperparameters of the fit, but at these arguments the model has {size}. "
                "Latent variables that depend on a GP belong to the training data. Ask the fit, "
                "which knows them: result.fit.marginals(X_new), result.fit.sample(key, X_new)."
            )

    def __call__(self, call: Call) -> dict[str, Array]:
        """Samples the hyperparameters as sites of the guide, seen by handlers around this call."""
        if self.autoguide is None:
            return {}
        values = self.autoguide(*call.args, **call.kwargs)
        return {name: values[name] for name in self.names}

    def draw(self, key: Array, params: Params, call: Call) -> tuple[dict[str, Array], Array]:
        """One draw of the hyperparameters and its log density under the guide.

        That of a point is zero, or what makes the log prior that of another scale.
        """
        if self.autoguide is None:
            return {}, jnp.zeros(())
        if self.is_point:
            point = self.point(params)
            if isinstance(self.autoguide, AutoUnconstrainedDelta):
                return point, -self.autoguide.log_jacobian(point)
            return point, jnp.zeros(())
        with (
            one_at_a_time,
            handlers.block(),
            handlers.trace() as trace,
            handlers.seed(rng_seed=key),
        ):
            handlers.substitute(self.autoguide, data=dict(params))(*call.args, **call.kwargs)
        _check_complete([k for k, site in trace.items() if site["type"] == "param"], params)
        total = jnp.zeros(())
        for site in trace.values():
            if site["type"] == "sample":  # with those of the autoguide itself
                total = total + density(site)
        return {name: trace[name]["value"] for name in self.names}, total

    def point(self, params: Params) -> dict[str, Array]:
        """The median, which is the point itself where hyperparameters are points."""
        if self.autoguide is None:
            return {}
        try:
            with one_at_a_time:  # it may run the model for its constraints
                median = self.autoguide.median(dict(params))
        except KeyError as error:
            _check_complete(list(error.args), params)
            raise
        return {name: median[name] for name in self.names}

    def quantiles(self, params: Params, quantiles: Any) -> dict[str, Array]:
        """Quantiles of the hyperparameters, with a leading axis when several are asked for."""
        if self.autoguide is None:
            return {}
        if not self.is_point:
            with one_at_a_time:
                found = self.autoguide.quantiles(dict(params), quantiles)
            return {name: found[name] for name in self.names}
        shape = np.shape(quantiles)
        return {
            name: jnp.broadcast_to(value, shape + jnp.shape(value))
            for name, value in self.point(params).items()
        }


InitialPoint = Callable[[Array, Call], tuple[dict[str, Array], Array]]


def initial_point(make: Callable[..., AutoGuide], model: Model, sites: HyperSites) -> InitialPoint:
    """Where an autoguide starts, as one compiled program.

    An autoguide finds its start by running the model and the gradient of its density, operation by
    operation: about sixty programs for one hyperparameter.

    Args:
      make: the autoguide, as a function of a model.
      model: the NumPyro model.
      sites: the hyperparameters.

    Returns:
      A function of a key and the arguments of the model that gives the values of all sites that
      the autoguide samples, and whether the density has a finite value and gradient there.
    """

    of = held_weakly(model)

    def point(key: Array, call: Call) -> tuple[dict[str, Array], Array]:
        prior = partial(_prior, of(), sites, call.whole)
        guide = make(prior)
        with one_at_a_time, handlers.block(), handlers.seed(rng_seed=key):
            found = initialize_model(
                numpyro.prng_key(),
                prior,
                init_strategy=guide.init_loc_fn,
                model_args=call.args,
                model_kwargs=call.kwargs,
                forward_mode_differentiation=guide._forward_mode_differentiation,
            )
            free, energy, gradient = found.param_info
            values = handlers.seed(found.postprocess_fn, rng_seed=0)(free)
        finite = [jnp.isfinite(x).all() for x in jax.tree.leaves((energy, gradient))]
        return {name: values[name] for name in free}, jnp.stack(finite).all()

    return jax.jit(point)


def _start_at_point(guide: AutoGuide, start: InitialPoint, call: Call, key: Array) -> bool:
    """Gives a guide of points its start, as NumPyro would; False if that was not possible."""
    if type(guide) not in (AutoDelta, AutoUnconstrainedDelta) or guide.create_plates is not None:
        return False
    try:
        values, is_valid = start(key, call)
    except Exception:  # NumPyro raises it again, or the model cannot be traced
        return False
    if isinstance(is_valid, jax.core.Tracer) or not is_valid:
        return False  # NumPyro says what is wrong, if something is
    with (
        one_at_a_time,
        handlers.block(),
        handlers.trace() as trace,
        handlers.seed(rng_seed=0),
        handlers.substitute(data=values),
    ):
        guide.model(*call.args, **call.kwargs)
    sites = {name: trace[name] for name in values}
    frames = {frame.name: frame for site in sites.values() for frame in site["cond_indep_stack"]}
    sizes = {name: site["args"][0] for name, site in trace.items() if site["type"] == "plate"}
    if any(sizes.get(name) != frame.size for name, frame in frames.items()):
        return False  # a start for each row of all data is made of those of a batch
    guide.prototype_trace = trace
    guide._prototype_frames = frames
    guide._prototype_frame_full_sizes = sizes
    guide._init_locs = values
    guide._event_dims = {name: site["fn"].event_dim for name, site in sites.items()}
    return True


def _check_complete(needed: list[str], params: Params) -> None:
    missing = sorted(set(needed) - set(params))
    if missing:
        raise ValueError(
            f"The parameters have no {missing}, which the guide of the hyperparameters keeps: they "
            "are those of another model or guide, or incomplete. Pass those of a fit of this "
            f"model, as in result.params; these are {sorted(params)}."
        )


def _prior(
    model: Model,
    sites: HyperSites,
    whole: bool,
    *args: Any,
    **kwargs: Any,
) -> None:
    """The model of the hyperparameters alone, without GPs and data."""

    def expose(site: Message) -> bool:
        # Samplers and reparameterizations add sites of their own while they process one that they
        # can see: those belong to it as well.
        if site["type"] in ("param", "plate") or site.get("name") in sites.names:
            return True
        return site["type"] == "sample" and site["name"] not in sites.sampled

    read(model, Call(args, kwargs, whole=whole), expose=expose)


def _concrete(call: Call) -> Call:
    """Arguments with numbers in place of what is traced: only shapes matter here."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.core.Tracer) else x, call
    )
