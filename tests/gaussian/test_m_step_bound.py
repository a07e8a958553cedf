"""The bound as an M-step differentiates it, in coordinates that are held, against the bound itself.

The reference differentiates everything, Cholesky factors included (``at_data``).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from numpyro_tsvgp import GP, kernels
from numpyro_tsvgp.gaussian.features import prior_at
from numpyro_tsvgp.gaussian.tied import MovingTied, Tied
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.model.read import GPSite

P, M, N = 2, 4, 7
Z, X = np.linspace(-1, 1, M), np.linspace(-1.2, 1.1, N)
HYPER = 5  # of the kernel: lengthscale, noise, variance; of the mean: intercept and slope


class Case(NamedTuple):
    """What the latent functions have of their own, and what the sites are."""

    own: str | None  # a lengthscale or a variance for each function; None for a shared kernel
    own_mean: bool
    moving: bool  # whether inducing inputs are learned
    fresh: bool  # whether E-steps have just been taken at the current hyperparameters


CASES = {
    "shared kernel, own means, still": Case(None, True, False, False),
    "shared kernel, shared mean, still, fresh": Case(None, False, False, True),
    "shared kernel, shared mean, moving": Case(None, False, True, False),
    "shared kernel, own means, moving, fresh": Case(None, True, True, True),
    "own lengthscales, own means, moving": Case("lengthscale", True, True, False),
    "own lengthscales, shared mean, moving, fresh": Case("lengthscale", False, True, True),
    "own variances, shared mean, moving": Case("variance", False, True, False),
    "own variances, own means, still": Case("variance", True, False, False),
    "own variances, own means, still, fresh": Case("variance", True, False, True),
}


def site_at(case, theta):
    """A GP with noise in its kernel that is not stationary, much jitter, and a mean function."""
    scales = np.array([[0.5], [0.8]]) if case.own == "lengthscale" else 0.6
    variance = np.array([1.3, 0.7]) if case.own == "variance" else 1.3
    kernel = kernels.RBF(scales * jnp.exp(theta[0]), 1.2)
    kernel = kernel + kernels.Linear(variance=0.3) + kernels.White(0.1 * jnp.exp(theta[1]))
    slope = np.array([[1.0], [-0.7]]) if case.own_mean else 1.0

    def mean(x):
        return theta[3] + slope * (0.4 + theta[4]) * jnp.sin(2 * x)

    return GPSite(GP(variance * jnp.exp(theta[2]) * kernel, X, mean, jitter=0.02), (P,))


def sites_made_at(case, theta):
    """Tied sites with arbitrary sums, in the coordinates of the prior at given hyperparameters."""
    rng = np.random.default_rng(3)
    linear, root = rng.standard_normal((P, M)), rng.standard_normal((P, M, M))
    site = site_at(case, theta)
    inducing = jnp.asarray(Z)
    process = site.process()
    inverse = prior_at(process, inducing).inverse
    fields = inducing, linear, root @ root.mT, inverse, site.mean_at(inducing)
    return MovingTied(*fields, anchor=inducing) if case.moving else Tied(*fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_forward_mode(name):
    """In kernel, mean, noise and inducing inputs, all at once; more than one derivative raises."""
    case = CASES[name]
    rng = np.random.default_rng(4)
    weights = rng.standard_normal((2, P, N))
    more = PointSites(rng.standard_normal((P, N)), rng.uniform(0.1, 1.0, (P, N)))
    made = sites_made_at(case, jnp.zeros(HYPER))
    hyper = jnp.array([0.1, -0.2, 0.3, 0.5, -0.3])
    theta = jnp.concatenate([hyper, 0.1 * rng.standard_normal(M)])

    def put(theta, made):
        """Sites at given hyperparameters, which may be those that they were made at."""
        to = made.inducing + theta[HYPER:] if case.moving else made.inducing
        moved = type(made)(**{**vars(made), "inducing": to})
        return moved, site_at(case, theta).process(moved)

    def score(bound):
        (mean, variance), kl = bound
        pull = jnp.sum(weights[0] * jnp.sin(mean)) + jnp.sum(weights[1] * jnp.log(variance))
        return pull + 0.7 * kl

    def after_e_step(theta):
        """What an E-step makes of the sites: constants."""
        kept, process = put(theta, made)
        at = kept.at_data(process)
        return lax.stop_gradient(at.keep(at.start().blend(more, at.features, 0.4)))

    def ours(theta):
        kept, process = put(theta, made)
        at = kept.at_data_for_gradient(process)
        return score(at.fresh_bound(after_e_step(theta)) if case.fresh else at.bound())

    def reference(theta, held=None):
        kept, process = put(theta, made)
        if case.fresh:  # from where the sites are now, inducing inputs and all else may move
            kept = type(held)(**{**vars(held), "inducing": kept.inducing})
            process = site_at(case, theta).process(kept)
        return score(kept.at_data(process).bound())

    @partial(jax.jit, static_argnums=0)
    def look(function, theta, *held):
        def of(theta):
            return function(theta, *held)

        return jax.value_and_grad(of)(theta)

    held = (jax.jit(after_e_step)(theta),) if case.fresh else ()
    found, expected = look(ours, theta), look(reference, theta, *held)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    direction = jnp.asarray(rng.standard_normal(theta.size))
    forward = jax.jit(lambda theta: jax.jvp(ours, (theta,), (direction,)))(theta)
    for a, b in zip(forward, (expected[0], expected[1] @ direction), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    # Not vacuous: each has a part in it, the mean too, and inducing inputs if they are learned.
    parts = np.abs(found[1]) > 1e-3
    assert parts[:HYPER].all() and (parts[HYPER:].all() if case.moving else not parts[HYPER:].any())
    for second in (jax.hessian, lambda f: jax.jacrev(jax.grad(f))):  # rather than a wrong one
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            jax.eval_shape(second(ours), theta)
