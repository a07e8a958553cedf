"""What was right where a fit started and is not where it stands."""

import dataclasses
import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
from numpyro_tsvgp.infer.standing import doubts

X = jnp.linspace(0.0, 1.0, 8)


def at_start(model, y, inducing=None):
    """The fit of an initial state."""
    svi = TSVGP(model, AutoDualGaussian(model, inducing), None)
    return svi.fit(svi.init(jax.random.key(0), X, y), X, y)


def with_params(fit, **params):
    return dataclasses.replace(fit, params={**fit.params, **params})


def test_a_parameter_of_the_likelihood_that_left_its_range():
    def model(X, y=None):
        w = numpyro.param("w", 0.5)  # without a constraint
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(probs=w * jax.nn.sigmoid(f)), obs=y)

    fit = at_start(model, jnp.ones(8, int))
    assert doubts(fit) == []
    (words,) = doubts(with_params(fit, w=jnp.asarray(3.0)))
    assert re.match("Site 'y' is a BernoulliProbs whose probs leaves its range at the hyper", words)


@pytest.mark.parametrize("inducing", [None, X[::2]])
def test_jitter_that_data_notice(inducing):
    """Half of jitter times the sum of all precisions times variances, in nats."""

    def model(X, y=None):
        f = numpyro.sample("f", GP(4.0 * kernels.RBF(0.3), X, jitter=1e-6))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    fit = at_start(model, jnp.zeros(8), inducing)
    shape = fit.params["f_auto_quadratic"].shape
    site = 1e6 * jnp.eye(shape[-1])[None] if inducing is not None else jnp.full(shape, 1e6)
    nats = 0.5 * 1e-6 * 1e6 * (4 if inducing is not None else 8 * 4.0)
    assert doubts(fit) == []
    (words,) = doubts(with_params(fit, f_auto_quadratic=site))
    assert "The jitter of GP site 'f', 1e-06 of its variance of 4, is noise" in words
    assert f"worth about {nats:.2g} nats" in words
    assert doubts(with_params(fit, f_auto_quadratic=1e-3 * site)) == []


@pytest.mark.slow
def test_less_jitter_is_what_helps():
    """Precise data, exactly: off by the jitter, warned of, and right with the jitter advised."""
    X = np.sort(np.random.RandomState(0).rand(30))
    y = 10.0 * X
    K = 100.0 * np.exp(-0.5 * np.subtract.outer(X, X) ** 2)
    exact = dist.MultivariateNormal(jnp.zeros(30), jnp.asarray(K + 1e-6 * np.eye(30))).log_prob(y)
    losses = {}
    for jitter in (None, 1e-12):

        def model(X, y=None, jitter=jitter):
            f = numpyro.sample("f", GP(100.0 * kernels.RBF(1.0), X, jitter=jitter))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", dist.Normal(f, 1e-3), obs=y)

        svi = TSVGP(model, AutoDualGaussian(model), None, site_lr=1.0)
        told = pytest.warns(UserWarning, match="jitter of GP site 'f'")
        with told if jitter is None else nullcontext():
            losses[jitter] = svi.run(jax.random.key(0), 3, X, y, progress_bar=False).losses[-1]
    assert abs(losses[None] + exact) > 1.0
    assert abs(losses[1e-12] + exact) < 0.01


@pytest.mark.parametrize("loop", ["over all values", "for each value"])
def test_what_jax_cannot_differentiate_is_refused_in_words(loop):
    def halved(f):
        return jax.lax.while_loop(
            lambda c: (c[0] < 3) & (jnp.abs(c[1]).max() > 1e-9),
            lambda c: (c[0] + 1, 0.5 * c[1]),
            (0, f),
        )[1]

    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
        location = halved(f) if loop == "over all values" else jax.vmap(halved)(f)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(location, 0.3), obs=y)

    svi = TSVGP(model, AutoDualGaussian(model), None)
    words = "no gradient of the log density of site 'y'.*lax.while_loop.*fixed number of steps"
    with pytest.raises(ValueError, match=f"{words}|one term of site 'y' reads both"):
        svi.init(jax.random.key(0), X, jnp.zeros(8))


@pytest.mark.slow
def test_a_parameter_that_no_gradient_reaches():
    """A threshold is told of; one that an optimizer holds on purpose is not."""

    def model(X, y=None):
        c = numpyro.param("c", 0.5)
        level = numpyro.param("level", 0.1)
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X, mean=lambda x: level + 0.0 * x))
        with numpyro.plate("data", X.shape[0]), numpyro.handlers.mask(mask=c > X):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    frozen = optax.multi_transform(
        {"move": optax.adam(0.1), "hold": optax.set_to_zero()}, {"c": "move", "level": "hold"}
    )
    svi = TSVGP(model, AutoDualGaussian(model), frozen)
    with pytest.warns(UserWarning, match="'c' has not moved") as caught:
        svi.run(jax.random.key(0), 3, X, jnp.sin(6.0 * X), progress_bar=False)
    assert len(caught) == 1


def test_probabilities_that_left_their_simplex():
    def model(X, y=None):
        w = numpyro.param("w", 0.3)
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
        p = w * jax.nn.sigmoid(f)[:, None]
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(probs=jnp.concatenate([p, 1 - p], -1)), obs=y)

    fit = at_start(model, jnp.ones(8, int))
    assert doubts(fit) == []
    (words,) = doubts(with_params(fit, w=jnp.asarray(3.0)))
    assert re.match("Site 'y' is a CategoricalProbs whose probs leaves its range", words)
