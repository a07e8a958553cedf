"""The predictive distribution of data, in their own units."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_tsvgp.gaussian.linalg import full_precision
from numpyro_tsvgp.infer.predictions import predictive_integrals as integrals
from numpyro_tsvgp.infer.predictions.filling import Filled, Rows, filled, first_rows
from numpyro_tsvgp.infer.predictions.predictive_integrals import Kind, Source
from numpyro_tsvgp.infer.predictions.predictive_sites import find_targets
from numpyro_tsvgp.infer.predictions.predictor import Predictor, make_predictor
from numpyro_tsvgp.infer.steps.mixture import LEVELS, fine_nodes
from numpyro_tsvgp.model.arguments import Call

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.fit import Fit

__all__ = ["Prediction", "Predictions", "predict", "predictions"]

# Draws where a distribution has no cdf.
_DRAWS = 4000


@dataclass(frozen=True, eq=False)
class Prediction:
    r"""The predictive distribution of one observed site, number by number.

    .. math:: p(y_i) = \int p(y_i \mid f, \theta) \, q(f(x_i) \mid \theta) \, q(\theta)

    The integral over the marginals of the GPs is by a quadrature that is refined until the result
    does not change. Where hyperparameters have a distribution, it is averaged over draws of them.
    The numbers of one site are not independent of each other, and each is predicted by itself. For
    joint draws use ``Predictive`` with ``fit.sample`` or ``fit.functions``.

    Attributes:
      name: the name of the site.
      kind: what is known of its distribution given f.
      source: what it is an integral of.
      rows: where rows of the source are repeated, or None if there are none such.
    """

    name: str
    kind: Kind
    source: Source
    rows: Rows | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data."""
        return self.kind.shape

    @cached_property
    def mean(self) -> Array:
        """The mean; for binary data the probability of one.

        Raises:
          ValueError: if the distribution has none, as that of categories.
        """
        return self._cut(self._mean)

    @cached_property
    def _mean(self) -> Array:
        mean = self._integral(integrals.mean)
        if not isinstance(mean, jax.core.Tracer) and jnp.isnan(mean).all():
            raise ValueError(
                f"Site '{self.name}' is {self.kind.family}, whose mean is not defined. "
                "Categories have probabilities, probs, and every distribution has quantiles."
            )
        return mean

    @cached_property
    def variance(self) -> Array:
        """The variance, of f and of the data given f together."""
        return self._cut(self._variance)

    @cached_property
    def _variance(self) -> Array:
        return self._integral(integrals.spread, self._mean)

    @property
    def std(self) -> Array:
        """The standard deviation."""
        return self._cut(jnp.sqrt(self._variance))

    def log_prob(self, y: Any) -> Array:
        """Log predictive density, or probability, of data of the shape of the site.

        Args:
          y: the data; they broadcast to the shape of the site.

        Returns:
          One number for each of the data, or for each vector of them where the distribution is
          one of vectors.
        """
        y = y if isinstance(y, jax.Array) else jax.device_put(np.asarray(y))
        try:
            fits = jnp.broadcast_shapes(y.shape, self.shape) == self.shape
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"y has shape {y.shape}, which does not broadcast to {self.shape}, the shape of "
                f"site '{self.name}' at these inputs."
            )
        y = jnp.broadcast_to(y, self.shape)
        if self.rows is not None:
            y = self.rows.fill(y)
        return self._cut(self._integral(integrals.log_prob, y, log=True))

    @cached_property
    def probs(self) -> Array:
        """Probabilities of all values that the data can have, along a last axis.

        Raises:
          ValueError: if there are infinitely many.
        """
        if not self.kind.enumerable:
            raise ValueError(
                f"Site '{self.name}' is {self.kind.family}, whose values cannot be listed. The "
                "probability of one of them is exp(log_prob(y))."
            )
        return self._cut(self._probs)

    @cached_property
    def _probs(self) -> Array:
        return self._integral(integrals.probabilities)

    def quantiles(self, q: Any) -> Array:
        """Quantiles: for discrete data the smallest value whose cumulative probability reaches q.

        They are found by bisection of the averaged ``cdf`` of the likelihood, or from its listed
        probabilities. A distribution that has neither is drawn from 4000 times; see
        ``quantiles_from``.

        Args:
          q: one or more numbers between 0 and 1.

        Returns:
          An array of the shape of ``q`` and then of the site.
        """
        q = np.asarray(q, float)
        if not ((q > 0) & (q < 1)).all():
            raise ValueError(f"Quantiles are asked for at numbers between 0 and 1, not at {q}.")
        flat = jnp.asarray(q.ravel())
        found: Any
        if self.quantiles_from == "probabilities":
            cumulative = jnp.cumsum(self._probs, -1)
            reached = cumulative >= flat.reshape(-1, *[1] * cumulative.ndim) * cumulative[..., -1:]
            found = self.kind.values[np.asarray(self._cut(jnp.argmax(reached, -1), leading=1))]
        elif self.quantiles_from == "cdf":
            found = self._cut(self._bisect(flat), leading=1)
        else:
            draws = self.sample(jax.random.key(0), _DRAWS)
            found = jnp.quantile(draws.astype(float), flat, axis=0)
        return jnp.asarray(found).reshape(q.shape + self.shape)

    def interval(self, probability: float = 0.9) -> tuple[Array, Array]:
        """The lower and upper end of a band with as much probability below it as above."""
        tail = 0.5 * (1.0 - probability)
        low, high = self.quantiles([tail, 1.0 - tail])
        return low, high

    @property
    def quantiles_from(self) -> str:
        """Where quantiles come from: ``"cdf"``, ``"probabilities"`` or ``"draws"``."""
        if self.kind.enumerable:
            return "probabilities"
        return "cdf" if self.kind.has_cdf else "draws"

    def sample(self, rng_key: Array, num: int) -> Array:
        """Draws of each of the data by itself, ``(num, *shape)``: they are not joint draws."""
        draws = integrals.draw(self.source, rng_key, name=self.name, num=num)
        return self._cut(draws, leading=1)

    def __repr__(self) -> str:
        text = f"{self.name} ~ {self.kind.family}, shape {self.shape}"
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(self.source)):
            return text
        try:
            m, s = self.mean, self.std
        except ValueError:
            return text
        text += f": mean {m.min():.4g} to {m.max():.4g}, sd {s.min():.4g} to {s.max():.4g}"
        return text

    def _cut(self, array: Array, leading: int = 0) -> Array:
        """What belongs to rows that were asked for."""
        return array if self.rows is None else self.rows.cut(array, leading)

    def _integral(self, visit: Callable[..., Any], *arrays: Array, log: bool = False) -> Array:
        return _refined(
            self.name,
            self.source,
            lambda nodes: integrals.integral(
                self.source, nodes, arrays, name=self.name, visit=visit, log=log
            ),
            log,
        )

    def _bisect(self, q: Array) -> Array:
        try:
            centre, scale = self._mean, jnp.sqrt(self._variance)
        except ValueError:
            shape = jnp.zeros(self.shape)
            centre = shape if self.rows is None else self.rows.fill(shape)
            scale = jnp.ones_like(centre)
        centre = jnp.where(jnp.isfinite(centre), centre, 0.0)
        scale = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, 1.0)

        def at(nodes: Any) -> Array:
            found = integrals.bisect(
                self.source, nodes, q, centre, scale, name=self.name, discrete=self.kind.discrete
            )
            check = integrals.integral(
                self.source, nodes, (found,), name=self.name, visit=integrals.cdf, log=False
            )
            return jnp.stack([found, found + (check[1] - check[0]), jnp.zeros_like(found)])

        # What is compared is the cumulative probability at the quantile, by two rules.
        return _refined(self.name, self.source, at, log=False, scale=0.1)


