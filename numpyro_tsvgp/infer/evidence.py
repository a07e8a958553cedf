r"""What stands in for the log evidence at any hyperparameters, and its derivatives.

With sites :math:`\lambda_k(\theta)` after k updates at the hyperparameters :math:`\theta` it is
:math:`\mathcal{L}(\lambda_k(\theta), \theta)`, whose slope is

.. math::
  \frac{\mathrm{d} \mathcal{L}}{\mathrm{d} \theta} = \frac{\partial \mathcal{L}}{\partial \theta} +
  \frac{\partial \mathcal{L}}{\partial \lambda} \frac{\mathrm{d} \lambda_k}{\mathrm{d} \theta} .

Where the updates climb the objective itself, its slope in the sites vanishes at their fixed point,
and the second term with it: the slope is that of an M-step with sites held, and no update need be
differentiated. A sampler loses nothing by what is left of the second term after k updates: its
proposals may follow any vector field of the hyperparameters, and are accepted by the value.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from numpyro_tsvgp.gaussian.linalg import full_precision
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.steps.density import (
    Scene,
    e_steps,
    objective_of,
    scene_at,
    sites_of_points,
)

__all__ = ["evidence_of"]


@full_precision()
def evidence_of(fit: Fit, hyper: Params, refresh: int) -> Array:
    """The objective of a fit at given hyperparameters, with sites made anew there.

    Args:
      fit: the fit.
      hyper: one value of each hyperparameter that the model samples.
      refresh: number of site updates at rate 1.

    Returns:
      A scalar. Its first derivative in the hyperparameters holds the sites where updates climb
      the objective, as the fixed point allows; all other derivatives go through the updates.
    """
    if refresh and fit.objective.is_bound and fit.rule.climbs:
        return _climbed(refresh, fit, hyper)
    return _unrolled(refresh, fit, hyper)


def _unrolled(refresh: int, fit: Fit, hyper: Params) -> Array:
    """The objective, to be differentiated through the updates as often as one likes."""
    fit = fit.refreshed(hyper, refresh)
    scene = _scene(fit, hyper)
    sites = sites_of_points(scene, fit.rule) if fit.objective.needs_rows else None
    return objective_of(scene, fit.objective, sites=sites)


def _held(refresh: int, fit: Fit, hyper: Params, *, for_gradient: bool) -> Array:
    """The same with the refreshed sites held, for at most one derivative."""
    scene = _scene(fit, hyper, for_gradient=for_gradient)
    kept = e_steps(scene.still(), fit.rule, 1.0, refresh).kept
    return objective_of(scene, fit.objective, fresh=kept)


def _scene(fit: Fit, hyper: Params, *, for_gradient: bool = False) -> Scene:
    return scene_at(
        *(fit.guide, fit.structure, fit.data, fit.params, hyper, fit.nodes()),
        key=jax.random.key(0),
        for_gradient=for_gradient,
    )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _climbed(refresh: int, fit: Fit, hyper: Params) -> Array:
    return _held(refresh, fit, hyper, for_gradient=False)


@partial(_climbed.defjvp, symbolic_zeros=True)
def _slope_of_climbed(refresh: int, primals: Any, tangents: Any) -> tuple[Array, Array]:
    fit, hyper = primals
    fit_moves, moves = tangents
    if any(not _is_still(t) for t in jax.tree.leaves(fit_moves, is_leaf=_is_still)):
        unrolled = partial(_unrolled, refresh)
        return jax.jvp(unrolled, primals, jax.tree.map(_materialised, tangents, is_leaf=_is_still))
    value, slope = _value_and_slope(refresh, fit, hyper)
    along = [jnp.vdot(slope[k], move) for k, move in moves.items() if not _is_still(move)]
    return value, sum(along, jnp.zeros_like(value))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _value_and_slope(refresh: int, fit: Fit, hyper: Params) -> tuple[Array, Params]:
    return jax.value_and_grad(partial(_held, refresh, fit, for_gradient=True))(hyper)


@_value_and_slope.defjvp
def _curvature(refresh: int, primals: Any, tangents: Any) -> Any:
    return jax.jvp(jax.value_and_grad(partial(_unrolled, refresh), argnums=1), primals, tangents)


def _is_still(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _materialised(tangent: Any) -> Any:
    return jnp.zeros(tangent.shape, tangent.dtype) if _is_still(tangent) else tangent
