"""Why a fit cannot go on, in words: which site it is, and what to try."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_tsvgp.infer.em.checks import check_priors
from numpyro_tsvgp.infer.em.loop import all_finite
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.guides.prediction import marginals_of
from numpyro_tsvgp.infer.state import TSVGPState
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.data_checks import check_values

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.em.driver import Driver

__all__ = ["diagnose"]


def diagnose(driver: Driver, state: TSVGPState, call: Call) -> str:
    """Why the update of a finite state is not finite, and what to try."""

    def fit_of(state: TSVGPState) -> Fit:
        return driver.fit_of(state, call)

    try:
        check_values(driver.reading(state, call))
        check_priors(fit_of(state))
    except ValueError as error:
        return str(error)
    fit = fit_of(state)
    for name, latent in fit.guide.latents(fit.read(), fit.params).items():
        if not all_finite(marginals_of(latent)):
            return (
                f"The posterior precision of GP site '{name}' is not positive definite: its "
                "sites hold negative curvature, and the hyperparameters moved too far for "
                "them. Try the default site rule, a smaller learning rate, or more e_steps."
            )
    _, key = jax.random.split(state.rng_key)
    stepped, *_ = jax.jit(driver.e_step)(state, key, call)
    if not all_finite(stepped.approximation):
        return (
            "The expected log-likelihood has no finite gradient at the current posterior: "
            "its density overflows where the quadrature looks. Try a smaller site_lr, a link "
            "function that grows more slowly (jax.nn.softplus in place of jnp.exp), or data "
            "on a smaller scale."
        )
    state = stepped

    def loss_fn(free: dict[str, Any]) -> tuple[Array, None]:
        return driver.loss(stepped, free, key, call), None

    value_and_grad = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    optim = driver.optim
    for _ in range(driver.m_steps):
        (loss, _), grads = value_and_grad(driver.free(state.optim_state))
        bad = sorted(k for k, g in grads.items() if not all_finite(g))
        if bad or not jnp.isfinite(loss):
            return (
                f"The loss is {loss} and its gradient is not finite in {bad}. Try "
                "run(..., stable_update=True), float64, or more jitter (GP(..., jitter=1e-4))."
            )
        if optim is None:
            break
        step = jax.jit(lambda optim_state: optim.eval_and_update(loss_fn, optim_state)[1])
        state = dataclasses.replace(state, optim_state=step(state.optim_state))
        if not all_finite(state.optim_state):
            break
        try:
            check_priors(fit_of(state))
        except ValueError as error:
            return f"After a step of the optimizer: {error}"
    try:  # a covariance on the edge can have a factor here that it did not have in the run
        check_priors(fit_of(state), strict=True)
    except ValueError as error:
        return str(error)
    return (
        "The step of the optimizer left the region where the model is finite. Try a smaller "
        "learning rate, a prior on the hyperparameters, or run(..., stable_update=True)."
    )
