"""QSVGP and its guide: the mean-covariance parameterization behind the same interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoGuide

from numpyro_tsvgp import posterior
from numpyro_tsvgp.bound import EStep
from numpyro_tsvgp.expectations import Rule
from numpyro_tsvgp.extract import GPSite
from numpyro_tsvgp.guide import AutoDualGaussian, Params
from numpyro_tsvgp.moments import Moments, WhitenedMoments
from numpyro_tsvgp.posterior import Fitted
from numpyro_tsvgp.svi import TSVGP, Rate

__all__ = ["QSVGP", "AutoMomentGaussian"]


class AutoMomentGaussian(AutoDualGaussian):
    r"""A Gaussian guide over GP sites, by the mean and covariance of the inducing values.

    For each GP site with inducing inputs Z the guide is

    .. math::
      q(f) = \int p(f \mid u) \, q(u) \, \mathrm{d}u, \qquad q(u) = \mathcal{N}(m, A A^\top),

    or, whitened, :math:`u = L v` with :math:`q(v) = \mathcal{N}(m, A A^\top)` and L the Cholesky
    factor of the prior covariance. It is the same family as that of
    :class:`~numpyro_tsvgp.AutoDualGaussian`, and everything that works with a fit of the one works
    with a fit of the other. What differs is what stays when hyperparameters move: here
    :math:`q(u)` or :math:`q(v)`, there what the data say.

    Args:
      model: a NumPyro model with one or more :class:`~numpyro_tsvgp.GP` sites.
      inducing: inducing inputs of shape ``(m, d)``, a dict from GP site to such an array, or
        None to use all training inputs.
      whiten: whether the moments are those of the whitened inducing values v. It matters for
        the M-step alone.
      learn_inducing: whether the M-step moves the inducing inputs.
      hyper_guide: the guide of hyperparameters that the model samples, as for
        :class:`~numpyro_tsvgp.AutoDualGaussian`.
      prefix: what the names of the guide's parameters have in the middle, as in NumPyro.

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

    keeps_sites = False

    def __init__(
        self,
        model: Callable[..., Any],
        inducing: Any = None,
        *,
        whiten: bool = True,
        learn_inducing: bool = True,
        hyper_guide: Callable[..., AutoGuide] | None = None,
        prefix: str = "auto",
    ) -> None:
        super().__init__(
            model, inducing, learn_inducing=learn_inducing, hyper_guide=hyper_guide, prefix=prefix
        )
        self.whiten = whiten

    def initial_parameters(self, name: str, site: GPSite) -> dict[str, Array]:
        """Parameters of one GP site before any data: q is the prior."""
        given = self._inducing[name]
        Z = self.structure.gps[name].gp.X if given is None else given
        shape = (site.latents, Z.shape[0], Z.shape[0])
        factor = jnp.eye(Z.shape[0], dtype=site.gp.loc.dtype)
        zero = jnp.zeros(shape[:-1], factor.dtype)
        if not self.whiten:
            factor = posterior.prior(site, Fitted(Z, Moments(zero, factor), None)).chol
        return {
            self._name(name, "inducing"): jnp.copy(Z),  # a state may be donated
            self._name(name, "loc"): zero,
            self._name(name, "scale_tril"): jnp.broadcast_to(factor, shape),
        }

    def declare(self, gps: Mapping[str, GPSite]) -> dict[str, Any]:
        out = {}
        for name, site in gps.items():
            for key, value in self.initial_parameters(name, site).items():
                triangular = key == self._name(name, "scale_tril")
                kind = constraints.softplus_lower_cholesky if triangular else constraints.real
                out[key] = numpyro.param(key, value, constraint=kind)
        return out

    def is_moment(self, key: str) -> bool:
        """Whether a parameter is a mean or the factor of a covariance of this guide."""
        fields = ("loc", "scale_tril")
        return any(key == self._name(n, what) for n in self.structure.gps for what in fields)

    def is_fixed(self, key: str) -> bool:
        return self.is_moment(key) or super().is_fixed(key)

    def unpack(self, name: str, params: Params) -> Fitted:
        kind = WhitenedMoments if self.whiten else Moments
        loc, factor = (params[self._name(name, what)] for what in ("loc", "scale_tril"))
        return Fitted(params[self._name(name, "inducing")], kind(loc, factor), None)


