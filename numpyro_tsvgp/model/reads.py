r"""Which values of latent functions each element of a function's results reads, proven.

A likelihood fits t-SVGP if it is a sum of terms that read at most one value of each latent
function. Derivatives at a point cannot tell: where a kink is not crossed, or a weight is zero at
its start, they vanish. Here the jaxpr of the function is read instead, so that the answer holds
for all values of its inputs. It errs on one side only: a read may be reported that cannot
happen, never the other way round.

Three kinds of input: those *tracked*, whose reads are wanted; *unknown* ones, such as
hyperparameters, which may have any value; and what the function closes over, such as data, which
is known where an index or the zeros of a matrix are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_tsvgp.model.jaxprs import Interpreter
from numpyro_tsvgp.model.spans import NONE, Offence, Value

__all__ = ["Analysis", "Offence", "Reads", "Source", "Terms", "reads", "terms"]


class Source(NamedTuple):
    """Where the elements of an input come from.

    Attributes:
      latent: for each element its latent function, counted from zero; below zero if it belongs
        to none.
      row: for each element its row in that latent function.
    """

    latent: np.ndarray
    row: np.ndarray


class Reads(NamedTuple):
    """The rows of latent functions that the elements of an array read.

    Attributes:
      low: of shape ``(*shape, P)``, the smallest row that is read; larger than ``high`` if none.
      high: the largest one; -1 if none.
    """

    low: np.ndarray
    high: np.ndarray

    @property
    def none(self) -> np.ndarray:
        """Whether an element reads nothing of a latent function, of shape ``(*shape, P)``."""
        return self.high < self.low

    @property
    def which(self) -> np.ndarray:
        """Whether an element reads a latent function, of shape ``(*shape, P)``."""
        return ~self.none

    @property
    def one(self) -> np.ndarray:
        """Whether an element reads at most one row of every latent function."""
        return np.asarray((self.high <= self.low).all(-1))


class Terms(NamedTuple):
    """The terms that the elements of an array are sums of.

    Attributes:
      reads: what the elements read in all their terms.
      additive: for each element, whether every term reads at most one row of each latent
        function.
      meets: of shape ``(P, P)``, which latent functions are read by one and the same term. On
        the diagonal, whether one is read at all.
      element: an element that is not additive; ``None`` if there is none.
      offence: a term of that element which reads several rows.
    """

    reads: Reads
    additive: np.ndarray
    meets: np.ndarray
    element: tuple[int, ...] | None
    offence: Offence | None


class Analysis(NamedTuple):
    """What was found for every result of a function.

    Attributes:
      results: :class:`Reads` or :class:`Terms` for each array, in the structure the function
        returns.
      opaque: operations on tracked values that were not looked into; they count as reading all
        that goes into them.
    """

    results: Any
    opaque: frozenset[str]


def reads(
    function: Callable[[Any, Any], Any], tracked: Any, sources: Any, unknown: Any = ()
) -> Analysis:
    """Tells for every element of every result which rows of the latent functions it reads.

    Args:
      function: of ``tracked`` and ``unknown``, to any structure of arrays. What it closes over is
        known.
      tracked: structure of arrays, or of anything with a shape and a type; values are not used.
      sources: a :class:`Source` for each of them.
      unknown: structure of arrays that may have any value; the values are not used either.

    Returns:
      The analysis, with :class:`Reads` as results.

    Examples:
      Each of three observations belongs to a group and reads the value of its group:

      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> group = np.array([1, 0, 1])
      >>> f = jnp.zeros(2)
      >>> source = Source(latent=np.zeros(2, int), row=np.arange(2))
      >>> found = reads(lambda f, scale: scale * jnp.sin(f[group]), f, source, jnp.ones(()))
      >>> found.results.low[:, 0].tolist(), found.results.high[:, 0].tolist()
      ([1, 0, 1], [1, 0, 1])

      A matrix that is a hyperparameter may have any value, whatever it starts with:

      >>> found = reads(lambda f, weights: weights @ f, f, source, jnp.eye(2))
      >>> found.results.one.tolist()
      [False, False]
    """
    walk, values, tree = _walked(function, tracked, sources, unknown)
    results = [_reads(walk, value, shape) for value, shape in values]
    return Analysis(jax.tree.unflatten(tree, results), frozenset(walk.opaque))


def terms(
    function: Callable[[Any, Any], Any], tracked: Any, sources: Any, unknown: Any = ()
) -> Analysis:
    r"""Tells for every element of every result of which terms it is a sum.

    From the results back, the terms are found by undoing what is linear: sums, differences,
    products with what reads nothing, products with matrices. What remains are nonlinear functions,
    and each of them is one term. So :math:`\sum_i \exp(f_i)` has a term for each row, while
    :math:`\exp(\sum_i f_i)` is a single term that reads all of them.

    Args:
      function: as for :func:`reads`, for instance one that returns log-densities.
      tracked: as for :func:`reads`.
      sources: as for :func:`reads`.
      unknown: as for :func:`reads`.

    Returns:
      The analysis, with :class:`Terms` as results.

    Examples:
      Two latent functions with four values each. Both are read by each term of a Gaussian
      likelihood with varying scale:

      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> f = jnp.zeros((2, 4))
      >>> source = Source(*np.indices((2, 4)))
      >>> y = np.array([0.1, 0.4, 0.2, 0.9])
      >>> found = terms(lambda f, _: -jnp.sum((y - f[0]) ** 2 * jnp.exp(f[1]) - f[1]), f, source)
      >>> bool(found.results.additive), found.results.meets.tolist()
      (True, [[True, True], [True, True]])

      They do not meet where they are only added up:

      >>> found = terms(lambda f, _: jnp.sum(jnp.sin(f[0]) + f[1] ** 2), f, source)
      >>> found.results.meets.tolist()
      [[True, False], [False, True]]

      A function of the sum is a single term:

      >>> found = terms(lambda f, _: jnp.abs(jnp.sum(f[1])), f, source)
      >>> found.results.offence
      Offence(latent=1, low=0, high=3, primitive='abs')
    """
    walk, values, tree = _walked(function, tracked, sources, unknown)
    results = [_terms(walk, value, shape) for value, shape in values]
    return Analysis(jax.tree.unflatten(tree, results), frozenset(walk.opaque))


def _walked(
    function: Callable[[Any, Any], Any], tracked: Any, sources: Any, unknown: Any
) -> tuple[Interpreter, list[tuple[Value, tuple[int, ...]]], Any]:
    """The interpreter, the results with their shapes, and the structure of the results."""
    leaves, structure = _flattened(tracked)
    given, expected = _flattened(sources)
    if structure != expected:
        raise ValueError(f"The inputs have the structure {structure}, their sources {expected}.")
    flat = [Source(*map(np.asarray, source)) for source in given]
    for leaf, source in zip(leaves, flat, strict=True):
        if not np.shape(leaf) == source.latent.shape == source.row.shape:
            raise ValueError(
                f"An input of shape {np.shape(leaf)} has a source with latent functions of shape "
                f"{source.latent.shape} and rows of shape {source.row.shape}; all must be equal."
            )
    latents = 1 + max((int(s.latent.max(initial=-1)) for s in flat), default=-1)
    spans = [_span(source, latents) for source in flat]
    every = [span.reshape(len(span), -1).max(1, initial=NONE) for span in spans]
    walk = Interpreter(latents, np.max(every, 0) if every else np.array([NONE], np.int32))
    jaxpr, out = jax.make_jaxpr(function, return_shape=True)(tracked, unknown)
    args = [Value(span) for span in spans] + [Value() for _ in jax.tree.leaves(unknown)]
    # Also when called from a function that is being traced, what is known is a value.
    with jax.ensure_compile_time_eval():
        values = walk.call(jaxpr, args)
    shapes, tree = jax.tree.flatten(out)
    return walk, [(v, tuple(s.shape)) for v, s in zip(values, shapes, strict=True)], tree


def _flattened(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=lambda leaf: isinstance(leaf, Source))


def _span(source: Source, latents: int) -> np.ndarray:
    if (source.row[source.latent >= 0] < 0).any() or source.row.max(initial=0) >= -NONE:
        raise ValueError(f"Rows of a source must be at least 0 and below {-NONE}.")
    span = np.full((2 * latents + 1, *source.latent.shape), NONE, np.int32)
    for p in range(latents):
        span[p] = np.where(source.latent == p, -source.row, NONE)
        span[latents + p] = np.where(source.latent == p, source.row, NONE)
    return span


def _reads(walk: Interpreter, value: Value, shape: tuple[int, ...]) -> Reads:
    span = walk.none(shape) if value.span is None else value.span
    span = np.moveaxis(span, 0, -1)
    negative, high = span[..., : walk.latents], span[..., walk.latents : -1]
    nothing = np.iinfo(np.int32).max
    return Reads(np.where(high < 0, nothing, -negative), np.maximum(high, -1))


def _terms(walk: Interpreter, value: Value, shape: tuple[int, ...]) -> Terms:
    summed = walk.summed(value)
    fault = (walk.none(shape) if summed.span is None else summed.span)[-1]
    additive = fault == NONE
    meets, found = walk.pairs(value), _reads(walk, value, shape)
    if additive.all():
        return Terms(found, additive, meets, None, None)
    element = tuple(int(i) for i in np.argwhere(~additive)[0])
    return Terms(found, additive, meets, element, walk.offences[int(fault[element])])
