"""Random features of kernels against the kernels themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import cases

from numpyro_tsvgp import kernels as K

X = jnp.asarray(np.random.default_rng(0).normal(size=(40, 2)))
LEVELS = X.at[:, 0].set(jnp.arange(40) % 3)
W = jnp.array([[1.0, 0.2], [0.5, -1.0], [0.0, 0.3]])

# With the root mean square error of correlations that 512 frequencies may have. Independent ones
# would have 0.03.
RANDOM = {
    "RBF": (K.RBF(jnp.array([0.5, 1.0])), 0.004),
    "RBF of one column": (K.RBF(0.5, active_dims=1), 1e-8),
    "Matern12": (K.Matern12(0.7), 0.025),
    "Matern12 of one column": (K.Matern12(0.7, active_dims=0), 0.01),
    "Matern32": (K.Matern32(0.7, 2.0), 0.025),
    "Matern32 of one column": (K.Matern32(0.7, active_dims=0), 1e-3),
    "Matern52 of one column": (K.Matern52(0.7, active_dims=[0]), 1e-4),
    "RationalQuadratic": (K.RationalQuadratic(0.7, 0.5), 0.02),
    "Periodic": (K.Periodic(0.8, jnp.array([1.5, 2.0])), 0.025),
    "Periodic of one column": (K.Periodic(0.3, 1.5, active_dims=slice(0, 1)), 0.005),
    "Periodic * RBF": (K.Periodic(0.8, 1.5, active_dims=0) * K.RBF(2.0, active_dims=0), 0.015),
    "by column": (K.Matern32(1.0, active_dims=0) * K.RBF(1.0, active_dims=1), 0.005),
    "Cosine * Cosine": (K.Cosine(2.0) * K.Cosine(3.0, active_dims=1), 0.02),
    "Linear * RBF + ...": (K.Linear(active_dims=0) * K.RBF() + 0.5 * K.Matern12(2.0) + 1.0, 0.01),
    "SpectralMixture": (
        K.SpectralMixture(
            jnp.array([1.0, 0.5]),
            jnp.array([[0.2, 0.5], [0.6, 0.1]]),
            jnp.array([[0.2, 0.1], [0.1, 0.2]]),
        ),
        0.02,
    ),
    "ChangePoint": (K.ChangePoint(K.RBF(), K.Matern32(0.5, 2.0), 0.3, 2.0, column=1), 0.02),
    "batch": (K.RBF(jnp.array([[0.5], [2.0]])) + K.Linear(variance=jnp.array([1.0, 3.0])), 0.01),
}
EXACT = {
    "Cosine": (K.Cosine(2.0), X),
    "Constant": (K.Constant(2.0), X),
    "Linear": (K.Linear(jnp.array([0.5, 2.0]), 3.0), X),
    "Polynomial": (K.Polynomial(3, 0.5, 2.0, 0.7), X),
    "batch": (K.Polynomial(2, jnp.array([0.1, 1.0])) * K.Linear(), X),
    "Coregion": (K.Coregion(W, jnp.array([0.1, 0.2, 0.3]), active_dims=0), LEVELS),
}


@pytest.mark.parametrize("name", cases(RANDOM, fast=list(RANDOM)[::5]))
def test_features_have_the_covariance_of_the_kernel(name):
    kernel, allowed = RANDOM[name]
    features = kernel.random_features(jax.random.key(0), 512, 2)
    phi = jax.jit(lambda features, X: features(X))(features, X)
    sd = jnp.sqrt(kernel.diag(X))
    errors = (phi @ phi.mT - kernel(X, X)) / (sd[..., :, None] * sd[..., None, :])
    assert jnp.sqrt((errors**2).mean()) < allowed
    # A cosine and a sine of each frequency: the variance is that of the kernel.
    np.testing.assert_allclose((phi**2).sum(-1), sd**2, rtol=1e-10)


@pytest.mark.parametrize("name", cases(EXACT, fast=("Linear",)))
def test_exact_features(name):
    kernel, X = EXACT[name]
    phi = kernel.random_features(jax.random.key(0), 16, 2)(X)
    np.testing.assert_allclose(phi @ phi.mT, kernel(X, X), atol=1e-12)


@pytest.mark.slow
def test_a_map_is_a_function_and_keys_make_others():
    kernel = K.Matern52(0.7)
    one, other = (kernel.random_features(jax.random.key(s), 8, 2) for s in (0, 1))
    np.testing.assert_array_equal(one(X)[:5], one(X[:5]))
    assert jnp.abs(one(X) - other(X)).max() > 0.1
    # Far from zero angles are as precise as near it, if they are measured from there.
    far = kernel.random_features(jax.random.key(0), 8, 2, centre=1e6)
    np.testing.assert_allclose(far(X + 1e6), one(X), atol=1e-8)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (K.White(), "kernel White has no random features"),
        (K.RBF() * (K.RBF() + K.White()), "kernel White has no random features"),
        (
            K.as_kernel(lambda a, b: a @ b.T),
            "kernel Function has no.*RBF, Matern12",
        ),
        (K.Group(), "Group.*Coregion"),
        (K.Categorical(), "kernel Categorical has no random features"),
        (K.ArcCosine(), "kernel ArcCosine has no random features"),
        (K.Periodic(base=K.Matern32), "Periodic over Matern32 has no random features"),
        (K.Polynomial(9), "19,683 features.*too many"),
    ],
)
def test_kernels_without_features_are_refused_by_name(kernel, words):
    with pytest.raises(ValueError, match=words):
        kernel.random_features(jax.random.key(0), 8, 2)
