r"""Data that come in batches and are then gone: posterior, inducing inputs and hyperparameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.distributions.transforms import biject_to
from numpyro.infer.util import transform_fn

from numpyro_tsvgp.gaussian.linalg import blas_threads, full_precision
from numpyro_tsvgp.gaussian.quadrature import Marginals, expect
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.em.start import declared_parameters
from numpyro_tsvgp.infer.em.tsvgp import TSVGP
from numpyro_tsvgp.infer.fit import Fit, check_fit
from numpyro_tsvgp.infer.guides.dual import AutoDualGaussian
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.infer.new_data.conditioning import (
    NewData,
    bare,
    prepared,
    scene_of,
    warn_unsettled,
)
from numpyro_tsvgp.infer.new_data.moving import chosen_inducing, with_inducing
from numpyro_tsvgp.infer.new_data.new_sites import Sites, asked_for, carries_of, no_sites, settle
from numpyro_tsvgp.infer.replay import Memory
from numpyro_tsvgp.infer.state import Transforms
from numpyro_tsvgp.infer.steps.density import e_steps, scene_at
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.data_rows import appended, canonical, on_device, padded, taken
from numpyro_tsvgp.model.likelihood import log_likelihood, log_prior
from numpyro_tsvgp.model.read import read

__all__ = ["Stream"]

# E-steps at the end of the first batch, whose sites the next ones build on.
_SETTLING_STEPS = 20


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["call", "memory", "new", "old_count", "new_count", "past"],
    meta_fields=["rows"],
)
@dataclass(frozen=True)
class _Batch:
    """Points of the memory and new data, in one call and apart.

    Attributes:
      call: memory and new data together.
      memory: the memory alone.
      new: the new data alone.
      old_count: how many rows of the memory are not repeated.
      new_count: how many rows of the new data are not repeated.
      past: how many data points there were before.
      rows: which arrays of the arguments have a row for each data point.
    """

    call: Call
    memory: Call
    new: Call
    old_count: Array
    new_count: Array
    past: Array
    rows: tuple[bool, ...]

    @staticmethod
    def of(memory: Memory, new: NewData) -> _Batch:
        return _Batch(
            appended(memory.call, new.call, memory.rows),
            memory.call,
            new.call,
            memory.count,
            jnp.asarray(new.points),
            memory.past,
            memory.rows,
        )

    def length(self, call: Call) -> int:
        """How many rows one of its calls has."""
        pairs = zip(jax.tree.leaves(call), self.rows, strict=True)
        return next(leaf.shape[0] for leaf, yes in pairs if yes)

    def last(self, call: Call) -> Call:
        """The last row of one of its calls."""
        leaves = jax.tree.leaves(call)
        some = [x[-1:] if yes else x for x, yes in zip(leaves, self.rows, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(call), some)

    def counted(self) -> Array:
        """Which rows of the memory and the new data are not repeated."""
        size = self.length(self.memory)
        rows = jnp.arange(self.length(self.call))
        return jnp.where(rows < size, rows < self.old_count, rows - size < self.new_count)


class Stream:
    r"""Inference for batches that arrive in order and are then gone.

    An update takes the new data into the posterior as :meth:`numpyro_tsvgp.Fit.condition` does,
    chooses inducing inputs among the old ones and the new data, takes optimizer steps on the
    hyperparameters, and keeps a few representative points in the fit, its *memory*. Those stand for
    the data that are gone when hyperparameters are learned:

    .. math::
      \sum_{\text{new}} E_i + \frac{N_{\text{past}}}{|\text{memory}|} \sum_{\text{memory}} E_j
      - \mathrm{KL}(q \,\|\, p) .

    Sites of points in the memory are made anew in each update: they are subtracted, found again
    together with those of the new points, and added. Points are kept with a probability
    proportional to :math:`\beta_i v_i`, how much a point narrows the posterior at its own input;
    one that is in the memory already stands for :math:`N_{\text{past}} / |\text{memory}|` of them.

    The object holds configuration alone. What is known of the data is in the fit, and is saved
    with it.

    Args:
      model: a NumPyro model with GP sites.
      guide: an :class:`~numpyro_tsvgp.AutoDualGaussian` with inducing inputs and tied sites. It
        may start with few of them.
      optim: an optimizer of hyperparameters, or None to hold them after the first batch. It starts
        afresh in each update. Inducing inputs are chosen and not learned.
      memory: how many points are kept. With 0 the new batch stands for all data, which is what
        one can do without a memory.
      select: ``"leverage"`` for probabilities proportional to :math:`\beta_i v_i`, ``"random"``
        for equal ones.
      num_inducing: the largest number of inducing inputs; None to leave them where they are.
      steps: optimizer steps in an update.
      **options: further options of :class:`~numpyro_tsvgp.TSVGP`, for the first batch, of which
        ``rule`` and ``quadrature`` hold for all.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
      >>> from numpyro_tsvgp import GP, AutoDualGaussian, Stream, kernels
      >>> def model(X, y=None):
      ...     scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
      ...     f = numpyro.sample("f", GP(kernels.Matern52(scale), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
      >>> X = jnp.linspace(-3.0, 3.0, 40)
      >>> y = (jnp.sin(2.0 * X) > 0).astype(int)
      >>> guide = AutoDualGaussian(model, inducing=X[:10:2])
      >>> stream = Stream(model, guide, optax.adam(0.05), memory=8, num_inducing=10, steps=5)
      >>> fit = stream.begin(jax.random.key(0), 20, X[:10], y[:10])
      >>> for i in (10, 20, 30):
      ...     fit = stream.update(jax.random.key(i), fit, X[i : i + 10], y[i : i + 10])
      >>> int(fit.memory.past), fit.params["f_auto_inducing"].shape
      (40, (10,))

    References:
      P. E. Chang, P. Verma, S. T. John, A. Solin, M. E. Khan, *Memory-based dual Gaussian
      processes for sequential learning*, ICML 2023.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoDualGaussian,
        optim: Any,
        *,
        memory: int = 50,
        select: str = "leverage",
        num_inducing: int | None = None,
        steps: int = 20,
        **options: Any,
    ) -> None:
        if select not in ("leverage", "random"):
            raise ValueError(f'select must be "leverage" or "random", got {select!r}.')
        if memory < 0 or steps < 0 or (num_inducing is not None and num_inducing < 1):
            raise ValueError(
                "memory and steps must be 0 or more and num_inducing 1 or more, got "
                f"{memory}, {steps} and {num_inducing}."
            )
        self.svi = TSVGP(model, guide, optim, **options)
        self.size = memory
        self.select = select
        self.num_inducing = num_inducing
        self.steps = steps
        self._learn = jax.jit(self._learned, static_argnames="transforms")

    # ---- batches -----------------------------------------------------------------------------

    @full_precision(on_cpu=False)
    def begin(self, rng_key: Array, num_steps: int, *args: Any, **kwargs: Any) -> Fit:
        """Fits the first batch.

        Args:
          rng_key: random key.
          num_steps: number of updates of :meth:`numpyro_tsvgp.TSVGP.run`.
          *args: arguments of the model with the first batch.
          **kwargs: keyword arguments of the model.

        Returns:
          The fit, without the data but with a memory.
        """
        key_run, key_memory = jax.random.split(rng_key)
        call = on_device(canonical(self.svi.model, Call(args, kwargs).on_device()))
        result = self.svi.run(key_run, num_steps, *call.args, progress_bar=False, **call.kwargs)
        self._check(result.fit)
        fit = result.fit
        kept = _settled(dataclasses.replace(fit, call=None), call, fit.hyper)
        fit = dataclasses.replace(fit, params={**fit.params, **fit.guide.pack(kept)})
        new = prepared(fit, call)
        if new.rows is None or new.once:
            raise ValueError(
                "A stream keeps rows of the model's arguments, and those of this call "
                f"{call.describe()} do not have one for each data point. Pass arrays with a row "
                "for each, and let the model take their number from them."
            )
        first = padded(taken(new.given, new.rows, np.arange(1)), new.rows, max(self.size, 1))
        nothing = {n: no_sites(s) for n, s in _processes(fit, first, new).items()}
        zero = jnp.asarray(0)
        empty = Memory(on_device(first), nothing, zero, zero, new.rows)
        fit = dataclasses.replace(fit, call=None, memory=empty)
        batch = _Batch.of(empty, new)
        sites, score = _in_posterior(bare(fit), batch, new.hyper)
        return self._remembering(key_memory, fit, batch, sites, score)

    @blas_threads()
    @full_precision(on_cpu=False)
    def update(self, rng_key: Array, fit: Fit, *args: Any, **kwargs: Any) -> Fit:
        """A fit after another batch.

        Args:
          rng_key: random key.
          fit: the fit after the batches before, of :meth:`begin` or :meth:`update`.
          *args: arguments of the model with the new batch.
          **kwargs: keyword arguments of the model.

        Returns:
          A new fit; the old one stays as it is.
        """
        check_fit("stream.update(key, fit, X, y)", fit)
        if fit.memory is None:
            raise ValueError(
                "The fit has no memory, so it is not one of a stream. Start with "
                "fit = stream.begin(key, num_steps, X, y) on the first batch."
            )
        new = prepared(fit, Call(args, kwargs))
        if new.rows is None or new.once:
            raise ValueError(
                f"The arguments {new.given.describe()} differ in more than the number of rows from "
                f"those of earlier batches, {fit.memory.call.describe()}."
            )
        key_learn, key_memory = jax.random.split(rng_key)
        memory = fit.memory
        if self.num_inducing is not None:
            fit = _at_new_places(fit, new, self.num_inducing)
        batch = _Batch.of(memory, new)
        fit, sites = _resettled(fit, batch, new.hyper, _with_none(memory.sites, batch))
        hyper = new.hyper
        if self.steps and self.svi.optim is not None:
            transforms = _transforms(fit, new.call)
            learned = self._learn(bare(fit), batch, key_learn, transforms=transforms)
            if all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(learned)):
                fit = dataclasses.replace(fit, params={**fit.params, **learned})
                hyper = fit.hyper_at(new.call)
                fit, sites = _resettled(fit, batch, hyper, sites)
        _, score = _in_posterior(bare(fit), batch, hyper)
        return self._remembering(key_memory, fit, batch, sites, score)

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        batches: Iterable[tuple[Any, ...]],
        *,
        each: Callable[[int, Fit], Any] | None = None,
    ) -> Fit:
        """Goes through batches, each a tuple of arguments of the model.

        Args:
          rng_key: random key.
          num_steps: number of updates of the first batch.
          batches: any iterable, each element of which is asked for once.
          each: called with the number of the batch and the fit after it.

        Returns:
          The fit after the last one.
        """
        fit = None
        for i, batch in enumerate(batches):
            key = jax.random.fold_in(rng_key, i)
            fit = (
                self.begin(key, num_steps, *batch) if fit is None else self.update(key, fit, *batch)
            )
            if each is not None:
                each(i, fit)
        if fit is None:
            raise ValueError("There are no batches, so there is nothing to fit.")
        return fit

    # ---- parts of an update ------------------------------------------------------------------

    def _check(self, fit: Fit) -> None:
        for name in fit.structure.gps:
            kind = fit.guide.kind(name)
            if not fit.guide.has_inducing(name) or kind.follows_inputs:
                raise ValueError(
                    f"A stream forgets its data, but the guide keeps a site for each point of GP "
                    f"site '{name}'. Give it inducing inputs with sites=\"tied\"."
                )

    def _remembering(self, key: Array, fit: Fit, batch: _Batch, sites: Sites, score: Array) -> Fit:
        """The fit with the points in its memory drawn anew, among those that are there."""
        old, count, past = (int(x) for x in (batch.old_count, batch.new_count, batch.past))
        size = batch.length(batch.memory)
        weight = np.zeros(batch.length(batch.call))
        weight[:old] = past / max(old, 1)
        weight[size : size + count] = 1.0
        if self.select == "leverage":
            weight = weight * np.maximum(np.asarray(score), np.finfo(float).tiny)
        # The largest of log weights with Gumbel noise are a draw without replacement.
        noise = np.asarray(jax.random.gumbel(key, weight.shape))
        with np.errstate(divide="ignore"):
            order = np.argsort(-(np.log(weight) + noise))
        kept = min(self.size, int((weight > 0).sum()))
        rows = np.sort(order[: max(kept, 1)])
        rows = np.concatenate([rows, np.repeat(rows[-1:], size - len(rows))])
        stays = np.arange(size) < kept
        memory = Memory(
            taken(batch.call, batch.rows, rows),
            jax.tree.map(lambda x: jnp.asarray(np.where(stays, np.asarray(x)[:, rows], 0)), sites),
            jnp.asarray(kept),
            jnp.asarray(past + count),
            batch.rows,
        )
        return dataclasses.replace(fit, call=None, memory=memory)

    @full_precision()
    def _learned(
        self, fit: Fit, batch: _Batch, key: Array, transforms: Transforms
    ) -> dict[str, Array]:
        """Parameters after optimizer steps."""
        optim = self.svi.optim
        assert optim is not None
        held = {k: v for k, v in fit.params.items() if k not in transforms}
        free = transform_fn(transforms, {k: fit.params[k] for k in transforms}, invert=True)

        def step(state: Any, key: Array) -> tuple[Any, Array]:
            def loss(free: Any) -> tuple[Array, None]:
                params = {**held, **transform_fn(transforms, free)}
                here = dataclasses.replace(fit, params=params)
                return -_objective(here, batch, key, self.size > 0), None

            (value, _), state = optim.eval_and_update(loss, state)
            return state, value

        state, _ = lax.scan(step, optim.init(free), jax.random.split(key, self.steps))
        return transform_fn(transforms, optim.get_params(state))


