"""E-steps whose length the library chooses, by the bound.

An E-step is a Newton step in the marginals and can be too long: it overshoots, and in a cycle or
away from the optimum it stays. The bound tells. A step that lowers it is taken back and shortened,
later ones are lengthened again. The bound after a step is what the next step or the M-step computes
anyway, so that it costs next to nothing while all goes well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian.approximation import Approximation
from numpyro_tsvgp.infer.steps.density import AskedAll, Scene, asked_at, bound_at
from numpyro_tsvgp.infer.steps.rules import SiteRule

__all__ = ["Adaptive", "Careful", "careful_e_steps"]

# Nats by which a step may lower the bound. Where negative curvature is clipped, the last steps to
# the fixed point do, by less.
_SLACK = 1e-2
# One that does so by more than this is accepted and the next is shortened all the same, though not
# below a rate at which steps hardly ever cycle: else a small cycle could stay within the slack.
_NOTICED, _ENOUGH = 1e-4, 0.25
_LENGTHEN, _SHORTEN = 1.25, 0.5
# A fall by more than this part of the bound, or no finite bound, is a step that is far too long.
_FAR, _SHORTEN_FAR = 0.1, 0.25
# While E-steps raise the bound by more than this part of it, M-steps wait: the gradients of a bound
# that is far off would spoil the step sizes of an adaptive optimizer for thousands of updates.
_UNSETTLED = 0.1
# A step of this length that still lowers the bound is not to blame for it.
_SHORTEST = 1e-5


@dataclass(frozen=True)
class Adaptive:
    r"""The rate of E-steps, chosen by the bound: ``site_lr="auto"`` is ``Adaptive()``.

    On full batches a step is accepted if it does not lower the bound by more than 0.01 nats. One
    that does is taken back, together with the M-step that followed it, and the rate is halved, or
    quartered where the bound fell by more than a tenth. After each accepted step the rate grows by
    a quarter, up to ``largest``; if the step lowered the bound all the same, by more than 1e-4
    nats, the rate is halved instead, but not below 0.25. While accepted steps raise the bound by
    more than a tenth, as they do at the start, there are no M-steps. The rate is part of the state,
    so that a loop of your own around ``svi.update`` is as safe as ``svi.run``.

    A minibatch cannot tell whether a step is too long, since sites that follow a batch raise the
    bound of that batch. There the rate is that of the default,
    :math:`\tfrac12 \sqrt{|M|/N} / (1 + \text{epochs}/10)`.

    Args:
      start: the first rate, in (0, 1].
      largest: the largest one.

    Examples:
      >>> from numpyro_tsvgp.infer.steps.adaptive import Adaptive
      >>> Adaptive()
      Adaptive(start=0.5, largest=1.0)
    """

    start: float = 0.5
    largest: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.start <= self.largest <= 1:
            raise ValueError(
                "The rate of E-steps must satisfy 0 < start <= largest <= 1, got "
                f"{self.start} and {self.largest}."
            )

    def is_settled(self, bound: Array, than: Array) -> Array:
        """Whether a step from one bound to another leaves it where M-steps can begin."""
        return bound - than <= _UNSETTLED * (1 + jnp.abs(bound))  # not if one is not finite

    def judged(self, rate: Array, bound: Array, than: Array) -> tuple[Array, Array]:
        """Whether a step is accepted, and the rate of the next one.

        Args:
          rate: its rate.
          bound: the bound after it.
          than: the bound before it.

        Returns:
          A boolean and a rate.
        """
        rounding = 10 * jnp.finfo(bound.dtype).eps * jnp.abs(than)
        is_finite = jnp.isfinite(bound)
        is_near = bound >= than - (_SLACK + rounding)
        ok = is_finite & (~jnp.isfinite(than) | is_near | (rate <= _SHORTEST))
        is_far = ~is_finite | (than - bound > _FAR * (1 + jnp.abs(than)))
        shorter = jnp.maximum(rate * jnp.where(is_far, _SHORTEN_FAR, _SHORTEN), _SHORTEST)
        longer = jnp.minimum(rate * _LENGTHEN, self.largest)
        is_lower = is_near & (bound < than - (_NOTICED + rounding))
        damped = jnp.minimum(rate, jnp.maximum(rate * _SHORTEN, _ENOUGH))
        longer = jnp.where(is_lower, damped, longer)
        return ok, lax.stop_gradient(jnp.where(ok, longer, shorter))


class Careful(NamedTuple):
    """What careful site updates led to.

    Attributes:
      proposed: the approximations after all of them. The last one may have to be judged.
      verified: those before the last one; None if it was the only one, and they are the start.
      verified_bound: the bound of what has been judged.
      floored: how many marginal variances were floored on the way.
      before: the bound before the first update.
      rate: the rate of the last one, or of the next one where all have been judged.
    """

    proposed: dict[str, Approximation]
    verified: dict[str, Approximation] | None
    verified_bound: Array
    floored: Array
    before: Array
    rate: Array


def careful_e_steps(
    scene: Scene,
    rule: SiteRule,
    rate: Array,
    steps: int,
    adaptive: Adaptive,
    *,
    judge_last: bool,
) -> Careful:
    """Site updates of every GP at fixed hyperparameters, each judged by the one after it.

    Args:
      scene: the model at the current hyperparameters.
      rule: the site rule, one that climbs the bound.
      rate: the first rate.
      steps: number of updates.
      adaptive: how the rate changes.
      judge_last: whether to judge the last update, too, for which the bound is computed. Else it
        is up to whoever knows the bound.

    Returns:
      The approximations after the updates.
    """
    start = {name: at.start() for name, at in scene.at.items()}
    first = asked_at(scene, rule, start)

    def step(_: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        carries, asked, bound, proposed, rate, floored = state
        new = asked_at(scene, rule, proposed)
        ok, rate = adaptive.judged(rate, new.bound, bound)
        carries, asked, bound = jax.tree.map(
            lambda a, b: jnp.where(ok, a, b),
            (proposed, _arrays(new), new.bound),
            (carries, asked, bound),
        )
        proposed = _with_arrays(new, asked).step(rule, carries, rate)
        return carries, asked, bound, proposed, rate, floored + new.floored

    proposed = first.step(rule, start, rate)
    if judge_last:
        state = start, _arrays(first), first.bound, proposed, rate, first.floored
        if steps > 1:
            state = lax.fori_loop(1, steps, step, state)
        carries, _, bound, proposed, rate, floored = state
        new = bound_at(scene, proposed)
        ok, rate = adaptive.judged(rate, new, bound)
        carries, bound = jax.tree.map(
            lambda a, b: jnp.where(ok, a, b), (proposed, new), (carries, bound)
        )
        kept = {name: at.keep(carries[name]) for name, at in scene.at.items()}
        return Careful(kept, None, bound, floored, first.bound, rate)
    if steps == 1:
        kept = {name: at.keep(proposed[name]) for name, at in scene.at.items()}
        return Careful(kept, None, first.bound, first.floored, first.bound, rate)
    state = start, _arrays(first), first.bound, proposed, rate, first.floored
    state = lax.fori_loop(1, steps, step, state)
    carries, _, bound, proposed, rate, floored = state
    kept = {name: at.keep(proposed[name]) for name, at in scene.at.items()}
    verified = {name: at.keep(carries[name]) for name, at in scene.at.items()}
    return Careful(kept, verified, bound, floored, first.bound, rate)


def _arrays(asked: AskedAll) -> dict[str, Any]:
    """What changes from one step to the next."""
    return {name: a._replace(at=None) for name, a in asked.by_gp.items()}  # type: ignore[arg-type]


def _with_arrays(asked: AskedAll, arrays: dict[str, Any]) -> AskedAll:
    return asked._replace(
        by_gp={name: a._replace(at=asked.by_gp[name].at) for name, a in arrays.items()}
    )
