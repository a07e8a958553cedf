"""A walk through a jaxpr that finds what every element of its results reads.

Functions that are called are walked through, all branches of a condition taken, short loops
followed step by step. What has no rule reads everything that goes into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from numpyro_tsvgp.model.rules import RULES, shapes
from numpyro_tsvgp.model.spans import Known, Spans, Unfit, Value, spread, tracked, whole

__all__ = ["Interpreter", "called"]

# Loops up to this length are followed step by step, so that their counters index exactly.
STEPS = 4096


class Interpreter(Spans):
    """Walks through jaxprs with arrays of which is known what they read.

    Args:
      latents: the number of latent functions.
      everything: the span ``(2 * latents + 1,)`` of something that reads all inputs.
    """

    def __init__(self, latents: int, everything: np.ndarray) -> None:
        super().__init__(latents)
        self.everything = everything
        # Keyed by identity, with the jaxpr itself so that the identity stays its own.
        self._plans: dict[int, tuple[Any, list[tuple[Any, list[Any]]]]] = {}
        self._control = {
            "cond": self._cond,
            "while": self._while,
            "scan": self._scan,
            "custom_linear_solve": self._solve,
        }

    def call(self, body: Any, args: Sequence[Value]) -> list[Value]:
        """The results of a jaxpr, closed or without constants."""
        jaxpr, consts = getattr(body, "jaxpr", body), getattr(body, "consts", ())
        env: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        env.update(zip(jaxpr.constvars, map(_constant, consts), strict=True))

        def value(atom: Any) -> Value:
            return _constant(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn, done in self._plan(jaxpr):
            results = self.equation(eqn, [value(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
            for variable in done:  # large arrays: not kept longer than needed
                del env[variable]
        return [value(atom) for atom in jaxpr.outvars]

    def _plan(self, jaxpr: Any) -> list[tuple[Any, list[Any]]]:
        """The equations that matter, each with the variables that are not needed after it."""
        if id(jaxpr) not in self._plans:
            needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
            plan: list[tuple[Any, list[Any]]] = []
            for eqn in reversed(jaxpr.eqns):
                if needed.isdisjoint(eqn.outvars):
                    continue
                used = {atom for atom in eqn.invars if not isinstance(atom, Literal)}
                plan.append((eqn, list((used | set(eqn.outvars)) - needed)))
                needed |= used
            self._plans[id(jaxpr)] = (jaxpr, plan[::-1])
        return self._plans[id(jaxpr)][1]

    def equation(self, eqn: Any, values: list[Value]) -> list[Value]:
        """The results of one equation."""
        name, body = eqn.primitive.name, called(eqn)
        if body is not None:
            return self.call(body, values)
        control = self._control.get(name)
        if not _plain(eqn) or (eqn.effects and control is None):
            # What a mutable array or the host gives back may have been put there before.
            self.opaque.add(name)
            return [Value(spread(self.everything, shape)) for shape in shapes(eqn.outvars)]
        if not tracked(values) and not eqn.effects:
            return _evaluated(eqn, values)
        try:
            if control is not None:
                return control(eqn, values)
            if name in RULES:
                return RULES[name](self, eqn, values)
        except (KeyError, Unfit):  # parameters of another version of JAX, or a rare form
            pass
        self.opaque.add(name)
        return self._mixed(eqn, values)

    def _mixed(self, eqn: Any, values: Sequence[Value]) -> list[Value]:
        """Results that read all that goes into an equation."""
        spans = [whole(span) for span in tracked(values)]
        if eqn.effects:
            spans.append(self.everything)
        inputs = self.term(spans, eqn.primitive.name)
        return self.moved([inputs], lambda s: [spread(s[0], out) for out in shapes(eqn.outvars)])

    def _cond(self, eqn: Any, values: list[Value]) -> list[Value]:
        choice, *args = values
        branches = [self.call(branch, args) for branch in eqn.params["branches"]]
        if choice.span is None:
            return [self.linear(cases) for cases in zip(*branches, strict=True)]
        return [
            self.term([spread(choice.span, shape), *tracked(cases)], "cond")
            for cases, shape in zip(zip(*branches, strict=True), shapes(eqn.outvars), strict=True)
        ]

    def _solve(self, eqn: Any, values: list[Value]) -> list[Value]:
        lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
        start = lengths.matvec + lengths.vecmat
        consts, right = values[start : start + lengths.solve], values[sum(lengths) :]
        return self.call(jaxprs.solve, [*consts, *right])

    def _while(self, eqn: Any, values: list[Value]) -> list[Value]:
        tests, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        first, second = values[:tests], values[tests : tests + consts]

        def step(carry: list[Value]) -> list[Value]:
            (test,) = self.call(eqn.params["cond_jaxpr"], [*first, *carry])
            results = self.call(eqn.params["body_jaxpr"], [*second, *carry])
            if test.span is None:
                return results
            # Whether the body runs once more decides about everything. After vmap there is a
            # test for each element along leading axes, and it decides about that element.
            return [
                self.term([_leading(test.span, shape), *tracked([result])], "while")
                for result, shape in zip(results, shapes(eqn.outvars), strict=True)
            ]

        return self._settled(eqn, values, values[tests + consts :], step)

    def _settled(
        self,
        eqn: Any,
        values: list[Value],
        carry: list[Value],
        step: Callable[[list[Value]], list[Value]],
    ) -> list[Value]:
        """A carry that reads all that it may read after any number of steps."""
        name = eqn.primitive.name
        self.opaque.add(name)
        for _ in range(32):
            joined = [
                self.term(spans, name) if (spans := tracked(pair)) else Value()
                for pair in zip(carry, step(carry), strict=True)
            ]
            stable = all(
                old.known is None and np.array_equal(tracked([old]), tracked([new]))
                for old, new in zip(carry, joined, strict=True)
            )
            carry = joined
            if stable:
                return carry
        return self._mixed(eqn, values)[: len(carry)]

    def _scan(self, eqn: Any, values: list[Value]) -> list[Value]:
        body, length, reverse = (eqn.params[key] for key in ("jaxpr", "length", "reverse"))
        if "num_consts" in eqn.params:
            first, size = eqn.params["num_consts"], eqn.params["num_carry"]
        else:
            first, size = (len(part) for part in eqn.params["ft_in"].unpack()[:2])
        consts, carry, xs = values[:first], values[first : first + size], values[first + size :]
        if size == 0:  # independent steps
            axes = tuple(None if i < first else 0 for i in range(len(values)))
            batched = jax.vmap(jaxpr_as_fun(body), axes, axis_size=length)
            return self.call(jax.make_jaxpr(batched)(*_structs(eqn.invars)), values)
        if length > STEPS:
            every = [self._one_term(x, lambda span: whole(span, [0])) for x in xs]
            carry = self._settled(
                eqn, values, carry, lambda c: self.call(body, [*consts, *c, *every])[:size]
            )
            ys = self.call(body, [*consts, *carry, *every])[size:]
            return carry + [
                self._one_term(y, lambda span, to=shape: spread(span[:, None], to))
                for y, shape in zip(ys, shapes(eqn.outvars[size:]), strict=True)
            ]
        columns: list[list[Value]] = [[] for _ in eqn.outvars[size:]]
        for t in reversed(range(length)) if reverse else range(length):
            results = self.call(body, [*consts, *carry, *(_at(x, t) for x in xs)])
            carry = results[:size]
            for column, y in zip(columns, results[size:], strict=True):
                column.append(y)
        return carry + [
            self._stacked(column[::-1] if reverse else column, shape)
            for column, shape in zip(columns, shapes(eqn.outvars[size:]), strict=True)
        ]

    def _one_term(self, value: Value, move: Callable[..., np.ndarray]) -> Value:
        """The elements moved, each of them one term, with no value known."""
        return Value() if value.span is None else self.term([move(value.span)], value.origin)

    def _stacked(self, values: Sequence[Value], shape: Sequence[int]) -> Value:
        if not tracked(values):
            return Value()
        full = [self.filled(value, shape[1:]) for value in values]
        return self.moved(full, lambda spans: [np.stack(spans, 1)])[0]


def _constant(value: Any) -> Value:
    # A tracer was closed over by a function that is itself being traced.
    return Value() if isinstance(value, jax.core.Tracer) else Value(known=Known(lambda: value))


def _at(value: Value, t: int) -> Value:
    """One step of an array that a loop goes over."""
    known = None if value.known is None else Known(lambda array: array[t], [value.known])
    span = None if value.span is None else value.span[:, t]
    return Value(span, known, value.met, value.origin)


def _leading(span: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """A span broadcast along the last axes of a shape."""
    return spread(span.reshape(*span.shape, *(1 for _ in shape[span.ndim - 1 :])), shape)


def _structs(atoms: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]


def _plain(eqn: Any) -> bool:
    """Whether an equation is between arrays, none of them mutable."""
    return all(isinstance(a.aval, jax.core.ShapedArray) for a in (*eqn.invars, *eqn.outvars))


def _evaluated(eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Results that read nothing; known if the arguments are."""
    knowns = [value.known for value in values if value.known is not None]
    if len(knowns) < len(values):
        return [Value() for _ in eqn.outvars]

    def compute(*args: Any) -> Any:
        with eqn.ctx.manager:
            results = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
        return results if eqn.primitive.multiple_results else [results]

    results = Known(compute, knowns)
    return [
        Value(known=Known(lambda every, i=i: every[i], [results])) for i in range(len(eqn.outvars))
    ]


def called(eqn: Any) -> Any:
    """The jaxpr that an equation does no more than call, whatever JAX names such a thing."""
    name = eqn.primitive.name
    if name == "call_hi_primitive" and _plain(eqn) and not eqn.effects:
        lower = partial(eqn.primitive.to_lojax, **eqn.params)
        return jax.make_jaxpr(lower)(*_structs(eqn.invars))
    bodies = [body for body in eqn.params.values() if hasattr(body, "eqns")]
    if len(bodies) != 1 or any(word in name for word in ("scan", "while", "loop")):
        return None
    inner, consts = getattr(bodies[0], "jaxpr", bodies[0]), getattr(bodies[0], "consts", ())
    # Applied once, and to whole arrays, if these fit one to one.
    fits = shapes(inner.invars) == shapes(eqn.invars) and len(inner.constvars) == len(consts)
    return bodies[0] if fits and shapes(inner.outvars) == shapes(eqn.outvars) else None
