"""Whether rows can be appended to the arguments of a model without a change to all others.

Programs are compiled for shapes. Rows that are repeated up to one of a few sizes let calls of any
size share them, provided that a model makes of each row what it would make of it without the
others. A model that centres its inputs by their own mean, or divides by their number, does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import Model, is_gp, read, run_with
from numpyro_tsvgp.model.reads import Reads, Source, reads

__all__ = ["rows_stand_alone"]

# Rows of the kernel that are looked at.
_PAIR = 2
# Answers that are remembered. They depend on shapes alone and hold for all values.
_MOST_ANSWERS = 256
_answers: dict[Any, bool] = {}


def rows_stand_alone(
    model: Model, call: Call, longer: Call, flags: Sequence[bool], values: Mapping[str, Any]
) -> bool:
    """Whether a model makes of the rows of a call what it makes of them in a longer one.

    Proven from the programs of both, for all values of the rows: inputs and mean of the GPs, their
    kernels, and distributions and values of all other sites read no row but their own, and the
    programs are the same but for the sizes of arrays. It errs on one side only. The proof is for
    any values of all other arguments and of hyperparameters too, so it is made once for each size
    of the longer call.

    Args:
      model: the NumPyro model.
      call: arguments.
      longer: the same with more rows after those that are there.
      flags: which arrays of the arguments have rows.
      values: values of parameters and hyperparameters, by name.

    Returns:
      Whether rows may be appended.

    Examples:
      >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
      >>> from numpyro_tsvgp import GP, kernels
      >>> from numpyro_tsvgp.model.arguments import Call
      >>> from numpyro_tsvgp.model.padding import rows_stand_alone
      >>> def model(X, centred):
      ...     X = X - X.mean() if centred else X
      ...     f = numpyro.sample("f", GP(kernels.RBF(1.0), X))
      ...     numpyro.sample("y", dist.Bernoulli(logits=f))
      >>> def alone(centred):
      ...     calls = [Call((jnp.zeros(n), centred), {}) for n in (3, 8)]
      ...     return rows_stand_alone(model, *calls, (True,), {})
      >>> alone(False), alone(True)
      (True, False)
    """
    leaves, structure = jax.tree.flatten(call)
    lengths = {leaf.shape[0] for leaf, yes in zip(leaves, flags, strict=True) if yes}
    more = {leaf.shape[0] for leaf, yes in zip(jax.tree.leaves(longer), flags, strict=True) if yes}
    if len(lengths) != 1 or len(more) != 1:
        return False
    known = {name: _shape(value) for name, value in values.items()}
    question = _Question(
        model,
        structure,
        tuple(_shape(leaf) for leaf in leaves),
        tuple(flags),
        tuple(sorted(known.items())),
        more.pop(),
    )
    rows = lengths.pop()
    if rows > 1:  # for which arrays broadcast, and models may say something of their own
        question = question.of_any_number()
    try:
        known_answer = _answers.get(question)
    except TypeError:  # arguments that cannot be looked up
        return _answer(question, rows)
    if known_answer is None:
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        known_answer = _answers[question] = _answer(question, rows)
    return known_answer


class _Question(NamedTuple):
    """What the answer depends on: a model, and the shapes of its arguments."""

    model: Model
    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    flags: tuple[bool, ...]
    values: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
    size: int

    def with_rows(self, rows: int) -> list[jax.ShapeDtypeStruct]:
        """The arguments with another number of rows."""
        return [
            jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) if yes else leaf
            for leaf, yes in zip(self.leaves, self.flags, strict=True)
        ]

    def of_any_number(self) -> _Question:
        return self._replace(leaves=tuple(self.with_rows(0)))


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        np.shape(array), jax.dtypes.canonicalize_dtype(jnp.result_type(array))
    )


def _answer(question: _Question, rows: int) -> bool:
    try:
        return _proven(question, rows)
    except Exception:  # of a model that does not run with more rows, or not on shapes alone
        return False


def _proven(question: _Question, rows: int) -> bool:
    programs, results = [], []
    for n in (rows, question.size):
        function, tracked, unknown = _made(question, n)
        program, shapes = jax.make_jaxpr(function, return_shape=True)(tracked, unknown)
        programs.append(program)
        results.append(shapes)
    structures: list[Any] = [jax.tree.structure(result) for result in results]
    if structures[0] != structures[1]:
        return False
    if not _same_but_for_sizes(*programs):
        return False
    arrays, gps = tracked
    sources = (
        [_source(x.shape, 0) for x in arrays],
        {name: _source(x.shape, -1) for name, x in gps.items()},
    )
    found = reads(function, tracked, sources, unknown).results
    is_reads = {"is_leaf": lambda x: isinstance(x, Reads)}
    own = jax.tree.map(_own_row, found["by row"], *(r["by row"] for r in results), **is_reads)
    pairs = jax.tree.leaves(found["kernels"], **is_reads)
    return all(jax.tree.leaves(own)) and all(bool((x.high < _PAIR).all()) for x in pairs)


def _made(question: _Question, n: int) -> Any:
    """What a model makes of rows of its arguments and values of its GPs, as a function of both."""
    model, flags = question.model, question.flags
    leaves = question.with_rows(n)
    rows = [leaf for leaf, yes in zip(leaves, flags, strict=True) if yes]
    others = [leaf for leaf, yes in zip(leaves, flags, strict=True) if not yes]

    def at(rows: list[Array], unknown: Any) -> tuple[Call, Any]:
        others, values = unknown
        arrays = {True: iter(rows), False: iter(others)}
        here = jax.tree.unflatten(question.structure, [next(arrays[yes]) for yes in flags])
        key = jax.random.key(0)
        return here, read(model, here, values=values, key=key, first_rows=True)

    def gp_values(rows: list[Array], unknown: Any) -> dict[str, Array]:
        sites = at(rows, unknown)[1].gps.items()
        return {k: jnp.zeros((s.functions, s.rows), s.loc.dtype) for k, s in sites}

    def function(tracked: Any, unknown: Any) -> dict[str, Any]:
        rows, gps = tracked
        here, reading = at(rows, unknown)
        shaped = {name: reading.gps[name].unflatten(value) for name, value in gps.items()}
        trace = run_with(model, here, {**reading.pinned, **shaped})
        by_row: dict[str, Any] = {n: [s.gp.X, s.loc] for n, s in reading.gps.items()}
        for name, site in trace.items():
            if site["type"] == "sample" and not is_gp(site):
                value = site["value"] if site["is_observed"] else None
                arrays = jax.tree.leaves((site["fn"], site["scale"], value))
                by_row[name] = [jnp.asarray(x) for x in arrays]
        few = {n: (s.gp.kernel, s.gp.X[:_PAIR]) for n, s in reading.gps.items()}
        return {"by row": by_row, "kernels": {n: kernel(X, X) for n, (kernel, X) in few.items()}}

    unknown = others, dict(question.values)
    return function, (rows, jax.eval_shape(gp_values, rows, unknown)), unknown


def _source(shape: tuple[int, ...], axis: int) -> Source:
    return Source(np.zeros(shape, int), np.indices(shape)[axis])


def _own_row(found: Reads, short: Any, long: Any) -> bool:
    """Whether the elements of a result read nothing but the row that they are in."""
    nothing = found.none[..., 0]
    pairs = enumerate(zip(short.shape, long.shape, strict=True))
    differ = [axis for axis, (few, more) in pairs if few != more]
    if len(differ) != 1:
        return not differ and bool(nothing.all())
    row = np.indices(long.shape)[differ[0]]
    own = (found.low[..., 0] == row) & (found.high[..., 0] == row)
    return bool((nothing | own).all())


# ---- programs --------------------------------------------------------------------------------


def _same_but_for_sizes(one: Any, other: Any) -> bool:
    """Whether two programs do the same with the same numbers, to arrays of any size."""
    pairs = zip(getattr(one, "consts", ()), getattr(other, "consts", ()), strict=False)
    if not all(_same_start(a, b) for a, b in pairs):
        return False
    a, b = (getattr(x, "jaxpr", x) for x in (one, other))
    if len(a.eqns) != len(b.eqns) or not _same_operands(a.outvars, b.outvars):
        return False
    for x, y in zip(a.eqns, b.eqns, strict=True):
        if x.primitive.name != y.primitive.name or not _same_operands(x.invars, y.invars):
            return False
        inner = [_programs_in(equation.params) for equation in (x, y)]
        if len(inner[0]) != len(inner[1]):
            return False
        if not all(map(_same_but_for_sizes, *inner)):
            return False
    return True


def _same_operands(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether operands are the same where they are numbers."""

    def same(a: Any, b: Any) -> bool:
        known = hasattr(a, "val"), hasattr(b, "val")
        return known[0] == known[1] and (not known[0] or _same_start(a.val, b.val))

    return len(some) == len(others) and all(map(same, some, others))


def _same_start(a: Any, b: Any) -> bool:
    """Whether known arrays are equal as far as both go."""
    if not all(isinstance(x, np.ndarray | np.generic | jax.Array | float | int) for x in (a, b)):
        return True  # keys of random numbers, and functions, have no size
    if isinstance(a, jax.Array) and jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended):
        return True
    a, b = np.asarray(a), np.asarray(b)
    if a.ndim != b.ndim:
        return False
    common = tuple(slice(min(pair)) for pair in zip(a.shape, b.shape, strict=True))
    return np.array_equal(a[common], b[common], equal_nan=a.dtype.kind == "f")


def _programs_in(params: Mapping[str, Any]) -> list[Any]:
    found = []
    for name in sorted(params):
        value = params[name]
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(one, "jaxpr", one), "eqns"):
                found.append(one)
    return found
