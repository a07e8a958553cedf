r"""Arrays of which only is known what each element reads, and whether it is a sum of terms.

Of the rows of latent function :math:`p` that an element reads, the smallest and the largest are
kept: enough to tell none, one and several apart, in memory linear in the elements. An array of
shape ``s`` becomes integers of shape ``(2 * P + 1, *s)``, its *span*: channel ``p`` holds minus
the smallest row, channel ``P + p`` the largest, and :data:`NONE` stands for no row. So the union
of reads is ``np.maximum`` throughout, along axes and between arrays.

The last channel and :attr:`Value.met` say how an element splits into terms:

* ``met is None``: every element is *one* term, and the latent functions it reads meet in it;
* otherwise every element is a *sum* of terms. ``met`` of shape ``(P, P)`` tells which latent
  functions meet in a term of any element, and the last channel holds, for elements with a term
  that reads several rows of one latent function, the number of an example of such a term.

Linear operations keep sums; a nonlinear one makes one term of whatever it is applied to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "NONE",
    "Known",
    "Offence",
    "Spans",
    "Unfit",
    "Value",
    "spread",
    "tracked",
    "union",
    "whole",
]

NONE = -(2**30)  # two of them still add up in int32


class Unfit(Exception):
    """A rule does not cover this case."""


class Known:
    """A value that is computed if somebody asks for it: an index, the zeros of a matrix.

    Args:
      compute: the function.
      inputs: known values, its arguments.
    """

    def __init__(self, compute: Callable[..., Any], inputs: Sequence[Known] = ()) -> None:
        self._compute: Callable[..., Any] | None = compute
        self._inputs = tuple(inputs)
        self._value: Any = None

    @property
    def value(self) -> Any:
        """The value; computed once."""
        # Not recursive: a loop that was unrolled makes chains longer than Python's stack.
        stack = [self]
        while stack:
            node = stack[-1]
            waiting = [known for known in node._inputs if known._compute is not None]
            if waiting:
                stack.extend(waiting)
                continue
            if node._compute is not None:
                node._value = node._compute(*(known._value for known in node._inputs))
                node._compute, node._inputs = None, ()
            stack.pop()
        return self._value


class Offence(NamedTuple):
    """A term that reads several rows of a latent function.

    Attributes:
      latent: the latent function.
      low: the smallest row that is read.
      high: the largest one.
      primitive: the nonlinear operation that made the term; empty if there was none.
    """

    latent: int
    low: int
    high: int
    primitive: str


@dataclass(frozen=True, eq=False)
class Value:
    """An array in the analysis.

    Attributes:
      span: what its elements read (see the module); ``None`` if nothing.
      known: its value, if it is the same for all values of the inputs.
      met: which latent functions meet in terms; ``None`` if every element is one term.
      origin: the nonlinear operation that made the elements, for messages.
    """

    span: np.ndarray | None = None
    known: Known | None = None
    met: np.ndarray | None = None
    origin: str = ""


def tracked(values: Iterable[Value]) -> list[np.ndarray]:
    """The spans of those values that read something."""
    return [value.span for value in values if value.span is not None]


def spread(span: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """A span broadcast to the shape of an array; scalars go with every shape."""
    if span.shape[1:] == tuple(shape):
        return span
    if span.ndim == 1:
        span = span.reshape(-1, *(1 for _ in shape))
    fits = zip(span.shape[1:], shape, strict=False)
    # Not NumPy's rule for different ranks: that would pair axes which are not the same one.
    if span.ndim - 1 != len(shape) or any(size not in (1, wanted) for size, wanted in fits):
        raise Unfit
    return np.broadcast_to(span, (len(span), *shape))


def union(spans: Sequence[np.ndarray]) -> np.ndarray:
    """The union of reads, element by element."""
    result = spans[0]
    for span in spans[1:]:
        # Most operations leave the span as it is, so that operands often share one array.
        result = result if span is result else np.maximum(result, span)
    return result


def whole(span: np.ndarray, axes: Iterable[int] | None = None, keep: bool = False) -> np.ndarray:
    """The union of reads along axes of the array, or all of it."""
    every = range(span.ndim - 1) if axes is None else axes
    along = tuple(axis % (span.ndim - 1) + 1 for axis in every)
    result = span.max(axis=along, keepdims=True, initial=NONE) if along else span
    return result if keep or not along else result.squeeze(along)


class Spans:
    """Algebra of :class:`Value`, with what was found on the way.

    Args:
      latents: the number of latent functions.
    """

    def __init__(self, latents: int) -> None:
        self.latents = latents
        self.offences: list[Offence] = []
        self.opaque: set[str] = set()

    def none(self, shape: Sequence[int]) -> np.ndarray:
        """The span of an array that reads nothing."""
        return spread(np.full(2 * self.latents + 1, NONE, np.int32), shape)

    def filled(self, value: Value, shape: Sequence[int]) -> Value:
        """The value with a span, even if it reads nothing."""
        return value if value.span is not None else Value(self.none(shape))

    def several(self, span: np.ndarray) -> np.ndarray:
        """For each latent function and element, whether it reads several rows."""
        return span[: self.latents] + span[self.latents : -1] > 0

    def pairs(self, value: Value) -> np.ndarray:
        """Which latent functions meet in a term of the array, of shape ``(P, P)``."""
        if value.met is not None:
            return value.met
        if value.span is None or value.span.size == 0:
            return np.zeros((self.latents, self.latents), bool)
        read = (value.span[self.latents : -1] >= 0).reshape(self.latents, -1).astype(np.float32)
        return read @ read.T > 0

    def term(self, spans: Sequence[np.ndarray], origin: str) -> Value:
        """Elements that are one term each: a nonlinear function of everything given."""
        span = union(spans)
        if (span[-1] != NONE).any():
            span = span.copy()
            span[-1] = NONE
        return Value(span, origin=origin)

    def summed(self, value: Value) -> Value:
        """The same elements as sums of terms."""
        if value.met is not None or value.span is None:
            return value
        span, several = value.span, self.several(value.span)
        if several.any():
            first = tuple(int(i) for i in np.argwhere(several)[0])
            low, high = -span[first], span[(first[0] + self.latents, *first[1:])]
            self.offences.append(Offence(first[0], int(low), int(high), value.origin))
            span = span.copy()
            span[-1] = np.where(several.any(0), len(self.offences) - 1, NONE)
        return Value(span, met=self.pairs(value), origin=value.origin)

    def linear(self, values: Sequence[Value]) -> Value:
        """A sum of arrays of one shape, times numbers that read nothing."""
        values = [value for value in values if value.span is not None]
        if not values:
            return Value()
        spans = tracked(values)
        alike = all(span is spans[0] or np.array_equal(span, spans[0]) for span in spans[1:])
        if len(values) == 1 or (alike and all(value.met is None for value in values)):
            return values[0]
        return self.moved(values, lambda spans: [union(spans)], summed=True)[0]

    def moved(
        self,
        values: Sequence[Value],
        move: Callable[[list[np.ndarray]], Sequence[np.ndarray]],
        summed: bool = False,
    ) -> list[Value]:
        """Arrays made of elements of others.

        Args:
          values: the arrays, each with a span.
          move: takes their spans to those of the results.
          summed: whether elements are added up, so that each becomes a sum of terms.

        Returns:
          The results.
        """
        summed = summed or any(value.met is not None for value in values)
        if summed:
            values = [self.summed(value) for value in values]
        met = np.logical_or.reduce([self.pairs(value) for value in values]) if summed else None
        origin = next((value.origin for value in values if value.origin), "")
        return [Value(span, met=met, origin=origin) for span in move(tracked(values))]