# ---- what an update is made of, compiled -----------------------------------------------------


@jax.jit
@full_precision()
def _settled(fit: Fit, call: Call, hyper: Params) -> dict[str, Any]:
    """The approximations of the first batch after E-steps at its hyperparameters."""
    key = jax.random.key(0)
    scene = scene_at(fit.guide, fit.structure, call, fit.params, hyper, fit.nodes(), key=key)
    return e_steps(scene, fit.rule, 0.5, _SETTLING_STEPS).kept


def _processes(fit: Fit, call: Call, new: NewData) -> dict[str, Any]:
    values = {**fit.params, **new.hyper}
    reading = read(fit.model, on_device(call), values=values, key=jax.random.key(0))
    return {name: site.process() for name, site in reading.gps.items()}


def _at_new_places(fit: Fit, new: NewData, most: int) -> Fit:
    """The fit with inducing inputs chosen among its own and the new inputs."""
    reading = fit.guide.read(new.call, fit.params, new.hyper)
    places = {}
    for name, site in reading.gps.items():
        Z = fit.guide.unpack(name, fit.params).inducing
        places[name] = chosen_inducing(site, Z, most)
    return with_inducing(fit, places, new.call)


def _with_none(sites: Sites, batch: _Batch) -> Sites:
    """Sites of the memory, followed by those of zero of the new points."""
    more = batch.length(batch.new)
    return jax.tree.map(lambda x: jnp.asarray(np.pad(x, ((0, 0), (0, more)))), sites)


