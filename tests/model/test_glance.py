"""Many rows: the checks before a fit look at a sample, and still find a bad value anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
from numpyro_tsvgp.model import glance
from numpyro_tsvgp.model.arguments import Call

N = 300
X = np.random.RandomState(0).rand(N)
Y = np.ones(N)
Z = np.linspace(0.0, 1.0, 4)


def model(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def by_index(X, y=None):
    data = numpyro.plate("data", X.shape[0], subsample_size=20)
    with data as rows:
        x, y = X[rows], y[rows]
    f = numpyro.sample("f", GP(kernels.RBF(0.3), x))
    with data:
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.fixture(autouse=True)
def _few_rows_are_many(monkeypatch):
    monkeypatch.setattr(glance, "_LARGE", 100)
    monkeypatch.setattr(glance, "_SAMPLE", 20)


def init(model, X, y):
    return TSVGP(model, AutoDualGaussian(model, inducing=Z), None).init(jax.random.key(0), X, y)


@pytest.mark.parametrize("model", [model, by_index])
@pytest.mark.parametrize("value, words", [(np.nan, "missing"), (-1.0, "support of Poisson")])
def test_a_bad_value_outside_of_the_sample_is_found_and_named(model, value, words):
    assert glance.rows_of(glance.glance(model, Call((X, Y), {}))) == 20
    sample = np.linspace(0, N - 1, 20).astype(int)
    row = 151
    assert row not in sample
    bad = Y.copy()
    bad[row] = value
    with pytest.raises(ValueError, match=f"index {row}.*{words}"):
        init(model, X, bad)


def test_of_a_memory_map_a_sample_is_read(tmp_path, monkeypatch):
    path = tmp_path / "X.npy"
    np.save(path, X)
    seen = []
    whole = Call.on_device
    monkeypatch.setattr(
        Call, "on_device", lambda self: seen.append(glance.rows_of(self)) or whole(self)
    )
    init(model, np.load(path, mmap_mode="r"), Y)
    assert seen and max(seen) == 20


def test_sites_for_each_data_point_need_all_rows():
    guide = AutoDualGaussian(model, inducing=Z, sites="untied")
    state = TSVGP(model, guide, None).init(jax.random.key(0), X, Y)
    assert any(N in value.shape for value in state.approximation.values())
