"""Objectives of the M-step against brute-force evidence, dense formulas and one another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import jittered, log_normal, rbf
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_tsvgp import (
    GP,
    QSVGP,
    TSVGP,
    AutoDualGaussian,
    AutoMomentGaussian,
    Bound,
    EPLike,
    ExpectationPropagation,
    TighterBound,
    collapse,
    kernels,
)
from numpyro_tsvgp.infer.steps.density import objective_of, sites_of_points
from numpyro_tsvgp.model.arguments import Call

KEY = jax.random.key(0)
RNG = np.random.RandomState(3)
N = 4
X = np.array([-1.4, -0.3, 0.4, 1.3])
Z = np.array([-1.0, 0.9])
LIKELIHOODS = {
    "normal": lambda f: dist.Normal(f, 0.4),
    "bernoulli": lambda f: dist.Bernoulli(logits=2.0 * f),
    "poisson": lambda f: dist.Poisson(jnp.exp(f)),
    "student": lambda f: dist.StudentT(3.0, f, 0.4),
}


def model_of(name):
    def model(X, y, lengthscale, variance):
        f = numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X, mean=0.2))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", LIKELIHOODS[name](f), obs=y)

    return model


MODELS = {name: model_of(name) for name in LIKELIHOODS}


def nodes(order=24):
    x, w = np.polynomial.hermite_e.hermegauss(order)
    z = np.stack(np.meshgrid(*[x] * N, indexing="ij"), -1).reshape(-1, N)
    weights = np.prod(np.meshgrid(*[w / w.sum()] * N, indexing="ij"), 0).ravel()
    return z, np.log(weights)


GRID = nodes()


@jax.jit
def _log_sum(values):
    return jax.nn.logsumexp(values)


def evidence(name, X, y, lengthscale, variance):
    """The log evidence of four points, on a grid of all of their function values."""
    K = jittered(rbf(X, X, lengthscale, variance))
    if name == "normal":
        return log_normal(y - 0.2, K + 0.4**2 * np.eye(N))
    z, log_weights = GRID
    f = 0.2 + z @ np.linalg.cholesky(K).T
    log_prob = np.asarray(LIKELIHOODS[name](f).log_prob(y)).sum(-1)
    return float(_log_sum(log_prob + log_weights))


def draw(name, seed):
    """Inputs, data, hyperparameters and inducing inputs."""
    rng = np.random.RandomState(seed)
    X = np.sort(rng.uniform(-2.0, 2.0, N))
    lengthscale, variance = np.exp(rng.uniform(-1.0, 1.0)), np.exp(rng.uniform(-1.5, 0.7))
    f = 0.2 + np.linalg.cholesky(jittered(rbf(X, X, lengthscale, variance))) @ rng.randn(N)
    y = np.asarray(LIKELIHOODS[name](f).sample(jax.random.key(seed))).astype(float)
    return (X, y, lengthscale, variance), np.sort(rng.uniform(-2.0, 2.0, 2))


def values_of(name, inducing, objectives, **options):
    """A function of arguments, inducing inputs and a number of E-steps: all objectives there."""
    model = MODELS[name]
    args, Z = draw(name, 0)
    guide = AutoDualGaussian(model, Z if inducing else None, learn_inducing=False, **options)
    drivers = [TSVGP(model, guide, None, objective=o, site_lr=0.5) for o in objectives]
    start = drivers[0].init(KEY, *args)

    @jax.jit
    def evaluate(args, Z, steps):
        args = tuple(jnp.asarray(a) for a in args)
        state = start
        if inducing:
            state = dataclasses.replace(
                state, approximation={**state.approximation, "f_auto_inducing": Z}
            )
        state = jax.lax.fori_loop(0, steps, lambda _, s: drivers[0].update(s, *args)[0], state)
        return [-driver.evaluate(state, *args) for driver in drivers]

    return evaluate


# ---- between the bound and the evidence ------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "normal",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("poisson", "bernoulli", "student")),
    ],
)
def test_tighter_bounds_lie_between(name):
    """At any inputs, data, hyperparameters and sites; rounding and jitter aside."""
    objectives = [Bound(), TighterBound()] + [TighterBound(per_point=True)] * (name == "normal")
    evaluate = values_of(name, True, [*objectives, EPLike()])
    tighter = 0
    for seed in range(1, 26):
        args, Z = draw(name, seed)
        bound, *better, ep = map(float, evaluate(args, Z, seed % 7))
        whole = evidence(name, *args)
        for value in better:
            assert bound - 1e-9 <= value <= whole + 1e-4
        assert better == sorted(better)  # per point is better than one number
        assert ep >= bound - 1e-9  # by Jensen's inequality in each of its terms
        tighter += better[0] > bound + 1e-3
    assert tighter > 10  # or there would be nothing to see


def _sparse_regression(X, y, Z, noise):
    K, k = jittered(rbf(Z, Z)), rbf(Z, X)
    Q = k.T @ np.linalg.solve(K, k)
    return Q + noise**2 * np.eye(len(X)), 1.0 - np.diag(Q)


@pytest.mark.parametrize("sites", ["tied", pytest.param("untied", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_published_forms_for_a_gaussian_likelihood(sites):
    """Known noise that differs from point to point; log N(y; 0, Q + S) is what both start from."""
    rng = np.random.RandomState(1)
    X, Z, noise = np.sort(rng.uniform(-2, 2, 12)), np.linspace(-2, 2, 4), rng.uniform(0.2, 0.7, 12)
    y = np.sin(2 * X) + noise * rng.randn(12)

    def model(X, y):
        f = numpyro.sample("f", GP(kernels.RBF(1.0), X))
        with numpyro.plate("data", 12):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    found = {}
    for objective in (Bound(), TighterBound(per_point=True), EPLike()):
        guide = AutoDualGaussian(model, Z, sites=sites)
        svi = TSVGP(model, guide, None, objective=objective, site_lr=1.0)
        state = svi.run(KEY, 1, X, y, progress_bar=False).state
        found[objective] = -float(svi.evaluate(state, X, y))
    C, d = _sparse_regression(X, y, Z, noise)
    fitted = log_normal(y, C)
    bound = fitted - 0.5 * (d / noise**2).sum()
    one_line = fitted - 0.5 * np.log1p(d / noise**2).sum()
    # Of EP: each point is predicted from the others through the inducing values, and the variance
    # that those do not explain is added to its predictive variance.
    inverse = np.linalg.inv(C)
    variance = 1 / np.diag(inverse)
    mean = y - variance * (inverse @ y)
    ep = (
        fitted
        + (
            norm.logpdf(y, mean, np.sqrt(variance + d)) - norm.logpdf(y, mean, np.sqrt(variance))
        ).sum()
    )
    expected = [bound, one_line, float(ep)]
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-7)
    assert bound < one_line < log_normal(y, rbf(X, X) + np.diag(noise**2))


# ---- the EP-like objective -------------------------------------------------------------------


def _regression(X, y=None):
    variance = numpyro.param("variance", 1.3)
    noise = numpyro.param("noise", 0.4)
    f = numpyro.sample("f", GP(kernels.RBF(0.7, variance), X, mean=numpyro.param("mean", 0.3)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def test_ep_like_is_the_evidence_of_a_gaussian_likelihood():
    """Value and gradient in all hyperparameters, with sites held."""
    X = np.sort(RNG.uniform(-2, 2, 15))
    y = np.sin(2 * X) + 0.4 * RNG.randn(15)
    svi = TSVGP(
        _regression, AutoDualGaussian(_regression), optax.sgd(0.0), site_lr=1.0, objective=EPLike()
    )
    state, _ = jax.jit(svi.update)(svi.init(KEY, X, y), X, y)

    def log_evidence(free):
        K = rbf(X, X, 0.7, free["variance"])
        C = K + (1e-8 * free["variance"] + free["noise"] ** 2) * jnp.eye(15)
        return jax.scipy.stats.multivariate_normal.logpdf(y, free["mean"] * jnp.ones(15), C)

    free = {
        name: jnp.asarray(v) for name, v in {"variance": 1.3, "noise": 0.4, "mean": 0.3}.items()
    }
    value, slopes = jax.value_and_grad(log_evidence)(free)

    @jax.jit
    @jax.value_and_grad
    def loss(free):
        return svi.loss(state, free, KEY, Call((X, y), {}))

    ours, our_slopes = loss(svi.free(state.optim_state))
    np.testing.assert_allclose(-ours, value, rtol=1e-10)
    for name, slope in slopes.items():
        np.testing.assert_allclose(-our_slopes[name], slope, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"inducing": np.linspace(0.0, 4.0, 9), "learn_inducing": False},
        {"inducing": np.linspace(0.0, 4.0, 9), "learn_inducing": False, "sites": "untied"},
        {},
        {"markov": True},
    ],
    ids=["tied", "untied", "points", "markov"],
)
@pytest.mark.slow
def test_ep_like_is_the_evidence_however_sites_are_kept(options):
    """Inducing inputs at all data explain all; jitter, which is none here, would be in the way."""
    times = np.linspace(0.0, 4.0, 9)
    y = np.sin(2 * times) + 0.4 * np.random.RandomState(0).randn(9)

    def model(X, y=None):
        f = numpyro.sample("f", GP(1.3 * kernels.Matern32(0.6), X, mean=0.3, jitter=1e-15))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.4), obs=y)

    svi = TSVGP(model, AutoDualGaussian(model, **options), None, site_lr=1.0, objective=EPLike())
    state = svi.run(KEY, 1, times, y, progress_bar=False).state
    r = np.sqrt(3) * np.abs(times[:, None] - times) / 0.6
    expected = log_normal(y - 0.3, 1.3 * (1 + r) * np.exp(-r) + 0.4**2 * np.eye(9))
    assert -float(svi.evaluate(state, times, y)) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
@pytest.mark.slow
def test_ep_like_beats_the_bound(name):
    evaluate = values_of(name, False, [Bound(), EPLike()])
    errors = []
    for seed in range(1, 16):
        args, Z = draw(name, seed)
        bound, ep = map(float, evaluate(args, Z, 40))
        whole = evidence(name, *args)
        assert bound <= min(whole, ep) + 1e-6
        errors.append((whole - bound, abs(whole - ep)))
    errors = np.array(errors)
    assert (errors[:, 1] < errors[:, 0]).all()
    assert np.median(errors[:, 1] / errors[:, 0]) < 0.4  # 0.3 of both


def _two_gps(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.8), X))
    g = numpyro.sample("g", GP(0.5 * kernels.RBF(1.0), X, mean=-0.5))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


@pytest.mark.slow
def test_ep_like_of_two_gps_that_meet():
    """Over the bound it has log E_q[p / t] - E_q[log p / t] of each point, with t its site."""
    y = np.array([0.3, -0.2, 1.4, 0.8])
    guide = AutoDualGaussian(_two_gps)
    svi = TSVGP(_two_gps, guide, None, site_lr=0.5, e_steps=60)
    fit = svi.run(KEY, 1, X, y, progress_bar=False).fit
    ep = TSVGP(_two_gps, guide, None, site_lr=0.5, objective=EPLike(), quadrature=40)
    state = ep.init(KEY, X, y)
    state = dataclasses.replace(
        state, approximation={k: fit.params[k] for k in state.approximation}
    )
    bound = TSVGP(_two_gps, guide, None, quadrature=40)
    over = float(bound.evaluate(state, X, y) - ep.evaluate(state, X, y))

    x, w = np.polynomial.hermite_e.hermegauss(80)
    w = w / w.sum()
    weights = np.outer(w, w)
    expected = 0.0
    q, p = fit.marginals(), fit.params
    for i in range(N):
        f, g = (q[k].mean[i] + np.sqrt(q[k].variance[i]) * x for k in "fg")
        log_ratio = np.array(dist.Normal(f[:, None], jnp.exp(g)[None]).log_prob(y[i]))
        for k, values in (("f", np.array(f)[:, None]), ("g", np.array(g)[None])):
            linear, quadratic = (
                np.array(p[f"{k}_auto_{what}"])[0, i] for what in ("linear", "quadratic")
            )
            log_ratio = log_ratio - linear * values + 0.5 * quadratic * values**2
        expected += np.log((weights * np.exp(log_ratio)).sum()) - (weights * log_ratio).sum()
    assert over == pytest.approx(expected, rel=1e-3)  # but for the quadrature


@pytest.mark.slow
def test_the_tighter_bound_of_two_gps_lies_between():
    """Two points of two functions: the evidence is a sum over a grid of their four values."""
    X, y, Z = np.array([-0.6, 0.9]), np.array([0.4, -0.9]), np.array([0.1])
    guide = AutoDualGaussian(_two_gps, Z, learn_inducing=False)
    drivers = [TSVGP(_two_gps, guide, None, objective=o) for o in (Bound(), TighterBound())]
    state = drivers[0].init(KEY, X, y)
    update = jax.jit(drivers[0].update)
    z, log_weights = GRID
    f = z[:, :2] @ np.linalg.cholesky(jittered(rbf(X, X, 0.8, 1.0))).T
    g = -0.5 + z[:, 2:] @ np.linalg.cholesky(jittered(rbf(X, X, 1.0, 0.5))).T
    log_prob = np.asarray(dist.Normal(f, np.exp(g)).log_prob(y)).sum(-1)
    whole = float(_log_sum(log_prob + log_weights))
    for _ in range(4):
        bound, tighter = (-float(svi.evaluate(state, X, y)) for svi in drivers)
        assert bound + 1e-3 < tighter < whole
        for _ in range(3):
            state, _ = update(state, X, y)


@pytest.mark.parametrize("options", [{}, {"markov": True}], ids=["points", "markov"])
@pytest.mark.slow
def test_without_inducing_inputs_the_tighter_bound_is_the_bound(options):
    """Nothing is left of the prior where every function value has a site."""
    times = np.sort(RNG.uniform(0.0, 4.0, 15))
    y = (np.sin(3 * times) > 0) * 1.0

    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.Matern32(0.6), X, mean=0.2))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    guide = AutoDualGaussian(model, **options)
    drivers = [TSVGP(model, guide, None, objective=o) for o in (Bound(), TighterBound())]
    state = drivers[0].run(KEY, 3, times, y, progress_bar=False).state
    bound, tighter = (float(svi.evaluate(state, times, y)) for svi in drivers)
    assert tighter == pytest.approx(bound, rel=1e-9)


def _batched(X, y, size):
    f = numpyro.sample("f", GP(kernels.RBF(numpyro.param("scale", 0.8)), X))
    with numpyro.plate("data", size, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@pytest.mark.parametrize(
    "objective",
    [EPLike(), pytest.param(TighterBound(), marks=pytest.mark.slow)],
    ids=["ep", "tighter"],
)
@pytest.mark.slow
def test_minibatches_estimate_the_whole(objective):
    """The mean over two halves is the whole, but for the scale that each half has of its own."""
    X = np.linspace(-2, 2, 16)
    y = (np.sin(3 * X) > 0) * 1.0
    guide = AutoDualGaussian(_batched, np.linspace(-2, 2, 5), learn_inducing=False)
    svi = TSVGP(_batched, guide, optax.adam(0.0), site_lr=0.5, objective=objective)
    state = svi.init(KEY, X, y, 16)
    update = jax.jit(svi.update, static_argnums=3)
    for _ in range(25):
        state, _ = update(state, X, y, 16)

    @jax.jit
    def at(state, call):
        free = svi.free(state.optim_state)
        return jax.value_and_grad(lambda free: svi.loss(state, free, KEY, call))(free)

    def loss(rows):
        return at(state, Call((X[rows], y[rows], 16), {}).on_device())

    whole, slope = loss(slice(None))
    halves = [loss(slice(i, None, 2)) for i in range(2)]
    tolerance = 1e-9 if objective.needs_rows else 2e-3
    np.testing.assert_allclose(np.mean([v for v, _ in halves]), whole, rtol=tolerance)
    slopes = [s["scale"] for _, s in halves]
    np.testing.assert_allclose(np.mean(slopes), slope["scale"], rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_scale_is_part_of_the_likelihood():
    """Two copies of the data are one with twice the density."""
    y = np.array([1.0, 0.0, 1.0, 1.0])

    def model(X, y, copies):
        f = numpyro.sample("f", GP(kernels.RBF(0.8), X))
        with numpyro.plate("data", N):
            if copies:
                for i in range(2):
                    numpyro.sample(f"y{i}", dist.Bernoulli(logits=f), obs=y)
            else:
                with handlers.scale(scale=2.0):
                    numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    found = []
    for copies in (True, False):
        svi = TSVGP(model, AutoDualGaussian(model), None, objective=EPLike(), e_steps=30)
        state = svi.run(KEY, 1, X, y, copies, progress_bar=False).state
        found.append(float(svi.evaluate(state, X, y, copies)))
    assert found[0] == pytest.approx(found[1], rel=1e-10)


# ---- in drivers ------------------------------------------------------------------------------


def _learned(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(variance * kernels.RBF(0.8), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


BINARY = (np.sin(3 * np.linspace(-2, 2, 20)) > 0) * 1.0


@pytest.mark.parametrize(
    "objective",
    [EPLike(), TighterBound()],
    ids=["ep", "tighter"],
)
@pytest.mark.slow
def test_fits_of_hyperparameters(objective):
    """Learned inducing inputs; the M-step's objective at fresh sites rises, and collapse has it."""
    X = np.linspace(-2, 2, 20)
    guide = AutoDualGaussian(_learned, np.linspace(-2, 2, 6))
    svi = TSVGP(_learned, guide, optax.adam(0.1), objective=objective)
    result = svi.run(KEY, 60, X, BINARY, progress_bar=False)
    losses = np.asarray(result.losses)
    assert np.isfinite(losses).all() and losses[-1] < losses[10] < losses[0]
    assert result.fit.objective == objective
    # The same number by way of the collapsed model, with sites as they are.
    collapsed = collapse(result.fit, refresh=0)
    trace = handlers.trace(handlers.substitute(collapsed, result.fit.hyper)).get_trace()
    bound = float(trace["bound"]["fn"].log_prob(trace["bound"]["value"]))
    prior = float(dist.LogNormal(0.0, 1.0).log_prob(result.fit.hyper["variance"]))
    assert -float(svi.evaluate(result.state, X, BINARY)) == pytest.approx(bound + prior, abs=1e-6)


