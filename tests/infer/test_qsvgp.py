"""q-SVGP: the mean-covariance parameterization, its two optimizers, and what it shares."""

import dataclasses
from functools import partial

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions.constraints import positive

from numpyro_tsvgp import (
    GP,
    QSVGP,
    TSVGP,
    AutoDualGaussian,
    AutoMomentGaussian,
    Riemannian,
    kernels,
    load,
    to_arviz,
)

N, M = 14, 5
rng = np.random.RandomState(0)
X = np.sort(rng.uniform(-2, 2, N))
Y = np.stack([np.sin(2 * X), np.cos(2 * X)]) + 0.3 * rng.standard_t(2, (2, N))
Z = np.linspace(-1.8, 1.8, M)


def robust(X, y=None):
    """Two functions that share a kernel, a prior mean, and negative curvature (Student-t)."""
    scale = numpyro.param("scale", 0.8, constraint=positive)
    variance = numpyro.param("variance", 1.3, constraint=positive)
    with numpyro.plate("two", 2, dim=-1):
        f = numpyro.sample("f", GP(kernels.RBF(scale, variance), X, mean=0.4))
    with numpyro.plate("rows", 2, dim=-2), numpyro.plate("data", len(X), dim=-1):
        numpyro.sample("y", dist.StudentT(3.0, f, 0.3), obs=y)


