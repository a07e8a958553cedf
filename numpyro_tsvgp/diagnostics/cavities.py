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

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_tsvgp import posterior, sites
from numpyro_tsvgp.expectations import Marginals, Rule, choose_rule, site_gradients
from numpyro_tsvgp.extract import GPSite, Reading, log_likelihood
from numpyro_tsvgp.features import Features, sum_linear, sum_quadratic
from numpyro_tsvgp.guide import AutoDualGaussian, Params
from numpyro_tsvgp.pointwise import Layout, Terms, find_layout, terms, whole
from numpyro_tsvgp.posterior import Fitted

__all__ = [
    "AtData",
    "Frame",
    "Given",
    "Without",
    "at_data",
    "frame",
    "log_densities",
    "marginals_at_data",
    "refine",
]

Evaluate = Callable[[Mapping[str, Array]], dict[str, Terms]]

# Numbers held at once when features are made at many rows: latents * m * rows.
_CHUNK_ELEMENTS = 2**22


class AtData(NamedTuple):
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


class Given(NamedTuple):
    """Everything that has values: parameters, arguments, and the sampled hyperparameters."""

    params: Params
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    hyper: Params


class Frame(NamedTuple):
    """What stays the same for all hyperparameters."""

    guide: AutoDualGaussian
    layout: Layout
    nodes: Array
    weights: Array
    clip: bool

    def read(self, given: Given) -> tuple[Reading, Evaluate]:
        """The model at given values, and the terms of its likelihood there."""
        reading = self.guide.read(given.params, given.args, given.kwargs, given.hyper)
        return reading, terms(self.guide.model, reading, given.args, given.kwargs)

    def gradients(self, likelihood: Any, marginals: Mapping[str, Marginals]) -> dict[str, Any]:
        """Alpha and beta of a likelihood, as the E-steps of the fit take them."""
        axes = self.guide.structure.axes
        _, found = site_gradients(likelihood, marginals, axes, self.nodes, self.weights)
        if self.clip:
            found = {k: g._replace(beta=jnp.maximum(g.beta, 0.0)) for k, g in found.items()}
        return found


def frame(
    guide: AutoDualGaussian,
    params: Params,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    quadrature: Rule | None,
    curvature: str,
) -> Frame:
    """Reads a model once: the layout of its data and the quadrature of its sites."""
    if curvature not in ("clip", "riemannian"):
        raise ValueError(f'curvature must be "clip" or "riemannian", got {curvature!r}.')
    guide = whole(guide, args, kwargs)
    layout = find_layout(guide, guide.read(params, args, kwargs), args, kwargs)
    dim = guide.structure.dim
    rule = choose_rule(dim) if quadrature is None else quadrature
    nodes, weights = rule.nodes(jax.random.key(0), dim)
    return Frame(guide, layout, nodes, weights, curvature == "clip")


