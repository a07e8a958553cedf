"""Whether a fit can start or go on from a state, in words: which site it is, and what to do."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.gaussian.features import prior_at
from numpyro_tsvgp.infer.em.loop import all_finite
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.guides.hyper import HyperGuide
from numpyro_tsvgp.infer.guides.memory import refuses_matrix
from numpyro_tsvgp.infer.state import TSVGPState
from numpyro_tsvgp.infer.steps.adaptive import Adaptive
from numpyro_tsvgp.infer.steps.objective import Objective
from numpyro_tsvgp.infer.steps.rules import SiteRule
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.checks import inspect
from numpyro_tsvgp.model.glance import glance
from numpyro_tsvgp.model.information import information
from numpyro_tsvgp.model.layout import find_layout
from numpyro_tsvgp.model.read import Model, Reading, one_at_a_time, read
from numpyro_tsvgp.model.structure import Structure, moves_with
from numpyro_tsvgp.model.wrapped import unwrapped

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.em.iteration import Iteration

__all__ = [
    "check_priors",
    "check_rate",
    "check_rows",
    "check_site_lr",
    "check_start",
    "check_state",
    "seen_rows",
]


def seen_rows(driver: Iteration, call: Call) -> Call:
    """The arguments that the checks before a fit look at: all rows, or some where they are many."""
    return glance(driver.model, call, lambda name: not driver.guide.kind(name).keeps_sums)


def check_start(
    driver: Iteration, structure: Structure, reading: Reading, hyper_guide: HyperGuide, call: Call
) -> None:
    """Whether guide, rule and hyperparameters go together on these data.

    Args:
      driver: the driver.
      structure: the structure of the model.
      reading: a reading of the model at its data.
      hyper_guide: the guide of its hyperparameters.
      call: arguments of the model.

    Raises:
      ValueError: if they do not.
    """
    guide = driver.guide
    for name, site in reading.gps.items():
        kind = guide.kind(name)
        refusal = guide.refuses(name, site, reading)
        if refusal is not None:
            raise ValueError(refusal)
        if guide.factorises_rows(name):
            too_large = refuses_matrix(site.rows, site.loc.dtype)
            if too_large is not None:
                raise ValueError(
                    f"GP site '{name}' has {site.rows:,} rows and no inducing inputs, which asks "
                    f"for {too_large}. Give the guide inducing inputs, as in "
                    "inducing=inducing.kmeans(key, X, 500), or, if X are times and the kernel has "
                    "a state-space form, markov=True."
                )
        why = driver.rule.refuses(kind)  # type: ignore[arg-type]
        if why is not None:
            raise ValueError(
                f"The site rule {driver.rule!r} cannot be used for GP site '{name}': {why}."
            )
    check_rows(driver.rule, driver.objective, driver.model, structure, call)
    why = driver.objective.refuses(driver.model, structure, reading, call)
    if why is not None:
        raise ValueError(f"The objective {driver.objective!r} is not for this model: {why}.")
    if hyper_guide.is_point:
        _warn_of_random_effects(structure, reading)
        return
    values = {name: reading.trace[name]["value"] for name in structure.hyperparameters}
    for name, moves in moves_with(driver.model, reading, call, values).items():
        kind = guide.kind(name)
        array_mean = moves["mean"] and reading.gps[name].gp.mean_function is None
        if (moves["inputs"] and kind.follows_inputs) or array_mean:
            what = "mean, an array," if array_mean else "inputs"
            how = (
                "Write the mean as a function of the inputs, GP(kernel, X, mean=lambda x: ...), so "
                "that it is known at the inducing inputs too"
                if array_mean
                else 'Give the guide inducing inputs with sites="tied"'
            )
            raise ValueError(
                f"The {what} of GP site '{name}' depend on a hyperparameter that hyper_guide makes "
                f"a distribution, and the guide would hold what is only right at one value. {how}, "
                "or use point estimates (the default hyper_guide)."
            )


def check_rows(
    rule: SiteRule, objective: Objective, model: Model, structure: Structure, call: Call
) -> None:
    """Whether what a rule and an objective ask of single data points is there.

    Args:
      rule: the site rule.
      objective: the objective.
      model: the NumPyro model.
      structure: its structure.
      call: its arguments.

    Raises:
      ValueError: if it is not.
    """
    asking = [f"site rule {rule!r}"] * rule.needs_rows
    asking += [f"objective {objective!r}"] * objective.needs_rows

    # As compiled updates see the data: as arrays whose values are not known.
    def look(call: Call) -> None:
        reading = read(model, call, key=jax.random.key(0), first_rows=True)
        if asking:
            find_layout(model, structure, reading, call)
        if rule.needs_information:
            values = {
                name: jnp.zeros((site.functions, site.rows), site.loc.dtype)
                for name, site in reading.gps.items()
            }
            information(model, structure, reading, call)(values)

    if not asking and not rule.needs_information:
        return
    what = " and the ".join(asking or [f"site rule {rule!r}"])
    try:
        jax.eval_shape(look, call)
    except ValueError as error:
        raise ValueError(f"The {what} must see data points one by one. {error}") from None


def _warn_of_random_effects(structure: Structure, reading: Reading) -> None:
    """Plates of Gaussian variables and their scale have no useful joint maximum."""
    for name in structure.above:
        site = reading.trace[name]
        fn = unwrapped(site["fn"])
        many = site["cond_indep_stack"] and np.size(site["value"]) > 1
        if many and isinstance(fn, dist.Normal | dist.StudentT | dist.Cauchy):
            warnings.warn(
                f"Site '{name}' is a plate of {np.size(site['value'])} latent variables that is "
                "not a GP, and hyper_guide makes point estimates. The joint maximum of random "
                "effects and their scale is no estimate of either. Make them a GP, whose sites "
                f"are fitted like those of any other: {name} = numpyro.sample('{name}', "
                "GP(scale**2 * kernels.Group(), jnp.arange(groups))), or use a hyper_guide such as "
                "AutoNormal.",
                stacklevel=stack_level(),
            )


def check_state(driver: Iteration, state: TSVGPState, call: Call | None = None) -> None:
    """Whether a state belongs to the model and the guide of a driver.

    Args:
      driver: the driver.
      state: a state.
      call: arguments of the model, if they are to be looked at, too.

    Raises:
      TypeError: if it is not a state.
      ValueError: if it is one of another model or guide.
    """
    if not isinstance(state, TSVGPState):
        raise TypeError(
            f"A state is what svi.init returns, a TSVGPState; got {type(state).__name__}."
        )
    have = {*state.approximation, *state.transforms}
    missing = [
        key
        for name in state.structure.gps
        for key in driver.guide.fields_of(name)
        if key not in have
    ]
    if missing:
        raise ValueError(
            f"The state is one of another guide or model: it has no {missing}. It has "
            f"{sorted(have)}. Make it with the init of this driver."
        )
    if call is None:
        return
    call = seen_rows(driver, call)
    structure, reading = inspect(driver.model, call, driver.looks())
    if structure.gps != state.structure.gps or structure.hyper != state.structure.hyper:
        raise ValueError(
            "The state is one of another model: its GP sites are "
            f"{list(state.structure.gps)} and its hyperparameters "
            f"{list(state.structure.hyperparameters)}, where this model has "
            f"{list(structure.gps)} and {list(structure.hyperparameters)}."
        )
    hyper_guide = driver.guide.hyper_guide(structure.hyper, call)
    with (
        one_at_a_time,
        handlers.block(),
        handlers.trace() as trace,
        handlers.seed(rng_seed=0),
    ):
        hyper_guide(call)
    declared = {
        name for name, site in [*trace.items(), *reading.trace.items()] if site["type"] == "param"
    }
    fields = {key for name in structure.gps for key in driver.guide.fields_of(name)}
    if have != declared | fields:
        raise ValueError(
            "The state is one of another model or guide: its parameters are "
            f"{sorted(have)}, where this model and guide have {sorted(declared | fields)}."
        )
    params = driver.get_params(state)
    for name, site in reading.gps.items():
        kind = driver.guide.kind(name)
        initial = driver.guide.initial(name, site, reading)
        field = "loc" if hasattr(initial, "loc") else "linear"
        axes = 1 if kind.keeps_sums else 2  # of functions, and of data points
        found = jnp.shape(getattr(driver.guide.unpack(name, params), field))[:axes]
        wanted = jnp.shape(getattr(initial, field))[:axes]
        if found != wanted:
            raise ValueError(
                f"The state is one of other data: what it keeps of GP site '{name}' has shape "
                f"{found} (functions{', data points' if axes == 2 else ''}), where these data ask "
                f"for {wanted}. Start from svi.init on these data, or pass those of the state."
            )


def check_site_lr(rate: Any) -> None:
    """The rate of E-steps must be a number in (0, 1], a schedule or None.

    Args:
      rate: what was given.

    Raises:
      TypeError: if it is something else, such as an optimizer.
      ValueError: if it is a number that is not in (0, 1].
    """
    is_number = isinstance(rate, int | float | np.number | np.ndarray | jax.Array)
    if is_number and np.ndim(rate) == 0:
        if not 0 < rate <= 1:
            raise ValueError(f"site_lr must lie in (0, 1], got {rate}.")
    elif isinstance(rate, str) and rate == "auto":
        return
    elif not (rate is None or isinstance(rate, Adaptive) or callable(rate)):
        # An optimizer of optax or NumPyro has an update.
        hint = "; an optimizer is the third argument, optim" if hasattr(rate, "update") else ""
        raise TypeError(
            "site_lr is the rate of E-steps, a number in (0, 1], a function of the step or 'auto', "
            f"got {type(rate).__name__}{hint}."
        )


def check_rate(rate: Any, state: TSVGPState, num_steps: int) -> None:
    """A schedule must stay in (0, 1] for as long as the run will be."""
    if not callable(rate):  # a number has been checked already
        return
    steps = state.step + jnp.arange(num_steps)
    rates = np.asarray(jax.vmap(rate)(steps))
    bad = np.flatnonzero(~((rates > 0) & (rates <= 1)))
    if len(bad):
        raise ValueError(
            f"site_lr must lie in (0, 1], but the schedule gives {rates[bad[0]]} at step "
            f"{steps[bad[0]]}. Bound it, as in lambda step: jnp.clip(schedule(step), 1e-3, 1)."
        )


def _extreme_eigenvalues(process: Any, Z: jax.Array) -> tuple[float, float]:
    """The smallest eigenvalue of the kernels' matrices at some inputs, and the largest."""
    matrices = np.asarray(process.kernel(Z, Z), float)
    found = np.linalg.eigvalsh(0.5 * (matrices + matrices.swapaxes(-1, -2)))
    return float(found.min()), float(found.max())


