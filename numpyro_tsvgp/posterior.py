"""From fitted sites to the posterior of a GP at any inputs: marginals and joint draws."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_tsvgp import features, moments, sites
from numpyro_tsvgp.distributions import GPPosterior
from numpyro_tsvgp.expectations import Marginals
from numpyro_tsvgp.extract import GPSite
from numpyro_tsvgp.features import Features, Prior
from numpyro_tsvgp.linalg import add_jitter, cholesky_of_residual
from numpyro_tsvgp.moments import Moments, WhitenedMoments
from numpyro_tsvgp.sites import PointSites, Posterior, TiedSites, Whitened

__all__ = [
    "Fitted",
    "Sites",
    "dual_parameters",
    "inducing_values",
    "joint",
    "marginals",
    "prior",
    "training_features",
    "without_data",
]

Sites = TiedSites | PointSites | Moments | WhitenedMoments
"""What a guide keeps of one GP."""

# Numbers held at once when marginals are computed at many inputs: latents * m * rows.
_CHUNK_ELEMENTS = 2**22


class Fitted(NamedTuple):
    """The parameters of one GP: inducing inputs, sites, and training inputs where needed.

    Without inducing inputs (t-VGP) every training input is one: ``inducing`` holds the training
    inputs and ``inputs`` is None. Tied sites need no training inputs either, nor do moments,
    which take the place of sites in q-SVGP.
    """

    inducing: Array
    sites: Sites
    inputs: Array | None

    @property
    def is_full(self) -> bool:
        return isinstance(self.sites, PointSites) and self.inputs is None

    @property
    def anchor(self) -> Array | None:
        """The inducing inputs that the sites were made at, if those can move."""
        return self.sites.anchor if isinstance(self.sites, TiedSites) else None


def prior(site: GPSite, fitted: Fitted, *, held: bool = False, departs: bool = False) -> Prior:
    """The prior at the inducing inputs and the hyperparameters of ``site``."""
    return features.prior(site.kernel, fitted.inducing, site.gp.jitter, held=held, departs=departs)


def training_features(site: GPSite, fitted: Fitted, prior: Prior, X: Array | None) -> Features:
    """Features at the training inputs, which without inducing inputs are the inducing inputs."""
    if fitted.is_full:
        return features.at_inducing(prior)
    assert X is not None  # only without inducing inputs are the training inputs not needed
    return features.at(site.kernel, fitted.inducing, X, prior)


def anchor_shift(site: GPSite, fitted: Fitted, prior: Prior) -> Array | None:
    r""":math:`(K_{Z_0 Z} - K_{Z Z}) L^{-\top}` where inducing inputs may have moved, or None."""
    Z, anchor = fitted.inducing, fitted.anchor
    if anchor is None:
        return None
    # A copy of Z: noise of a kernel, like jitter, belongs to an inducing value and moves with it,
    # so it must be in neither term.
    return (site.kernel(anchor, Z) - site.kernel(jnp.copy(Z), Z)) @ prior.inverse.mT


def anchor_covariance(site: GPSite, fitted: Fitted) -> Array:
    r""":math:`K_{Z_0 Z}` with the derivative of the jitter and the noise of :math:`K`, too."""
    Z, anchor, kernel = fitted.inducing, fitted.anchor, site.kernel
    assert anchor is not None
    raised = add_jitter(kernel(anchor, Z), site.gp.jitter, kernel.diag(Z))
    return raised + kernel.noise(Z)[..., None] * jnp.eye(Z.shape[0], dtype=raised.dtype)


def departure(site: GPSite, fitted: Fitted) -> Array | None:
    r"""A matrix whose derivative is that of :math:`K_{Z Z}` in its first argument alone, or None.

    Where the inducing inputs begin to move, minus it is that of :math:`K_{Z_0 Z} - K_{Z Z}`: the
    derivatives in the second argument and in hyperparameters cancel.
    """
    if fitted.anchor is None:
        return None
    kernel = lax.stop_gradient(site).kernel
    return kernel(fitted.inducing, lax.stop_gradient(fitted.inducing))


def whitened(site: GPSite, fitted: Fitted, prior: Prior) -> Whitened:
    """The sums over sites in the coordinates of the prior, wherever ``site`` has its inputs."""
    if isinstance(fitted.sites, Moments | WhitenedMoments):  # sites that would give them
        linear, quadratic = moments.natural(moments.posterior(fitted.sites, prior))
        identity = jnp.eye(linear.shape[-1], dtype=linear.dtype)
        return Whitened(linear, -2.0 * quadratic - identity)
    training = None
    if isinstance(fitted.sites, PointSites):
        training = training_features(site, fitted, prior, fitted.inputs)
    return sites.whiten(fitted.sites, prior, training, anchor_shift(site, fitted, prior))


def inducing_values(site: GPSite, fitted: Fitted, prior: Prior) -> Posterior:
    """The whitened posterior of the inducing values, wherever ``site`` has its inputs."""
    if isinstance(fitted.sites, Moments | WhitenedMoments):
        return moments.posterior(fitted.sites, prior)
    return sites.posterior(whitened(site, fitted, prior))


def without_data(fitted: Fitted) -> Fitted:
    """The same GP with sites of zero, whose posterior is the prior."""
    value = fitted.sites
    if isinstance(value, Moments | WhitenedMoments):
        identity = jnp.eye(value.loc.shape[-1], dtype=value.loc.dtype)[None]
        value = TiedSites(value.loc, value.scale_tril, identity)
    linear, quadratic = jnp.zeros_like(value.linear), jnp.zeros_like(value.quadratic)
    return fitted._replace(sites=value._replace(linear=linear, quadratic=quadratic))


def _posterior(site: GPSite, fitted: Fitted) -> tuple[Prior, Posterior]:
    p = prior(site, fitted)
    return p, inducing_values(site, fitted, p)


@jax.jit
def dual_parameters(site: GPSite, fitted: Fitted) -> tuple[Array, Array]:
    r"""The dual parameters :math:`\lambda_1 = L^{-\top}\xi`, :math:`\Lambda_2 = L^{-\top}GL^{-1}`.

    Args:
      site: the GP at any inputs.
      fitted: its fitted parameters.

    Returns:
      Arrays of shape ``batch + (m,)`` and ``batch + (m, m)``.
    """
    p = prior(site, fitted)
    xi, gram = whitened(site, fitted, p)
    m = xi.shape[-1]
    lambda_1 = jnp.einsum("...ij,...i->...j", p.inverse, xi)
    lambda_2 = p.inverse.mT @ gram @ p.inverse
    batch = site.batch_shape
    return lambda_1.reshape(*batch, m), lambda_2.reshape(*batch, m, m)


@jax.jit
def joint(site: GPSite, fitted: Fitted) -> GPPosterior:
    """The joint posterior of one GP at the inputs of ``site``.

    Args:
      site: the GP at the inputs to predict at.
      fitted: its fitted parameters.

    Returns:
      A distribution over values of the site's shape. Its covariance is factorised here, so draws
      from it are products.
    """
    p, q = _posterior(site, fitted)
    X, batch = site.gp.X, site.batch_shape
    at = features.at(site.kernel, fitted.inducing, X, p)
    residual = site.kernel(X, X) - at.w @ at.w.mT
    chol = cholesky_of_residual(residual, site.kernel.diag(X).mean(-1), site.gp.jitter)

    def shape(x: Array) -> Array:  # (k, ., .) to (., .) or batch + (., .)
        return x[0] if x.shape[0] == 1 else x.reshape(*batch, *x.shape[1:])

    mean = site.unflatten(site.loc + sites.means(q, at))
    inverse = q.inverse.reshape(*batch, *q.inverse.shape[1:])
    return GPPosterior(mean, shape(at.w), inverse, shape(chol))


@jax.jit
def marginals(site: GPSite, fitted: Fitted) -> Marginals:
    """Posterior mean and variance of one GP at each input of ``site``.

    The features are made in chunks of rows, so memory is bounded whatever the number of inputs.

    Args:
      site: the GP at the inputs to predict at.
      fitted: its fitted parameters.

    Returns:
      Mean and variance, each of the site's shape.
    """
    p, q = _posterior(site, fitted)
    X, n = site.gp.X, site.rows

    def at(X: Array) -> Marginals:
        return sites.marginals(q, features.at(site.kernel, fitted.inducing, X, p))

    chunk = max(_CHUNK_ELEMENTS // math.prod(q.mean.shape), 256)
    if n <= chunk:
        mean, variance = at(X)
    else:
        pad = -n % chunk
        padded = jnp.concatenate([X, jnp.broadcast_to(X[:1], (pad, *X.shape[1:]))])
        parts = lax.map(at, padded.reshape(-1, chunk, *X.shape[1:]))
        mean, variance = (jnp.moveaxis(v, 0, 1).reshape(-1, n + pad)[:, :n] for v in parts)
    return Marginals(site.unflatten(site.loc + mean), site.unflatten(variance))
