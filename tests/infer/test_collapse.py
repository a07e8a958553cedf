"""Posteriors of hyperparameters: the collapsed density, samplers on it, and GPs given its draws."""

import dataclasses
import itertools
import os
import subprocess
import sys

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, init_to_value
from numpyro.infer.reparam import TransformReparam
from numpyro.infer.util import log_density, potential_energy
from scipy import stats

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    NaturalGradient,
    Riemannian,
    collapse,
    kernels,
    loo,
    to_arviz,
)
from numpyro_tsvgp.gaussian.quadrature import GaussHermite

# ---- GP regression, where one refresh makes the density exact ---------------------------------

N = 15
RNG = np.random.default_rng(5)
X = np.sort(RNG.uniform(0, 3, N))
Y = np.sin(2 * X) + 0.3 * RNG.standard_normal(N)


def regression(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    variance = numpyro.param("variance", 1.3, constraint=dist.constraints.positive)
    numpyro.deterministic("roughness", 1 / lengthscale)
    f = numpyro.sample("f", GP(variance * kernels.RBF(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def exact_regression(X, y, variance=1.3):
    """The GP integrated out by hand."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    K = variance * jnp.exp(-0.5 * ((X[:, None] - X) / lengthscale) ** 2)
    covariance = K + noise**2 * jnp.eye(N)
    numpyro.sample("y", dist.MultivariateNormal(0.0, covariance), obs=y)


@pytest.fixture(scope="module")
def fit():
    guide = AutoDualGaussian(regression, inducing=X, learn_inducing=False)
    svi = TSVGP(regression, guide, None, site_lr=1.0)
    state = svi.init(jax.random.key(0), X, Y)
    state, _ = jax.jit(svi.update)(state, X, Y)
    return svi.fit(state, X, Y)


def log_joint(model, values, *args):
    return jax.jit(lambda v: log_density(handlers.seed(model, 0), args, {}, v)[0])(values)


POINTS = {  # from the fit's own to far away
    "lengthscale": jnp.array([1.0, 0.3, 2.5, 0.8]),
    "noise": jnp.array([0.37, 0.1, 1.5, 0.2]),
}


def at_points(model, *args):
    return jax.jit(lambda v: jax.lax.map(lambda p: log_joint(model, p, *args), v))(POINTS)


def test_the_density_of_a_regression_is_the_marginal_likelihood(fit):
    exact = at_points(exact_regression, X, Y)
    refreshed = at_points(collapse(fit, refresh=1), X, Y)
    # The jitter of 1.3e-8 at the inducing inputs, times N, divided by a noise variance of 0.01,
    # times the squared residuals, a few of these variances.
    np.testing.assert_allclose(refreshed, exact, atol=1e-4)
    # With the sites of the fit held, the density is a lower bound, and a loose one far away.
    held = at_points(collapse(fit, refresh=0), X, Y)
    assert (held < exact + 1e-5).all() and (held[1:3] < exact[1:3] - 0.1).all()


@pytest.mark.slow
def test_derivatives_of_the_density_of_a_regression_are_exact(fit):
    """Sites are held in the slope, as their fixed point allows, but not in the curvature."""
    values = {name: value[3] for name, value in POINTS.items()}

    def derivatives(model):
        def joint(values):
            return log_density(handlers.seed(model, 0), (X, Y), {}, values)[0]

        return jax.jit(lambda v: (jax.grad(joint)(v), jax.hessian(joint)(v)))(values)

    slope, curvature = derivatives(collapse(fit, refresh=1))
    exact_slope, exact_curvature = derivatives(exact_regression)
    for a in values:
        assert slope[a] == pytest.approx(float(exact_slope[a]), rel=1e-4)
        for b in values:
            assert curvature[a][b] == pytest.approx(float(exact_curvature[a][b]), rel=1e-4)


@pytest.mark.slow
def test_handlers_around_the_density_add_their_own_sites(fit):
    """A sampler's Jacobian and a reparameterization are sites that the model does not have."""
    collapsed = collapse(fit, refresh=1)
    values = {name: value[1] for name, value in POINTS.items()}
    plain = log_joint(collapsed, values, X, Y)
    moved = handlers.reparam(collapsed, config={"lengthscale": TransformReparam()})
    base = {"lengthscale_base": jnp.log(values["lengthscale"]), "noise": values["noise"]}
    change = base["lengthscale_base"]  # the Jacobian: a density of the logarithm now
    assert log_joint(moved, base, X, Y) == pytest.approx(float(plain + change), abs=1e-9)

    logs = {name: jnp.log(value) for name, value in values.items()}
    energy = jax.jit(lambda v: potential_energy(handlers.seed(collapsed, 0), (X, Y), {}, v))(logs)
    assert energy == pytest.approx(float(-plain - sum(logs.values())), abs=1e-9)


def sample(model, *args, draws=500, warmup=200, chains=2, method="vectorized", seed=0, init=None):
    strategy = {} if init is None else {"init_strategy": init_to_value(values=init)}
    mcmc = MCMC(
        NUTS(model, **strategy),
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed), *args)
    return mcmc


@pytest.fixture(scope="module")
def chains(fit):
    return sample(collapse(fit), X, Y)


@pytest.mark.slow  # an example in the docstring of collapse does it in the fast tier
def test_nuts_runs_on_the_density(fit):
    """A few draws, for what follows from them: those below are many."""
    start = {"lengthscale": 0.8, "noise": 0.3}
    mcmc = sample(
        collapse(fit, refresh=1),
        X,
        Y,
        draws=10,
        warmup=10,
        chains=1,
        method="sequential",
        init=start,
    )
    draws = mcmc.get_samples()
    assert draws["lengthscale"].shape == draws["noise"].shape == (10,)
    assert len(np.unique(draws["noise"])) > 5 and "variance" not in draws
    np.testing.assert_allclose(draws["roughness"] * draws["lengthscale"], 1.0, rtol=1e-12)
    # What it moves in is the density.
    energy = mcmc.last_state.potential_energy
    last = {name: draws[name][-1] for name in start}
    exact = log_joint(exact_regression, last, X, Y) + sum(jnp.log(v) for v in last.values())
    assert energy == pytest.approx(float(-exact), abs=1e-4)
    with pytest.raises(ValueError, match="needs 25 of them at least.*there are 10"):
        loo(fit, mcmc=mcmc)


@pytest.mark.slow
def test_regression_agrees_with_nuts_on_the_marginal_likelihood(chains):
    ours = chains.get_samples()
    exact = sample(exact_regression, X, Y, method="sequential", seed=1).get_samples()
    for name in ("lengthscale", "noise"):
        # Thinned to be nearly independent; a p-value below 1e-3 happens by chance once in 1000.
        pair = [np.asarray(draws[name])[::4] for draws in (ours, exact)]
        assert stats.ks_2samp(*pair).pvalue > 1e-3


def moments_by_hand(lengthscale, noise, at):
    """Exact posterior of f at given hyperparameters."""
    K = dense.rbf(X, X, lengthscale, 1.3) + noise**2 * np.eye(N)
    k = dense.rbf(X, at, lengthscale, 1.3)
    return k.T @ np.linalg.solve(K, Y), 1.3 - (k * np.linalg.solve(K, k)).sum(0)


NEW = np.array([-0.5, 0.4, 1.7, 3.8])


@pytest.mark.slow
def test_marginals_are_mixtures_over_draws(fit):
    collapsed = collapse(fit, refresh=1)
    rng = np.random.default_rng(2)  # any values will do
    thinned = {
        "lengthscale": jnp.asarray(rng.lognormal(-0.2, 0.2, 40)),
        "noise": jnp.asarray(rng.lognormal(-1.0, 0.2, 40)),
    }
    q = collapsed.marginals(thinned, NEW)["f"]
    parts = [
        moments_by_hand(*pair, NEW)
        for pair in zip(thinned["lengthscale"], thinned["noise"], strict=True)
    ]
    mean, variance = (np.array(x) for x in zip(*parts, strict=True))
    np.testing.assert_allclose(q.mean, mean.mean(0), atol=2e-4)  # the jitter again
    np.testing.assert_allclose(q.variance, variance.mean(0) + mean.var(0), atol=2e-4)
    cdf = stats.norm.cdf(0.3, mean, np.sqrt(variance)).mean(0)
    np.testing.assert_allclose(q.cdf(0.3), cdf, atol=5e-4)

    # Draws are one for each draw of the hyperparameters, from that component.
    many = {name: jnp.repeat(draws, 25) for name, draws in thinned.items()}
    f = collapsed.sample_posterior(jax.random.key(3), many, NEW)["f"]
    z = (np.asarray(f).reshape(-1, 25, 4) - mean[:, None]) / np.sqrt(variance)[:, None]
    count = z.shape[0] * 25
    assert np.abs(z.mean((0, 1))).max() < 4.5 / np.sqrt(count)
    assert np.abs(z.var((0, 1)) - 1).max() < 4.5 * np.sqrt(2 / count)
    # Without inputs, at those of the data.
    assert collapsed.marginals(thinned)["f"].batch_shape == (N,)


@pytest.mark.slow
def test_weights_of_an_exact_posterior_are_equal(fit):
    weights = collapse(fit, refresh=1).log_weights(jax.random.key(0), POINTS, num_draws=3)
    # f given u has the jitter's standard deviation of 1e-4, over a noise of 0.1.
    np.testing.assert_allclose(weights, -np.log(4), atol=3e-3)


@pytest.mark.slow
def test_chains_become_an_arviz_object_with_sites_made_anew(fit, chains):
    thinned = chains.get_samples(group_by_chain=True)
    data = to_arviz(jax.random.key(2), fit, mcmc=chains, predictions=NEW, prior=False)
    f = np.asarray(data["predictions"]["f"])
    assert f.shape == (2, 500, 4)
    pairs = [np.asarray(thinned[name]).ravel() for name in ("lengthscale", "noise")]
    z = []
    for lengthscale, noise, value in zip(*pairs, f.reshape(-1, 4), strict=True):
        mean, variance = moments_by_hand(lengthscale, noise, NEW)
        z.append((value - mean) / np.sqrt(variance))
    z = np.array(z)
    # With the sites of the fit held instead, the variance of z is off by tens of percent.
    assert np.abs(z.mean(0)).max() < 4.5 / np.sqrt(len(z))
    assert np.abs(z.var(0) - 1).max() < 4.5 * np.sqrt(2 / len(z))
    # Leave-one-out: the cavities at each draw, combined by importance sampling.
    elpd = loo(fit, mcmc=chains)
    assert int(elpd["n_data_points"]) == N


def test_what_cannot_be_collapsed_says_so(fit):
    with pytest.raises(TypeError, match=r"collapse\(result.fit\), got dict"):
        collapse(fit.params)
    with pytest.raises(ValueError, match="refresh.*got -1"):
        collapse(fit, refresh=-1)
    collapsed = collapse(fit)
    with pytest.raises(ValueError, match=r"hyperparameters.*\['lengthscale', 'noise'\]"):
        collapsed.marginals({"other": np.zeros(3)})
    incomplete = {k: v for k, v in fit.params.items() if k != "f_auto_linear"}
    with pytest.raises(ValueError, match=r"no \['f_auto_linear'\].*result.params"):
        collapse(dataclasses.replace(fit, params=incomplete)).marginals(POINTS)

    def points(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    svi = TSVGP(points, AutoDualGaussian(points, inducing=X[::3]), None)
    with pytest.raises(ValueError, match="samples no hyperparameters.*prior"):
        collapse(svi.fit(svi.init(jax.random.key(0), X, Y), X, Y))


@pytest.mark.slow
def test_the_density_takes_quadrature_and_rule_of_the_fit():
    """Sites made anew by one step, against the driver's own."""

    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
        f = numpyro.sample("f", GP(variance * kernels.RBF(0.5), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.StudentT(3.0, f, 0.1), obs=y)

    guide = AutoDualGaussian(model, inducing=X[::2], learn_inducing=False)
    settings = dict(quadrature=GaussHermite(4), rule=Riemannian())
    svi = TSVGP(model, guide, None, site_lr=1.0, **settings)
    state = svi.init(jax.random.key(0), X, Y, init_params={"variance_auto_loc": 0.7})
    fit, value = svi.fit(state, X, Y), {"variance": 0.7}
    after, loss = jax.jit(svi.update)(state, X, Y)  # minus the bound and the log prior
    collapsed = collapse(fit, refresh=1)
    density = log_joint(collapsed, value, X, Y)
    assert density == pytest.approx(float(-loss), rel=1e-9)
    # The GP given a draw is that of the sites after the step.
    q = collapsed.marginals({"variance": np.array([0.7])})["f"]
    np.testing.assert_allclose(q.mean, svi.fit(after, X, Y).marginals()["f"].mean, rtol=1e-7)
    for other in ({"quadrature": None}, {"rule": NaturalGradient()}):  # so the settings matter
        there = collapse(dataclasses.replace(fit, **other), refresh=1)
        assert abs(log_joint(there, value, X, Y) - density) > 0.1


def test_a_model_that_subsamples_is_collapsed_at_all_of_its_data():
    def subsampling(X, y=None, size=5):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        plate = numpyro.plate("data", X.shape[0], subsample_size=size)
        with plate as rows:
            pass
        f = numpyro.sample("f", GP(kernels.RBF(1.0), X[rows]))
        with plate:
            numpyro.sample("y", dist.Normal(f, noise), obs=None if y is None else y[rows])

    guide = AutoDualGaussian(subsampling, inducing=X[::2], learn_inducing=False)
    svi = TSVGP(subsampling, guide, None, site_lr=1.0)
    collapsed = collapse(svi.fit(svi.init(jax.random.key(0), X, Y), X, Y), refresh=1)

    @jax.jit
    def density(seed):
        values = {"noise": 0.4}
        return log_density(handlers.seed(collapsed, seed), (X, Y), {}, values)[0]

    # The whole data, whatever the seed: the bound of a Gaussian with the Nystrom covariance.
    K = dense.rbf(X[::2], X[::2])
    k = dense.rbf(X[::2], X)
    Q = k.T @ np.linalg.solve(K + 1e-8 * np.eye(len(K)), k)
    expected = stats.multivariate_normal(np.zeros(N), Q + 0.16 * np.eye(N)).logpdf(Y)
    expected -= (1 - np.diag(Q)).sum() / 0.32
    expected += stats.lognorm.logpdf(0.4, 0.5, scale=np.exp(-1.0))
    for seed in (0, 1):
        assert density(seed) == pytest.approx(expected, abs=1e-5)


# ---- counts: a published posterior of the full model ------------------------------------------

# Data, priors and reference of the posterior gp_pois_regr of posteriordb (Magnusson, Bürkner and
# Vehtari): NUTS on f and both hyperparameters together, 10,000 draws.
COUNTS_X = np.arange(-10.0, 11.0, 2.0)
COUNTS = np.array([40, 37, 29, 12, 4, 3, 9, 19, 77, 82, 33])
MEANS = {"rho": 5.66653, "alpha": 2.92134}
SQUARES = {"rho": 32.570579, "alpha": 9.162755}
F_MEANS = [
    *(3.63574, 3.68861, 3.25467, 2.40917, 1.56153, 1.29526),
    *(1.93120, 3.17961, 4.25292, 4.41510, 3.50682),
]
F_SQUARES = [
    *(13.241741, 13.621802, 10.613349, 5.842878, 2.499327, 1.748558),
    *(3.779984, 10.130595, 18.096567, 19.501496, 12.324364),
]


def counts(X, k=None):
    rho = numpyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2.0))
    f = numpyro.sample("f", GP(alpha**2 * kernels.RBF(rho), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("k", dist.Poisson(jnp.exp(f)), obs=k)


@pytest.fixture(scope="module")
def fitted_counts():
    guide = AutoDualGaussian(counts, inducing=COUNTS_X, learn_inducing=False)
    svi = TSVGP(counts, guide, optax.adam(0.1))
    state = svi.init(jax.random.key(0), COUNTS_X, COUNTS)
    _, overshot = jax.jit(svi.update)(state, COUNTS_X, COUNTS)
    result = svi.run(jax.random.key(0), 100, COUNTS_X, COUNTS, progress_bar=False)
    return result, float(overshot)


@pytest.mark.slow
def test_a_start_that_overshoots_is_made_with_shorter_steps(fitted_counts):
    """From the prior, an E-step on a count of 82 leads to a log rate near 50."""
    result, overshot = fitted_counts
    assert overshot > 1e6  # what an update does by itself, and Adam would not forget
    assert result.losses[0] < 60


@pytest.mark.slow
def test_nothing_is_gained_by_another_optimizer_at_the_optimum(fitted_counts):
    result, _ = fitted_counts
    svi = TSVGP(counts, result.fit.guide, optax.adam(0.01), e_steps=3)
    state = svi.init(jax.random.key(0), COUNTS_X, COUNTS, init_params=result.params)
    more = svi.run(jax.random.key(0), 50, COUNTS_X, COUNTS, init_state=state, progress_bar=False)
    assert result.losses[-1] == pytest.approx(float(more.losses.min()), abs=0.02)


def check_published(means, sds):
    for name, mean in MEANS.items():
        assert means[name] == pytest.approx(mean, rel=0.05)
        assert sds[name] == pytest.approx(np.sqrt(SQUARES[name] - mean**2), rel=0.15)


@pytest.mark.slow
def test_the_density_of_counts_has_the_published_moments(fitted_counts):
    result, _ = fitted_counts
    grid = np.array(list(itertools.product(np.linspace(2.5, 9.5, 29), np.linspace(0.8, 8.0, 37))))
    values = {"rho": jnp.array(grid[:, 0]), "alpha": jnp.array(grid[:, 1])}
    collapsed = collapse(result.fit)

    @jax.jit
    def density(values):
        return jax.lax.map(lambda v: log_joint(collapsed, v, COUNTS_X, COUNTS), values)

    weights = np.exp(density(values) - density(values).max())
    weights /= weights.sum()
    mean = weights @ grid
    sd = np.sqrt(weights @ (grid - mean) ** 2)
    check_published(
        dict(zip(("rho", "alpha"), mean, strict=True)), dict(zip(("rho", "alpha"), sd, strict=True))
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", [jax.jacrev, jax.jacfwd])
def test_the_slope_of_the_density_of_counts_holds_the_sites(fitted_counts, mode):
    """At their fixed point the bound is stationary in the sites: its slope is that of M-steps."""
    result, _ = fitted_counts
    here = {"rho": jnp.array(4.5), "alpha": jnp.array(2.2)}

    def joint(refresh):
        model = collapse(result.fit, refresh=refresh)
        return lambda v: log_density(handlers.seed(model, 0), (COUNTS_X, COUNTS), {}, v)[0]

    h = 1e-4
    for refresh, rel in ((12, 1e-6), (2, 0.05)):
        slope = jax.jit(mode(joint(refresh)))(here)
        value = jax.jit(joint(refresh))
        for name in here:
            up, down = ({**here, name: here[name] + s * h} for s in (1, -1))
            difference = (value(up) - value(down)) / (2 * h)
            assert slope[name] == pytest.approx(float(difference), rel=rel, abs=rel)


@pytest.mark.slow
def test_nuts_on_counts_has_the_published_moments(fitted_counts):
    result, _ = fitted_counts
    collapsed = collapse(result.fit)
    start = {name: result.fit.hyper[name] for name in MEANS}
    mcmc = sample(collapsed, COUNTS_X, COUNTS, draws=700, init=start)
    draws = mcmc.get_samples()
    # 1400 draws with an effective size near 600: the means are known to 1%, the deviations to 3%.
    check_published(
        {name: draws[name].mean() for name in MEANS}, {name: draws[name].std() for name in MEANS}
    )
    f = collapsed.sample_posterior(jax.random.key(5), draws)["f"]
    sd = np.sqrt(np.array(F_SQUARES) - np.square(F_MEANS))
    assert (np.abs(np.asarray(f).mean(0) - F_MEANS) / sd).max() < 0.15
    np.testing.assert_allclose(f.std(0), sd, rtol=0.15)


@pytest.mark.slow
def test_parallel_chains_do_not_hang():
    """Chains on two devices, in a process of their own that ends if they wait for each other."""
    code = """
import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
numpyro.set_host_device_count(2)
from numpyro.infer import MCMC, NUTS
from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, collapse, kernels

def model(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("functions", 3):
        f = numpyro.sample("f", GP(kernels.RBF(scale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f.sum(0), 0.3), obs=y)

X = jnp.linspace(0.0, 1.0, 12)
guide = AutoDualGaussian(model, inducing=X[::2], learn_inducing=False)
svi = TSVGP(model, guide, None)
fit = svi.run(jax.random.key(0), 3, X, jnp.sin(6 * X), progress_bar=False).fit
mcmc = MCMC(NUTS(collapse(fit)), num_warmup=20, num_samples=20, num_chains=2,
            chain_method="parallel", progress_bar=False)
mcmc.run(jax.random.key(1), X, jnp.sin(6 * X))
assert mcmc.get_samples()["scale"].shape == (40,)
print("done")
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0 and "done" in run.stdout, run.stderr
