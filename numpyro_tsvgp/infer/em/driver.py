"""The driver of variational EM: NumPyro's SVI interface for any guide of GPs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax import Array

from numpyro_tsvgp.infer.em.arguments import (
    check_forward_mode,
    check_key,
    check_loss,
    check_static_kwargs,
)
from numpyro_tsvgp.infer.em.checks import check_state, seen_rows
from numpyro_tsvgp.infer.em.iteration import Iteration, Rate
from numpyro_tsvgp.infer.em.passes import Passes
from numpyro_tsvgp.infer.em.protected import Protected
from numpyro_tsvgp.infer.em.run import RunOptions, attempt, check_num_steps, run
from numpyro_tsvgp.infer.em.start import initial_state
from numpyro_tsvgp.infer.feed.arrivals import Arrivals
from numpyro_tsvgp.infer.feed.batches import Batches, Same
from numpyro_tsvgp.infer.feed.sharding import check_is_shared, placed
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.guides.guide import GPGuide
from numpyro_tsvgp.infer.standing import warn_of_doubts
from numpyro_tsvgp.infer.state import TSVGPRunResult, TSVGPState
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.processes import copy_here

__all__ = ["Driver", "Rate"]


class Driver(Iteration):
    """Variational EM for a guide of GPs, behind the interface of :class:`numpyro.infer.SVI`.

    :class:`~numpyro_tsvgp.TSVGP` and :class:`~numpyro_tsvgp.QSVGP` are this driver for guides that
    keep sites and guides that keep moments.

    Args:
      model: a NumPyro model with GP sites.
      guide: a guide made for this model.
      optim: an optimizer for the hyperparameters and inducing inputs, or None to hold them.
      loss: None, or ``Trace_ELBO()`` where code for SVI passes it.
      static_kwargs: keyword arguments of the model that are the same in every call.
      **settings: see :class:`~numpyro_tsvgp.infer.em.iteration.Iteration`.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: GPGuide,
        optim: Any,
        *,
        loss: Any = None,
        static_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model, guide, optim, **settings)
        check_loss(loss)
        self.static_kwargs = dict(static_kwargs or {})
        check_static_kwargs(model, self.static_kwargs)
        # Compiled once for each shape of data, however often `run` is called.
        self.compiled_update = jax.jit(self.iterate)
        self.compiled_stable_update = jax.jit(self.iterate_stably)
        self.compiled_usable = jax.jit(self.usable)
        self.compiled_loss = jax.jit(self._loss_of)
        self.compiled_attempt = jax.jit(partial(attempt, self))
        self.passes = Passes(self)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        return Call(args, {**self.static_kwargs, **kwargs})

    def init(
        self,
        rng_key: Array,
        *args: Any,
        init_params: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> TSVGPState:
        """The initial state: sites of zero, so that the posterior is the prior.

        The model is checked here, before any long computation.

        Args:
          rng_key: random key.
          *args: arguments of the model.
          init_params: initial values by parameter name, instead of the model's and guide's own.
          **kwargs: keyword arguments of the model.

        Returns:
          The state before the first update.
        """
        check_key(rng_key)
        call = self._call(args, kwargs)
        if call.is_mapped:  # of files that may not fit in memory
            call = seen_rows(self, call)
        return initial_state(self, rng_key, call.on_device(), init_params or {})

    def fit(self, svi_state: TSVGPState, *args: Any, **kwargs: Any) -> Fit:
        """The fit of a state, for predictions, diagnostics and saving.

        Args:
          svi_state: a state.
          *args: arguments of the model, with the training data.
          **kwargs: keyword arguments of the model.

        Returns:
          The fit.
        """
        made = self.fit_of(svi_state, Call(args, kwargs))
        warn_of_doubts(made)
        return made

    def fit_of(self, svi_state: TSVGPState, call: Call) -> Fit:
        """The fit of a state and arguments of the model, without the warnings of :meth:`fit`."""
        return Fit(
            params=copy_here(self.get_params(svi_state)),
            call=self._call(call.args, call.kwargs).on_device(),
            model=self.model,
            guide=self.guide,
            structure=svi_state.structure,
            rule=self.rule,
            quadrature=self.quadrature,
            objective=self.objective,
        )

    def update(
        self,
        svi_state: TSVGPState,
        *args: Any,
        forward_mode_differentiation: bool = False,
        **kwargs: Any,
    ) -> tuple[TSVGPState, Array]:
        """One EM iteration: ``e_steps`` site updates, then ``m_steps`` optimizer steps.

        Args:
          svi_state: the current state.
          *args: arguments of the model; they may change from one update to the next.
          forward_mode_differentiation: must be False; an E-step needs reverse mode.
          **kwargs: keyword arguments of the model.

        Returns:
          The new state and the loss. It is that of the last M-step, with sites that have just been
          fitted to the data. On a subsample that would flatter, so there it is the loss before the
          E-step, whose sites have not seen the batch: an unbiased estimate of the loss on all data.
        """
        check_forward_mode(forward_mode_differentiation)
        return self.iterate(svi_state, self._call(args, kwargs))

    def stable_update(
        self,
        svi_state: TSVGPState,
        *args: Any,
        forward_mode_differentiation: bool = False,
        **kwargs: Any,
    ) -> tuple[TSVGPState, Array]:
        """Like :meth:`update`, but a step that is not finite leaves everything as it was.

        A step is also rejected if the prior covariance has no Cholesky factor at the
        hyperparameters that it leads to.
        The sites, the hyperparameters and the optimizer's state of a rejected step are all
        discarded; only the random key and the step count go on. The loss is then NaN.

        Args:
          svi_state: the current state.
          *args: arguments of the model.
          forward_mode_differentiation: must be False; see :meth:`update`.
          **kwargs: keyword arguments of the model.

        Returns:
          The new or the old state, and the loss.
        """
        check_forward_mode(forward_mode_differentiation)
        return self.iterate_stably(svi_state, self._call(args, kwargs))

    def evaluate(
        self, svi_state: TSVGPState, *args: Any, batches: Any = None, **kwargs: Any
    ) -> Array:
        """The loss of a state, minus the bound minus the log prior, without a step.

        Args:
          svi_state: a state.
          *args: arguments of the model.
          batches: an iterable of the arguments of batches that have each data point once, in place
            of ``*args``: the exact loss of all of them, in the memory of one. Where there are
            several processes, each gives its own rows.
          **kwargs: keyword arguments of the model.

        Returns:
          The loss, a scalar.
        """
        check_state(self, svi_state)
        if batches is not None:
            return self.passes.evaluate(svi_state, batches, kwargs)
        call = self._call(args, kwargs)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((svi_state, call))):
            return self._loss_of(svi_state, call)  # a user's own program, which may differentiate
        try:
            return self.compiled_loss(svi_state, call)
        except (TypeError, jax.errors.JAXTypeError):  # a model that asks for values
            return self._loss_of(svi_state, call)

    def _loss_of(self, state: TSVGPState, call: Call) -> Array:
        _, key = jax.random.split(state.rng_key)
        return self.loss(state, self.free(state.optim_state), key, call)

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        stable_update: bool = False,
        forward_mode_differentiation: bool = False,
        init_state: TSVGPState | None = None,
        init_params: Mapping[str, Any] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        audit: bool | None = None,
        batches: Any = None,
        sharding: Any = None,
        **kwargs: Any,
    ) -> TSVGPRunResult:
        """Runs ``num_steps`` updates with a progress bar.

        An interrupt (Ctrl-C) ends the run and returns what is fitted so far, with a warning. Where
        the first E-steps overshoot, the run starts again from sites near their optimum at the
        initial hyperparameters, reached by shorter steps. Losses that end far above their best, or
        that alternate between two values, are a warning.

        Args:
          rng_key: random key of the initial state.
          num_steps: number of updates.
          *args: arguments of the model.
          progress_bar: whether to show a progress bar; the numbers are the same without.
          stable_update: whether to use :meth:`stable_update`.
          forward_mode_differentiation: must be False; see :meth:`update`.
          init_state: a state to go on from, of this or another object for the same model.
          init_params: initial values by parameter name.
          checkpoint: a file that the fit is saved to on the way. If it exists, the run goes on
            from it, up to ``num_steps`` in all, as if it had never stopped.
          checkpoint_every: number of updates between saves; a twentieth of the run by default.
          audit: whether to check the fit at the end against draws from the guide (see
            :meth:`Fit.audit`), with a warning for each concern. By default a run is audited if it
            took a minute or more, of which the audit is a small part, or if what its likelihood
            reads could be probed but not proven.
          batches: an iterable of the arguments of each update, in place of ``*args``: tuples, or
            dicts of keyword arguments. Batches are loaded ahead by a thread and checked as they
            arrive. A list, or another iterable that is not its own iterator, is started again at
            its end. The size of all data is that of the model's plate. With a checkpoint the place
            of the loader is saved too, if its iterator has ``get_state`` and ``set_state``.
          sharding: a ``jax.sharding.NamedSharding`` that spreads the rows of each batch over
            devices; where there are several processes, each gives its own rows.
          **kwargs: keyword arguments of the model.

        Returns:
          The fitted parameters, the last state, and the loss of every step; and, as ``.fit``, the
          :class:`~numpyro_tsvgp.Fit`.

        Raises:
          FitError: if the fit cannot go on: its state is no longer finite, or the last 20 updates
            were all rejected. It says why, and holds the last good result.
        """
        check_forward_mode(forward_mode_differentiation)
        options = RunOptions(
            progress_bar,
            stable_update,
            init_state,
            init_params,
            checkpoint,
            checkpoint_every,
            audit,
        )
        check_num_steps(num_steps)
        if batches is None:
            call = placed(self._call(args, kwargs).on_device(), sharding)
            check_is_shared(call)
            return run(self, rng_key, num_steps, Same(call), options)
        if args:
            raise ValueError(
                "With batches= the arguments of the model come from the batches. Leave out "
                f"{Call(args, {}).describe()}, or give what is the same for all batches by name."
            )
        arrivals = Arrivals(self.model, sharding)
        shared = {**self.static_kwargs, **kwargs}
        with Batches(
            batches, shared, num_steps, prepare=arrivals.prepare, accept=arrivals.accept
        ) as feed:
            check_is_shared(feed.first)
            return run(self, rng_key, num_steps, feed, options)

    def full_e_step(
        self, svi_state: TSVGPState, batches: Any, *, rate: Any = 1.0, **kwargs: Any
    ) -> tuple[TSVGPState, Array]:
        """One exact E-step on all data at fixed hyperparameters, in the memory of one batch.

        Args:
          svi_state: a state.
          batches: an iterable of the arguments of batches that have each data point once; where
            there are several processes, each gives its own rows.
          rate: step size in (0, 1].
          **kwargs: further keyword arguments of the model.

        Returns:
          The state with new sites, and the exact loss of the one before.
        """
        check_state(self, svi_state)
        return self.passes.e_step(svi_state, batches, rate, kwargs)

    def protected(self) -> Protected:
        """The care that :meth:`run` takes, for a loop of your own.

        Returns:
          A context whose ``update`` is that of this driver, compiled. Inside of it BLAS has one
          thread, first updates that overshoot are replaced, and values of batches are checked.
        """
        return Protected(self)
