"""Five models that stand for all others, their data, and fits of them that tests share.

================= ================================================= ============================
name              model                                             guide
================= ================================================= ============================
regression        Gaussian noise, exact after one step              no inducing inputs
labels            Bernoulli, a sampled variance                     tied sites, inputs learned
counts            Poisson, a mean function with a parameter         tied sites, inputs held
classes           softmax of three functions with one kernel        untied sites
spread            mean and log-scale of a Normal, two GPs           tied sites for each
================= ================================================= ============================

A process fits each of them once, however many tests ask for it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, TSVGPRunResult, kernels

N = 24
RNG = np.random.RandomState(0)
X = np.sort(RNG.rand(N))
X_NEW = np.array([-0.2, 0.1, 0.45, 0.8, 1.3])
Z = np.linspace(0.0, 1.0, 6)
TRUTH = np.sin(6.0 * X)
NOISE = 0.3


def regression(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def labels(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 0.5))
    f = numpyro.sample("f", GP(variance * kernels.Matern52(0.4), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def counts(X, y=None):
    level = numpyro.param("level", 0.5)
    f = numpyro.sample("f", GP(kernels.Matern32(0.4), X, mean=lambda x: level + 0.0 * x))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def classes(X, y=None):
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", GP(kernels.RBF(0.4), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


def spread(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
    g = numpyro.sample("g", GP(kernels.RBF(0.5), X, mean=-1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


class Canonical(NamedTuple):
    """A model with its data and how it is fitted."""

    model: Callable[..., None]
    y: np.ndarray
    guide: dict[str, Any]
    driver: dict[str, Any]
    steps: int


CANONICAL = {
    "regression": Canonical(
        regression,
        TRUTH + NOISE * RNG.randn(N),
        {},
        {"optim": None, "site_lr": 1.0},
        2,
    ),
    "labels": Canonical(
        labels,
        (RNG.rand(N) < 0.5 + 0.4 * TRUTH).astype(int),
        {"inducing": Z},
        {"optim": optax.adam(0.05)},
        60,
    ),
    "counts": Canonical(
        counts,
        RNG.poisson(np.exp(1.0 + TRUTH)),
        {"inducing": Z, "learn_inducing": False},
        {"optim": optax.adam(0.05)},
        60,
    ),
    "classes": Canonical(
        classes,
        (RNG.rand(N) * 3).astype(int),
        {"inducing": Z, "sites": "untied", "learn_inducing": False},
        {"optim": None},
        40,
    ),
    "spread": Canonical(
        spread,
        TRUTH + 0.3 * RNG.randn(N),
        {"inducing": Z, "learn_inducing": False},
        {"optim": None, "site_lr": 0.3},
        80,
    ),
}


@cache
def result(name: str) -> TSVGPRunResult:
    """The fit of a canonical model, converged in its sites."""
    model, y, guide, driver, steps = CANONICAL[name]
    svi = TSVGP(model, AutoDualGaussian(model, **guide), **driver)
    return svi.run(jax.random.key(0), steps, X, y, progress_bar=False)
