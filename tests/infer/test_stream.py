"""Streams: what an update does, what its memory is, and other inducing inputs on the way."""

import dataclasses

import dense
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

from numpyro_tsvgp import GP, AutoDualGaussian, Stream, kernels, load, save
from numpyro_tsvgp.infer.new_data.conditioning import bare, prepared
from numpyro_tsvgp.infer.new_data.remembering import kept_points
from numpyro_tsvgp.infer.new_data.stream_batch import Batch
from numpyro_tsvgp.infer.new_data.stream_steps import objective
from numpyro_tsvgp.model.arguments import Call

RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(-2, 2, 30))
Y = np.sin(3 * X) + 0.3 * RNG.standard_normal(30)
Z, TEST = np.linspace(-2, 2, 8), np.linspace(-2.5, 2.5, 5)
BATCHES = [(X[a:b], Y[a:b]) for a, b in ((0, 10), (10, 17), (17, 23), (23, 30))]


def model(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = numpyro.sample("f", GP(1.5 * kernels.Matern52(0.5), X, mean=lambda x: 0.2 + 0.1 * x))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def stream_of(optim=None, inducing=Z, **options):
    guide = AutoDualGaussian(model, inducing, learn_inducing=False)
    return Stream(model, guide, optim, memory=4, site_lr=1.0, steps=3, **options)


def assert_same(one, other, atol):
    for a, b in zip(one.marginals(TEST)["f"], other.marginals(TEST)["f"], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def streamed():
    """Fits after each batch, at the first hyperparameters."""
    fits = []
    stream = stream_of()
    stream.run(jax.random.key(0), 1, BATCHES, each=lambda i, fit: fits.append(fit))
    return stream, fits


def test_gaussian_data_are_as_if_they_had_come_at_once(streamed):
    stream, fits = streamed
    whole = stream.svi.run(jax.random.key(0), 1, X, Y, progress_bar=False).fit
    start = whole.hyper["noise"], fits[0].hyper_at(fits[0].memory.call)["noise"]
    assert start[0] == start[1]
    assert_same(fits[-1], whole, 1e-10)
    assert fits[-1].call is None


def test_the_memory_has_points_of_the_past_and_their_sites(streamed):
    _, fits = streamed
    for fit, seen in zip(fits, (10, 17, 23, 30), strict=True):
        memory = fit.memory
        assert (int(memory.count), int(memory.past)) == (4, seen)
        x, y = (np.asarray(a) for a in memory.call.args)
        rows = np.searchsorted(X, x)
        assert (rows < seen).all() and len(set(rows)) == 4
        np.testing.assert_array_equal(Y[rows], y)
        noise = fit.hyper_at(memory.call)["noise"]
        np.testing.assert_allclose(memory.sites["f"].quadratic[0], noise**-2, rtol=1e-9)
        np.testing.assert_allclose(memory.sites["f"].linear[0], y * noise**-2, rtol=1e-8)


def test_a_stream_goes_on_from_a_file(streamed, tmp_path):
    stream, fits = streamed
    save(tmp_path / "fit.npz", fits[1])
    loaded = load(tmp_path / "fit.npz", model=model, guide=stream.svi.guide)
    jax.tree.map(np.testing.assert_array_equal, loaded.memory, fits[1].memory)
    now = stream.update(jax.random.fold_in(jax.random.key(0), 2), loaded, *BATCHES[2])
    assert_same(now, fits[2], 1e-12)
    jax.tree.map(np.testing.assert_array_equal, now.memory.call, fits[2].memory.call)


@pytest.mark.slow
def test_what_hyperparameters_are_learned_from(streamed):
    """New points once, points of the memory for all of the past, and rows repeated not at all."""
    _, fits = streamed
    fit = fits[2]
    new = prepared(fit, Call(BATCHES[3], {}))
    batch = Batch.of(fit.memory, new)
    assert len(batch.new.args[0]) == 8 and new.points == 7
    found = jax.jit(lambda fit: objective(fit, batch, jax.random.key(0), True))(bare(fit))
    noise = float(new.hyper["noise"])

    def expected(x, y):
        mean, variance = (np.asarray(v) for v in fit.marginals(x)["f"])
        return dense.normal_expectation(y, mean, variance, noise)

    reading = fit.guide.read(new.given, fit.params, new.hyper)
    process, approximation = fit.guide.latents(reading, fit.params)["f"]
    total = expected(*BATCHES[3]) + 23 / 4 * expected(*map(np.asarray, fit.memory.call.args))
    prior = float(dist.LogNormal(-1.0, 0.5).log_prob(noise))
    assert float(found) == pytest.approx(total - float(approximation.kl(process)) + prior)
    # With weights of their own the points of the memory stand for as many as these say.
    weights = np.array([11.0, 2.0, 4.0, 6.0])
    batch = dataclasses.replace(batch, weights=jax.numpy.asarray(weights))
    weighted = jax.jit(lambda fit: objective(fit, batch, jax.random.key(0), True, True))(bare(fit))
    x, y = (np.asarray(a) for a in fit.memory.call.args)
    each = [expected(x[[j]], y[[j]]) for j in range(4)]
    total = expected(*BATCHES[3]) + weights @ each
    assert float(weighted) == pytest.approx(total - float(approximation.kl(process)) + prior)


def test_weights_undo_the_choice_of_points():
    """A sum over the past is right on average, if points count for one over their probability."""
    rng = np.random.default_rng(0)
    score, values = rng.gamma(1.0, size=60), rng.standard_normal(60)
    values += 2.0 * score  # what is kept by score alone is not typical
    stands_for = np.where(np.arange(60) < 50, rng.integers(1, 4, 60), 0.0)
    sums = {"leverage": [], "importance": [], "random": []}
    for select, found in sums.items():
        for i in range(400):
            kept = kept_points(jax.random.key(i), select, score, stands_for, 20)
            assert kept.weights.sum() == pytest.approx(stands_for.sum())
            assert len(set(kept.rows)) == 20 and (kept.rows < 50).all()
            found.append(kept.weights @ values[kept.rows])
    off = {name: np.mean(found) - stands_for @ values for name, found in sums.items()}
    # A ratio of two estimates has a bias of its own, which is small beside that of no weights.
    assert off["leverage"] > 100 and abs(off["importance"]) < 0.3 * off["leverage"]
    assert abs(off["random"]) < 4 * np.std(sums["random"]) / 20
    few = kept_points(jax.random.key(0), "importance", score, stands_for * (np.arange(60) < 3), 5)
    assert few.stays.tolist() == [True] * 3 + [False] * 2 and (few.weights[3:] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("select", ["leverage", "importance", "random"])
def test_learning_and_growing(select):
    """More inducing inputs as data come from elsewhere, and hyperparameters that move."""
    stream = stream_of(optax.adam(0.05), X[:6:2], num_inducing=9, select=select)
    fits = []
    stream.run(jax.random.key(0), 30, BATCHES, each=lambda i, fit: fits.append(fit))
    places = [np.asarray(fit.params["f_auto_inducing"]) for fit in fits]
    assert [len(p) for p in places] == [3, 8, 9, 9]
    assert places[-1].max() > 1.7 and places[-1].min() < -1.5
    noises = [float(fit.hyper_at(fit.memory.call)["noise"]) for fit in fits]
    assert all(later < earlier for earlier, later in zip(noises, noises[2:], strict=False))
    mean = np.asarray(fits[-1].marginals(X)["f"].mean)
    assert np.sqrt(np.mean((mean - np.sin(3 * X)) ** 2)) < 0.35


@pytest.mark.slow
def test_without_a_memory_the_new_batch_stands_for_all():
    guide = AutoDualGaussian(model, Z, learn_inducing=False)
    stream = Stream(model, guide, optax.adam(0.05), memory=0, steps=3, site_lr=1.0)
    fit = stream.run(jax.random.key(0), 5, BATCHES)
    assert int(fit.memory.count) == 0 and int(fit.memory.past) == 30


@pytest.mark.slow
def test_updates_leave_the_old_fit_and_compile_nothing_new(streamed):
    from test_conditioning import Compilations

    stream, fits = streamed
    before = {k: np.array(v) for k, v in fits[1].params.items()}
    stream.update(jax.random.key(0), fits[1], X[:5] + 0.01, Y[:5])
    with Compilations() as compilations:
        stream.update(jax.random.key(0), fits[1], X[:6] + 0.01, Y[:6])
    assert compilations.found == []
    jax.tree.map(np.testing.assert_array_equal, fits[1].params, before)


# ---- other inducing inputs -------------------------------------------------------------------


@pytest.mark.slow
def test_a_fit_by_other_inducing_inputs(streamed):
    _, fits = streamed
    fit = dataclasses.replace(fits[-1], memory=None).with_data(X, Y)
    more = fit.with_inducing(np.concatenate([Z, [0.1, 2.7]]))
    assert_same(more, fit, 1e-7)
    assert_same(more.with_inducing({"f": Z[:, None]}), fit, 1e-6)
    far = fit.with_inducing(Z[:2]).marginals(np.array([1.5]))["f"]
    assert far.variance > 5 * fit.marginals(np.array([1.5]))["f"].variance
    for places, words in (
        (np.ones((3, 2)), "same number of columns"),
        (np.array([0.0, np.nan]), "have the value nan"),
        (np.zeros(2), "duplicate"),
        ({"g": Z}, r"inducing inputs for \['g'\], but the GP sites"),
        ({}, "no inducing inputs that could be moved"),
    ):
        with pytest.raises(ValueError, match=words):
            fit.with_inducing(places)
    again = more.condition(X[:3] + 0.01, Y[:3])  # programs follow the number of inducing inputs
    assert again.params["f_auto_inducing"].shape == (10,)


# ---- what is refused -------------------------------------------------------------------------


def test_streams_that_cannot_be(streamed):
    stream, fits = streamed
    with pytest.raises(ValueError, match="select must be one of"):
        stream_of(select="best")
    with pytest.raises(ValueError, match="memory and steps must be 0 or more"):
        Stream(model, AutoDualGaussian(model, Z), None, memory=-1)
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="The fit has no memory"):
        stream.update(key, dataclasses.replace(fits[0], memory=None), *BATCHES[1])
    with pytest.raises(ValueError, match="There are no batches"):
        stream.run(key, 1, [])
    with pytest.raises(ValueError, match="is missing"):
        stream.update(key, fits[0], X[:2], np.array([0.1, np.nan]))
    untied = AutoDualGaussian(model, Z, sites="untied")
    with pytest.raises(ValueError, match="A stream forgets its data, but the guide keeps"):
        Stream(model, untied, None, site_lr=1.0).begin(key, 1, *BATCHES[0])