def binary(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", GP(kernels.Matern52(scale), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


LABELS = (np.sin(2 * X) > 0).astype(float)


# ---- the bound in moments of u, without whitening --------------------------------------------


def prior_covariance(scale, variance):
    return dense.jittered(dense.rbf(Z, Z, scale, variance))


def dense_bound(mean, S, y, scale=0.8, variance=1.3, clip=False):
    """The bound of one function of `robust`, as a function of the moments of its q(u)."""
    K = prior_covariance(scale, variance)
    m, v = dense.marginals(mean, S, K, dense.rbf(Z, X, scale, variance), variance)

    def expected(m, v):
        return dense.gauss_hermite(lambda f: dist.StudentT(3.0, f, 0.3).log_prob(y), 0.4 + m, v)

    if clip:  # beta = -2 dE/dv counts as zero where negative: the variance is held there
        beta = -2 * jax.grad(expected, 1)(m, v)
        v = jnp.where(beta > 0, v, jax.lax.stop_gradient(v))
    return expected(m, v) - dense.kl_divergence(mean, S, K)


@pytest.fixture(scope="module")
def moments():
    """An arbitrary q(u) for each function: means, and lower factors of covariances."""
    state = np.random.RandomState(1)
    factor = np.tril(0.2 * state.standard_normal((2, M, M)))
    factor[:, range(M), range(M)] = 0.3 + state.uniform(size=(2, M))
    return state.standard_normal((2, M)), factor


def starts(moments):
    """The same q as parameters of the three guides."""
    mean, factor = moments
    L = np.linalg.cholesky(prior_covariance(0.8, 1.3))
    white_mean = np.linalg.solve(L, mean[..., None])[..., 0]
    white = np.linalg.solve(L, factor)
    precision = np.linalg.inv(white @ white.mT)
    return {
        "q": {"f_auto_loc": mean, "f_auto_scale_tril": factor},
        "q_whitened": {"f_auto_loc": white_mean, "f_auto_scale_tril": white},
        "t": {
            "f_auto_linear": np.einsum("pij,pj->pi", precision, white_mean),
            "f_auto_quadratic": precision - np.eye(M),
            "f_auto_inverse": np.linalg.inv(L)[None],
            "f_auto_prior_mean": np.full((1, M), 0.4),
        },
    }


def drivers(model, optim=None, **options):
    Q, A = QSVGP, AutoMomentGaussian
    return {
        "q": Q(model, A(model, Z, whiten=False), optim, **options),
        "q_whitened": Q(model, A(model, Z), optim, **options),
        "t": TSVGP(model, AutoDualGaussian(model, Z), optim, **options),
    }


@pytest.mark.slow
def test_e_steps_are_natural_gradients_and_the_same_in_all_parameterizations(moments):
    """One step from an arbitrary q, against automatic differentiation in expectation parameters.

    The published claim is identity up to machine precision: 1e-10 leaves room for the condition
    number of K, about 1e3 here.
    """
    after, losses, duals = {}, {}, {}
    start = starts(moments)
    for name, svi in drivers(robust, site_lr=0.6).items():
        state = svi.init(jax.random.key(0), X, Y, init_params=start[name])
        state, losses[name] = jax.jit(svi.update)(state, X, Y)
        params = svi.get_params(state)
        after[name] = svi.guide.marginals(params, Z)["f"]
        duals[name] = svi.guide.dual_parameters(params, X)["f"]
    for name in ("q_whitened", "t"):
        np.testing.assert_allclose(after[name].mean, after["q"].mean, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(after[name].variance, after["q"].variance, rtol=1e-10)
        np.testing.assert_allclose(losses[name], losses["q"], rtol=1e-10)
        for ours, same in zip(duals[name], duals["q"], strict=True):  # differences of precisions
            np.testing.assert_allclose(ours, same, atol=1e-9 * np.abs(same).max())

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def gradient(first, second, y):
        return dense_bound(first, second - jnp.outer(first, first), y, clip=True)

    for i, y in enumerate(Y):
        mean, factor = moments[0][i], moments[1][i]
        S = factor @ factor.T
        g1, g2 = gradient(mean, S + np.outer(mean, mean), y)
        precision = np.linalg.inv(S) - 2 * 0.6 * 0.5 * (g2 + g2.T)
        linear = np.linalg.solve(S, mean) + 0.6 * g1
        S_new = np.linalg.inv(precision)
        # Marginals at Z are those of u, but for jitter.
        np.testing.assert_allclose(after["q"].mean[i] - 0.4, S_new @ linear, atol=1e-6)
        np.testing.assert_allclose(after["q"].variance[i], np.diag(S_new), atol=1e-6)


def test_bound_and_its_gradient_with_q_held(moments):
    """The M-step's objective at other hyperparameters, and its slope by finite differences."""
    start = starts(moments)
    mean, factor = moments
    L0 = np.linalg.cholesky(prior_covariance(0.8, 1.3))

    def dense(name, scale, variance):
        move = np.eye(M)
        if name == "q_whitened":  # q(v) is held: u = L(theta) v
            move = np.linalg.cholesky(prior_covariance(scale, variance)) @ np.linalg.inv(L0)
        args = [(move @ mean[i], move @ factor[i], Y[i]) for i in range(2)]
        return sum(dense_bound(m, A @ A.T, y, scale, variance) for m, A, y in args)

    for name, svi in drivers(robust, optax.sgd(0.0)).items():
        if name == "t":
            continue
        state = svi.init(jax.random.key(0), X, Y, init_params=start[name])

        def loss(log, svi=svi, state=state):
            free = {"scale": log[0], "variance": log[1], "f_auto_inducing": Z}
            return svi.evaluate(dataclasses.replace(state, optim_state=svi.optim.init(free)), X, Y)

        at = jnp.log(jnp.array([0.9, 0.7]))
        value, gradient = jax.jit(jax.value_and_grad(loss))(at)
        np.testing.assert_allclose(-value, dense(name, 0.9, 0.7), rtol=1e-9)
        for i in range(2):
            h = np.eye(2)[i] * 1e-5
            up, down = (dense(name, *np.exp(at + s * h)) for s in (1, -1))
            # Central differences of a bound of size 100: 1e-10 from h^2, 1e-9 from rounding.
            np.testing.assert_allclose(-gradient[i], (up - down) / 2e-5, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_riemannian_steps_are_those_of_tsvgp(moments):
    """Negative curvature is kept: the step differs from the clipped one, and B stays positive."""
    start, results = starts(moments), {}
    options = {"site_lr": 0.7, "e_steps": 3}
    for rule, names in ((Riemannian(), ("q", "t")), (None, ("q",))):
        svis = drivers(robust, rule=rule, **options)
        for name in names:
            svi = svis[name]
            state = svi.init(jax.random.key(0), X, Y, init_params=start[name])
            state, _ = jax.jit(svi.update)(state, X, Y)
            results[rule, name] = svi.guide.marginals(svi.get_params(state), X)["f"]
    q, t = results[Riemannian(), "q"], results[Riemannian(), "t"]
    np.testing.assert_allclose(q.mean, t.mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(q.variance, t.variance, rtol=1e-8)
    assert np.abs(q.mean - results[None, "q"].mean).max() > 1e-3


@pytest.mark.parametrize("whiten", [True, False])
def test_before_any_data_q_is_the_prior(whiten):
    svi = QSVGP(robust, AutoMomentGaussian(robust, Z, whiten=whiten), optax.adam(0.1))
    state = svi.init(jax.random.key(0), X, Y)
    q = svi.guide.marginals(svi.get_params(state), X)["f"]
    np.testing.assert_allclose(q.mean, 0.4, atol=1e-12)
    np.testing.assert_allclose(q.variance, 1.3, rtol=1e-7)


# ---- fits ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fits(tmp_path_factory):
    """The same posterior from natural gradients in both parameterizations and from Adam."""
    out = {}
    for name, svi in drivers(binary, optax.adam(0.1), site_lr=1.0, e_steps=3).items():
        if name != "q_whitened":
            out[name] = svi, svi.run(jax.random.key(0), 200, X, LABELS, progress_bar=False)
    schedule = optax.cosine_decay_schedule(0.1, 3000)
    guide = AutoMomentGaussian(binary, Z)
    svi = QSVGP(binary, guide, optax.adam(schedule), natural_gradients=False, m_steps=10)
    path = tmp_path_factory.mktemp("fit") / "adam.npz"
    result = svi.run(jax.random.key(0), 300, X, LABELS, progress_bar=False, checkpoint=path)
    saved = load(path, like=result)
    jax.tree.map(np.testing.assert_array_equal, saved.params, result.params)
    out["adam"] = svi, result
    return out


@pytest.mark.slow
def test_all_reach_the_same_optimum(fits):
    """Hyperparameters, inducing inputs and q are learned by three different routes."""
    _, reference = fits["t"]
    for _, result in fits.values():
        # The bound is flat in the inducing inputs, where first-order methods still crawl.
        np.testing.assert_allclose(result.losses[-1], reference.losses[-1], atol=2e-3)
        np.testing.assert_allclose(
            result.params["scale_auto_loc"], reference.params["scale_auto_loc"], rtol=0.02
        )
    for found in (result.fit.marginals(X)["f"].mean for _, result in fits.values()):
        np.testing.assert_allclose(found, reference.fit.marginals(X)["f"].mean, atol=0.05)
    start = fits["adam"][0].init(jax.random.key(0), X, LABELS)
    prior = fits["adam"][0].evaluate(start, X, LABELS)
    assert prior > reference.losses[-1] + 1.0  # there was something to learn


@pytest.mark.slow
def test_what_works_with_a_fit_works_with_this_one():
    svi = QSVGP(binary, AutoMomentGaussian(binary, Z), optax.adam(0.1), site_lr=1.0)
    fit = svi.run(jax.random.key(0), 20, X, LABELS, progress_bar=False).fit
    q = fit.marginals(X)["f"]
    draws = fit.sample(jax.random.key(1), X, sample_shape=(4000,))["f"]
    np.testing.assert_allclose(draws.mean(0), q.mean, atol=0.1)
    np.testing.assert_allclose(draws.var(0), q.variance, rtol=0.15)
    idata = to_arviz(jax.random.key(2), fit, num_samples=50)
    assert idata["posterior"]["f"].shape == (1, 50, N)
    # Draws of the prior do not know the data: its mean is zero, give or take 1 / sqrt(50).
    assert np.abs(idata["prior"]["f"].values.mean((0, 1))).max() < 0.7
    assert np.abs(q.mean).max() > 1.0


@pytest.mark.slow
def test_minibatches_without_natural_gradients():
    """Steps on halves of the data end near the exact posterior of all of them."""

    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.7), X))
        with numpyro.plate("data", len(X), subsample_size=7) as rows:
            numpyro.sample("y", dist.Normal(f[rows], 0.5), obs=None if y is None else y[rows])

    guide = AutoMomentGaussian(model, X[::2], learn_inducing=False)
    svi = QSVGP(model, guide, optax.adam(0.02), natural_gradients=False)
    result = svi.run(jax.random.key(0), 600, X, Y[0], progress_bar=False)
    Zs, K = X[::2], partial(dense.rbf, lengthscale=0.7)
    # Titsias' posterior mean with noise 0.5.
    inner = 0.25 * K(Zs, Zs) + K(Zs, X) @ K(X, Zs)
    exact = K(X, Zs) @ jnp.linalg.solve(inner, K(Zs, X) @ Y[0])
    ours = guide.marginals(result.params, X)["f"].mean
    # Noise of the halves at this rate is about half the posterior's standard deviation, 0.3.
    np.testing.assert_allclose(ours, exact, atol=0.3)
    assert np.abs(exact).max() > 1.0
    assert result.losses[-1] != result.losses[-2]  # batches differ


@pytest.mark.slow
def test_without_inducing_inputs_all_training_inputs_are():
    guide = AutoMomentGaussian(binary)
    svi = QSVGP(binary, guide, None, site_lr=1.0, e_steps=10)
    result = svi.run(jax.random.key(0), 2, X, LABELS, progress_bar=False)
    assert result.params["f_auto_scale_tril"].shape == (1, N, N)
    full = TSVGP(binary, AutoDualGaussian(binary), None, site_lr=1.0, e_steps=10)
    reference = full.run(jax.random.key(0), 2, X, LABELS, progress_bar=False)
    # Jitter is in the way: t-VGP knows that the inputs are the inducing inputs.
    np.testing.assert_allclose(result.losses[-1], reference.losses[-1], atol=1e-5)


def test_messages():
    moment, dual = AutoMomentGaussian(binary, Z), AutoDualGaussian(binary, Z)
    with pytest.raises(TypeError, match="QSVGP needs an AutoMomentGaussian guide"):
        QSVGP(binary, dual, None)
    with pytest.raises(TypeError, match="keeps moments. Fit that with QSVGP"):
        TSVGP(binary, moment, None)
    with pytest.raises(ValueError, match="optim must not be None"):
        QSVGP(binary, moment, None, natural_gradients=False)
