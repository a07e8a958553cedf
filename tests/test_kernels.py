"""Kernels against formulas written out in loops, against tinygp, and at their edges."""

import math

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tsvgp import kernels
from numpyro_tsvgp.kernels import as_kernel

ARD = np.array([0.7, 1.3, 2.1])
PERIOD = np.array([1.7, 0.9, 3.0])


def radius(x, y, scale=ARD):
    return math.sqrt(sum((a - b) ** 2 / s**2 for a, b, s in zip(x, y, scale, strict=True)))


def dot(x, y, scale=ARD):
    return sum(a * b / s**2 for a, b, s in zip(x, y, scale, strict=True))


# A kernel with ARD lengthscales for d = 3, and its value at one pair of points.
FORMULAS = {
    "RBF": (kernels.RBF(ARD, 1.9), lambda x, y: 1.9 * math.exp(-(radius(x, y) ** 2) / 2)),
    "Matern12": (kernels.Matern12(ARD, 1.9), lambda x, y: 1.9 * math.exp(-radius(x, y))),
    "Matern32": (
        kernels.Matern32(ARD, 1.9),
        lambda x, y: 1.9 * (1 + 3**0.5 * radius(x, y)) * math.exp(-(3**0.5) * radius(x, y)),
    ),
    "Matern52": (
        kernels.Matern52(ARD, 1.9),
        lambda x, y: (
            1.9
            * (1 + 5**0.5 * radius(x, y) + 5 * radius(x, y) ** 2 / 3)
            * math.exp(-(5**0.5) * radius(x, y))
        ),
    ),
    "RationalQuadratic": (
        kernels.RationalQuadratic(ARD, 0.6, 1.9),
        lambda x, y: 1.9 * (1 + radius(x, y) ** 2 / 1.2) ** -0.6,
    ),
    "Periodic": (
        kernels.Periodic(ARD, PERIOD, 1.9),
        lambda x, y: (
            1.9
            * math.exp(
                -2
                * sum(
                    math.sin(math.pi * (a - b) / p) ** 2 / s**2
                    for a, b, p, s in zip(x, y, PERIOD, ARD, strict=True)
                )
            )
        ),
    ),
    "Cosine": (
        kernels.Cosine(ARD, 1.9),
        lambda x, y: (
            1.9
            * math.cos(2 * math.pi * sum((a - b) / s for a, b, s in zip(x, y, ARD, strict=True)))
        ),
    ),
    "Linear": (kernels.Linear(ARD, 1.9), lambda x, y: 1.9 * dot(x, y)),
    "Polynomial": (
        kernels.Polynomial(3, 0.4, ARD, 1.9),
        lambda x, y: 1.9 * (dot(x, y) + 0.4) ** 3,
    ),
    "Constant": (kernels.Constant(1.9), lambda x, y: 1.9),
}
SCALED = [name for name in FORMULAS if name != "Constant"]
STATIONARY = SCALED[:7]
formulas = pytest.mark.parametrize("name", FORMULAS)


@pytest.fixture
def X():
    return np.random.default_rng(0).normal(size=(7, 3))


@pytest.fixture
def Y():
    return np.random.default_rng(1).normal(size=(5, 3))


@jax.jit
def evaluate(kernel, X, Y):
    """All that a kernel says, in one program: eagerly, every operation is compiled on its own."""
    return kernel(X, Y), kernel(X, X), kernel.diag(X)


def brute(formula, X, Y):
    return np.array([[formula(x, y) for y in Y] for x in X])


