r"""Hypothetical data: many posteriors side by side, each with outcomes drawn from the fit.

Points whose outcomes are not known yet act on the posterior through its covariance with them. With
the covariance C of k pending points, their centred means m, and sites
:math:`(\lambda, \beta)` of outcomes that were drawn for them,

.. math::
  m_x' = m_x + c_x^\top (I + \beta C)^{-1} (\lambda - \beta m), \qquad
  v_x' = v_x - c_x^\top \beta^{1/2} R^{-1} \beta^{1/2} c_x, \qquad
  R = I + \beta^{1/2} C \beta^{1/2},

so that a fantasy costs :math:`k^3`, and :math:`O(k)` at each place where it is looked at. What is
of size m, :math:`O(m^2)` a place, is done once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.gaussian.approximation import Local
from numpyro_tsvgp.gaussian.linalg import blas_threads, cholesky_and_inverse, full_precision
from numpyro_tsvgp.gaussian.quadrature import Marginals, site_gradients
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.guides.prediction import joint_of
from numpyro_tsvgp.infer.new_data.conditioning import bare
from numpyro_tsvgp.infer.new_data.new_sites import Here, Sites, climb, slopes
from numpyro_tsvgp.infer.steps.rules import clipped
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.likelihood import log_likelihood
from numpyro_tsvgp.model.read import Reading, run_with

__all__ = ["Fantasies", "fantasies"]


class _Effect(NamedTuple):
    """What drawn outcomes do to one GP elsewhere, for each fantasy.

    Attributes:
      pull: what the covariance with the pending points is multiplied by to move the mean,
        ``(num, p, k)``.
      root: what it is multiplied by to narrow the variance, ``(num, p, k, k)``.
    """

    pull: Array
    root: Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["fit", "pending", "hyper", "effects", "values"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Fantasies:
    """Posteriors with drawn outcomes at pending points: a value and a pytree.

    Attributes:
      fit: the fit they start from, without its data.
      pending: arguments of the model with the pending points.
      hyper: the hyperparameters, which all of them share.
      effects: what the outcomes do to each GP.
      values: the outcomes, by observed site, each with a leading axis of fantasies.
    """

    fit: Fit
    pending: Call
    hyper: dict[str, Array]
    effects: dict[str, _Effect]
    values: dict[str, Array]

    @full_precision(on_cpu=False)
    def marginals(self, *args: Any, **kwargs: Any) -> dict[str, Marginals]:
        """Posterior mean and variance of each GP site in each fantasy.

        Args:
          *args: arguments of the model with the inputs to look at.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from GP site to a named tuple ``(mean, variance)``, each of shape ``(num, ...)``.
        """
        with blas_threads():
            return _marginals(self, Call(args, kwargs).on_device())


@jax.jit
@full_precision()
def _marginals(fantasies: Fantasies, call: Call) -> dict[str, Marginals]:
    fit, hyper = fantasies.fit, fantasies.hyper
    there = fit.guide.latents(fit.guide.read(call, fit.params, hyper), fit.params)
    pending = fit.guide.latents(fit.guide.read(fantasies.pending, fit.params, hyper), fit.params)
    found = {}
    for name, (process, approximation) in there.items():
        local = approximation.marginals(process)
        cross = approximation.covariance(process, pending[name].process)  # (p, n, k)
        effect = fantasies.effects[name]
        mean = local.mean + jnp.einsum("pnk,spk->spn", cross, effect.pull)
        narrowed = jnp.einsum("pnk,spjk->spnj", cross, effect.root)
        floor = jnp.finfo(mean.dtype).eps * process.kernel.diag(process.X)
        variance = jnp.maximum(local.variance - (narrowed**2).sum(-1), floor)
        found[name] = Marginals(process.unflatten(process.loc + mean), process.unflatten(variance))
    return found


@full_precision(on_cpu=False)
def fantasies(fit: Fit, rng_key: Array, num: int, call: Call) -> Fantasies:
    """Draws fantasies; see :meth:`numpyro_tsvgp.Fit.fantasies`."""
    check_fit("fantasies(result.fit, ...)", fit)
    if fit.structure.below:
        raise ValueError(
            f"Site '{fit.structure.below[0]}' is a latent variable that depends on a GP, whose "
            "value fantasies would have to draw as well. Put it into the likelihood."
        )
    call = call.on_device()
    hyper = fit.hyper_at(call)
    observed = _outcomes(fit, call, hyper)
    with blas_threads():
        effects, values = _drawn(bare(fit), call, hyper, rng_key, num, observed)
    return Fantasies(bare(fit), call, hyper, effects, values)


def _outcomes(fit: Fit, call: Call, hyper: Params) -> tuple[str, ...]:
    """Names of the sites that the model observes in training and draws here."""
    reading = fit.guide.read(call, fit.params, hyper)
    fit.guide.latents(reading, fit.params)  # which looks at the columns of the inputs
    given = [name for name, site in reading.trace.items() if _is_data(site)]
    if given:
        raise ValueError(
            f"Site '{given[0]}' is observed at the pending points. Their outcomes are drawn: pass "
            "the inputs alone, as in fit.fantasies(key, X_pending). What is known belongs into "
            "fit.condition(X, y)."
        )
    known = {*fit.structure.hyper.names, *fit.structure.gps}
    drawn = [
        name
        for name, site in reading.trace.items()
        if site["type"] == "sample" and not site["is_observed"] and name not in known
    ]
    if not drawn:
        raise ValueError(
            "The model draws no outcomes without data, so there is nothing to imagine. Write it "
            "so that it can be called without y: numpyro.sample('y', ..., obs=y) with y=None."
        )
    return tuple(drawn)


def _is_data(site: Any) -> bool:
    observed = site["type"] == "sample" and site["is_observed"]
    return observed and type(site["fn"]).__name__ != "Unit"


@partial(jax.jit, static_argnames=("num", "observed"))
@full_precision()
def _drawn(
    fit: Fit, call: Call, hyper: Params, key: Array, num: int, observed: tuple[str, ...]
) -> tuple[dict[str, _Effect], dict[str, Array]]:
    reading = fit.guide.read(call, fit.params, hyper)
    latents = fit.guide.latents(reading, fit.params)
    joints = {name: joint_of(latent) for name, latent in latents.items()}
    prior = {name: a.marginals(process) for name, (process, a) in latents.items()}
    covariance = {name: a.covariance(process, process) for name, (process, a) in latents.items()}
    loc = {name: process.loc for name, (process, _) in latents.items()}

    def one(key: Array) -> tuple[dict[str, _Effect], dict[str, Array]]:
        key_f, key_y = jax.random.split(key)
        keys = jax.random.split(key_f, len(joints))
        f = {n: q.sample(k) for k, (n, q) in zip(keys, joints.items(), strict=True)}
        pinned = {k: v for k, v in reading.pinned.items() if k not in observed}
        trace = run_with(fit.model, call, {**pinned, **f}, key_y)
        values = {name: trace[name]["value"] for name in observed}
        here = reading._replace(pinned={**pinned, **values})
        return _effects(fit, here, call, observed, prior, covariance, loc), values

    return jax.vmap(one)(jax.random.split(key, num))


def _effects(
    fit: Fit,
    reading: Reading,
    call: Call,
    observed: tuple[str, ...],
    prior: dict[str, Local],
    covariance: dict[str, Array],
    loc: dict[str, Array],
) -> dict[str, _Effect]:
    """The sites of drawn outcomes as those of new data (``new_sites``) are found, in k^3."""
    likelihood = log_likelihood(fit.model, reading, call, observed)
    nodes = fit.nodes()

    def at(sites: Sites) -> Here:
        mean, explained, effects, marginals = {}, {}, {}, {}
        for name, q in prior.items():
            C, (linear, beta) = covariance[name], sites[name]
            half = jnp.sqrt(beta)
            R = jnp.eye(C.shape[-1], dtype=C.dtype) + half[:, :, None] * C * half[:, None, :]
            root = cholesky_and_inverse(R)[1] * half[:, None, :]  # (p, k, k)
            # (I + beta C)^-1 b = b - sqrt(beta) R^-1 sqrt(beta) C b
            b = linear - beta * q.mean
            Cb = jnp.einsum("pij,pj->pi", C, b)
            pull = b - jnp.einsum("pji,pjk,pk->pi", root, root, Cb)
            effects[name] = _Effect(pull, root)
            mean[name] = q.mean + jnp.einsum("pij,pj->pi", C, pull)
            own = jnp.diagonal(C, axis1=-2, axis2=-1)
            explained[name] = own - (jnp.einsum("pjk,pik->pij", root, C) ** 2).sum(-1)
            variance = q.variance - own + explained[name]
            floor = jnp.finfo(own.dtype).eps * (own + q.variance)
            marginals[name] = Marginals(mean[name] + loc[name], jnp.maximum(variance, floor))
        _, found = site_gradients(likelihood, marginals, nodes)
        asked = {}
        for name, gradients in found.items():
            alpha, beta = clipped(gradients)
            asked[name] = PointSites(alpha + beta * mean[name], beta)
        return Here(sites, slopes(sites, asked, mean), mean, explained, effects)

    zero = {name: PointSites(*(jnp.zeros_like(q.mean),) * 2) for name, q in prior.items()}
    return climb(at, zero)[0].rest
