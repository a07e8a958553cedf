"""Data points that come later, that go again, and inducing inputs that change: dense formulas."""

import dataclasses

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tsvgp import kernels
from numpyro_tsvgp.gaussian.moments import Moments, WhitenedMoments
from numpyro_tsvgp.gaussian.points import FullPoints, Points
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.tied import initial_tied
from numpyro_tsvgp.gaussian.whitened import PointSites

P = 2
Z = np.array([-1.0, -0.4, 0.3, 0.9])
X, X_NEW, X_TEST = np.linspace(-1.1, 0.6, 6), np.array([0.75, -0.15, 1.3]), np.linspace(-2, 2, 5)
KINDS = ["tied", "moving", "points", "full points", "moments", "whitened moments"]


def each(*kinds, fast):
    """Kinds of approximations with kernels of their own; shared kernels and the rest are slow."""
    return pytest.mark.parametrize(
        ("kind", "own"),
        [
            pytest.param(kind, own, marks=[pytest.mark.slow] * (not own or kind not in fast))
            for kind in kinds
            for own in (True, False)
        ],
    )


def mean_at(X):
    return jnp.stack([0.5 + 0.3 * X, -0.2 * X**2])


def scales(own):
    return np.array([[0.5], [0.8]]) if own else np.array([[0.6]])


def process_at(own, X, approximation=None):
    inputs = X if approximation is None else approximation.mean_inputs
    kernel = kernels.RBF(scales(own), np.array([1.2]))
    return Process(kernel, jnp.asarray(X), mean_at(X), mean_at(inputs), None, (P,))


def sites_of(seed, n):
    rng = np.random.default_rng(seed)
    return PointSites(
        jnp.asarray(rng.standard_normal((P, n))), jnp.asarray(rng.uniform(0.2, 2, (P, n)))
    )


def empty(kind, own, Z=Z):
    process = process_at(own, X[:0])
    nothing = jnp.zeros((P, 0)), jnp.zeros((P, 0)), jnp.asarray(X[:0]), mean_at(X[:0])
    return {
        "tied": lambda: initial_tied(process, jnp.asarray(Z), mean_at(Z), moving=False),
        "moving": lambda: initial_tied(process, jnp.asarray(Z), mean_at(Z), moving=True),
        "points": lambda: Points(*nothing, jnp.asarray(Z)),
        "full points": lambda: FullPoints(*nothing),
        "moments": lambda: Moments.initial(process, jnp.asarray(Z)),
        "whitened moments": lambda: WhitenedMoments.initial(process, jnp.asarray(Z)),
    }[kind]()


@jax.jit
def extended(kept, process, sites):
    """With points added through the contract alone, and the marginals at them."""
    at = kept.at_new_data(process)
    carry = at.start().add(sites, at.features)
    q = at.posterior(carry)
    new = at.keep(carry)
    return new, at.local(q), at.divergence(q), at.fresh_bound(new)


def add(kept, own, X, sites):
    return extended(kept, process_at(own, X, kept), sites)


def exact(own, p, Z, X, sites, X_test):
    """Marginals of q without the mean, where sites of the points X act through f(Z)."""

    def covariance(A, B):
        return dense.rbf(A, B, scales(own)[p if own else 0, 0], 1.2)

    A = np.linalg.solve(dense.jittered(covariance(Z, Z)), covariance(Z, X))
    if Z is X:
        A = np.eye(len(X))
    dual = A @ sites.linear[p], (A * sites.quadratic[p]) @ A.T
    return dense.posterior(covariance, Z, X_test, dual)


@each(*KINDS, fast=("full points",))
def test_new_points_are_as_if_they_had_always_been_there(kind, own):
    old, new = sites_of(1, len(X)), sites_of(2, len(X_NEW))
    first = add(empty(kind, own), own, X, old)[0]
    both, local, divergence, (marginals, bound_divergence) = add(first, own, X_NEW, new)
    every = PointSites(*(np.concatenate(pair, -1) for pair in zip(old, new, strict=True)))
    X_all = np.concatenate([X, X_NEW])
    places = X_all if kind == "full points" else Z
    there = jax.jit(lambda kept, at: kept.marginals(at))(both, process_at(own, X_TEST, both))
    kl = 0.0
    for p in range(P):
        q = exact(own, p, places, X_all, every, X_TEST)
        np.testing.assert_allclose(there.mean[p], q.mean, atol=1e-7)
        np.testing.assert_allclose(there.variance[p], q.variance, atol=1e-7)
        at_new = exact(own, p, places, X_all, every, X_NEW)
        np.testing.assert_allclose(local.mean[p], at_new.mean, atol=1e-7)
        np.testing.assert_allclose(local.variance[p], at_new.variance, atol=1e-7)
        np.testing.assert_allclose(marginals.mean[p], at_new.mean, atol=1e-7)
        kl += q.kl
    np.testing.assert_allclose([divergence, bound_divergence], kl, rtol=1e-6)

    # And gone again, in another order than they came.
    order = np.array([2, 0, 1])
    process = process_at(own, X_NEW[order], both)
    without = both.without_points(process, PointSites(*(x[:, order] for x in new)))
    look = jax.jit(lambda kept, at: (kept.marginals(at), kept.kl(at)))
    found, expected = (look(kept, process_at(own, X_TEST, kept)) for kept in (without, first))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), found, expected)
    if kind in ("points", "full points"):
        np.testing.assert_array_equal(without.inputs, X)
        np.testing.assert_allclose(without.linear, first.linear, atol=1e-12)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "points")) for k in KINDS]
)
def test_points_that_are_not_there_are_not_taken_out(kind):
    kept = add(empty(kind, True), True, X[:3], sites_of(1, 3))[0]
    with pytest.raises(ValueError, match="not in the fit"):
        kept.without_points(process_at(True, X_NEW[:1], kept), sites_of(2, 1))


