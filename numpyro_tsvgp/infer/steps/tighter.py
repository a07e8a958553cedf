"""Tighter bounds for inducing inputs, as objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_tsvgp.gaussian.quadrature import Marginals, expect
from numpyro_tsvgp.infer.steps.objective import Evaluated
from numpyro_tsvgp.model.likelihood import log_likelihood
from numpyro_tsvgp.model.read import read

if TYPE_CHECKING:
    from numpyro_tsvgp.model.arguments import Call
    from numpyro_tsvgp.model.read import Model, Reading
    from numpyro_tsvgp.model.structure import Structure

__all__ = ["TighterBound"]

# Values of the scale of the residual covariance that are tried; the best one counts.
_TRIED = 3
_PROBES = 3


@dataclass(frozen=True)
class TighterBound:
    r"""A tighter bound for inducing inputs: data also narrow what inducing values leave open.

    The usual sparse posterior has :math:`q(f \mid u) = p(f \mid u)`: given the inducing values u, f
    keeps its prior covariance R, whatever the data say. Other choices of :math:`q(f \mid u)` give
    lower bounds of the evidence too. With
    :math:`v_i = s_i + d_i` the marginal variances, of which :math:`d_i` is that of R:

    **One number.** :math:`q(f \mid u)` gets the covariance :math:`\rho R`, so that

    .. math::
      \mathcal{L} = \sum_i \mathbb{E}_{\mathcal{N}(m_i,\, s_i + \rho d_i)} \log p(y_i \mid f)
        - \mathrm{KL}(q(u) \,\|\, p(u)) - \frac n2 (\rho - \log \rho - 1),

    for any likelihood; n counts the data points of all latent functions. Where R is singular its
    rank would do in place of n, which is no smaller: the bound with n stays below. The number
    :math:`\rho \in (0, 1]` is the best of the fixed-point iteration :math:`\rho \leftarrow n / (n +
    \sum_i \beta_i d_i)`, and 1 if that is better. On a minibatch it is chosen on that batch.

    **Per point**, for a likelihood that is Gaussian in f with precisions :math:`\beta_i`:

    .. math::
      -\tfrac12 \sum_i \beta_i d_i \quad\text{becomes}\quad
      -\tfrac12 \sum_i \log(1 + \beta_i d_i) .

    The best covariance, :math:`(R^{-1} + \operatorname{diag} \beta)^{-1}`, gives :math:`-\tfrac12
    \log |I + \beta^{1/2} R \beta^{1/2}|`, and by Hadamard's inequality this is no smaller than
    the sum, which needs no n by n matrix.

    Both lie between the bound and the evidence, and are the bound without inducing inputs, where R
    is zero. E-steps and predictions stay what they are.

    Args:
      per_point: whether to use the second form. A likelihood that is not Gaussian in f is refused.

    Examples:
      >>> from numpyro_tsvgp import TighterBound
      >>> TighterBound(per_point=True)
      TighterBound(per_point=True)

    References:
      M. K. Titsias, *New bounds for sparse variational Gaussian processes*, ICML 2025.

      T. D. Bui, M. Ashman, R. E. Turner, *Tighter sparse variational Gaussian processes*, TMLR
      2025.
    """

    per_point: bool = False

    is_bound: ClassVar[bool] = False
    needs_parts: ClassVar[bool] = True
    needs_rows: ClassVar[bool] = False

    def refuses(
        self, model: Model, structure: Structure, reading: Reading, call: Call
    ) -> str | None:
        if not self.per_point or _is_gaussian(model, structure, reading, call):
            return None
        return (
            "the likelihood is not Gaussian in the values of the GPs: its second derivatives "
            "depend on them. Use TighterBound(), which has one number for all points"
        )

    def __call__(self, evaluated: Evaluated) -> Array:
        parts = evaluated.parts
        assert parts is not None  # an objective that needs them gets them
        rest = {name: q.variance - parts.explained[name] for name, q in evaluated.marginals.items()}
        tightened = _per_point if self.per_point else _one_number
        return tightened(evaluated, rest, parts.subsampling) - evaluated.divergence


def _per_point(evaluated: Evaluated, rest: Mapping[str, Array], subsampling: float) -> Array:
    """The expectation, corrected at each point."""

    def expected(marginals: Mapping[str, Marginals]) -> Array:
        return expect(evaluated.likelihood, marginals, evaluated.nodes)

    value, slopes = jax.value_and_grad(expected)(dict(evaluated.marginals))
    for name, d in rest.items():
        lost = -2.0 * slopes[name].variance * d / subsampling  # beta_i d_i
        value = value + 0.5 * subsampling * (lost - jnp.log1p(lost)).sum()
    return value


def _one_number(evaluated: Evaluated, rest: Mapping[str, Array], subsampling: float) -> Array:
    """The expectation with the best scale of the residual covariance, and what that costs."""
    n = subsampling * sum(d.size for d in rest.values())

    def value(rho: Any, marginals: Mapping[str, Marginals], rest: Mapping[str, Array]) -> Array:
        scaled = {
            name: Marginals(q.mean, q.variance - (1 - rho) * rest[name])
            for name, q in marginals.items()
        }
        expected = expect(evaluated.likelihood, scaled, evaluated.nodes)
        return expected - 0.5 * n * (rho - jnp.log(rho) - 1.0)

    still = lax.stop_gradient((dict(evaluated.marginals), dict(rest)))
    best = rho = jnp.ones((), evaluated.divergence.dtype)
    highest: Any = -jnp.inf
    for _ in range(_TRIED):
        found, slope = jax.value_and_grad(value)(rho, *still)
        best = jnp.where(found > highest, rho, best)
        highest = jnp.maximum(found, highest)
        # slope = -sum(beta d) / 2 - n (1 - 1 / rho) / 2
        lost = -2.0 * slope - n * (1.0 - 1.0 / rho)
        rho = n / (n + jnp.maximum(lost, 0.0))
    best = lax.stop_gradient(jnp.where(value(rho, *still) > highest, rho, best))
    return value(best, evaluated.marginals, rest)


def _is_gaussian(model: Model, structure: Structure, reading: Reading, call: Call) -> bool:
    """Whether the slope of the log-likelihood in f is linear, at several hyperparameters."""
    rng = np.random.default_rng(0)

    def draw(scale: float) -> dict[str, Array]:
        return {
            name: jnp.asarray(scale * rng.standard_normal((site.functions, site.rows)))
            for name, site in reading.gps.items()
        }

    @jax.jit
    def slopes(key: Array, *values: Mapping[str, Array]) -> list[Any]:
        here = read(model, call, key=key, first_rows=True)
        likelihood = log_likelihood(model, here, call, structure.below)
        return [jax.grad(likelihood)(v) for v in values]

    for i in range(_PROBES):
        a, b, zero = draw(1.0), draw(3.0), draw(0.0)
        both = jax.tree.map(jnp.add, a, b)
        found = slopes(jax.random.key(i), both, a, b, zero)
        for at_both, at_a, at_b, at_zero in zip(*map(jax.tree.leaves, found), strict=True):
            size = max(float(jnp.abs(x).max()) for x in (at_both, at_a, at_b))
            off = jnp.abs(at_both - at_a - at_b + at_zero).max()
            if not off <= 1e3 * jnp.finfo(off.dtype).eps * size:  # also where it is not finite
                return False
    return True
