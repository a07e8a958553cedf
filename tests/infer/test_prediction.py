"""Predictions: the posterior at any inputs, by formula, by draws, and within bounds of memory."""

from functools import cache

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoNormal
from scipy import stats

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
from numpyro_tsvgp.gaussian import rows
from numpyro_tsvgp.infer.guides import prediction
from numpyro_tsvgp.model.arguments import Call

N, M, NEW, DRAWS = 30, 6, 9, 20_000
RNG = np.random.RandomState(5)
X = np.sort(RNG.rand(N))
Y = np.sin(7.0 * X) + 2.0 * X + 0.2 * RNG.randn(N)
Z = np.linspace(0.05, 0.95, M)
X_NEW = np.linspace(-0.2, 1.3, NEW)
NOISE = 0.3


@pytest.fixture
def optimised():
    """Compiles as users do: for large products, not for a short compilation."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def model(X, y=None):
    """A sampled and a plain hyperparameter, a mean function, and something derived."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.param("lengthscale", 0.25, constraint=dist.constraints.positive)
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X, mean=lambda x: 2.0 * x))
    numpyro.deterministic("twice", 2.0 * f)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


KINDS = {"tied": {"inducing": Z}, "untied": {"inducing": Z, "sites": "untied"}, "full": {}}


@cache
def fit(kind="tied", model=model, hyper_guide=None, steps=20):
    guide = AutoDualGaussian(model, hyper_guide=hyper_guide, **KINDS[kind])
    svi = TSVGP(model, guide, optax.adam(0.03))
    return guide, svi.run(jax.random.key(0), steps, X, Y, progress_bar=False).params


def reference(kind, X_new):
    """The dense posterior of a fit at new inputs."""
    guide, params = fit(kind)
    return dense.posterior(
        lambda A, B: dense.rbf(A, B, params["lengthscale"], params["variance_auto_loc"]),
        X if kind == "full" else params["f_auto_inducing"],
        X_new,
        guide.dual_parameters(params, X_new)["f"],
        mean=2.0 * X_new,
    )


def assert_moments(draws, q, what=""):
    """Empirical moments of independent draws, each within five of its standard errors.

    Five: some hundred numbers are compared, and none should be farther out than that.
    """
    draws = np.asarray(draws)
    count, variance = len(draws), np.diag(q.covariance)
    error = np.abs(draws.mean(0) - q.mean)
    assert (error < 5 * np.sqrt(variance / count)).all(), what
    spread = np.sqrt((np.outer(variance, variance) + q.covariance**2) / count)
    assert (np.abs(np.cov(draws.T) - q.covariance) < 5 * spread).all(), what


