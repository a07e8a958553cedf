r"""Exact passes over all data, batch by batch, in the memory of one batch.

A batch of a model whose plate has N data points stands for all of them: its log-likelihood is
scaled by :math:`N/|M|`. What is linear in the log-likelihood, the bound and a natural-gradient step
from one and the same posterior, is therefore exact as an average over batches that have each data
point once, with weights :math:`|M|/N`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.gaussian.quadrature import Marginals
from numpyro_tsvgp.infer.feed.arrivals import Arrivals
from numpyro_tsvgp.infer.feed.batches import call_of
from numpyro_tsvgp.infer.feed.prefetch import Prefetched
from numpyro_tsvgp.infer.feed.sharding import agreed_error, sum_over_processes
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.state import TSVGPState
from numpyro_tsvgp.infer.steps.density import asked_at
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.processes import copy_here
from numpyro_tsvgp.model.read import Model, read

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.em.driver import Driver

__all__ = ["Passes", "batches_once", "fits_of_batches", "marginals_of_batches", "write_marginals"]

_AHEAD = 2


def batches_once(
    model: Model, batches: Any, kwargs: dict[str, Any], *, check: bool = True
) -> Iterator[Call]:
    """The batches of one pass, loaded ahead by a thread and checked.

    Args:
      model: the NumPyro model.
      batches: an iterable of tuples of arguments, or of dicts of keyword arguments.
      kwargs: further keyword arguments, the same for each batch.
      check: whether values are looked at.

    Yields:
      The arguments of each batch, on the device.
    """
    arrivals = Arrivals(model, agree=False)
    source = Prefetched((arrivals.prepare(call_of(given, kwargs)) for given in batches), _AHEAD)
    try:
        for number, prepared in enumerate(source):
            yield arrivals.accept(prepared, number) if check else prepared.placed
    finally:
        source.close()


def fits_of_batches(fit: Fit, batches: Any, kwargs: dict[str, Any] | None = None) -> Iterator[Fit]:
    """A fit with one batch of its data after the other, whose rows count once each.

    Args:
      fit: the fit, with or without data.
      batches: an iterable of tuples of arguments, or of dicts of keyword arguments.
      kwargs: further keyword arguments, the same for each batch.

    Yields:
      The fit with the data of each batch.
    """
    for name in fit.structure.gps:
        if not fit.guide.kind(name).keeps_sums:
            raise ValueError(
                f"The guide keeps a site for each data point of GP site '{name}', so that a batch "
                "of them is not enough. Pass all data at once."
            )
    for call in batches_once(fit.model, batches, kwargs or {}):
        yield dataclasses.replace(fit, call=call.of_these_rows())


def marginals_of_batches(
    fit: Fit, batches: Any, kwargs: dict[str, Any], num_hyper: int
) -> Iterator[dict[str, Marginals]]:
    """Marginals at the inputs of one batch after the other."""
    for call in batches_once(fit.model, batches, kwargs, check=False):
        with blas_threads():
            found = fit.marginals(*call.args, num_hyper=num_hyper, **call.kwargs)
        yield found


def write_marginals(parts: Iterator[dict[str, Marginals]], out: Mapping[str, Any]) -> int:
    """Fills arrays such as memory maps with marginals, batch after batch.

    Args:
      parts: marginals of batches.
      out: for each GP site a pair of arrays for means and variances, with rows along the last axis.

    Returns:
      How many rows were written.
    """
    start = 0
    for part in parts:
        missing = set(out) - set(part)
        if missing:
            raise ValueError(
                f"out has {sorted(missing)}, which are not GP sites. They are {sorted(part)}."
            )
        rows = 0
        for name, (mean, variance) in out.items():
            rows = part[name].mean.shape[-1]
            if start + rows > mean.shape[-1]:
                raise ValueError(
                    f"out['{name}'] has room for {mean.shape[-1]:,} rows, and the batches have "
                    "more."
                )
            mean[..., start : start + rows] = np.asarray(part[name].mean)
            variance[..., start : start + rows] = np.asarray(part[name].variance)
        start += rows
    return start


class WeightedBatches:
    """Batches that have each data point once, and the share of all data that each has.

    Where there are several processes each has its own, and together they have all data points.

    Args:
      model: the NumPyro model.
      batches: an iterable of tuples of arguments, or of dicts of keyword arguments.
      kwargs: further keyword arguments, the same for each batch.
    """

    def __init__(self, model: Model, batches: Any, kwargs: dict[str, Any]) -> None:
        self._model, self._batches, self._kwargs = model, batches, kwargs
        self.rows = self.points = 0

    def __iter__(self) -> Iterator[tuple[Call, float]]:
        counted: dict[Any, tuple[int, int]] = {}
        for call in batches_once(self._model, self._batches, self._kwargs):
            shape = tuple(leaf.shape for leaf in jax.tree.leaves(call))
            if shape not in counted:
                counted[shape] = _count(self._model, call)
            have, points = counted[shape]
            self.points = self.points or points
            self.rows += have
            if self.points != points or self.rows > points:
                self._refuse_more(have, points)
            yield call, have / points
        if not self.points:
            raise ValueError("batches is empty: there is nothing to go over.")

    def _refuse_more(self, have: int, points: int) -> None:
        if have == points:
            raise ValueError(
                f"The model takes a batch of {have:,} rows for all data: its plate has the "
                "size of the batch. Give it that of all data, as in numpyro.plate('data', N, "
                "subsample_size=X.shape[0])."
            )
        raise ValueError(
            f"The batches have more rows than the {self.points:,} of the model's plate. A pass "
            "over all data needs each of them once; a loader that repeats its data must be "
            "limited."
        )

    def check(self) -> None:
        """At the end: all processes together must have had each data point once.

        Raises:
          ValueError: if they have not as many rows as the plates of the model say.
        """
        rows = int(sum_over_processes(np.asarray(self.rows)))
        if rows == self.points:
            return
        processes = jax.process_count()
        together = "in all" if processes == 1 else f"in all {processes} processes together"
        raise ValueError(
            f"The batches have {rows:,} rows {together}, but the plate of the model has "
            f"{self.points:,}. A pass over all data needs each of them once: do not drop the last "
            "batch" + (", and give each process its own rows." if processes > 1 else ".")
        )


def _count(model: Model, call: Call) -> tuple[int, int]:
    """How many rows a batch has, and how many data points its plate has."""
    reading = read(model, call, key=jax.random.key(0), first_rows=True)
    rows = max(site.rows for site in reading.gps.values())
    return rows, round(reading.subsampling * rows)


class Passes:
    """Exact passes of a driver over batches, compiled once for each shape of batches."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loss = jax.jit(self._loss_of)
        self._step = jax.jit(self._step_of)
        self._keep = jax.jit(self._kept)

    @full_precision()
    def _loss_of(self, state: TSVGPState, key: Array, call: Call) -> Array:
        return self._driver.loss(state, self._driver.free(state.optim_state), key, call)

    @full_precision()
    def _step_of(
        self, state: TSVGPState, key: Array, call: Call, rate: Any
    ) -> tuple[Any, Array, Array]:
        """What a batch would make of the sites, its floored variances, and its loss before."""
        scene, prior = self._driver.scene(state, key, call)
        carries = {name: at.start() for name, at in scene.at.items()}
        rule = self._driver.rule
        asked = asked_at(scene, rule, carries)
        return asked.step(rule, carries, rate), asked.floored, -(asked.bound + prior)

    @full_precision()
    def _kept(self, state: TSVGPState, key: Array, call: Call, carries: Any) -> Any:
        scene, _ = self._driver.scene(state, key, call)
        return self._driver.guide.pack({k: at.keep(carries[k]) for k, at in scene.at.items()})

    def _mean(
        self, batches: Any, kwargs: dict[str, Any], of_batch: Callable[[Call], Any]
    ) -> tuple[Any, Call]:
        """The mean over all data of a function of a batch, and a batch.

        Each process goes over its own batches; they meet at the end, whatever became of them.
        """
        kwargs = {**self._driver.static_kwargs, **kwargs}
        weighted = WeightedBatches(self._driver.model, batches, kwargs)
        mean, message = _Mean(), ""
        try:
            for call, weight in weighted:
                mean.add(of_batch(call), weight)
        except Exception as error:
            if jax.process_count() == 1:
                raise
            message = f"{type(error).__name__}: {error}"
        message = agreed_error(message)
        if message:
            raise ValueError(f"A pass over all data ended early. {message}")
        weighted.check()
        return mean.over_processes(), call

    @blas_threads()
    def evaluate(self, state: TSVGPState, batches: Any, kwargs: dict[str, Any]) -> Array:
        """The exact loss; see :meth:`Driver.evaluate`."""
        if not self._driver.objective.is_bound:
            raise ValueError(
                f"Values of the objective {self._driver.objective!r} on batches do not average to "
                "its value on all data. Evaluate it on all rows at once, or use the bound."
            )
        state = copy_here(state)
        _, key = jax.random.split(state.rng_key)
        return self._mean(batches, kwargs, lambda call: self._loss(state, key, call))[0]

    @blas_threads()
    def e_step(
        self, state: TSVGPState, batches: Any, rate: Any, kwargs: dict[str, Any]
    ) -> tuple[TSVGPState, Array]:
        """One exact E-step; see :meth:`Driver.full_e_step`."""
        driver = self._driver
        if not getattr(driver.rule, "averages", False):
            raise ValueError(
                f"Steps of the site rule {driver.rule!r} on batches do not average to its step on "
                "all data. Use the default rule for exact passes, or updates on batches."
            )
        for name in state.structure.gps:
            if not driver.guide.kind(name).keeps_sums:
                raise ValueError(
                    f"The guide keeps a site for each data point of GP site '{name}', and a pass "
                    'goes over batches of them. Give it inducing inputs and sites="tied".'
                )
        state = copy_here(state)
        _, key = jax.random.split(state.rng_key)
        floored = jnp.zeros((), int)

        def step(call: Call) -> Any:
            nonlocal floored
            carries, more, loss = self._step(state, key, call, rate)
            floored = floored + more
            return carries, loss

        (carries, loss), last = self._mean(batches, kwargs, step)
        new = self._keep(state, key, last, carries)
        kept = {k: new.get(k, v) for k, v in state.approximation.items()}
        floored = state.floored + jnp.asarray(sum_over_processes(floored))
        return dataclasses.replace(state, approximation=kept, floored=floored), loss


class _Mean:
    """A weighted mean, in which what is the same everywhere stays exactly as it is."""

    def __init__(self) -> None:
        self._first: Any = None
        self._departure: Any = None
        self._weight = 0.0

    def add(self, value: Any, weight: float) -> None:
        if self._first is None:
            self._first = value
            self._departure = jax.tree.map(jnp.zeros_like, value)
        self._departure = _add(self._departure, self._first, value, weight)
        self._weight += weight

    def over_processes(self) -> Any:
        """The mean, with the values of all processes."""
        first, departure = self._first, self._departure
        if jax.process_count() > 1:  # departures from the first value of the first process
            mine = first if jax.process_index() == 0 else jax.tree.map(jnp.zeros_like, first)
            first = sum_over_processes(mine)
            departure = _add(departure, first, self._first, self._weight)
            departure = sum_over_processes(departure)
        return jax.tree.map(jnp.add, first, departure)


@jax.jit
def _add(departure: Any, first: Any, value: Any, weight: Any) -> Any:
    return jax.tree.map(
        lambda d, a, b: d + jnp.asarray(weight, b.dtype) * (b - a), departure, first, value
    )
