"""Quadrature alone: nodes against known moments, expectations against formulas and direct sums."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import gammaln, logsumexp

from numpyro_tsvgp.gaussian import quadrature
from numpyro_tsvgp.gaussian.quadrature import (
    GaussHermite,
    Marginals,
    Nodes,
    QuasiMonteCarlo,
    choose_quadrature,
    expect,
    site_gradients,
)

MEAN, VAR = np.array([[0.3, -1.0, 1.5]]), np.array([[0.5, 0.1, 0.8]])
AXES = {"f": np.array([0])}


def gradients_1d(log_likelihood):
    nodes = Nodes(AXES, *GaussHermite().nodes(jax.random.key(0), 1))
    q = {"f": Marginals(jnp.asarray(MEAN), jnp.asarray(VAR))}

    def gradients(q):
        return site_gradients(lambda f: log_likelihood(f["f"]).sum(), q, nodes)

    value, g = jax.jit(gradients)(q)
    return value, g["f"]


def test_gauss_hermite_is_exact_for_a_gaussian_likelihood():
    y, s2 = np.array([[0.0, 1.0, 2.0]]), 0.3
    value, g = gradients_1d(lambda f: -0.5 * (y - f) ** 2 / s2)
    np.testing.assert_allclose(value, (-0.5 * ((y - MEAN) ** 2 + VAR) / s2).sum(), rtol=1e-12)
    np.testing.assert_allclose(g.alpha, (y - MEAN) / s2, atol=1e-11)
    np.testing.assert_allclose(g.beta, np.full((1, 3), 1 / s2), atol=1e-11)


def test_gauss_hermite_for_a_poisson_likelihood():
    y = np.array([[0.0, 1.0, 4.0]])
    value, g = gradients_1d(lambda f: y * f - jnp.exp(f) - gammaln(y + 1))
    rate = np.exp(MEAN + VAR / 2)
    np.testing.assert_allclose(value, (y * MEAN - rate - gammaln(y + 1)).sum(), rtol=1e-12)
    # Twenty nodes integrate exp(f) at a variance below one to rounding.
    np.testing.assert_allclose(g.alpha, y - rate, atol=1e-10)
    np.testing.assert_allclose(g.beta, rate, atol=1e-10)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_gauss_hermite_moments_on_the_tensor_grid(dim):
    nodes, weights = GaussHermite(6).nodes(jax.random.key(0), dim)
    assert nodes.shape == (6**dim, dim) and weights.shape == (6**dim,)
    np.testing.assert_allclose(weights.sum(), 1.0)
    np.testing.assert_allclose(weights @ nodes, np.zeros(dim), atol=1e-12)
    np.testing.assert_allclose((weights[:, None] * nodes).T @ nodes, np.eye(dim), atol=1e-12)
    np.testing.assert_allclose(weights @ nodes**10, np.full(dim, 945.0), rtol=1e-10)  # degree 11


@pytest.mark.parametrize("dim", [1, 10])
def test_quasi_monte_carlo_moments(dim):
    rule = jax.jit(partial(QuasiMonteCarlo(128).nodes, dim=dim))
    nodes, weights = rule(jax.random.key(1))
    assert nodes.shape == (128, dim)
    np.testing.assert_allclose(weights.sum(), 1.0)
    np.testing.assert_allclose(weights @ nodes, np.zeros(dim), atol=1e-12)  # mirrored
    second = (weights[:, None] * nodes).T @ nodes
    np.testing.assert_allclose(second, np.eye(dim), atol=1e-12)  # orthonormal
    fourth = weights @ nodes**4  # 3 each, and of 64 independent draws sqrt(96 / 64) = 1.2 off
    assert np.sqrt(np.mean((fourth - 3) ** 2)) < 0.8
    other, _ = rule(jax.random.key(2))
    assert np.abs(np.sort(nodes[:, 0]) - np.sort(other[:, 0])).max() > 1e-4  # shifted by the key


def test_quasi_monte_carlo_with_few_nodes_is_rescaled():
    nodes, weights = jax.jit(partial(QuasiMonteCarlo(12).nodes, dim=10))(jax.random.key(1))
    assert np.isfinite(nodes).all()
    np.testing.assert_allclose(weights @ nodes**2, np.ones(10))


def test_quasi_monte_carlo_accuracy_beats_plain_monte_carlo():
    """E log softmax with eight latent functions, over random shifts of the lattice."""
    rng = np.random.default_rng(2)
    mean, sd = rng.standard_normal(8), rng.uniform(0.3, 1.0, 8)

    def integrand(z):  # log p(class 0)
        f = mean + sd * z
        return f[..., 0] - logsumexp(f, axis=-1)

    truth = integrand(rng.standard_normal((400_000, 8))).mean()  # error 0.001
    rule = QuasiMonteCarlo(128)
    keys = jax.random.split(jax.random.key(0), 40)
    nodes = jax.jit(jax.vmap(lambda key: rule.nodes(key, 8)[0]))(keys)
    lattice = integrand(np.asarray(nodes)).mean(-1)
    plain = [integrand(rng.standard_normal((128, 8))).mean() for _ in range(400)]
    errors = [np.sqrt(np.mean((np.array(x) - truth) ** 2)) for x in (lattice, plain)]
    # Measured: the ratio is 0.02, and 0.1 without the orthonormal nodes.
    assert errors[0] < 0.05 * errors[1]


def test_expectation_in_chunks_equals_one_sum(monkeypatch):
    """Many nodes are visited in turn, padded with weight zero."""
    monkeypatch.setattr(quadrature, "_VALUES_AT_ONCE", 4 * 64)
    q = {
        "f": Marginals(
            np.array([[0.1, 0.7], [-0.4, 0.2]]),
            np.array([[0.5, 0.6], [0.3, 0.9]]),
        )
    }
    nodes, weights = GaussHermite(9).nodes(jax.random.key(0), 2)  # 81 = 2 * 41 - 1
    axes = {"f": np.array([0, 1])}

    def log_likelihood(f):
        return jnp.sum(jnp.tanh(f["f"][0] * f["f"][1]))

    def direct(q):
        f = q.mean[None] + jnp.sqrt(q.variance)[None] * nodes[:, :, None]
        return (weights[:, None] * jnp.tanh(f[:, 0] * f[:, 1])).sum()

    value, g = jax.jit(lambda q: site_gradients(log_likelihood, q, Nodes(axes, nodes, weights)))(q)
    expected, h = jax.jit(jax.value_and_grad(direct))(q["f"])
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(g["f"].alpha, h.mean, atol=1e-12)
    np.testing.assert_allclose(g["f"].beta, -2 * h.variance, atol=1e-12)


@pytest.mark.parametrize(
    "order", [4, pytest.param(9, marks=pytest.mark.slow)], ids=["at once", "in chunks"]
)
def test_expectations_are_differentiated_in_what_else_the_likelihood_depends_on(order, monkeypatch):
    """A noise scale, together with the marginals; twice; and the gradients of the sites."""
    monkeypatch.setattr(quadrature, "_VALUES_AT_ONCE", 4 * 64)
    nodes, weights = GaussHermite(order).nodes(jax.random.key(0), 2)
    axes = {"f": np.array([0, 1])}

    def ours(x):
        def log_likelihood(f):
            return jnp.sum(jnp.tanh(f["f"][0] * f["f"][1] * jnp.exp(x[0])))

        q = {"f": Marginals(x[1:5].reshape(2, 2), jnp.exp(x[5:]).reshape(2, 2))}
        at = Nodes(axes, nodes, weights)
        _, g = site_gradients(log_likelihood, q, at)
        return expect(log_likelihood, q, at), g["f"].beta.sum()

    def direct(x):
        def total(mean, variance):
            f = mean + jnp.sqrt(variance) * nodes[:, :, None]
            return (weights[:, None] * jnp.tanh(f[:, 0] * f[:, 1] * jnp.exp(x[0]))).sum()

        q = x[1:5].reshape(2, 2), jnp.exp(x[5:]).reshape(2, 2)
        return total(*q), -2.0 * jax.grad(total, 1)(*q).sum()

    def look(f):
        def all_of(x):
            first = jax.jacrev(f)(x)
            forward = jax.jvp(f, (x,), (jnp.ones(9),))[1]
            return f(x), first, forward, jax.hessian(lambda x: f(x)[0])(x)

        return jax.jit(all_of)(jnp.linspace(-0.5, 0.8, 9))

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12),
        look(ours),
        look(direct),
    )


def test_default_rules():
    assert choose_quadrature(1) == choose_quadrature(2) == GaussHermite(20)
    assert choose_quadrature(3) == GaussHermite(10)
    assert isinstance(choose_quadrature(4), QuasiMonteCarlo)
