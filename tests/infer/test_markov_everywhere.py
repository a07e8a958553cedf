"""What a dense fit can do, a fit with Markov sites can do too, with the same answers."""

from functools import cache

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.autoguide import AutoNormal

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    collapse,
    kernels,
    load,
    psis_khat,
    save,
    to_arviz,
)
from numpyro_tsvgp.gaussian.linalg import blas_threads

N = 30
RNG = np.random.default_rng(2)
T = np.sort(RNG.uniform(0.0, 6.0, N))
Y = RNG.poisson(np.exp(1.0 + np.sin(T))).astype(float)
NEW = np.array([-1.0, 2.5, 8.0])
SEEN = np.arange(N) % 5 > 0


def model(t, y=None, seen=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", GP(scale * kernels.Matern32(1.0), t, mean=0.5, jitter=1e-13))
    with numpyro.plate("data", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y, obs_mask=seen)


@cache
def fit(markov, optim="adam", hyper_guide=None, seen=False):
    optimizer = {"adam": optax.adam(0.05), "lbfgs": optax.lbfgs(), "none": None}[optim]
    guide = AutoDualGaussian(model, markov=markov, hyper_guide=hyper_guide)
    args = (T, Y, SEEN) if seen else (T, Y)
    return TSVGP(model, guide, optimizer).run(jax.random.key(0), 40, *args, progress_bar=False)


def assert_alike(found, expected, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"optim": "lbfgs"}, {"seen": True}], ids=str)
def test_hyperparameters_and_predictions(options):
    found, expected = fit(True, **options), fit(False, **options)
    assert_alike(found.losses, expected.losses)
    assert_alike(found.fit.hyper, expected.fit.hyper)
    assert_alike(found.fit.marginals(NEW), expected.fit.marginals(NEW))


@pytest.mark.slow
def test_data_come_and_go_and_are_predicted():
    found, expected = fit(True).fit, fit(False).fit
    more = np.array([2.2, 7.0]), np.array([3.0, 1.0])
    assert_alike(
        found.condition(*more).marginals(NEW), expected.condition(*more).marginals(NEW), atol=1e-5
    )
    less = T[-2:], Y[-2:]
    assert_alike(
        found.without(*less).marginals(NEW), expected.without(*less).marginals(NEW), atol=1e-5
    )
    assert_alike(found.predict(NEW).mean, expected.predict(NEW).mean)
    assert_alike(found.predict(NEW).quantiles(0.9), expected.predict(NEW).quantiles(0.9))


@pytest.mark.slow
def test_diagnostics(tmp_path):
    found = fit(True)
    report = found.fit.audit(jax.random.key(1))
    assert not [words for words in report.concerns if "expected log-likelihood" in words]
    assert psis_khat(jax.random.key(2), found.fit, num_samples=200).joint < 0.7
    data = to_arviz(jax.random.key(3), found.fit, num_samples=50, predictions=NEW)
    assert {"scale", "f"} <= set(az.extract(data, num_samples=10).data_vars)
    draws = Predictive(
        model, guide=found.fit.guide, params=found.params, num_samples=3, return_sites=["y"]
    )(jax.random.key(4), NEW)
    assert draws["y"].shape == (3, 3)
    save(tmp_path / "fit.npz", found.fit)
    loaded = load(tmp_path / "fit.npz", model=model)
    jax.tree.map(np.testing.assert_array_equal, loaded.marginals(NEW), found.fit.marginals(NEW))


@pytest.mark.slow
def test_checkpoints_and_variational_hyperparameters(tmp_path):
    def run(steps, **options):
        guide = AutoDualGaussian(model, markov=True, hyper_guide=AutoNormal)
        svi = TSVGP(model, guide, optax.adam(0.02))
        return svi.run(jax.random.key(0), steps, T, Y, progress_bar=False, **options)

    whole = run(12)
    run(6, checkpoint=tmp_path / "run.npz")
    resumed = run(12, checkpoint=tmp_path / "run.npz")
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    assert whole.fit.sample(jax.random.key(1), NEW, sample_shape=(4,))["f"].shape == (4, 3)


@pytest.mark.slow
def test_nuts_on_the_collapsed_model():
    densities = []
    for markov in (True, False):
        collapsed = collapse(fit(markov).fit)
        for scale in (0.5, 2.0):
            seeded = numpyro.handlers.seed(collapsed, rng_seed=0)
            held = numpyro.handlers.substitute(seeded, data={"scale": scale})
            trace = numpyro.handlers.trace(held).get_trace(T, Y)
            densities.append(float(trace["bound"]["fn"].log_factor))
    np.testing.assert_allclose(densities[:2], densities[2:], atol=1e-6)
    mcmc = MCMC(NUTS(collapse(fit(True).fit)), num_warmup=20, num_samples=10, progress_bar=False)
    with blas_threads():
        mcmc.run(jax.random.key(0), T, Y)
    assert np.isfinite(mcmc.get_samples()["scale"]).all()
