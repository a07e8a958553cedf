"""One iteration of variational EM: site updates, then optimizer steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from numpyro.infer.util import transform_fn
from numpyro.optim import _NumPyroOptim

from numpyro_tsvgp.gaussian.linalg import full_precision
from numpyro_tsvgp.gaussian.quadrature import GaussHermite, Quadrature
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.em.checks import check_site_lr, check_state
from numpyro_tsvgp.infer.em.chunks import BUDGET, chunked_e_step, plan_of
from numpyro_tsvgp.infer.em.loop import all_finite
from numpyro_tsvgp.infer.em.optim import Optax, as_optimizer, evaluates_once
from numpyro_tsvgp.infer.feed.sharding import check_axes
from numpyro_tsvgp.infer.files.fingerprint import fingerprint
from numpyro_tsvgp.infer.guides.guide import GPGuide
from numpyro_tsvgp.infer.state import TSVGPState
from numpyro_tsvgp.infer.steps.adaptive import Adaptive, Careful, careful_e_steps
from numpyro_tsvgp.infer.steps.density import (
    Scene,
    Updated,
    e_steps,
    nodes_of,
    objective_of,
    scene_at,
    sites_of_points,
)
from numpyro_tsvgp.infer.steps.objective import Bound, Objective
from numpyro_tsvgp.infer.steps.rules import NaturalGradient, SiteRule
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.first_look import Looks, looks_of
from numpyro_tsvgp.model.likelihood import log_prior
from numpyro_tsvgp.model.read import Reading, read

__all__ = ["Iteration", "Rate", "default_rate"]

# Passes over the data after which the default rate of minibatches is half of the first one.
_EPOCHS = 10

Rate = float | Callable[[Array], Any] | Adaptive | str | None


class _Keys(NamedTuple):
    """Random keys of one update, which its E-steps and M-steps share."""

    model: Array
    hyper: Array
    nodes: Array

    @staticmethod
    def of(key: Array) -> _Keys:
        model, hyper = jax.random.split(key)
        return _Keys(jax.random.split(model)[1], hyper, jax.random.split(key, 3)[2])


def default_rate(step: Any, subsampling: float) -> Any:
    r"""The rate of E-steps where nobody chose one.

    .. math:: r_t = \frac{0.5 \sqrt{|M| / N}}{1 + t |M| / (10 N)}

    It is 0.5 on full batches. On minibatches it starts so that sites remember a number of batches
    between one and an epoch, and falls with the number of epochs, halved after ten: like 1/t, so
    that the noise of batches averages out while any distance can still be covered.

    Args:
      step: the number t of updates so far.
      subsampling: N / |M|, how many times as many data there are as in a batch.

    Returns:
      A rate in (0, 0.5].

    Examples:
      >>> from numpyro_tsvgp.infer.em.iteration import default_rate
      >>> [round(default_rate(step, 100.0), 4) for step in (0, 1000, 9000)]
      [0.05, 0.025, 0.005]
    """
    first = 0.5 / subsampling**0.5
    return first if subsampling == 1 else first / (1 + step / (_EPOCHS * subsampling))


class Iteration:
    """What variational EM does in one iteration, and with which settings.

    Args:
      model: a NumPyro model with GP sites.
      guide: a guide made for this model.
      optim: an optimizer for the hyperparameters and inducing inputs, or None to hold them.
      site_lr: step size of E-steps, a number, a function of the step, or "auto".
      e_steps: site updates in one iteration; 0 if the optimizer does everything.
      m_steps: optimizer steps in one iteration.
      quadrature: the quadrature rule, a number of Gauss-Hermite nodes, or None.
      rule: the site rule.
      objective: what M-steps improve.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: GPGuide,
        optim: Any,
        *,
        site_lr: Rate,
        e_steps: int,
        m_steps: int,
        quadrature: int | Quadrature | None,
        rule: SiteRule | None,
        objective: Objective | None,
    ) -> None:
        if guide.model is not model:
            raise ValueError("The guide was made for another model; pass the same model to both.")
        if e_steps < 0 or m_steps < 1 or (e_steps < 1 and optim is None):
            raise ValueError(
                f"e_steps and m_steps must be at least 1, got {e_steps} and {m_steps}. To hold "
                "hyperparameters and update sites alone, pass optim=None."
            )
        check_site_lr(site_lr)
        self.model = model
        self.guide = guide
        self.optim: _NumPyroOptim | None = as_optimizer(optim)
        self.site_lr = Adaptive() if isinstance(site_lr, str) else site_lr
        self.e_steps = e_steps
        self.m_steps = m_steps
        self.quadrature: Quadrature | None = (
            GaussHermite(quadrature) if isinstance(quadrature, int) else quadrature
        )
        self.rule: SiteRule = NaturalGradient() if rule is None else rule
        if not isinstance(self.rule, SiteRule):
            raise TypeError(
                f"rule must be a site rule such as numpyro_tsvgp.Riemannian(), got {rule!r}."
            )
        if self.adaptive is not None and not self.rule.climbs:
            raise ValueError(
                f"site_lr='auto' judges E-steps by the bound, which those of {self.rule!r} do not "
                "climb. Pass a number, such as site_lr=0.5."
            )
        self.objective: Objective = Bound() if objective is None else objective
        if not isinstance(self.objective, Objective):
            raise TypeError(
                f"objective must be one such as numpyro_tsvgp.EPLike(), got {objective!r}."
            )
        # Bytes that an update may hold for its rows; with more rows they go in blocks.
        self.memory_budget = BUDGET

    def looks(self) -> Looks:
        """What the checks before a fit compile, once for a model and each shape of its data."""
        try:
            mark = fingerprint(self.model)
        except Exception:  # it closes over what has no value here: a tracer, rows of other hosts
            return Looks(self.model)
        return looks_of(self.model, mark)

    def owns(self, name: str, field: str) -> bool:
        """Whether the optimizer owns a field of the approximation of a GP site."""
        return self.guide.learns(name, field)

    def free(self, optim_state: Any) -> dict[str, Any]:
        """The unconstrained parameters in an optimizer's state."""
        return optim_state if self.optim is None else self.optim.get_params(optim_state)

    def get_params(self, svi_state: TSVGPState) -> dict[str, Any]:
        """Parameters of the model and the guide in a state, constrained.

        Args:
          svi_state: a state.

        Returns:
          A dict from parameter name to value.
        """
        free = self.free(svi_state.optim_state)
        return {**transform_fn(svi_state.transforms, free), **svi_state.approximation}

    @property
    def adaptive(self) -> Adaptive | None:
        """How the rate of E-steps is chosen, if the library chooses it."""
        return self.site_lr if isinstance(self.site_lr, Adaptive) else None

    def rate(self, step: Any, subsampling: float) -> Any:
        """The rate of E-steps at a step, where there are N / |M| times as many data as in it."""
        if self.site_lr is None or self.adaptive is not None:
            return default_rate(step, subsampling)
        return self.site_lr(step) if callable(self.site_lr) else self.site_lr

    def _scene(
        self, state: TSVGPState, free: dict[str, Any], keys: _Keys, call: Call
    ) -> tuple[Scene, Array]:
        """The model at given parameters, and the log prior of its hyperparameters over their q."""
        structure = state.structure
        params = {**transform_fn(state.transforms, free), **state.approximation}
        hyper_guide = self.guide.hyper_guide(structure.hyper, call)
        hyper, log_q = hyper_guide.draw(keys.hyper, params, call)
        nodes = nodes_of(structure, self.quadrature, keys.nodes)
        scene = scene_at(
            self.guide,
            structure,
            call,
            params,
            hyper,
            nodes,
            key=keys.model,
            for_gradient=not self.objective.needs_parts,
        )
        return scene, log_prior(scene.reading, structure.above) - log_q

    @full_precision()
    def scene(self, state: TSVGPState, key: Array, call: Call) -> tuple[Scene, Array]:
        """The model at the parameters of a state, and the log prior of its hyperparameters."""
        return self._scene(state, self.free(state.optim_state), _Keys.of(key), call)

    def reading(self, state: TSVGPState, call: Call) -> Reading:
        """The model as the next update of a state reads it, on the same batch."""
        keys = _Keys.of(jax.random.split(state.rng_key)[1])
        params = self.get_params(state)
        hyper, _ = self.guide.hyper_guide(state.structure.hyper, call).draw(
            keys.hyper, params, call
        )
        return read(self.model, call, values={**params, **hyper}, key=keys.model)

    @full_precision()
    def e_step(
        self, state: TSVGPState, key: Array, call: Call, rate: Any = None
    ) -> tuple[TSVGPState, Array, Array | None, Array | None]:
        """The state after the site updates of one iteration.

        Args:
          state: the state before.
          key: key of the iteration.
          call: arguments of the model.
          rate: step size; None for that of the driver.

        Returns:
          The state, a count of floored variances, what to report as the loss of the iteration in
          place of the loss of its M-step, or None, and whether there can be an M-step, None if that
          is not in question.
        """
        if not self.e_steps:
            return state, jnp.zeros((), int), None, None
        plan = plan_of(self, state, call)
        if plan is not None:
            return chunked_e_step(self, state, key, plan, rate)
        scene, prior = self._scene(state, self.free(state.optim_state), _Keys.of(key), call)
        if rate is None and self._is_careful(scene):
            assert self.adaptive is not None
            new = self._careful(state, scene, judge_last=True)
            kept = _keeping(state, self.guide.pack(new.proposed))
            is_settled = self.adaptive.is_settled(new.verified_bound, new.before)
            return dataclasses.replace(kept, rate=new.rate), new.floored, None, is_settled
        updated = self._updated(state, scene, rate)
        kept = _keeping(state, self.guide.pack(updated.kept))
        return kept, updated.floored, _reported(scene, updated, prior), None

    def _updated(self, state: TSVGPState, scene: Scene, rate: Any = None) -> Updated:
        if rate is None:
            rate = self.rate(state.step, scene.reading.subsampling)
        return e_steps(scene.still(), self.rule, rate, self.e_steps)

    def _is_careful(self, scene: Scene) -> bool:
        return self.adaptive is not None and scene.reading.subsampling == 1

    def _careful(self, state: TSVGPState, scene: Scene, *, judge_last: bool) -> Careful:
        assert self.adaptive is not None
        return careful_e_steps(
            *(scene.still(), self.rule, state.rate, self.e_steps, self.adaptive),
            judge_last=judge_last,
        )

    def _judged(
        self, state: TSVGPState, new: Careful, bound: Array
    ) -> tuple[TSVGPState, Array, Array]:
        """The state after careful E-steps whose last one led to a bound.

        Returns:
          The state, whether the last step was good, and whether M-steps can begin.
        """
        assert self.adaptive is not None
        bound = lax.stop_gradient(bound)
        ok, rate = self.adaptive.judged(new.rate, bound, new.verified_bound)
        reached = jnp.where(ok, bound, new.verified_bound)
        is_settled = self.adaptive.is_settled(reached, new.before)
        proposed = _keeping(state, self.guide.pack(new.proposed))
        verified = state
        if new.verified is not None:
            verified = _keeping(state, self.guide.pack(new.verified))
        kept = jax.tree.map(
            lambda a, b: jnp.where(ok, a, b), proposed.approximation, verified.approximation
        )
        return dataclasses.replace(state, approximation=kept, rate=rate), ok, is_settled

    @full_precision()
    def loss(
        self,
        state: TSVGPState,
        free: dict[str, Any],
        key: Array,
        call: Call,
        wanted: Any = None,
        sites: Mapping[str, PointSites] | None = None,
    ) -> Array:
        """Minus the objective, minus the log prior of the hyperparameters plus their entropy."""
        plan = plan_of(self, state, call)
        if plan is not None:
            return plan.mean_of_scalar(
                lambda free, part: self._loss_at(state, free, key, part), free
            )
        return self._loss_at(state, free, key, call, wanted, sites)

    def _loss_at(
        self,
        state: TSVGPState,
        free: dict[str, Any],
        key: Array,
        call: Call,
        wanted: Any = None,
        sites: Mapping[str, PointSites] | None = None,
    ) -> Array:
        scene, prior = self._scene(state, free, _Keys.of(key), call)
        if sites is None and self.objective.needs_rows:
            sites = sites_of_points(scene.still(), self.rule)
        return -(objective_of(scene, self.objective, wanted=wanted, sites=sites) + prior)

    def _held_sites(
        self, state: TSVGPState, key: Array, call: Call
    ) -> dict[str, PointSites] | None:
        """The site of each data point before M-steps, for an objective that asks for them."""
        if not self.objective.needs_rows:
            return None
        scene, _ = self._scene(state, self.free(state.optim_state), _Keys.of(key), call)
        return sites_of_points(scene.still(), self.rule)

    @full_precision()
    def iterate(self, state: TSVGPState, call: Call) -> tuple[TSVGPState, Array]:
        """The state after one iteration, and its loss."""
        check_state(self, state)
        check_axes(call)
        rng_key, key = jax.random.split(state.rng_key)
        optim, optim_state = self.optim, state.optim_state
        one_step = self.m_steps == 1 and bool(jax.tree.leaves(self.free(optim_state)))
        one_step = one_step and not self.objective.needs_parts
        one_step = one_step and (self.adaptive is None or self.objective.is_bound)
        one_step = one_step and plan_of(self, state, call) is None
        if optim is not None and one_step and evaluates_once(optim, optim_state):
            # One evaluation does both steps: they share all that depends on hyperparameters.
            def both(free: dict[str, Any]) -> tuple[Array, Any]:
                scene, prior = self._scene(state, free, _Keys.of(key), call)
                if not self.e_steps:
                    value = objective_of(scene, self.objective)
                    return -(value + prior), (state, jnp.zeros((), int), None, None)
                if self._is_careful(scene):
                    careful = self._careful(state, scene, judge_last=False)
                    value = objective_of(scene, self.objective, fresh=careful.proposed)
                    kept, ok, is_settled = self._judged(state, careful, value)
                    reported = -(jnp.where(ok, value, careful.verified_bound) + prior)
                    # An M-step at sites that were taken back is taken back, too.
                    return -(value + prior), (kept, careful.floored, reported, ok & is_settled)
                new = self._updated(state, scene)
                value = objective_of(scene, self.objective, fresh=new.kept)
                kept = _keeping(state, self.guide.pack(new.kept))
                return -(value + prior), (kept, new.floored, _reported(scene, new, prior), None)

            (loss, aux), moved = optim.eval_and_update(both, optim_state)
            state, floored, reported, can_move = aux
        else:
            (state, floored, reported, can_move), moved, loss = self._apart(state, key, call)
        if can_move is not None:
            moved = jax.tree.map(lambda a, b: jnp.where(can_move, a, b), moved, optim_state)
        loss = loss if reported is None else reported
        state = dataclasses.replace(
            state,
            optim_state=moved,
            rng_key=rng_key,
            step=state.step + 1,
            floored=state.floored + floored,
        )
        return self._synced(state, call), loss

    def _apart(
        self, state: TSVGPState, key: Array, call: Call
    ) -> tuple[tuple[TSVGPState, Array, Array | None, Array | None], Any, Array]:
        """E-steps and then M-steps, which have evaluations of their own.

        Returns:
          What :meth:`e_step` returns, the optimizer's state after the M-steps, and a loss.
        """
        if self._m_steps_judge(state, call):
            scene, prior = self._scene(state, self.free(state.optim_state), _Keys.of(key), call)
            if self._is_careful(scene):
                careful = self._careful(state, scene, judge_last=False)
                proposed = _keeping(state, self.guide.pack(careful.proposed))
                moved, losses = self._m_steps(proposed, key, call)
                # The first M-step starts at the bound that the last E-step led to.
                kept, ok, is_settled = self._judged(state, careful, -losses[0] - prior)
                held = jnp.where(ok, losses[0], -(careful.verified_bound + prior))
                reported = jnp.where(ok & is_settled, losses[-1], held)
                return (kept, careful.floored, reported, ok & is_settled), moved, losses[-1]
        after = self.e_step(state, key, call)
        moved, losses = self._m_steps(after[0], key, call)
        return after, moved, losses[-1]

    def _m_steps_judge(self, state: TSVGPState, call: Call) -> bool:
        """Whether the first loss of the M-steps is minus the bound after the E-steps."""
        optim, optim_state = self.optim, state.optim_state
        return (
            self.adaptive is not None
            and self.e_steps > 0
            and self.objective.is_bound
            and optim is not None
            and bool(jax.tree.leaves(self.free(optim_state)))
            and (isinstance(optim, Optax) or evaluates_once(optim, optim_state))
            and plan_of(self, state, call) is None
        )

    def _m_steps(self, state: TSVGPState, key: Array, call: Call) -> tuple[Any, Array]:
        """The optimizer's state after the M-steps, and the loss before each of them.

        Losses other than the last, and the first where it judges E-steps, may be left out.
        """
        sites = self._held_sites(state, key, call)

        def loss_fn(free: dict[str, Any], wanted: Any = None) -> tuple[Array, None]:
            return self.loss(state, free, key, call, wanted, sites), None

        optim, optim_state = self.optim, state.optim_state
        if optim is None or not jax.tree.leaves(self.free(optim_state)):
            return optim_state, loss_fn(self.free(optim_state))[0][None]
        gradient_is_enough = isinstance(optim, Optax) and optim.gradient_is_enough(optim_state)
        first_judges = self._m_steps_judge(state, call)

        def m_step(carry: Any, i: Any) -> tuple[Any, Array]:
            wanted = None
            if gradient_is_enough:
                wanted = i == self.m_steps - 1
                wanted = wanted | (i == 0) if first_judges else wanted
            (loss, _), new = optim.eval_and_update(partial(loss_fn, wanted=wanted), carry)
            return new, loss

        if hasattr(optim, "restart"):  # curvature of the last M-step's objective is stale
            optim_state = optim.restart(optim_state)
        if self.m_steps == 1:
            optim_state, loss = m_step(optim_state, 0)
            return optim_state, loss[None]
        return lax.scan(m_step, optim_state, jnp.arange(self.m_steps))

    def _synced(self, state: TSVGPState, call: Call) -> TSVGPState:
        """The state with what approximations keep of the data moved along with hyperparameters."""
        guide = self.guide
        follows = [name for name in state.structure.gps if guide.kind(name).follows_inputs]
        if not follows:
            return state
        params = self.get_params(state)
        hyper = guide.hyper_guide(state.structure.hyper, call).point(params)
        reading = read(self.model, call, values={**params, **hyper}, key=jax.random.key(0))
        latents = guide.latents(reading, params)
        kept = {name: latents[name].approximation.synced(latents[name].process) for name in follows}
        return _keeping(state, guide.pack(kept))

    @full_precision()
    def usable(self, state: TSVGPState, call: Call) -> Array:
        """Whether a state is finite and what it asks for can be factorised, so that one can go on.

        The loss of an update does not tell: it is that before the optimizer moved.
        """
        params = self.get_params(state)
        hyper = self.guide.hyper_guide(state.structure.hyper, call).point(params)
        reading = self.guide.read(call, params, hyper)
        factors = [
            approximation.factors(process)
            for process, approximation in self.guide.latents(reading, params).values()
        ]
        return all_finite((state.optim_state, params, factors))

    @full_precision()
    def iterate_stably(self, state: TSVGPState, call: Call) -> tuple[TSVGPState, Array]:
        """The same, or the state as it was where the iteration cannot be used."""
        new, loss = self.iterate(state, call)
        ok = jnp.isfinite(loss) & self.usable(new, call)
        optim_state, approximation = jax.tree.map(
            lambda a, b: jnp.where(ok, a, b),
            (new.optim_state, new.approximation),
            (state.optim_state, state.approximation),
        )
        kept = dataclasses.replace(
            new,
            optim_state=optim_state,
            approximation=approximation,
            rejected=state.rejected + ~ok,
        )
        return kept, jnp.where(ok, loss, jnp.nan)


def _reported(scene: Scene, new: Updated, prior: Array) -> Array | None:
    """Minus the bound before an E-step, where the data are a subsample; None where they are all."""
    return -(new.before + prior) if scene.reading.subsampling > 1 else None


def _keeping(state: TSVGPState, new: Mapping[str, Array]) -> TSVGPState:
    """The state with new parameters of approximations, those of the optimizer apart."""
    kept = {k: new.get(k, v) for k, v in state.approximation.items()}
    return dataclasses.replace(state, approximation=kept)
