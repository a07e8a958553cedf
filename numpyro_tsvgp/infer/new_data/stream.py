r"""Data that come in batches and are then gone: posterior, inducing inputs and hyperparameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.infer.util import transform_fn

from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.infer.em.tsvgp import TSVGP
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.infer.guides.dual import AutoDualGaussian
from numpyro_tsvgp.infer.new_data import stream_steps as steps_of
from numpyro_tsvgp.infer.new_data.conditioning import bare, prepared
from numpyro_tsvgp.infer.new_data.new_sites import Sites, no_sites
from numpyro_tsvgp.infer.new_data.remembering import SELECTIONS, kept_points
from numpyro_tsvgp.infer.new_data.stream_batch import Batch
from numpyro_tsvgp.infer.replay import Memory
from numpyro_tsvgp.infer.state import Transforms
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.data_rows import canonical, on_device, padded, taken

__all__ = ["Stream"]


class Stream:
    r"""Inference for batches that arrive in order and are then gone.

    An update takes the new data into the posterior as :meth:`numpyro_tsvgp.Fit.condition` does,
    chooses inducing inputs among the old ones and the new data, takes optimizer steps on the
    hyperparameters, and keeps a few representative points in the fit, its *memory*. Those stand for
    the data that are gone when hyperparameters are learned:

    .. math::
      \sum_{\text{new}} E_i + \frac{N_{\text{past}}}{|\text{memory}|} \sum_{\text{memory}} E_j
      - \mathrm{KL}(q \,\|\, p) .

    Sites of points in the memory are made anew in each update: they are subtracted, found again
    together with those of the new points, and added. The next memory is chosen among the new points
    and the old memory. A new point is kept with a probability proportional to
    :math:`\beta_i v_i`, how much it narrows the posterior at its own input; a point of the old
    memory stands for :math:`N_{\text{past}} / |\text{memory}|` points and its probability is larger
    by that factor. Points that are kept in this way are not typical of the past. With
    ``select="importance"`` they get weights that make up for it, in place of the common factor.

    The object holds configuration alone. What is known of the data is in the fit, and is saved
    with it.

    Args:
      model: a NumPyro model with GP sites.
      guide: an :class:`~numpyro_tsvgp.AutoDualGaussian` with inducing inputs and tied sites. It
        may start with few of them.
      optim: an optimizer of hyperparameters, or None to hold them after the first batch. It starts
        afresh in each update. Inducing inputs are chosen and not learned.
      memory: how many points are kept. With 0 the new batch stands for all data, which is what
        one can do without a memory.
      select: ``"leverage"`` for probabilities proportional to :math:`\beta_i v_i`; ``"importance"``
        for the same, where each point then stands for as many of the past as one over the
        probability that it was kept; ``"random"`` for equal probabilities.
      num_inducing: the largest number of inducing inputs; None to leave them where they are.
      steps: optimizer steps in an update.
      **options: further options of :class:`~numpyro_tsvgp.TSVGP`, for the first batch, of which
        ``rule`` and ``quadrature`` hold for all.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
      >>> from numpyro_tsvgp import GP, AutoDualGaussian, Stream, kernels
      >>> def model(X, y=None):
      ...     scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
      ...     f = numpyro.sample("f", GP(kernels.Matern52(scale), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
      >>> X = jnp.linspace(-3.0, 3.0, 40)
      >>> y = (jnp.sin(2.0 * X) > 0).astype(int)
      >>> guide = AutoDualGaussian(model, inducing=X[:10:2])
      >>> stream = Stream(model, guide, optax.adam(0.05), memory=8, num_inducing=10, steps=5)
      >>> fit = stream.begin(jax.random.key(0), 20, X[:10], y[:10])
      >>> for i in (10, 20, 30):
      ...     fit = stream.update(jax.random.key(i), fit, X[i : i + 10], y[i : i + 10])
      >>> int(fit.memory.past), fit.params["f_auto_inducing"].shape
      (40, (10,))

    References:
      P. E. Chang, P. Verma, S. T. John, A. Solin, M. E. Khan, *Memory-based dual Gaussian
      processes for sequential learning*, ICML 2023.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoDualGaussian,
        optim: Any,
        *,
        memory: int = 50,
        select: str = "leverage",
        num_inducing: int | None = None,
        steps: int = 20,
        **options: Any,
    ) -> None:
        if select not in SELECTIONS:
            raise ValueError(f"select must be one of {SELECTIONS}, got {select!r}.")
        if memory < 0 or steps < 0 or (num_inducing is not None and num_inducing < 1):
            raise ValueError(
                "memory and steps must be 0 or more and num_inducing 1 or more, got "
                f"{memory}, {steps} and {num_inducing}."
            )
        self.svi = TSVGP(model, guide, optim, **options)
        self.size = memory
        self.select = select
        self.num_inducing = num_inducing
        self.steps = steps
        self._learn = jax.jit(self._learned, static_argnames="transforms")

    # ---- batches -----------------------------------------------------------------------------

    @full_precision(on_cpu=False)
    def begin(self, rng_key: Array, num_steps: int, *args: Any, **kwargs: Any) -> Fit:
        """Fits the first batch.

        Args:
          rng_key: random key.
          num_steps: number of updates of :meth:`numpyro_tsvgp.TSVGP.run`.
          *args: arguments of the model with the first batch.
          **kwargs: keyword arguments of the model.

        Returns:
          The fit, without the data but with a memory.
        """
        key_run, key_memory = jax.random.split(rng_key)
        call = on_device(canonical(self.svi.model, Call(args, kwargs).on_device()))
        result = self.svi.run(key_run, num_steps, *call.args, progress_bar=False, **call.kwargs)
        self._check(result.fit)
        fit = result.fit
        kept = steps_of.settled(dataclasses.replace(fit, call=None), call, fit.hyper)
        fit = dataclasses.replace(fit, params={**fit.params, **fit.guide.pack(kept)})
        new = prepared(fit, call)
        if new.rows is None or new.once:
            raise ValueError(
                "A stream keeps rows of the model's arguments, and those of this call "
                f"{call.describe()} do not have one for each data point. Pass arrays with a row "
                "for each, and let the model take their number from them."
            )
        first = padded(taken(new.given, new.rows, np.arange(1)), new.rows, max(self.size, 1))
        nothing = {n: no_sites(s) for n, s in steps_of.processes(fit, first, new).items()}
        zero = jnp.asarray(0)
        weights = jnp.zeros(max(self.size, 1), jax.tree.leaves(nothing)[0].dtype)
        empty = Memory(on_device(first), nothing, weights, zero, zero, new.rows)
        fit = dataclasses.replace(fit, call=None, memory=empty)
        batch = Batch.of(empty, new)
        sites, score = steps_of.in_posterior(bare(fit), batch, new.hyper)
        return self._remembering(key_memory, fit, batch, sites, score)

    @blas_threads()
    @full_precision(on_cpu=False)
    def update(self, rng_key: Array, fit: Fit, *args: Any, **kwargs: Any) -> Fit:
        """A fit after another batch.

        Args:
          rng_key: random key.
          fit: the fit after the batches before, of :meth:`begin` or :meth:`update`.
          *args: arguments of the model with the new batch.
          **kwargs: keyword arguments of the model.

        Returns:
          A new fit; the old one stays as it is.
        """
        check_fit("stream.update(key, fit, X, y)", fit)
        if fit.memory is None:
            raise ValueError(
                "The fit has no memory, so it is not one of a stream. Start with "
                "fit = stream.begin(key, num_steps, X, y) on the first batch."
            )
        new = prepared(fit, Call(args, kwargs))
        if new.rows is None or new.once:
            raise ValueError(
                f"The arguments {new.given.describe()} differ in more than the number of rows from "
                f"those of earlier batches, {fit.memory.call.describe()}."
            )
        key_learn, key_memory = jax.random.split(rng_key)
        memory = fit.memory
        if self.num_inducing is not None:
            fit = steps_of.at_new_places(fit, new, self.num_inducing)
        batch = Batch.of(memory, new)
        sites = steps_of.with_none(memory.sites, batch)
        fit, sites = steps_of.resettled(fit, batch, new.hyper, sites)
        hyper = new.hyper
        if self.steps and self.svi.optim is not None:
            transforms = steps_of.transforms(fit, new.call)
            learned = self._learn(bare(fit), batch, key_learn, transforms=transforms)
            if all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(learned)):
                fit = dataclasses.replace(fit, params={**fit.params, **learned})
                hyper = fit.hyper_at(new.call)
                fit, sites = steps_of.resettled(fit, batch, hyper, sites)
        _, score = steps_of.in_posterior(bare(fit), batch, hyper)
        return self._remembering(key_memory, fit, batch, sites, score)

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        batches: Iterable[tuple[Any, ...]],
        *,
        each: Callable[[int, Fit], Any] | None = None,
    ) -> Fit:
        """Goes through batches, each a tuple of arguments of the model.

        Args:
          rng_key: random key.
          num_steps: number of updates of the first batch.
          batches: any iterable, each element of which is asked for once.
          each: called with the number of the batch and the fit after it.

        Returns:
          The fit after the last one.
        """
        fit = None
        for i, batch in enumerate(batches):
            key = jax.random.fold_in(rng_key, i)
            fit = (
                self.begin(key, num_steps, *batch) if fit is None else self.update(key, fit, *batch)
            )
            if each is not None:
                each(i, fit)
        if fit is None:
            raise ValueError("There are no batches, so there is nothing to fit.")
        return fit

    # ---- parts of an update ------------------------------------------------------------------

    def _check(self, fit: Fit) -> None:
        for name in fit.structure.gps:
            kind = fit.guide.kind(name)
            if not fit.guide.has_inducing(name) or kind.follows_inputs:
                raise ValueError(
                    f"A stream forgets its data, but the guide keeps a site for each point of GP "
                    f"site '{name}'. Give it inducing inputs with sites=\"tied\"."
                )

    def _remembering(self, key: Array, fit: Fit, batch: Batch, sites: Sites, score: Array) -> Fit:
        """The fit with the points in its memory drawn anew, among those that are there."""
        old, count, past = (int(x) for x in (batch.old_count, batch.new_count, batch.past))
        size = batch.length(batch.memory)
        stands_for = np.zeros(batch.length(batch.call))
        stands_for[:old] = np.asarray(batch.weights)[:old]
        stands_for[size : size + count] = 1.0
        kept = kept_points(key, self.select, np.asarray(score), stands_for, self.size)
        rows, stays = kept.rows, kept.stays
        memory = Memory(
            taken(batch.call, batch.rows, rows),
            jax.tree.map(lambda x: jnp.asarray(np.where(stays, np.asarray(x)[:, rows], 0)), sites),
            jnp.asarray(kept.weights, batch.weights.dtype),
            jnp.asarray(int(stays.sum())),
            jnp.asarray(past + count),
            batch.rows,
        )
        return dataclasses.replace(fit, call=None, memory=memory)

    @full_precision()
    def _learned(
        self, fit: Fit, batch: Batch, key: Array, transforms: Transforms
    ) -> dict[str, Array]:
        """Parameters after optimizer steps."""
        optim = self.svi.optim
        assert optim is not None
        held = {k: v for k, v in fit.params.items() if k not in transforms}
        free = transform_fn(transforms, {k: fit.params[k] for k in transforms}, invert=True)

        def step(state: Any, key: Array) -> tuple[Any, Array]:
            def loss(free: Any) -> tuple[Array, None]:
                params = {**held, **transform_fn(transforms, free)}
                here = dataclasses.replace(fit, params=params)
                weighted = self.select == "importance"
                return -steps_of.objective(here, batch, key, self.size > 0, weighted), None

            (value, _), state = optim.eval_and_update(loss, state)
            return state, value

        state, _ = lax.scan(step, optim.init(free), jax.random.split(key, self.steps))
        return transform_fn(transforms, optim.get_params(state))
