"""Leaving out data points that share rows of a GP, or whose likelihood is a factor."""

import arviz as az
import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy.stats import norm

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    NaturalGradient,
    influence,
    kernels,
    loo,
    loo_pit,
)
from numpyro_tsvgp.diagnostics import cavities
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.checks import inspect
from numpyro_tsvgp.model.layout import find_layout
from numpyro_tsvgp.model.shared_rows import shared_rows

ARVIZ_1 = int(az.__version__.split(".")[0]) >= 1
GROUPS, N, NOISE = 5, 13, 0.4
RNG = np.random.RandomState(3)
GROUP = RNG.randint(0, GROUPS, N)
GROUP[:GROUPS] = np.arange(GROUPS)[::-1]
T = np.linspace(0.0, 2.0, GROUPS)  # inputs of the groups
X = np.sort(RNG.rand(N))
Y = np.sin(2.0 * T)[GROUP] + NOISE * RNG.randn(N)
KEY = jax.random.key(0)


def pointwise(elpd):
    return np.asarray(elpd["elpd_i" if ARVIZ_1 else "loo_i"])


def fitted(model, *args, steps=1, rate=1.0, inducing=None, **options):
    guide = AutoDualGaussian(model, inducing=inducing, learn_inducing=False)
    svi = TSVGP(model, guide, None, site_lr=rate, **options)
    return svi.run(KEY, steps, *args, progress_bar=False).fit


def layout_of(model, *args):
    call = Call(args, {})
    return find_layout(model, *inspect(model, call), call, shared=True)


def by_group(t, group, y=None, mask=True):
    f = numpyro.sample("f", GP(kernels.RBF(0.8), t, mean=0.5, jitter=1e-12))
    with numpyro.plate("data", group.shape[0]), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(f[group], NOISE), obs=y)


def without_each():
    """Means and variances of f at the group of each point, without it: formulas."""
    K = np.asarray(kernels.RBF(0.8)(T, T)) + 1e-12 * np.eye(GROUPS)
    A = np.eye(GROUPS)[GROUP]
    for i in range(N):
        keep = np.arange(N) != i
        gain = K @ A[keep].T
        S = A[keep] @ gain + NOISE**2 * np.eye(N - 1)
        mean = 0.5 + gain @ np.linalg.solve(S, Y[keep] - 0.5)
        yield mean, K - gain @ np.linalg.solve(S, gain.T)


@pytest.fixture(scope="module")
def gaussian():
    return fitted(by_group, T, GROUP, Y)


def test_points_of_one_group_are_left_out_one_by_one(gaussian):
    expected = []
    for i, (mean, covariance) in enumerate(without_each()):
        sd = np.sqrt(covariance[GROUP[i], GROUP[i]] + NOISE**2)
        expected.append(norm.logpdf(Y[i], mean[GROUP[i]], sd))
    found = loo(gaussian, threshold=1.0)
    np.testing.assert_allclose(pointwise(found), expected, atol=1e-8)
    assert found["leverage"].dims == ("data",) and found["n_data_points"] == N


@pytest.mark.slow
def test_transforms_and_influence_of_points_of_one_group(gaussian):
    pit, kl = [], []
    q = gaussian.marginals()["f"]
    moved = influence(gaussian, delta=True)
    assert moved["f_delta"].shape == (N, GROUPS)
    for i, (mean, covariance) in enumerate(without_each()):
        m, s = mean[GROUP[i]], covariance[GROUP[i], GROUP[i]]
        pit.append(norm.cdf(Y[i], m, np.sqrt(s + NOISE**2)))
        # One value carries all that a point says, so that the divergence is that of its marginal.
        before, s_i = float(q.mean[GROUP[i]]), float(q.variance[GROUP[i]])
        kl.append(0.5 * (s / s_i - 1 - np.log(s / s_i) + (m - before) ** 2 / s_i))
        np.testing.assert_allclose(moved["f_delta"][i], mean - q.mean, atol=1e-7)
    np.testing.assert_allclose(moved.influence, kl, atol=1e-8)
    np.testing.assert_allclose(loo_pit(gaussian), pit, atol=1e-6)


