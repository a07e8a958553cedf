r"""The posterior without one data point, for every data point at once.

A site is what one data point says about the posterior, so leaving the point out is taking its
site away. With :math:`s_i = a_i^\top S a_i`, the part of the variance of :math:`f(x_i)` that the
inducing values carry, the *cavity* is

.. math::
  s_c = \frac{s_i}{1 - \beta_i s_i}, \qquad
  m_c = m_i - s_c \, \alpha_i, \qquad
  v_c = v_i - s_i + s_c.

It is exact at given hyperparameters when the likelihood is Gaussian. For other likelihoods it
holds the sites of the other points, which a refit would move: to first order in the shift that
the point caused the mean is still right, the variance is not. :func:`refine` moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_tsvgp.gaussian.approximation import Local
from numpyro_tsvgp.gaussian.quadrature import LogLikelihood, Marginals, SiteGradients
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.steps.density import own_sites, scene_at
from numpyro_tsvgp.infer.steps.mixture import fine_nodes
from numpyro_tsvgp.infer.steps.query import Query
from numpyro_tsvgp.infer.steps.row_densities import RowDensities, row_densities
from numpyro_tsvgp.model.information import information
from numpyro_tsvgp.model.layout import Layout, find_layout
from numpyro_tsvgp.model.likelihood import Terms, probabilities, terms
from numpyro_tsvgp.model.read import Reading
from numpyro_tsvgp.model.shared_rows import SharedRows

__all__ = ["AtPoints", "Frame", "at_points", "below", "log_densities", "refine"]

Evaluate = Callable[[Mapping[str, Array]], dict[str, Terms]]


class AtPoints(NamedTuple):
    """One GP at the data: marginals, the part of the variance that sites move, and the sites.

    Each of shape ``(latents, n)``. ``mean`` holds the prior mean too.
    """

    mean: Array
    variance: Array
    explained: Array
    alpha: Array
    beta: Array

    @property
    def leverage(self) -> Array:
        r"""How much of its own marginal a point accounts for: :math:`\beta_i s_i`, below one."""
        # At one there is no cavity: without the point nothing would hold the posterior there.
        return jnp.minimum(self.beta * self.explained, 1 - jnp.finfo(self.mean.dtype).eps)

    @property
    def explained_without(self) -> Array:
        return self.explained / (1 - self.leverage)

    @property
    def shift(self) -> Array:
        """What the point adds to its own posterior mean."""
        return self.explained_without * self.alpha

    @property
    def without(self) -> Marginals:
        """The marginals with the point itself left out."""
        variance = self.variance - self.explained + self.explained_without
        return Marginals(self.mean - self.shift, variance)


class Frame(NamedTuple):
    """A fit on all of its data, at one value of the hyperparameters.

    Attributes:
      fit: the fit.
      layout: where the terms of each data point are.
      hyper: values of the sampled hyperparameters.
    """

    fit: Fit
    layout: Layout
    hyper: Params

    @staticmethod
    def of(fit: Fit, hyper: Params) -> Frame:
        """Reads a model once for the layout of its data."""
        reading = fit.read(hyper=hyper)
        shared = not (fit.rule.needs_rows or fit.rule.needs_information)
        layout = find_layout(fit.model, fit.structure, reading, fit.data, shared=shared)
        return Frame(fit, layout, hyper)

    def read(self) -> tuple[Reading, Evaluate]:
        """The model, and the terms of its likelihood."""
        reading = self.fit.read(hyper=self.hyper)
        return reading, terms(self.fit.model, reading, self.fit.data)

    def rows(self, *, scaled: bool = True) -> RowDensities:
        """The log density of each row of the data."""
        fit, reading = self.fit, self.fit.read(hyper=self.hyper)
        return row_densities(
            *(fit.model, fit.structure, reading, fit.data, fit.nodes()),
            layout=self.layout,
            scaled=scaled,
        )

    def query(
        self,
        likelihood: LogLikelihood,
        rows: RowDensities | None,
        local: Mapping[str, Local],
        marginals: Mapping[str, Marginals],
        sites: Mapping[str, PointSites] | None,
    ) -> Query:
        """What the site rule of the fit can ask a likelihood for."""
        fit = self.fit
        here = fit.read(hyper=self.hyper)
        found = None
        if fit.rule.needs_information:
            found = information(fit.model, fit.structure, here, fit.data)
        return Query(likelihood, marginals, fit.nodes(), local, sites, rows, found)


def at_points(frame: Frame) -> dict[str, AtPoints]:
    """Every GP at the data, with the sites of each point.

    The sites are those of the data alone; what ``numpyro.factor`` says beside data stays in.

    Args:
      frame: the fit at one value of the hyperparameters.

    Returns:
      Marginals and sites by GP.
    """
    fit = frame.fit
    reading, evaluate = frame.read()

    def likelihood(values: Mapping[str, Array]) -> Array:
        parts = [jnp.sum(t.scale * t.log_prob) for t in evaluate(values).values()]
        return jnp.stack(parts).sum()

    local, marginals, sites = {}, {}, None
    for name, (process, approximation) in fit.guide.latents(reading, fit.params).items():
        local[name] = approximation.marginals_at_data(process)
        marginals[name] = Marginals(local[name].mean + process.loc, local[name].variance)
    if fit.rule.needs_rows:
        latents = fit.guide.latents(reading, fit.params)
        at_data = {name: q.approximation.at_data(q.process) for name, q in latents.items()}
        sites = own_sites(at_data, {name: at.start() for name, at in at_data.items()})
    rows = frame.rows() if fit.rule.needs_rows else None
    query = frame.query(likelihood, rows, local, marginals, sites)
    gradients = fit.rule.asks(query)
    if frame.layout is not None and frame.layout.shared is not None:
        return _at_shared_rows(frame, frame.layout.shared, evaluate, query, gradients)
    return {
        name: AtPoints(*marginals[name], q.explained, *gradients[name]) for name, q in local.items()
    }


def _at_shared_rows(
    frame: Frame,
    shared: SharedRows,
    evaluate: Evaluate,
    query: Query,
    total: Mapping[str, SiteGradients],
) -> dict[str, AtPoints]:
    """The same where several points share a row: what each has asked for of the row's site."""
    layout = frame.layout

    def turn(points: Array) -> dict[str, Array]:
        here = jnp.zeros(layout.rows, bool).at[points].set(True)

        def likelihood(values: Mapping[str, Array]) -> Array:
            parts = [
                jnp.sum(jnp.where(here, layout.by_row(name, t.scale * t.log_prob), 0.0))
                for name, t in evaluate(values).items()
            ]
            return jnp.stack(parts).sum()

        asked = frame.fit.rule.asks(replace(query, likelihood=likelihood))
        return {
            name: jnp.stack([shared.take(name, x)[:, points] for x in gradients])
            for name, gradients in asked.items()
        }

    out = {}
    for name, found in shared.in_turns(turn).items():
        asked = jnp.where(shared.is_read[name], found, 0.0)
        # A rule may not add up over points: one that clips does so at the sum of a row. What is
        # then left over is shared by the points of the row.
        latents, rows = np.arange(len(shared.rows[name]))[:, None], shared.rows[name]
        zero = jnp.zeros((2, *shared.first[name].shape), asked.dtype)
        count = zero[0].at[latents, rows].add(shared.is_read[name])
        left = jnp.stack(total[name]) - zero.at[:, latents, rows].add(asked)
        rest = jnp.where(
            shared.is_read[name], (left / jnp.maximum(count, 1))[:, latents, rows], 0.0
        )
        q = query.marginals[name]
        parts = (*q, query.local[name].explained)
        out[name] = AtPoints(*(shared.take(name, x) for x in parts), *(asked + rest))
    return out