@pytest.mark.slow
def test_moments_have_them_too():
    X = np.linspace(-2, 2, 20)
    found = []
    for driver, guide in ((TSVGP, AutoDualGaussian), (QSVGP, AutoMomentGaussian)):
        svi = driver(
            _learned, guide(_learned, np.linspace(-2, 2, 6)), None, objective=EPLike(), e_steps=40
        )
        found.append(
            float(svi.evaluate(svi.run(KEY, 1, X, BINARY, progress_bar=False).state, X, BINARY))
        )
    assert found[0] == pytest.approx(found[1], rel=1e-8)


@pytest.mark.slow
def test_markov_sites_have_them_too():
    """Expectation propagation, its objective and its gradient are those of a dense posterior."""
    times = np.sort(RNG.uniform(0.0, 4.0, 15))
    y = (np.sin(3 * times) > 0) * 1.0

    def model(X, y=None):
        variance = numpyro.param("variance", 2.0, constraint=dist.constraints.positive)
        f = numpyro.sample("f", GP(variance * kernels.Matern32(0.6), X, mean=0.2))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    found = []
    for options in ({"markov": True}, {}):
        svi = TSVGP(
            model,
            AutoDualGaussian(model, **options),
            optax.sgd(0.0),
            rule=ExpectationPropagation(),
            objective=EPLike(),
            site_lr=0.5,
            e_steps=40,
        )
        state, _ = jax.jit(svi.update)(svi.init(KEY, times, y), times, y)
        call = Call((times, y), {}).on_device()

        @jax.jit
        @jax.value_and_grad
        def loss(free, svi=svi, state=state, call=call):
            return svi.loss(state, free, KEY, call)

        value, slope = loss(svi.free(state.optim_state))
        found.append((float(value), float(slope["variance"])))
    np.testing.assert_allclose(*found, rtol=1e-5)  # but for the jitter of the dense one