@formulas
def test_formula(name, X, Y):
    kernel, formula = FORMULAS[name]
    cross, own, diagonal = evaluate(kernel, X, Y)
    np.testing.assert_allclose(cross, brute(formula, X, Y), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(own, brute(formula, X, X), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(diagonal, np.diag(brute(formula, X, X)), rtol=1e-12)
    if name in STATIONARY:  # to the last digit
        assert (np.diag(own) == 1.9).all() and (np.asarray(diagonal) == 1.9).all()


@formulas
def test_positive_semidefinite(name):
    X = np.random.default_rng(2).normal(size=(60, 3))
    K = np.asarray(jax.jit(lambda k: k(X, X))(FORMULAS[name][0]))
    np.testing.assert_allclose(K, K.T, rtol=1e-12, atol=1e-14)
    eigenvalues = np.linalg.eigvalsh(K)
    assert eigenvalues[0] > -1e-12 * eigenvalues[-1]


@formulas
def test_one_input_dimension(name):
    kernel = FORMULAS[name][0]
    if name != "Constant":
        kernel = type(kernel)(lengthscale=0.8)
    x, y = np.linspace(0, 1, 4), np.linspace(0.3, 2, 5)
    vectors, columns = evaluate(kernel, x, y), evaluate(kernel, x[:, None], y[:, None])
    assert [part.shape for part in vectors] == [(4, 5), (4, 4), (4,)]
    for vector, column in zip(vectors, columns, strict=True):
        np.testing.assert_allclose(vector, column, rtol=1e-14)


def test_integer_inputs_and_hyperparameters():
    X = np.arange(6).reshape(3, 2)
    for kernel in (kernels.RBF(2, 3), kernels.Linear(2), kernels.Polynomial(2, 1, 3)):
        K = kernel(X, X)
        assert K.dtype == jnp.float64
        np.testing.assert_allclose(K, kernel(X.astype(float), X.astype(float)))
    assert kernels.White(2)(X, X).dtype == kernels.Constant(2)(X, X).dtype == jnp.float64


@formulas
def test_float32_stays_float32(name):
    kernel = FORMULAS[name][0]
    kernel = type(kernel)() if name != "Constant" else kernels.Constant(2.0)
    X = jnp.ones((3, 2), jnp.float32)
    kernel = 2.0 * kernel + 1.0
    K, _, diagonal = jax.eval_shape(evaluate, kernel, X, X)
    assert K.dtype == diagonal.dtype == jnp.float32
    assert jax.eval_shape(lambda: kernel(X, X)).dtype == jnp.float32


@pytest.mark.parametrize("name", SCALED)
def test_batch(name, X, Y):
    cls = type(FORMULAS[name][0])
    scales = np.random.default_rng(3).uniform(0.5, 2.0, size=(4, 3))
    variances = np.arange(1.0, 5.0)
    isotropic = cls(lengthscale=scales[:, :1], variance=variances)
    ard = cls(lengthscale=scales, variance=2.0)
    shared = cls(lengthscale=scales[0], variance=variances)
    grid = cls(lengthscale=scales[:, None, :], variance=variances[:2])
    shapes = [part.shape for part in jax.eval_shape(evaluate, grid, X, Y)]
    assert shapes == [(4, 2, 7, 5), (4, 2, 7, 7), (4, 2, 7)]
    for batched, single in (
        (isotropic, lambda i: cls(lengthscale=scales[i, 0], variance=variances[i])),
        (ard, lambda i: cls(lengthscale=scales[i], variance=2.0)),
        (shared, lambda i: cls(lengthscale=scales[0], variance=variances[i])),
    ):
        got = evaluate(batched, X, Y)
        assert [part.shape for part in got] == [(4, 7, 5), (4, 7, 7), (4, 7)]
        for i in range(4):
            for part, expected in zip(got, evaluate(single(i), X, Y), strict=True):
                np.testing.assert_allclose(part[i], expected, rtol=1e-11, atol=1e-13)


def test_batch_in_one_dimension_and_of_other_hyperparameters():
    x = np.linspace(0, 1, 6)
    scales = np.array([[0.5], [1.0], [2.0]])
    K = kernels.Matern52(scales)(x, x)
    assert K.shape == (3, 6, 6)
    np.testing.assert_allclose(K[2], kernels.Matern52(2.0)(x, x))
    alphas = np.array([0.5, 1.0, 2.0])
    kernel = kernels.RationalQuadratic(0.7, alphas)
    assert kernel.diag(x).shape == (3, 6)
    np.testing.assert_allclose(kernel(x, x)[0], kernels.RationalQuadratic(0.7, 0.5)(x, x))
    kernel = kernels.Periodic(0.7, scales)
    assert kernel.diag(x).shape == (3, 6)
    np.testing.assert_allclose(kernel(x, x)[2], kernels.Periodic(0.7, 2.0)(x, x))
    assert kernels.Polynomial(2, alphas).diag(x).shape == (3, 6)
    for kernel in (kernels.Constant(alphas), kernels.White(alphas)):
        assert kernel(x, x).shape == (3, 6, 6) and kernel.diag(x).shape == (3, 6)


@pytest.mark.parametrize("name", SCALED)
def test_active_dims(name, X, Y):
    cls = type(FORMULAS[name][0])
    expected = evaluate(cls(lengthscale=ARD[:2]), X[:, [2, 0]], Y[:, [2, 0]])
    for dims in ([2, 0], np.array([-1, -3])):
        got = evaluate(cls(lengthscale=ARD[:2], active_dims=dims), X, Y)
        for part, expected_part in zip(got, expected, strict=True):
            np.testing.assert_allclose(part, expected_part, rtol=1e-13)
    np.testing.assert_allclose(
        evaluate(cls(lengthscale=1.2, active_dims=1), X, Y)[0],
        evaluate(cls(lengthscale=1.2), X[:, 1], Y[:, 1])[0],
        rtol=1e-13,
    )


def test_composites(X, Y):
    a, b = kernels.RBF(ARD), kernels.Linear(1.5, active_dims=[0])
    kernel = 2.0 * (a + b) * a + 0.5
    A, B = a(X, Y), b(X, Y)
    np.testing.assert_allclose(kernel(X, Y), 2.0 * (A + B) * A + 0.5)
    A, B = a.diag(X), b.diag(X)
    np.testing.assert_allclose(kernel.diag(X), 2.0 * (A + B) * A + 0.5)
    np.testing.assert_allclose(sum([a, b, a])(X, Y), (2.0 * a + b)(X, Y))
    np.testing.assert_allclose((0.5 + a)(X, Y), (a + 0.5)(X, Y))
    # A batch meets a single kernel.
    batched = np.array([1.0, 2.0]) * a + b
    assert batched(X, Y).shape == (2, 7, 5) and batched.diag(X).shape == (2, 7)
    np.testing.assert_allclose(batched(X, Y)[1], 2.0 * a(X, Y) + b(X, Y))


@pytest.mark.parametrize(
    "number",
    [2, 2.0, np.float64(2), np.float32(2), np.int64(2), np.array(2.0), jnp.float32(2)],
    ids=lambda number: type(number).__name__,
)
def test_numbers(number, X):
    K = kernels.RBF()(X, X)
    for kernel in (number * kernels.RBF(), kernels.RBF() * number):
        assert isinstance(kernel, kernels.Scaled)
        np.testing.assert_allclose(kernel(X, X), 2.0 * K)
    for kernel in (number + kernels.RBF(), kernels.RBF() + number):
        assert isinstance(kernel, kernels.Sum)
        np.testing.assert_allclose(kernel(X, X), 2.0 + K)


def test_traced_numbers(X):
    @jax.jit
    def total(scale):
        return jnp.sum((scale * kernels.RBF() * scale + scale)(X, X))

    K = np.asarray(kernels.RBF()(X, X))
    np.testing.assert_allclose(total(3.0), np.sum(9.0 * K + 3.0))
    np.testing.assert_allclose(total(-3.0), np.sum(9.0 * K - 3.0))  # nothing to check in a tracer
    np.testing.assert_allclose(jax.grad(total)(3.0), np.sum(6.0 * K + 1.0))


@pytest.mark.parametrize("number", [-1, np.float64(-0.1), jnp.array([1.0, -1.0])], ids=str)
def test_negative_numbers_are_refused(number):
    for combine in (lambda k: number * k, lambda k: k * number, lambda k: k + number):
        with pytest.raises(ValueError, match="negative.*not a covariance"):
            combine(kernels.RBF())
    assert isinstance(0.0 * kernels.RBF(), kernels.Scaled)


def test_white(X):
    white = kernels.White(0.3)
    np.testing.assert_array_equal(white(X, X), 0.3 * np.eye(7))
    np.testing.assert_array_equal(white(X, X.copy()), np.zeros((7, 7)))
    np.testing.assert_array_equal(white(X, X[:2]), np.zeros((7, 2)))
    np.testing.assert_array_equal(white.diag(X), np.full(7, 0.3))
    np.testing.assert_array_equal(jax.jit(lambda x: white(x, x))(X), 0.3 * np.eye(7))


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, lambda X: np.float32(X)])
def test_object_identity_survives_composition(X, convert):
    # Integer inputs and active_dims make new arrays on the way; the noise must not be lost.
    X = convert(X)
    rbf = kernels.RBF(ARD[:2].astype(X.dtype), active_dims=[0, 2])
    kernel = 2.0 * (kernels.Constant(3.0) * (rbf + kernels.White(0.5)))
    np.testing.assert_allclose(kernel(X, X) - kernel(X, X.copy()), 3.0 * np.eye(7), atol=1e-6)
    assert (np.diag(rbf(X, X)) == 1.0).all()
    integers = np.arange(4)
    np.testing.assert_array_equal(kernels.White()(integers, integers), np.eye(4))