def test_of_two_points_at_one_input_the_one_meant_goes():
    sites = sites_of(3, 4)
    X = np.array([0.1, 0.5, 0.1, 0.1])
    kept = add(empty("points", True), True, X, sites)[0]
    gone = PointSites(sites.linear[:, 2:3], sites.quadratic[:, 2:3])
    left = kept.without_points(process_at(True, X[2:3], kept), gone)
    np.testing.assert_array_equal(left.quadratic, np.delete(sites.quadratic, 2, 1))


@each("tied", "moving", "points", "moments", "whitened moments", fast=())
def test_other_inducing_inputs(kind, own):
    """Sums are statements about f at the old inputs, which the new inducing values predict."""
    sites = sites_of(4, len(X))
    kept = add(empty(kind, own), own, X, sites)[0]

    @jax.jit
    def moved(kept, process, Z):
        return kept.with_inducing(process, Z, mean_at(Z))

    @jax.jit
    def marginals(kept, process):
        return kept.marginals(process)

    def at_test(kept):
        return marginals(kept, process_at(own, X_TEST, kept))

    before = at_test(kept)
    more, fewer = np.concatenate([[1.7], Z, [0.05]]), np.array([-0.8, 0.3, 0.7])
    there = {
        m: moved(kept, process_at(own, X, kept), jnp.asarray(m_Z))
        for m, m_Z in (("more", more), ("fewer", fewer))
    }
    again = moved(there["more"], process_at(own, X, there["more"]), jnp.asarray(Z))
    if kind != "points":  # nothing is lost where all old inputs are among the new
        for found in (at_test(there["more"]), at_test(again)):
            np.testing.assert_allclose(found.mean, before.mean, atol=1e-7)
            np.testing.assert_allclose(found.variance, before.variance, atol=1e-7)
    found = at_test(there["fewer"])
    for p in range(P):

        def covariance(A, B, p=p):
            return dense.rbf(A, B, scales(own)[p if own else 0, 0], 1.2)

        A = np.linalg.solve(dense.jittered(covariance(Z, Z)), covariance(Z, X))
        dual = A @ sites.linear[p], (A * sites.quadratic[p]) @ A.T
        K, cross = dense.jittered(covariance(fewer, fewer)), covariance(fewer, Z)
        cross[1, 2] += 1.2e-8  # the one that stays keeps its jitter
        predict = np.linalg.solve(K, cross)
        dual = predict @ dual[0], predict @ dual[1] @ predict.T
        if kind == "points":  # sites of points stay with their points
            A = np.linalg.solve(K, covariance(fewer, X))
            dual = A @ sites.linear[p], (A * sites.quadratic[p]) @ A.T
        q = dense.posterior(covariance, fewer, X_TEST, dual)
        np.testing.assert_allclose(found.mean[p], q.mean, atol=1e-7)
        np.testing.assert_allclose(found.variance[p], q.variance, atol=1e-7)


def test_no_inducing_inputs_to_move():
    kept = add(empty("full points", False), False, X, sites_of(4, len(X)))[0]
    with pytest.raises(ValueError, match="no inducing inputs that could be moved"):
        kept.with_inducing(process_at(False, X, kept), jnp.asarray(Z), mean_at(Z))


@pytest.mark.slow
@each("tied", "points", "full points", "whitened moments", fast=("full points",))
def test_new_points_act_through_the_covariance(kind, own):
    """Adding a point moves the mean elsewhere along the covariance with it."""
    kept = add(empty(kind, own), own, X, sites_of(5, len(X)))[0]
    x = X_NEW[:2]
    site = PointSites(jnp.array([[0.7, 0.2], [-0.3, 0.4]]), jnp.array([[0.9, 0.5], [0.4, 1.1]]))
    new, _, _, _ = add(kept, own, x, site)

    @jax.jit
    def compute(kept, new, pending, test, test_of_new):
        own_covariance = kept.covariance(pending, pending)
        cross = kept.covariance(test, pending)
        return (
            own_covariance,
            cross,
            kept.marginals(pending),
            kept.marginals(test),
            new.marginals(test_of_new),
        )

    pending, test = process_at(own, x, kept), process_at(own, X_TEST, kept)
    C, cross, at, before, after = compute(kept, new, pending, test, process_at(own, X_TEST, new))
    for p in range(P):
        D = np.diag(site.quadratic[p])
        gain = np.linalg.solve(np.eye(2) + D @ C[p], site.linear[p] - D @ at.mean[p])
        lost = cross[p] @ np.linalg.solve(np.eye(2) + D @ C[p], D) @ cross[p].T
        np.testing.assert_allclose(after.mean[p], before.mean[p] + cross[p] @ gain, atol=1e-6)
        np.testing.assert_allclose(after.variance[p], before.variance[p] - np.diag(lost), atol=1e-6)


@pytest.mark.slow
def test_an_approximation_without_a_change_is_unchanged():
    """Inducing inputs moved to where they are."""
    kept = add(empty("tied", True), True, X, sites_of(6, len(X)))[0]
    same = kept.with_inducing(process_at(True, X, kept), kept.inducing, mean_at(Z))
    for field in dataclasses.fields(kept):
        a, b = getattr(kept, field.name), getattr(same, field.name)
        np.testing.assert_allclose(a, b, atol=1e-10)