# ---- moments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["tied", *(pytest.param(k, marks=pytest.mark.slow) for k in ("untied", "full"))]
)
def test_marginals_and_joint_draws_at_new_inputs(kind):
    """At more, fewer and other inputs than in the fit, against the dense formula."""
    guide, params = fit(kind)
    q = reference(kind, X_NEW)
    marginals = guide.marginals(params, X_NEW)["f"]
    # The jitter of 1e-8 makes K of t-VGP (30 inputs) solvable to about 1e-6.
    tolerance = 1e-5 if kind == "full" else 1e-8
    np.testing.assert_allclose(marginals.mean, q.mean, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(marginals.variance, q.variance, rtol=tolerance, atol=tolerance)
    assert marginals._fields == ("mean", "variance")
    draws = guide.sample_posterior(jax.random.key(1), params, X_NEW, sample_shape=(DRAWS,))
    assert draws["f"].shape == (DRAWS, NEW)
    assert_moments(draws["f"], q, kind)
    # Neighbours are correlated; independent draws of marginals would fail above by far.
    assert np.corrcoef(draws["f"][:, 0], draws["f"][:, 1])[0, 1] > 0.3


def test_shapes_of_draws():
    guide, params = fit()
    one = guide.sample_posterior(jax.random.key(1), params, X_NEW)
    assert one["f"].shape == (NEW,) and one["variance"].shape == ()
    many = guide.sample_posterior(jax.random.key(1), params, X_NEW, sample_shape=(2, 3))
    assert many["f"].shape == (2, 3, NEW) and many["variance"].shape == (2, 3)
    again = guide.sample_posterior(jax.random.key(1), params, X_NEW, sample_shape=(2, 3))
    np.testing.assert_array_equal(many["f"], again["f"])


def test_median_and_quantiles():
    guide, params = fit()
    q = reference("tied", X_NEW)
    median = guide.median(params, X_NEW)
    np.testing.assert_allclose(median["f"], q.mean, atol=1e-8)
    np.testing.assert_allclose(median["variance"], params["variance_auto_loc"])
    levels = [0.05, 0.5, 0.9]
    quantiles = guide.quantiles(params, levels, X_NEW)
    deviation = np.sqrt(q.variance)
    expected = [q.mean + stats.norm.ppf(level) * deviation for level in levels]
    np.testing.assert_allclose(quantiles["f"], expected, atol=1e-7)
    np.testing.assert_allclose(quantiles["variance"], [params["variance_auto_loc"]] * 3)
    np.testing.assert_allclose(guide.quantiles(params, 0.9, X_NEW)["f"], expected[2], atol=1e-7)


# ---- Predictive ------------------------------------------------------------------------------


def test_predictive_at_new_inputs():
    guide, params = fit()
    q = reference("tied", X_NEW)
    sites = ["f", "y", "twice", "variance"]
    draws = Predictive(model, guide=guide, params=params, num_samples=DRAWS, return_sites=sites)(
        jax.random.key(2), X_NEW
    )
    assert_moments(draws["f"], q)
    noisy = q._replace(covariance=q.covariance + NOISE**2 * np.eye(NEW))
    assert_moments(draws["y"], noisy)
    np.testing.assert_allclose(draws["twice"], 2.0 * draws["f"])
    np.testing.assert_allclose(draws["variance"], params["variance_auto_loc"])
    # The observation noise is drawn given f of the same draw, not independently of it.
    np.testing.assert_allclose(np.std(draws["y"] - draws["f"]), NOISE, rtol=0.02)


def test_predictive_from_posterior_samples():
    """The pattern for many inputs: draw once, then push the draws through the model."""
    guide, params = fit()
    samples = guide.sample_posterior(jax.random.key(1), params, X_NEW, sample_shape=(50,))
    out = Predictive(model, posterior_samples=samples, params=params)(jax.random.key(2), X_NEW)
    assert out["y"].shape == (50, NEW)
    np.testing.assert_allclose(out["twice"], 2.0 * samples["f"])


@pytest.mark.slow
def test_parallel_predictive_draws_the_same():
    guide, params = fit()

    def draw(parallel):
        predictive = Predictive(model, guide=guide, params=params, num_samples=7, parallel=parallel)
        return predictive(jax.random.key(3), X_NEW)

    one_by_one, side_by_side = draw(False), draw(True)
    for name, value in one_by_one.items():
        np.testing.assert_allclose(value, side_by_side[name], rtol=1e-10)


# ---- variational hyperparameters -------------------------------------------------------------


@pytest.mark.slow
def test_variational_hyperparameters():
    """AutoNormal: draws of hyperparameters and function values go together."""
    guide, params = fit(hyper_guide=AutoNormal, steps=40)
    loc, scale = params["variance_auto_loc"], params["variance_auto_scale"]
    assert scale > 0.05
    far = np.arange(4) * 9.0 + 9.0  # as far from the data as from one another
    at = np.concatenate([np.linspace(0.0, 1.0, NEW - len(far)), far])
    draws = guide.sample_posterior(jax.random.key(0), params, at, sample_shape=(2000,))
    f, variance = np.asarray(draws["f"]), np.asarray(draws["variance"])
    assert f.shape == (2000, NEW)
    # A LogNormal posterior: five standard errors of mean and deviation of 2000 draws.
    assert abs(np.log(variance).mean() - loc) < 5 * scale / np.sqrt(2000)
    assert abs(np.log(variance).std() - scale) < 5 * scale / np.sqrt(4000)
    # Far from the data f has the prior variance of its own draw: their ratio is chi-squared, and
    # correlated with nothing.
    ratio = (f[:, -len(far) :] - 2.0 * far) ** 2 / variance[:, None]
    assert abs(ratio.mean() - 1.0) < 5 * np.sqrt(2 / ratio.size)
    assert abs(np.corrcoef(ratio.mean(1), variance)[0, 1]) < 5 / np.sqrt(2000)
    # Marginals average over hyperparameters: 2000 draws of f, 200 of the hyperparameters.
    q = guide.marginals(params, at, num_hyper=200)["f"]
    assert (np.abs(f.mean(0) - q.mean) < 5 * np.sqrt(q.variance / 200)).all()
    np.testing.assert_allclose(f.var(0), q.variance, rtol=5 * np.sqrt(2 / 200))
    quantiles = guide.quantiles(params, [0.1, 0.5, 0.9], at)
    expected = np.exp(loc + scale * stats.norm.ppf([0.1, 0.5, 0.9]))
    np.testing.assert_allclose(quantiles["variance"], expected, rtol=1e-6)
    predicted = Predictive(model, guide=guide, params=params, num_samples=20)(jax.random.key(1), at)
    assert predicted["y"].shape == (20, NEW) and np.isfinite(predicted["y"]).all()


# ---- many inputs, many draws -----------------------------------------------------------------


@pytest.mark.slow
def test_marginals_in_chunks_are_the_same(monkeypatch):
    """Pieces of 256 rows, the last of them padded, and a batch of latent functions."""

    def two(X, y=None):
        with numpyro.plate("functions", 2):
            f = numpyro.sample("f", GP(kernels.RBF(jnp.array([[0.2], [0.4]])), X, mean=1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f.sum(0), NOISE), obs=y)

    guide = AutoDualGaussian(two, inducing=Z)
    svi = TSVGP(two, guide, None)
    state = svi.init(jax.random.key(0), X, Y)
    params = svi.get_params(jax.jit(svi.update)(state, X, Y)[0])
    many = np.linspace(-1.0, 2.0, 700)
    whole = guide.marginals(params, many)["f"]
    assert whole.mean.shape == (2, 700)
    monkeypatch.setattr(rows, "_ELEMENTS", 1)
    prediction.marginals_of.clear_cache()
    chunked = guide.marginals(params, many)["f"]
    prediction.marginals_of.clear_cache()
    # Products of other shapes may round otherwise.
    np.testing.assert_allclose(chunked.mean, whole.mean, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(chunked.variance, whole.variance, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_marginals_at_many_inputs_in_bounded_memory():
    m, n = 100, 1_000_000

    def rough(X, y=None):
        f = numpyro.sample("f", GP(kernels.Matern12(0.1), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = AutoDualGaussian(rough, inducing=np.linspace(0.0, 1.0, m))
    svi = TSVGP(rough, guide, None)
    data = np.linspace(0.0, 1.0, m), np.zeros(m)
    params = svi.get_params(svi.init(jax.random.key(0), *data))
    reading = guide.read(Call((np.linspace(0.0, 1.0, n),), {}), params)
    program = prediction.marginals_of.lower(guide.latents(reading, params)["f"]).compile()
    # What the program allocates besides its arguments and results: a few chunks of 2^22 numbers,
    # and vectors as long as the inputs. The features alone would be 800 MB.
    memory = program.memory_analysis().temp_size_in_bytes
    assert memory < 8 * (4 * rows._ELEMENTS + 5 * n) < 8 * m * n / 4


@pytest.mark.slow
def test_marginals_at_200_000_inputs():
    guide, params = fit()
    many = np.linspace(-1.0, 2.0, 200_000)
    q = guide.marginals(params, many)["f"]
    rows = [0, 77_777, 199_999]
    few = reference("tied", many[rows])
    np.testing.assert_allclose(np.asarray(q.mean)[rows], few.mean, atol=1e-8)
    np.testing.assert_allclose(np.asarray(q.variance)[rows], few.variance, rtol=1e-7, atol=1e-8)


def _primitives(jaxpr, inside_loop=False):
    """Every primitive of a program, and whether a loop runs it more than once."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        yield name, inside_loop
        loops = inside_loop or name in ("scan", "while")
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _primitives(inner, loops)


def _factorisations(predictive, *args):
    jaxpr = jax.make_jaxpr(lambda key: predictive(key, *args))(jax.random.key(0)).jaxpr
    found = list(_primitives(jaxpr))
    assert any(loop for _, loop in found)  # there is a loop over draws, and it was looked into
    return [(name, loop) for name, loop in found if name in ("cholesky", "triangular_solve")]


@pytest.mark.slow
def test_a_thousand_draws_at_2000_inputs_factorise_once(monkeypatch, optimised):
    guide, params = fit()
    joint, calls = prediction.joint_of, []

    def counted(latent):
        calls.append(latent.process.X.shape)
        return joint(latent)

    monkeypatch.setattr(prediction, "joint_of", counted)
    new = np.linspace(-1.0, 2.0, 2000)
    predictive = Predictive(
        model, guide=guide, params=params, num_samples=1000, return_sites=["f", "y"]
    )
    # The factor enters the loop over draws as a constant: no factorisation is left in it.
    assert _factorisations(predictive, new) == []
    assert calls == [(2000,)]
    # One factor for a thousand draws in one call, too.
    draws = guide.sample_posterior(jax.random.key(4), params, new, sample_shape=(1000,))["f"]
    assert len(calls) == 2
    q = guide.marginals(params, new)["f"]
    # Five standard errors of a mean and of a variance, at two thousand correlated inputs.
    error = np.abs(draws.mean(0) - q.mean) / np.sqrt(q.variance / 1000)
    assert error.max() < 5.0
    np.testing.assert_allclose(draws.var(0), q.variance, rtol=5 * np.sqrt(2 / 1000))


@pytest.mark.slow
def test_draws_of_a_minibatch_fit_factorise_once():
    """A plate that subsamples the data does not make the inputs of a prediction random."""

    def batched(X, y=None, size=2 * N):
        f = numpyro.sample("f", GP(kernels.RBF(0.25), X))
        with numpyro.plate("data", size, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    def random_rows(X, y=None):
        data = numpyro.plate("data", X.shape[0], subsample_size=NEW)
        with data as rows:
            x, y = X[rows], None if y is None else y[rows]
        f = numpyro.sample("f", GP(kernels.RBF(0.25), x))
        with data:
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    def predictive(model, *args):
        guide = AutoDualGaussian(model, inducing=Z)
        svi = TSVGP(model, guide, None)
        params = svi.get_params(svi.init(jax.random.key(0), *args))
        return Predictive(model, guide=guide, params=params, num_samples=5, return_sites=["f"])

    assert _factorisations(predictive(batched, X, Y), X_NEW) == []
    # If the model does draw its inputs, so does Predictive, for each draw anew.
    drawn = predictive(random_rows, jnp.asarray(X), jnp.asarray(Y))
    assert _factorisations(drawn, jnp.asarray(X)) != []
    # The guide's own methods always answer at all inputs in the arguments.
    q = drawn.guide.marginals(drawn.params, jnp.asarray(X))["f"]
    np.testing.assert_allclose(q.variance, np.ones(N))
    draws = drawn.guide.sample_posterior(jax.random.key(0), drawn.params, jnp.asarray(X))
    assert draws["f"].shape == (N,)


@pytest.mark.slow
def test_predictions_under_jit():
    """Parameters and inputs may be traced; the guide has seen its model before."""
    guide, params = fit()
    q = guide.marginals(params, X_NEW)["f"]

    @jax.jit
    def predict(params, X_new):
        marginals = guide.marginals(params, X_new)["f"]
        draws = guide.sample_posterior(jax.random.key(1), params, X_new, sample_shape=(3,))
        return marginals.mean, draws["f"]

    mean, draws = predict(params, X_NEW)
    np.testing.assert_allclose(mean, q.mean, rtol=1e-10, atol=1e-12)
    again = guide.sample_posterior(jax.random.key(1), params, X_NEW, sample_shape=(3,))["f"]
    np.testing.assert_allclose(draws, again, rtol=1e-9, atol=1e-9)
