"""Fits of rows on four devices against fits on one; started by test_devices.py."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, loo, to_arviz

jax.config.update("jax_enable_x64", True)
N = 480  # and no other array is as long: the quadrature of two functions has 400 nodes
RNG = np.random.RandomState(0)
X = RNG.rand(N, 2)
Y = RNG.poisson(np.exp(1.0 + np.sin(7.0 * X[:, 0])))
Z = RNG.rand(6, 2)
KERNEL = kernels.Matern52(0.5)
SMALL = 6 * 6 * 8 * 100  # room for a hundred rows of one function


def one(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(variance * KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def classes(X, y=None):
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", GP(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=None if y is None else y % 3)


def two(X, y=None):
    f = numpyro.sample("f", GP(KERNEL, X))
    g = numpyro.sample("g", GP(0.3 * KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=None if y is None else 1.0 * y)


def by_index(X, y=None):
    data = numpyro.plate("data", X.shape[0], subsample_size=40)
    with data as rows:
        x, y = X[rows], y[rows]
    f = numpyro.sample("f", GP(KERNEL, x))
    with data:
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def fit(model, X, y, budget=2**30):
    svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), optax.adam(0.01))
    svi.memory_budget = budget
    return svi, svi.run(jax.random.key(0), 3, X, y, progress_bar=False)


def close(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        left, right = np.asarray(left), np.asarray(right)
        np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-10 * np.abs(left).max())


assert jax.device_count() == 4
auto = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
explicit = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Explicit,))


def on(mesh):
    sharding = NamedSharding(mesh, PartitionSpec("rows"))
    return jax.device_put(X, sharding), jax.device_put(Y, sharding)


for model, budget in ((one, 2**30), (one, SMALL), (classes, SMALL), (two, 2**30)):
    _, expected = fit(model, X, Y, budget)
    svi, found = fit(model, *on(auto), budget)
    close(expected.losses, found.losses)
    close(expected.params, found.params)
    call = found.fit.call
    assert call.args[0].sharding.spec == PartitionSpec("rows")
    close(svi.evaluate(expected.state, X, Y), svi.evaluate(found.state, *call.args))
    close(expected.fit.marginals(), found.fit.marginals())
    close(loo(expected.fit)["leverage"].values, loo(found.fit)["leverage"].values)
    text = svi.compiled_update.lower(found.state, call).compile().as_text()
    for moves in ("all-gather", "all-to-all", "collective-permute"):
        assert not re.search(rf"= .*\b{moves}(-start)?\(", text), (model, budget, moves)
    reduces = re.findall(r"= (.*)\ball-reduce(?:-start)?\(", text)
    assert 1 <= len(reduces) <= 6, len(reduces)
    assert not any(re.search(r"\[(480|\d+,480|480,\d+)\]", shape) for shape in reduces), reduces

tree = to_arviz(jax.random.key(1), found.fit, num_samples=20)
close(tree["posterior"]["f"].values, to_arviz(jax.random.key(1), expected.fit, num_samples=20)[
    "posterior"]["f"].values)  # fmt: skip
_, again = fit(two, *on(explicit))
close(expected.losses, again.losses)
try:
    jax.jit(svi.update)(found.state, *on(explicit))
except ValueError as error:
    assert "explicit axes" in str(error)
else:
    raise AssertionError("explicit axes went through")
_, expected = fit(by_index, X, Y)
_, found = fit(by_index, *on(auto))
close(expected.losses, found.losses)
batches = [(X[:240], Y[:240]), (X[240:], Y[240:])]
spread = NamedSharding(auto, PartitionSpec("rows"))
svi = TSVGP(one, AutoDualGaussian(one, inducing=Z), optax.adam(0.01))
runs = [
    svi.run(jax.random.key(0), 4, batches=batches, sharding=sharding, progress_bar=False)
    for sharding in (None, spread)
]
close(runs[0].losses, runs[1].losses)
try:
    svi.run(jax.random.key(0), 4, batches=[(X[:9], Y[:9])], sharding=spread, progress_bar=False)
except ValueError as error:
    assert "9 rows cannot be split evenly over 4 devices" in str(error)
else:
    raise AssertionError("nine rows went onto four devices")
bad = Y.astype(float)
bad[123] = np.nan
try:
    fit(one, on(auto)[0], jax.device_put(bad, spread))
except ValueError as error:
    assert "index 123" in str(error)
else:
    raise AssertionError("NaN went through")
print("done")
