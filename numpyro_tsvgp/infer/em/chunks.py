r"""Full-batch updates in bounded memory: rows go in blocks, where all at once would need too much.

An update holds a few numbers for each row, latent function and inducing input. If that is more than
a budget, the rows are split into blocks that are visited in turn, inside of the compiled update. A
block is the model on some rows of its arguments, weighted so that it stands for all of them; the
mean over blocks of the bound, of its gradient and of a natural-gradient step is that of all rows.
It is done where the program of the model proves that each row can be computed by itself
(:mod:`numpyro_tsvgp.model.by_rows`), and not otherwise.

Row i belongs to block i modulo their number, so that of rows that are spread over devices each
device has its part of every block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian.rows import number_of_blocks
from numpyro_tsvgp.infer.state import TSVGPState
from numpyro_tsvgp.infer.steps.density import asked_at
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.by_rows import RowFactors, row_factors, rows_of, with_rows
from numpyro_tsvgp.model.read import read

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.em.iteration import Iteration

__all__ = ["BUDGET", "Plan", "chunked_e_step", "plan_of"]

BUDGET = 2**30
"""Bytes that an update may hold for its rows."""

# Measured: numbers that an update holds for each row, latent function and inducing input.
_NUMBERS = 6


class Plan(NamedTuple):
    """How the rows of some arguments are split.

    Attributes:
      call: the arguments.
      rows: how many rows they have.
      blocks: how many blocks of one size there are.
      factors: the weights of the sites of such a block.
      rest_factors: those of the rows that are left over.
      subsampling: how many data points each of all rows stands for.
    """

    call: Call
    rows: int
    blocks: int
    factors: RowFactors
    rest_factors: RowFactors
    subsampling: float

    @property
    def size(self) -> int:
        return self.rows // self.blocks

    @property
    def rest(self) -> Call | None:
        """The rows that are left over, fewer than blocks; None if there are none."""
        first = self.size * self.blocks
        if first == self.rows:
            return None
        return with_rows(self.call, self.rows, lambda x: x[first:]).standing_for_more(
            self.rest_factors
        )

    def _block(self, leaves: list[Array]) -> Call:
        structure = jax.tree.structure(self.call)
        return jax.tree.unflatten(structure, leaves).standing_for_more(self.factors)

    def first(self) -> Call:
        """One block."""
        return self._block([leaf[0] for leaf in self._stacked()])

    def _stacked(self) -> list[Array]:
        """Arrays with an axis of blocks in front."""

        def stack(leaf: Array) -> Array:
            if not leaf.ndim or leaf.shape[0] != self.rows:
                return jnp.broadcast_to(leaf, (self.blocks, *leaf.shape))
            leaf = leaf[: self.size * self.blocks]
            return leaf.reshape(self.size, self.blocks, *leaf.shape[1:]).swapaxes(0, 1)

        return [stack(jnp.asarray(leaf)) for leaf in jax.tree.leaves(self.call)]

    def mean(self, function: Callable[[Call], Any]) -> Any:
        """The mean over blocks of a function of a block, with as many weights as they have rows."""
        shapes = jax.eval_shape(lambda: function(self.first()))
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        weight = self.size / self.rows

        def add(total: Any, leaves: list[Array]) -> tuple[Any, None]:
            value = function(self._block(leaves))
            return jax.tree.map(lambda t, v: t + weight * v, total, value), None

        total, _ = lax.scan(add, zero, self._stacked())
        rest = self.rest
        if rest is None:
            return total
        weight = 1 - self.size * self.blocks / self.rows
        return jax.tree.map(lambda t, v: t + weight * v, total, function(rest))

    def mean_of_scalar(self, function: Callable[[Any, Call], Array], free: Any) -> Array:
        """The mean over blocks of a scalar function, with a first derivative in ``free``.

        The derivative is computed block by block together with the value, so that nothing of a
        block is kept for it.
        """

        @jax.custom_jvp
        def value(free: Any) -> Array:
            return self.mean(lambda call: function(free, call))

        @value.defjvp
        def value_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
            found, slope = self.mean(lambda call: jax.value_and_grad(function)(primals[0], call))
            parts = jax.tree.map(lambda g, t: jnp.sum(g * t), slope, tangents[0])
            return found, sum(jax.tree.leaves(parts), jnp.zeros_like(found))

        return value(free)


def plan_of(driver: Iteration, state: TSVGPState, call: Call) -> Plan | None:
    """How an update on some arguments is to be split, or None if it is not.

    Args:
      driver: the driver.
      state: its state.
      call: arguments of the model.

    Returns:
      The plan.
    """
    rows = rows_of(call)
    params = driver.get_params(state)
    kept = {name: driver.guide.unpack(name, params) for name in state.structure.gps}
    sizes = [approximation.inducing.shape[0] for approximation in kept.values()]
    least = _NUMBERS * rows * max(sizes) * 4
    if least <= driver.memory_budget or not all(a.keeps_sums for a in kept.values()):
        return None
    if driver.adaptive is not None or call.whole or call.alone or call.factors:
        return None
    averages = getattr(driver.rule, "averages", False) or not driver.e_steps
    if not averages or not driver.objective.is_bound:
        return None
    reading = read(driver.model, call, values=params, key=jax.random.key(0), first_rows=True)
    bytes_ = sum(
        _NUMBERS * site.rows * site.functions * m * jnp.dtype(site.loc.dtype).itemsize
        for site, m in zip(reading.gps.values(), sizes, strict=True)
    )
    blocks = number_of_blocks(rows, -(-bytes_ // driver.memory_budget))
    if blocks <= 1:
        return None
    size, rest = divmod(rows, blocks)
    factors = row_factors(driver.model, reading, call, size)
    rest_factors = row_factors(driver.model, reading, call, rest) if rest else ()
    if factors is None or rest_factors is None:
        return None
    return Plan(call, rows, blocks, factors, rest_factors, reading.subsampling)


def chunked_e_step(
    driver: Iteration, state: TSVGPState, key: Array, plan: Plan, rate: Any = None
) -> tuple[TSVGPState, Array, Array | None, None]:
    """The E-steps of one iteration, block by block; see :meth:`Iteration.e_step`."""
    if rate is None:
        rate = driver.rate(state.step, plan.subsampling)

    def step(carries: Any) -> tuple[Any, Array, Array]:
        def of(call: Call) -> tuple[Any, Array, Array]:
            scene, prior = driver.scene(state, key, call)
            scene = scene.still()
            asked = asked_at(scene, driver.rule, carries)
            share = rows_of(call) / plan.rows  # so that the weighted mean is a sum
            new = asked.step(driver.rule, carries, rate)
            return new, asked.floored / share, -(asked.bound + prior)

        return plan.mean(of)

    scene = driver.scene(state, key, plan.first())[0].still()
    start = {name: at.start() for name, at in scene.at.items()}
    carries, floored, before = step(start)
    if driver.e_steps > 1:

        def more(_: Any, found: tuple[Any, Array]) -> tuple[Any, Array]:
            carries, floored, _ = step(found[0])
            return carries, found[1] + floored

        carries, floored = lax.fori_loop(1, driver.e_steps, more, (carries, floored))
    new = driver.guide.pack({name: at.keep(carries[name]) for name, at in scene.at.items()})
    kept = {name: new.get(name, value) for name, value in state.approximation.items()}
    state = dataclasses.replace(state, approximation=kept)
    count = jnp.round(floored).astype(int)
    return state, count, before if plan.subsampling > 1 else None, None
