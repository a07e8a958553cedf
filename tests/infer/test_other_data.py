"""Objects hold configuration: used on other data, they give what fresh objects give.

Everything that depends on data is computed from the data of the call. The cases are those that used
to be remembered: inputs of sites of points, shapes of latent variables, the structure of a model.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoNormal

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

RNG = np.random.RandomState(2)
Z = np.linspace(-1.8, 1.8, 5)
KEY, STEPS = jax.random.key(0), 4


def data(n, shift):
    X = np.sort(RNG.uniform(-2.0, 2.0, n))
    return X, RNG.poisson(np.exp(0.5 + np.sin(2.0 * X + shift))).astype(float)


FIRST, SAME_ROWS, MORE_ROWS = data(12, 0.0), data(12, 2.0), data(15, 1.0)
NEW = np.array([-1.5, 0.2, 1.1])


def counts(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    lengthscale = numpyro.param("lengthscale", 0.7, constraint=dist.constraints.positive)
    f = numpyro.sample("f", GP(kernels.Matern52(lengthscale, variance), X, mean=lambda x: 0.1 * x))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


KINDS = {
    "tied": {"inducing": Z},
    "untied": {"inducing": Z, "sites": "untied"},
    "full": {},
    "variational": {"inducing": Z, "hyper_guide": AutoNormal},
}


def make(kind):
    guide = AutoDualGaussian(counts, **KINDS[kind])
    return guide, TSVGP(counts, guide, optax.adam(0.05))


def numbers(objects, data):
    """Everything that a fit gives, by name."""
    guide, svi = objects
    result = svi.run(KEY, STEPS, *data, progress_bar=False)
    q, through_guide = result.fit.marginals(NEW)["f"], guide.marginals(result.params, NEW)["f"]
    return {
        "losses": result.losses,
        **result.params,
        "mean": q.mean,
        "variance": q.variance,
        "mean of the guide": through_guide.mean,
        "draws": guide.sample_posterior(jax.random.key(1), result.params, NEW)["f"],
    }


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k != "full" else ()) for k in KINDS]
)
def test_used_on_other_data_they_are_as_fresh_objects(kind):
    used = make(kind)
    first = numbers(used, FIRST)
    for name, other in (("as many rows", SAME_ROWS), ("more rows", MORE_ROWS)):
        again, fresh = numbers(used, other), numbers(make(kind), other)
        assert set(again) == set(fresh)
        for key, value in fresh.items():
            np.testing.assert_allclose(
                again[key], value, rtol=1e-12, atol=1e-12, err_msg=f"{key}, {name}"
            )
        # Not vacuous: these are other data.
        assert np.abs(again["mean"] - first["mean"]).max() > 0.1
    # And back: what was learned from the others is nowhere.
    for key, value in numbers(used, FIRST).items():
        np.testing.assert_array_equal(value, first[key], err_msg=key)


@pytest.mark.slow
def test_a_state_may_be_updated_with_other_data():
    """One guide serves two fits that take turns."""
    guide, svi = make("full")
    together, alone = {}, {}
    update = jax.jit(svi.update)
    for name, args in (("first", FIRST), ("more", MORE_ROWS)):
        together[name] = svi.init(KEY, *args)
        alone[name] = make("full")[1].init(KEY, *args)
    for _ in range(2):
        for name, args in (("first", FIRST), ("more", MORE_ROWS)):
            together[name], _ = update(together[name], *args)
            np.testing.assert_array_equal(
                together[name].approximation["f_auto_inputs"], args[0], err_msg=name
            )
            alone[name], _ = update(alone[name], *args)
    for name in together:
        ours, theirs = (svi.get_params(states[name]) for states in (together, alone))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_the_structure_is_that_of_the_data():
    """Another number of observed points, another set of hyperparameters, another coupling."""

    def model(X, y=None, many=False):
        with numpyro.plate("functions", 2):
            f = numpyro.sample("f", GP(kernels.RBF(0.7), X))
        shift = numpyro.sample("shift", dist.Normal(0.0, 1.0)) if many else 0.0
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f.sum(0) + shift if many else f[0], 0.3), obs=y)

    svi = TSVGP(model, AutoDualGaussian(model, Z), None)
    X, y = FIRST
    few, many, again = (svi.init(KEY, X, y, many=m).structure for m in (False, True, False))
    assert few.dim == 1 and few.hyperparameters == ()
    assert many.dim == 2 and many.hyperparameters == ("shift",)
    assert few == again
