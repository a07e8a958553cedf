"""Kernels of groups and categories against matrices, and what all kernels refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from numpyro_tsvgp import GP, inducing, kernels
from numpyro_tsvgp.kernels import Kernel

G = np.array([3, 1, 3, 2, 1])
H = np.array([1, 7, 3])
EQUAL = (G[:, None] == H).astype(float)
RNG = np.random.default_rng(0)
# Columns: a group, a covariate, another group.
X = np.stack([G, RNG.normal(size=5), [0, 0, 1, 0, 1]], 1)
Z = np.stack([H, RNG.normal(size=3), [0, 1, 1]], 1)
W = RNG.normal(size=(4, 2))
KAPPA = np.array([0.1, 0.2, 0.3, 0.0])
B = W @ W.T + np.diag(KAPPA)


# ---- groups ----------------------------------------------------------------------------------


def test_group():
    kernel = kernels.Group(0.5)
    np.testing.assert_array_equal(kernel(G, H), 0.5 * EQUAL)
    np.testing.assert_array_equal(kernel(G, G), 0.5 * (G[:, None] == G))
    np.testing.assert_array_equal(kernel(G, G.copy()), kernel(G, G))  # values, not objects
    np.testing.assert_array_equal(kernel(G[:, None], H[:, None]), 0.5 * EQUAL)
    np.testing.assert_array_equal(kernel.diag(G), np.full(5, 0.5))
    np.testing.assert_array_equal(kernel.noise(G), np.zeros(5))
    scale, matrix = kernel.scaled(G, H)
    assert scale == 0.5
    np.testing.assert_array_equal(matrix, EQUAL)
    np.testing.assert_array_equal(jax.jit(lambda k, a, b: k(a, b))(kernel, G, H), 0.5 * EQUAL)


def test_group_of_several_columns_and_of_some():
    both = EQUAL * (X[:, None, 2] == Z[:, 2])
    assert 0 < both.sum() < EQUAL.sum()
    np.testing.assert_array_equal(kernels.Group(active_dims=[0, 2])(X, Z), both)
    np.testing.assert_array_equal(kernels.Group(active_dims=0)(X, Z), EQUAL)
    np.testing.assert_array_equal(kernels.Group()(X, Z), np.zeros((5, 3)))
    np.testing.assert_array_equal(kernels.Group()(X, X.copy()), np.eye(5))


def test_batch_of_groups():
    variance = np.array([0.5, 2.0])
    kernel = kernels.Group(variance)
    np.testing.assert_array_equal(kernel(G, H), variance[:, None, None] * EQUAL)
    np.testing.assert_array_equal(kernel.diag(G), variance[:, None] * np.ones(5))
    assert GP(kernel, jnp.arange(3)).batch_shape == (2,)


def test_random_slopes():
    kernel = 2.0 * kernels.Group(active_dims=0) * kernels.Linear(active_dims=1)
    np.testing.assert_allclose(kernel(X, Z), 2.0 * EQUAL * np.outer(X[:, 1], Z[:, 1]))
    np.testing.assert_allclose(kernel.diag(X), np.diag(kernel(X, X)))
    np.testing.assert_array_equal(kernel.noise(X), np.zeros(5))


def test_group_has_no_derivative_in_the_inputs():
    kernel = kernels.Group(0.5) + kernels.Coregion(W, KAPPA)
    slopes = jax.grad(lambda z: kernel(G % 4.0, z).sum())(jnp.arange(3.0))
    np.testing.assert_array_equal(slopes, np.zeros(3))
    variance = jax.grad(lambda v: kernels.Group(v)(G, H).sum())(0.5)
    np.testing.assert_allclose(variance, EQUAL.sum())


def test_random_effects_are_independent_normals():
    def model(g, groups):
        tau = numpyro.deterministic("tau", 0.7)
        b = numpyro.sample("b", GP(tau**2 * kernels.Group(), jnp.arange(groups), jitter=0.0))
        return b[g]

    trace = handlers.trace(handlers.seed(model, 0)).get_trace(G, 4)
    b = trace["b"]["value"]
    expected = dist.Normal(0.0, 0.7).log_prob(b).sum()
    np.testing.assert_allclose(trace["b"]["fn"].log_prob(b), expected, rtol=1e-12)


def test_greedy_takes_one_input_of_each_group():
    with pytest.warns(UserWarning, match="3 inducing inputs instead of m = 5"):
        chosen = inducing.greedy(kernels.Group(), G, 5)
    assert sorted(chosen.tolist()) == [1.0, 2.0, 3.0]


# ---- categories ------------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", [KAPPA, 0.3, np.array([0.3])], ids=["vector", "number", "one"])
def test_coregion(kappa):
    matrix = W @ W.T + np.diag(np.broadcast_to(kappa, 4))
    kernel, levels = kernels.Coregion(W, kappa), np.array([2, 0, 0, 3])
    np.testing.assert_allclose(kernel(G, levels), matrix[np.ix_(G, levels)], rtol=1e-12)
    np.testing.assert_allclose(kernel(G, G), matrix[np.ix_(G, G)], rtol=1e-12)
    np.testing.assert_allclose(kernel(G, G.copy()), kernel(G, G))
    np.testing.assert_allclose(kernel.diag(G), np.diag(matrix)[G], rtol=1e-12)
    np.testing.assert_array_equal(kernel.noise(G), np.zeros(5))
    scale, part = kernel.scaled(G, levels)
    np.testing.assert_allclose(scale * part, kernel(G, levels))
    compiled = jax.jit(lambda k, a, b: k(a, b))(kernel, G, levels)
    np.testing.assert_allclose(compiled, kernel(G, levels), rtol=1e-12)


def test_coregion_of_a_column_with_another_kernel():
    kernel = kernels.Coregion(W, KAPPA, active_dims=0) * kernels.RBF(0.7, active_dims=1)
    expected = B[np.ix_(G, G)] * np.exp(-0.5 * np.subtract.outer(X[:, 1], X[:, 1]) ** 2 / 0.49)
    np.testing.assert_allclose(kernel(X, X), expected, rtol=1e-10)
    np.testing.assert_allclose(kernel.diag(X), np.diag(expected), rtol=1e-10)


def test_batch_of_coregions():
    scales = np.array([1.0, 2.0, 3.0])
    for kernel, expected in (
        (
            kernels.Coregion(scales[:, None, None] * W, KAPPA),
            scales[:, None, None] ** 2 * (W @ W.T),
        ),
        (kernels.Coregion(W[None], np.tile(KAPPA, (3, 1))), np.tile(W @ W.T, (3, 1, 1))),
    ):
        expected = (expected + np.diag(KAPPA))[:, G][:, :, G]
        np.testing.assert_allclose(kernel(G, G), expected, rtol=1e-12)
        np.testing.assert_allclose(
            kernel.diag(G), np.diagonal(expected, axis1=-2, axis2=-1), rtol=1e-12
        )


def test_coregion_is_learned():
    def total(W, kappa):
        return jnp.sum(jnp.asarray(VALUES) * kernels.Coregion(W, kappa)(G, G))

    def explicit(W, kappa):
        return jnp.sum(jnp.asarray(VALUES) * (W @ W.T + jnp.diag(kappa))[np.ix_(G, G)])

    VALUES = RNG.normal(size=(5, 5))
    found, expected = (jax.grad(f, (0, 1))(jnp.asarray(W), KAPPA) for f in (total, explicit))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, expected)


@pytest.mark.parametrize("level", [-1, 4, np.nan])
def test_a_level_that_does_not_exist(level):
    kernel, levels = kernels.Coregion(W, KAPPA), np.array([0.0, level])
    for evaluate in (lambda x: kernel(x, G), lambda x: kernel(G, x), kernel.diag):
        with pytest.raises(IndexError, match=r"not a level.* 0, \.\.\., 3"):
            evaluate(levels)
    compiled = np.asarray(jax.jit(kernel)(levels, G))
    assert np.isnan(compiled[1]).all() and np.isfinite(compiled[0]).all()


def test_coregion_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"W has shape \(4,\).*\(P, R\)"):
        kernels.Coregion(W[:, 0])
    with pytest.raises(ValueError, match="kappa has shape.*size 1 or 4"):
        kernels.Coregion(W, KAPPA[:3])
    with pytest.raises(ValueError, match="3 columns.*active_dims"):
        kernels.Coregion(W)(X, X)
    np.testing.assert_array_equal(kernels.Coregion([[1], [2]])([0, 1], [1]), [[2.0], [4.0]])


# ---- all kernels -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: kernels.RBF(-1.0), "RBF has the lengthscale -1.0"),
        (lambda: kernels.Matern32(1.0, jnp.array([1.0, -2.0])), "Matern32 has the variance"),
        (lambda: kernels.Linear([1.0, -1.0]), "Linear has the lengthscale"),
        (lambda: kernels.Constant(np.float32(-1)), "Constant has the variance"),
        (lambda: kernels.White(-1), "White has the variance -1"),
        (lambda: kernels.Group(-0.5), "Group has the variance"),
        (lambda: kernels.Coregion(W, -KAPPA), "Coregion has the kappa"),
        (lambda: kernels.Periodic(period=-1.0), "Periodic has the period"),
        (lambda: kernels.RationalQuadratic(alpha=-1.0), "RationalQuadratic has the alpha"),
        (lambda: kernels.Polynomial(offset=-1.0), "Polynomial has the offset"),
    ],
)
def test_negative_hyperparameters_are_refused(make, match):
    with pytest.raises(ValueError, match=f"{match}.*negative"):
        make()
    kernels.RBF(0.0, 0.0)  # at the boundary there is nothing to say


def test_what_is_computed_from_kernels_may_be_negative():
    kernel = kernels.RBF(0.5, 2.0) + kernels.Group(1.0)
    gradient = jax.grad(lambda k: -jnp.sum(k(G, G)))(kernel)
    assert isinstance(gradient, Kernel) and gradient.right.variance < 0
    assert jax.tree.map(jnp.negative, kernel).left.lengthscale == -0.5
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(kernel)]
    assert paths == [".left.lengthscale", ".left.variance", ".right.variance"]
    # Inside of a transformation there is no value to look at.
    assert jnp.isfinite(jax.jit(lambda v: kernels.RBF(1.0, v)(G, G))(-1.0)).all()


@pytest.mark.parametrize(
    ("columns", "same"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None), [0, 1, 2]),
        (slice(-1, None), 2),
        (slice(None, None, -2), [2, 0]),
        (slice(np.int64(0), 1), 0),
        (slice(1, 10), [1, 2]),
    ],
    ids=str,
)
def test_slices_of_columns(columns, same):
    for make in (kernels.RBF, kernels.Linear, kernels.Polynomial, kernels.Group):
        kernel, expected = make(active_dims=columns), make(active_dims=same)
        np.testing.assert_array_equal(kernel(X, Z), expected(X, Z))
        np.testing.assert_array_equal(kernel.diag(X), expected.diag(X))


def test_slices_are_static_and_name_what_they_miss():
    first, second, third = (kernels.RBF(active_dims=slice(i, 3)) for i in (1, 1, 2))
    structure = jax.tree.structure
    assert hash(structure(first)) == hash(structure(second))
    assert structure(first) == structure(second) != structure(third)
    # A slice is not the tuple of its limits.
    assert structure(first) != structure(kernels.RBF(active_dims=[1, 3]))
    assert "slice(1, 3, None)" in repr(first)
    evaluate = jax.jit(lambda k: k(X, Z))
    np.testing.assert_allclose(evaluate(third), kernels.RBF(active_dims=2)(X, Z))
    np.testing.assert_allclose(evaluate(first), kernels.RBF(active_dims=[1, 2])(X, Z))
    with pytest.raises(IndexError, match=r"slice\(5, None, None\) names none of the 3 columns"):
        kernels.RBF(active_dims=slice(5, None))(X, Z)


def test_variances_for_each_column_of_a_linear_kernel():
    v = np.array([0.5, 2.0, 1.5])
    expected = (X * v) @ Z.T
    np.testing.assert_allclose(kernels.Linear(lengthscale=v**-0.5)(X, Z), expected, rtol=1e-12)
    assert kernels.Linear(variance=v)(X, Z).shape == (3, 5, 3)