def refine(frame: Frame, data: Mapping[str, AtPoints], steps: int) -> dict[str, Marginals]:
    """Moves the sites of all other points to where they belong without each point.

    Every point costs as much as ``steps`` E-steps on all data, so this is for small data.

    Args:
      frame: the fit at one value of the hyperparameters.
      data: from :func:`at_points`.
      steps: number of E-steps, at rate one, or one half where GPs meet in a term.

    Returns:
      Marginals without each point, by GP. Where the steps did not stay finite, those of the
      cavity.
    """
    fit, layout = frame.fit, frame.layout
    _, evaluate = frame.read()
    scene = scene_at(
        fit.guide,
        fit.structure,
        fit.data,
        fit.params,
        frame.hyper,
        fit.nodes(),
        key=jax.random.key(0),
    )
    everything, rows = scene.likelihood, frame.rows() if fit.rule.needs_rows else None
    loc = {name: at.process.loc for name, at in scene.at.items()}
    # GPs that meet and take whole steps at the same time overshoot, each for what both explain.
    rate = 1.0 if fit.structure.dim == 1 else 0.5

    def locals_of(carries: Mapping[str, Any]) -> tuple[dict[str, Local], dict[str, Marginals]]:
        local = {name: at.local(at.posterior(carries[name])) for name, at in scene.at.items()}
        q = {name: Marginals(x.mean + loc[name], x.variance) for name, x in local.items()}
        return local, q

    def without(i: Array) -> dict[str, Marginals]:
        here = jnp.arange(layout.rows) == i

        def likelihood(values: Mapping[str, Array]) -> Array:
            left_out = [
                jnp.sum(jnp.where(here, layout.by_row(name, t.scale * t.log_prob), 0.0))
                for name, t in evaluate(values).items()
            ]
            return everything(values) - jnp.stack(left_out).sum()

        def step(_: Any, carries: dict[str, Any]) -> dict[str, Any]:
            local, q = locals_of(carries)
            sites = own_sites(scene.at, carries) if fit.rule.needs_rows else None
            others = None if rows is None else rows.without(here)
            query = frame.query(likelihood, others, local, q, sites)
            new = {}
            for name, (alpha, beta) in fit.rule.asks(query).items():
                beta = jnp.where(here, 0.0, beta) if fit.rule.needs_information else beta
                asked = PointSites(alpha + beta * local[name].mean, beta)
                new[name] = carries[name].blend(asked, scene.at[name].features, rate)
            return new

        start = {}
        for name, d in data.items():
            linear = d.alpha + d.beta * (d.mean - layout.take(name, loc[name]))
            own = PointSites(-layout.put(name, linear, i), -layout.put(name, d.beta, i))
            start[name] = scene.at[name].start().add(own, scene.at[name].features)
        q = locals_of(lax.fori_loop(0, steps, step, start))[1]
        return {
            k: Marginals(*(layout.take(k, x)[:, i] for x in marginals))
            for k, marginals in q.items()
        }

    found = lax.map(without, jnp.arange(layout.rows))
    ok = jnp.stack([jnp.isfinite(q.mean + q.variance).all(-1) for q in found.values()]).all(0)

    def or_cavity(refined: Array, cavity: Array) -> Array:
        return jnp.where(ok, refined.T, cavity)

    return {name: Marginals(*map(or_cavity, q, data[name].without)) for name, q in found.items()}


