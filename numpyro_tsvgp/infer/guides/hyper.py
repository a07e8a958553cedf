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
from numpyro.infer.initialization import init_to_uniform
from numpyro.primitives import Messenger

from numpyro_tsvgp.infer.guides.delta import AutoUnconstrainedDelta
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.likelihood import density
from numpyro_tsvgp.model.read import Message, Model, one_at_a_time, read
from numpyro_tsvgp.model.structure import HyperSites

__all__ = ["HyperGuide", "Params", "starting_at"]

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
      prefix: the middle part of the names of parameters.
      call: arguments of the model, of which shapes matter.
      key: seed of initial values; None where they do not matter.
    """

    def __init__(
        self,
        make: Callable[..., AutoGuide],
        model: Model,
        sites: HyperSites,
        prefix: str,
        call: Call,
        key: Array | None = None,
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
        # Not where constants are evaluated: in there, functions are compiled part by part.
        if not isinstance(key, jax.core.Tracer) and _start_at_point(self.autoguide, still, key):
            return
        with (
            one_at_a_time,
            jax.ensure_compile_time_eval(),
            handlers.block(),
            handlers.seed(rng_seed=jax.random.key(0) if key is None else key),
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


def _start_at_point(guide: AutoGuide, call: Call, key: Array | None) -> bool:
    """Gives a guide of points its start, as NumPyro would; False if that was not possible.

    An autoguide looks for a start where the density and its gradient are finite, which costs about
    sixty small programs. This is its first try alone, by a strategy that asks the prior, such as
    the default of the prior median.
    """
    if type(guide) not in (AutoDelta, AutoUnconstrainedDelta) or guide.create_plates is not None:
        return False
    strategy = guide.init_loc_fn
    strategy = strategy if isinstance(strategy, partial) else strategy()
    if key is None:
        strategy = _anywhere
    elif strategy.func is init_to_uniform:  # on the unconstrained scale, by keys of its own
        return False
    try:
        seed = jax.random.key(0) if key is None else key
        with one_at_a_time, handlers.block(), handlers.seed(rng_seed=seed):
            first_try = jax.random.split(numpyro.prng_key())[1]  # as NumPyro splits it
            start = handlers.seed(_DefaultKey(guide.model), first_try)
            start = handlers.substitute(start, substitute_fn=strategy)
            trace = handlers.trace(start).get_trace(*call.args, **call.kwargs)
    except Exception:  # NumPyro raises it again
        return False
    sites = {k: s for k, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
    densities = [density(site) for site in sites.values()]
    if any(isinstance(value, jax.core.Tracer) or not jnp.isfinite(value) for value in densities):
        return False  # it is traced, or NumPyro goes on and says what is wrong
    frames = {frame.name: frame for site in sites.values() for frame in site["cond_indep_stack"]}
    sizes = {name: site["args"][0] for name, site in trace.items() if site["type"] == "plate"}
    if any(sizes.get(name) != frame.size for name, frame in frames.items()):
        return False  # a start for each row of all data is made of those of a batch
    guide.prototype_trace = trace
    guide._prototype_frames = frames
    guide._prototype_frame_full_sizes = sizes
    guide._init_locs = {name: site["value"] for name, site in sites.items()}
    guide._event_dims = {name: site["fn"].event_dim for name, site in sites.items()}
    return True


def _anywhere(site: Message) -> Any:
    """Some value that a site can have, without a draw."""
    if site["type"] != "sample" or site["is_observed"]:
        return None
    fn = site["fn"]
    return fn.support.feasible_like(np.zeros(fn.shape(site["kwargs"]["sample_shape"])))


class _DefaultKey(Messenger):
    """Gives a model that asks for a key the one that it has while NumPyro looks for a start."""

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "prng_key" and msg["value"] is None:
            msg["value"] = jax.random.key(0)


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
