"""Data and inputs of another scale than the prior expects are told of, others are not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_tsvgp import GP, kernels
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import read
from numpyro_tsvgp.model.scale_checks import check_scales

N = 20
X = np.linspace(0.0, 3.0, N)
Y = np.sin(2.0 * X)


def model(X, y=None, level=0.0, kernel=kernels.RBF):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, level)) if level else 0.0
    f = numpyro.sample("f", GP(kernel(lengthscale), X, mean=level))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def look(model, *args, **kwargs):
    call = Call(args, kwargs).on_device()
    check_scales(model, read(model, call, key=jax.random.key(0)), call)


DATA = r"The data of site 'y' are far from what the prior expects.*values such as {}.*standardised"
INPUTS = r"The inputs X of GP site 'f' are {} for the lengthscales.*X\.std\(0\)"


@pytest.mark.parametrize("scale, level", [(1e3, 0.0), (1.0, 1e4), (1e8, 0.0)])
def test_data(scale, level):
    with pytest.warns(UserWarning, match=DATA.format("")):
        look(model, X, level + scale * Y)


@pytest.mark.parametrize("factor, what", [(1e6, "far apart"), (1e-6, "close together")])
def test_inputs(factor, what):
    with pytest.warns(UserWarning, match=INPUTS.format(what)):
        look(model, factor * X, Y)
    with pytest.warns(UserWarning, match=INPUTS.format(what)):
        look(model, factor * np.stack([X, X[::-1] ** 2], 1), Y)


def groups(X, y=None):
    b = numpyro.sample("b", GP(kernels.Group(), jnp.arange(float(N))))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(b, 0.1), obs=y)


def outputs(X, y=None):
    """A column of levels, which cannot be stretched."""
    kernel = kernels.Coregion(jnp.ones((3, 1)), active_dims=0) * kernels.RBF(1.0, active_dims=1)
    f = numpyro.sample("f", GP(kernel, jnp.stack([jnp.arange(N) % 3, jnp.asarray(X)], 1)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def counts(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.mark.parametrize(
    "model, args, options",
    [
        (model, (X, 5.0 * Y), {}),
        (model, (X, 30.0 * Y), {}),  # an order of magnitude is what hyperparameters are for
        (model, (X, 1000.0 + Y), {"level": 1000.0}),  # a level with a prior of its own
        (model, (20.0 * X, Y), {}),
        (model, (0.05 * X, Y), {}),
        (model, (1e6 * X, Y), {"kernel": lambda scale: kernels.Constant(scale)}),
        (groups, (X, Y), {}),
        (outputs, (X, Y), {}),
        (counts, (X, np.full(N, 500.0)), {}),
    ],
)
def test_what_is_left_alone(model, args, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look(model, *args, **options)
