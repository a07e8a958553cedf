"""The predictive distribution of data against closed forms and brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import ndtr
from scipy import stats

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

X = jnp.linspace(0.0, 3.0, 24)
NEW = jnp.linspace(-2.0, 5.0, 9)
PROBABILITIES = np.array([0.05, 0.5, 0.95])


def fitted(likelihood, y, *, functions=(), e_steps=10, Z=X[::4]):
    def model(X, y=None):
        prior = GP(1.5 * kernels.Matern52(0.5), X)
        f = numpyro.sample("f", prior.expand(functions) if functions else prior)
        likelihood(f, y)

    svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), None, site_lr=0.5, e_steps=e_steps)
    return svi.run(jax.random.key(0), 1, X, y, progress_bar=False).fit


def observed(make):
    def likelihood(f, y):
        with numpyro.plate("data", f.shape[-1]):
            numpyro.sample("y", make(f), obs=y)

    return likelihood


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.3, 0.01])
def test_gaussian(noise):
    """In closed form, also where the likelihood is a hundredth as wide as the posterior."""
    fit = fitted(observed(lambda f: dist.Normal(f, noise)), jnp.sin(3.0 * X))
    mean, variance = fit.marginals(NEW)["f"]
    exact = stats.norm(mean, np.sqrt(variance + noise**2))
    at = fit.predict(NEW)
    np.testing.assert_allclose(at.mean, mean, atol=1e-12)
    np.testing.assert_allclose(at.std, exact.std(), rtol=1e-10)
    y = mean + jnp.linspace(-12.0, 12.0, 9) * exact.std()
    np.testing.assert_allclose(at.log_prob(y), exact.logpdf(y), atol=1e-6)
    quantiles = at.quantiles(PROBABILITIES)
    assert quantiles.shape == (3, 9) and at.quantiles_from == "cdf"
    np.testing.assert_allclose(exact.cdf(quantiles), PROBABILITIES[:, None] + 0 * y, atol=1e-4)
    low, high = at.interval(0.9)
    np.testing.assert_array_equal([low, high], quantiles[::2])
    assert repr(at).startswith("Predictions(\n  y ~ Normal, shape (9,): mean ")


@pytest.mark.slow
def test_counts():
    fit = fitted(observed(lambda f: dist.Poisson(jnp.exp(f))), jnp.round(2 + jnp.sin(3.0 * X)))
    m, v = fit.marginals(NEW)["f"]
    at = fit.predict(NEW)
    rate = jnp.exp(m + v / 2)
    np.testing.assert_allclose(at.mean, rate, rtol=1e-10)
    np.testing.assert_allclose(at.variance, rate + rate**2 * jnp.expm1(v), rtol=1e-8)
    # The probability of each count on a grid of its own.
    z = np.linspace(-9, 9, 1001)
    w = stats.norm.pdf(z) / stats.norm.pdf(z).sum()
    counts = np.arange(400)
    rates = np.exp(m + np.sqrt(v) * z[:, None])
    cumulative = np.einsum("s,scn->cn", w, stats.poisson.cdf(counts[:, None], rates[:, None]))
    wanted = [(cumulative >= q).argmax(0) for q in PROBABILITIES]
    np.testing.assert_array_equal(at.quantiles(PROBABILITIES), wanted)
    np.testing.assert_allclose(at.log_prob(2), np.log(w @ stats.poisson.pmf(2, rates)), rtol=1e-8)
    with pytest.raises(ValueError, match="whose values cannot be listed"):
        _ = at.probs
    with pytest.raises(ValueError, match="does not broadcast to"):
        at.log_prob(jnp.zeros(4))
    with pytest.raises(ValueError, match="between 0 and 1"):
        at.quantiles(95)


def test_binary():
    fit = fitted(observed(lambda f: dist.Bernoulli(ndtr(f))), (jnp.sin(3.0 * X) > 0) * 1.0)
    m, v = fit.marginals(NEW)["f"]
    exact = ndtr(m / jnp.sqrt(1 + v))
    at = fit.predict(NEW)["y"]
    np.testing.assert_allclose(at.mean, exact, atol=1e-10)
    np.testing.assert_allclose(at.variance, exact * (1 - exact), atol=1e-10)
    np.testing.assert_allclose(at.log_prob(1), jnp.log(exact), atol=1e-10)


@pytest.mark.slow
def test_two_functions_in_a_term_and_categories():
    """Against draws of f by itself, of which there are many."""

    def heteroscedastic(f, y):
        with numpyro.plate("data", f.shape[-1]):
            numpyro.sample("y", dist.Normal(f[0], jnp.exp(f[1] - 1)), obs=y)

    fit = fitted(heteroscedastic, jnp.sin(3.0 * X), functions=(2,))
    m, v = fit.marginals(NEW)["f"]
    z = np.random.default_rng(0).normal(size=(200_000, 2, 9))
    f, log_scale = np.moveaxis(m + np.sqrt(v) * z, 1, 0)
    at = fit.predict(NEW)
    scale = np.exp(log_scale - 1)
    np.testing.assert_allclose(at.variance, v[0] + np.exp(2 * (m[1] - 1) + 2 * v[1]), rtol=1e-6)
    density = stats.norm.pdf(0.4, f, scale).mean(0)
    np.testing.assert_allclose(np.exp(at.log_prob(0.4)), density, rtol=0.03)
    q = np.asarray(at.quantiles(0.9))
    np.testing.assert_allclose(stats.norm.cdf(q, f, scale).mean(0), 0.9, atol=0.005)

    fit = fitted(
        observed(lambda f: dist.Categorical(logits=f.T)), jnp.arange(24) % 5, functions=(5,)
    )
    m, v = fit.marginals(NEW)["f"]
    z = np.random.default_rng(0).normal(size=(200_000, 5, 9))
    exact = jax.nn.softmax(m + jnp.sqrt(v) * z, 1).mean(0).T
    at = fit.predict(NEW)
    np.testing.assert_allclose(at.probs, exact, atol=0.005)
    with pytest.raises(ValueError, match="mean is not defined"):
        _ = at.mean
    assert "Categorical" in repr(at)


@pytest.mark.slow
def test_functions_that_share_a_coordinate_of_the_fit_do_not_share_it_here():
    """In a log-density of a vector two functions add up, in the density they multiply."""

    def likelihood(f, y):
        with numpyro.plate("data", f.shape[-1]):
            noise = dist.MultivariateNormal(f.T, scale_tril=0.3 * jnp.eye(2))
            numpyro.sample("y", noise, obs=y)

    y = jnp.stack([jnp.sin(3.0 * X), jnp.cos(X)], -1)
    fit = fitted(likelihood, y, functions=(2,))
    m, v = fit.marginals(NEW)["f"]
    at = fit.predict(NEW)
    exact = stats.norm.logpdf(0.2, m, np.sqrt(v + 0.09)).sum(0)
    np.testing.assert_allclose(at.log_prob(0.2), exact, atol=1e-6)
    np.testing.assert_allclose(at.mean, m.T, atol=1e-10)


@pytest.mark.slow
def test_several_sites_and_the_one_that_no_one_named():
    def likelihood(f, y):
        y1, y2 = (None, None) if y is None else y
        with numpyro.plate("data", f.shape[-1]):
            numpyro.sample("a", dist.Normal(f, 0.3), obs=y1)
            numpyro.sample("b", dist.StudentT(4.0, f, 0.3), obs=y2)

    fit = fitted(likelihood, (jnp.sin(3.0 * X), jnp.sin(3.0 * X)))
    at = fit.predict(NEW)
    mean, variance = fit.marginals(NEW)["f"]
    assert list(at) == ["a", "b"] and len(at) == 2
    np.testing.assert_allclose(at["b"].variance, variance + 2 * 0.09, rtol=1e-8)
    with pytest.raises(AttributeError, match=r"predictions\['a'\].mean"):
        _ = at.mean
    with pytest.raises(KeyError, match="no site 'c'"):
        at["c"]


@pytest.mark.slow
def test_what_has_no_distribution_to_predict_is_refused():
    def factor(f, y):
        y = jnp.zeros(f.shape) if y is None else y
        with numpyro.plate("data", f.shape[-1]):
            numpyro.factor("y", dist.Normal(f, 0.3).log_prob(y))

    fit = fitted(factor, jnp.sin(3.0 * X))
    with pytest.raises(ValueError, match="only terms of numpyro.factor"):
        fit.predict(NEW)

    def chain(f, y):
        y1, y2 = (None, None) if y is None else y
        with numpyro.plate("data", f.shape[-1]):
            first = numpyro.sample("first", dist.Normal(f, 0.3), obs=y1)
            numpyro.sample("second", dist.Normal(first, 0.3), obs=y2)

    fit = fitted(chain, (jnp.sin(3.0 * X), jnp.sin(3.0 * X)))
    with pytest.raises(ValueError, match="depends on the value of site 'first'"):
        fit.predict(NEW)


@pytest.mark.slow
def test_another_number_of_inputs_compiles_nothing():
    """Rows are repeated up to 24, and what belongs to repeats is cut off."""
    from test_conditioning import Compilations

    fit = fitted(observed(lambda f: dist.Poisson(jnp.exp(f))), jnp.round(2 + jnp.sin(3.0 * X)))
    predictor = fit.predictor(X[:3])

    def everything(rows):
        new, y = jax.device_put(np.linspace(-2.0, 5.0, rows)), np.arange(rows) % 4
        found = []
        for at in (fit.predict(new), predictor.predict(new)):
            found += [at.mean, at.variance, at.log_prob(y), at.quantiles([0.1, 0.9])]
            found += [at.sample(jax.random.key(0), 3)]
        assert [x.shape[-1] for x in found] == [rows] * 10
        return [np.asarray(x) for x in found]

    first = everything(24)
    with Compilations() as compilations:
        fewer = [everything(rows) for rows in (21, 22, 23)]
    assert compilations.found == []
    assert len(first) == len(fewer[0])
    whole = fit.marginals(np.linspace(-2.0, 5.0, 22))["f"]
    rate = np.exp(whole.mean + whole.variance / 2)
    np.testing.assert_allclose(fewer[1][0], rate, rtol=1e-10)
    np.testing.assert_allclose(fewer[1][5], rate, rtol=1e-10)


@pytest.mark.slow
def test_rows_of_a_table_of_outputs_are_cut_where_they_are():
    """Categories and outputs have axes of their own, also ones as long as rows are filled up to."""

    def likelihood(f, y):
        with numpyro.plate("data", f.shape[-1]):
            numpyro.sample("y", dist.Normal(f.T, 0.3).to_event(1), obs=y)

    y = jnp.sin(3.0 * X)[:, None] * jnp.linspace(0.5, 1.5, 16)
    fit = fitted(likelihood, y, functions=(16,))
    at, mean = fit.predict(NEW), fit.marginals(NEW)["f"].mean
    assert at.shape == at.mean.shape == (9, 16)
    np.testing.assert_allclose(at.mean, mean.T, atol=1e-10)
    one_by_one = [fit.predict(NEW[i : i + 1]).log_prob(at.mean[i] + 0.1) for i in (0, 8)]
    np.testing.assert_allclose(
        at.log_prob(at.mean + 0.1)[jnp.array([0, 8])], jnp.concatenate(one_by_one), atol=1e-8
    )


@pytest.mark.slow
def test_a_model_that_looks_at_all_inputs_is_given_no_others():
    def model(X, y=None):
        f = numpyro.sample("f", GP(1.5 * kernels.Matern52(0.5), X - X.mean()))
        observed(lambda f: dist.Normal(f, 0.3))(f, y)

    svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::4] - 1.5), None, site_lr=1.0)
    fit = svi.run(jax.random.key(0), 1, X, jnp.sin(3.0 * X), progress_bar=False).fit
    expected = fit.marginals(NEW)["f"]
    np.testing.assert_allclose(fit.predict(NEW).mean, expected.mean, atol=1e-12)
    np.testing.assert_allclose(fit.predictor()(NEW)["f"].mean, expected.mean, atol=1e-12)
