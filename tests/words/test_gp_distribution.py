"""What a GP is to NumPyro: shapes of sites, means elsewhere, moments, divergences, scans."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions.batch_util import promote_batch_shape
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.util import log_density

from numpyro_tsvgp import GP, kernels
from numpyro_tsvgp.distributions import as_inputs, find_gp, functions_shape, is_masked

N = 4
X = np.linspace(0.0, 1.0, N)
JITTER = 1e-6
SCALES = np.array([0.3, 0.5, 0.9])
VALUES = np.random.default_rng(0).normal(size=(3, N))


def gp(scale=0.4, mean=None, X=X, variance=1.3):
    return GP(kernels.Matern32(scale, variance), X, mean=mean, jitter=JITTER)


def normal(gp):
    """The same distribution from NumPyro."""
    return dist.MultivariateNormal(gp.mean, gp.covariance_matrix)


# ---- sites -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        (lambda q: q, ()),
        (lambda q: q.expand([3]), (3,)),
        (lambda q: q.expand([3]).to_event(1), (3,)),
        (lambda q: q.expand([2, 3]).to_event(1), (2, 3)),
        (lambda q: q.expand([3]).to_event(1).expand([2]), (2, 3)),
        (lambda q: q.expand([2, 3]).to_event(2), (2, 3)),
        (lambda q: q.expand([3]).mask(False), (3,)),
        (lambda q: q.mask(np.array([True, False])).to_event(1), (2,)),
    ],
)
def test_functions_shape(wrap, expected):
    q = gp()
    fn = wrap(q)
    assert find_gp(fn) is q
    assert functions_shape(fn) == expected
    assert functions_shape(fn) + (N,) == fn.sample(jax.random.key(0)).shape


def test_functions_of_batches_and_of_sites():
    assert functions_shape(gp(SCALES[:, None])) == (3,)
    assert functions_shape(gp(mean=np.zeros((3, 1))).to_event(1)) == (3,)

    def model():
        with numpyro.plate("functions", 2):
            numpyro.sample("f", gp(SCALES[:, None, None]).to_event(0), sample_shape=(5,))

    site = handlers.trace(handlers.seed(model, 0)).get_trace()["f"]
    shape = site["kwargs"]["sample_shape"] + functions_shape(site["fn"])
    assert (*shape, N) == site["value"].shape == (5, 3, 2, N)


def test_masks():
    q = gp()
    assert not is_masked(q) and not is_masked(q.mask(True)) and not is_masked(q.expand([3]))
    assert is_masked(q.mask(False)) and is_masked(q.expand([3]).mask(False).expand([2, 3]))
    assert is_masked(q.expand([2]).mask(np.array([True, False])).to_event(1))
    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        for mask in (True, False):
            with handlers.mask(mask=mask):
                numpyro.sample(f"{mask}", q)
    assert not is_masked(trace["True"]["fn"]) and is_masked(trace["False"]["fn"])


# ---- means and inputs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        (None, np.zeros(2)),
        (2, np.full(2, 2.0)),
        (np.float64(-0.5), np.full(2, -0.5)),
        (np.array([1.5]), np.full(2, 1.5)),
        (np.array([[1.0], [2.0]]), np.array([[1.0, 1.0], [2.0, 2.0]])),
        (lambda x: 3.0 * x**2, np.array([0.75, 12.0])),
    ],
    ids=["None", "integer", "number", "one", "batch", "callable"],
)
def test_mean_function(mean, expected):
    Z = jnp.array([0.5, 2.0])
    q = gp(mean=mean)
    np.testing.assert_allclose(q.mean_function(Z), expected)
    np.testing.assert_allclose(q.mean_function(q.X) * np.ones(N), q.mean)
    if mean is None or not callable(mean):
        np.testing.assert_allclose(q.mean_function(Z[:, None]), expected)


@pytest.mark.parametrize("mean", [np.arange(N), np.zeros((3, N))], ids=["(n,)", "(3, n)"])
def test_mean_at_the_inputs_alone_is_no_function(mean):
    assert gp(mean=mean).mean_function is None
    # One number for one row may be a constant or not: it is not known.
    assert gp(mean=np.ones(1), X=X[:1]).mean_function is None
    assert gp(mean=1.0, X=X[:1]).mean_function(X).shape == (N,)


def test_round_trip_through_jit_drops_the_mean_function_only():
    @jax.jit
    def make(slope):
        q = gp(mean=lambda x: slope * x)  # closes over a tracer
        return q, q.mean_function(jnp.array([2.0]))

    q, elsewhere = make(3.0)
    np.testing.assert_allclose(elsewhere, [6.0])
    assert q.mean_function is None and q.shape() == (N,)
    expected = gp(mean=3.0 * X)
    score = jax.jit(lambda q, value: q.log_prob(value))
    np.testing.assert_allclose(score(q, VALUES[0]), expected.log_prob(VALUES[0]))
    np.testing.assert_allclose(score(expected, VALUES[0]), expected.log_prob(VALUES[0]))
    assert q.expand([2]).base_dist.mean_function is None


def test_data_frames():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": X, "b": np.arange(N)})
    inputs = as_inputs(frame)
    assert inputs.dtype == jnp.float64
    np.testing.assert_array_equal(inputs, np.stack([X, np.arange(N)], 1))
    np.testing.assert_array_equal(as_inputs(frame["b"]), np.arange(N))
    np.testing.assert_array_equal(as_inputs(frame.astype(object)), inputs)
    np.testing.assert_array_equal(gp(X=frame).log_prob(VALUES), gp(X=inputs).log_prob(VALUES))
    with pytest.raises(ValueError, match="numbers.*'red'"):
        as_inputs(pandas.DataFrame({"a": ["red", "blue"], "b": [1.0, 2.0]}))
    with pytest.raises(ValueError, match="missing"):
        as_inputs(np.array([1.0, "blue"], dtype=object))


# ---- moments ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_matrices_and_entropy_are_those_of_a_multivariate_normal():
    for q in (gp(), gp(SCALES[:, None], mean=np.arange(N))):
        expected = normal(q)
        np.testing.assert_allclose(q.scale_tril, expected.scale_tril, atol=1e-12)
        np.testing.assert_allclose(q.precision_matrix, expected.precision_matrix, rtol=1e-9)
        assert q.entropy().shape == q.batch_shape
        np.testing.assert_allclose(q.entropy(), expected.entropy(), rtol=1e-12)


def test_entropy_of_functions_adds_up():
    one = float(gp().entropy())
    # A batch that only the mean has: the entropy does not depend on it, but there are three.
    np.testing.assert_allclose(gp(mean=np.zeros((3, 1))).entropy(), np.full(3, one))
    np.testing.assert_allclose(gp(mean=np.zeros((3, 1))).to_event(1).entropy(), 3 * one)
    np.testing.assert_allclose(gp().expand([3]).to_event(1).entropy(), 3 * one)


def test_draws_from_noise():
    q = gp(SCALES[:, None], mean=2.0)
    factors = np.linalg.cholesky(q.covariance_matrix)
    expected = 2.0 + np.einsum("bij,sbj->sbi", factors, np.stack([VALUES, -VALUES]))
    np.testing.assert_allclose(q.from_noise(jnp.stack([VALUES, -VALUES])), expected, rtol=1e-10)


# ---- divergences -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q"),
    [
        (gp(0.4), gp(0.7, mean=np.arange(N))),
        (gp(SCALES[:, None]), gp(0.7, mean=1.0)),
        (gp(0.4, mean=np.ones((2, 1, 1))), gp(SCALES[:, None])),
    ],
    ids=["one", "batch", "batches"],
)
def test_divergence(p, q):
    p_normal, q_normal = (
        dist.MultivariateNormal(d.mean, jnp.broadcast_to(d.covariance_matrix, (*d.shape(), N)))
        for d in (p, q)
    )
    found = dist.kl_divergence(p, q)
    assert found.shape == np.broadcast_shapes(p.batch_shape, q.batch_shape)
    np.testing.assert_allclose(found, dist.kl_divergence(p_normal, q_normal), rtol=1e-8)
    np.testing.assert_allclose(dist.kl_divergence(p, p), np.zeros(p.batch_shape), atol=1e-9)


def test_divergence_of_wrapped_gps():
    p, q = gp(0.4), gp(0.7)
    one = float(dist.kl_divergence(p, q))
    np.testing.assert_allclose(dist.kl_divergence(p.expand([3]), q), np.full(3, one))
    wrapped = p.expand([3]).to_event(1), q.expand([3]).to_event(1)
    np.testing.assert_allclose(dist.kl_divergence(*wrapped), 3 * one)
    # A vector and a matrix of one column are the same inputs.
    np.testing.assert_allclose(dist.kl_divergence(p, gp(0.7, X=X[:, None])), one)


@pytest.mark.parametrize("other", [X[:-1], np.stack([X, X], 1)], ids=["rows", "columns"])
def test_divergence_at_other_inputs_is_refused(other):
    with pytest.raises(ValueError, match="same inputs"):
        dist.kl_divergence(gp(), gp(X=other))


# ---- stacks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [X, X[:, None]], ids=["(n,)", "(n, 1)"])
def test_gps_made_by_vmap(inputs):
    stack = jax.vmap(lambda scale, shift: gp(scale, mean=shift, X=inputs))(SCALES, VALUES[:, 0])
    promoted = promote_batch_shape(stack)
    expected = gp(SCALES[:, None], mean=VALUES[:, :1], X=inputs)
    assert promoted.stacked == 1 and promoted.shape() == (3, N)
    assert promote_batch_shape(promoted).shape() == (3, N)
    for name in ("mean", "variance", "covariance_matrix", "scale_tril", "precision_matrix"):
        np.testing.assert_allclose(
            getattr(promoted, name), getattr(expected, name), rtol=1e-9, err_msg=name
        )
    np.testing.assert_allclose(promoted.log_prob(VALUES), expected.log_prob(VALUES))
    np.testing.assert_allclose(promoted.entropy(), expected.entropy())
    key = jax.random.key(0)
    np.testing.assert_allclose(promoted.sample(key, (2,)), expected.sample(key, (2,)))
    np.testing.assert_allclose(
        dist.kl_divergence(promoted, gp(X=inputs)), dist.kl_divergence(expected, gp(X=inputs))
    )


def step_plain(f, scale):
    f = numpyro.sample("f", gp(scale, mean=0.5 * f))
    return f, f


def step_plate(f, scale):
    with numpyro.plate("functions", 2):
        g = numpyro.sample("f", gp(scale, mean=1.0))
    return f, g


def step_batch(f, scale):
    # The mean has no axes, the kernel has a batch, and a plate expands both.
    with numpyro.plate("outer", 2, dim=-2), numpyro.plate("functions", 3):
        g = numpyro.sample("f", gp(scale * SCALES[:, None], mean=1.0))
    return f, g


def step_event(f, scale):
    g = numpyro.sample("f", gp(scale).expand([2]).to_event(1))
    return f, g


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        step_plate,
        *(
            pytest.param(step, marks=pytest.mark.slow)
            for step in (step_plain, step_batch, step_event)
        ),
    ],
)
def test_scan_is_a_loop(step):
    def scanned():
        return scan(step, jnp.zeros(N), numpyro.sample("tau", dist.LogNormal()) * SCALES)[1]

    def loop():
        f, tau = jnp.zeros(N), numpyro.sample("tau", dist.LogNormal())
        for i, scale in enumerate(SCALES):
            with handlers.scope(prefix=f"{i}"):
                f, _ = step(f, tau * scale)

    site = handlers.trace(handlers.seed(scanned, 0)).get_trace()["f"]
    f = site["value"]
    assert f.shape[0] == 3 and f.shape[-1] == N and np.isfinite(f).all()
    if step is not step_event:  # of which NumPyro forgets the time axis (but not its density)
        assert functions_shape(site["fn"]) == f.shape[:-1]

    def values(tau, f, model):
        each = {"f": f} if model is scanned else {f"{i}/f": value for i, value in enumerate(f)}
        return {"tau": tau, **each}

    def score(tau, f, model):
        return log_density(model, (), {}, values(tau, f, model))[0]

    found, expected = (
        jax.jit(jax.value_and_grad(lambda tau, f, m=model: score(tau, f, m), (0, 1)))(0.7, f)
        for model in (scanned, loop)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7), found, expected)


@pytest.mark.slow
def test_scan_under_nuts_and_predictive():
    def model(y=None):
        def transition(f, y):
            f = numpyro.sample("f", gp(0.4, mean=0.5 * f))
            return f, numpyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)

        return scan(transition, jnp.zeros(N), y, length=3)[1]

    mcmc = MCMC(NUTS(model), num_warmup=3, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0), VALUES)
    samples = mcmc.get_samples()
    assert samples["f"].shape == (2, 3, N)
    drawn = Predictive(model, samples)(jax.random.key(1))
    assert drawn["y"].shape == (2, 3, N)
