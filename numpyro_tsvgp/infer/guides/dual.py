"""AutoDualGaussian: a NumPyro autoguide whose parameters are sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro.infer.autoguide import AutoGuide

from numpyro_tsvgp.gaussian.approximation import Approximation
from numpyro_tsvgp.gaussian.markov import Markov, initial_markov
from numpyro_tsvgp.gaussian.points import (
    FullPoints,
    Points,
    initial_full_points,
    initial_points,
)
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.tied import MovingTied, Tied, initial_tied
from numpyro_tsvgp.infer.guides.guide import GPGuide
from numpyro_tsvgp.infer.guides.guide_checks import doubt_jitter
from numpyro_tsvgp.infer.guides.series import check_series, doubt_curvature, doubt_form
from numpyro_tsvgp.model.read import GPSite, Reading

__all__ = ["AutoDualGaussian"]


class AutoDualGaussian(GPGuide):
    r"""A Gaussian guide over GP sites, in the dual parameterization.

    For each GP site with inducing inputs Z the guide is

    .. math::
      q(f) = \int p(f \mid u) \, q(u) \, \mathrm{d}u, \qquad
      q(u) \propto p(u) \, \exp\!\big(u^\top \lambda_1 - \tfrac12 u^\top \Lambda_2 u\big),

    with the dual parameters :math:`\lambda_1 = \sum_i a_i (\alpha_i + \beta_i m_i)` and
    :math:`\Lambda_2 = \sum_i \beta_i a_i a_i^\top`. The prior in it is that of the current
    hyperparameters, so the guide follows them. Latent functions are independent of one another
    under q.

    The guide holds configuration alone and always follows its arguments: called with new inputs it
    gives the posterior there, and one guide serves any number of data sets.

    Args:
      model: a NumPyro model with one or more :class:`~numpyro_tsvgp.GP` sites.
      inducing: inducing inputs of shape ``(m, d)``, a dict from GP site to such an array, or
        None for none (t-VGP: one site for each data point, for small data). A GP site that the
        dict leaves out has none.
      sites: ``"tied"`` keeps the m-sized sums over sites; ``"untied"`` keeps a pair for each
        data point and rebuilds the sums when hyperparameters move, which asks for all the
        training inputs in each step.
      markov: whether to use that all GPs are functions of time whose kernels have a state-space
        form. Everything then takes time and memory in proportion to the number of data points,
        with one site for each and no inducing inputs.
      learn_inducing: whether the M-step moves the inducing inputs.
      hyper_guide: the guide of hyperparameters that the model samples, as a function of a
        model: ``AutoDelta`` (the default, MAP), :class:`~numpyro_tsvgp.AutoUnconstrainedDelta`
        (MAP on the unconstrained scale), ``AutoNormal``, or any other autoguide class.
      init_loc_fn: where hyperparameters start, as in NumPyro's autoguides: ``init_to_median`` by
        default, ``init_to_value(values={...})`` and the like.
      prefix: the middle part of the names of the guide's parameters, as in NumPyro's autoguides:
        ``"auto"`` gives ``f_auto_linear``.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
      >>> def model(X, y=None):
      ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 20)
      >>> y = jnp.round(3.0 + 2.0 * jnp.sin(6.0 * X))
      >>> guide = AutoDualGaussian(model, inducing=X[::4])
      >>> result = TSVGP(model, guide, optax.adam(0.01)).run(
      ...     jax.random.key(0), 5, X, y, progress_bar=False
      ... )
      >>> guide.marginals(result.params, jnp.array([0.1, 0.5, 0.9]))["f"].mean.shape
      (3,)
      >>> guide.sample_posterior(jax.random.key(1), result.params, X, sample_shape=(7,))["f"].shape
      (7, 20)

    References:
      V. Adam, P. E. Chang, M. E. Khan, A. Solin, *Dual parameterization of sparse variational
      Gaussian processes*, NeurIPS 2021.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        inducing: Any = None,
        *,
        sites: str = "tied",
        markov: bool = False,
        learn_inducing: bool = True,
        hyper_guide: Callable[..., AutoGuide] | None = None,
        init_loc_fn: Callable[..., Any] | None = None,
        prefix: str = "auto",
    ) -> None:
        if sites not in ("tied", "untied"):
            raise ValueError(f'sites must be "tied" or "untied", got {sites!r}.')
        if markov and inducing is not None:
            raise ValueError(
                "markov=True needs no inducing inputs: it keeps a site for each time and is linear "
                "in their number. Leave out inducing, or markov."
            )
        super().__init__(
            model,
            inducing,
            learn_inducing=learn_inducing,
            hyper_guide=hyper_guide,
            init_loc_fn=init_loc_fn,
            prefix=prefix,
        )
        self.sites = sites
        self.markov = markov

    def kind(self, name: str) -> type[Approximation]:
        if self.markov:
            return Markov
        if not self.has_inducing(name):
            return FullPoints
        if self.sites == "untied":
            return Points
        return MovingTied if self.learn_inducing else Tied

    def factorises_rows(self, name: str) -> bool:
        return not self.markov and super().factorises_rows(name)

    def initial(self, name: str, site: GPSite, reading: Reading) -> Approximation:
        process, Z = site.process(), self.inducing_of(name, site, reading)
        if self.markov:
            check_series(name, site)
            return initial_markov(process)
        if Z is None:
            return initial_full_points(process)
        if self.sites == "untied":
            return initial_points(process, Z)
        return initial_tied(process, Z, site.mean_at(Z), moving=self.learn_inducing)

    @property
    def approximates_prior(self) -> bool:
        return self.markov

    def doubt(self, name: str, process: Process, approximation: Any) -> str | None:
        if not self.markov:
            return doubt_jitter(name, process, approximation)
        return doubt_curvature(name, approximation) or doubt_form(name, process, approximation)

    def refuses(self, name: str, site: GPSite, reading: Reading) -> str | None:
        if self.markov:
            check_series(name, site)
        batches = {
            len(plate["value"])
            for plate in reading.plates.values()
            if plate["args"][0] != len(plate["value"])
        }
        if self.kind(name).keeps_sums or site.rows not in batches:
            return None
        why = 'sites="untied"' if self.has_inducing(name) else "inducing=None"
        why = "markov=True" if self.markov else why
        return (
            f"GP site '{name}' is given a minibatch of {site.rows} rows, but {why} keeps a "
            "site for each data point and needs all inputs in each step. Give the guide "
            'inducing inputs with sites="tied", or pass all rows of X to the GP and '
            "subsample its value: f[idx]."
        )