def _resettled(fit: Fit, batch: _Batch, hyper: Params, sites: Sites) -> tuple[Fit, Sites]:
    """The fit with the sites of all points of a batch made anew, and these, about f."""
    kept, sites, error = _found(bare(fit), batch, hyper, sites)
    warn_unsettled(float(error))
    return dataclasses.replace(fit, params={**fit.params, **fit.guide.pack(kept)}), sites


@jax.jit
@full_precision()
def _found(
    fit: Fit, batch: _Batch, hyper: Params, about_f: Sites
) -> tuple[dict[str, Any], Sites, Array]:
    scene = scene_of(fit, batch.call, hyper, False)
    loc = {name: at.process.loc for name, at in scene.at.items()}
    sites = {
        n: PointSites(s.linear - s.quadratic * loc[n], s.quadratic) for n, s in about_f.items()
    }
    base = {
        name: at.start().add(PointSites(-sites[name].linear, -sites[name].quadratic), at.features)
        for name, at in scene.at.items()
    }
    settled = settle(scene, fit.rule, base, sites, dict.fromkeys(sites, batch.counted()))
    carries = carries_of(scene, base, settled.sites)
    kept = {name: at.keep(carries[name]) for name, at in scene.at.items()}
    return kept, _about_f(settled.sites, loc), settled.error


