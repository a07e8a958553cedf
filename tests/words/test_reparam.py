"""GPs as white noise for samplers: the same model, the same draws, and chains that mix."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density
from scipy.stats import norm

from numpyro_tsvgp import GP, kernels
from numpyro_tsvgp.reparam import GPReparam, whiten

N = 5
X = np.linspace(0.0, 1.0, N)
SCALES = np.array([0.3, 0.5, 0.9])
Y = np.random.default_rng(0).normal(size=N)


def gp(scale=0.4, mean=None):
    return GP(kernels.Matern32(scale, 1.3), X, mean=mean)


def single():
    scale = numpyro.sample("scale", dist.LogNormal())
    return numpyro.sample("f", gp(scale, mean=lambda x: scale * x))


def plates():
    scale = numpyro.sample("scale", dist.LogNormal())
    with numpyro.plate("outer", 2, dim=-2), numpyro.plate("inner", 3, dim=-1):
        return numpyro.sample("f", gp(scale, mean=1.0))


def batch():
    scale = numpyro.sample("scale", dist.LogNormal())
    with numpyro.plate("outer", 2, dim=-2), numpyro.plate("inner", 3, dim=-1):
        return numpyro.sample("f", gp(scale * SCALES[:, None], mean=SCALES[:, None]))


def event():
    scale = numpyro.sample("scale", dist.LogNormal())
    with numpyro.plate("outer", 2):
        return numpyro.sample("f", gp(scale).expand([2, 3]).to_event(1))


def drawn():
    scale = numpyro.sample("scale", dist.LogNormal())
    return numpyro.sample("f", gp(scale * SCALES[:, None]), sample_shape=(2,))


MODELS = {
    "single": (single, (N,), ()),
    "plates": (plates, (2, 3, N), ()),
    "batch": (batch, (2, 3, N), ()),
    "event": (event, (2, 3, N), ()),
    "drawn": (drawn, (2, 3, N), (2,)),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "event" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_density_is_the_same_up_to_the_jacobian(name):
    model, shape, sample_shape = MODELS[name]
    by_name = handlers.reparam(model, config={"f": GPReparam(sample_shape)})
    with handlers.trace() as trace, handlers.seed(rng_seed=0):
        assert whiten(model)().shape == shape
    assert trace["f"]["type"] == "deterministic" and trace["f_base"]["type"] == "sample"
    assert trace["f"]["value"].shape == trace["f_base"]["value"].shape == shape
    with handlers.trace() as centred, handlers.seed(rng_seed=0):
        model()
    assert trace["f_base"]["fn"].batch_shape == centred["f"]["fn"].batch_shape
    assert trace["f_base"]["fn"].event_shape == centred["f"]["fn"].event_shape
    stacks = [
        [frame.name for frame in s["cond_indep_stack"]] for s in (trace["f_base"], centred["f"])
    ]
    assert stacks[0] == stacks[1]

    base = {"scale": trace["scale"]["value"], "f_base": trace["f_base"]["value"]}
    whitened, again = (log_density(m, (), {}, base)[0] for m in (whiten(model), by_name))
    substituted = {"scale": base["scale"], "f": trace["f"]["value"]}
    expected, _ = log_density(model, (), {}, substituted)
    scales = base["scale"] * (SCALES[:, None] if name in ("batch", "drawn") else 1.0)
    factors = np.linalg.cholesky(gp(scales).covariance_matrix)
    log_det = np.log(np.diagonal(factors, axis1=-2, axis2=-1)).sum(-1)
    jacobian = np.broadcast_to(log_det, shape[:-1]).sum()
    np.testing.assert_allclose(whitened, expected + jacobian, rtol=1e-9)
    np.testing.assert_allclose(again, whitened)


def test_draws_have_the_mean_and_the_covariance():
    mean = np.array([1.0, -1.0])

    def model():
        with numpyro.plate("functions", 2):
            numpyro.sample("f", gp(np.array([[0.3], [0.9]]), mean=mean[:, None]))

    f = Predictive(whiten(model), num_samples=20_000)(jax.random.key(0))["f"]
    assert f.shape == (20_000, 2, N)
    for i, scale in enumerate((0.3, 0.9)):
        np.testing.assert_allclose(f[:, i].mean(0), np.full(N, mean[i]), atol=0.05)
        np.testing.assert_allclose(
            np.cov(f[:, i].T), gp(scale).covariance_matrix, atol=0.06
        )  # 20000 draws: a standard error of 0.013


def plated():
    with numpyro.plate("functions", 3):
        return numpyro.sample("f", gp(), sample_shape=(2, 3))


def test_a_plate_outside_of_the_handler():
    with handlers.seed(rng_seed=0), handlers.trace() as trace, numpyro.plate("functions", 3):
        f = whiten(lambda: numpyro.sample("f", gp()))()
    assert f.shape == trace["f_base"]["value"].shape == (3, N)
    assert len(np.unique(f[:, 0])) == 3
    # Plates take `sample_shape` for axes of the batch, on either side of the handler.
    with handlers.seed(rng_seed=0), numpyro.plate("functions", 3):
        outside = whiten(lambda: numpyro.sample("f", gp(), sample_shape=(2, 3)))()
    inside, centred = (handlers.seed(model, 0)() for model in (whiten(plated), plated))
    assert outside.shape == inside.shape == centred.shape == (2, 3, N)


def test_whiten_leaves_all_else():
    def model(y=None):
        scale = numpyro.sample("scale", dist.LogNormal())
        numpyro.sample("data", gp(scale), obs=Y)
        f = numpyro.sample("f", gp(scale))
        g = numpyro.sample("g", gp(scale))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(f + g, 1.0), obs=y)

    trace = handlers.trace(handlers.seed(whiten(model), 0)).get_trace(Y)
    assert [name for name, site in trace.items() if site["type"] == "sample"] == [
        *("scale", "data", "f_base", "g_base", "y")
    ]
    assert trace["data"]["is_observed"] and trace["y"]["is_observed"]
    # What a handler closer to the model has set stays set.
    conditioned = whiten(handlers.condition(model, {"f": Y}))
    trace = handlers.trace(handlers.seed(conditioned, 0)).get_trace(Y)
    assert "f_base" not in trace and trace["f"]["is_observed"]


def test_what_is_refused():
    def run(site, **kwargs):
        with handlers.seed(rng_seed=0), handlers.reparam(config={"f": GPReparam()}):
            numpyro.sample("f", site, **kwargs)

    with pytest.raises(ValueError, match="'f' has the distribution Normal.*whiten"):
        run(dist.Normal())
    with pytest.raises(ValueError, match="'f' is observed"):
        run(gp(), obs=Y)
    with pytest.raises(ValueError, match="'f' is a GP with a mask.*likelihood"):
        run(gp().mask(False))


def test_whiten_inside_of_a_scan():
    def step(f, scale):
        f = numpyro.sample("f", gp(scale, mean=0.5 * f))
        return f, f

    def model():
        return scan(whiten(step), jnp.zeros(N), SCALES)[1]

    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        f = model()
    assert trace["f_base"]["value"].shape == f.shape == (3, N)
    np.testing.assert_allclose(trace["f"]["value"], f)
    expected, previous = [], np.zeros(N)
    for scale, noise in zip(SCALES, trace["f_base"]["value"], strict=True):
        previous = gp(scale, mean=0.5 * previous).from_noise(noise)
        expected.append(previous)
    np.testing.assert_allclose(f, np.stack(expected), rtol=1e-9)


@pytest.mark.slow
def test_autoguides():
    def model():
        f = numpyro.sample("f", gp())
        numpyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=Y)

    model = whiten(model)
    guide = AutoNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO(num_particles=4))
    result = svi.run(jax.random.key(0), 300, progress_bar=False)
    f = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(100,))
    draws = Predictive(model, f)(jax.random.key(2))["f"]
    np.testing.assert_allclose(draws.mean(0), Y, atol=0.3)


# ---- chains ----------------------------------------------------------------------------------

COUNTS = 25


def counts(X, y=None):
    scale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.5))
    f = numpyro.sample("f", GP(kernels.RBF(scale), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(1.0 + f)), obs=y)


def weighted_draws(X, y, levels=64, draws=4000):
    """The posterior without a chain: functions from the prior, weighted by their likelihood."""
    rng = np.random.default_rng(0)
    quantiles = norm.ppf((np.arange(levels) + 0.5) / levels)
    squares = np.subtract.outer(X, X) ** 2
    f = []
    for scale in np.exp(-1.0 + 0.5 * quantiles):
        K = np.exp(-0.5 * squares / scale**2) + 1e-8 * np.eye(len(X))
        f.append(rng.normal(size=(draws, len(X))) @ np.linalg.cholesky(K).T)
    f = np.concatenate(f)
    log_weights = ((1.0 + f) * y - np.exp(1.0 + f)).sum(1)
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    mean = weights @ f
    return mean, np.sqrt(weights @ (f - mean) ** 2), 1 / (weights**2).sum()


@pytest.mark.slow
def test_nuts_mixes():
    X = np.linspace(0.0, 1.0, COUNTS)
    y = np.random.default_rng(0).poisson(np.exp(1.0 + np.sin(6.0 * X)))
    mcmc = MCMC(
        NUTS(whiten(counts)),
        num_warmup=200,
        num_samples=300,
        num_chains=2,
        chain_method="vectorized",  # batches of factorisations behind our back
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), X, y)
    samples = mcmc.get_samples(group_by_chain=True)
    assert samples["f"].shape == samples["f_base"].shape == (2, 300, COUNTS)
    stats = summary({name: samples[name] for name in ("f", "lengthscale")})
    for name in stats:
        # Of the centred model the first is 1 and the second above 20, for the function.
        assert np.min(stats[name]["n_eff"]) > 100, name
        assert np.max(stats[name]["r_hat"]) < 1.05, name
    mean, deviation, size = weighted_draws(X, y)
    assert size > 200
    error = np.abs(stats["f"]["mean"] - mean) / deviation
    assert (error < 4.5 * np.sqrt(1 / stats["f"]["n_eff"] + 1 / size)).all(), error
    np.testing.assert_allclose(stats["f"]["std"], deviation, rtol=0.25)

    flat = mcmc.get_samples()
    drawn = Predictive(counts, flat)(jax.random.key(1), X)["y"]  # the model as it was
    assert drawn.shape == (600, COUNTS)
    np.testing.assert_allclose(drawn.mean(0), np.exp(1.0 + flat["f"]).mean(0), rtol=0.25)
    again = Predictive(whiten(counts), flat)(jax.random.key(1), X)
    np.testing.assert_allclose(again["f"], flat["f"], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_nuts_with_plates_of_functions():
    def model(y):
        with numpyro.plate("functions", 3):
            f = numpyro.sample("f", gp())
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(f.sum(0), 0.5), obs=y)

    mcmc = MCMC(NUTS(whiten(model)), num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0), Y)
    samples = mcmc.get_samples()
    assert samples["f"].shape == samples["f_base"].shape == (10, 3, N)
    np.testing.assert_allclose(samples["f"], gp().from_noise(samples["f_base"]), rtol=1e-9)
