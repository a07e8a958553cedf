"""Why a fit cannot start or cannot go on, in words: which site it is, and what to try."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp import posterior
from numpyro_tsvgp.loop import TSVGPState, all_finite

if TYPE_CHECKING:
    from numpyro_tsvgp.svi import TSVGP

__all__ = ["check_priors", "check_rate", "diagnose"]


def check_rate(svi: TSVGP, state: TSVGPState, num_steps: int) -> None:
    """A schedule must stay in (0, 1] for as long as the run will be."""
    if not callable(svi.site_lr):  # a number has been checked already
        return
    steps = state.step + jnp.arange(num_steps)
    rates = np.asarray(jax.vmap(svi.site_lr)(steps))
    bad = np.flatnonzero(~((rates > 0) & (rates <= 1)))
    if len(bad):
        raise ValueError(
            f"site_lr must lie in (0, 1], but the schedule gives {rates[bad[0]]} at step "
            f"{steps[bad[0]]}. Bound it, as in lambda step: jnp.clip(schedule(step), 1e-3, 1)."
        )


def check_priors(
    svi: TSVGP, state: TSVGPState, args: Any, kwargs: Any, *, strict: bool = False
) -> None:
    """The covariance of every GP's inducing inputs must have a Cholesky factor.

    If strict, that of a covariance that is nearly singular does not count.
    """
    params = svi.get_params(state)
    reading = svi.guide.read(params, args, kwargs)
    for name, site in reading.gps.items():
        fitted = svi.guide.unpack(name, params)
        Z = fitted.inducing
        chol = jax.jit(posterior.prior)(site, fitted).chol
        pivots = jnp.diagonal(chol, axis1=-2, axis2=-1) ** 2
        least = jnp.sqrt(jnp.finfo(chol.dtype).eps) * pivots.max(-1) if strict else 0.0
        if (pivots.min(-1) > least).all():  # false also for NaN
            continue
        values = {
            key: value
            for key, value in reading.pinned.items()
            if jnp.shape(value) == () and reading.trace[key]["type"] != "plate"
        }
        at = ", ".join(f"{key} = {float(value):.3g}" for key, value in values.items())
        what = f"The covariance of the {Z.shape[0]} inducing inputs of GP site '{name}' is"
        where = f" (at {at})" if at else ""
        if not all_finite((Z, values)) or not (site.kernel.diag(Z) > 0).any(-1).all():
            raise ValueError(
                f"{what} zero or not finite{where}. Try other initial values, a smaller "
                "learning rate, or a prior that keeps the hyperparameters away from zero and "
                "infinity."
            )
        how = "nearly singular" if strict else "not positive definite"
        raise ValueError(
            f"{what} {how}{where}. Inducing inputs may be too close for the "
            "lengthscale: use fewer of them, a shorter initial lengthscale or a prior that "
            "keeps it short, float64 (jax.config.update('jax_enable_x64', True)), or more "
            "jitter (GP(kernel, X, jitter=1e-4))."
        )


def diagnose(svi: TSVGP, state: TSVGPState, args: Any, kwargs: Any) -> str:
    """Why the update of a finite state is not finite, and what to try."""
    try:
        check_priors(svi, state, args, kwargs)
    except ValueError as error:
        return str(error)
    params = svi.get_params(state)
    for name, site in svi.guide.read(params, args, kwargs).gps.items():
        if not all_finite(posterior.marginals(site, svi.guide.unpack(name, params))):
            return (
                f"The posterior precision of GP site '{name}' is not positive definite: its "
                "sites hold negative curvature, and the hyperparameters moved too far for "
                'them. Try curvature="clip", a smaller learning rate, or more e_steps.'
            )
    _, key = jax.random.split(state.rng_key)
    rate = svi._rate(state.step)
    sites, plates, _ = jax.jit(svi._e_step)(key, params, rate, args, kwargs)
    if not all_finite(sites):
        return (
            "The expected log-likelihood has no finite gradient at the current posterior: "
            "its density overflows where the quadrature looks. Try a smaller site_lr, a link "
            "function that grows more slowly (jax.nn.softplus in place of jnp.exp), or data "
            "on a smaller scale."
        )
    state = state._replace(sites={**state.sites, **sites})

    def loss_fn(free: dict[str, Any]) -> tuple[Array, None]:
        return svi._loss(key, free, state.sites, plates, args, kwargs), None

    value_and_grad = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    optim = svi.optim
    for _ in range(svi.m_steps):
        (loss, _), grads = value_and_grad(svi._free(state.optim_state))
        bad = sorted(k for k, g in grads.items() if not all_finite(g))
        if bad or not jnp.isfinite(loss):
            return (
                f"The loss is {loss} and its gradient is not finite in {bad}. Try "
                "run(..., stable_update=True), float64, or more jitter (GP(..., jitter=1e-4))."
            )
        if optim is None:
            break
        step = jax.jit(lambda optim_state: optim.eval_and_update(loss_fn, optim_state)[1])
        state = state._replace(optim_state=step(state.optim_state))
        if not all_finite(state.optim_state):
            break
        try:
            check_priors(svi, state, args, kwargs)
        except ValueError as error:
            return f"After a step of the optimizer: {error}"
    try:  # a covariance on the edge can have a factor here that it did not have in the run
        check_priors(svi, state, args, kwargs, strict=True)
    except ValueError as error:
        return str(error)
    return (
        "The step of the optimizer left the region where the model is finite. Try a smaller "
        "learning rate, a prior on the hyperparameters, or run(..., stable_update=True)."
    )
