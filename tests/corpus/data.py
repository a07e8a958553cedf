"""Data and small models that several entries share."""

import dense
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from answers import Prior
from numpyro.distributions import constraints
from scipy import special

from numpyro_tsvgp import GP, kernels

# ---- data ------------------------------------------------------------------------------------

N = 20
RNG = np.random.RandomState(0)
X = np.sort(RNG.rand(N))
TRUTH = 1.5 * np.sin(7.0 * X)
SCALE = 0.25  # the lengthscale of everything that has none of its own
K = dense.rbf(X, X, SCALE)
F = Prior({"f": K})
NOISE = 0.3
Y = TRUTH + NOISE * RNG.randn(N)
COUNTS = RNG.poisson(np.exp(TRUTH))
BINARY = (RNG.rand(N) < special.expit(2 * TRUTH)).astype(int)
POSITIVE = RNG.gamma(2.0, np.exp(0.7 * TRUTH) / 2.0)
SHARES = RNG.beta(6 * special.expit(TRUTH), 6 * special.expit(-TRUTH))
ORDINAL = np.digitize(Y, [-0.8, 0.6])
GROUPS = np.arange(N) % 5
SEEN = np.arange(N) % 4 != 1
MEAN = TRUTH + 2.0


def positive(name, value):
    return numpyro.param(name, value, constraint=constraints.positive)


def function(X, name="f", scale=SCALE, variance=1.0, **options):
    return numpyro.sample(name, GP(kernels.RBF(scale, variance), X, **options))


def data(X):
    return numpyro.plate("data", X.shape[0])


def likelihood(distribution, name):
    """A model of one function and the given distribution of y."""

    def model(X, y=None):
        f = function(X)
        with data(X):
            numpyro.sample("y", distribution(f), obs=y)

    model.__name__ = name
    return model


TIMES = np.linspace(0.0, 1.0, 8)
MEMBERS = np.arange(24) % 8
K_TIMES = dense.rbf(TIMES, TIMES, 0.3, 4.0)
GROUPED = 2.0 * np.sin(6.0 * TIMES)[MEMBERS] + 0.3 * RNG.randn(24)
DESIGN = np.eye(8)[MEMBERS]

TWO = np.stack([BINARY, (RNG.rand(N) < special.expit(3 * TRUTH + np.cos(9 * X))).astype(int)])

X_MANY = np.sort(RNG.rand(120))
COUNTS_MANY = RNG.poisson(np.exp(np.sin(7 * X_MANY)))

normal = likelihood(lambda f: dist.Normal(f, NOISE), "normal")
counts = likelihood(lambda f: dist.Poisson(jnp.exp(f)), "counts")

# The words that a likelihood of another kind is refused with.
READS_BOTH = r"one term of site '{}' reads both f\[\d+\] and f\[\d+\] of GP site 'f'.*Use NUTS"
