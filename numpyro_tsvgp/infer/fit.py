"""A fit as one value: the model, how it was fitted, what was found, and the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax import Array

from numpyro_tsvgp.gaussian.quadrature import Nodes, Quadrature
from numpyro_tsvgp.infer.guides import prediction
from numpyro_tsvgp.infer.guides.guide import GPGuide
from numpyro_tsvgp.infer.guides.hyper import HyperGuide, Params
from numpyro_tsvgp.infer.steps.density import nodes_of, refreshed
from numpyro_tsvgp.infer.steps.objective import Bound, Objective
from numpyro_tsvgp.infer.steps.rules import NaturalGradient, SiteRule
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.processes import is_divided, rows_here
from numpyro_tsvgp.model.read import Reading
from numpyro_tsvgp.model.structure import Structure

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.audit import Audit
    from numpyro_tsvgp.infer.new_data.fantasy import Fantasies
    from numpyro_tsvgp.infer.predictions.functions import FunctionDraws
    from numpyro_tsvgp.infer.predictions.predictive import Predictions
    from numpyro_tsvgp.infer.predictions.predictor import Predictor
    from numpyro_tsvgp.infer.replay import Memory

__all__ = ["Fit", "check_fit"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "call", "memory"],
    meta_fields=["model", "guide", "structure", "rule", "quadrature", "objective"],
)
@dataclass(frozen=True)
class Fit:
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

    params: dict[str, Any]
    call: Call | None
    model: Callable[..., Any]
    guide: GPGuide
    structure: Structure
    rule: SiteRule = NaturalGradient()
    quadrature: Quadrature | None = None
    objective: Objective = Bound()
    memory: Memory | None = None

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
        a Gaussian likelihood, and right to first order where sites have converged; where it is not
        sure, there is a warning.

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
        r"""The fit by the values of f at other inducing inputs, more or fewer.

        Sums over sites are statements about f at the old inputs, which the new inducing values
        predict: :math:`\xi \leftarrow T^\top \xi` and :math:`G \leftarrow T^\top G \, T` with
        :math:`T = L_0^{-1} K_{Z_0 Z} L^{-\top}`. Nothing is lost where all old inputs are among the
        new; elsewhere, what the new ones do not see fades. Point sites stay with their data points.

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

    # ---- data --------------------------------------------------------------------------------

    @property
    def data(self) -> Call:
        """The arguments with the training data.

        Raises:
          ValueError: if the fit does not have them, or has a part of them.
        """
        if self.call is None:
            raise ValueError(
                "This fit is without its training data, as fits that were loaded and those of "
                "streams and batches are. Leaving points out, ArviZ objects and hyperparameter "
                "posteriors need them: fit.with_data(X, y)."
            )
        if is_divided(self.call):
            raise ValueError(
                f"The training data {self.call.describe()} of this fit are divided among "
                f"{jax.process_count()} processes, and a process uses its fit by itself. Pass the "
                "inputs to predict at, or use the rows that this process has: "
                "fit.of_this_process(). The bound of all rows is svi.evaluate(state, ...)."
            )
        return self.call

    def of_this_process(self) -> Fit:
        """The same fit with the rows of the data that this process has, each counted once.

        Where the data are divided among processes, what is asked of a fit is computed by the
        process that asks, with its own copy of the parameters: marginals, draws, leave-one-out
        densities and ArviZ objects of its rows. No process waits for another.

        Returns:
          The fit; this one if its data are not divided.

        Raises:
          ValueError: if the model samples a latent variable for each row, below a GP.
        """
        if self.call is None or not is_divided(self.call):
            return self
        if self.structure.below:
            raise ValueError(
                f"The latent variables {list(self.structure.below)} below the GPs belong to the "
                "rows of all processes, so that the rows of one process are not a part of the fit "
                "by themselves. Pass the inputs to predict at."
            )
        return dataclasses.replace(self, call=rows_here(self.call)[0].of_these_rows())

    def check_has_all_rows(self, what: str) -> None:
        """Whether the data of the fit are all that it was fitted to.

        Args:
          what: what needs them, at the start of a sentence.

        Raises:
          ValueError: if they are the rows of one process or of one batch.
        """
        if self.data.alone:
            raise ValueError(
                f"{what} needs all data, and this fit has the rows of one process or one batch. "
                "Gather all rows in the process that asks, if they fit: fit.with_data(X, y)."
            )

    @property
    def example(self) -> Call | None:
        """Arguments with some of the data that the fit has seen, if it has any."""
        if self.call is not None:
            return self.of_this_process().call
        if self.memory is None:
            return None
        return self.memory.call

    def with_data(self, *args: Any, **kwargs: Any) -> Fit:
        """The same fit with its training data, as arguments of the model."""
        return dataclasses.replace(self, call=Call(args, kwargs).on_device())

    def of_all_data(self) -> Fit:
        """The same fit for plates that do not draw a subsample but have all of their data."""
        return dataclasses.replace(self, call=self.data.of_all_data())

    def inputs(self, args: tuple[Any, ...], kwargs: Any) -> Call:
        """Arguments to predict at: those given, or those of the training data."""
        return Call(args, kwargs).on_device() if args or kwargs else self.data

    def runs_with(self, args: tuple[Any, ...], kwargs: Any) -> Call:
        """Arguments that the model runs with, of whose rows nothing is kept."""
        example = None if args or kwargs else self.example
        return self.inputs(args, kwargs) if example is None else example

    # ---- what diagnostics are made of --------------------------------------------------------

    @property
    def hyper_guide(self) -> HyperGuide:
        """The guide of the hyperparameters of the training data, of which shapes matter."""
        call = self.data if self.call is None else self.call
        return self.guide.hyper_guide(self.structure.hyper, call)

    def hyper_guide_at(self, call: Call) -> HyperGuide:
        """The guide of the hyperparameters, for predictions at some arguments.

        Latent variables below GPs belong to the training data. Elsewhere they follow from the GPs.
        """
        training = call if self.call is None else self.call
        found = self.guide.hyper_guide(self.structure.hyper, training)
        found.check(self.params)
        return found if call is self.call else found.without(self.structure.below)

    @property
    def hyper(self) -> dict[str, Array]:
        """Point estimates of the sampled hyperparameters: MAP, or the median."""
        return self.hyper_guide.point(self.params)

    def hyper_at(self, call: Call) -> dict[str, Array]:
        """Point estimates for predictions at some arguments; see :meth:`hyper_guide_at`."""
        return self.hyper_guide_at(call).point(self.params)

    def nodes(self, key: Array | None = None) -> Nodes:
        """Nodes of the quadrature of the fit."""
        key = jax.random.key(0) if key is None else key
        return nodes_of(self.structure, self.quadrature, key)

    def read(self, call: Call | None = None, hyper: Params | None = None) -> Reading:
        """The model at given arguments and hyperparameters, by default at those of the fit."""
        call = self.data if call is None else call
        return self.guide.read(call, self.params, self.hyper if hyper is None else hyper)

    def refreshed(self, hyper: Params, steps: int) -> Fit:
        """The same fit with sites made anew at given hyperparameters.

        Args:
          hyper: one value of each hyperparameter that the model samples.
          steps: number of site updates at rate 1; with none the sites stay as they are.

        Returns:
          The fit.
        """
        params = refreshed(
            self.guide,
            self.structure,
            self.data,
            self.params,
            hyper,
            self.nodes(),
            rule=self.rule,
            steps=steps,
        )
        return dataclasses.replace(self, params=params)


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
