"""What the results of one operation read: a rule for each primitive of JAX that has no body.

The rules hold for all values of the inputs. Known values are used where they say *where*
something is read: indices, and the zeros of a matrix in a product. Elsewhere they are not: a
mask, or a factor that is zero, may differ in the next batch of data.

A rule takes the algebra of spans, the equation and its arguments, at least one of which reads
something. It raises :class:`~numpyro_tsvgp.model.spans.Unfit`, or a ``KeyError`` for parameters
of another version of JAX, if it does not cover the equation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tsvgp.model.spans import NONE, Spans, Unfit, Value, spread, tracked, union, whole

__all__ = ["RULES", "Rule", "shapes"]

Rule = Callable[[Spans, Any, list[Value]], list[Value]]

# Elements of the arrays made for a product; larger ones are split, or seen less exactly.
BLOCK = 2**22


def shapes(atoms: Iterable[Any]) -> list[tuple[int, ...]]:
    """The shapes of variables and literals of a jaxpr."""
    return [tuple(getattr(atom.aval, "shape", ())) for atom in atoms]


def _inexact(eqn: Any) -> bool:
    # Integers are not linear: they are rounded when made, and in a division.
    return bool(jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact))


# --- element by element -----------------------------------------------------------------------


def _elementwise(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    name, (shape,) = eqn.primitive.name, shapes(eqn.outvars)
    parts = [
        Value() if v.span is None else Value(spread(v.span, shape), met=v.met, origin=v.origin)
        for v in values
    ]
    read = [i for i, part in enumerate(parts) if part.span is not None]
    linear = (
        name in LINEAR
        or (name == "mul" and len(read) == 1)
        or (name == "div" and read == [0])
        or (name == "select_n" and 0 not in read)
    )
    if linear and _inexact(eqn):
        return [algebra.linear(parts)]
    return [algebra.term(tracked(parts), name)]


def _identity(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    return values


# fmt: off
LINEAR = frozenset([
    "add", "add_any", "complex", "conj", "convert_element_type", "copy", "copy_p", "imag", "name",
    "neg", "real", "reduce_precision", "stop_gradient", "sub",
])
NONLINEAR = frozenset([
    "abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "cos", "cosh", "digamma",
    "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "igamma", "igamma_grad_a", "igammac", "integer_pow", "is_finite", "le", "le_to", "lgamma",
    "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "ne",
    "nextafter", "not", "one_minus_square", "or", "polygamma", "polynomial", "population_count",
    "pow", "random_gamma_grad", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "tan", "tanh", "xor", "zeta",
])
# fmt: on


# --- elements moved about ---------------------------------------------------------------------


def _broadcast(params: Mapping[str, Any], span: np.ndarray) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], span.shape[1:], strict=True):
        shape[axis] = size
    return spread(span.reshape(len(span), *shape), params["shape"])


def _slice(params: Mapping[str, Any], span: np.ndarray) -> np.ndarray:
    strides = params["strides"] or [None] * (span.ndim - 1)
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return span[(slice(None), *(slice(*bound) for bound in bounds))]


# From parameters and spans to spans. NumPy does these without compiling anything.
MOVES: dict[str, Callable[..., Sequence[np.ndarray]]] = {
    "broadcast_in_dim": lambda p, span: [_broadcast(p, span)],
    "concatenate": lambda p, *spans: [np.concatenate(spans, p["dimension"] + 1)],
    "rev": lambda p, span: [np.flip(span, tuple(axis + 1 for axis in p["dimensions"]))],
    "slice": lambda p, span: [_slice(p, span)],
    "split": lambda p, span: np.split(span, np.cumsum(p["sizes"])[:-1], p["axis"] + 1),
    "stack": lambda p, *spans: [np.stack(spans, p["axis"] + 1)],
    "tile": lambda p, span: [np.tile(span, (1, *p["reps"]))],
    "transpose": lambda p, span: [span.transpose(0, *(axis + 1 for axis in p["permutation"]))],
    "unstack": lambda p, span: list(np.moveaxis(span, p["axis"] + 1, 0)),
}


def _move(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    full = [algebra.filled(v, s) for v, s in zip(values, shapes(eqn.invars), strict=True)]
    return algebra.moved(full, lambda spans: MOVES[eqn.primitive.name](eqn.params, *spans))


def _reshape(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        raise Unfit
    (shape,) = shapes(eqn.outvars)
    return algebra.moved(values, lambda spans: [spans[0].reshape(len(spans[0]), *shape)])


def _applied(algebra: Spans, eqn: Any, data: Sequence[Value], indices: Sequence[Any]) -> Value:
    """The first arguments moved by the primitive itself, applied to the numbers of elements."""
    sizes = shapes(eqn.invars[: len(data)])
    full = [algebra.filled(value, shape) for value, shape in zip(data, sizes, strict=True)]
    ends = np.cumsum([0, *(math.prod(shape) for shape in sizes)])
    numbers = [
        jnp.arange(start, stop, dtype=jnp.int32).reshape(shape)
        for start, stop, shape in zip(ends[:-1], ends[1:], sizes, strict=True)
    ]
    params = {k: -1 if k == "fill_value" else v for k, v in eqn.params.items()}
    places = np.asarray(eqn.primitive.bind(*numbers, *indices, **params))

    def move(spans: list[np.ndarray]) -> list[np.ndarray]:
        # The last column, number -1, stands for what lies outside and reads nothing.
        every = (*spans, algebra.none((1,)))
        flat = [span.reshape(len(span), math.prod(span.shape[1:])) for span in every]
        return [np.concatenate(flat, 1)[:, places]]

    return algebra.moved(full, move)[0]


def _smeared(algebra: Spans, eqn: Any, value: Value, axes: Sequence[int]) -> Value:
    """Elements that may be any along the axes: each reads what all of them read."""
    if value.span is None or not axes:
        return value
    algebra.opaque.add(eqn.primitive.name)
    span = spread(whole(value.span, axes, keep=True), value.span.shape[1:])
    return Value(span, met=value.met, origin=value.origin)


def _gather(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    operand, index = values
    place, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
    if index.known is not None:
        indices = index.known.value
    else:  # then all elements along the axes are alike, and the first will do
        indices = jnp.zeros(place.shape, place.dtype)
        operand = _smeared(algebra, eqn, operand, numbers.start_index_map)
    moved = Value() if operand.span is None else _applied(algebra, eqn, [operand], [indices])
    if index.span is None:
        return [moved]
    # One vector of indices for each element along those axes that are not offsets.
    (shape,), reads = shapes(eqn.outvars), whole(index.span, [-1])
    sizes = iter(reads.shape[1:])
    along = [1 if axis in numbers.offset_dims else next(sizes) for axis in range(len(shape))]
    reads = spread(reads.reshape(len(reads), *along), shape)
    return [algebra.term([reads, *tracked([moved])], "gather")]


def _dynamic_slice(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    operand, *starts = values
    (shape, *_), sizes = shapes(eqn.invars), eqn.params["slice_sizes"]
    if len(starts) != len(shape):
        raise Unfit
    free = [i for i, v in enumerate(starts) if v.known is None and sizes[i] < shape[i]]
    indices = [
        jnp.zeros((), atom.aval.dtype) if start.known is None else start.known.value
        for start, atom in zip(starts, eqn.invars[1:], strict=True)
    ]
    operand = _smeared(algebra, eqn, operand, free)
    moved = Value() if operand.span is None else _applied(algebra, eqn, [operand], indices)
    reads = [spread(span, sizes) for span in tracked(starts)]
    return [algebra.term([*reads, *tracked([moved])], "dynamic_slice") if reads else moved]


def _replace(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    """``dynamic_update_slice`` and ``pad``: two arguments with elements, then indices."""
    indices = [value.known for value in values[2:] if value.known is not None]
    if len(indices) == len(values) - 2:
        return [_applied(algebra, eqn, values[:2], [index.value for index in indices])]
    return [_anywhere(algebra, eqn, values, linear=False)]


def _anywhere(algebra: Spans, eqn: Any, values: list[Value], linear: bool) -> Value:
    """Each element of the first argument, with anything of the others."""
    algebra.opaque.add(eqn.primitive.name)
    first, *others = [algebra.summed(value) for value in values] if linear else values
    parts = [first] if first.span is not None else []
    parts += [
        Value(spread(whole(v.span), shapes(eqn.outvars)[0]), met=v.met, origin=v.origin)
        for v in others
        if v.span is not None
    ]
    return algebra.linear(parts) if linear else algebra.term(tracked(parts), eqn.primitive.name)


def _scatter(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    operand, index, updates = values
    name, (shape, _, size) = eqn.primitive.name, shapes(eqn.invars)
    linear = name in ("scatter-add", "scatter-sub") and _inexact(eqn)
    if index.known is None:
        return [_anywhere(algebra, eqn, values, linear and index.span is None)]
    indices = index.known.value
    options = {key: eqn.params[key] for key in ("dimension_numbers", "mode")}

    def place(into: np.ndarray, what: np.ndarray) -> np.ndarray:
        return np.asarray(
            jax.lax.scatter_max(jnp.asarray(into), indices, jnp.asarray(what), **options)
        )

    def move(spans: list[np.ndarray]) -> list[np.ndarray]:
        old, new = spans
        if name == "scatter":  # what is replaced is not read any more
            hit = place(np.zeros(shape, np.int32), np.ones(size, np.int32)) > 0
            old = np.where(hit, np.int32(NONE), old)
        return [np.stack([place(*pair) for pair in zip(old, new, strict=True)])]

    full = [algebra.filled(operand, shape), algebra.filled(updates, size)]
    results = algebra.moved(full, move, summed=linear)
    return results if linear or name == "scatter" else [algebra.term(tracked(results), name)]


# --- elements brought together ----------------------------------------------------------------


def _reduce(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    name, axes = eqn.primitive.name, eqn.params["axes"]
    if name == "reduce_sum" and _inexact(eqn):
        return algebra.moved(values, lambda spans: [whole(spans[0], axes)], summed=True)
    return [algebra.term([whole(span, axes) for span in tracked(values)], name)]


def _cumulative(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    axis, step = eqn.params["axis"] + 1, -1 if eqn.params["reverse"] else 1
    turn = (*(slice(None) for _ in range(axis)), slice(None, None, step))
    (span,) = tracked(values)
    return [algebra.term([np.maximum.accumulate(span[turn], axis)[turn]], eqn.primitive.name)]


def _sort(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    keys, axis = values[: eqn.params["num_keys"]], eqn.params["dimension"]
    results = []
    for value, shape in zip(values, shapes(eqn.outvars), strict=True):
        reads = [whole(span, [axis], keep=True) for span in tracked([*keys, value])]
        results.append(algebra.term([spread(union(reads), shape)], "sort") if reads else Value())
    return results


def _top_k(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    (span,) = tracked(values)
    reads = whole(span, [eqn.params.get("axis", -1)], keep=True)
    return [algebra.term([spread(reads, shape)], "top_k") for shape in shapes(eqn.outvars)]


def _contracted(span: np.ndarray, pattern: np.ndarray | None, rows: int) -> np.ndarray:
    """A matrix times an array: from a span ``(c, b, k, j)`` to ``(c, b, rows, j)``.

    Args:
      span: what the array reads.
      pattern: where the matrix ``(b, rows, k)`` is not zero; ``None`` if it may be anything.
      rows: the rows of the matrix.

    Returns:
      What the product reads.
    """
    channels, batch, inner, columns = span.shape
    if pattern is None or pattern.all():
        return np.broadcast_to(whole(span, [1], keep=True), (channels, batch, rows, columns))
    flat = span.reshape(channels, batch * inner, columns)
    result = np.full((channels, batch * rows, columns), NONE, np.int32)
    pattern = pattern.reshape(batch * rows, inner)
    step = max(1, BLOCK // max(1, int(pattern.sum(1).max()) * channels * columns))
    for start in range(0, batch * rows, step):
        row, k = np.nonzero(pattern[start : start + step])
        if len(row):
            hit, first = np.unique(row, return_index=True)
            read = flat[:, (row + start) // rows * inner + k]
            result[:, hit + start] = np.maximum.reduceat(read, first, axis=1)
    return result.reshape(channels, batch, rows, columns)


def _dot_general(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    contract, batch = eqn.params["dimension_numbers"]
    given, (shape,) = shapes(eqn.invars), shapes(eqn.outvars)
    kept = [
        [axis for axis in range(len(given[i])) if axis not in (*contract[i], *batch[i])]
        for i in (0, 1)
    ]
    axes = [(batch[i], kept[i], contract[i]) for i in (0, 1)]
    sizes = [[math.prod(given[i][axis] for axis in group) for group in axes[i]] for i in (0, 1)]

    def matrices(array: np.ndarray, i: int) -> np.ndarray:
        """With axes (channels), batch, kept, contracted."""
        lead = array.ndim - len(given[i])
        order = [axis + lead for group in axes[i] for axis in group]
        return array.transpose(*range(lead), *order).reshape(*array.shape[:lead], *sizes[i])

    def shaped(span: np.ndarray) -> np.ndarray:
        return span.reshape(len(span), *shape)

    if len(spans := tracked(values)) == 2:
        left, right = (matrices(span, i) for i, span in enumerate(spans))
        if left.size * sizes[1][1] > BLOCK:
            left, right = whole(left, [-1]), whole(right, [-1])
            product = np.maximum(left[..., :, None], right[..., None, :])
            return [algebra.term([shaped(product)], "dot_general")]
        term = algebra.term(
            [np.maximum(left[..., :, None, :], right[..., None, :, :])], "dot_general"
        )
        return algebra.moved([term], lambda spans: [shaped(whole(spans[0], [-1]))], summed=True)

    i = 0 if values[1].span is None else 1
    known, (_, rows, _) = values[1 - i].known, sizes[1 - i]
    pattern = None if known is None else matrices(np.asarray(known.value) != 0, 1 - i)

    def product_with_matrix(spans: list[np.ndarray]) -> list[np.ndarray]:
        result = _contracted(matrices(spans[0], i).swapaxes(-1, -2), pattern, rows)
        return [shaped(result if i == 1 else result.swapaxes(-1, -2))]

    return algebra.moved([values[i]], product_with_matrix, summed=True)


def _decomposition(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    """All of a matrix, but none of the others in a batch."""
    (span,), batch = tracked(values), len(eqn.invars[0].aval.shape) - 2
    reads = algebra.term([whole(span, range(batch, batch + 2))], eqn.primitive.name)
    return algebra.moved(
        [reads],
        lambda spans: [
            spread(spans[0].reshape(*spans[0].shape, *(1 for _ in shape[batch:])), shape)
            for shape in shapes(eqn.outvars)
        ],
    )


def _triangular_solve(algebra: Spans, eqn: Any, values: list[Value]) -> list[Value]:
    matrix, right = values
    (shape,), axis = shapes(eqn.outvars), -2 if eqn.params["left_side"] else -1
    # The columns of the right-hand side do not mix.
    solved = algebra.moved(
        [algebra.filled(right, shape)],
        lambda spans: [spread(whole(spans[0], [axis], keep=True), shape)],
        summed=True,
    )
    if matrix.span is None:
        return solved
    reads = spread(whole(matrix.span, [-2, -1], keep=True), shape)
    return [algebra.term([reads, *tracked(solved)], "triangular_solve")]


RULES: dict[str, Rule] = {
    **dict.fromkeys(LINEAR | NONLINEAR, _elementwise),
    **dict.fromkeys(["optimization_barrier", "device_put"], _identity),
    **dict.fromkeys(MOVES, _move),
    **dict.fromkeys(["reshape", "squeeze", "expand_dims"], _reshape),
    **dict.fromkeys(["dynamic_update_slice", "pad"], _replace),
    **dict.fromkeys([f"scatter{end}" for end in ("", "-add", "-sub", "-mul", "-min")], _scatter),
    **dict.fromkeys(["reduce_sum", "reduce_max", "reduce_min", "reduce_prod"], _reduce),
    **dict.fromkeys(["reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"], _reduce),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _cumulative),
    **dict.fromkeys(["cholesky", "eig", "eigh", "lu", "qr", "schur", "svd"], _decomposition),
    "scatter-max": _scatter,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "sort": _sort,
    "top_k": _top_k,
    "dot_general": _dot_general,
    "triangular_solve": _triangular_solve,
}
