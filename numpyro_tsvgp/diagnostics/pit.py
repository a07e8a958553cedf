"""Is the predictive distribution of each point, without it, the one that the point is from?"""

from __future__ import annotations

import jax
import numpy as np
import xarray as xr
from jax import Array

from numpyro_tsvgp.diagnostics import cavities
from numpyro_tsvgp.diagnostics.cavities import Frame
from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.model.layout import observed_rows
from numpyro_tsvgp.model.likelihood import data_sites

__all__ = ["loo_pit"]


@blas_threads()
@full_precision(on_cpu=False)
def loo_pit(fit: Fit, *, rng_key: Array | None = None, refine: int = 0) -> xr.DataArray:
    r"""Probability integral transforms of the data, each under the posterior without it.

    .. math:: \mathrm{PIT}_i = P(y < y_i \mid y_{-i}) + u_i \, P(y = y_i \mid y_{-i})

    without a refit and without draws: the posterior without a point is the one with its site taken
    away. If the predictive distributions are right, the transforms are uniform. Too many near 0 and
    1 say that the distributions are too narrow, too many in the middle that they are too wide.
    (``az.plot_loo_pit`` weights draws of the posterior by importance, which fails at the points
    that matter most.)

    Args:
      fit: the fit, with its training data, all of it. Variational hyperparameters are held at
        their median.
      rng_key: random key of :math:`u_i`, uniform, which makes the transform of discrete data
        uniform too; None for 1/2.
      refine: number of E-steps taken without each point; see :func:`~numpyro_tsvgp.loo`.

    Returns:
      The transforms along the rows of the data; rows that are masked out are left out.

    Raises:
      ValueError: if a row has several data points, vectors, or a distribution without a ``cdf``.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, loo_pit
      >>> def model(X, y=None):
      ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 20)
      >>> svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::3]), None, site_lr=1.0)
      >>> result = svi.run(jax.random.key(0), 1, X, jnp.sin(6.0 * X), progress_bar=False)
      >>> loo_pit(result.fit).sizes["data"]
      20

    References:
      A. Gelfand, *Model determination using sampling-based methods*, in Markov Chain Monte Carlo in
      Practice, 1996.
    """
    check_fit("loo_pit(result.fit)", fit)
    if refine:
        fit.check_has_all_rows("loo_pit with refine")
    fit = fit.of_all_data()
    layout = Frame.of(fit, fit.hyper).layout
    sites = data_sites(fit.read().trace)
    several = [name for name, site in sites.items() if np.size(site["value"]) != layout.rows]
    if len(sites) > 1 or several:
        raise ValueError(
            f"Observed sites {list(sites)} hold several data points for each row of the GPs, which "
            "have no one place in a distribution. Look at one output at a time: a model of it "
            "alone, or draws of to_arviz(key, fit)."
        )

    @jax.jit
    @full_precision()
    def compute(fit: Fit) -> tuple[Array, Array]:
        frame = Frame(fit, layout, fit.hyper)
        data = cavities.at_points(frame)
        without = {name: d.without for name, d in data.items()}
        if refine:
            without = cavities.refine(frame, data, refine)
        return cavities.below(frame, without)

    less, no_more = (np.asarray(part) for part in compute(fit))
    share = 0.5 if rng_key is None else np.asarray(jax.random.uniform(rng_key, less.shape))
    rows = np.flatnonzero(observed_rows(layout, fit.read()))
    pit = np.clip(less + share * (no_more - less), 0.0, 1.0)[rows]
    return xr.DataArray(pit, dims=(layout.dim,), coords={layout.dim: rows}, name="loo_pit")
