"""Kernels that users of other libraries have: formulas in loops, and their edges."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tsvgp import GP, kernels
from numpyro_tsvgp.kernels import Kernel

SCALE = np.array([0.7, 1.3, 2.1])
PERIOD = np.array([1.7, 0.9, 3.0])
WEIGHTS = np.array([0.6, 1.3])
MEANS = np.array([[0.1, 0.0, 0.7], [1.1, 0.4, 0.2]])
SPREADS = np.array([[0.2, 0.3, 0.1], [0.4, 0.05, 0.2]])


def product(x, y):
    return 0.4 + sum(a * b / s**2 for a, b, s in zip(x, y, SCALE, strict=True))


def arc_cosine(order):
    def formula(x, y):
        norms = math.sqrt(product(x, x) * product(y, y))
        angle = math.acos(max(-1.0, min(1.0, product(x, y) / norms)))
        c, s, rest = math.cos(angle), math.sin(angle), math.pi - angle
        J = (rest, s + rest * c, 3 * s * c + rest * (1 + 2 * c * c))[order]
        return 1.9 / math.pi * norms**order * J

    return formula


def on_circles(base):
    def formula(x, y):
        parts = zip(x, y, PERIOD, SCALE, strict=True)
        r = 2 * math.sqrt(sum((math.sin(math.pi * (a - b) / p) / s) ** 2 for a, b, p, s in parts))
        return 1.9 * base(r)

    return formula


def spectral(x, y):
    total = 0.0
    for w, mean, sd in zip(WEIGHTS, MEANS, SPREADS, strict=True):
        for a, b, m, s in zip(x, y, mean, sd, strict=True):
            t = a - b
            w = w * math.exp(-2 * math.pi**2 * s**2 * t**2) * math.cos(2 * math.pi * m * t)
        total += w
    return total


def rbf(x, y, scale):
    return math.exp(-sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / (2 * scale**2))


def change(x, y):
    w, v = (1 / (1 + math.exp(-3.0 * (z[1] - 0.2))) for z in (x, y))
    return (1 - w) * rbf(x, y, 0.5) * (1 - v) + w * 2.0 * rbf(x, y, 1.5) * v


def categorical(x, y):
    differ = sum((round(a) != round(b)) / s for a, b, s in zip(x, y, SCALE, strict=True))
    return 1.9 * math.exp(-differ)


# A kernel for d = 3, and its value at one pair of points.
FORMULAS = {
    "ArcCosine0": (kernels.ArcCosine(0, 0.4, SCALE, 1.9), arc_cosine(0)),
    "ArcCosine1": (kernels.ArcCosine(1, 0.4, SCALE, 1.9), arc_cosine(1)),
    "ArcCosine2": (kernels.ArcCosine(2, 0.4, SCALE, 1.9), arc_cosine(2)),
    "PeriodicMatern12": (
        kernels.Periodic(SCALE, PERIOD, 1.9, base=kernels.Matern12),
        on_circles(lambda r: math.exp(-r)),
    ),
    "PeriodicMatern32": (
        kernels.Periodic(SCALE, PERIOD, 1.9, base=kernels.Matern32),
        on_circles(lambda r: (1 + 3**0.5 * r) * math.exp(-(3**0.5) * r)),
    ),
    "PeriodicMatern52": (
        kernels.Periodic(SCALE, PERIOD, 1.9, base=kernels.Matern52),
        on_circles(lambda r: (1 + 5**0.5 * r + 5 * r * r / 3) * math.exp(-(5**0.5) * r)),
    ),
    "SpectralMixture": (kernels.SpectralMixture(WEIGHTS, MEANS, SPREADS), spectral),
    "ChangePoint": (
        kernels.ChangePoint(kernels.RBF(0.5), 2.0 * kernels.RBF(1.5), 0.2, 3.0, column=1),
        change,
    ),
}
formulas = pytest.mark.parametrize("name", FORMULAS)


@jax.jit
def evaluate(kernels, X, Y):
    return jax.tree.map(
        lambda kernel: (kernel(X, Y), kernel(X, X), kernel.diag(X)),
        kernels,
        is_leaf=lambda node: isinstance(node, Kernel),
    )


@pytest.fixture(scope="module")
def evaluated():
    rng = np.random.default_rng(2)
    X, Y = rng.normal(size=(12, 3)), rng.normal(size=(5, 3))
    return X, Y, evaluate({name: kernel for name, (kernel, _) in FORMULAS.items()}, X, Y)


def brute(formula, X, Y):
    return np.array([[formula(x, y) for y in Y] for x in X])


@formulas
def test_formula(name, evaluated):
    X, Y, values = evaluated
    (cross, own, diagonal), formula = values[name], FORMULAS[name][1]
    np.testing.assert_allclose(cross, brute(formula, X, Y), rtol=1e-9, atol=1e-11)
    # The angle of an input with itself is found by acos in the formula: half of the digits.
    np.testing.assert_allclose(own, brute(formula, X, X), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(diagonal, np.diag(own), rtol=1e-12)
    eigenvalues = np.linalg.eigvalsh(np.asarray(own))
    assert eigenvalues[0] > -1e-12 * eigenvalues[-1]


@pytest.mark.slow
def test_gradients_are_finite_where_inputs_coincide(evaluated):
    """And, but for the two kernels without a derivative there, they are the right ones."""
    rough = {"ArcCosine0", "PeriodicMatern12"}
    X = np.array([[0.3, -0.2, 0.5], [0.3, -0.2, 0.5], [1.0, 0.4, -0.7]])

    def total(kernel, X, Y):
        weights = jnp.arange(1.0, 10.0).reshape(3, 3)
        return jnp.sum(weights * kernel(X, Y))

    @jax.jit
    def slopes(kernels):
        return {
            name: (
                jax.grad(total, (0, 1, 2), allow_int=True)(kernel, X, X.copy()),
                jax.grad(lambda X, kernel=kernel: total(kernel, X, X))(X),
            )
            for name, kernel in kernels.items()
        }

    some = {name: kernel for name, (kernel, _) in FORMULAS.items()}
    values = jax.jit(lambda X: {name: total(kernel, X, X + 0) for name, kernel in some.items()})
    found = slopes(some)
    step = 1e-5 * np.random.default_rng(3).normal(size=X.shape)
    above, below = values(X + step), values(X - step)
    for name, (each, own) in found.items():
        for leaf in jax.tree.leaves((each, own)):
            assert np.isfinite(leaf).all(), name
        if name not in rough:
            expected = float(above[name] - below[name])
            along = float(jnp.sum(own * 2 * step))
            assert along == pytest.approx(expected, rel=1e-4, abs=1e-9), name


@pytest.mark.slow
def test_batches():
    X = np.random.default_rng(0).normal(size=(4, 2))
    two = np.array([[0.5], [1.5]])
    some = {
        kernels.ArcCosine(1, np.array([0.5, 1.0]), two): lambda i: kernels.ArcCosine(
            1, [0.5, 1.0][i], two[i]
        ),
        kernels.Periodic(two, base=kernels.Matern32): lambda i: kernels.Periodic(
            two[i], base=kernels.Matern32
        ),
        kernels.SpectralMixture(
            np.ones((2, 3)), np.arange(12.0).reshape(2, 3, 2) / 10, np.ones((3, 2)) / 5
        ): lambda i: kernels.SpectralMixture(
            np.ones(3), np.arange(12.0).reshape(2, 3, 2)[i] / 10, np.ones((3, 2)) / 5
        ),
        kernels.ChangePoint(kernels.RBF(two), kernels.RBF(), np.array([0.0, 0.5])): (
            lambda i: kernels.ChangePoint(kernels.RBF(two[i]), kernels.RBF(), 0.5 * i)
        ),
        kernels.Categorical(two, np.array([1.0, 2.0])): lambda i: kernels.Categorical(
            two[i], 1.0 + i
        ),
    }
    batches = list(some)
    each = [[one(i) for i in range(2)] for one in some.values()]
    found, expected = evaluate((batches, each), X, X.copy())
    for (K, _, diagonal), ones in zip(found, expected, strict=True):
        assert K.shape == (2, 4, 4) and diagonal.shape == (2, 4)
        for i in range(2):
            np.testing.assert_allclose(K[i], ones[i][0], rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(diagonal[i], ones[i][2], rtol=1e-12)


def test_categories():
    rng = np.random.default_rng(1)
    X = rng.integers(0, 3, size=(15, 3)).astype(float)
    kernel = kernels.Categorical(SCALE, 1.9)
    K = kernel(X, X)
    np.testing.assert_allclose(K, brute(categorical, X, X), rtol=1e-12)
    assert np.linalg.eigvalsh(np.asarray(K))[0] > -1e-12
    assert (jax.grad(lambda X: kernel(X, X).sum())(X) == 0).all()
    slope = jax.grad(lambda s: kernels.Categorical(s)(X, X).sum())(1.0)
    assert np.isfinite(slope) and slope > 0
    tiny = kernels.Categorical(1e-3)(X, X)  # the limit
    np.testing.assert_allclose(tiny, kernels.Group()(X, X), atol=1e-12)


def test_change_points_nest_and_keep_noise():
    X = np.linspace(-1.0, 3.0, 9)
    a, b, c = kernels.Constant(1.0), kernels.Constant(4.0), kernels.Constant(9.0)
    kernel = kernels.ChangePoint(kernels.ChangePoint(a, b, 0.0, 200.0), c, 2.0, 200.0)
    sides = kernel.diag(np.array([-1.0, 1.0, 3.0]))
    np.testing.assert_allclose(sides, [1.0, 4.0, 9.0], rtol=1e-12)
    noisy = kernels.ChangePoint(kernels.White(0.5), kernels.RBF(), 1.0)
    np.testing.assert_allclose(np.diag(noisy(X, X)), noisy.diag(X), rtol=1e-12)
    np.testing.assert_allclose(
        np.diag(noisy(X, X) - noisy(X, X.copy())), noisy.noise(X), rtol=1e-9, atol=1e-12
    )
    with pytest.raises(IndexError, match="ChangePoint: column 1 out of range"):
        kernels.ChangePoint(a, b, 0.0, column=1)(X, X)


@pytest.mark.slow
def test_an_input_of_zero_without_biases():
    kernel = kernels.ArcCosine(1, offset=0.0)
    X = np.array([0.0, 1.0, -2.0])
    assert np.isfinite(jax.grad(lambda X: kernel(X, X).sum())(X)).all()
    np.testing.assert_allclose(kernel(X, X), [[0, 0, 0], [0, 1, 0], [0, 0, 4]], atol=1e-12)


@pytest.mark.slow
def test_single_precision_stays():
    X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    for kernel, _ in FORMULAS.values():
        small = jax.tree.map(np.float32, kernel)
        assert small(X, X).dtype == small.diag(X).dtype == np.float32
        assert np.isfinite(small(X, X)).all()


def test_refusals():
    with pytest.raises(ValueError, match="ArcCosine: order must be 0, 1 or 2, got 3"):
        kernels.ArcCosine(3)
    for base in (kernels.Cosine, kernels.RBF()):
        with pytest.raises(TypeError, match="Periodic: base is .*the class itself"):
            kernels.Periodic(base=base)
    with pytest.raises(ValueError, match=r"means has shape \(3,\), but must have shape \(Q, d\)"):
        kernels.SpectralMixture(np.ones(2), np.ones(3), np.ones(2))([0.0], [1.0])
    with pytest.raises(ValueError, match="weights must have shape"):
        kernels.SpectralMixture(1.0, np.ones(1), np.ones(1))([0.0], [1.0])
    with pytest.raises(ValueError, match="SpectralMixture has the weights .*negative"):
        kernels.SpectralMixture(np.array([-1.0]), np.ones(1), np.ones(1))


def test_tinygp_kernels_on_either_side():
    tinygp = pytest.importorskip("tinygp")
    X = np.linspace(0.0, 1.0, 4)
    theirs, ours = tinygp.kernels.Matern32(0.5), kernels.RBF(0.3)
    expected = theirs(X, X) + ours(X, X)
    np.testing.assert_allclose((ours + theirs)(X, X), expected)
    np.testing.assert_allclose((kernels.as_kernel(theirs) + ours)(X, X), expected)
    np.testing.assert_allclose(kernels.as_kernel(theirs + ours)(X, X), expected)
    gp = GP(2.0 * theirs * ours + theirs + 0.5, X, jitter=0.0)
    expected = 2.0 * theirs(X, X) * ours(X, X) + theirs(X, X) + 0.5
    np.testing.assert_allclose(gp.covariance_matrix, expected)
    np.testing.assert_allclose(gp.variance, np.diag(expected))
    with pytest.raises(TypeError, match=r"write kernels\.as_kernel\(theirs \+ ours\)"):
        (theirs + ours)(X, X)


def test_conventions_of_other_libraries():
    """What docs/kernels.md says of them, with the formulas that they document."""
    tinygp = pytest.importorskip("tinygp")
    X = np.linspace(0.0, 2.0, 5)
    # GPflow and GPJax: exp(-sin^2(pi d / p) / (2 l^2)), half of our lengthscale.
    d = np.abs(X[:, None] - X)
    theirs = np.exp(-0.5 * np.sin(np.pi * d / 1.3) ** 2 / 0.35**2)
    np.testing.assert_allclose(kernels.Periodic(0.7, 1.3)(X, X), theirs, rtol=1e-9)
    # tinygp: exp(-gamma sin^2), gamma = 2 / l^2.
    gamma = tinygp.kernels.ExpSineSquared(scale=1.3, gamma=2.0 / 0.7**2)
    np.testing.assert_allclose(kernels.Periodic(0.7, 1.3)(X, X), gamma(X, X), rtol=1e-9)
    # GPflow's Polynomial has the variance inside the power.
    inside = (0.5 * X[:, None] * X + 1.0) ** 2
    ours = kernels.Polynomial(2, 1.0, lengthscale=0.5**-0.5)
    np.testing.assert_allclose(ours(X, X), inside, rtol=1e-12)


def test_files_of_predictors_can_hold_them():
    """What a kernel is apart from its numbers must be something that a file can say."""
    for kernel, _ in FORMULAS.values():
        statics = [
            getattr(kernel, field.name)
            for field in dataclasses.fields(kernel)
            if field.metadata.get("static")
        ]
        assert json.loads(json.dumps(statics)) == statics


def test_rough_periodic_functions_are_not_drawn_as_smooth_ones():
    with pytest.raises(ValueError, match="Periodic over Matern32 has no random features"):
        kernels.Periodic(base=kernels.Matern32).random_features(jax.random.key(0), 4, 1)
