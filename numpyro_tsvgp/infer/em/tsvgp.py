"""TSVGP: NumPyro's SVI interface with t-SVGP's steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro_tsvgp.gaussian.quadrature import Quadrature
from numpyro_tsvgp.infer.em.driver import Driver, Rate
from numpyro_tsvgp.infer.guides.dual import AutoDualGaussian
from numpyro_tsvgp.infer.guides.guide import GPGuide
from numpyro_tsvgp.infer.guides.moment import AutoMomentGaussian
from numpyro_tsvgp.infer.steps.objective import Objective
from numpyro_tsvgp.infer.steps.rules import SiteRule

__all__ = ["TSVGP"]


class TSVGP(Driver):
    r"""t-SVGP inference behind the interface of :class:`numpyro.infer.SVI`.

    One update is one iteration of variational EM. The E-step blends the sites with those that
    the likelihood asks for at the current posterior, ``e_steps`` times:

    .. math::
      \lambda \leftarrow (1 - r) \, \lambda + r \, \frac{N}{|M|} \sum_{i \in M} \lambda_i.

    It is a natural-gradient step, without differentiating through natural parameters. The M-step
    takes ``m_steps`` optimizer steps on minus the bound plus minus the log prior of the
    hyperparameters, with sites held and the prior in the bound left free.

    Args:
      model: a NumPyro model with GP sites.
      guide: an :class:`~numpyro_tsvgp.AutoDualGaussian` made for this model.
      optim: a ``numpyro.optim`` optimizer or an optax transformation for the hyperparameters and
        inducing inputs (``optax.lbfgs`` starts afresh in each M-step, so give it several
        ``m_steps``), or None to hold them and update sites alone.
      loss: nothing, or ``Trace_ELBO()`` where code written for SVI passes it: the loss is built in.
      site_lr: the rate r in (0, 1], a number or a schedule (a function of the step). None means
        0.5 for full batches and ``0.5 * sqrt(|M| / N) / (1 + epochs / 10)`` for minibatches, where
        epochs count the passes over the data so far. With the default rule a Gaussian likelihood is
        exact after one full-batch step of rate 1. With ``"auto"`` the library chooses it: every
        step is judged by the bound, taken back if it was too long, and the rate follows
        (:class:`~numpyro_tsvgp.infer.steps.adaptive.Adaptive`).
      e_steps: site updates in one iteration, all on the same batch.
      m_steps: optimizer steps in one iteration.
      quadrature: None for the default (Gauss-Hermite with 20 nodes for one or two latent
        functions in a term, 10 for three, quasi-Monte Carlo for more), a number of
        Gauss-Hermite nodes, or a rule such as
        :class:`~numpyro_tsvgp.quadrature.QuasiMonteCarlo`.
      rule: what an E-step makes of the gradients of the likelihood, and what becomes of negative
        curvature, which likelihoods that are not log-concave (Student-t, heteroscedastic, mixtures)
        ask for: :class:`~numpyro_tsvgp.NaturalGradient` (the default) counts it as zero,
        :class:`~numpyro_tsvgp.Riemannian` keeps it.
        :class:`~numpyro_tsvgp.ExpectationPropagation` matches moments in place of the bound.
      objective: what the M-step improves: the bound by default, :class:`~numpyro_tsvgp.EPLike` or
        :class:`~numpyro_tsvgp.TighterBound`.
      **static_kwargs: keyword arguments of the model that are the same in every call, as in SVI.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
      >>> def model(X, y=None):
      ...     variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
      ...     scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
      ...     f = numpyro.sample("f", GP(variance * kernels.Matern52(scale), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
      >>> X = jnp.linspace(-1.0, 1.0, 40)
      >>> y = (jnp.sin(6.0 * X) > 0).astype(float)
      >>> guide = AutoDualGaussian(model, inducing=jnp.linspace(-1.0, 1.0, 8))
      >>> svi = TSVGP(model, guide, optax.adam(0.1))
      >>> result = svi.run(jax.random.key(0), 50, X, y, progress_bar=False)
      >>> bool(result.losses[-1] < result.losses[0])
      True
      >>> sorted(k for k in result.params if not k.startswith("f_auto"))
      ['scale', 'variance_auto_loc']

    References:
      V. Adam, P. E. Chang, M. E. Khan, A. Solin, *Dual parameterization of sparse variational
      Gaussian processes*, NeurIPS 2021.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoDualGaussian,
        optim: Any,
        loss: Any = None,
        *,
        site_lr: Rate = None,
        e_steps: int = 1,
        m_steps: int = 1,
        quadrature: int | Quadrature | None = None,
        rule: SiteRule | None = None,
        objective: Objective | None = None,
        **static_kwargs: Any,
    ) -> None:
        if not isinstance(guide, GPGuide):
            raise TypeError(
                f"TSVGP needs an AutoDualGaussian guide, got {type(guide).__name__}. For other "
                "guides use numpyro.infer.SVI."
            )
        if isinstance(guide, AutoMomentGaussian):
            raise TypeError(
                "TSVGP needs a guide that keeps sites, such as AutoDualGaussian, got "
                f"{type(guide).__name__}, which keeps moments. Fit that with QSVGP."
            )
        super().__init__(
            model,
            guide,
            optim,
            site_lr=site_lr,
            e_steps=e_steps,
            m_steps=m_steps,
            quadrature=quadrature,
            rule=rule,
            objective=objective,
            loss=loss,
            static_kwargs=static_kwargs,
        )
