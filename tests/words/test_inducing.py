"""Choices of inducing inputs against brute force, and what each of them promises."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tsvgp import inducing, kernels

KEY = jax.random.key(0)
CENTRES = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0], [30.0, 5.0]])


@pytest.fixture
def X():
    return np.random.default_rng(0).normal(size=(60, 2))


@pytest.fixture
def blobs():
    rng = np.random.default_rng(1)
    return np.concatenate([c + 0.3 * rng.normal(size=(40, 2)) for c in CENTRES])


def inertia(X, Z):
    return np.sum(np.min(np.sum((X[:, None] - np.asarray(Z)[None]) ** 2, -1), 1))


def rows(Z):
    return {tuple(row) for row in np.asarray(Z).reshape(len(Z), -1).tolist()}


class TestKmeans:
    @pytest.mark.parametrize("seed", range(3))
    def test_finds_separated_blobs(self, blobs, seed):
        Z = np.asarray(inducing.kmeans(jax.random.key(seed), blobs, 5))
        assert Z.shape == (5, 2)
        means = blobs.reshape(5, 40, 2).mean(1)
        nearest = np.argmin(np.sum((means[:, None] - Z) ** 2, -1), 1)
        np.testing.assert_allclose(Z[nearest], means, rtol=1e-12, atol=1e-12)

    def test_inertia_decreases(self, X):
        values = [inertia(X, inducing.kmeans(KEY, X, 8, num_iters)) for num_iters in (0, 1, 3, 30)]
        assert values[0] > values[1] > values[2] >= values[3]
        # It stops at a fixed point of Lloyd's iteration: every centre is the mean of its points.
        Z = np.asarray(inducing.kmeans(KEY, X, 8, 100))
        own = np.argmin(np.sum((X[:, None] - Z) ** 2, -1), 1)
        np.testing.assert_allclose(Z, [X[own == j].mean(0) for j in range(8)], atol=1e-12)

    def test_seeds_are_rows(self, X):
        Z = np.asarray(inducing.kmeans(KEY, X, 8, num_iters=0))
        distances = np.sum((X[:, None] - Z) ** 2, -1)
        assert (distances.min(0) < 1e-28).all() and len(rows(Z)) == 8

    def test_blocks_do_not_matter(self, X, monkeypatch):
        whole = inducing.kmeans(KEY, X, 8)
        monkeypatch.setattr(inducing, "_BLOCK_ENTRIES", 8 * 7)  # 60 rows in blocks of 7
        np.testing.assert_allclose(inducing.kmeans(KEY, X, 8), whole, rtol=1e-12, atol=1e-14)

    def test_seeding_from_a_sample(self, blobs, monkeypatch):
        monkeypatch.setattr(inducing, "_SEEDING_ROWS", 50)
        assert inertia(blobs, inducing.kmeans(KEY, blobs, 5)) < 0.2 * len(blobs)

    def test_empty_clusters_move_to_the_farthest_points(self):
        # All points are nearest to the first centre; the others are empty.
        X = jnp.array([[0.0], [0.1], [5.0], [-7.0]])
        Z = jnp.array([[0.0], [100.0], [200.0]])
        moved = np.sort(np.asarray(inducing._lloyd(X, Z, 1, 2)).ravel())
        np.testing.assert_allclose(moved, [-7.0, np.mean(X), 5.0])

    def test_vector_inputs_types_and_determinism(self, X):
        x = X[:, 0].astype(np.float32)
        Z = inducing.kmeans(KEY, x, 4)
        assert Z.shape == (4,) and Z.dtype == jnp.float32
        np.testing.assert_array_equal(Z, inducing.kmeans(KEY, x, 4))
        np.testing.assert_array_equal(Z, inducing.kmeans(KEY, x[:, None], 4)[:, 0])

    def test_as_few_or_as_many_centres_as_there_can_be(self):
        Z = inducing.kmeans(KEY, np.arange(5), 1)
        assert Z.tolist() == [2.0] and Z.dtype == jnp.float64
        np.testing.assert_allclose(np.sort(inducing.kmeans(KEY, np.arange(5), 5)), np.arange(5))

    def test_large_offset_in_float32(self, blobs):
        shifted = (blobs + 1e4).astype(np.float32)
        assert inertia(shifted.astype(float), inducing.kmeans(KEY, shifted, 5)) < 0.2 * len(blobs)

    def test_repeated_rows_warn(self):
        with pytest.warns(UserWarning, match="only 2 distinct centres for m = 3"):
            inducing.kmeans(KEY, [1.0, 1.0, 2.0, 2.0], 3)


def pivoted_cholesky(K, m):
    """Pivots by the definition: the largest conditional variance, by solving."""
    chosen = []
    for _ in range(m):
        variance = np.diag(K).copy()
        if chosen:
            k = K[:, chosen]
            variance -= np.sum(k * np.linalg.solve(K[np.ix_(chosen, chosen)], k.T).T, 1)
        chosen.append(int(np.argmax(variance)))
    return chosen


class TestGreedy:
    @pytest.mark.parametrize(
        "kernel",
        [
            1.5 * kernels.Matern32([0.5, 1.0]) + kernels.Linear(2.0),
            kernels.RBF(0.7, active_dims=0) * kernels.Matern12(2.0),
            kernels.RBF(0.5) + kernels.White(0.1),  # noise shared by a row with itself alone
        ],
        ids=["sum", "product", "white"],
    )
    def test_against_brute_force(self, kernel, X):
        expected = X[pivoted_cholesky(np.asarray(kernel(X, X)), 15)]
        np.testing.assert_array_equal(inducing.greedy(kernel, X, 15), expected)

    def test_is_nested_and_explains_more(self, X):
        kernel = kernels.Matern52(0.8)
        K = np.asarray(kernel(X, X))

        def left(Z):
            """Trace of what the rows Z of X do not explain."""
            chosen = [int(np.flatnonzero((z == X).all(1))[0]) for z in np.asarray(Z)]
            k = K[:, chosen]
            return np.trace(K - k @ np.linalg.solve(K[np.ix_(chosen, chosen)], k.T))

        Z = inducing.greedy(kernel, X, 20)
        np.testing.assert_array_equal(inducing.greedy(kernel, X, 5), Z[:5])
        traces = [left(Z[:m]) for m in (1, 5, 10, 20)]
        assert (np.diff(traces) < 0).all()
        assert traces[-1] < min(left(inducing.subset(jax.random.key(i), X, 20)) for i in range(5))

    def test_never_forms_the_full_matrix(self):
        X = jnp.zeros((321, 2))
        program = str(jax.make_jaxpr(inducing.pivots, static_argnums=2)(kernels.RBF(), X, 5))
        assert "5,321]" in program and "321,321" not in program

    def test_stops_at_duplicates(self):
        X = np.repeat(np.array([[0.0, 1.0], [2.0, 0.0], [4.0, 1.0]]), 5, axis=0)
        with pytest.warns(UserWarning, match="greedy found 3 inducing inputs instead of m = 6"):
            Z = inducing.greedy(kernels.RBF(), X, 6)
        assert rows(Z) == rows(X)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_no_duplicates_among_many(self, dtype):
        x = np.repeat(np.random.default_rng(3).uniform(0, 10, 40), 4).astype(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may or may not stop early
            Z = inducing.greedy(kernels.RBF(1.0), x, 60)
        assert Z.dtype == dtype and len(rows(Z)) == len(Z) <= 40

    def test_finite_rank(self, X):
        with pytest.warns(UserWarning, match="greedy found 2 "):
            assert inducing.greedy(kernels.Linear(), X, 10).shape == (2, 2)

    def test_foreign_kernels_and_vectors(self):
        x = np.linspace(0.0, 4.0, 9)
        expected = [0.0, 4.0, 2.0]
        assert inducing.greedy(kernels.RBF(), x, 3).tolist() == expected

        def function(X1, X2):
            return jnp.exp(-0.5 * (X1[:, None] - X2[None, :]) ** 2)

        assert inducing.greedy(function, x, 3).tolist() == expected
        tinygp = pytest.importorskip("tinygp")
        assert inducing.greedy(tinygp.kernels.ExpSquared(1.0), x, 3).tolist() == expected

    def test_errors(self, X):
        with pytest.raises(ValueError, match=r"one kernel.*batch of shape \(3,\)"):
            inducing.greedy(kernels.RBF(variance=np.ones(3)), X, 2)
        with pytest.raises(TypeError, match="cannot make a kernel"):
            inducing.greedy(None, X, 2)


class TestSubset:
    def test_rows_without_repetition(self, X):
        Z = inducing.subset(KEY, X, 20)
        assert Z.shape == (20, 2) and len(rows(Z)) == 20 and rows(Z) <= rows(X)
        np.testing.assert_array_equal(Z, inducing.subset(KEY, X, 20))
        assert rows(Z) != rows(inducing.subset(jax.random.key(1), X, 20))
        assert rows(inducing.subset(KEY, X, 60)) == rows(X)

    def test_equal_rows_count_once(self):
        X = np.repeat(np.arange(12.0).reshape(6, 2), 10, axis=0)
        assert rows(inducing.subset(KEY, X, 6)) == rows(X)
        with pytest.raises(ValueError, match="m = 7 inducing inputs.*only 6 distinct rows"):
            inducing.subset(KEY, X, 7)
        assert rows(inducing.subset(KEY, [0.0, -0.0, 1.0], 2)) == {(0.0,), (1.0,)}

    def test_vectors(self):
        Z = inducing.subset(KEY, np.arange(5), 3)
        assert Z.shape == (3,) and Z.dtype == jnp.float64 and len(rows(Z)) == 3


CHOICES = {
    "kmeans": lambda X, m: inducing.kmeans(KEY, X, m),
    "greedy": lambda X, m: inducing.greedy(kernels.RBF(), X, m),
    "subset": lambda X, m: inducing.subset(KEY, X, m),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES.keys())
def test_validation(choose, X):
    for m in (0, -1, 61):
        with pytest.raises(ValueError, match=f"between 1 and the number of rows of X, 60, got {m}"):
            choose(X, m)
    with pytest.raises(TypeError):
        choose(X, 2.5)
    with pytest.raises(ValueError, match=r"shape \(n,\) or \(n, d\)"):
        choose(X[None], 2)
    for bad in (np.nan, np.inf):
        X[3, 1] = bad
        with pytest.raises(ValueError, match="not finite"):
            choose(X, 2)