def marginals_at_data(site: GPSite, fitted: Fitted) -> tuple[Marginals, Array, sites.Posterior]:
    """Posterior marginals of one GP at the data, in chunks of rows.

    Args:
      site: the GP at the training inputs.
      fitted: its fitted parameters.

    Returns:
      The marginals, the part of their variance that sites move, and the whitened posterior.
    """
    prior = posterior.prior(site, fitted)
    q = posterior.inducing_values(site, fitted, prior)

    def at(at_data: Features) -> tuple[Array, Array, Array]:
        mean, variance = sites.marginals(q, at_data)
        return mean, variance, jnp.minimum(sites.explained_variance(q, at_data), variance)

    X, n = site.gp.X, site.rows
    chunk = max(_CHUNK_ELEMENTS // math.prod(q.mean.shape), 256)
    if fitted.is_full or n <= chunk:
        parts = at(posterior.training_features(site, fitted, prior, X))
    else:
        pad = -n % chunk
        padded = jnp.concatenate([X, jnp.broadcast_to(X[:1], (pad, *X.shape[1:]))])
        chunks = lax.map(
            lambda x: at(posterior.training_features(site, fitted, prior, x)),
            padded.reshape(-1, chunk, *X.shape[1:]),
        )
        mean, variance, explained = (
            jnp.moveaxis(v, 0, 1).reshape(-1, n + pad)[:, :n] for v in chunks
        )
        parts = mean, variance, explained
    return Marginals(parts[0] + site.loc, parts[1]), parts[2], q


def at_data(frame: Frame, given: Given) -> dict[str, AtData]:
    """Every GP at the data, at one value of the hyperparameters.

    The sites are those of the data alone; what ``numpyro.factor`` says is not left out.

    Args:
      frame: from :func:`frame`.
      given: the values to look at.

    Returns:
      Marginals and sites by GP.
    """
    reading, evaluate = frame.read(given)

    def likelihood(values: Mapping[str, Array]) -> Array:
        parts = [jnp.sum(t.scale * t.log_prob) for t in evaluate(values).values()]
        return jnp.stack(parts).sum()

    found = {
        name: marginals_at_data(gp, frame.guide.unpack(name, given.params))
        for name, gp in reading.gps.items()
    }
    gradients = frame.gradients(likelihood, {name: q for name, (q, _, _) in found.items()})
    return {
        name: AtData(*q, explained, *gradients[name]) for name, (q, explained, _) in found.items()
    }


def refine(
    frame: Frame, given: Given, data: Mapping[str, AtData], steps: int
) -> dict[str, Without]:
    """Moves the sites of all other points to where they belong without each point.

    Every point costs as much as ``steps`` E-steps on all data, so this is for small data.

    Args:
      frame: from :func:`frame`.
      given: the values to look at.
      data: from :func:`at_data`.
      steps: number of E-steps, at rate one.

    Returns:
      Marginals without each point, by GP. Where the steps did not stay finite, those of the
      cavity.
    """
    guide, layout = frame.guide, frame.layout
    reading, evaluate = frame.read(given)
    everything = log_likelihood(guide.model, reading, given.args, given.kwargs)
    features, whitened, loc = {}, {}, {}
    for name, site in reading.gps.items():
        fitted = guide.unpack(name, given.params)
        prior = posterior.prior(site, fitted)
        features[name] = posterior.training_features(site, fitted, prior, site.gp.X)
        whitened[name] = posterior.whitened(site, fitted, prior)
        loc[name] = jnp.broadcast_to(site.loc, (site.latents, site.rows))

    def sums(name: str, linear: Array, quadratic: Array) -> sites.Whitened:
        w = features[name].w
        return sites.Whitened(sum_linear(w, linear), sum_quadratic(w, quadratic))

    def marginals(current: Mapping[str, sites.Whitened]) -> dict[str, Marginals]:
        out = {}
        for name, value in current.items():
            mean, variance = sites.marginals(sites.posterior(value), features[name])
            out[name] = Marginals(mean + loc[name], variance)
        return out

    def at(i: Array) -> dict[str, Marginals]:
        here = jnp.arange(layout.rows) == i

        def likelihood(values: Mapping[str, Array]) -> Array:
            left_out = [
                jnp.sum(jnp.where(here, layout.by_row(name, t.scale * t.log_prob), 0.0))
                for name, t in evaluate(values).items()
            ]
            return everything(values) - jnp.stack(left_out).sum()

        def step(_: Any, current: dict[str, sites.Whitened]) -> dict[str, sites.Whitened]:
            q = marginals(current)
            gradients = frame.gradients(likelihood, q)
            return {
                name: sums(name, g.alpha + g.beta * (q[name].mean - loc[name]), g.beta)
                for name, g in gradients.items()
            }

        start = {}
        for name, d in data.items():
            linear = jnp.where(here, d.alpha + d.beta * (d.mean - loc[name]), 0.0)
            own = sums(name, linear, jnp.where(here, d.beta, 0.0))
            start[name] = jax.tree.map(jnp.subtract, whitened[name], own)
        q = marginals(lax.fori_loop(0, steps, step, start))
        return jax.tree.map(lambda x: x[:, i], q)

    found = lax.map(at, jnp.arange(layout.rows))
    ok = jnp.stack([jnp.isfinite(q.mean + q.variance).all(-1) for q in found.values()]).all(0)

    def or_cavity(refined: Array, cavity: Array) -> Array:
        return jnp.where(ok, refined.T, cavity)

    return {name: Without(*map(or_cavity, q, data[name].without)) for name, q in found.items()}


def _nodes_for_densities(frame: Frame) -> tuple[Array, Array]:
    """Nodes for integrals of a density, which may be narrow where its logarithm is smooth."""
    if frame.guide.structure.dim > 1:
        return frame.nodes, frame.weights
    # The trapezoidal rule, which for a Gaussian times a smooth function converges as fast as
    # Gauss-Hermite and does not thin out where a narrow likelihood may stand.
    z = np.linspace(-8.0, 8.0, 161)
    weights = np.exp(-0.5 * z**2)
    return jnp.asarray(z[:, None]), jnp.asarray(weights / weights.sum())


def log_densities(
    frame: Frame,
    given: Given,
    data: Mapping[str, AtData],
    without: Mapping[str, Without],
) -> tuple[Array, Array]:
    """Log predictive density of each row without the row, and under the posterior itself.

    The nodes are those of the cavity times the site, a Gaussian near where the integrand is, and
    their weights are corrected for it. What is integrated is the likelihood over its site, which
    for a Gaussian likelihood is a constant and integrated exactly.

    Args:
      frame: from :func:`frame`.
      given: the values to look at.
      data: from :func:`at_data`.
      without: marginals with each point left out.

    Returns:
      Two arrays of shape ``(n,)``.
    """
    axes, layout = frame.guide.structure.axes, frame.layout
    _, evaluate = frame.read(given)

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
