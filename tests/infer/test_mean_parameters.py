"""Parameters of the mean: sites are statements about f, so that a mean may move under them.

With a Gaussian likelihood everything is known: given the coefficients the posterior of f is exact,
and that of the coefficients is the one of generalised least squares. Where sites were statements
about f without its mean, f followed every coefficient and their standard deviations came out eight
times too small.
"""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import rbf
from jax import lax
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

N, NOISE, SCALE = 30, 0.3, 0.8
RNG = np.random.RandomState(6)
X = np.sort(RNG.uniform(-2.0, 2.0, N))
TRUTH = 3.0 + np.sin(3.0 * X) + NOISE * RNG.randn(N)
Z = np.linspace(-2.2, 2.2, 11)


def intercept(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 5.0))
    f = numpyro.sample("f", GP(kernels.RBF(SCALE), X, mean=lambda x: b))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def line(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 5.0))
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([1]).to_event(1))
    f = numpyro.sample("f", GP(kernels.RBF(SCALE), X, mean=lambda x: x @ w + b))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def exact(columns, prior_sd, covariance, y):
    """Mean and covariance of the coefficients of a linear mean, f integrated out."""
    solved = np.linalg.solve(covariance + NOISE**2 * np.eye(N), columns)
    S = np.linalg.inv(np.diag(1 / np.square(prior_sd)) + columns.T @ solved)
    return S @ solved.T @ y, S


KINDS = {
    "tied": {},
    "tied, learned": {"learn_inducing": True},
    "untied": {"sites": "untied"},
    "no inducing inputs": {"inducing": None},
}


def fit(model, inputs, inducing, y, kind, hyper_guide, start):
    """Parameters of the hyperparameters' guide, averaged over the second half of many updates.

    Sites are exact after one step of rate 1. Each gradient has the noise of one draw, so that after
    T of them a location is known to one standard deviation over the root of T: 1% here.
    """
    options = {"inducing": inducing, "learn_inducing": False, **KINDS[kind]}
    guide = AutoDualGaussian(model, hyper_guide=hyper_guide, **options)
    svi = TSVGP(model, guide, optax.adam(0.01), site_lr=1.0)

    def step(state, _):
        state, _ = svi.update(state, inputs, y)
        params = svi.get_params(state)
        return state, {name: params[name] for name in start}

    state = svi.init(jax.random.key(0), inputs, y, init_params=start)
    _, path = jax.jit(lambda state: lax.scan(step, state, length=20_000))(state)
    return {name: np.asarray(values)[10_000:].mean(0) for name, values in path.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k != "tied" else ()) for k in KINDS]
)
def test_intercept(kind):
    (mean,), ((variance,),) = exact(np.ones((N, 1)), [5.0], rbf(X, X, SCALE), TRUTH)
    start = {"b_auto_loc": 1.0, "b_auto_scale": 0.1}
    found = fit(intercept, X, Z, TRUTH, kind, AutoNormal, start)
    assert found["b_auto_scale"] == pytest.approx(np.sqrt(variance), rel=0.03)
    assert abs(found["b_auto_loc"] - mean) < 0.03 * np.sqrt(variance)
    assert np.sqrt(variance) > 3 * NOISE / np.sqrt(N)  # f can take the place of the intercept


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "untied", "no inducing inputs"])
def test_coefficients_of_a_linear_mean(kind):
    """A joint distribution of both, on data that are seen from one side."""
    X_, y = X + 1.5, TRUTH - 2.0 * X
    columns = np.stack([np.ones(N), X_], 1)
    mean, covariance = exact(columns, [5.0, 3.0], rbf(X_, X_, SCALE), y)
    start = {"auto_loc": np.zeros(2), "auto_scale_tril": 0.1 * np.eye(2)}
    found = fit(line, X_[:, None], Z[:, None] + 1.5, y, kind, AutoMultivariateNormal, start)
    factor = found["auto_scale_tril"]  # in the order of names: b, w
    sd = np.sqrt(np.diag(covariance))
    ours = factor @ factor.T / np.outer(sd, sd)
    np.testing.assert_allclose(np.sqrt(np.diag(ours)), 1.0, rtol=0.03)
    np.testing.assert_allclose((found["auto_loc"] - mean) / sd, 0.0, atol=0.03)
    correlation = covariance[0, 1] / sd.prod()
    assert ours[0, 1] == pytest.approx(correlation, abs=0.04) and correlation < -0.5