@pytest.mark.slow
def test_refining_leaves_what_is_exact(gaussian):
    found = loo(gaussian, threshold=1.0)
    np.testing.assert_allclose(pointwise(loo(gaussian, refine=2)), pointwise(found), atol=1e-8)


@pytest.mark.slow
def test_masked_points_are_left_out():
    mask = np.arange(N) != 4
    found = loo(fitted(by_group, T, GROUP, Y, mask), threshold=1.0)
    np.testing.assert_array_equal(found["leverage"].coords["data"], np.flatnonzero(mask))
    other = loo(fitted(by_group, T, GROUP[mask], Y[mask]), threshold=1.0)
    np.testing.assert_allclose(pointwise(found), pointwise(other), atol=1e-10)


def counts(t, x, group, y=None, mask=True, *, alone=True):
    u = numpyro.sample("u", GP(kernels.RBF(0.8), t, jitter=1e-10))
    rate = u[group]
    if not alone:
        rate = rate + numpyro.sample("f", GP(0.5 * kernels.Matern32(0.3), x, jitter=1e-10))
    with numpyro.plate("data", group.shape[0]), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Poisson(jnp.exp(rate)), obs=y)


def together(*args):
    counts(*args, alone=False)


@pytest.mark.slow
@pytest.mark.parametrize("model", [counts, together], ids=["groups", "two GPs"])
def test_against_refits(model):
    """GPs with different numbers of rows, and a likelihood that is not Gaussian."""
    y = RNG.poisson(np.exp(np.sin(2.0 * T)[GROUP])).astype(float)
    guide = AutoDualGaussian(model, learn_inducing=False)
    svi = TSVGP(model, guide, None, site_lr=0.5, e_steps=200)
    masks = jnp.concatenate([~jnp.eye(N, dtype=bool), jnp.ones((1, N), bool)])
    start = svi.init(KEY, T, X, GROUP, y, masks[-1])

    def refit(mask):
        state, _ = svi.update(start, T, X, GROUP, y, mask)
        return state, guide.marginals(svi.get_params(state), T, X, GROUP, y, mask)

    states, without = jax.jit(lambda masks: jax.lax.map(refit, masks))(masks)
    fit = svi.fit(jax.tree.map(lambda a: a[-1], states), T, X, GROUP, y, masks[-1])
    mean = variance = 0.0  # of the sum of two independent Gaussians
    for name, q in without.items():
        rows = GROUP if name == "u" else np.arange(N)
        mean = mean + np.asarray(q.mean)[np.arange(N), rows]
        variance = variance + np.asarray(q.variance)[np.arange(N), rows]
    nodes, weights = dense.hermite(60)
    rate = np.exp(mean + np.sqrt(variance) * nodes[:, None])
    expected = np.log(weights @ np.exp(dist.Poisson(rate).log_prob(y)))
    error = np.abs(pointwise(loo(fit, threshold=1.0)) - expected)
    steps = 12 if model is counts else 100  # coupled sites settle slowly
    refined = np.abs(pointwise(loo(fit, refine=steps, threshold=1.0)) - expected)
    # The cavity holds the sites of the others; a few E-steps without the point move them.
    assert error.max() < 0.15 and error.mean() < 0.05
    assert refined.max() < min(0.2 * error.max(), 5e-3)


