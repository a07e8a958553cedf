"""Sites and what they say of f: tied sums and sites of points, against dense moments."""

import dataclasses

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tsvgp import kernels
from numpyro_tsvgp.gaussian import whitened
from numpyro_tsvgp.gaussian.features import at_inducing, prior_at
from numpyro_tsvgp.gaussian.points import Points, initial_points
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.tied import MovingTied, Tied, initial_tied
from numpyro_tsvgp.gaussian.whitened import PointSites, Sums

P, M, N = 2, 4, 7
Z, X = np.linspace(-1, 1, M), np.linspace(-1.2, 1.1, N)
MOVED = Z + np.array([0.2, -0.1, 0.15, 0.05])

each_kernel = pytest.mark.parametrize("own", [False, True], ids=["shared kernel", "own kernels"])


def mean_at(X, shift=0.0):
    """A prior mean for each function, ``(P, n)``."""
    return jnp.stack([0.5 + 0.3 * X + shift, -0.2 * X**2 - shift])


def make(own, scale, means, shift=0.0):
    """A process of squared exponentials, and the dense covariances of each latent function."""
    scales = (np.array([[0.5], [0.8]]) if own else np.array([[0.6]])) * scale
    kernel = kernels.RBF(scales, np.array([1.2]))
    process = Process(kernel, X, mean_at(X, shift), means, None, (P,))

    def covariance(p):
        return lambda A, B: dense.rbf(A, B, scales[p if own else 0, 0], 1.2)

    return process, [covariance(p) for p in range(P)]


def random_duals():
    rng = np.random.default_rng(3)
    linear, root = rng.standard_normal((P, M)), rng.standard_normal((P, M, M))
    return linear, root @ root.swapaxes(-1, -2)


def tied(duals, process, **anchor):
    """Tied sites of given duals, about f without its mean, made at Z and a process there."""
    prior = prior_at(process, Z)
    factor = jnp.broadcast_to(prior.chol, (P, M, M))
    linear = jnp.einsum("pij,pi->pj", factor, duals[0])
    kind = MovingTied if anchor else Tied
    return kind(Z, linear, factor.mT @ duals[1] @ factor, prior.inverse, process.means, **anchor)


@each_kernel
def test_posterior_of_sites_made_at_another_prior(own):
    """Hyperparameters of the kernel and of the mean have moved since; what sites say of f stays."""
    duals = random_duals()
    old, _ = make(own, 1.3, mean_at(Z))
    new, covariances = make(own, 1.0, mean_at(Z, 0.7), shift=0.7)

    @jax.jit
    def compute():
        made = tied(duals, old)
        return made.marginals(new), made.kl(new), made.joint(new), made.dual_parameters(new)

    local, kl, joint, now = compute()
    assert prior_at(new, Z).chol.shape == (P if own else 1, M, M)
    moved = np.asarray(mean_at(Z) - mean_at(Z, 0.7))
    expected = []
    for p in range(P):
        # A statement about f: its linear part about another mean differs by Lambda times the move.
        dual = duals[0][p] + duals[1][p] @ moved[p], duals[1][p]
        for ours, theirs in zip(now, dual, strict=True):
            np.testing.assert_allclose(ours[p], theirs, rtol=1e-7, atol=1e-7)
        expected.append(dense.posterior(covariances[p], Z, X, dual))
    for p, q in enumerate(expected):
        np.testing.assert_allclose(local.mean[p], q.mean, atol=1e-10)
        np.testing.assert_allclose(local.variance[p], q.variance, atol=1e-10)
        np.testing.assert_allclose(joint.mean[p] - new.loc[p], q.mean, atol=1e-10)
        np.testing.assert_allclose(joint.variance[p], q.variance, atol=1e-7)  # with jitter
        values = q.mean + np.asarray(new.loc[p]) + 0.1
        covariance = q.covariance + 1.2e-8 * np.eye(N)
        np.testing.assert_allclose(
            joint.log_prob(jnp.broadcast_to(values, (P, N)))[p],
            dense.log_normal(np.full(N, 0.1), covariance),
            rtol=1e-5,
        )
        # What sites can move of the variance is what is left of it at the inducing inputs.
        prior = dense.posterior(covariances[p], Z, X, (np.zeros(M), np.zeros((M, M))))
        K = dense.jittered(covariances[p](Z, Z))
        unexplained = 1.2 - (covariances[p](Z, X) * np.linalg.solve(K, covariances[p](Z, X))).sum(0)
        np.testing.assert_allclose(local.explained[p], q.variance - unexplained, atol=1e-9)
        assert prior.kl == pytest.approx(0.0, abs=1e-9)
    np.testing.assert_allclose(kl, sum(q.kl for q in expected), rtol=1e-9)


