"""From a NumPyro model to its GP sites, and one run of it with given values.

The model is run as it is. A handler gives every GP site a value (its prior mean at first), so
that no covariance is ever built, and everything else that the run decided, hyperparameters,
parameters, subsample indices, is recorded and pinned when the likelihood is evaluated at other
values of the GPs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, lax
from numpyro import handlers
from numpyro.distributions.transforms import biject_to
from numpyro.primitives import Messenger

from numpyro_tsvgp.distributions import GP, find_gp
from numpyro_tsvgp.gaussian.process import Process, flatten_functions
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.wrapped import can_be_sampled

__all__ = [
    "GPSite",
    "Message",
    "Model",
    "Reading",
    "is_gp",
    "is_latent",
    "is_observed",
    "one_at_a_time",
    "on_some_rows",
    "read",
    "run_with",
]

Model = Callable[..., Any]
Message = dict[str, Any]

# NumPyro keeps the handlers of all threads in one list: a model that runs in one thread would be
# handled by the handlers of another. Whoever pushes handlers holds this, and lets go of it before
# anything compiled is called, so that no thread waits for another that waits for it.
one_at_a_time = threading.RLock()


class GPSite(NamedTuple):
    """A GP site of a model: its prior at the inputs of this run, and the shape of its functions."""

    gp: GP
    batch_shape: tuple[int, ...]

    @property
    def functions(self) -> int:
        """How many latent functions plates and expansions make."""
        return math.prod(self.batch_shape)

    @property
    def rows(self) -> int:
        return self.gp.event_shape[0]

    @property
    def loc(self) -> Array:
        """The prior mean at the inputs, shape ``(functions, n)`` or ``(1, n)``."""
        return self._flat(self.gp.loc, self.rows)

    def _flat(self, mean: Any, rows: int) -> Array:
        mean = jnp.asarray(mean, self.gp.loc.dtype)
        mean = jnp.broadcast_to(mean, (*mean.shape[:-1], rows))
        return flatten_functions(mean, self.batch_shape, 1)

    def process(self, approximation: Any = None) -> Process:
        """The prior as inference wants it.

        Args:
          approximation: an approximation that asks for the prior mean at further inputs.

        Returns:
          The prior. It belongs to the trace in which the model was run.
        """
        gp = self.gp
        if approximation is None:
            means = self.loc
        elif gp.mean_function is None:  # known at the rows of X alone
            means = approximation.known_means
        else:
            # Sites are statements about f at given places, which do not move with their mean.
            means = self.mean_at(lax.stop_gradient(approximation.mean_inputs))
        return Process(gp.kernel, gp.X, self.loc, means, gp.jitter, self.batch_shape)

    def mean_at(self, inputs: Array) -> Array:
        """The prior mean at any inputs; zero where it is known at the rows of X alone."""
        function, rows = self.gp.mean_function, inputs.shape[0]
        return self._flat(jnp.zeros((1,)) if function is None else function(inputs), rows)

    def unflatten(self, values: Array) -> Array:
        """From ``(..., functions, n)`` to the shape of the site's value in the model."""
        return values.reshape((*values.shape[:-2], *self.batch_shape, values.shape[-1]))


class Reading(NamedTuple):
    """What one run of a model shows: its GP sites, the values to pin, and the full trace."""

    gps: dict[str, GPSite]
    pinned: dict[str, Any]
    trace: Mapping[str, Message]

    @property
    def plates(self) -> dict[str, Message]:
        return {name: site for name, site in self.trace.items() if site["type"] == "plate"}

    @property
    def subsampling(self) -> float:
        """How many times as many data points there are as in this run, N / |M|."""
        ratios = [site["args"][0] / len(site["value"]) for site in self.plates.values()]
        return max([1.0, *ratios])


class _MeansForGPs(handlers.substitute):
    """Gives GP sites their prior mean, so that none is sampled and no covariance is built."""

    def __init__(self, fn: Model | None = None) -> None:
        super().__init__(fn, substitute_fn=self._mean)

    @staticmethod
    def _mean(msg: Message) -> Array | None:
        gp = find_gp(msg["fn"]) if msg["type"] == "sample" and msg["value"] is None else None
        if gp is None:
            return None
        return jnp.broadcast_to(gp.loc, msg["kwargs"]["sample_shape"] + msg["fn"].shape())


class _ValuesForUnsampled(handlers.substitute):
    """Gives sites of distributions that cannot be sampled some value of their support.

    Improper priors and densities of a user's own are looked at and predicted with like all others;
    what was made up here must not be taken for a draw.

    Args:
      but: which sites are left to handlers further out.
    """

    def __init__(self, but: Callable[[Message], bool] = lambda site: False) -> None:
        super().__init__(None, substitute_fn=self._value)
        self.but = but

    def _value(self, msg: Message) -> Array | None:
        if msg["type"] != "sample" or msg["value"] is not None or can_be_sampled(msg["fn"]):
            return None
        if self.but(msg):
            return None
        shape, support = msg["kwargs"]["sample_shape"] + msg["fn"].shape(), msg["fn"].support
        if support is None or support.is_discrete:
            return jnp.zeros(shape)
        transform = biject_to(support)
        return transform(jnp.zeros(transform.inverse_shape(shape)))


class _WholePlates(Messenger):
    """Gives plates that would draw a subsample all of their indices."""

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "plate" and msg["value"] is None:
            size = msg["args"][0]
            msg["args"] = (size, size)
            with jax.ensure_compile_time_eval():  # a tracer could not index a NumPy array
                msg["value"] = jnp.arange(size)


class _FirstRows(Messenger):
    """Gives plates that would draw a subsample the first indices, where any will do.

    Drawing takes a second when it is not part of a compiled function.
    """

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "plate" and msg["value"] is None and msg["args"][1] < msg["args"][0]:
            with jax.ensure_compile_time_eval():
                msg["value"] = jnp.asarray(np.arange(msg["args"][1]))


