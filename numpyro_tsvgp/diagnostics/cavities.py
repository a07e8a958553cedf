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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_tsvgp.gaussian.quadrature import Marginals, SiteGradients, site_gradients
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.density import scene_at
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.hyper import Params
from numpyro_tsvgp.model.layout import Layout, find_layout
from numpyro_tsvgp.model.likelihood import Terms, terms
from numpyro_tsvgp.model.read import Reading

__all__ = ["AtPoints", "Frame", "Without", "at_points", "log_densities", "refine"]

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
    def without(self) -> Without:
        """The marginals with the point itself left out."""
        variance = self.variance - self.explained + self.explained_without
        return Without(self.mean - self.shift, variance)


class Without(NamedTuple):
    """Mean and variance of one GP at each data point with that point left out."""

    mean: Array
    variance: Array


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
        return Frame(fit, find_layout(fit.model, fit.structure, reading, fit.data), hyper)

    def read(self) -> tuple[Reading, Evaluate]:
        """The model, and the terms of its likelihood."""
        reading = self.fit.read(hyper=self.hyper)
        return reading, terms(self.fit.model, reading, self.fit.data)

    def gradients(
        self, likelihood: Any, marginals: Mapping[str, Marginals]
    ) -> dict[str, SiteGradients]:
        """Alpha and beta of a likelihood, as the sites of the fit hold them."""
        _, found = site_gradients(likelihood, marginals, self.fit.nodes())
        return {name: self.fit.rule.curvature(gradients) for name, gradients in found.items()}


def at_points(frame: Frame) -> dict[str, AtPoints]:
    """Every GP at the data, with the sites of each point.

    The sites are those of the data alone; what ``numpyro.factor`` says is not left out.

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

    found = {}
    for name, (process, approximation) in fit.guide.latents(reading, fit.params).items():
        local = approximation.marginals_at_data(process)
        found[name] = local._replace(mean=local.mean + process.loc)
    gradients = frame.gradients(
        likelihood, {name: Marginals(q.mean, q.variance) for name, q in found.items()}
    )
    return {name: AtPoints(*q, *gradients[name]) for name, q in found.items()}


def refine(frame: Frame, data: Mapping[str, AtPoints], steps: int) -> dict[str, Without]:
    """Moves the sites of all other points to where they belong without each point.

    Every point costs as much as ``steps`` E-steps on all data, so this is for small data.

    Args:
      frame: the fit at one value of the hyperparameters.
      data: from :func:`at_points`.
      steps: number of E-steps, at rate one.

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
    everything, loc = scene.likelihood, {name: at.process.loc for name, at in scene.at.items()}

    def marginals(carries: Mapping[str, Any]) -> dict[str, Marginals]:
        out = {}
        for name, at in scene.at.items():
            local = at.local(at.posterior(carries[name]))
            out[name] = Marginals(local.mean + loc[name], local.variance)
        return out

    def without(i: Array) -> dict[str, Marginals]:
        here = jnp.arange(layout.rows) == i

        def likelihood(values: Mapping[str, Array]) -> Array:
            left_out = [
                jnp.sum(jnp.where(here, layout.by_row(name, t.scale * t.log_prob), 0.0))
                for name, t in evaluate(values).items()
            ]
            return everything(values) - jnp.stack(left_out).sum()

        def step(_: Any, carries: dict[str, Any]) -> dict[str, Any]:
            q = marginals(carries)
            new = {}
            for name, (alpha, beta) in frame.gradients(likelihood, q).items():
                sites = PointSites(alpha + beta * (q[name].mean - loc[name]), beta)
                new[name] = carries[name].blend(sites, scene.at[name].features, 1.0)
            return new

        start = {}
        for name, d in data.items():
            linear = jnp.where(here, d.alpha + d.beta * (d.mean - loc[name]), 0.0)
            own = PointSites(-linear, -jnp.where(here, d.beta, 0.0))
            start[name] = scene.at[name].start().add(own, scene.at[name].features)
        q = marginals(lax.fori_loop(0, steps, step, start))
        return jax.tree.map(lambda x: x[:, i], q)

    found = lax.map(without, jnp.arange(layout.rows))
    ok = jnp.stack([jnp.isfinite(q.mean + q.variance).all(-1) for q in found.values()]).all(0)

    def or_cavity(refined: Array, cavity: Array) -> Array:
        return jnp.where(ok, refined.T, cavity)

    return {name: Without(*map(or_cavity, q, data[name].without)) for name, q in found.items()}


def _nodes_for_densities(frame: Frame) -> tuple[Array, Array]:
    """Nodes for integrals of a density, which may be narrow where its logarithm is smooth."""
    if frame.fit.structure.dim > 1:
        nodes = frame.fit.nodes()
        return nodes.points, nodes.weights
    # The trapezoidal rule, which for a Gaussian times a smooth function converges as fast as
    # Gauss-Hermite and does not thin out where a narrow likelihood may stand.
    z = np.linspace(-8.0, 8.0, 161)
    weights = np.exp(-0.5 * z**2)
    return jnp.asarray(z[:, None]), jnp.asarray(weights / weights.sum())


def log_densities(
    frame: Frame,
    data: Mapping[str, AtPoints],
    without: Mapping[str, Without],
) -> tuple[Array, Array]:
    """Log predictive density of each row without the row, and under the posterior itself.

    The nodes are those of the cavity times the site, a Gaussian near where the integrand is, and
    their weights are corrected for it. What is integrated is the likelihood over its site, which
    for a Gaussian likelihood is a constant and integrated exactly.

    Args:
      frame: the fit at one value of the hyperparameters.
      data: from :func:`at_points`.
      without: marginals with each point left out.

    Returns:
      Two arrays of shape ``(n,)``.
    """
    axes, layout = frame.fit.structure.axes, frame.layout
    _, evaluate = frame.read()

    def visit(carry: Array, inputs: tuple[Array, Array]) -> tuple[Array, None]:
        node, log_weight = inputs
        inside, values, log_ratio = {}, {}, {}
        for name, d in data.items():
            z = node[axes[name]].astype(d.mean.dtype)[:, None]
            inside[name] = d.mean + jnp.sqrt(d.variance) * z
            m_c, v_c = without[name]
            v_t = v_c / (1 + jnp.maximum(d.beta, 0.0) * v_c)
            step = v_t * (d.alpha + d.beta * (d.mean - m_c)) + jnp.sqrt(v_t) * z
            values[name] = m_c + step
            log_ratio[name] = 0.5 * (z**2 - step**2 / v_c + jnp.log(v_t / v_c))
        left_out = layout.sum_terms(evaluate(values)) + layout.sum_latents(log_ratio)
        new = jnp.stack([left_out, layout.sum_terms(evaluate(inside))])
        return jnp.logaddexp(carry, new + log_weight), None

    nodes, weights = _nodes_for_densities(frame)
    start = jnp.full((2, layout.groups + 1, layout.rows), -jnp.inf)
    total, _ = lax.scan(visit, start, (nodes, jnp.log(weights)))
    left_out, density = total.sum(1)
    return left_out, density