@each_kernel
def test_sites_follow_inducing_inputs_that_move(own):
    """They stay statements about f at the old inputs, which the new inducing values predict."""
    linear, quadratic = random_duals()
    old, _ = make(own, 1.3, mean_at(Z))
    anchored = tied((linear, quadratic), old, anchor=jnp.asarray(Z))
    new, covariances = make(own, 1.0, jnp.concatenate([mean_at(Z), mean_at(MOVED)], -1))

    @jax.jit
    def sums(to):
        made = dataclasses.replace(anchored, inducing=to)
        prior = prior_at(new, to)
        here = dataclasses.replace(new, means=mean_at(to))
        return made.sums(new, prior), made.remade(made.sums(new, prior), new, prior).sums(
            here, prior
        )

    (xi, gram), remade = sums(MOVED)
    for p, covariance in enumerate(covariances):
        K = dense.jittered(covariance(MOVED, MOVED))
        cross = covariance(MOVED, Z) + 1e-8 * 1.2 * np.eye(M)
        predict, L = np.linalg.solve(K, cross), np.linalg.cholesky(K)
        np.testing.assert_allclose(xi[p], L.T @ predict @ linear[p], atol=1e-9)
        expected = L.T @ predict @ quadratic[p] @ predict.T @ L
        np.testing.assert_allclose(gram[p], expected, atol=1e-9)
    for a, b in zip((xi, gram), remade, strict=True):  # kept in the new coordinates
        np.testing.assert_allclose(a, b, atol=1e-9)
    still = dataclasses.replace(new, means=mean_at(Z))
    stays = jax.jit(lambda: tied((linear, quadratic), old).sums(still, prior_at(new, Z)))()
    for a, b in zip(sums(Z)[0], stays, strict=True):  # where nothing has moved
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


def test_moving_inducing_inputs_never_strengthens_sites():
    """At fixed hyperparameters G can only shrink, however close together the inputs are."""
    close = np.array([-0.5, -0.499, 0.0, 0.001, 0.5])
    zero = jnp.zeros((1, 10))
    process = Process(kernels.RBF(0.5), X, jnp.zeros((1, N)), zero, None, ())
    inverse = prior_at(process, close).inverse
    fields = jnp.zeros((1, 5)), jnp.eye(5)[None], inverse, zero[:, :5]

    @jax.jit
    def move(to):
        prior = prior_at(process, to)
        kinds = MovingTied(to, *fields, anchor=jnp.asarray(close)), Tied(to, *fields)
        return [made.sums(process, prior).gram[0] for made in kinds]

    for step in (1e-4, 1e-2, 1.0):
        gram, frozen = move(close + step * np.array([1.0, -1.0, 0.5, 1.0, -1.0]))
        # Rounding: 1e-16 over the jitter of 1e-8.
        assert np.linalg.eigvalsh(gram).max() < 1 + 1e-6
        if step == 1e-4:  # the same lambda at the new inputs, for comparison
            assert np.linalg.eigvalsh(frozen).max() > 1.1