@pytest.mark.slow
def test_sites_that_are_not_in_the_posterior_are_shortened():
    """From the prior a tied site asks for more than there is: no cavity, and no loss of numbers."""
    X = np.linspace(-1, 1, 6)

    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.8), X))
        with numpyro.plate("data", 6):
            numpyro.sample("y", dist.Normal(f, 0.01), obs=y)

    svi = TSVGP(model, AutoDualGaussian(model, X[::2]), None, objective=EPLike())
    state, call = svi.init(KEY, X, np.sin(X)), Call((X, np.sin(X)), {})
    scene, _ = svi.scene(state, KEY, call)
    sites = sites_of_points(scene, svi.rule)["f"]
    at = scene.at["f"]
    explained = at.local(at.posterior(at.start())).explained
    np.testing.assert_allclose(sites.quadratic * explained, 0.5, rtol=1e-6)
    assert np.isfinite(objective_of(scene, EPLike(), sites={"f": sites}))


# ---- refused in words ------------------------------------------------------------------------


def _with_factor(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.8), X))
    numpyro.factor("penalty", -0.1 * (f**2).sum())
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def _grouped(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.8), X))
    with numpyro.plate("data", 8):
        numpyro.sample("y", dist.Normal(f[np.repeat(np.arange(4), 2)], 0.3), obs=y)


