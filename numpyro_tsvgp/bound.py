"""The bound, and the model of the hyperparameters whose likelihood it is.

Both halves of the method start here: an E-step takes the gradient of the expected
log-likelihood in the marginals, an M-step takes the gradient of the bound, with sites held, in
everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, lax

from numpyro_tsvgp import moments, posterior, sites
from numpyro_tsvgp.expectations import (
    LogLikelihood,
    Marginals,
    Rule,
    choose_rule,
    expect,
    site_gradients,
)
from numpyro_tsvgp.extract import GPSite, Reading, log_likelihood, read
from numpyro_tsvgp.features import Features, Prior
from numpyro_tsvgp.guide import AutoDualGaussian, Params
from numpyro_tsvgp.held import free_bound, moved_bound
from numpyro_tsvgp.moments import Moments, Natural, WhitenedMoments
from numpyro_tsvgp.posterior import Fitted, Sites
from numpyro_tsvgp.sites import PointSites, Posterior, TiedSites, Whitened

__all__ = ["EStep", "collapsed_model", "refresh_sites", "update_sites"]


_Carried = TiedSites | PointSites | Natural


class EStep(NamedTuple):
    """How sites are updated: the rate r, how often, and what becomes of negative curvature."""

    rate: Any = 1.0
    steps: int = 1
    curvature: str = "clip"


class Data(NamedTuple):
    """One GP at its training inputs and the current hyperparameters."""

    site: GPSite
    fitted: Fitted
    prior: Prior
    features: Features

    @property
    def sites(self) -> Sites:
        return self.fitted.sites

    def whitened(self) -> Whitened:
        assert isinstance(self.sites, TiedSites | PointSites)
        shift = posterior.anchor_shift(self.site, self.fitted, self.prior)
        return sites.whiten(self.sites, self.prior, self.features, shift)

    def bound(self, fresh: Sites | None) -> tuple[Marginals, Array]:
        """Marginals and divergence, with the sites kept or with others made here and now."""
        if self.prior.covariance is not None:
            if fresh is not None:
                assert isinstance(fresh, TiedSites)
                made = Whitened(fresh.linear, fresh.quadratic)
                departure = posterior.departure(self.site, self.fitted)
                return free_bound(self.prior, made, self.features, departure)
            shift = posterior.anchor_shift(self.site, self.fitted, self.prior)
            if shift is None:
                return free_bound(self.prior, self.whitened(), self.features)
            assert isinstance(self.sites, TiedSites)
            cross = posterior.anchor_covariance(self.site, self.fitted)
            return moved_bound(self.prior, self.sites, self.features, shift, cross)
        value = self.sites if fresh is None else fresh
        if isinstance(value, Moments | WhitenedMoments):
            q = moments.posterior(value, self.prior)
        else:
            q = sites.posterior(sites.whiten(value, self.prior, self.features))
        return sites.marginals(q, self.features), sites.kl_divergence(q)


def _at_data(
    guide: AutoDualGaussian, reading: Reading, params: Params, *, held: bool, departs: bool = False
) -> dict[str, Data]:
    out = {}
    for name, site in reading.gps.items():
        fitted = guide.unpack(name, params)
        is_held = held and isinstance(fitted.sites, TiedSites)
        prior = posterior.prior(site, fitted, held=is_held, departs=departs)
        features = posterior.training_features(site, fitted, prior, site.gp.X)
        out[name] = Data(site, fitted, prior, features)
    return out


def _nodes(guide: AutoDualGaussian, rule: Rule | None, key: Array) -> tuple[Array, Array]:
    dim = guide.structure.dim
    return (choose_rule(dim) if rule is None else rule).nodes(key, dim)


def collapsed_model(
    guide: AutoDualGaussian,
    rule: Rule | None = None,
    key: Array | None = None,
    *,
    refresh: int = 0,
    held: bool = False,
    e_step: EStep | None = None,
    found: dict[str, Any] | None = None,
    wanted: Any = None,
) -> Callable[..., None]:
    r"""The model of the hyperparameters: GPs integrated out, the bound in place of the data.

    .. math::
      \log p(\theta) + \mathcal{L}(\lambda, \theta), \qquad
      \mathcal{L} = \mathbb{E}_q \log p(y \mid f) - \mathrm{KL}(q \,\|\, p)

    Args:
      guide: a guide that has been set up.
      rule: quadrature rule, or None for the default.
      key: key for rules with random nodes; the bound is a deterministic function given it.
      refresh: number of site updates at rate 1 before the bound is taken. They are part of the
        density and are differentiated through.
      held: whether to take the bound in coordinates that are held, which makes its gradient
        cheaper and leaves it without second derivatives.
      e_step: an E-step to take before, which is not part of the density: the bound is that of the
        sites it leads to. They share everything that depends on the hyperparameters alone. Asks
        for ``held``.
      found: where to put what the E-step found, ``sites`` and ``floored``.
      wanted: see :func:`~numpyro_tsvgp.expectations.expect`.

    Returns:
      A NumPyro model with the arguments of the original one. The guide's sites and inducing
      inputs, like the model's own parameters, are ``param`` sites of it.
    """

    def model(*args: Any, **kwargs: Any) -> None:
        structure = guide.setup(*args, **kwargs)
        before_gps = True

        def expose(site: dict[str, Any]) -> bool:
            # A deterministic site can only be shown while it cannot depend on a GP.
            nonlocal before_gps
            before_gps = before_gps and site.get("name") not in structure.gps
            if site["type"] == "deterministic":
                return before_gps
            return structure.is_hyper_or_frame(site)

        reading = read(guide.model, args, kwargs, expose=expose)
        params = guide.declare(reading.gps)
        fixed_key = jax.random.key(0) if key is None else key
        if refresh:
            params |= update_sites(
                guide, reading, params, args, kwargs, EStep(steps=refresh), rule=rule, key=fixed_key
            )[0]
        data = _at_data(guide, reading, params, held=held, departs=e_step is not None)
        quadrature = _nodes(guide, rule, fixed_key)
        new: dict[str, Sites] = {}
        if e_step is not None:
            still, pinned = lax.stop_gradient((data, reading.pinned))
            likelihood = log_likelihood(guide.model, reading._replace(pinned=pinned), args, kwargs)
            new, floored = _updated(still, likelihood, structure.axes, quadrature, e_step)
            if found is not None:
                found.update(sites=_pack(guide, new), floored=floored)
        kl: Any = 0.0
        marginals = {}
        for name, d in data.items():
            (mean, variance), divergence = d.bound(new.get(name))
            marginals[name] = Marginals(mean + d.site.loc, variance)
            kl = kl + divergence
        likelihood = log_likelihood(guide.model, reading, args, kwargs)
        expected = expect(likelihood, marginals, structure.axes, *quadrature, wanted=wanted)
        numpyro.factor("bound", expected - kl)

    return model


def update_sites(
    guide: AutoDualGaussian,
    reading: Reading,
    params: Params,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    e_step: EStep,
    *,
    rule: Rule | None = None,
    key: Array,
) -> tuple[dict[str, Array], Array]:
    """The E-step: site updates of every GP at fixed hyperparameters.

    Features are computed once, and in whitened coordinates nothing is solved in between.

    Args:
      guide: the guide.
      reading: a reading of the model at the current hyperparameters.
      params: current parameters.
      args: arguments of the model.
      kwargs: keyword arguments of the model.
      e_step: how sites are updated.
      rule: quadrature rule, or None for the default.
      key: key for rules with random nodes.

    Returns:
      The site parameters after the updates, and how many marginal variances were floored.
    """
    likelihood = log_likelihood(guide.model, reading, args, kwargs)
    data = _at_data(guide, reading, params, held=False)
    quadrature = _nodes(guide, rule, key)
    new, floored = _updated(data, likelihood, guide.structure.axes, quadrature, e_step)
    return _pack(guide, new), floored


def _pack(guide: AutoDualGaussian, new: Mapping[str, Sites]) -> dict[str, Array]:
    packed: dict[str, Array] = {}
    for name, value in new.items():
        packed |= guide.pack(name, value)
    return packed


def _updated(
    data: Mapping[str, Data],
    likelihood: LogLikelihood,
    axes: Mapping[str, np.ndarray],
    quadrature: tuple[Array, Array],
    e_step: EStep,
) -> tuple[dict[str, Sites], Array]:
    """The sites of every GP after the updates, and how many variances were floored."""
    rate, steps, curvature = e_step

    def posteriors(current: Mapping[str, _Carried]) -> dict[str, Posterior]:
        out = {}
        for name, d in data.items():
            value = current[name]
            if isinstance(value, Natural):
                out[name] = moments.posterior_of_natural(value)
            elif isinstance(value, TiedSites):  # already in the coordinates of this prior
                out[name] = sites.posterior(Whitened(value.linear, value.quadratic))
            else:
                out[name] = sites.posterior(sites.whiten(value, d.prior, d.features))
        return out

    def step(_: Any, carry: tuple[dict[str, _Carried], Array]) -> tuple[dict[str, _Carried], Array]:
        current, floored = carry
        qs = posteriors(current)
        centred = {name: sites.marginals(qs[name], d.features) for name, d in data.items()}
        marginals = {
            name: Marginals(centred[name].mean + d.site.loc, centred[name].variance)
            for name, d in data.items()
        }
        _, gradients = site_gradients(likelihood, marginals, axes, *quadrature)
        new: dict[str, _Carried] = {}
        for name, d in data.items():
            value, gradient = current[name], gradients[name]
            if isinstance(value, Natural):
                new[name] = moments.step(value, gradient, qs[name], d.features, rate, curvature)
            elif curvature == "riemannian":
                assert isinstance(value, TiedSites)  # checked by the driver
                new[name] = sites.blend_riemannian(value, gradient, qs[name], d.features, rate)
            else:
                mean = centred[name].mean
                new[name] = sites.blend(value, gradient, mean, d.prior, d.features, rate)
            floored = floored + sites.count_floored(qs[name], d.features)
        return new, floored

    # To the coordinates of the current prior once, before the first update, and back at the end.
    carry = {name: _start(d) for name, d in data.items()}, jnp.zeros((), int)
    final, floored = step(0, carry) if steps == 1 else lax.fori_loop(0, steps, step, carry)
    return {name: _finish(value, data[name]) for name, value in final.items()}, floored


def _start(data: Data) -> _Carried:
    """What a run of updates carries from one to the next."""
    value = data.sites
    if isinstance(value, Moments | WhitenedMoments):
        return moments.natural(moments.posterior(value, data.prior))
    if isinstance(value, TiedSites):
        anchor = None if value.anchor is None else data.fitted.inducing
        return TiedSites(*data.whitened(), data.prior.inverse, anchor)
    return value


def _finish(value: _Carried, data: Data) -> Sites:
    """What is kept of it."""
    if not isinstance(value, Natural):
        return value
    q = moments.posterior_of_natural(value)
    return moments.moments(q, data.prior, whiten=isinstance(data.sites, WhitenedMoments))


def refresh_sites(
    guide: AutoDualGaussian,
    params: Params,
    hyper: Params,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    steps: int,
    rule: Rule | None = None,
) -> Params:
    """Parameters with sites made anew at given hyperparameters, as the density of them has it.

    Args:
      guide: the guide.
      params: fitted parameters.
      hyper: one value of each hyperparameter that the model samples.
      args: arguments of the model, with the training data.
      kwargs: keyword arguments of the model.
      steps: number of site updates at rate 1; with none the sites stay as they are.
      rule: quadrature rule, or None for the default.

    Returns:
      All parameters.
    """
    if not steps:
        return params
    reading = guide.read(params, args, kwargs, hyper)
    key = jax.random.key(0)
    how = EStep(steps=steps)
    new, _ = update_sites(guide, reading, params, args, kwargs, how, rule=rule, key=key)
    return {**params, **new}