@each_kernel
def test_point_sites_are_sums_over_features(own):
    """About f: the mean at the data, wherever it is now, is taken off the linear part."""
    rng = np.random.default_rng(4)
    linear, quadratic = rng.standard_normal((P, N)), rng.uniform(0, 1, (P, N))
    process, covariances = make(own, 1.0, mean_at(X))
    made = Points(linear, quadratic, X, mean_at(X, 9.0), Z)

    @jax.jit
    def compute():
        prior = prior_at(process, Z)
        at = made.at_data(process)
        start = at.start()
        return made.sums(process, prior), at.features, at.local(at.posterior(start)), at.bound()

    (xi, gram), at, local, (marginals, kl) = compute()
    kls = []
    for p, covariance in enumerate(covariances):
        K = dense.jittered(covariance(Z, Z))
        W = np.linalg.solve(np.linalg.cholesky(K), covariance(Z, X))
        centred = linear[p] - quadratic[p] * np.asarray(mean_at(X)[p])
        np.testing.assert_allclose(xi[p], W @ centred, atol=1e-10)
        np.testing.assert_allclose(gram[p], (W * quadratic[p]) @ W.T, atol=1e-10)
        np.testing.assert_allclose(
            np.maximum(at.residual[p if own else 0], 0), 1.2 - (W**2).sum(0), atol=1e-10
        )
        A = np.linalg.solve(K, covariance(Z, X))
        q = dense.posterior(covariance, Z, X, (A @ centred, (A * quadratic[p]) @ A.T))
        for found in (local, marginals):
            np.testing.assert_allclose(found.mean[p], q.mean, atol=1e-9)
            np.testing.assert_allclose(found.variance[p], q.variance, atol=1e-9)
        kls.append(q.kl)
    np.testing.assert_allclose(kl, sum(kls), rtol=1e-9)


@pytest.mark.parametrize("kind", ["tied", "points"])
def test_blending_and_adding_sites(kind):
    """A step goes part of the way to new sites; what is added is in the posterior, once."""
    rng = np.random.default_rng(5)
    new = PointSites(rng.standard_normal((P, N)), rng.uniform(0.1, 1, (P, N)))
    process, _ = make(True, 1.0, mean_at(Z if kind == "tied" else X))
    made = initial_points(process, Z)
    if kind == "tied":
        made = tied(random_duals(), process)
    else:
        made = dataclasses.replace(made, linear=jnp.ones((P, N)), quadratic=jnp.ones((P, N)))

    @jax.jit
    def compute():
        at = made.at_data(process)
        start = at.start()

        def sums(carry):
            return at.keep(carry).sums(process, at.prior)

        asked = whitened.sum_sites(new, at.features)
        blended, added = start.blend(new, at.features, 0.3), start.add(new, at.features)
        return sums(start), asked, sums(blended), sums(added)

    before, asked, blended, added = compute()
    for a, b, c, d in zip(before, asked, blended, added, strict=True):
        np.testing.assert_allclose(c, 0.7 * a + 0.3 * b, atol=1e-9)
        np.testing.assert_allclose(d, a + b, atol=1e-9)


def test_sites_of_zero_give_the_prior():
    process, _ = make(False, 1.0, mean_at(Z))
    zero = initial_tied(process, Z, mean_at(Z), moving=False)
    taken_back = tied(random_duals(), process).without_data()
    look = jax.jit(lambda made: (made.marginals(process), made.kl(process)))
    for made in (zero, taken_back):
        local, kl = look(made)
        np.testing.assert_allclose(local.mean, np.zeros((P, N)), atol=1e-12)
        np.testing.assert_allclose(local.variance, np.full((P, N), 1.2), rtol=1e-7)
        np.testing.assert_allclose(kl, 0.0, atol=1e-12)


def test_variances_that_round_to_nothing_are_raised_and_counted():
    """Precise data at the inducing inputs leave less variance than its rounding error."""
    process = Process(kernels.RBF(0.5), Z, jnp.zeros((1, M)), jnp.zeros((1, M)), 0.0, ())
    prior = prior_at(process, Z)
    at = at_inducing(prior)
    for precision, count in ((1e20, M), (1.0, 0)):
        q = whitened.posterior(Sums(jnp.zeros((1, M)), precision * jnp.eye(M)[None]))
        assert whitened.count_floored(q, at) == count
        assert whitened.marginals(q, at).variance.min() >= np.finfo(float).eps
