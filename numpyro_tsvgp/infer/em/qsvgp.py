"""QSVGP: the mean-covariance parameterization behind the same interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro_tsvgp.gaussian.quadrature import Quadrature
from numpyro_tsvgp.infer.em.driver import Driver, Rate
from numpyro_tsvgp.infer.guides.moment import AutoMomentGaussian
from numpyro_tsvgp.infer.steps.objective import Objective
from numpyro_tsvgp.infer.steps.rules import SiteRule

__all__ = ["QSVGP"]


class QSVGP(Driver):
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
      loss: nothing, or ``Trace_ELBO()``, as for :class:`~numpyro_tsvgp.TSVGP`.
      natural_gradients: whether q is moved by natural gradients rather than by the optimizer.
      site_lr: the rate :math:`\rho` in (0, 1] of natural-gradient steps; see
        :class:`~numpyro_tsvgp.TSVGP`, also for the arguments that follow.
      e_steps: natural-gradient steps in one iteration, all on the same batch.
      m_steps: optimizer steps in one iteration.
      quadrature: the quadrature rule.
      rule: the site rule.
      objective: what the M-step improves.
      **static_kwargs: keyword arguments of the model that are the same in every call.

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
        loss: Any = None,
        *,
        natural_gradients: bool = True,
        site_lr: Rate = None,
        e_steps: int = 1,
        m_steps: int = 1,
        quadrature: int | Quadrature | None = None,
        rule: SiteRule | None = None,
        objective: Objective | None = None,
        **static_kwargs: Any,
    ) -> None:
        if not isinstance(guide, AutoMomentGaussian):
            raise TypeError(
                f"QSVGP needs an AutoMomentGaussian guide, got {type(guide).__name__}. Fit an "
                "AutoDualGaussian with TSVGP, and other guides with numpyro.infer.SVI."
            )
        if optim is None and not natural_gradients:
            raise ValueError(
                "With natural_gradients=False the optimizer moves q, so optim must not be None."
            )
        super().__init__(
            model,
            guide,
            optim,
            site_lr=site_lr,
            e_steps=e_steps if natural_gradients else 0,
            m_steps=m_steps,
            quadrature=quadrature,
            rule=rule,
            objective=objective,
            loss=loss,
            static_kwargs=static_kwargs,
        )
        self.natural_gradients = natural_gradients

    def owns(self, name: str, field: str) -> bool:
        moment = field in ("loc", "scale_tril") and not self.natural_gradients
        return moment or super().owns(name, field)