@pytest.mark.parametrize(
    ("model", "y", "objective", "words"),
    [
        (_with_factor, np.ones(4), EPLike(), "EPLike.* 'penalty' is a term of numpyro.factor"),
        (_grouped, np.ones(8), EPLike(), "EPLike.* one by one. Observed site 'y' has log dens"),
        (
            _learned,
            np.ones(4),
            TighterBound(per_point=True),
            "not Gaussian .* Use TighterBound\\(\\)",
        ),
        (_two_gps, np.ones(4), TighterBound(per_point=True), "not Gaussian in the values"),
    ],
)
def test_models_without_them(model, y, objective, words):
    svi = TSVGP(model, AutoDualGaussian(model), optax.adam(0.1), objective=objective)
    with pytest.raises(ValueError, match=words):
        svi.init(KEY, X, y)


@pytest.mark.slow
def test_collapse_refuses_as_well():
    X = np.linspace(-2, 2, 20)
    fit = (
        TSVGP(_learned, AutoDualGaussian(_learned), None)
        .run(KEY, 1, X, BINARY, progress_bar=False)
        .fit
    )
    with pytest.raises(ValueError, match="not Gaussian"):
        collapse(fit, objective=TighterBound(per_point=True))
    with pytest.raises(TypeError, match="objective must be one such as"):
        TSVGP(_learned, AutoDualGaussian(_learned), None, objective="ep")
