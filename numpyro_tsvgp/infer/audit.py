"""A second opinion on a fit, by draws from the guide through the model's own density.

Everything that a fit reports rests on the quadrature, and on what was found out about the model
before it. The audit uses neither: it draws functions from the guide and asks the model for the
density of the data, as NumPyro's own ``Trace_ELBO`` would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.gaussian.quadrature import Marginals, expect
from numpyro_tsvgp.infer.evidence import evidence_of
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.importance import standard_normals
from numpyro_tsvgp.infer.standing import doubts
from numpyro_tsvgp.infer.steps.density import scene_at
from numpyro_tsvgp.infer.steps.objective import Bound
from numpyro_tsvgp.model.likelihood import density, log_prior
from numpyro_tsvgp.model.read import is_observed, on_some_rows, run_with

__all__ = ["Audit", "audit"]

# Rows up to which functions are drawn with their joint covariance.
_JOINT_ROWS = 512
# Of more rows than these, some are looked at.
_ROWS = 20_000
_SOME_ROWS = 2_000
# Function values that are drawn, and limits to the number of draws that they make.
_VALUES = 2**21
_FEWEST_DRAWS, _MOST_DRAWS = 128, 4096
# Standard errors by which two estimates of one number may differ.
_STANDARD_ERRORS = 5.0
# Spread of the log weights of hyperparameters. A normal distribution half as wide as the posterior
# has 0.53, one that is far too narrow 0.71 in one dimension and more in several.
_SPREAD = 0.5
_NUM_HYPER = 256
_REFRESH = 3
# Nats a point by which an objective may exceed the bound. Where it stands in for the evidence of
# the same model these are a few tenths.
_EXCESS = 1.0


@dataclass(frozen=True)
class Audit:
    """What an audit found; print it for a verdict.

    Attributes:
      expected: the expected log-likelihood of each site, as the quadrature has it.
      drawn: the same by draws from the guide through the model's own density.
      standard_error: the standard error of ``drawn``.
      gain: by how much one more E-step of rate 1 on all data would change the objective, in nats;
        None where the audit looked at some of the rows.
      points: the number of data points.
      floored: how many marginal variances at the data round to nothing.
      spread: standard deviation of the log importance weights of variational hyperparameters, with
        the GPs integrated out; None where hyperparameters are points. It is zero for the exact
        posterior.
      doubts: what is approximated and no longer right at the hyperparameters of the fit.
      excess: by how much an objective other than the bound exceeds the bound of the same posterior,
        in nats; None for the bound itself, and where the audit looked at some of the rows.
    """

    expected: dict[str, float]
    drawn: dict[str, float]
    standard_error: dict[str, float]
    gain: float | None
    points: int
    floored: int
    spread: float | None
    doubts: tuple[str, ...] = ()
    excess: float | None = None

    @property
    def concerns(self) -> list[str]:
        """What is wrong, one sentence each; empty if nothing is."""
        out = list(self.doubts)
        for name, value in self.expected.items():
            drawn, error = self.drawn[name], self.standard_error[name]
            rounding = 1e-5 * (abs(value) + 1.0)
            if not abs(value - drawn) <= _STANDARD_ERRORS * error + rounding:
                out.append(
                    f"The expected log-likelihood of site '{name}' is {value:.6g} by quadrature "
                    f"but {drawn:.6g} ± {error:.2g} by draws from the guide. Either the likelihood "
                    "is too sharp for the nodes (try quadrature=60, or QuasiMonteCarlo(1024) for "
                    "several GPs), or its terms read values that they were not seen to read."
                )
        if self.gain is not None and not abs(self.gain) <= max(1.0, 0.05 * self.points):
            out.append(
                f"One more E-step would change the objective by {self.gain:.3g} nats: the sites "
                "have not converged. Run more steps, or finish with optim=None for a few; if the "
                "change does not shrink, with a smaller site_lr."
            )
        if self.excess is not None and not self.excess <= _EXCESS * self.points:
            out.append(
                f"The objective exceeds the bound of the same posterior by {self.excess:.3g} nats, "
                f"{self.excess / self.points:.2g} a point. It may have a maximum that is none of "
                "the evidence, at large variances; or the bound is loose. Fit with the bound "
                "(objective=None), start from that fit, and use more inducing inputs."
            )
        if self.spread is not None and not self.spread <= _SPREAD:
            out.append(
                f"The variational posterior of the hyperparameters is off: its log importance "
                f"weights spread by {self.spread:.2g}. Use a richer hyper_guide "
                "(AutoMultivariateNormal), more steps, or NUTS on collapse(fit)."
            )
        if self.floored > 0.01 * self.points:
            out.append(
                f"{self.floored} marginal variances at the data round to nothing. Use float64, or "
                "standardise inputs and data."
            )
        return out

    def __str__(self) -> str:
        lines = [
            f"{name}: {value:.6g} by quadrature, {self.drawn[name]:.6g} "
            f"± {self.standard_error[name]:.2g} by draws"
            for name, value in self.expected.items()
        ]
        if self.gain is None:
            lines.append(f"on {self.points} of the rows")
        else:
            lines.append(f"one more E-step: {self.gain:+.3g} nats for {self.points} points")
        if self.spread is not None:
            lines.append(f"spread of the log weights of hyperparameters: {self.spread:.2g}")
        concerns = self.concerns
        lines += [f"! {concern}" for concern in concerns] or ["nothing to worry about"]
        return "\n".join(lines)


@blas_threads()
@full_precision(on_cpu=False)
def audit(
    fit: Fit, rng_key: Array, *, num_draws: int | None = None, hyperparameters: bool = True
) -> Audit:
    r"""Checks a fit against draws from its guide through the model's own density.

    .. math::
      \sum_s w_s \log p(y \mid f_s) \;\overset{?}{=}\;
      \frac1D \sum_d \log p(y \mid f_d), \qquad f_d \sim q

    Functions are drawn jointly up to 512 rows; above, they are correlated through the inducing
    values. Of more than 20,000 rows evenly spaced ones are looked at, if the model runs on fewer.
    Variational hyperparameters are held at their median.

    Args:
      fit: the fit, with its training data.
      rng_key: random key.
      num_draws: D, an even number; draws come in pairs that are mirrored. By default there are
        between 128 and 4096, fewer where data are many, which need fewer.
      hyperparameters: whether to look at the posterior of variational hyperparameters as well,
        which costs some 250 evaluations of the objective.

    Returns:
      What was found.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
      >>> def model(X, y=None):
      ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 20)
      >>> svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::2]), None)
      >>> result = svi.run(jax.random.key(0), 20, X, (X > 0.5).astype(int), progress_bar=False)
      >>> result.fit.audit(jax.random.key(1)).concerns
      []
    """
    hyperparameters = hyperparameters and not fit.hyper_guide.is_point
    if hyperparameters:
        fit.check_has_all_rows("Auditing the posterior of hyperparameters (hyperparameters=True)")
    fit, is_whole = _of_bounded_size(fit.of_all_data())
    key_noise, key_hyper = jax.random.split(rng_key)
    latents = fit.guide.latents(fit.read(), fit.params)
    rows = max(process.rows for process, _ in latents.values())
    if num_draws is None:
        values = sum(process.rows * process.functions for process, _ in latents.values())
        num_draws = min(max(_VALUES // values, _FEWEST_DRAWS), _MOST_DRAWS)
    noise = standard_normals(key_noise, max(num_draws // 2, 2), latents)
    found = _compare((rows <= _JOINT_ROWS, is_whole), fit, noise)
    spread = None
    if hyperparameters:
        keys = jax.random.split(key_hyper, _NUM_HYPER)
        spread = float(np.std(np.asarray(_hyper_weights(fit, keys))))
    expected, drawn, error, gain, floored, excess = jax.device_get(found)
    is_other = is_whole and not fit.objective.is_bound
    return Audit(
        {name: float(v) for name, v in expected.items()},
        {name: float(v) for name, v in drawn.items()},
        {name: float(v) for name, v in error.items()},
        float(gain) if is_whole else None,
        rows,
        int(floored),
        spread,
        tuple(doubts(fit)),
        float(excess) if is_other else None,
    )


def _of_bounded_size(fit: Fit) -> tuple[Fit, bool]:
    """The fit on some of its rows where they are many, and whether it has all of them."""
    reading, is_whole = fit.read(), not fit.data.alone
    if max(site.rows for site in reading.gps.values()) <= _ROWS:
        return fit, is_whole
    found = on_some_rows(fit.model, reading, fit.data, _SOME_ROWS)
    return (fit, is_whole) if found is None else (dataclasses.replace(fit, call=found[1]), False)


def _densities(fit: Fit, pinned: Params, values: Mapping[str, Array]) -> dict[str, Array]:
    trace = run_with(fit.model, fit.data, {**pinned, **values})
    below = fit.structure.below
    return {
        name: density(site) for name, site in trace.items() if is_observed(site) or name in below
    }


@partial(jax.jit, static_argnums=0)
@full_precision()
def _compare(settings: tuple[bool, bool], fit: Fit, noise: Mapping[str, Any]) -> tuple[Any, ...]:
    """Expectations by quadrature and by draws, with errors; gain of an E-step; floors; excess."""
    jointly, is_whole = settings
    hyper = fit.hyper
    reading = fit.read(hyper=hyper)
    marginals, draws = {}, {}
    for name, (process, approximation) in fit.guide.latents(reading, fit.params).items():
        local = approximation.marginals_at_data(process)
        marginals[name] = Marginals(local.mean + process.loc, local.variance)
        mirrored = jax.tree.map(lambda x: jnp.concatenate([x, -x]), noise[name])
        if jointly:
            values = approximation.joint(process).draw(mirrored)
        else:
            values = approximation.draw_marginally(process, mirrored)
        draws[name] = process.unflatten(values)
    each = lax.map(lambda values: _densities(fit, reading.pinned, values), draws)

    def expectation(site: str) -> Array:
        def one(values: Mapping[str, Array]) -> Array:
            shaped = {name: reading.gps[name].unflatten(v) for name, v in values.items()}
            return _densities(fit, reading.pinned, shaped)[site]

        return expect(one, marginals, fit.nodes())

    pairs = {site: v.reshape(2, -1).mean(0) for site, v in each.items()}
    drawn = {site: v.mean() for site, v in pairs.items()}
    error = {site: v.std() / v.size**0.5 for site, v in pairs.items()}
    gain = excess = jnp.zeros(())
    if is_whole:
        here = evidence_of(fit, hyper, 0)
        gain = evidence_of(fit, hyper, 1) - here
        if not fit.objective.is_bound:
            excess = here - evidence_of(dataclasses.replace(fit, objective=Bound()), hyper, 0)
    expected = {site: expectation(site) for site in each}
    return expected, drawn, error, gain, _floored(fit, hyper), excess


def _floored(fit: Fit, hyper: Params) -> Array:
    scene = scene_at(
        fit.guide,
        fit.structure,
        fit.data,
        fit.params,
        hyper,
        fit.nodes(),
        key=jax.random.key(0),
    )
    counts = [at.count_floored(at.posterior(at.start())) for at in scene.at.values()]
    return jnp.stack(counts).sum()


@jax.jit
@full_precision()
def _hyper_weights(fit: Fit, keys: Array) -> Array:
    """Log weights of draws of the hyperparameters, with the GPs integrated out."""

    def one(key: Array) -> Array:
        hyper, log_q = fit.hyper_guide.draw(key, fit.params, fit.data)
        prior = log_prior(fit.read(hyper=hyper), fit.structure.above)
        return evidence_of(fit, hyper, _REFRESH) + prior - log_q

    return lax.map(one, keys)