class QSVGP(TSVGP):
    r"""SVGP in the mean-covariance parameterization, with the interface of TSVGP.

    One update is one iteration of variational EM. With natural gradients the E-step moves the
    natural parameters :math:`\theta` of q along the gradient of the bound in its expectation
    parameters :math:`\eta`, ``e_steps`` times,

    .. math:: \theta \leftarrow \theta + \rho \, \frac{\partial \mathcal{L}}{\partial \eta},

    and the M-step takes ``m_steps`` optimizer steps on minus the bound plus minus the log prior of
    the hyperparameters, with q(u), or q(v) if the guide is whitened, held. At the same
    hyperparameters the E-step is that of :class:`~numpyro_tsvgp.TSVGP`; the M-step is not.
    Without natural gradients there is no E-step: the optimizer moves the mean and the factor of
    the covariance together with everything else.

    Args:
      model: a NumPyro model with GP sites.
      guide: an :class:`~numpyro_tsvgp.AutoMomentGaussian` made for this model.
      optim: a ``numpyro.optim`` optimizer or an optax transformation, or None to hold
        hyperparameters and inducing inputs.
      natural_gradients: whether q is moved by natural gradients rather than by the optimizer.
      site_lr: the rate :math:`\rho` in (0, 1] of natural-gradient steps; see
        :class:`~numpyro_tsvgp.TSVGP`, also for the arguments that follow.
      e_steps: natural-gradient steps in one iteration, all on the same batch.
      m_steps: optimizer steps in one iteration.
      quadrature: the quadrature rule.
      curvature: what to do with negative curvature, ``"clip"`` or ``"riemannian"``.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
      >>> from numpyro_tsvgp import GP, QSVGP, AutoMomentGaussian, kernels
      >>> def model(X, y=None):
      ...     scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
      ...     f = numpyro.sample("f", GP(kernels.Matern52(scale), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
      >>> X = jnp.linspace(-1.0, 1.0, 40)
      >>> y = (jnp.sin(6.0 * X) > 0).astype(float)
      >>> guide = AutoMomentGaussian(model, inducing=jnp.linspace(-1.0, 1.0, 8))
      >>> svi = QSVGP(model, guide, optax.adam(0.1), natural_gradients=False)
      >>> result = svi.run(jax.random.key(0), 50, X, y, progress_bar=False)
      >>> bool(result.losses[-1] < result.losses[0])
      True

    References:
      H. Salimbeni, S. Eleftheriadis, J. Hensman, *Natural gradients in practice: non-conjugate
      variational inference in Gaussian process models*, AISTATS 2018.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoMomentGaussian,
        optim: Any,
        *,
        natural_gradients: bool = True,
        site_lr: Rate = None,
        e_steps: int = 1,
        m_steps: int = 1,
        quadrature: int | Rule | None = None,
        curvature: str = "clip",
    ) -> None:
        if optim is None and not natural_gradients:
            raise ValueError(
                "With natural_gradients=False the optimizer moves q, so optim must not be None."
            )
        self.natural_gradients = natural_gradients
        super().__init__(
            model,
            guide,
            optim,
            site_lr=site_lr,
            e_steps=e_steps,
            m_steps=m_steps,
            quadrature=quadrature,
            curvature=curvature,
        )

    @staticmethod
    def _check_guide(guide: Any) -> None:
        if not isinstance(guide, AutoMomentGaussian):
            raise TypeError(
                f"QSVGP needs an AutoMomentGaussian guide, got {type(guide).__name__}. Fit an "
                "AutoDualGaussian with TSVGP, and other guides with numpyro.infer.SVI."
            )

    def _is_fixed(self, key: str) -> bool:
        assert isinstance(self.guide, AutoMomentGaussian)
        if not self.natural_gradients and self.guide.is_moment(key):
            return False
        return super()._is_fixed(key)

    def _e_step_at(self, rate: Any) -> EStep | None:
        return super()._e_step_at(rate) if self.natural_gradients else None
