"""Whether a GP site is a time series that Markov sites can be used for, in words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.series import series_of, times_of
from numpyro_tsvgp.gaussian.small import multiply
from numpyro_tsvgp.model.read import GPSite

__all__ = ["check_series"]

# Times at which the form is compared with the kernel itself, and how far apart they may be,
# relative to the variance.
_TIMES = 24
_ERROR = 1e-3


def check_series(name: str, site: GPSite) -> None:
    """Whether a GP site is a function of one input with a state-space form that is right.

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
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(process)):
        return
    n = X.shape[0]
    some = X[np.unique(np.linspace(0, n - 1, min(n, _TIMES)).astype(int))]
    difference = float(_difference(process, some))
    if not difference <= _ERROR:
        raise ValueError(
            f"The state-space form of the kernel of GP site '{name}' differs from the kernel by "
            f"{difference:.1g} of its variance at the initial hyperparameters. A Periodic kernel "
            "with a short lengthscale needs a larger order, as in Periodic(lengthscale, period, "
            "order=20); a kernel of your own must be the covariance of the process that it names."
        )


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
