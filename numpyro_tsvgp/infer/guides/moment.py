"""AutoMomentGaussian: a NumPyro autoguide whose parameters are means and covariances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoGuide

from numpyro_tsvgp.gaussian.approximation import Approximation
from numpyro_tsvgp.gaussian.moments import Moments, WhitenedMoments
from numpyro_tsvgp.infer.guides.guide import GPGuide
from numpyro_tsvgp.model.read import GPSite, Reading

__all__ = ["AutoMomentGaussian"]


class AutoMomentGaussian(GPGuide):
    r"""A Gaussian guide over GP sites, by the mean and covariance of the inducing values.

    For each GP site with inducing inputs Z the guide is

    .. math::
      q(f) = \int p(f \mid u) \, q(u) \, \mathrm{d}u, \qquad q(u) = \mathcal{N}(m, A A^\top),

    or, whitened, :math:`u = L v` with :math:`q(v) = \mathcal{N}(m, A A^\top)` and L the Cholesky
    factor of the prior covariance. It is the same family as that of
    :class:`~numpyro_tsvgp.AutoDualGaussian`, and everything that works with a fit of the one works
    with a fit of the other. What differs is what is held when hyperparameters move: here
    :math:`q(u)` or :math:`q(v)`, there the sites of the data.

    Args:
      model: a NumPyro model with one or more :class:`~numpyro_tsvgp.GP` sites.
      inducing: inducing inputs of shape ``(m, d)``, a dict from GP site to such an array, or
        None to use all training inputs.
      whiten: whether the moments are those of the whitened inducing values v. It matters for
        the M-step alone.
      learn_inducing: whether the M-step moves the inducing inputs.
      hyper_guide: the guide of hyperparameters that the model samples, as for
        :class:`~numpyro_tsvgp.AutoDualGaussian`.
      init_loc_fn: where hyperparameters start, as in NumPyro's autoguides: ``init_to_median`` by
        default, ``init_to_value(values={...})`` and the like.
      prefix: the middle part of the names of the guide's parameters, as in NumPyro's autoguides.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
      >>> from numpyro_tsvgp import GP, QSVGP, AutoMomentGaussian, kernels
      >>> def model(X, y=None):
      ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 20)
      >>> y = jnp.round(3.0 + 2.0 * jnp.sin(6.0 * X))
      >>> guide = AutoMomentGaussian(model, inducing=X[::4])
      >>> result = QSVGP(model, guide, optax.adam(0.01)).run(
      ...     jax.random.key(0), 5, X, y, progress_bar=False
      ... )
      >>> result.params["f_auto_scale_tril"].shape
      (1, 5, 5)

    References:
      J. Hensman, A. Matthews, Z. Ghahramani, *Scalable variational Gaussian process
      classification*, AISTATS 2015.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        inducing: Any = None,
        *,
        whiten: bool = True,
        learn_inducing: bool = True,
        hyper_guide: Callable[..., AutoGuide] | None = None,
        init_loc_fn: Callable[..., Any] | None = None,
        prefix: str = "auto",
    ) -> None:
        super().__init__(
            model,
            inducing,
            learn_inducing=learn_inducing,
            hyper_guide=hyper_guide,
            init_loc_fn=init_loc_fn,
            prefix=prefix,
        )
        self.whiten = whiten

    def kind(self, name: str) -> type[Approximation]:
        return WhitenedMoments if self.whiten else Moments

    def learns(self, name: str, field: str) -> bool:
        return self.has_inducing(name) and super().learns(name, field)

    def initial(self, name: str, site: GPSite, reading: Reading) -> Approximation:
        given = self.inducing_of(name, site, reading)
        Z = site.gp.X if given is None else given
        return (WhitenedMoments if self.whiten else Moments).initial(site.process(), Z)

    def constraint(self, field: str) -> Any:
        triangular = field == "scale_tril"
        return constraints.softplus_lower_cholesky if triangular else constraints.real