@pytest.mark.parametrize("name", SCALED)
def test_pytree(name, X):
    kernel = 2.0 * (FORMULAS[name][0] + kernels.White(0.1)) + 1.0
    leaves, structure = jax.tree.flatten(kernel)
    assert all(isinstance(leaf, (float, np.ndarray)) for leaf in leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert repr(again) == repr(kernel)
    assert jax.tree.structure(again) == structure and hash(structure) is not None
    # A fused program may round differently from one operation after the other.
    np.testing.assert_allclose(evaluate(again, X, X)[1], kernel(X, X), rtol=1e-12)


def test_pytree_metadata_is_static(X):
    a = kernels.RBF(active_dims=[0, 1])
    assert a.active_dims == (0, 1)
    assert jax.tree.structure(a) == jax.tree.structure(kernels.RBF(2.0, active_dims=(0, 1)))
    assert jax.tree.structure(a) != jax.tree.structure(kernels.RBF(2.0, active_dims=(0, 2)))
    assert len(jax.tree.leaves(kernels.Polynomial(degree=3))) == 3
    with pytest.raises(AttributeError):
        a.lengthscale = 2.0  # immutable


def test_vmap_over_kernels(X):
    scales = jnp.array([0.5, 1.0, 2.0])
    stacked = jax.vmap(lambda k: k(X, X))(kernels.Matern32(scales, scales))
    batched = kernels.Matern32(scales[:, None], scales)(X, X)
    np.testing.assert_allclose(stacked, batched, rtol=1e-12)


def unpack(kernel):
    """Leaves as one vector of floats, and the way back."""
    flat, back = jax.flatten_util.ravel_pytree(jax.tree.map(jnp.asarray, kernel))
    return flat, back


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("name", SCALED)
def test_gradients_are_finite_where_inputs_coincide(name, d):
    kernel = type(FORMULAS[name][0])(lengthscale=jnp.array([0.9] * d))
    x = np.random.default_rng(4).normal(size=(3, d))
    x[1] = x[0]
    flat, back = unpack((kernel, jnp.array(x)))
    weights = np.random.default_rng(5).normal(size=(3, 3))

    def function(flat):
        kernel, X = back(flat)
        same, different = kernel(X, X), kernel(X, X[:3])
        return jnp.stack([jnp.sum(weights * same), jnp.sum(weights * different)])

    first = jax.jacrev(function)
    for derivative in jax.jit(lambda flat: (first(flat), jax.jacfwd(first)(flat)))(flat):
        assert np.isfinite(derivative).all()


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize(
    ("name", "curvature"), [("RBF", 1.0), ("Matern32", 3.0), ("Matern52", 5.0 / 3.0)]
)
def test_covariance_of_derivatives_at_one_point(name, curvature, d):
    """The variance of f'(x) is the mixed derivative of the kernel at x = x'."""
    kernel = getattr(kernels, name)(lengthscale=0.5)
    x = jnp.full((1, d), 0.3)
    mixed = jax.jit(jax.jacfwd(jax.grad(lambda a, b: kernel(a, b)[0, 0]), argnums=1))(x, x)
    np.testing.assert_allclose(mixed[0, :, 0, :], curvature / 0.25 * np.eye(d), atol=1e-12)


@pytest.mark.parametrize("name", SCALED)
def test_gradients_match_finite_differences(name, X, Y):
    flat, back = unpack((FORMULAS[name][0], jnp.array(X), jnp.array(Y)))
    rng = np.random.default_rng(6)
    weights, direction = rng.normal(size=(7, 5)), rng.normal(size=flat.shape)

    def function(flat):
        kernel, X, Y = back(flat)
        return jnp.sum(weights * kernel(X, Y)) + jnp.sum(weights.T @ kernel(X, X))

    @jax.jit
    def derivatives(flat):
        gradient = jax.grad(function)
        return function(flat), *jax.jvp(gradient, (flat,), (direction,))

    eps = 1e-5
    _, gradient, curvature = derivatives(flat)
    up, gradient_up, _ = derivatives(flat + eps * direction)
    down, gradient_down, _ = derivatives(flat - eps * direction)
    np.testing.assert_allclose(gradient @ direction, (up - down) / (2 * eps), rtol=1e-6, atol=1e-6)
    differences = (gradient_up - gradient_down) / (2 * eps)
    np.testing.assert_allclose(curvature, differences, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", STATIONARY)
def test_float32_with_a_large_offset(name):
    kernel = jax.tree.map(np.float32, FORMULAS[name][0])
    rng = np.random.default_rng(7)
    X = (1e3 + rng.normal(size=(40, 3))).astype(np.float32)
    Y = (1e3 + rng.normal(size=(30, 3))).astype(np.float32)
    exact = evaluate(kernel, X.astype(float), Y.astype(float))
    for K, expected in zip(evaluate(kernel, X, Y), exact, strict=True):
        assert K.dtype == jnp.float32
        # Matern12 has the square root of the rounding error at tiny distances.
        np.testing.assert_allclose(K, expected, atol=1e-4 if name == "Matern12" else 2e-5)


def test_no_large_intermediate():
    """Distances are a matrix product: nothing of shape (n1, n2, d) exists."""
    X, Y = jnp.ones((50, 17)), jnp.ones((60, 17))
    for kernel in (kernels.RBF(np.ones(17)), kernels.Periodic(), kernels.Linear()):
        program = str(jax.make_jaxpr(kernel)(X, Y))
        assert "50,60]" in program and "50,60,17" not in program
        assert program.count("dot_general") == 1


@pytest.mark.parametrize("shape", [(10,), (2, 2)])
def test_wrong_lengthscale(shape, X):
    message = r"Matern52: lengthscale has shape .*1 or d = 3.*lengthscale\[:, None\]"
    for call in (lambda k: k(X, X), lambda k: k.diag(X)):
        with pytest.raises(ValueError, match=message):
            call(kernels.Matern52(np.ones(shape)))
    with pytest.raises(ValueError, match=r"Periodic: period has shape \(10,\)"):
        kernels.Periodic(period=np.ones(10))(X, X)
    with pytest.raises(ValueError, match=r"d = 2"):
        kernels.RBF(ARD, active_dims=[0, 1])(X, X)


def test_wrong_inputs(X):
    with pytest.raises(IndexError, match=r"RBF: active_dims \(0, 3\) out of range.*3 columns"):
        kernels.RBF(active_dims=[0, 3])(X, X)
    with pytest.raises(IndexError, match="active_dims"):
        kernels.RBF(active_dims=[1]).diag(X[:, 0])
    with pytest.raises(ValueError, match="active_dims is empty"):
        kernels.RBF(active_dims=[])
    with pytest.raises(TypeError):
        kernels.RBF(active_dims=[0.5])
    with pytest.raises(ValueError, match="RBF: inputs have different numbers of columns, 3 and 2"):
        kernels.RBF()(X, X[:, :2])
    with pytest.raises(ValueError, match=r"shape \(n,\) or \(n, d\)"):
        kernels.RBF()(X[None], X[None])
    with pytest.raises(ValueError, match="degree"):
        kernels.Polynomial(degree=0)


class TestForeign:
    def test_ours_is_unchanged(self):
        kernel = kernels.RBF()
        assert as_kernel(kernel) is kernel

    @pytest.mark.parametrize(
        ("name", "ours"),
        [
            ("ExpSquared", kernels.RBF(0.8)),
            ("Exp", kernels.Matern12(0.8)),
            ("Matern32", kernels.Matern32(0.8)),
            ("Matern52", kernels.Matern52(0.8)),
        ],
    )
    def test_against_tinygp(self, name, ours, X, Y):
        tinygp = pytest.importorskip("tinygp")
        distance = tinygp.kernels.distance.L2Distance()
        theirs = as_kernel(getattr(tinygp.kernels, name)(0.8, distance=distance))
        assert isinstance(theirs, kernels.External)
        np.testing.assert_allclose(ours(X, Y), theirs(X, Y), rtol=1e-11)
        np.testing.assert_allclose(ours.diag(X), theirs.diag(X))

    def test_rational_quadratic_against_tinygp(self, X, Y):
        tinygp = pytest.importorskip("tinygp")
        # Its alpha is ours, but its r^2 is not divided by the dimension-wise scale first.
        distance = tinygp.kernels.distance.L2Distance()
        theirs = tinygp.kernels.RationalQuadratic(0.8, alpha=1.4, distance=distance)
        np.testing.assert_allclose(
            kernels.RationalQuadratic(0.8, 1.4)(X, Y), as_kernel(theirs)(X, Y), rtol=1e-11
        )

    def test_tinygp_composes_and_differentiates(self):
        tinygp = pytest.importorskip("tinygp")
        x = np.linspace(0.0, 1.0, 4)  # tinygp sees (n,) as scalars, as given

        def total(scale):
            kernel = 2.0 * kernels.RBF() * tinygp.kernels.Matern32(scale) + kernels.White(0.1)
            assert isinstance(jax.tree.leaves(kernel)[0], float)
            return jnp.sum(kernel(x, x)) + jnp.sum(kernel.diag(x))

        def ours(scale):
            kernel = 2.0 * kernels.RBF() * kernels.Matern32(scale) + kernels.White(0.1)
            return jnp.sum(kernel(x, x)) + jnp.sum(kernel.diag(x))

        np.testing.assert_allclose(total(0.7), ours(0.7))
        np.testing.assert_allclose(jax.grad(total)(0.7), jax.grad(ours)(0.7))
        theirs = as_kernel(tinygp.kernels.Matern32(0.7))
        np.testing.assert_allclose(jax.jit(lambda k: k.diag(x))(theirs), 1.0)
        assert jax.tree.leaves(theirs)

    def test_function(self, X, Y):
        def function(X1, X2):
            return 3.0 * X1 @ X2.T

        kernel = as_kernel(function)
        assert isinstance(kernel, kernels.Function) and not jax.tree.leaves(kernel)
        np.testing.assert_allclose(kernel(X, Y), 3.0 * X @ Y.T)
        np.testing.assert_allclose(kernel.diag(X), 3.0 * np.sum(X**2, 1))
        np.testing.assert_allclose(jax.jit(lambda k: k.diag(X))(kernel), kernel.diag(X))
        np.testing.assert_allclose((function + kernels.RBF())(X, Y), (kernels.RBF() + kernel)(X, Y))

    def test_function_with_batch_and_scalar_inputs(self):
        def brownian(X1, X2):
            return jnp.array([1.0, 2.0])[:, None, None] * jnp.minimum(X1[:, None], X2)

        kernel, x = as_kernel(brownian), np.linspace(0.0, 1.0, 5)
        assert kernel(x, x).shape == (2, 5, 5)
        np.testing.assert_allclose(kernel.diag(x), [x, 2 * x])

    def test_function_with_its_own_diagonal(self, X):
        def function(X1, X2):
            raise AssertionError("not needed")

        function.diag = lambda X: jnp.full(len(X), 5.0)
        np.testing.assert_array_equal(as_kernel(function).diag(X), np.full(7, 5.0))

    def test_partial_keeps_its_hyperparameters(self, X):
        def function(scale, X1, X2):
            return scale * X1 @ X2.T

        def total(scale):
            kernel = as_kernel(jax.tree_util.Partial(function, scale))
            assert jax.tree.leaves(kernel) == [scale]
            return jnp.sum(jax.jit(lambda k: k(X, X))(kernel)) + jnp.sum(kernel.diag(X))

        np.testing.assert_allclose(jax.grad(total)(2.0), np.sum(X @ X.T) + np.sum(X**2))

    def test_errors(self, X):
        with pytest.raises(TypeError, match="cannot make a kernel of 'rbf'.*tinygp"):
            as_kernel("rbf")
        with pytest.raises(TypeError, match=r"did you mean RBF\(\)"):
            as_kernel(kernels.RBF)
        with pytest.raises(TypeError, match="cannot make a kernel of None"):
            kernels.RBF() + None
        pointwise = as_kernel(lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2)))
        with pytest.raises(ValueError, match=r"returned shape \(\).*of shape \(7, 7\)"):
            pointwise(X, X)
        with pytest.raises(ValueError, match="matrix of covariances"):
            pointwise.diag(X)
