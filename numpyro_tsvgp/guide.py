"""AutoDualGaussian: a NumPyro autoguide whose parameters are sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, lax
from jax.scipy.special import ndtri
from numpyro import handlers
from numpyro.infer.autoguide import AutoDelta, AutoGuide

from numpyro_tsvgp import extract, posterior
from numpyro_tsvgp.checks import Structure, check_inducing, describe, inspect
from numpyro_tsvgp.distributions import GPPosterior, as_inputs
from numpyro_tsvgp.expectations import Marginals
from numpyro_tsvgp.extract import GPSite, Reading
from numpyro_tsvgp.posterior import Fitted, Sites
from numpyro_tsvgp.sites import PointSites, TiedSites

__all__ = ["AutoDualGaussian"]

Params = Mapping[str, Any]


class AutoDualGaussian(AutoGuide):
    r"""A Gaussian guide over GP sites, in the dual parameterization.

    For each GP site with inducing inputs Z the guide is

    .. math::
      q(f) = \int p(f \mid u) \, q(u) \, \mathrm{d}u, \qquad
      q(u) \propto p(u) \, \exp\!\big(u^\top \lambda_1 - \tfrac12 u^\top \Lambda_2 u\big),

    with the dual parameters :math:`\lambda_1 = \sum_i a_i (\alpha_i + \beta_i m_i)` and
    :math:`\Lambda_2 = \sum_i \beta_i a_i a_i^\top`. The prior in it is that of the current
    hyperparameters, so the guide follows them. Latent functions are independent of one another
    under q.

    The guide always follows its arguments: called with new inputs it gives the posterior there.

    Args:
      model: a NumPyro model with one or more :class:`~numpyro_tsvgp.GP` sites.
      inducing: inducing inputs of shape ``(m, d)``, a dict from GP site to such an array, or
        None for none (t-VGP: one site for each data point, for small data). A GP site that the
        dict leaves out has none.
      sites: ``"tied"`` keeps the m-sized sums over sites; ``"untied"`` keeps a pair for each
        data point and rebuilds the sums when hyperparameters move, which asks for all the
        training inputs in each step.
      learn_inducing: whether the M-step moves the inducing inputs.
      hyper_guide: the guide of hyperparameters that the model samples, as a function of a
        model: ``AutoDelta`` (the default, MAP), ``AutoNormal``, or any other autoguide class.
      prefix: what the names of the guide's parameters have in the middle, as in NumPyro.

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

    keeps_sites = True  # and not moments

    def __init__(
        self,
        model: Callable[..., Any],
        inducing: Any = None,
        *,
        sites: str = "tied",
        learn_inducing: bool = True,
        hyper_guide: Callable[..., AutoGuide] | None = None,
        prefix: str = "auto",
    ) -> None:
        if sites not in ("tied", "untied"):
            raise ValueError(f'sites must be "tied" or "untied", got {sites!r}.')
        super().__init__(model, prefix=prefix)
        self.inducing = inducing
        self.sites = sites
        self.learn_inducing = learn_inducing
        self._make_hyper_guide = AutoDelta if hyper_guide is None else hyper_guide
        self.hyper_guide: AutoGuide | None = None
        self._structure: Structure | None = None

    # ---- reading the model once --------------------------------------------------------------

    def setup(self, *args: Any, **kwargs: Any) -> Structure:
        """Reads the model at its training arguments, checks it, and remembers its structure.

        :class:`~numpyro_tsvgp.TSVGP` does this at ``init``. Call it yourself only to predict
        from saved parameters with a guide that has not been fitted in this process.

        Args:
          *args: arguments of the model, with the data.
          **kwargs: keyword arguments of the model.

        Returns:
          The structure: GP sites, hyperparameters, and which latent functions meet in a term.

        Raises:
          ValueError: if t-SVGP cannot fit the model, saying which site is why.
        """
        return self._setup(jax.random.key(0), args, kwargs)

    def _setup(self, key: Array, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Structure:
        if self._structure is None:
            # Inside a transformation (the loop of `Predictive`) this still happens here and now.
            with jax.ensure_compile_time_eval():
                structure = inspect(self.model, args, kwargs)
                self._inducing = {
                    name: self._inducing_of(name, structure) for name in structure.gps
                }
                for name, site in structure.gps.items():
                    self._check_all_rows(name, site, structure)
                if structure.hyperparameters:
                    hyper_model = partial(self._prior_of_hyperparameters, structure)
                    self.hyper_guide = self._make_hyper_guide(hyper_model, prefix=self.prefix)
                    with handlers.block(), handlers.seed(rng_seed=key):
                        self.hyper_guide(*args, **kwargs)
            self._structure = structure
        return self._structure

    @property
    def structure(self) -> Structure:
        """What the model is made of; known once the guide has been set up."""
        if self._structure is None:
            raise RuntimeError(
                "The guide has not seen its model's data yet. Fit it with TSVGP, or call "
                "guide.setup(...) with the arguments of the fit."
            )
        return self._structure

    def _check_all_rows(self, name: str, site: GPSite, structure: Structure) -> None:
        if self._has_point_sites(name) and site.rows in structure.batches:
            why = "inducing=None" if self._is_full(name) else 'sites="untied"'
            raise ValueError(
                f"GP site '{name}' is given a minibatch of {site.rows} rows, but {why} keeps a "
                "site for each data point and needs all inputs in each step. Give the guide "
                'inducing inputs with sites="tied", or pass all rows of X to the GP and '
                "subsample its value: f[idx]."
            )

    def _inducing_of(self, name: str, structure: Structure) -> Array | None:
        given = self.inducing
        if isinstance(given, Mapping):
            unknown = sorted(set(given) - set(structure.gps))
            if unknown:
                raise ValueError(
                    f"inducing has inputs for {unknown}, but the GP sites of the model are "
                    f"{sorted(structure.gps)}."
                )
            given = given.get(name)
        if given is None:
            return None
        Z, X = as_inputs(given), structure.gps[name].gp.X
        if X.ndim == 1 and Z.ndim == 2 and Z.shape[1] == 1:
            Z = Z[:, 0]
        if X.ndim == 2 and Z.ndim == 1 and X.shape[1] == 1:
            Z = Z[:, None]
        check_inducing(name, Z, structure.gps[name], structure)
        return Z.astype(X.dtype)

    def _prior_of_hyperparameters(self, structure: Structure, *args: Any, **kwargs: Any) -> None:
        """The model of the hyperparameters alone, without GPs and data."""
        extract.read(self.model, args, kwargs, expose=structure.is_hyper_or_frame)

    # ---- the guide's own parameters ----------------------------------------------------------

    def _name(self, site: str, what: str) -> str:
        return f"{site}_{self.prefix}_{what}"

    def _is_full(self, name: str) -> bool:
        return self._inducing[name] is None

    def _has_point_sites(self, name: str) -> bool:
        return self._is_full(name) or self.sites == "untied"

    def _keeps_inputs(self, name: str) -> bool:
        """Point sites with inducing inputs need the training inputs to rebuild their sums."""
        return self.sites == "untied" and not self._is_full(name)

    def initial_parameters(self, name: str, site: GPSite) -> dict[str, Array]:
        """Parameters of one GP site before any data: sites of zero, where q is the prior."""
        given = self._inducing[name]
        Z = site.gp.X if given is None else given
        p, dtype = site.latents, site.gp.loc.dtype
        k = jax.eval_shape(site.kernel.diag, Z).shape[0]
        m, n = Z.shape[0], site.rows
        initial: dict[str, Any] = {"inducing": Z}
        if self._has_point_sites(name):
            initial |= {"linear": np.zeros((p, n), dtype), "quadratic": np.zeros((p, n), dtype)}
        else:
            identity = np.broadcast_to(np.eye(m, dtype=dtype), (k, m, m))
            initial |= {"linear": np.zeros((p, m), dtype)}
            initial |= {"quadratic": np.zeros((p, m, m), dtype), "inverse": identity}
            if self.learn_inducing:
                initial["anchor"] = Z
        if self._keeps_inputs(name):
            initial["inputs"] = site.gp.X
        # Buffers of their own, so that a state can be donated without the user's arrays. All of it
        # by way of NumPy, which has nothing to compile.
        return {self._name(name, what): jnp.array(value) for what, value in initial.items()}

    def declare(self, gps: Mapping[str, GPSite]) -> dict[str, Any]:
        """Declares the guide's parameters as NumPyro ``param`` sites and returns their values."""
        return {
            key: numpyro.param(key, value)
            for name in gps
            for key, value in self.initial_parameters(name, self.structure.gps[name]).items()
        }

    def is_fixed(self, key: str) -> bool:
        """Whether a parameter is set by E-steps or held, rather than moved by the optimizer."""
        for name in self.structure.gps:
            if key == self._name(name, "inducing"):
                return self._is_full(name) or not self.learn_inducing
            fields = ("linear", "quadratic", "inverse", "anchor", "inputs")
            if key in {self._name(name, what) for what in fields}:
                return True
        return False

    def unpack(self, name: str, params: Params) -> Fitted:
        """The parameters of one GP site, out of all parameters."""

        def get(what: str) -> Any:
            return params.get(self._name(name, what))

        if get("inverse") is None:
            return Fitted(
                get("inducing"), PointSites(get("linear"), get("quadratic")), get("inputs")
            )
        tied = TiedSites(get("linear"), get("quadratic"), get("inverse"), get("anchor"))
        return Fitted(get("inducing"), tied, None)

    def pack(self, name: str, sites: Sites) -> dict[str, Array]:
        """Parameters by name that hold the sites of one GP."""
        fields = {what: value for what, value in sites._asdict().items() if value is not None}
        return {self._name(name, what): value for what, value in fields.items()}

    def dual_parameters(
        self, params: Params, *args: Any, **kwargs: Any
    ) -> dict[str, tuple[Array, Array]]:
        r"""The dual parameters :math:`(\lambda_1, \Lambda_2)` of each GP site.

        Args:
          params: fitted parameters.
          *args: arguments of the model.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from GP site to arrays of shape ``batch + (m,)`` and ``batch + (m, m)``.
        """
        gps = self.read(params, args, kwargs).gps
        return {
            name: posterior.dual_parameters(site, self.unpack(name, params))
            for name, site in gps.items()
        }

    # ---- hyperparameters ---------------------------------------------------------------------

    @property
    def has_point_hyperparameters(self) -> bool:
        """Whether hyperparameters are points (MAP, or none sampled) and not distributions."""
        return self.hyper_guide is None or isinstance(self.hyper_guide, AutoDelta)

    def sample_hyperparameters(
        self, key: Array, params: Params, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Array]:
        """One draw of the hyperparameters that the model samples."""
        if self.hyper_guide is None:
            return {}
        if self.has_point_hyperparameters:
            return dict(self.hyper_guide.median(params))
        with handlers.block(), handlers.trace() as trace, handlers.seed(rng_seed=key):
            handlers.substitute(self.hyper_guide, data=dict(params))(*args, **kwargs)
        return {name: trace[name]["value"] for name in self.structure.hyperparameters}

    def read(
        self,
        params: Params,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        hyper: Params | None = None,
    ) -> Reading:
        """Reads the model at given parameters, at the inputs in the arguments."""
        self.setup(*args, **kwargs)
        key = jax.random.key(0)
        if hyper is None:
            hyper = self.sample_hyperparameters(key, params, args, kwargs)
        # A subsample of the inputs is for the steps of a fit; here all of them are asked for.
        whole = self.structure.draws_inputs
        values = {**params, **hyper}
        return self._read_anywhere(args, kwargs, values=values, key=key, whole=whole, draw=False)

    def _read_anywhere(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], **options: Any
    ) -> Reading:
        """Reads the model at inputs that need not be those of the fit."""
        try:
            reading = extract.read(self.model, args, kwargs, **options)
        except jax.errors.JAXTypeError:
            raise
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(".")
            raise ValueError(
                f"The model does not run with the arguments {describe(args, kwargs)}, so there is "
                f"no way to know where to predict. {reason}. Pass the "
                "inputs to predict at, as in guide.marginals(params, X_new), and let the model "
                "take the number of points from them: numpyro.plate('data', X.shape[0])."
            ) from error
        for name, site in reading.gps.items():
            fitted, now = self.structure.gps[name].gp.X, site.gp.X
            if _columns(fitted) != _columns(now):
                raise ValueError(
                    f"GP site '{name}' was fitted to inputs of shape {fitted.shape}, but the new "
                    f"inputs have shape {now.shape}: they must have the same number of columns."
                )
        return reading

    def _draws_inputs(
        self, values: Params, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether this call of the model puts GPs at a subsample of the inputs."""
        if not self.structure.draws_inputs:
            return False
        with jax.ensure_compile_time_eval():
            trace = self._read_anywhere(
                args,
                kwargs,
                values=values,
                expose=lambda site: site["type"] == "param",
                key=jax.random.key(0),
            ).trace
        plates = (site for site in trace.values() if site["type"] == "plate")
        return any(site["args"][0] != len(site["value"]) for site in plates)

    # ---- NumPyro's interface -----------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Samples hyperparameters and the GP sites at the inputs in the arguments."""
        structure = self.setup(*args, **kwargs)
        self.prototype_trace = structure.trace
        values: dict[str, Array] = {}
        with handlers.trace() as trace:
            if self.hyper_guide is not None:
                values = dict(self.hyper_guide(*args, **kwargs))
            params = self.declare(structure.gps)
        params |= {k: s["value"] for k, s in trace.items() if s["type"] == "param"}
        values = {name: values[name] for name in structure.hyperparameters}
        result = dict(values)
        if self.has_point_hyperparameters and self.hyper_guide is not None:
            values = dict(self.hyper_guide.median(params))
        # `Predictive` calls the guide inside a loop over draws. When nothing but the random key
        # is traced, the factors are computed here and now, once, and enter the loop as constants.
        concrete = not _traced((params, values, args, kwargs))
        concrete = concrete and not self._draws_inputs({**params, **values}, args, kwargs)
        with jax.ensure_compile_time_eval() if concrete else nullcontext():
            reading = self._read_anywhere(
                args,
                kwargs,
                values={**params, **values},
                expose=lambda site: site["type"] in ("param", "plate"),
                key=jax.random.key(0) if concrete else None,
            )
            joint = {
                name: posterior.joint(gp, self.unpack(name, params))
                for name, gp in reading.gps.items()
            }
        for name, q in joint.items():
            result[name] = numpyro.sample(name, q)
        return result

    def sample_posterior(
        self,
        rng_key: Array,
        params: Params,
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Array]:
        """Joint draws of hyperparameters and GP sites at the inputs in the arguments.

        The covariance is factorised once for all draws when hyperparameters are points, and
        once for each draw when they are variational.

        Args:
          rng_key: random key.
          params: fitted parameters.
          *args: arguments of the model; the data may be left out.
          sample_shape: shape of the draws.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from site to draws of shape ``sample_shape + shape of the site``.
        """
        self.setup(*args, **kwargs)

        def draw(key: Array, shape: tuple[int, ...]) -> dict[str, Array]:
            key_hyper, *keys = jax.random.split(key, 1 + len(self.structure.gps))
            hyper = self.sample_hyperparameters(key_hyper, params, args, kwargs)
            reading = self.read(params, args, kwargs, hyper)
            out = {k: jnp.broadcast_to(v, shape + jnp.shape(v)) for k, v in hyper.items()}
            for k, (name, site) in zip(keys, reading.gps.items(), strict=True):
                out[name] = _draw(posterior.joint(site, self.unpack(name, params)), k, shape)
            return out

        if self.has_point_hyperparameters:
            return draw(rng_key, tuple(sample_shape))
        keys = jax.random.split(rng_key, math.prod(sample_shape))
        draws = lax.map(lambda key: draw(key, ()), keys)
        return jax.tree.map(lambda x: x.reshape(*sample_shape, *x.shape[1:]), draws)

    def marginals(
        self, params: Params, *args: Any, num_hyper: int = 16, **kwargs: Any
    ) -> dict[str, Marginals]:
        """Posterior mean and variance of each GP site at the inputs in the arguments.

        Memory is bounded whatever the number of inputs: features are made in chunks of rows.

        Args:
          params: fitted parameters.
          *args: arguments of the model; the data may be left out.
          num_hyper: how many draws of variational hyperparameters the moments average over.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from GP site to a named tuple ``(mean, variance)``, each of the site's shape.
        """
        self.setup(*args, **kwargs)

        def at(key: Array) -> dict[str, Marginals]:
            hyper = self.sample_hyperparameters(key, params, args, kwargs)
            reading = self.read(params, args, kwargs, hyper)
            return {
                name: posterior.marginals(site, self.unpack(name, params))
                for name, site in reading.gps.items()
            }

        if self.has_point_hyperparameters:
            return at(jax.random.key(0))
        parts = lax.map(at, jax.random.split(jax.random.key(0), num_hyper))
        return {
            name: Marginals(q.mean.mean(0), q.variance.mean(0) + q.mean.var(0))
            for name, q in parts.items()
        }

    def median(self, params: Params, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Posterior median of every site, GPs at the inputs in the arguments.

        Args:
          params: fitted parameters.
          *args: arguments of the model; the data may be left out.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from site to its median.
        """
        marginals = self.marginals(params, *args, **kwargs)
        hyper = {} if self.hyper_guide is None else dict(self.hyper_guide.median(params))
        return hyper | {name: q.mean for name, q in marginals.items()}

    def quantiles(
        self, params: Params, quantiles: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Array]:
        """Posterior quantiles of every site, GPs at the inputs in the arguments.

        Args:
          params: fitted parameters.
          quantiles: one or more numbers between 0 and 1.
          *args: arguments of the model; the data may be left out.
          **kwargs: keyword arguments of the model.

        Returns:
          A dict from site to quantiles, with a leading axis when several are asked for.
        """
        q = jnp.asarray(quantiles)
        marginals = self.marginals(params, *args, **kwargs)
        hyper: dict[str, Array] = {}
        if self.has_point_hyperparameters and self.hyper_guide is not None:
            points = self.hyper_guide.median(params)
            hyper = {k: jnp.broadcast_to(v, q.shape + jnp.shape(v)) for k, v in points.items()}
        elif self.hyper_guide is not None:
            hyper = dict(self.hyper_guide.quantiles(params, quantiles))

        def normal(marginal: Marginals) -> Array:
            z = ndtri(q).reshape(q.shape + (1,) * marginal.mean.ndim).astype(marginal.mean.dtype)
            return marginal.mean + z * jnp.sqrt(marginal.variance)

        return hyper | {name: normal(marginal) for name, marginal in marginals.items()}


@partial(jax.jit, static_argnums=2)
def _draw(q: GPPosterior, key: Array, sample_shape: tuple[int, ...]) -> Array:
    return q.sample(key, sample_shape)


def _columns(X: Array) -> int:
    return 1 if X.ndim == 1 else X.shape[1]


def _traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
