"""Whether a GP site is a time series that Markov sites can be used for, in words."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.series import series_of, times_of
from numpyro_tsvgp.gaussian.small import multiply
from numpyro_tsvgp.kernels import Periodic
from numpyro_tsvgp.model.read import GPSite

__all__ = ["check_series", "doubt_curvature", "doubt_form"]

# Times at which the form is compared with the kernel itself, and how far apart they may be,
# relative to the variance.
_TIMES = 24
_ERROR = 1e-3
# What a form that is not the kernel may be worth, in nats, in all and for each data point.
_NATS, _NATS_A_POINT = 1.0, 1e-3
# Kernel and form may differ by this many units of rounding, as sines of large angles do.
_ROUNDING = 1e3
# The most harmonics that are advised: a state has twice as many numbers.
_LARGEST = 60


def check_series(name: str, site: GPSite) -> None:
    """Whether a GP site is a function of one input with a state-space form.

    Args:
      name: the name of the GP site.
      site: the GP site.

    Raises:
      ValueError: if it is not.
    """
    X = site.gp.X
    if X.ndim == 2 and X.shape[1] != 1:
        raise ValueError(
            f"GP site '{name}' has inputs of shape {X.shape}, but markov=True is for functions of "
            "one input, the time: pass times of shape (n,) or (n, 1), or give the guide inducing "
            "inputs instead of markov=True."
        )
    process = site.process()
    try:
        process.kernel.state_space()
    except TypeError as error:
        raise ValueError(
            f"GP site '{name}' cannot have Markov sites: {error}. Use another kernel, or give the "
            "guide inducing inputs instead of markov=True."
        ) from error


def doubt_form(name: str, process: Process, approximation: Any) -> str | None:
    r"""Whether a state-space form is still that of the kernel, at other hyperparameters.

    Where a form leaves out the share :math:`\epsilon` of a variance, the log evidence is off by
    about :math:`\tfrac12 \epsilon \sum_i \beta_i k(t_i, t_i)`: precise data need a form that is
    more precise than others.

    Args:
      name: the name of the GP site.
      process: its prior.
      approximation: its Markov sites.

    Returns:
      A sentence with what to do, or None.
    """
    times = approximation.inputs
    some = _some_of(times)
    difference = float(_difference(process, some))
    worth = 0.5 * float(approximation.information(process))
    allowed = max(_NATS, _NATS_A_POINT * len(times))
    rounding = _ROUNDING * float(jnp.finfo(process.loc.dtype).eps)
    if difference <= _ERROR and not (difference > rounding and difference * worth > allowed):
        return None
    error = min(0.1 * _ERROR, max(0.1 * allowed / max(worth, 1e-300), 0.1 * rounding))
    if not worth:  # nothing is fitted yet
        return (
            f"The state-space form of the kernel of GP site '{name}' differs from the kernel by "
            f"{difference:.1g} of its variance at the initial hyperparameters. "
            f"{_remedy(process, error)}"
        )
    return (
        f"The state-space form of the kernel of GP site '{name}' differs from the kernel by "
        f"{difference:.1g} of its variance at the hyperparameters of the fit, which is worth about "
        f"{difference * worth:.2g} nats. Losses and predictions are those of the form, and "
        f"hyperparameters may have gone where it is best. {_remedy(process, error)}"
    )


def doubt_curvature(name: str, approximation: Any) -> str | None:
    """Whether a rule has left negative curvature in Markov sites, which have no draws then.

    Args:
      name: the name of the GP site.
      approximation: its Markov sites.

    Returns:
      A sentence with what to do, or None.
    """
    negative = int((np.asarray(approximation.quadratic) < 0).sum())
    if not negative:
        return None
    return (
        f"{negative} of the {approximation.quadratic.size} sites of GP site '{name}' hold negative "
        "curvature. Marginals and the bound are those of such sites, but joint draws from Markov "
        "sites need curvature of zero or more. Use a site rule that counts negative curvature as "
        "zero, as the default does."
    )


def _some_of(X: Array) -> Array:
    n = X.shape[0]
    return X[np.unique(np.linspace(0, n - 1, min(n, _TIMES)).astype(int))]


def _remedy(process: Process, error: float) -> str:
    """What to do about a form that is not the kernel."""
    wanting = [
        (part, part.needed_order(error))
        for part in jax.tree.leaves(process.kernel_of_batch, is_leaf=_is_periodic)
        if _is_periodic(part)
    ]
    wanting = [(part, order) for part, order in wanting if order is None or order > part.order]
    if not wanting:
        return "A kernel must be the covariance of the process that its state_space names."
    part, order = max(wanting, key=lambda pair: pair[1] or math.inf)
    scale = float(np.min(np.asarray(part.lengthscale)))
    if order is None or order > _LARGEST:
        return (
            f"A Periodic kernel over {part.base} with a lengthscale of {scale:.2g} has too many "
            "harmonics for a chain of states. Give its lengthscale a prior that keeps it longer, "
            "or give the guide inducing inputs instead of markov=True."
        )
    return (
        f"A Periodic kernel with a lengthscale of {scale:.2g} needs order={order}, it has "
        f"order={part.order}, and where the lengthscale becomes shorter it needs more: pass "
        f"Periodic(lengthscale, period, order={2 * order}), or give the lengthscale a prior that "
        "keeps it longer."
    )


def _is_periodic(part: Any) -> bool:
    return isinstance(part, Periodic)


@jax.jit
def _difference(process: Process, X: Array) -> Array:
    """The largest difference of kernel and state-space form, relative to the variance."""
    series = series_of(process, times_of(X))
    space, t = series.space, series.t
    n = t.shape[0]
    exact = process.kernel(X[series.order], X[series.order] + 0)

    def row(i: Array) -> Array:
        # From the state at time i to every later one.
        A, _ = space.step(jnp.broadcast_to(t[i], t.shape), jnp.maximum(t, t[i]))
        C = space.covariance(t[i][None])
        return multiply(A, C)[0, 0]

    form = jnp.moveaxis(jax.lax.map(row, jnp.arange(n)), 0, 1)
    later = jnp.arange(n)[:, None] <= jnp.arange(n)
    worst = jnp.where(later, jnp.abs(form - exact), 0.0).max((1, 2))
    return (worst / jnp.abs(exact).max((1, 2))).max()