@pytest.mark.slow
def test_two_gps_that_meet_are_exact_once_refined():
    """A product of two posteriors, refitted in formulas: coordinate ascent.

    A weak second function and much noise: two hundred half steps then leave 1e-12 of the distance,
    where with the noise of the other tests, whose functions pull at one another, they leave 0.1.
    """
    noise = 1.0
    weak = 0.2 * kernels.RBF(0.8)

    def model(t, x, group, y=None):
        u = numpyro.sample("u", GP(weak, t, jitter=1e-10))
        f = numpyro.sample("f", GP(kernels.Matern32(0.3), x, jitter=1e-10))
        with numpyro.plate("data", group.shape[0]):
            numpyro.sample("y", dist.Normal(f + u[group], noise), obs=y)

    fit = fitted(model, T, X, GROUP, Y, steps=200, rate=0.5)
    Ku = np.asarray(weak(T, T)) + 0.2e-10 * np.eye(GROUPS)
    Kf = np.asarray(kernels.Matern32(0.3)(X, X)) + 1e-10 * np.eye(N)
    A = np.eye(GROUPS)[GROUP]
    found = pointwise(loo(fit, refine=200, threshold=1.0))
    frame = cavities.Frame.of(fit, {})
    q = cavities.refine(frame, cavities.at_points(frame), 200)
    for i in (0, 6, 12):
        W = np.diag((np.arange(N) != i) / noise**2)
        Su = np.linalg.inv(np.linalg.inv(Ku) + A.T @ W @ A)
        Sf = np.linalg.inv(np.linalg.inv(Kf) + W)
        u, f = np.zeros(GROUPS), np.zeros(N)
        for _ in range(3000):
            u = Su @ A.T @ W @ (Y - f)
            f = Sf @ W @ (Y - A @ u)
        g = GROUP[i]
        variance = Su[g, g] + Sf[i, i] + noise**2
        moments = [
            q["u"].mean[0, i],
            q["f"].mean[0, i],
            q["u"].variance[0, i],
            q["f"].variance[0, i],
        ]
        np.testing.assert_allclose(moments, [u[g], f[i], Su[g, g], Sf[i, i]], rtol=1e-7, atol=1e-8)
        # The integral over the two of them is by nodes, which are right to five digits here.
        assert found[i] == pytest.approx(norm.logpdf(Y[i], u[g] + f[i], variance**0.5), abs=1e-5)


@pytest.mark.slow
def test_what_a_rule_clips_is_shared_by_the_points_of_a_row():
    """Two outliers make the curvature of their row negative, which counts as zero."""

    def robust(t, group, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.8), t))
        with numpyro.plate("data", group.shape[0]):
            numpyro.sample("y", dist.StudentT(3.0, f[group], 0.1), obs=y)

    y = Y.copy()
    last = np.flatnonzero(GROUP[-1] == GROUP)
    y[last] = 9.0 * (-1.0) ** np.arange(len(last))
    fit = fitted(robust, T, GROUP, y, steps=3, rate=0.3, rule=NaturalGradient())
    at = cavities.at_points(cavities.Frame.of(fit, {}))["f"]
    total = cavities.at_points(
        cavities.Frame(fit, cavities.Frame.of(fit, {}).layout._replace(shared=None), {})
    )["f"]  # of rows
    for part in ("alpha", "beta"):
        rows = np.zeros(GROUPS)
        np.add.at(rows, GROUP, np.asarray(getattr(at, part))[0])
        np.testing.assert_allclose(rows, np.asarray(getattr(total, part))[0], atol=1e-10)
    assert (np.asarray(total.beta) == 0).any()
    assert np.isfinite(pointwise(loo(fit, threshold=1.0))).all()


# ---- factors ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_likelihood_by_factor_is_left_out_point_by_point(gaussian):
    def factor(t, group, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.8), t, mean=0.5, jitter=1e-12))
        with numpyro.plate("data", group.shape[0]):
            numpyro.factor("y", dist.Normal(f[group], NOISE).log_prob(y))

    found = loo(fitted(factor, T, GROUP, Y), threshold=1.0)
    expected = loo(gaussian, threshold=1.0)
    np.testing.assert_allclose(pointwise(found), pointwise(expected), atol=1e-10)
    assert found["leverage"].dims == ("data",)


