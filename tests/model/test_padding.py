"""Whether rows can be appended to the arguments of a model: proven, or not done."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_tsvgp import GP, kernels
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.padding import rows_stand_alone


def gp(X, scale=1.0, **options):
    return numpyro.sample("f", GP(kernels.RBF(scale), X, **options))


def binary(f, y):
    with numpyro.plate("data", f.shape[-1]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def closure(X):
    return kernels.as_kernel(lambda a, b: jnp.exp(-(((a[:, None] - b[None]) / X.std()) ** 2)))


MODELS = {
    "plain": (lambda X, y: binary(gp(X), y), True),
    "mean": (lambda X, y: binary(gp(X, mean=lambda x: 2 * x), y), True),
    "counted": (lambda X, y: binary(gp(X + jnp.arange(X.shape[0])), y), True),
    "a constant": (lambda X, y: binary(gp(np.arange(X.shape[0]) + X), y), True),
    "centred": (lambda X, y: binary(gp(X - X.mean()), y), False),
    "by number": (lambda X, y: binary(gp(X / X.shape[0]), y), False),
    "spaced": (lambda X, y: binary(gp(jnp.linspace(0.0, 1.0, X.shape[0])), y), False),
    "spaced constant": (lambda X, y: binary(gp(np.linspace(0.0, 1.0, X.shape[0])), y), False),
    "scale of inputs": (lambda X, y: binary(gp(X, X.std()), y), False),
    "closure": (lambda X, y: binary(numpyro.sample("f", GP(closure(X), X)), y), False),
    "likelihood": (lambda X, y: binary(gp(X) + X.sum(), y), False),
    "functions": (lambda X, y: binary(jnp.flip(gp(X)), y), False),
    "scaled": (lambda X, y: numpyro.factor("y", -0.5 * gp(X).sum() ** 2), False),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_appended_where_others_do_not_see_them(name):
    model, expected = MODELS[name]
    for y in (None, np.ones(5, int)):
        longer = None if y is None else np.ones(8, int)
        calls = Call((np.zeros(5), y), {}), Call((np.zeros(8), longer), {})
        flags = (True,) if y is None else (True, True)
        assert rows_stand_alone(model, *calls, flags, {}) == expected


def test_other_arguments_and_parameters_may_have_any_value():
    """A matrix that happens to be the identity now may mix rows later."""

    def mixed(X, matrix):
        binary(matrix @ gp(X), None)

    def shifted(X, by):
        binary(gp(X) + by + numpyro.param("level", 0.0), None)

    calls = [Call((np.zeros(n), jnp.zeros(())), {}) for n in (5, 8)]
    assert rows_stand_alone(shifted, *calls, (True, False), {"level": jnp.zeros(())})
    calls = [Call((np.zeros(n), np.eye(n)[:, :5]), {}) for n in (5, 8)]
    assert not rows_stand_alone(mixed, *calls, (True, True), {})  # it does not even run

    def weighted(X):
        binary(numpyro.param("matrix", jnp.eye(2)) @ gp(X).reshape(2, -1).ravel()[:2], None)

    calls = [Call((np.zeros(n),), {}) for n in (4, 8)]
    assert not rows_stand_alone(weighted, *calls, (True,), {"matrix": jnp.eye(2)})
