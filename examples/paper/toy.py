"""The toy problem of Figures 1 (left) and 2: thresholded noisy sinc, ten inducing inputs."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm
from numpyro.distributions import constraints

from numpyro_tsvgp import GP, kernels

_rng = np.random.RandomState(123)
X = _rng.rand(100, 1) * 2 - 1
Y = (np.sin(12 * X) / X + 0.2 * _rng.randn(100, 1) > 0).astype(float)[:, 0]
Z = np.linspace(X.min(), X.max(), 10)[:, None]


def model(X, y=None):
    variance = numpyro.param("variance", 0.6, constraint=constraints.positive)
    # The authors' jitter is absolute, ours relative to the variance.
    f = numpyro.sample("f", GP(kernels.RBF(0.5, variance), X, jitter=1e-6 / variance))
    with numpyro.plate("data", len(X)):
        # GPflow's probit link, which never quite says no.
        p = 1e-3 + (1 - 2e-3) * norm.cdf(f)
        numpyro.sample("y", dist.Bernoulli(probs=p), obs=y)


def bound_at(svi, state, variance):
    """The M-step's objective: the bound at another variance, with what the E-step left held."""
    free = {**state.optim_state, "variance": jnp.log(variance)}
    return -svi.evaluate(dataclasses.replace(state, optim_state=free), X, Y)