def _refined(
    name: str, source: Source, at: Callable[[Any], Array], log: bool, scale: float | None = None
) -> Array:
    """An integral by rules that get finer until a coarser one on the same nodes agrees."""
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(source))
    on_grid = source.dim <= 3
    for level in range(LEVELS):
        if traced:  # there is no looking at the result
            return at(fine_nodes(source.dim, 1))[0]
        found = at(fine_nodes(source.dim, level))
        fine, coarse, outermost = (np.asarray(x, float) for x in found)
        with np.errstate(invalid="ignore"):
            if log:
                apart = np.abs(fine - coarse)
                apart = np.where(np.isneginf(fine) & np.isneginf(coarse), 0.0, apart)
                cut = outermost > fine - 5.0
            else:
                size = np.nanmax(np.abs(fine), initial=0.0) if scale is None else scale
                apart, cut = np.abs(fine - coarse) / max(size, 1e-300), np.zeros(1, bool)
        # On a grid the error of the finer rule is the fourth power of that of the coarser one.
        close = (0.1 if log else 1e-3) if on_grid else (0.1 if log else 1e-2)
        worst = float(np.nanmax(apart, initial=0.0))
        if (worst <= close and not cut.any()) or not np.isfinite(worst):
            return found[0]
    warnings.warn(
        f"The predictive distribution of site '{name}' is an integral that the finest quadrature "
        f"does not settle: two rules differ by {worst:.2g}. The likelihood is much narrower than "
        "the posterior of f, or the data are far in its tail.",
        UserWarning,
        stacklevel=4,
    )
    return found[0]


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictive distributions by observed site.

    ``predictions["y"]`` is that of one site. Where the model observes one site, everything that a
    :class:`Prediction` has can be asked of this, too, as in ``fit.predict(X_new).mean``.

    Attributes:
      sites: the distributions by the name of their site.
    """

    sites: dict[str, Prediction]

    def __getitem__(self, name: str) -> Prediction:
        if name not in self.sites:
            raise KeyError(f"no site '{name}' to predict; there are {sorted(self.sites)}")
        return self.sites[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def items(self) -> Any:
        return self.sites.items()

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_") or not hasattr(Prediction, attribute):
            raise AttributeError(f"'Predictions' has no attribute '{attribute}'")
        if len(self.sites) > 1:
            first = next(iter(self.sites))
            raise AttributeError(
                f"The model has several sites to predict, {sorted(self.sites)}: name one, as in "
                f"predictions['{first}'].{attribute}."
            )
        return getattr(next(iter(self.sites.values())), attribute)

    def __repr__(self) -> str:
        lines = "\n".join(f"  {site!r}" for site in self.sites.values())
        return f"Predictions(\n{lines}\n)"


@full_precision(on_cpu=False)
def predict(fit: Fit, call: Call, num_hyper: int) -> Predictions:
    """Predictive distributions of a fit; see :meth:`numpyro_tsvgp.Fit.predict`."""
    # Filled before anything else is done with the arguments, so that all of it is shared.
    fill = filled(fit.model, call, {**fit.params, **fit.hyper_at(call)})
    return predictions(make_predictor(fit, fill.call, num_hyper), fill)


@full_precision(on_cpu=False)
def predictions(predictor: Predictor, fill: Filled) -> Predictions:
    """Predictive distributions of all sites that hold data.

    Args:
      predictor: a fit that is ready to predict.
      fill: arguments of the model, without the data.

    Returns:
      The distributions.

    Raises:
      ValueError: if there is none, or one that is not an integral over marginals of GPs.
    """
    marginals = predictor.marginals(fill.call)
    targets = find_targets(predictor, fill.call)
    assert predictor.model is not None
    source = Source(
        call=targets.call,
        parameters=predictor.parameters,
        hyper=predictor.draws(),
        marginals=marginals,
        model=predictor.model,
        coordinates=targets.coordinates,
        dim=targets.dim,
    )
    if fill.rows is None:
        return Predictions(
            {n: Prediction(n, integrals.kind_of(source, n), source) for n in targets.names}
        )
    few = first_rows(marginals, fill.rows)
    asked = dataclasses.replace(source, call=fill.given, marginals=few)
    sites = {}
    for name in targets.names:
        kind, more = (integrals.kind_of(x, name) for x in (asked, source))
        rows = _rows_of(kind, more)
        if rows is None:
            return predictions(predictor, fill.unfilled())
        sites[name] = Prediction(name, kind, source, rows)
    return Predictions(sites)


def _rows_of(few: Kind, more: Kind) -> Rows | None:
    """Where a site has rows, of which one kind has few and the other more; None if not along one
    axis that its numbers lie along."""
    pairs = list(zip(few.shape, more.shape, strict=True))
    axes = [i for i, (a, b) in enumerate(pairs) if a != b]
    if len(axes) != 1 or axes[0] >= len(pairs) - few.event_dim:
        return None
    return Rows(axes[0], *pairs[axes[0]])