def below(frame: Frame, without: Mapping[str, Marginals]) -> tuple[Array, Array]:
    r"""Probability of less, and of no more, than each data point, with the point left out.

    .. math:: \mathrm{PIT}_i = \int F(y_i \mid f) \, \mathcal{N}(f;\, m_c, v_c) \, \mathrm{d}f

    Args:
      frame: the fit at one value of the hyperparameters.
      without: marginals with each point left out.

    Returns:
      Two arrays of shape ``(n,)``, which are the same if data are continuous.
    """
    axes, layout = frame.fit.structure.axes, frame.layout
    reading = frame.fit.read(hyper=frame.hyper)
    evaluate = probabilities(frame.fit.model, reading, frame.fit.data)

    def at_rows(values: Mapping[str, Array]) -> Array:
        ((name, found),) = evaluate(values).items()
        return jnp.stack([layout.by_row(name, jnp.asarray(part))[0] for part in found])

    def visit(carry: Array, inputs: tuple[Array, Array]) -> tuple[Array, None]:
        node, weight = inputs
        values = {
            name: q.mean + jnp.sqrt(q.variance) * node[axes[name]].astype(q.mean.dtype)[:, None]
            for name, q in without.items()
        }
        return carry + weight * layout.at_own_values(at_rows, values), None

    # Evenly spaced ones do not thin out where a narrow likelihood may stand.
    nodes: Any = fine_nodes(1) if frame.fit.structure.dim == 1 else frame.fit.nodes()
    given = (jnp.asarray(nodes.points), jnp.asarray(nodes.weights))
    total, _ = lax.scan(visit, jnp.zeros((2, layout.rows)), given)
    return total[0], total[1]


def log_densities(
    frame: Frame,
    data: Mapping[str, AtPoints],
    without: Mapping[str, Marginals],
) -> tuple[Array, Array]:
    """Log predictive density of each row without the row, and under the posterior itself.

    Args:
      frame: the fit at one value of the hyperparameters.
      data: from :func:`at_points`.
      without: marginals with each point left out.

    Returns:
      Two arrays of shape ``(n,)``.
    """
    rows = frame.rows(scaled=False)
    sites = {name: PointSites(d.alpha + d.beta * d.mean, d.beta) for name, d in data.items()}
    none = jax.tree.map(jnp.zeros_like, sites)
    inside = {name: Marginals(d.mean, d.variance) for name, d in data.items()}
    return rows.log_partition(without, sites), rows.log_partition(inside, none)
