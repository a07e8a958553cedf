"""TSVGP: NumPyro's SVI interface with t-SVGP's steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.infer import Trace_ELBO
from numpyro.infer.util import transform_fn
from numpyro.optim import _NumPyroOptim

from numpyro_tsvgp import posterior
from numpyro_tsvgp.bound import EStep, collapsed_model, update_sites
from numpyro_tsvgp.expectations import GaussHermite, Rule
from numpyro_tsvgp.extract import read
from numpyro_tsvgp.failures import check_priors, check_rate, diagnose
from numpyro_tsvgp.guide import AutoDualGaussian
from numpyro_tsvgp.linalg import blas_threads
from numpyro_tsvgp.loop import TSVGPRunResult, TSVGPState, all_finite, run_steps
from numpyro_tsvgp.optim import Optax, as_optimizer, evaluates_once
from numpyro_tsvgp.start import overshoots, settle

__all__ = ["TSVGP"]

Rate = float | Callable[[Array], Any] | None


class TSVGP:
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
      site_lr: the rate r in (0, 1], a number or a schedule (a function of the step). None means
        ``0.5 * sqrt(|M| / N)``: 0.5 for full batches, less for minibatches. A Gaussian likelihood
        is exact after one full-batch step of rate 1.
      e_steps: site updates in one iteration, all on the same batch.
      m_steps: optimizer steps in one iteration.
      quadrature: None for the default (Gauss-Hermite with 20 nodes for one or two latent
        functions in a term, 10 for three, quasi-Monte Carlo for more), a number of
        Gauss-Hermite nodes, or a rule such as
        :class:`~numpyro_tsvgp.expectations.QuasiMonteCarlo`.
      curvature: what to do with negative curvature, which likelihoods that are not log-concave
        (Student-t, heteroscedastic, mixtures) ask for. ``"clip"`` counts it as zero. The
        alternative ``"riemannian"`` keeps it and corrects the step so that the posterior
        precision stays positive definite; it needs tied sites.

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
        *,
        site_lr: Rate = None,
        e_steps: int = 1,
        m_steps: int = 1,
        quadrature: int | Rule | None = None,
        curvature: str = "clip",
    ) -> None:
        self._check_guide(guide)
        if guide.model is not model:
            raise ValueError("The guide was made for another model; pass the same model to both.")
        if e_steps < 1 or m_steps < 1:
            raise ValueError(
                f"e_steps and m_steps must be at least 1, got {e_steps} and {m_steps}. To hold "
                "hyperparameters and update sites alone, pass optim=None."
            )
        if not callable(site_lr) and site_lr is not None and not 0 < site_lr <= 1:
            raise ValueError(f"site_lr must lie in (0, 1], got {site_lr}.")
        if curvature not in ("clip", "riemannian"):
            raise ValueError(f'curvature must be "clip" or "riemannian", got {curvature!r}.')
        if curvature == "riemannian" and (guide.sites != "tied" or guide.inducing is None):
            raise ValueError('curvature="riemannian" needs inducing inputs and sites="tied".')
        self.model = model
        self.guide = guide
        self.curvature = curvature
        self.optim: _NumPyroOptim | None = as_optimizer(optim)
        self.site_lr = site_lr
        self.e_steps = e_steps
        self.m_steps = m_steps
        self.quadrature: Rule | None = (
            GaussHermite(quadrature) if isinstance(quadrature, int) else quadrature
        )
        self._transforms: dict[str, Any] | None = None

    @staticmethod
    def _check_guide(guide: Any) -> None:
        if not isinstance(guide, AutoDualGaussian):
            raise TypeError(
                f"TSVGP needs an AutoDualGaussian guide, got {type(guide).__name__}. For other "
                "guides use numpyro.infer.SVI."
            )
        if not guide.keeps_sites:
            raise TypeError(
                f"TSVGP needs a guide that keeps sites, such as AutoDualGaussian, got "
                f"{type(guide).__name__}, which keeps moments. Fit that with QSVGP."
            )

    # ---- state -------------------------------------------------------------------------------

    def _initial_params(
        self, rng_key: Array, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Initial parameters of model and guide, constrained; records their transforms."""
        structure = self.guide._setup(rng_key, args, kwargs)
        point = [name for name in structure.gps if self.guide._has_point_sites(name)]
        if self.curvature == "riemannian" and point:
            raise ValueError(
                f'curvature="riemannian" needs inducing inputs for every GP site, but {point} '
                'have none. Give them some, or use curvature="clip".'
            )
        with handlers.block(), handlers.trace() as trace, handlers.seed(rng_seed=rng_key):
            hyper = self.guide.hyper_guide
            values = {} if hyper is None else hyper(*args, **kwargs)
            reading = read(
                self.model,
                args,
                kwargs,
                values=values,
                expose=lambda site: site["type"] == "param",
                draw=False,
            )
            self.guide.declare(reading.gps)
        params, self._transforms = {}, {}
        for name, site in trace.items():
            if site["type"] == "param":
                constraint = site["kwargs"].get("constraint", constraints.real)
                params[name] = site["value"]
                self._transforms[name] = biject_to(constraint)
        return params

    def _ensure_setup(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._transforms is None:  # a fresh object that goes on from someone's state
            self._initial_params(jax.random.key(0), args, kwargs)

    def init(
        self,
        rng_key: Array,
        *args: Any,
        init_params: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> TSVGPState:
        """The initial state; checks the model on the way.

        Args:
          rng_key: random key.
          *args: arguments of the model.
          init_params: initial values by parameter name, instead of the model's and guide's own.
          **kwargs: keyword arguments of the model.

        Returns:
          The state before the first update.
        """
        rng_key, key = jax.random.split(rng_key)
        params = self._initial_params(key, args, kwargs)
        unknown = set(init_params or {}) - set(params)
        if unknown:
            raise ValueError(
                f"init_params has {sorted(unknown)}, which are not parameters. The parameters "
                f"are {sorted(params)}."
            )
        params |= {
            k: jnp.asarray(v, jnp.result_type(params[k])) for k, v in (init_params or {}).items()
        }
        fixed = {k: v for k, v in params.items() if self._is_fixed(k)}
        free = {k: v for k, v in params.items() if k not in fixed}
        free = transform_fn(self._transforms, free, invert=True)
        # Weak types would make the second update compile anew.
        fixed, free = jax.tree.map(
            lambda x: lax.convert_element_type(x, jnp.result_type(x)), (fixed, free)
        )
        optim_state = free if self.optim is None else self.optim.init(free)
        counts = [jnp.zeros((), int) for _ in range(3)]  # three buffers: a state may be donated
        state = TSVGPState(optim_state, fixed, rng_key, *counts)
        check_rate(self, state, 1)
        check_priors(self, state, args, kwargs)
        return state

    def _is_fixed(self, key: str) -> bool:
        """Whether a parameter is not one of the optimizer's."""
        return self.guide.is_fixed(key)

    def _free(self, optim_state: Any) -> dict[str, Any]:
        return optim_state if self.optim is None else self.optim.get_params(optim_state)

    def _constrain(self, free: dict[str, Any]) -> dict[str, Any]:
        return transform_fn(self._transforms, free)

    def get_params(self, svi_state: TSVGPState) -> dict[str, Any]:
        """Parameters of the model and the guide in a state, constrained.

        Args:
          svi_state: a state.

        Returns:
          A dict from parameter name to value.
        """
        if self._transforms is None:
            raise RuntimeError(
                "This TSVGP has not seen its model yet. Call init, update or run with the "
                "model's arguments first."
            )
        return {**self._constrain(self._free(svi_state.optim_state)), **svi_state.sites}

    # ---- steps -------------------------------------------------------------------------------

    def _rate(self, step: Array) -> Any:
        if self.site_lr is None:
            return 0.5 / np.sqrt(self.guide.structure.subsampling)
        return self.site_lr(step) if callable(self.site_lr) else self.site_lr

    def _e_step_at(self, rate: Any) -> EStep | None:
        """The E-step of one iteration; None if the optimizer does everything."""
        return EStep(rate, self.e_steps, self.curvature)

    def _e_step(
        self, key: Array, params: dict[str, Any], rate: Any, args: Any, kwargs: Any
    ) -> tuple[dict[str, Array], dict[str, Array], Array]:
        """New site parameters, the subsample indices they were made on, and a count of floors."""
        e_step = self._e_step_at(rate)
        if e_step is None:
            return {}, {}, jnp.zeros((), int)
        key_hyper, key_model, key_rule = jax.random.split(key, 3)
        hyper = self.guide.sample_hyperparameters(key_hyper, params, args, kwargs)
        reading = read(self.model, args, kwargs, values={**params, **hyper}, key=key_model)
        sites, floored = update_sites(
            self.guide,
            reading,
            params,
            args,
            kwargs,
            e_step,
            rule=self.quadrature,
            key=key_rule,
        )
        plates = {k: s["value"] for k, s in reading.trace.items() if s["type"] == "plate"}
        return sites, plates, floored

    def _loss(
        self,
        key: Array,
        free: dict[str, Any],
        fixed: dict[str, Array],
        plates: dict[str, Array],
        args: Any,
        kwargs: Any,
        **options: Any,
    ) -> Array:
        """Minus the bound, minus the log prior of the hyperparameters plus their entropy."""
        _, _, key_rule = jax.random.split(key, 3)
        model = collapsed_model(self.guide, self.quadrature, key_rule, held=True, **options)
        if plates:
            model = handlers.substitute(model, data=plates)
        hyper_guide = self.guide.hyper_guide or _no_guide
        params = {**self._constrain(free), **fixed}
        return Trace_ELBO().loss(key, params, model, hyper_guide, *args, **kwargs)

    def update(self, svi_state: TSVGPState, *args: Any, **kwargs: Any) -> tuple[TSVGPState, Array]:
        """One EM iteration: ``e_steps`` site updates, then ``m_steps`` optimizer steps.

        Args:
          svi_state: the current state.
          *args: arguments of the model; they may change from one update to the next.
          **kwargs: keyword arguments of the model.

        Returns:
          The new state and the loss, that of the last M-step.
        """
        self._ensure_setup(args, kwargs)
        rng_key, key = jax.random.split(svi_state.rng_key)
        params = self.get_params(svi_state)
        rate = self._rate(svi_state.step)
        optim, optim_state = self.optim, svi_state.optim_state
        one_step = self.m_steps == 1 and bool(jax.tree.leaves(self._free(optim_state)))
        if optim is not None and one_step and evaluates_once(optim, optim_state):
            # One evaluation does both steps: they share all that depends on hyperparameters.
            def both(free: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
                found: dict[str, Any] = {"sites": {}, "floored": 0}
                e_step = self._e_step_at(rate)
                old = svi_state.sites
                loss = self._loss(key, free, old, {}, args, kwargs, e_step=e_step, found=found)
                return loss, found

            (loss, found), optim_state = optim.eval_and_update(both, optim_state)
            fixed, floored = {**svi_state.sites, **found["sites"]}, found["floored"]
        else:
            sites, plates, floored = self._e_step(key, params, rate, args, kwargs)
            fixed = {**svi_state.sites, **sites}
            optim_state, loss = self._m_steps(key, optim_state, fixed, plates, args, kwargs)
        state = svi_state._replace(
            optim_state=optim_state,
            sites=fixed,
            rng_key=rng_key,
            step=svi_state.step + 1,
            floored=svi_state.floored + floored,
        )
        return state, loss

    def _m_steps(
        self,
        key: Array,
        optim_state: Any,
        fixed: dict[str, Array],
        plates: dict[str, Array],
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, Array]:
        """The optimizer's state after the M-steps, and the last loss."""

        def loss_fn(free: dict[str, Any], **options: Any) -> tuple[Array, None]:
            return self._loss(key, free, fixed, plates, args, kwargs, **options), None

        optim = self.optim
        if optim is None or not jax.tree.leaves(self._free(optim_state)):
            return optim_state, loss_fn(self._free(optim_state))[0]
        gradient_is_enough = isinstance(optim, Optax) and optim.gradient_is_enough(optim_state)

        def m_step(carry: Any, i: Any) -> tuple[Any, Array]:
            wanted = i == self.m_steps - 1 if gradient_is_enough else None
            (loss, _), new = optim.eval_and_update(partial(loss_fn, wanted=wanted), carry)
            return new, loss

        if hasattr(optim, "restart"):  # curvature of the last M-step's objective is stale
            optim_state = optim.restart(optim_state)
        if self.m_steps == 1:
            return m_step(optim_state, 0)
        optim_state, losses = lax.scan(m_step, optim_state, jnp.arange(self.m_steps))
        return optim_state, losses[-1]

    def _settled(self, state: TSVGPState, args: Any, kwargs: Any) -> TSVGPState:
        """The state with sites that suit its hyperparameters, reached without overshooting."""
        free, params = self._free(state.optim_state), self.get_params(state)

        @jax.jit
        def attempt(sites: dict[str, Array], rate: Any, args: Any, kwargs: Any) -> Any:
            key = state.rng_key
            new, plates, _ = self._e_step(key, {**params, **sites}, rate, args, kwargs)
            new = {**sites, **new}
            return new, self._loss(key, free, new, plates, args, kwargs)

        rate = float(self._rate(state.step))
        return state._replace(
            sites=settle(lambda sites, r: attempt(sites, r, args, kwargs), state.sites, rate)
        )

    def _usable(self, state: TSVGPState, args: Any, kwargs: Any) -> Array:
        """Whether a state is finite and what it asks for can be factorised, so that one can go on.

        The loss of an update does not tell: it is that before the optimizer moved.
        """
        params = self.get_params(state)
        factors: list[Any] = []
        for name, site in self.guide.read(params, args, kwargs).gps.items():
            fitted = self.guide.unpack(name, params)
            prior = posterior.prior(site, fitted)
            factors.append(prior)
            if self.curvature == "riemannian":  # clipped curvature is positive under any prior
                factors.append(posterior.inducing_values(site, fitted, prior))
        return all_finite((state.optim_state, params, factors))

    def stable_update(
        self, svi_state: TSVGPState, *args: Any, **kwargs: Any
    ) -> tuple[TSVGPState, Array]:
        """Like :meth:`update`, but a step that is not finite leaves everything as it was.

        A step is also rejected if the prior covariance has no Cholesky factor at the
        hyperparameters that it leads to.
        The sites, the hyperparameters and the optimizer's state of a rejected step are all
        discarded; only the random key and the step count go on. The loss is then NaN.

        Args:
          svi_state: the current state.
          *args: arguments of the model.
          **kwargs: keyword arguments of the model.

        Returns:
          The new or the old state, and the loss.
        """
        new, loss = self.update(svi_state, *args, **kwargs)
        ok = jnp.isfinite(loss) & self._usable(new, args, kwargs)
        optim_state, sites = jax.tree.map(
            lambda a, b: jnp.where(ok, a, b),
            (new.optim_state, new.sites),
            (svi_state.optim_state, svi_state.sites),
        )
        rejected = svi_state.rejected + ~ok
        state = new._replace(optim_state=optim_state, sites=sites, rejected=rejected)
        return state, jnp.where(ok, loss, jnp.nan)

    def evaluate(self, svi_state: TSVGPState, *args: Any, **kwargs: Any) -> Array:
        """The loss of a state, minus the bound minus the log prior, without a step.

        Args:
          svi_state: a state.
          *args: arguments of the model.
          **kwargs: keyword arguments of the model.

        Returns:
          The loss, a scalar.
        """
        self._ensure_setup(args, kwargs)
        _, key = jax.random.split(svi_state.rng_key)
        free = self._free(svi_state.optim_state)
        return self._loss(key, free, svi_state.sites, {}, args, kwargs)

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        stable_update: bool = False,
        init_state: TSVGPState | None = None,
        init_params: Mapping[str, Any] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        **kwargs: Any,
    ) -> TSVGPRunResult:
        """Runs ``num_steps`` updates with a progress bar.

        An interrupt (Ctrl-C) ends the run and returns what is fitted so far, with a warning. Where
        the first E-step would overshoot, sites are first brought near their optimum at the
        initial hyperparameters, by shorter steps.

        Args:
          rng_key: random key of the initial state.
          num_steps: number of updates.
          *args: arguments of the model.
          progress_bar: whether to show a progress bar; the numbers are the same without.
          stable_update: whether to use :meth:`stable_update`.
          init_state: a state to go on from, of this or another object for the same model.
          init_params: initial values by parameter name.
          checkpoint: a file that the fit is saved to on the way. If it exists, the run goes on
            from it, up to ``num_steps`` in all, as if it had never stopped.
          checkpoint_every: number of updates between saves; a twentieth of the run by default.
          **kwargs: keyword arguments of the model.

        Returns:
          The fitted parameters, the last state, and the loss of every step.

        Raises:
          FitError: if the fit cannot go on: its state is no longer finite, or the last 20 updates
            were all rejected. It says why, and holds the last good result.
        """
        if num_steps < 1:
            raise ValueError("num_steps must be a positive integer.")
        if init_state is None:
            state = self.init(rng_key, *args, init_params=init_params, **kwargs)
        else:
            self._ensure_setup(args, kwargs)
            state = init_state
        check_rate(self, state, num_steps)
        # NumPy arrays would be copied to the device anew in each step.
        args, kwargs = jax.tree.map(
            lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (args, kwargs)
        )
        method = self.stable_update if stable_update else self.update
        step = jax.jit(lambda state, args, kwargs: method(state, *args, **kwargs))
        usable = jax.jit(self._usable)
        params = self.get_params(state)
        gps = self.guide.structure.gps
        largest = max(self.guide.unpack(name, params).inducing.shape[0] for name in gps)
        with blas_threads(largest):
            if init_state is None and overshoots(
                step(state, args, kwargs)[1], self.guide.structure
            ):
                state = self._settled(state, args, kwargs)
            return run_steps(
                lambda state: step(state, args, kwargs),
                state,
                num_steps,
                get_params=self.get_params,
                usable=lambda state: bool(usable(state, args, kwargs)),
                diagnose=lambda state: diagnose(self, state, args, kwargs),
                progress_bar=progress_bar,
                checkpoint=checkpoint,
                checkpoint_every=checkpoint_every,
            )


def _no_guide(*args: Any, **kwargs: Any) -> None:
    """The guide of a model without sampled hyperparameters."""
