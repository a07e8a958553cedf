"""Marginals and draws of GP sites at any inputs, for guides and for fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp.gaussian.linalg import full_precision
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.quadrature import Marginals
from numpyro_tsvgp.infer.guides.hyper import HyperGuide, Params
from numpyro_tsvgp.infer.guides.joint import GPPosterior
from numpyro_tsvgp.infer.guides.memory import refuses_matrix
from numpyro_tsvgp.kernels import NotACovariance
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import Model, Reading, read, run_with
from numpyro_tsvgp.model.structure import draws_inputs

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.guides.guide import GPGuide, Latent

__all__ = [
    "deterministic",
    "dual_parameters",
    "joint_of",
    "marginals",
    "marginals_of",
    "read_to_predict",
    "sample",
]


def read_to_predict(model: Model, call: Call, values: Params) -> tuple[Reading, Call]:
    """Reads a model at inputs to predict at, all of them where plates draw some.

    Args:
      model: the NumPyro model.
      call: its arguments; the data may be left out.
      values: values of parameters and hyperparameters, by name.

    Returns:
      The reading, and the arguments that it is of.

    Raises:
      ValueError: if the model does not run with these arguments.
    """
    options: dict[str, Any] = {"values": values, "key": jax.random.key(0), "first_rows": True}
    try:
        reading = read(model, call, **options)
        # A subsample of the inputs is for the steps of a fit; here all of them are asked for.
        if reading.subsampling > 1 and draws_inputs(model, reading, call):
            call = call.of_all_data()
            reading = read(model, call, **options)
    except (jax.errors.JAXTypeError, NotACovariance):
        raise
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise ValueError(
            f"The model does not run with the arguments {call.describe()}, so there is "
            f"no way to know where to predict. {reason}.{_misplaced(call)} Pass the "
            "inputs to predict at, as in guide.marginals(params, X_new), and let the model "
            "take the number of points from them: numpyro.plate('data', X.shape[0])."
        ) from error
    return reading, call


def _misplaced(call: Call) -> str:
    """A hint for a first argument that belongs elsewhere."""
    first = call.args[0] if call.args else None
    if isinstance(first, Mapping):
        return " The first argument looks like parameters; a fit has its own: fit.marginals(X_new)."
    if isinstance(first, jax.Array) and (
        jnp.issubdtype(first.dtype, jax.dtypes.prng_key) or first.dtype == jnp.uint32
    ):
        return " The first argument looks like a random key, which draws take and marginals do not."
    return ""


@jax.jit
@full_precision()
def marginals_of(latent: Latent) -> Marginals:
    """Posterior mean and variance of one GP site, in the shape of the site."""
    process, approximation = latent
    local = approximation.marginals(process)
    return Marginals(process.unflatten(process.loc + local.mean), process.unflatten(local.variance))


@full_precision(on_cpu=False)
def joint_of(latent: Latent) -> GPPosterior:
    """The joint posterior of one GP site, ready to be drawn from."""
    rows = latent.approximation.joint_factor(latent.process)
    too_large = refuses_matrix(rows, latent.process.loc.dtype)
    if too_large is not None:
        raise ValueError(
            f"Joint draws at {rows:,} inputs ask for {too_large}. Use marginals, which need no "
            "such matrix, or draw at fewer inputs."
        )
    return _joint_of(latent)


@jax.jit
@full_precision()
def _joint_of(latent: Latent) -> GPPosterior:
    return GPPosterior(latent.approximation.joint(latent.process), latent.process.batch_shape)


@jax.jit
@full_precision()
def dual_parameters(process: Process, approximation: Any) -> tuple[Array, Array]:
    """The dual parameters of one GP site."""
    return approximation.dual_parameters(process)


@partial(jax.jit, static_argnums=2)
@full_precision()
def _draw(joint: GPPosterior, key: Array, sample_shape: tuple[int, ...]) -> Array:
    return joint.sample(key, sample_shape)


@full_precision(on_cpu=False)
def marginals(
    guide: GPGuide, hyper_guide: HyperGuide, params: Params, call: Call, num_hyper: int = 16
) -> dict[str, Marginals]:
    """Posterior mean and variance of each GP site.

    Args:
      guide: the guide.
      hyper_guide: the guide of its hyperparameters.
      params: fitted parameters.
      call: arguments of the model to predict at.
      num_hyper: how many draws of variational hyperparameters the moments average over.

    Returns:
      Marginals of the shape of each site.
    """

    def at(hyper: Params) -> dict[str, Marginals]:
        latents = guide.latents(guide.read(call, params, hyper), params)
        return {name: marginals_of(latent) for name, latent in latents.items()}

    if hyper_guide.is_point:
        point = hyper_guide.point(params)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((call, params))):
            return at(point)  # a part of a user's own program
        try:
            return _marginals_at(guide, call, dict(params), point)
        except (jax.errors.JAXTypeError, TypeError):  # a model that asks for values
            return at(point)
    keys = jax.random.split(jax.random.key(0), num_hyper)
    parts = _marginals_at_each(guide, hyper_guide, call, dict(params), keys)
    return {
        name: Marginals(q.mean.mean(0), q.variance.mean(0) + q.mean.var(0))
        for name, q in parts.items()
    }


@partial(jax.jit, static_argnums=0)
@full_precision()
def _marginals_at(
    guide: GPGuide, call: Call, params: Params, hyper: Params
) -> dict[str, Marginals]:
    """Marginals at one value of the hyperparameters: a program for each number of rows."""
    latents = guide.latents(guide.read(call, params, hyper), params)
    return {name: marginals_of(latent) for name, latent in latents.items()}


@partial(jax.jit, static_argnums=(0, 1))
@full_precision()
def _marginals_at_each(
    guide: GPGuide, hyper_guide: HyperGuide, call: Call, params: Params, keys: Array
) -> dict[str, Marginals]:
    """Marginals at each of many draws of the hyperparameters."""

    def at(key: Array) -> dict[str, Marginals]:
        return _marginals_at(guide, call, params, hyper_guide.draw(key, params, call)[0])

    return lax.map(at, keys)


@full_precision(on_cpu=False)
def deterministic(guide: GPGuide, params: Params, call: Call, values: Params) -> dict[str, Array]:
    """The deterministic sites of a model, at one value of everything that it samples.

    Args:
      guide: the guide.
      params: fitted parameters.
      call: arguments of the model.
      values: values by site.

    Returns:
      Values by site.
    """
    trace = run_with(guide.model, call, {**params, **values})
    return {name: site["value"] for name, site in trace.items() if site["type"] == "deterministic"}


def _following(
    guide: GPGuide, params: Params, call: Call, draws: Params, shape: tuple[int, ...]
) -> dict[str, Array]:
    """Deterministic sites at each of many draws."""
    one = {name: value[(0,) * len(shape)] for name, value in draws.items()}
    if not jax.eval_shape(lambda values: deterministic(guide, params, call, values), one):
        return {}  # none, and nothing is run
    flat = {name: jnp.reshape(v, (-1, *v.shape[len(shape) :])) for name, v in draws.items()}
    found = _each_deterministic(guide, params, call, flat)
    return {name: v.reshape(*shape, *v.shape[1:]) for name, v in found.items()}


@partial(jax.jit, static_argnums=0)
@full_precision()
def _each_deterministic(
    guide: GPGuide, params: Params, call: Call, flat: Params
) -> dict[str, Array]:
    return lax.map(lambda values: deterministic(guide, params, call, values), flat)


@full_precision(on_cpu=False)
def sample(
    guide: GPGuide,
    hyper_guide: HyperGuide,
    rng_key: Array,
    params: Params,
    call: Call,
    sample_shape: tuple[int, ...],
) -> dict[str, Array]:
    """Joint draws of hyperparameters and GP sites.

    Args:
      guide: the guide.
      hyper_guide: the guide of its hyperparameters.
      rng_key: random key.
      params: fitted parameters.
      call: arguments of the model to predict at.
      sample_shape: shape of the draws.

    Returns:
      Draws by site, those of deterministic sites that follow from them included.
    """

    def drawn(key: Array, shape: tuple[int, ...]) -> dict[str, Array]:
        key_hyper, key_gps = jax.random.split(key)
        hyper, _ = hyper_guide.draw(key_hyper, params, call)
        reading, here = guide.read_all(call, params, hyper)
        latents = guide.latents(reading, params)
        out = {k: jnp.broadcast_to(v, shape + jnp.shape(v)) for k, v in hyper.items()}
        for k, (name, latent) in zip(
            jax.random.split(key_gps, len(latents)), latents.items(), strict=True
        ):
            out[name] = _draw(joint_of(latent), k, shape)
        return out | _following(guide, params, here, out, shape)

    if hyper_guide.is_point:
        return drawn(rng_key, sample_shape)
    keys = jax.random.split(rng_key, math.prod(sample_shape))
    draws = lax.map(lambda key: drawn(key, ()), keys)
    return jax.tree.map(lambda x: x.reshape(*sample_shape, *x.shape[1:]), draws)