class _RowsAlone(_FirstRows):
    """Plates whose batch is in the arguments do not have its rows stand for more."""

    def __init__(self) -> None:
        super().__init__(None)
        self.ratios: dict[str, float] = {}

    def process_message(self, msg: Message) -> None:
        super().process_message(msg)
        if msg["type"] == "plate" and msg["args"][1] is not None:
            self.ratios[msg["name"]] = msg["args"][0] / msg["args"][1]
        elif msg["type"] == "sample" and msg["scale"] is not None:
            for frame in msg["cond_indep_stack"]:
                msg["scale"] = msg["scale"] / self.ratios.get(frame.name, 1.0)


class _Scaled(Messenger):
    """Multiplies the scales of observed sites, where rows stand for more."""

    def __init__(self, factors: Mapping[str, float]) -> None:
        super().__init__(None)
        self.factors = factors

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and msg["name"] in self.factors:
            scale = 1.0 if msg["scale"] is None else msg["scale"]
            msg["scale"] = scale * self.factors[msg["name"]]


def _plates(call: Call, first_rows: bool) -> Any:
    """What gives plates their indices, and rows of a batch their weight."""
    if call.factors:
        return _Scaled(dict(call.factors))
    if call.alone:
        return _RowsAlone()
    return _WholePlates() if call.whole else _FirstRows() if first_rows else nullcontext()


def is_gp(site: Message) -> bool:
    return site["type"] == "sample" and find_gp(site["fn"]) is not None


def is_observed(site: Message) -> bool:
    return site["type"] == "sample" and site["is_observed"]


def is_latent(site: Message) -> bool:
    """Whether a site is sampled, is not data and is not a GP."""
    return site["type"] == "sample" and not site["is_observed"] and find_gp(site["fn"]) is None


def run_with(
    model: Model, call: Call, values: Mapping[str, Any], key: Any = 0
) -> Mapping[str, Message]:
    """Runs a model with values for some of its sites, unseen by handlers around this call.

    Args:
      model: the NumPyro model.
      call: its arguments.
      values: values of sites, by name.
      key: seed for what the model draws.

    Returns:
      The trace.
    """
    with (
        one_at_a_time,
        handlers.block(),
        handlers.trace() as trace,
        handlers.seed(rng_seed=key),
        handlers.substitute(data=dict(values)),
        _ValuesForUnsampled(),
        _plates(call, first_rows=False),
    ):
        call.run(model)
    return trace


def read(
    model: Model,
    call: Call,
    *,
    values: Mapping[str, Any] | None = None,
    key: Array | None = None,
    expose: Callable[[Message], bool] = lambda site: False,
    first_rows: bool = False,
) -> Reading:
    """Runs a model and reads off its GP sites.

    Args:
      model: the NumPyro model.
      call: its arguments.
      values: values of sites, by name.
      key: seed for what the model draws; None for one of the seed handler around this call.
      expose: which sites handlers outside of this call may see and set; all others are private
        to this run.
      first_rows: whether plates that subsample take the first of their indices rather than draw
        them, where what is read does not depend on it.

    Returns:
      The GP sites with their priors at the inputs of this run, the values of everything else
      that is not data, and the trace.
    """
    if key is None:
        key = numpyro.prng_key()
        key = jax.random.key(0) if key is None else key
    plates = _plates(call, first_rows)
    with (
        one_at_a_time,
        handlers.block(hide_fn=lambda site: not expose(site)),
        handlers.trace() as trace,
        handlers.seed(rng_seed=key),
        handlers.substitute(data=dict(values or {})),
        _MeansForGPs(),
        _ValuesForUnsampled(but=expose),
        plates,
    ):
        call.run(model)
    gps, pinned = {}, {}
    for name, site in trace.items():
        gp = find_gp(site["fn"]) if site["type"] == "sample" else None
        if gp is not None and gp.stacked:
            raise ValueError(
                f"GP site '{name}' stands inside of a scan, whose steps each have a function of "
                "their own. Sample the functions before the loop, as a plate of them, "
                "`with numpyro.plate('steps', T): f = numpyro.sample('f', GP(kernel, X))`, and "
                "give the loop f as what it scans over: scan(body, start, (f, y))."
            )
        if gp is not None and not site["is_observed"]:
            gps[name] = GPSite(gp, site["value"].shape[:-1])
        elif site["type"] in ("param", "plate") or (
            site["type"] == "sample" and not site["is_observed"]
        ):
            pinned[name] = site["value"]
    return Reading(gps, pinned, trace)


def on_some_rows(
    model: Model, reading: Reading, call: Call, count: int
) -> tuple[Reading, Call] | None:
    """A model on evenly spaced rows of its data.

    Args:
      model: the NumPyro model.
      reading: a reading of it, whose GP sites have a row for each data point.
      call: its arguments, of which arrays as long as the data are taken to have a row for each.
      count: how many rows.

    Returns:
      A reading and the arguments, or None if the model cannot be run on fewer rows. It may know
      their number from elsewhere.
    """
    sizes = {site.rows for site in reading.gps.values()}
    rows = max(sizes)
    if len(sizes) > 1 or rows <= count:
        return None
    some = np.unique(np.linspace(0, rows - 1, count).astype(int))
    fewer = jax.tree.map(
        lambda leaf: leaf[some] if leaf.ndim and leaf.shape[0] == rows else leaf, call
    )
    try:
        smaller = read(model, fewer, key=jax.random.key(0), first_rows=True)
    except Exception:  # whatever the model may raise
        return None
    fits = all(site.rows == len(some) for site in smaller.gps.values())
    return (smaller, fewer) if fits else None