def _about_f(sites: Sites, loc: dict[str, Array]) -> Sites:
    return {n: PointSites(s.linear + s.quadratic * loc[n], s.quadratic) for n, s in sites.items()}


@jax.jit
@full_precision()
def _in_posterior(fit: Fit, batch: _Batch, hyper: Params) -> tuple[Sites, Array]:
    r"""Sites that the posterior asks for, about f, and how much each point narrows it there.

    The second is :math:`\sum \beta_i v_i` over latent functions.
    """
    scene = scene_of(fit, batch.call, hyper, False)
    local = {name: at.local(at.posterior(at.start())) for name, at in scene.at.items()}
    none = {name: no_sites(at.process) for name, at in scene.at.items()}
    _, sites = asked_for(scene, fit.rule, local, none)
    scores = [jnp.maximum(sites[name].quadratic, 0.0) * q.variance for name, q in local.items()]
    loc = {name: at.process.loc for name, at in scene.at.items()}
    return _about_f(sites, loc), jnp.concatenate(scores).sum(0)


def _transforms(fit: Fit, call: Call) -> Transforms:
    """Transforms of everything that the optimizer owns in a stream: all but the guide's own."""
    hyper_guide = fit.hyper_guide_at(call)
    _, params, kinds = declared_parameters(fit.guide, hyper_guide, call, jax.random.key(0))
    return Transforms({name: biject_to(kinds[name]) for name in params})


