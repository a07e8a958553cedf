"""Likelihoods that read functions through sums: found by the program, integrated along the sums."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from tiers import cases

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
from numpyro_tsvgp.gaussian.quadrature import (
    AlongSums,
    GaussHermite,
    Marginals,
    nodes_for,
    site_gradients,
)
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.read import read
from numpyro_tsvgp.model.sums import along_sums, reads_sums

N = 7
RNG = np.random.RandomState(0)
X = RNG.rand(N, 2)
GROUP = np.array([0, 2, 1, 1, 0, 2, 2])
COUNTS = RNG.poisson(2.0, N)
WEIGHTS = RNG.randn(3, 2)
TABLE = RNG.poisson(1.0, (3, N))


def model_of(likelihood, data=COUNTS, second=None):
    """Two GPs and a likelihood of their values."""

    def model(X):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X[:, 0]))
        u = numpyro.sample("u", second or GP(kernels.RBF(0.5), X[:, 1]))
        with numpyro.plate("data", N):
            numpyro.sample("y", likelihood(f, u), obs=data)

    return model


def mixture(X):
    weights = numpyro.param("weights", jnp.asarray(WEIGHTS))
    with numpyro.plate("functions", 2):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
    with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", N, dim=-1):
        rate = jax.nn.softplus(jnp.einsum("op,pn->on", weights, f))
        numpyro.sample("y", dist.Poisson(rate), obs=TABLE)


def two_sites(X):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), X[:, 0]))
    u = numpyro.sample("u", GP(kernels.RBF(0.5), X[:, 1]))
    with numpyro.plate("data", N), handlers.scale(scale=2.0):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + u)), obs=COUNTS)
        with handlers.mask(mask=COUNTS > 1):
            numpyro.sample("z", dist.StudentT(4.0, f - 0.5 * u, 0.7), obs=COUNTS)


def softmax(X):
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=COUNTS % 3)


groups = GP(kernels.Group(), jnp.arange(3))
SUMS = {
    "added": model_of(lambda f, u: dist.Poisson(jnp.exp(f + 2.0 * u - 0.3))),
    "logits": model_of(lambda f, u: dist.Bernoulli(logits=f - u), COUNTS > 1),
    "groups": model_of(
        lambda f, u: dist.NegativeBinomial2(jnp.exp(f + u[GROUP]), 3.0), second=groups
    ),
    "slopes": model_of(lambda f, u: dist.StudentT(4.0, f + X[:, 1] * u, 0.5)),
    "mixture": mixture,
    "two sites": two_sites,
}
OTHERS = {
    "a scale": model_of(lambda f, u: dist.Normal(f, jnp.exp(u))),
    "a sum and a scale": model_of(lambda f, u: dist.Normal(f + u, jnp.exp(u))),
    "a product": model_of(lambda f, u: dist.Poisson(jnp.exp(f * u))),
    "two links": model_of(lambda f, u: dist.Poisson(jnp.exp(f) + jnp.exp(u))),
    "a choice": model_of(lambda f, u: dist.Poisson(jnp.exp(jnp.where(f > 0, f, u)))),
    "two sums": model_of(lambda f, u: dist.Normal(f + u, jnp.exp(f - u))),
    "softmax": softmax,
}


def reading_of(model):
    call = Call((jnp.asarray(X),), {})
    return call, read(model, call, key=jax.random.key(0))


@pytest.mark.parametrize("name", OTHERS)
def test_what_reads_more_than_a_sum_is_seen(name):
    call, reading = reading_of(OTHERS[name])
    assert not reads_sums(OTHERS[name], reading, call, ())


@pytest.mark.parametrize("name", cases(SUMS, fast=list(SUMS)[:2]))
def test_integrals_along_sums_are_those_over_all_functions(name):
    """A grid over both functions, fine enough, gives the same value and the same sites."""
    model = SUMS[name]
    call, reading = reading_of(model)
    assert reads_sums(model, reading, call, ())
    rng = np.random.RandomState(1)
    q, axes, first = {}, {}, 0
    for gp, site in reading.gps.items():
        shape = (site.functions, site.rows)
        q[gp] = Marginals(jnp.asarray(rng.randn(*shape)), jnp.asarray(0.1 + 0.3 * rng.rand(*shape)))
        axes[gp] = np.arange(first, first + site.functions)
        first += site.functions
    assert first == 2

    @jax.jit
    def both(q):
        likelihood = along_sums(model, reading, call, ())
        assert isinstance(likelihood, AlongSums)
        line = nodes_for(GaussHermite(40), axes, 2, jax.random.key(0), along_sums=True)
        grid = nodes_for(GaussHermite(40), axes, 2, jax.random.key(0))
        return [site_gradients(likelihood, q, nodes) for nodes in (line, grid)]

    # Forty nodes integrate the bends of softplus, log1p and a Student's t to about this much.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), *both(q))


def test_a_fit_goes_along_sums():
    """One step of a fit has the bound of a grid, and the structure says how it was integrated."""
    model = SUMS["added"]
    svi = TSVGP(model, AutoDualGaussian(model), None)
    state = svi.init(jax.random.key(0), X)
    assert state.structure.reads_sums and state.structure.dim == 2
    programs = jax.make_jaxpr(svi.update)(state, X)
    assert "20,7" in str(programs).replace(" ", "") and "400,7" not in str(programs).replace(
        " ", ""
    )


@pytest.mark.slow
def test_weights_that_are_zero():
    """A sum of nothing has no variance; what it says of the functions is zero, not NaN."""
    model = model_of(lambda f, u: dist.Poisson(jnp.exp(0.0 * f + 0.0 * u)))
    call, reading = reading_of(model)
    q = {name: Marginals(jnp.ones((1, N)), jnp.ones((1, N))) for name in ("f", "u")}
    axes = {"f": np.array([0]), "u": np.array([1])}
    nodes = nodes_for(GaussHermite(4), axes, 2, jax.random.key(0), along_sums=True)
    _, found = site_gradients(along_sums(model, reading, call, ()), q, nodes)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0.0), found)
