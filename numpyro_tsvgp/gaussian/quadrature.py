r"""Expected log-likelihoods under Gaussian marginals, and their gradients.

The log-likelihood arrives as one scalar function of all function values. Because it is a sum of
one term per data point, evaluating it at shifted and scaled copies of the marginals integrates
every point at once, and its gradient in the marginals holds every site:

.. math::
  E = \sum_i \mathbb{E}_{\mathcal{N}(m_i, v_i)} \log p(y_i \mid f), \qquad
  \alpha_i = \frac{\partial E}{\partial m_i}, \qquad
  \beta_i = -2 \frac{\partial E}{\partial v_i}.

Nothing here knows about NumPyro or about kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import ndtri

from numpyro_tsvgp.gaussian.linalg import cholesky_and_inverse

__all__ = [
    "AlongSums",
    "GaussHermite",
    "LogLikelihood",
    "Marginals",
    "Nodes",
    "Quadrature",
    "QuasiMonteCarlo",
    "SiteGradients",
    "choose_quadrature",
    "expect",
    "nodes_for",
    "site_gradients",
]

# Function values at nodes that are evaluated side by side, or, if those are fewer, nodes; more of
# them are visited in turn to bound the memory.
_VALUES_AT_ONCE = 2**19
_NODES_AT_ONCE = 64

LogLikelihood = Callable[[Mapping[str, Array]], Array]
"""A scalar function of the values ``{site: (latents, n)}`` of every GP."""


class Quadrature(Protocol):
    """A quadrature rule for the standard normal distribution in ``dim`` dimensions."""

    def nodes(self, key: Array, dim: int) -> tuple[Array, Array]:
        """Nodes of shape ``(size, dim)`` and weights of shape ``(size,)``."""
        ...


@dataclass(frozen=True)
class GaussHermite:
    """Gauss-Hermite quadrature, on a tensor grid when latent functions are coupled.

    It is exact when the log-likelihood is a polynomial of degree below ``2 * order``, so a
    Gaussian likelihood costs no accuracy.

    Args:
      order: the number of nodes in each dimension.

    Examples:
      >>> import jax
      >>> from numpyro_tsvgp.gaussian.quadrature import GaussHermite
      >>> nodes, weights = GaussHermite(3).nodes(jax.random.key(0), 2)
      >>> nodes.shape
      (9, 2)
      >>> round(float((weights * nodes[:, 0] ** 2).sum()), 6)
      1.0
    """

    order: int = 20

    def nodes(self, key: Array, dim: int) -> tuple[Array, Array]:
        del key  # the rule is deterministic
        x, w = np.polynomial.hermite_e.hermegauss(self.order)
        w = w / w.sum()
        grid = np.meshgrid(*[x] * dim, indexing="ij")
        weights = np.prod(np.meshgrid(*[w] * dim, indexing="ij"), axis=0)
        return jnp.asarray(np.stack([g.ravel() for g in grid], -1)), jnp.asarray(weights.ravel())


@dataclass(frozen=True)
class QuasiMonteCarlo:
    r"""A randomly shifted Kronecker lattice, for many coupled latent functions.

    The lattice :math:`u_s = \mathrm{frac}(s\,\phi + \mathrm{shift})`, with :math:`\phi` the
    generalised golden ratio, is mapped to the normal distribution, mirrored (so odd moments are
    exact) and made orthonormal (so second moments are exact, too). The rule thus integrates
    quadratic functions exactly, which for a softmax of ten classes is a sixth of the error that the
    lattice has without; with fewer nodes than four for each dimension, coordinates are only
    rescaled.

    Args:
      size: the number of nodes, an even number.

    References:
      M. Roberts, *The unreasonable effectiveness of quasirandom sequences*, 2018.
    """

    size: int = 128

    def nodes(self, key: Array, dim: int) -> tuple[Array, Array]:
        half = max(self.size // 2, 1)
        phi = 2.0
        for _ in range(64):  # the positive root of x^(dim+1) = x + 1
            phi = (1 + phi) ** (1 / (dim + 1))
        step = phi ** -np.arange(1.0, dim + 1)
        lattice = jnp.asarray((np.arange(half)[:, None] * step) % 1.0)
        u = (lattice + jax.random.uniform(key, (dim,), lattice.dtype)) % 1.0
        eps = jnp.finfo(u.dtype).eps
        z = ndtri(jnp.clip(u, eps, 1 - eps))
        if half >= 2 * dim:
            z = z @ cholesky_and_inverse(z.T @ z / half)[1].T
        else:  # too few for a regular covariance
            z = z / jnp.sqrt((z**2).mean(0))
        return jnp.concatenate([z, -z]), jnp.full((2 * half,), 0.5 / half, z.dtype)


def choose_quadrature(dim: int) -> Quadrature:
    """The default rule when at most ``dim`` latent functions meet in one likelihood term."""
    if dim <= 2:
        return GaussHermite(20)
    return GaussHermite(10) if dim == 3 else QuasiMonteCarlo()


class Nodes(NamedTuple):
    """Nodes of a rule, and the coordinate of them that each latent function uses.

    Attributes:
      axes: for every GP site the coordinate of each of its latent functions. Latent functions that
        never meet in one term share a coordinate.
      points: nodes, shape ``(size, dim)``.
      weights: their weights, shape ``(size,)``.
      line: nodes of the same rule in one dimension, shape ``(size, 1)``, and their weights, where
        the likelihood reads one sum of all functions (:class:`AlongSums`); else None.
    """

    axes: Mapping[str, np.ndarray]
    points: Array
    weights: Array
    line: tuple[Array, Array] | None = None


def nodes_for(
    rule: Quadrature | None,
    axes: Mapping[str, np.ndarray],
    dim: int,
    key: Array,
    *,
    along_sums: bool = False,
) -> Nodes:
    """The nodes of a rule, or of the default where the rule is None.

    Args:
      rule: a quadrature rule, or None for :func:`choose_quadrature`.
      axes: see :class:`Nodes`.
      dim: how many latent functions meet in one likelihood term at the most.
      key: key for rules with random nodes.
      along_sums: whether nodes in one dimension are wanted as well.

    Returns:
      The nodes.
    """

    def nodes(dim: int) -> tuple[Array, Array]:
        return (choose_quadrature(dim) if rule is None else rule).nodes(key, dim)

    return Nodes(axes, *nodes(dim), nodes(1) if along_sums else None)


class Marginals(NamedTuple):
    """Mean and variance of function values, per GP site of shape ``(latents, n)``."""

    mean: Array
    variance: Array


@dataclass(frozen=True, eq=False)
class AlongSums:
    r"""A log-likelihood whose terms read one sum :math:`c = b + \sum_p w_p f_p` of functions each.

    Its expectation under independent Gaussian marginals is one over the sums, whose variances are
    :math:`\sum_p w_p^2 v_p`.

    Attributes:
      everything: the log-likelihood as a function of the values ``{site: (latents, n)}``.
      sums: the sums as a function of the values, ``{name: (1, size)}``; linear, and each element
        reads one value of each latent function at the most.
      of_sums: the log-likelihood as a function of the sums.
    """

    everything: LogLikelihood
    sums: Callable[[Mapping[str, Array]], dict[str, Array]]
    of_sums: LogLikelihood

    def __call__(self, values: Mapping[str, Array]) -> Array:
        return self.everything(values)

    def marginals(self, marginals: Mapping[str, Marginals]) -> dict[str, Marginals]:
        """Mean and variance of the sums."""
        means = {name: q.mean for name, q in marginals.items()}
        variances = {name: q.variance for name, q in marginals.items()}
        mean, push = jax.linearize(self.sums, means)
        variance = jax.tree.map(jnp.zeros_like, mean)
        for name, q in means.items():
            for p in range(len(q)):
                # A tangent of ones in one function has the weights of the sums as its image, since
                # each reads one value of it.
                here = {k: jnp.zeros_like(m).at[p].set(k == name) for k, m in means.items()}
                weight = push(here)
                spread = push({k: here[k] * v for k, v in variances.items()})
                variance = {k: variance[k] + weight[k] * spread[k] for k in mean}
        # A sum whose weights are all zero has no variance, of whose root there is no derivative.
        least = {k: jnp.finfo(m.dtype).eps for k, m in mean.items()}
        return {k: Marginals(mean[k], jnp.maximum(variance[k], least[k])) for k in mean}


def expect(
    log_likelihood: LogLikelihood,
    marginals: Mapping[str, Marginals],
    nodes: Nodes,
    *,
    wanted: Any = None,
) -> Array:
    r"""The expected log-likelihood under independent Gaussian marginals.

    .. math:: E = \sum_s w_s \, \log p\big(y \mid m + \sqrt{v} \odot z_s\big)

    Args:
      log_likelihood: a scalar function of the values of every GP.
      marginals: mean and variance of every GP, each ``(latents, n)``.
      nodes: the nodes to evaluate it at.
      wanted: a boolean scalar, possibly traced: whether the value is wanted, or its gradient alone.
        The value can be the larger part of the cost, since it has logarithms where the gradient
        has none. None for both.

    Returns:
      The expectation, a scalar; zero where it is not wanted.

    Examples:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from numpyro_tsvgp.gaussian.quadrature import Marginals, expect, nodes_for
      >>> nodes = nodes_for(None, {"f": np.array([0])}, 1, jax.random.key(0))
      >>> q = {"f": Marginals(jnp.ones((1, 3)), jnp.full((1, 3), 0.5))}
      >>> square = lambda f: jnp.sum(f["f"] ** 2)
      >>> round(float(expect(square, q, nodes)), 5)
      4.5
    """

    if isinstance(log_likelihood, AlongSums) and nodes.line is not None:
        sums = log_likelihood.marginals(marginals)
        line = Nodes(dict.fromkeys(sums, np.zeros(1, int)), *nodes.line)
        return expect(log_likelihood.of_sums, sums, line, wanted=wanted)
    axes, points, weights, _ = nodes

    def values_at(marginals: Mapping[str, Marginals], nodes: Array) -> dict[str, Array]:
        """Function values at each node, ``(size, latents, n)``."""
        return {
            name: q.mean + jnp.sqrt(q.variance) * _coordinates(nodes, axes[name], q)[..., None]
            for name, q in marginals.items()
        }

    def chunk(free: Any, marginals: Mapping[str, Marginals], nodes: Array, weights: Array) -> Array:
        at_nodes: Any = jax.vmap(lambda f: function(f, *free))(values_at(marginals, nodes))
        return weights @ at_nodes

    def gradients(
        free: Any, marginals: Mapping[str, Marginals], nodes: Array, weights: Array
    ) -> tuple[Array, Any]:
        """The value of a chunk and its gradients, summed over nodes by products."""
        each = jax.vmap(jax.value_and_grad(lambda f, free: function(f, *free), (0, 1)), (0, None))
        value, (by_values, by_free) = each(values_at(marginals, nodes), free)
        by_marginals = {}
        for name, q in marginals.items():
            g = by_values[name]
            z = _coordinates(nodes, axes[name], q).T
            moments = weights.astype(g.dtype) * jnp.stack([jnp.ones_like(z), z], 1)
            by_mean, by_scale = jnp.einsum("pcs,spn->pcn", moments, g).swapaxes(0, 1)
            by_marginals[name] = Marginals(by_mean, by_scale / (2.0 * jnp.sqrt(q.variance)))
        by_free = jax.tree.map(lambda g: jnp.tensordot(weights.astype(g.dtype), g, 1), by_free)
        return weights @ value, (by_free, by_marginals)

    def over_chunks(function: Callable[..., Any]) -> Any:
        """The sum over all nodes of a function of one chunk of them."""
        size, values = points.shape[0], sum(q.mean.size for q in marginals.values())
        at_once = max(_NODES_AT_ONCE, _VALUES_AT_ONCE // values)
        if size <= at_once:
            return function(points, weights)
        # Equal chunks; the padding has weight zero.
        chunks = -(-size // at_once)
        pad = -size % chunks
        some_nodes = jnp.pad(points, ((0, pad), (0, 0))).reshape(chunks, -1, points.shape[1])
        some_weights = jnp.pad(weights, (0, pad)).reshape(chunks, -1)
        zero = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(function, some_nodes[0], some_weights[0]),
        )

        def add(total: Any, inputs: tuple[Array, Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, function(*inputs)), None

        return lax.scan(add, zero, (some_nodes, some_weights))[0]

    # The gradient is summed chunk by chunk together with the value, so that nothing of a chunk is
    # kept for, or computed anew in, a reverse pass.
    @jax.custom_jvp
    def integral(free: Any, marginals: Mapping[str, Marginals]) -> Array:
        def value() -> Array:
            return over_chunks(lambda *nodes: chunk(free, marginals, *nodes))

        if wanted is None:
            return value()
        return lax.cond(wanted, value, lambda: jnp.zeros_like(jax.eval_shape(value)))

    @integral.defjvp
    def integral_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
        value, grads = over_chunks(lambda *nodes: gradients(*primals, *nodes))
        if wanted is not None:  # what is not used is not computed
            value = integral(*primals)
        parts = jax.tree.map(lambda g, t: jnp.sum(g * t), grads, tangents)
        # Data in single precision give gradients in it, whatever the precision of the weights is.
        return value, jnp.stack(jax.tree.leaves(parts)).sum().astype(value.dtype)

    # What else the log-likelihood is differentiated in, such as a noise scale, is an argument too.
    function, free = jax.closure_convert(
        log_likelihood, {name: q.mean for name, q in marginals.items()}
    )
    return integral(free, dict(marginals))


def _coordinates(nodes: Array, axes: np.ndarray, q: Marginals) -> Array:
    """The coordinate of each node for each latent function, ``(size, latents)``."""
    return nodes[:, axes].astype(q.mean.dtype)


class SiteGradients(NamedTuple):
    """What the likelihood says about the marginals of one GP, each ``(latents, n)``."""

    alpha: Array
    beta: Array


def site_gradients(
    log_likelihood: LogLikelihood, marginals: Mapping[str, Marginals], nodes: Nodes
) -> tuple[Array, dict[str, SiteGradients]]:
    r"""The expected log-likelihood and its site gradients, of the very same quadrature.

    .. math::
      \alpha_i = \frac{\partial E}{\partial m_i}, \qquad
      \beta_i = -2 \frac{\partial E}{\partial v_i}

    Args:
      log_likelihood: a scalar function of the values of every GP.
      marginals: mean and variance of every GP, each ``(latents, n)``.
      nodes: the nodes to evaluate it at.

    Returns:
      The expectation and, for every GP, the pair ``(alpha, beta)``.
    """
    value, grads = jax.value_and_grad(lambda q: expect(log_likelihood, q, nodes))(dict(marginals))
    return value, {name: SiteGradients(g.mean, -2.0 * g.variance) for name, g in grads.items()}