def _objective(fit: Fit, batch: _Batch, key: Array, remembers: bool) -> Array:
    """The bound where points of the memory stand for all data that are gone."""
    hyper_guide = fit.hyper_guide_at(batch.new)
    hyper, log_q = hyper_guide.draw(key, fit.params, batch.new)
    model, values = fit.model, {**fit.params, **hyper}

    def at(call: Call) -> Any:
        return read(model, call, values=values, key=jax.random.key(0), first_rows=True)

    reading = at(batch.call)
    marginals = {}
    divergence: Any = 0.0
    for name, (process, approximation) in fit.guide.latents(reading, fit.params).items():
        (mean, variance), kl = approximation.at_data_for_gradient(process).bound()
        marginals[name] = Marginals(mean + process.loc, variance)
        divergence = divergence + kl
    size = batch.length(batch.memory)
    nodes = fit.nodes()

    def expected(call: Call, rows: slice, count: Array) -> Array:
        """The sum over rows that are not repeated: of all, without the repeats of the last."""
        there = {n: Marginals(*(x[:, rows] for x in q)) for n, q in marginals.items()}
        last = {n: Marginals(*(x[:, -1:] for x in q)) for n, q in there.items()}
        one, repeats = batch.last(call), batch.length(call) - count
        every = expect(log_likelihood(model, at(call), call), there, nodes)
        return every - repeats * expect(log_likelihood(model, at(one), one), last, nodes)

    total = expected(batch.new, slice(size, None), batch.new_count)
    if remembers:
        ratio = batch.past / jnp.maximum(batch.old_count, 1)
        total = total + ratio * expected(batch.memory, slice(size), batch.old_count)
    else:
        total = total * (batch.past + batch.new_count) / batch.new_count
    return total - divergence + log_prior(reading, fit.structure.above) - log_q