@pytest.mark.slow
def test_a_factor_along_the_rows_without_a_plate():
    def factor(x, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), x))
        numpyro.factor("y", dist.Normal(f, NOISE).log_prob(y))

    def observed(x, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), x))
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    one, other = (loo(fitted(m, X, Y, inducing=X[::2]), threshold=1.0) for m in (factor, observed))
    np.testing.assert_allclose(pointwise(one), pointwise(other), atol=1e-12)


def test_a_factor_that_is_a_sum_is_refused():
    def factor(x, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), x))
        numpyro.factor("y", dist.Normal(f, NOISE).log_prob(y).sum())

    with pytest.raises(ValueError, match="single numbers.*one number for each data point"):
        layout_of(factor, X, Y)


# ---- layouts ---------------------------------------------------------------------------------


def test_sites_with_different_numbers_of_points_are_refused():
    def model(t, group, y):
        f = numpyro.sample("f", GP(kernels.RBF(0.8), t))
        numpyro.sample("y", dist.Normal(f[group], NOISE), obs=y)
        numpyro.sample("z", dist.Normal(f, NOISE), obs=jnp.zeros(GROUPS))

    with pytest.raises(ValueError, match=r"different numbers of data points, \{'y': 13, 'z': 5\}"):
        layout_of(model, T, GROUP, Y)


def test_sites_with_other_rows_of_one_point_are_refused():
    def model(t, group, y):
        f = numpyro.sample("f", GP(kernels.RBF(0.8), t))
        numpyro.sample("y", dist.Normal(f[group], NOISE), obs=y)
        numpyro.sample("z", dist.Normal(f[group[::-1]], NOISE), obs=y)

    with pytest.raises(ValueError, match=r"Data point \d+ .* reads different rows of one GP"):
        layout_of(model, T, GROUP, Y)


def test_one_event_of_all_data_has_no_points():
    def model(t, group, y):
        f = numpyro.sample("f", GP(kernels.RBF(0.8), t))
        fn = dist.Normal(f[group].reshape(1, -1), NOISE).to_event(1)
        numpyro.sample("y", fn, obs=y[None])

    with pytest.raises(ValueError, match="along no axis of it does each data point read one row"):
        layout_of(model, T, GROUP, Y)


@pytest.mark.slow
def test_batches_with_shared_rows_are_refused():
    fit = fitted(by_group, T, GROUP, Y, inducing=T)
    with pytest.raises(ValueError, match="loo over batches needs GPs with a row for each data"):
        loo(fit, batches=[(T, GROUP, Y)])


def test_turns():
    """Points of one turn share no row, and values go where they belong."""
    read = np.array([[1, 1], [1, 0], [1, 1], [0, 1], [1, 1]], bool)
    rows = np.array([[0, 2], [0, 0], [1, 2], [7, 1], [0, 1]])
    found = shared_rows(read, rows, {"a": (1, 3), "b": (1, 4)})
    for turn in found.turns:
        members = np.unique(turn)
        for p in range(2):
            own = rows[members, p][read[members, p]]
            assert len(set(own)) == len(own)
    assert sorted(set(found.turns.ravel())) == [0, 1, 2, 3, 4]
    rng = np.random.RandomState(0)
    values = {"a": jnp.asarray(rng.randn(1, 5)), "b": jnp.asarray(rng.randn(1, 5))}

    def function(at):  # of rows: each point reads its own
        a = jnp.where(read[:, 0], at["a"][0][np.minimum(rows[:, 0], 2)], 0.0)
        return (a + 10.0 * jnp.where(read[:, 1], at["b"][0][rows[:, 1]], 0.0))[None]

    expected = np.where(read[:, 0], values["a"][0], 0) + 10 * np.where(
        read[:, 1], values["b"][0], 0
    )
    np.testing.assert_allclose(found.at_own_values(function, values)[0], expected)
