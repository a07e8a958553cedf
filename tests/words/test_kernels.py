"""Kernels against formulas written out in loops, against tinygp, and at their edges."""

import math

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import cases

from numpyro_tsvgp import kernels
from numpyro_tsvgp.kernels import Kernel, as_kernel

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
def evaluate(kernels, X, Y):
    """All that some kernels say, in one program: most of the time here goes into compiling."""
    return jax.tree.map(
        lambda kernel: (kernel(X, Y), kernel(X, X), kernel.diag(X)),
        kernels,
        is_leaf=lambda node: isinstance(node, Kernel),
    )


def brute(formula, X, Y):
    return np.array([[formula(x, y) for y in Y] for x in X])


@pytest.fixture(scope="module")
def evaluated():
    rng = np.random.default_rng(2)
    X, Y = rng.normal(size=(30, 3)), rng.normal(size=(5, 3))
    return X, Y, evaluate({name: kernel for name, (kernel, _) in FORMULAS.items()}, X, Y)


@formulas
def test_formula(name, evaluated):
    X, Y, values = evaluated
    (cross, own, diagonal), formula = values[name], FORMULAS[name][1]
    np.testing.assert_allclose(cross, brute(formula, X, Y), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(own, brute(formula, X, X), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(diagonal, np.diag(brute(formula, X, X)), rtol=1e-12)
    if name in STATIONARY:  # to the last digit
        assert (np.diag(own) == 1.9).all() and (np.asarray(diagonal) == 1.9).all()


@formulas
def test_positive_semidefinite(name, evaluated):
    K = np.asarray(evaluated[2][name][1])
    np.testing.assert_allclose(K, K.T, rtol=1e-12, atol=1e-14)
    eigenvalues = np.linalg.eigvalsh(K)
    assert eigenvalues[0] > -1e-12 * eigenvalues[-1]


def test_one_input_dimension():
    some = [type(FORMULAS[name][0])(lengthscale=0.8) for name in SCALED]
    some += [kernels.Constant(2.0), kernels.White(2.0)]
    x, y = np.linspace(0, 1, 4), np.linspace(0.3, 2, 5)
    vectors, columns = evaluate(some, x, y), evaluate(some, x[:, None], y[:, None])
    assert {part[0].shape for part in vectors} == {(4, 5)}
    assert {part[2].shape for part in vectors} == {(4,)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), vectors, columns)


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


@pytest.mark.slow
def test_batch(X, Y):
    scales = np.random.default_rng(3).uniform(0.5, 2.0, size=(4, 3))
    variances = np.arange(1.0, 5.0)
    classes = {name: type(FORMULAS[name][0]) for name in SCALED}

    def each(*hyperparameters):
        return {
            name: [cls(lengthscale=ell, variance=v) for ell, v in hyperparameters]
            for name, cls in classes.items()
        }

    # Isotropic; one lengthscale for each input; one kernel with several variances.
    batched = evaluate(
        each((scales[:, :1], variances), (scales, 2.0), (scales[0], variances)), X, Y
    )
    for i in range(4):
        singles = each((scales[i, 0], variances[i]), (scales[i], 2.0), (scales[0], variances[i]))
        for name, expected in evaluate(singles, X, Y).items():
            for parts, single in zip(batched[name], expected, strict=True):
                assert [part.shape for part in parts] == [(4, 7, 5), (4, 7, 7), (4, 7)]
                for part, value in zip(parts, single, strict=True):
                    np.testing.assert_allclose(part[i], value, rtol=1e-11, atol=1e-12, err_msg=name)
    grid = each((scales[:, None, :], variances[:2]))
    for (parts,) in jax.eval_shape(evaluate, grid, X, Y).values():
        assert [part.shape for part in parts] == [(4, 2, 7, 5), (4, 2, 7, 7), (4, 2, 7)]


def test_lists_are_arrays(X):
    kernel = kernels.RBF([0.5, 1.0, 2.0])
    assert [leaf.shape for leaf in jax.tree.leaves(kernel) if np.ndim(leaf)] == [(3,)]
    np.testing.assert_array_equal(kernel(X, X), kernels.RBF(np.array([0.5, 1.0, 2.0]))(X, X))


def test_batch_of_other_hyperparameters():
    x = np.linspace(0, 1, 6)
    scales, values = np.array([[0.5], [1.0], [2.0]]), np.array([0.5, 1.0, 2.0])
    batched = [
        kernels.Matern52(scales),
        kernels.RationalQuadratic(0.7, values),
        kernels.Periodic(0.7, scales),
        kernels.Polynomial(2, values),
        kernels.Constant(values),
        kernels.White(values),
    ]
    singles = [
        kernels.Matern52(2.0),
        kernels.RationalQuadratic(0.7, 2.0),
        kernels.Periodic(0.7, 2.0),
        kernels.Polynomial(2, 2.0),
        kernels.Constant(2.0),
        kernels.White(2.0),
    ]
    for parts, expected in zip(evaluate(batched, x, x), evaluate(singles, x, x), strict=True):
        assert [part.shape for part in parts] == [(3, 6, 6), (3, 6, 6), (3, 6)]
        for part, value in zip(parts, expected, strict=True):
            np.testing.assert_allclose(part[2], value, rtol=1e-13)


@pytest.mark.slow
def test_active_dims(X, Y):
    classes = [type(FORMULAS[name][0]) for name in SCALED]
    for dims in ([2, 0], np.array([-1, -3])):
        got = evaluate([cls(lengthscale=ARD[:2], active_dims=dims) for cls in classes], X, Y)
        sliced = [cls(lengthscale=ARD[:2]) for cls in classes]
        expected = evaluate(sliced, X[:, [2, 0]], Y[:, [2, 0]])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), got, expected)
    got = evaluate([cls(lengthscale=1.2, active_dims=1) for cls in classes], X, Y)
    expected = evaluate([cls(lengthscale=1.2) for cls in classes], X[:, 1], Y[:, 1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), got, expected)


