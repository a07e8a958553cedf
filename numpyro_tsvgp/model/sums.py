r"""Likelihoods that read several functions only through sums of them.

Functions that are added up before anything nonlinear happens, :math:`f_i + u_{g_i}` in one link or
a mixture :math:`W f`, meet in a likelihood term, but only by one number,

.. math:: c_i = b_i + \sum_p w_{ip} f_p(x_{r_{ip}}), \qquad
          c_i \sim \mathcal{N}\Big(b_i + \sum_p w_{ip} m_p, \; \sum_p w_{ip}^2 v_p\Big),

whose distribution is Gaussian. So one dimension of quadrature is enough, where a grid over all
functions has a power of the nodes. Whether a model is so is read off its program: from each log
density back, there must be one array that is linear in the values, and nothing but operations
element by element after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from numpyro_tsvgp.gaussian.quadrature import AlongSums, LogLikelihood
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.jaxprs import called
from numpyro_tsvgp.model.likelihood import Terms, log_likelihood
from numpyro_tsvgp.model.read import Model, Reading, is_observed, run_with
from numpyro_tsvgp.model.rules import LINEAR, MOVES, NONLINEAR, shapes

__all__ = ["along_sums", "reads_sums"]

# Linear in one argument, with indices, a matrix or a fill value in the others.
_STRUCTURAL = {*MOVES, "reshape", "squeeze", "expand_dims", "gather", "dynamic_slice", "pad"}
_STRUCTURAL |= {"dot_general", "reduce_sum"}


class _Read(NamedTuple):
    """How an array depends on the values of GPs.

    Attributes:
      root: the array, linear in the values, that it is computed from element by element; None if
        there is no such array.
      linear: whether it is linear in the values itself.
    """

    root: Any
    linear: bool


_OTHER = _Read(None, False)


def _walk(jaxpr: Any, args: Sequence[_Read | None]) -> list[_Read | None]:
    """How the results of a jaxpr depend on the values; None for those that do not."""
    env: dict[Any, _Read | None] = dict(zip(jaxpr.invars, args, strict=True))

    def of(atom: Any) -> _Read | None:
        return None if isinstance(atom, Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        reads = [of(atom) for atom in eqn.invars]
        env.update(zip(eqn.outvars, _equation(eqn, reads), strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, reads: list[_Read | None]) -> list[_Read | None]:
    read = [r for r in reads if r is not None]
    if not read:
        return [None for _ in eqn.outvars]
    if any(r is _OTHER for r in read) or eqn.effects:
        return [_OTHER for _ in eqn.outvars]
    body = called(eqn)
    if body is not None:
        return [
            _from_body(out, r, read)
            for out, r in zip(eqn.outvars, _walk(getattr(body, "jaxpr", body), reads), strict=True)
        ]
    name, (out, *more) = eqn.primitive.name, eqn.outvars
    sizes = [s for s, r in zip(shapes(eqn.invars), reads, strict=True) if r is not None]
    floating = jnp.issubdtype(out.aval.dtype, jnp.inexact)
    if not more and name in LINEAR | NONLINEAR and all(s == out.aval.shape for s in sizes):
        at = [i for i, r in enumerate(reads) if r is not None]
        keeps_linear = name in LINEAR or (name, at) in (("mul", [0]), ("mul", [1]), ("div", [0]))
        keeps_linear |= name == "select_n" and 0 not in at
        linear = bool(floating and keeps_linear and all(r.linear for r in read))
        if len({id(r.root) for r in read}) == 1:
            return [_Read(read[0].root, linear)]
        return [_Read(out, True) if linear else _OTHER]
    # An index or another argument behind the first must not depend on the values.
    first = name in ("concatenate", "stack", "pad", "dot_general") or reads[0] is not None
    alone = len(read) == 1 or name in ("concatenate", "stack", "pad")
    if name in _STRUCTURAL and floating and first and alone and all(r.linear for r in read):
        return [_Read(v, True) for v in eqn.outvars]
    return [_OTHER for _ in eqn.outvars]


def _from_body(out: Any, inner: _Read | None, outer: Sequence[_Read]) -> _Read | None:
    """What a function that was called gives back, in terms of arrays outside of it."""
    if inner is None or inner is _OTHER:
        return inner
    if any(inner.root is r.root for r in outer):
        return inner
    return _Read(out, True) if inner.linear else _OTHER


class _Split(NamedTuple):
    """A program in two parts: up to sums of functions, and from there on.

    Attributes:
      sums: the sums as a function of the values.
      after: the terms as a function of the sums.
    """

    sums: Callable[[Any], list[Array]]
    after: Callable[[Sequence[Array]], dict[str, Terms]]


def _split(function: Callable[[Any], dict[str, Terms]], values: Any) -> _Split | None:
    """Splits a function at the sums that its log densities are computed from, if it can be."""
    closed, out = jax.make_jaxpr(function, return_shape=True)(values)
    jaxpr, consts, tree = closed.jaxpr, closed.consts, jax.tree.structure(out)
    found = _walk(jaxpr, [_Read(v, True) for v in jaxpr.invars])
    read = [r for r in found if r is not None]
    if not read or any(r is _OTHER for r in read):
        return None
    roots = list({id(r.root): r.root for r in read}.values())

    def part(given: Sequence[Any], results: Sequence[Any]) -> Callable[..., list[Array]]:
        """The program from some variables to others, without what is not needed."""
        needed = {a for a in results if not isinstance(a, Literal)} - set(given)
        eqns = []
        for eqn in reversed(jaxpr.eqns):
            if not needed.isdisjoint(eqn.outvars):
                eqns.append(eqn)
                needed |= {a for a in eqn.invars if not isinstance(a, Literal)} - set(given)
        cut = jaxpr.replace(invars=list(given), outvars=list(results), eqns=eqns[::-1])
        return jaxpr_as_fun(ClosedJaxpr(cut, consts))

    to_sums, from_sums = part(jaxpr.invars, roots), part(roots, jaxpr.outvars)
    return _Split(
        lambda v: list(to_sums(*jax.tree.leaves(v))),
        lambda sums: jax.tree.unflatten(tree, from_sums(*sums)),
    )


def _terms(
    model: Model, reading: Reading, call: Call, below: Collection[str]
) -> Callable[[Mapping[str, Array]], dict[str, Terms]]:
    """Log densities and scales of everything that counts as data, as a function of the values."""

    def evaluate(values: Mapping[str, Array]) -> dict[str, Terms]:
        gps = {name: reading.gps[name].unflatten(value) for name, value in values.items()}
        trace = run_with(model, call, {**reading.pinned, **gps})
        return {
            name: Terms(
                site["fn"].log_prob(site["value"]), 1.0 if site["scale"] is None else site["scale"]
            )
            for name, site in trace.items()
            if is_observed(site) or name in below
        }

    return evaluate


def _values(reading: Reading) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct((site.functions, site.rows), site.loc.dtype)
        for name, site in reading.gps.items()
    }


def reads_sums(model: Model, reading: Reading, call: Call, below: Collection[str]) -> bool:
    """Whether every log density reads the functions through one sum of them.

    Args:
      model: the NumPyro model, of which each term is known to read one value of each function.
      reading: a reading of it.
      call: its arguments.
      below: latent variables that are terms of the likelihood.

    Returns:
      Whether it is so, for all values of the functions and the hyperparameters.
    """
    return _split(_terms(model, reading, call, below), _values(reading)) is not None


def along_sums(model: Model, reading: Reading, call: Call, below: Collection[str]) -> LogLikelihood:
    """The log-likelihood of a model for which :func:`reads_sums` holds.

    Args:
      model: the NumPyro model.
      reading: a reading of it, whose values are pinned.
      call: its arguments.
      below: latent variables that are terms of the likelihood.

    Returns:
      A function of ``{site: values of shape (functions, n)}`` whose expectations are integrals over
      the sums.
    """
    everything = log_likelihood(model, reading, call, below)
    split = _split(_terms(model, reading, call, below), _values(reading))
    if split is None:  # another program than the one that was looked at
        return everything
    shapes = [x.shape for x in jax.eval_shape(split.sums, _values(reading))]

    def sums(values: Mapping[str, Array]) -> dict[str, Array]:
        return {str(i): x.reshape(1, -1) for i, x in enumerate(split.sums(dict(values)))}

    def of_sums(values: Mapping[str, Array]) -> Array:
        every = split.after([values[str(i)].reshape(s) for i, s in enumerate(shapes)])
        total: Any = 0.0
        for log_prob, scale in every.values():
            total = total + jnp.sum(scale * log_prob)
        return jnp.asarray(total)

    return AlongSums(everything, sums, of_sums)
