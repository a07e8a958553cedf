"""A fit as one value, and what can be asked of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax import Array

from numpyro_tsvgp.infer.fitted import Fitted
from numpyro_tsvgp.infer.guides import prediction
from numpyro_tsvgp.model.arguments import Call

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.audit import Audit
    from numpyro_tsvgp.infer.new_data.fantasy import Fantasies
    from numpyro_tsvgp.infer.predictions.functions import FunctionDraws
    from numpyro_tsvgp.infer.predictions.predictive import Predictions
    from numpyro_tsvgp.infer.predictions.predictor import Predictor

__all__ = ["Fit", "check_fit"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "call", "memory"],
    meta_fields=["model", "guide", "structure", "rule", "quadrature", "objective"],
)
@dataclass(frozen=True)
class Fit(Fitted):
    """A fitted model: everything that predictions, diagnostics and saving need to know.

    ``svi.run(...)`` returns one in its result, and ``svi.fit(state, *args)`` makes one from any
    state. A fit is a value and a pytree: nothing changes it.

    Attributes:
      params: fitted parameters of the model and the guide.
      call: the arguments with the training data, or None where a fit does not have them, because
        it was loaded or is that of a stream.
      model: the NumPyro model.
      guide: the guide.
      structure: what the model is made of on its training data.
      rule: the site rule of the fit.
      quadrature: its quadrature rule, or None for the default.
      objective: what its M-steps improved.
      memory: representative points of a stream, which :class:`~numpyro_tsvgp.Stream` keeps.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
      >>> def model(X, y=None):
      ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 20)
      >>> svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::3]), None, site_lr=1.0)
      >>> fit = svi.run(jax.random.key(0), 1, X, jnp.sin(6.0 * X), progress_bar=False).fit
      >>> fit.marginals(jnp.array([0.2, 0.8]))["f"].mean.shape
      (2,)
      >>> fit.sample(jax.random.key(1), X, sample_shape=(7,))["f"].shape
      (7, 20)
    """

    # ---- predictions -------------------------------------------------------------------------

    def marginals(
        self, *args: Any, num_hyper: int = 16, batches: Any = None, out: Any = None, **kwargs: Any
    ) -> Any:
        """Posterior mean and variance of each GP site.

        Args:
          *args: arguments of the model with the inputs to predict at; those of the training data
            if there are none.
          num_hyper: how many draws of variational hyperparameters the moments average over.
          batches: an iterable of the arguments of batches, in place of ``*args``, for inputs that
            do not fit in memory.
          out: with ``batches``, for each GP site a pair of arrays, such as memory maps, that are
            filled with means and variances.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from GP site to a named tuple ``(mean, variance)``, each of the site's shape. With
          ``batches``, an iterator of such dicts; with ``out``, the number of rows written to it.
        """
        if batches is not None:
            from numpyro_tsvgp.infer.em import passes  # they are made of fits

            parts = passes.marginals_of_batches(self, batches, kwargs, num_hyper)
            return parts if out is None else passes.write_marginals(parts, out)
        call = self.inputs(args, kwargs)
        return prediction.marginals(
            self.guide, self.hyper_guide_at(call), self.params, call, num_hyper
        )

    def sample(
        self, rng_key: Array, *args: Any, sample_shape: tuple[int, ...] = (), **kwargs: Any
    ) -> dict[str, Array]:
        """Joint draws of hyperparameters and GP sites.

        Args:
          rng_key: random key.
          *args: arguments of the model with the inputs to draw at; those of the training data if
            there are none.
          sample_shape: shape of the draws.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from site to draws of shape ``sample_shape + shape of the site``.
        """
        call = self.inputs(args, kwargs)
        hyper_guide = self.hyper_guide_at(call)
        return prediction.sample(
            self.guide, hyper_guide, rng_key, self.params, call, tuple(sample_shape)
        )

    def functions(
        self, rng_key: Array, num: int, *args: Any, features: int = 1024, **kwargs: Any
    ) -> FunctionDraws:
        """Joint draws of hyperparameters and GP sites that are functions.

        Called with arguments of the model, the result gives values as :meth:`sample` does, of the
        same functions at every call, without a factor of the size of the inputs: it is for
        millions of inputs, for derivatives and for optimization in the inputs.

        Args:
          rng_key: random key.
          num: how many draws.
          *args: arguments that the model runs with, such as a few inputs; those of the training
            data if there are none. Nothing of their inputs is kept.
          features: how many random frequencies each stationary term of a kernel gets. The error of
            prior correlations falls faster than their square root; with 1024 it is below 0.01
            (root mean square, every kernel of this library, two columns).
          **kwargs: keyword arguments of the model.

        Returns:
          The draws, a pytree; see
          :class:`~numpyro_tsvgp.infer.predictions.functions.FunctionDraws`.

        Raises:
          ValueError: if a kernel has no random features.

        Examples:
          >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
          >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
          >>> def model(X, y=None):
          ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
          ...     with numpyro.plate("data", X.shape[0]):
          ...         numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
          >>> X = jnp.linspace(0.0, 1.0, 20)
          >>> svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::3]), None, site_lr=1.0)
          >>> fit = svi.run(jax.random.key(0), 1, X, jnp.sin(6.0 * X), progress_bar=False).fit
          >>> draws = fit.functions(jax.random.key(1), 5)
          >>> draws(X)["f"].shape
          (5, 20)
          >>> jax.grad(lambda x: draws["f"](x[None])[0, 0])(0.5).shape
          ()
        """
        from numpyro_tsvgp.infer.predictions.functions import draw_functions  # it is made of fits

        return draw_functions(self, rng_key, num, self.runs_with(args, kwargs), features=features)

    def predictor(self, *args: Any, num_hyper: int = 16, **kwargs: Any) -> Predictor:
        """The fit, ready to predict: what does not depend on new inputs is computed once.

        Args:
          *args: arguments that the model runs with, such as a few inputs; those of the training
            data if there are none. Nothing of their inputs is kept.
          num_hyper: how many draws of variational hyperparameters predictions average over.
          **kwargs: keyword arguments of the model.

        Returns:
          A pytree that is called with arguments of the model, and that :func:`~numpyro_tsvgp.save`
          takes; see :class:`~numpyro_tsvgp.infer.predictions.predictor.Predictor`.
        """
        from numpyro_tsvgp.infer.predictions.predictor import make_predictor  # it is made of fits

        return make_predictor(self, self.runs_with(args, kwargs), num_hyper)

    def predict(self, *args: Any, num_hyper: int = 16, **kwargs: Any) -> Predictions:
        """The predictive distribution of the data, in their own units.

        Args:
          *args: arguments of the model with the inputs to predict at, without the data; those of
            the training data if there are none.
          num_hyper: how many draws of variational hyperparameters predictions average over.
          **kwargs: keyword arguments of the model.

        Returns:
          By observed site, its mean, variance, quantiles, probabilities and log density; see
          :class:`~numpyro_tsvgp.infer.predictions.predictive.Prediction`. Where the model has one
          observed site, ``fit.predict(X_new).mean`` is short for ``fit.predict(X_new)["y"].mean``.

        Raises:
          ValueError: if the model has no site to predict, or one that is not an integral over the
            marginals of its GPs.

        Examples:
          >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
          >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
          >>> def model(X, y=None):
          ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
          ...     with numpyro.plate("data", X.shape[0]):
          ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
          >>> X = jnp.linspace(0.0, 1.0, 20)
          >>> svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::3]), None)
          >>> y = jnp.round(jnp.exp(jnp.sin(6.0 * X)))
          >>> fit = svi.run(jax.random.key(0), 5, X, y, progress_bar=False).fit
          >>> at = fit.predict(jnp.array([0.2, 0.8]))
          >>> at.quantiles([0.05, 0.95]).shape
          (2, 2)
          >>> at.log_prob(jnp.array([3, 0])).shape
          (2,)
        """
        from numpyro_tsvgp.infer.predictions.predictive import predict  # it is made of fits

        return predict(self, self.inputs(args, kwargs), num_hyper)

    def audit(self, rng_key: Array, **options: Any) -> Audit:
        """Checks the fit against draws from its guide through the model's own density.

        Args:
          rng_key: random key.
          **options: see :func:`~numpyro_tsvgp.infer.audit.audit`.

        Returns:
          What was found; print it for a verdict.
        """
        from numpyro_tsvgp.infer.audit import audit  # it is made of fits

        return audit(self, rng_key, **options)

    # ---- new data ----------------------------------------------------------------------------

    def condition(self, *args: Any, **kwargs: Any) -> Fit:
        r"""The fit with more data in it, at the same hyperparameters and without fitting again.

        The sites of the new points are added to those that are there,

        .. math::
          \xi = \xi_{\text{old}} + \sum_{\text{new}} w_i \lambda_i, \qquad
          G = G_{\text{old}} + \sum_{\text{new}} \beta_i w_i w_i^\top,

        and are found by a few site updates of the new points alone, in :math:`O(k m^2 + m^3)` each
        for k new points. For a Gaussian likelihood the result is that of a fit to all data with
        these hyperparameters, in any order and any split. For others the sites of earlier points
        stay where they were, which a fit to all data would move a little. Each new point counts
        once, whatever size a plate of the model has. Variational hyperparameters are held at
        their median, and their distribution stays as it is.

        Programs are compiled once for each power of two of the number of new rows where sites are
        tied; point sites, one for each data point, compile anew as they grow.

        Args:
          *args: arguments of the model with the new data.
          **kwargs: keyword arguments of the model.

        Returns:
          A new fit, whose training data are the old ones followed by the new; this one stays as
          it is.

        Raises:
          ValueError: if the data are not what the model takes.

        Examples:
          >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
          >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
          >>> def model(X, y=None):
          ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
          ...     with numpyro.plate("data", X.shape[0]):
          ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
          >>> X = jnp.linspace(0.0, 1.0, 20)
          >>> guide = AutoDualGaussian(model, inducing=X[::3])
          >>> svi = TSVGP(model, guide, None, e_steps=20)
          >>> fit = svi.run(jax.random.key(0), 1, X, jnp.ones(20), progress_bar=False).fit
          >>> more = fit.condition(jnp.array([0.5, 0.52]), jnp.array([9, 11]))
          >>> more.data.args[0].shape
          (22,)
          >>> there = jnp.array([0.5])
          >>> bool(more.marginals(there)["f"].mean > fit.marginals(there)["f"].mean)
          True

        References:
          P. E. Chang, P. Verma, S. T. John, A. Solin, M. E. Khan, *Memory-based dual Gaussian
          processes for sequential learning*, ICML 2023.
        """
        from numpyro_tsvgp.infer.new_data.conditioning import condition  # it is made of fits

        return condition(self, Call(args, kwargs))

    def without(self, *args: Any, **kwargs: Any) -> Fit:
        """The fit with some of its data taken out, at the same hyperparameters.

        Where sites are tied and the fit has its data, the sites of the remaining points are made
        anew, starting from the posterior that is there, in a few passes over them: the result is
        that of a fit to the remaining data at these hyperparameters, for every likelihood and
        however the fit came about. Point sites are known one by one; those of the points are
        dropped and the others stay, which undoes :meth:`condition`. A fit with tied sites but
        without its data subtracts the sites that the posterior asks for. That is exact for
        a Gaussian likelihood. For others it is right to first order where sites have converged, and
        there is a warning.

        Args:
          *args: arguments of the model with the data to be taken out.
          **kwargs: keyword arguments of the model.

        Returns:
          A new fit, whose training data are the remaining ones; this one stays as it is.

        Raises:
          ValueError: if the fit does not have them. Where it is without its training data, this
            can be seen only if nothing else was observed nearby.
        """
        from numpyro_tsvgp.infer.new_data.removing import without

        return without(self, Call(args, kwargs))

    def fantasies(self, rng_key: Array, *args: Any, num: int = 16, **kwargs: Any) -> Fantasies:
        """Posteriors with drawn outcomes at points that are pending, many side by side.

        The outcomes of all pending points are drawn jointly from the posterior and the
        likelihood, ``num`` times, and each draw is added to the posterior as :meth:`condition`
        would by natural-gradient steps. What depends on the inducing inputs is done once for all
        fantasies. Curvature of the likelihood below zero counts as zero here.

        Args:
          rng_key: random key.
          *args: arguments of the model with the pending inputs; the data are left out.
          num: how many fantasies.
          **kwargs: keyword arguments of the model.

        Returns:
          The fantasies, of which ``.marginals(X_new)`` are mean and variance of shape
          ``(num, ...)`` and ``.values`` the outcomes.

        Examples:
          >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
          >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
          >>> def model(X, y=None):
          ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
          ...     with numpyro.plate("data", X.shape[0]):
          ...         numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
          >>> X = jnp.linspace(0.0, 1.0, 20)
          >>> guide = AutoDualGaussian(model, inducing=X[::3])
          >>> svi = TSVGP(model, guide, None, e_steps=20)
          >>> fit = svi.run(jax.random.key(0), 1, X, (X > 0.4) * 1, progress_bar=False).fit
          >>> imagined = fit.fantasies(jax.random.key(1), jnp.array([0.3, 0.9]), num=8)
          >>> imagined.marginals(X)["f"].mean.shape, imagined.values["y"].shape
          ((8, 20), (8, 2))
        """
        from numpyro_tsvgp.infer.new_data.fantasy import fantasies

        return fantasies(self, rng_key, num, Call(args, kwargs))

    def with_inducing(self, Z: Any) -> Fit:
        r"""The fit with other inducing inputs, more or fewer.

        The sums over sites say something about f at the old inducing inputs, and the new inducing
        values take over as much of it as they can predict: :math:`\xi \leftarrow T^\top \xi` and
        :math:`G \leftarrow T^\top G \, T` with :math:`T = L_0^{-1} K_{Z_0 Z} L^{-\top}`. If all old
        inputs are among the new, nothing is lost. Otherwise, what was known far from all new inputs
        is lost, and the posterior goes back to the prior there. Point sites stay with their data
        points.

        Args:
          Z: inducing inputs of shape ``(m, d)`` for every GP site that has some, or a dict from GP
            site to such an array.

        Returns:
          A new fit; this one stays as it is.

        Raises:
          ValueError: if inputs are not what the GP takes, or a GP has no inducing inputs.
        """
        from numpyro_tsvgp.infer.new_data.moving import with_inducing

        return with_inducing(self, Z)


def check_fit(usage: str, fit: Any) -> None:
    """Whether a function was given a fit.

    Args:
      usage: how it is called, as in ``"loo(result.fit)"``.
      fit: what it was given.

    Raises:
      TypeError: if it is something else.
    """
    if not isinstance(fit, Fit):
        what = usage.partition("(")[0]
        raise TypeError(f"{what} takes a fit, as in {usage}, got {type(fit).__name__}.")