def test_composites(X, Y):
    a, b = kernels.RBF(ARD), kernels.Linear(1.5, active_dims=[0])
    together = [
        (2.0 * (a + b) * a + 0.5, lambda A, B: 2.0 * (A + B) * A + 0.5),
        (sum([a, b, a]), lambda A, B: 2.0 * A + B),
        (0.5 + a, lambda A, B: A + 0.5),
        # A batch meets a single kernel.
        (np.array([1.0, 2.0]) * a + b, lambda A, B: np.stack([A + B, 2.0 * A + B])),
    ]
    first, second, *composites = evaluate([a, b, *(kernel for kernel, _ in together)], X, Y)
    for composite, (_, formula) in zip(composites, together, strict=True):
        for A, B, part in zip(first, second, composite, strict=True):
            np.testing.assert_allclose(part, formula(A, B), rtol=1e-12)


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


def test_noise_is_what_another_set_of_inputs_does_not_share(X):
    def external(X1, X2):  # with noise that we cannot know of
        return kernels.RBF(0.7)(X1, X2) + 0.2 * (X1 is X2) * np.eye(len(X1), len(X2))

    white, rbf, linear = kernels.White(0.3), kernels.RBF(0.7), kernels.Linear(2.0)
    for kernel in (
        rbf,
        2.0 * (rbf + white) + 1.0,
        (rbf + white) * (kernels.Polynomial() + kernels.White(np.array([0.1, 0.4]))),
        linear * kernels.as_kernel(external) + white,
    ):
        expected = kernel(X, X) - kernel(X, X.copy())
        found = np.asarray(kernel.noise(X))[..., None] * np.eye(7)
        np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), atol=1e-9)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, lambda X: np.float32(X)])
def test_object_identity_survives_composition(X, convert):
    # Integer inputs and active_dims make new arrays on the way; the noise must not be lost.
    X = convert(X)
    rbf = kernels.RBF(ARD[:2].astype(X.dtype), active_dims=[0, 2])
    kernel = 2.0 * (kernels.Constant(3.0) * (rbf + kernels.White(0.5)))
    # Squared distances within one set and between two are rounded differently.
    np.testing.assert_allclose(kernel(X, X) - kernel(X, X.copy()), 3.0 * np.eye(7), atol=5e-6)
    assert (np.diag(rbf(X, X)) == 1.0).all()
    integers = np.arange(4)
    np.testing.assert_array_equal(kernels.White()(integers, integers), np.eye(4))


