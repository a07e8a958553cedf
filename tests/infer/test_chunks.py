"""Full-batch updates in blocks of rows: the same numbers, where it is proven that they are."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
from numpyro_tsvgp.infer.em.chunks import plan_of
from numpyro_tsvgp.model.arguments import Call

N, M = 101, 6  # a prime number of rows: some are left over
RNG = np.random.RandomState(0)
X = jnp.asarray(RNG.rand(N))
Y = jnp.asarray(RNG.poisson(np.exp(1.0 + np.sin(7.0 * X))))
Z = np.linspace(0.0, 1.0, M)
BUDGET = 6 * M * 8 * 20  # room for twenty rows


def counts(X, y=None):
    """A mean with a parameter, a prior, and a term that belongs to no row."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    level = numpyro.param("level", 0.1)
    f = numpyro.sample("f", GP(kernels.RBF(0.3, variance), X, mean=lambda x: level + 0.0 * x))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    numpyro.factor("penalty", -0.1 * level**2)


def batch(X, y=None):
    """Rows that are a batch of a thousand."""
    f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
    with numpyro.plate("data", 1000, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def classes(X, y=None):
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=jnp.minimum(y, 2))


def spread(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
    g = numpyro.sample("g", GP(kernels.RBF(0.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=1.0 * y)


def make(model, budget, **options):
    svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), optax.adam(0.01), **options)
    svi.memory_budget = budget
    return svi


def updated(svi):
    state = svi.init(jax.random.key(0), X, Y)
    update = jax.jit(svi.update)
    for _ in range(2):
        state, loss = update(state, X, Y)
    return state, loss


@pytest.mark.parametrize(
    "model, options",
    [
        (counts, {}),
        pytest.param(counts, {"e_steps": 2, "m_steps": 2}, marks=pytest.mark.slow),
        pytest.param(batch, {}, marks=pytest.mark.slow),
        pytest.param(classes, {}, marks=pytest.mark.slow),
        pytest.param(spread, {}, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_rows_give_the_update_of_all_rows(model, options):
    svi, chunked = make(model, 2**30, **options), make(model, BUDGET, **options)
    state, loss = updated(svi)
    new, new_loss = updated(chunked)
    plan = plan_of(chunked, new, Call((X, Y), {}))
    assert plan.blocks >= 6 and plan.rest is not None
    np.testing.assert_allclose(new_loss, loss, rtol=1e-11)
    if options:
        bound = svi.evaluate(state, X, Y)
        np.testing.assert_allclose(chunked.evaluate(new, X, Y), bound, rtol=1e-11)
    params, found = svi.get_params(state), chunked.get_params(new)
    for name, value in params.items():
        scale = jnp.abs(value).max()
        np.testing.assert_allclose(found[name], value, atol=1e-9 * scale, rtol=1e-9)


def standardised(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), (X - X.mean()) / X.std()))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def scaled_by_all(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f) * jnp.max(X)), obs=y)


def of_fixed_size(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def kernel_of_the_data(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(X.std()), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def shifted(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), jnp.roll(X, 1)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.mark.parametrize(
    "model",
    [
        standardised,
        of_fixed_size,
        pytest.param(scaled_by_all, marks=pytest.mark.slow),
        pytest.param(kernel_of_the_data, marks=pytest.mark.slow),
        pytest.param(shifted, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_mixes_rows_is_not_split(model):
    svi = make(model, BUDGET)
    state = svi.init(jax.random.key(0), X, Y)
    assert plan_of(svi, state, Call((X, Y), {})) is None


@pytest.mark.slow
def test_memory_grows_by_copies_of_the_data_alone():
    few, many = 40_000, 160_000

    def growth(budget):
        """Bytes of temporary memory for each further row."""
        svi = make(counts, budget)
        state = svi.init(jax.random.key(0), X, Y)
        found = []
        for rows in (few, many):
            x, y = jnp.linspace(0.0, 1.0, rows), jnp.ones(rows, int)
            compiled = jax.jit(svi.update).lower(state, x, y).compile()
            found.append(compiled.memory_analysis().temp_size_in_bytes)
        return (found[1] - found[0]) / (many - few)

    a_row = 16  # bytes of x and y
    assert growth(2**21) < 3 * a_row  # blocks are the data in another order
    assert growth(2**40) > M * 8 * 6  # features, several times