@partial(jax.jit, static_argnames="strict")
def _has_factor(process: Any, approximation: Any, strict: bool) -> jax.Array:
    """Whether the prior covariance has a Cholesky factor; false also for NaN."""
    Z = approximation.inducing
    if not approximation.largest_factor:  # nothing is factorised
        return (process.kernel.diag(Z).max(-1) > 0.0).all()
    chol = prior_at(process, Z).chol
    pivots = jnp.diagonal(chol, axis1=-2, axis2=-1) ** 2
    least = jnp.sqrt(jnp.finfo(chol.dtype).eps) * pivots.max(-1) if strict else 0.0
    return (pivots.min(-1) > least).all()


def check_priors(fit: Fit, *, strict: bool = False) -> None:
    """The covariance of every GP's inducing inputs must have a Cholesky factor.

    If strict, that of a covariance that is nearly singular does not count.
    """
    reading = fit.read()
    for name, (process, approximation) in fit.guide.latents(reading, fit.params).items():
        Z = approximation.inducing
        factorised = bool(approximation.largest_factor)
        if _has_factor(process, approximation, strict):
            continue
        values = {
            key: value
            for key, value in reading.pinned.items()
            if jnp.shape(value) == () and reading.trace[key]["type"] != "plate"
        }
        at = ", ".join(f"{key} = {float(value):.3g}" for key, value in values.items())
        of = f"{Z.shape[0]} inducing inputs" if factorised else f"{Z.shape[0]} times"
        what = f"The covariance of the {of} of GP site '{name}' is"
        where = f" (at {at})" if at else ""
        if not all_finite((Z, values)) or not (process.kernel.diag(Z) > 0).any(-1).all():
            raise ValueError(
                f"{what} zero or not finite{where}. Try other initial values, a smaller "
                "learning rate, or a prior that keeps the hyperparameters away from zero and "
                "infinity."
            )
        least_eigenvalue, largest = _extreme_eigenvalues(process, Z)
        if least_eigenvalue < -1e3 * float(jnp.finfo(Z.dtype).eps) * len(Z) * largest:
            raise ValueError(
                f"{what} not positive definite{where}, and not by rounding: it has the eigenvalue "
                f"{least_eigenvalue:.3g}, where the largest is {largest:.3g}. The kernel is not a "
                "covariance. Check its formula and its hyperparameters; tinygp's Matern and "
                "exponential kernels take the L1 distance by default, which is none in several "
                "dimensions: pass distance=tinygp.kernels.distance.L2Distance()."
            )
        how = "nearly singular" if strict else "not positive definite"
        raise ValueError(
            f"{what} {how}{where}. Inducing inputs may be too close for the "
            "lengthscale: use fewer of them, a shorter initial lengthscale or a prior that "
            "keeps it short, float64 (jax.config.update('jax_enable_x64', True)), or more "
            "jitter (GP(kernel, X, jitter=1e-4))."
        )