@pytest.mark.parametrize("name", SCALED)
def test_pytree(name):
    kernel = 2.0 * (FORMULAS[name][0] + kernels.White(0.1)) + 1.0
    leaves, structure = jax.tree.flatten(kernel)
    assert all(isinstance(leaf, (float, np.ndarray)) for leaf in leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert repr(again) == repr(kernel)
    assert jax.tree.structure(again) == structure and hash(structure) == hash(structure)


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


@jax.jit
def derivatives(kernel, X, Y, direction):
    """Of a scalar that involves all entries: value, gradient, Hessian times the direction."""

    def function(kernel, X, Y):
        W = jnp.cos(jnp.arange(1.0, 36.0)).reshape(7, 5)
        return jnp.sum(W * kernel(X, Y)) + jnp.sum(W.T @ kernel(X, X))

    gradient = jax.grad(function, argnums=(0, 1, 2))
    return function(kernel, X, Y), *jax.jvp(gradient, (kernel, X, Y), direction)


def random_like(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=np.shape(leaf)), tree)


@pytest.mark.parametrize(
    ("name", "d"),
    # For d = 1 distances are computed in another way.
    [("Matern12", 1), ("Matern32", 3)]
    + [pytest.param(name, 3, marks=pytest.mark.slow) for name in SCALED if name != "Matern32"]
    + [pytest.param(name, 1, marks=pytest.mark.slow) for name in ("Matern52", "RationalQuadratic")],
)
def test_gradients_are_finite_where_inputs_coincide(name, d, X):
    kernel = type(FORMULAS[name][0])(lengthscale=np.full(d, 0.9))
    X = X[:, :d].copy()
    X[1] = X[0]
    point = jax.tree.map(np.asarray, (kernel, X, X[:5].copy()))
    for derivative in jax.tree.leaves(derivatives(*point, random_like(point, 5))):
        assert np.isfinite(derivative).all()


@pytest.mark.parametrize("name", cases(SCALED, fast=list(SCALED)[:2]))
def test_gradients_match_finite_differences(name, X, Y):
    point = jax.tree.map(np.asarray, (FORMULAS[name][0], X, Y))
    direction = random_like(point, 6)

    def at(eps):
        moved = jax.tree.map(lambda x, dx: np.asarray(x + eps * dx), point, direction)
        value, *rest = derivatives(*moved, direction)
        return value, *(jax.flatten_util.ravel_pytree(part)[0] for part in rest)

    eps = 1e-5
    (_, gradient, curvature), up, down = at(0.0), at(eps), at(-eps)
    slope = gradient @ jax.flatten_util.ravel_pytree(direction)[0]
    np.testing.assert_allclose(slope, (up[0] - down[0]) / (2 * eps), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(curvature, (up[1] - down[1]) / (2 * eps), rtol=1e-4, atol=1e-4)


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


def test_float32_with_a_large_offset():
    rng = np.random.default_rng(7)
    X = (1e3 + rng.normal(size=(40, 3))).astype(np.float32)
    Y = (1e3 + rng.normal(size=(30, 3))).astype(np.float32)
    some = {name: jax.tree.map(np.float32, FORMULAS[name][0]) for name in STATIONARY}
    exact = evaluate(some, X.astype(float), Y.astype(float))
    for name, values in evaluate(some, X, Y).items():
        # Matern12 has the square root of the rounding error at tiny distances.
        atol = 1e-4 if name == "Matern12" else 2e-5
        for K, expected in zip(values, exact[name], strict=True):
            assert K.dtype == jnp.float32
            np.testing.assert_allclose(K, expected, atol=atol, err_msg=name)


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
            assert any(leaf is scale for leaf in jax.tree.leaves(kernel))
            return jnp.sum(kernel(x, x)) + jnp.sum(kernel.diag(x))

        def ours(scale):
            kernel = 2.0 * kernels.RBF() * kernels.Matern32(scale) + kernels.White(0.1)
            return jnp.sum(kernel(x, x)) + jnp.sum(kernel.diag(x))

        np.testing.assert_allclose(
            jax.jit(jax.value_and_grad(total))(0.7), jax.jit(jax.value_and_grad(ours))(0.7)
        )
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


@pytest.mark.parametrize("name", ["Matern32", "Matern52", "RBF"])
def test_rows_that_occur_twice(name):
    """Squared distances of equal rows round below zero, of which no root must be taken."""
    rows = np.random.RandomState(0).randn(40, 32)
    X = jnp.asarray(np.concatenate([rows, rows]))
    K = np.asarray(getattr(kernels, name)(5.0)(X, X))
    assert np.isfinite(K).all()
    np.testing.assert_allclose(np.diagonal(K, 40), 1.0, atol=1e-12)
