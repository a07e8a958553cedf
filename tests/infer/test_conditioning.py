"""Fits that get more data, and less: against fits to all of it at the same hyperparameters."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from numpyro_tsvgp import (
    GP,
    QSVGP,
    TSVGP,
    AutoDualGaussian,
    AutoMomentGaussian,
    Riemannian,
    collapse,
    influence,
    kernels,
    load,
    loo,
    save,
    to_arviz,
)
from numpyro_tsvgp.infer.new_data.conditioning import prepared
from numpyro_tsvgp.model.arguments import Call

RNG = np.random.default_rng(0)
N = 24
X = np.sort(RNG.uniform(-2, 2, N))
F = np.sin(3 * X)
Y = F + 0.3 * RNG.standard_normal(N)
COUNTS = RNG.poisson(np.exp(2 * F))
Z = np.linspace(-2, 2, 8)
TEST = np.linspace(-2.5, 2.5, 5)


def gp(X):
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    return numpyro.sample("f", GP(1.5 * kernels.Matern52(scale), X, mean=lambda x: 0.3 + 0.1 * x))


def normal(X, y=None):
    f = gp(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def poisson(X, y=None):
    f = gp(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(2 * f)), obs=y)


class Driven:
    """A driver that makes sites alone, at the initial hyperparameters."""

    def __init__(self, model, rate, **options):
        self.model = model
        self.guide = AutoDualGaussian(model, **options)
        self.svi = TSVGP(model, self.guide, None, site_lr=rate, e_steps=1 if rate == 1.0 else 80)

    def fit(self, *args):
        with_scale = {"scale_auto_loc": 0.4}
        return self.svi.run(
            jax.random.key(0), 1, *args, init_params=with_scale, progress_bar=False
        ).fit


@pytest.fixture(scope="module")
def gaussian():
    return Driven(normal, 1.0, inducing=Z)


@pytest.fixture(scope="module")
def counts():
    return Driven(poisson, 0.5, inducing=Z)


@pytest.fixture(scope="module")
def fit(gaussian):
    """A fit to all of the data."""
    return gaussian.fit(X, Y)


@pytest.fixture(scope="module")
def half(gaussian):
    """A fit to some of the data."""
    return gaussian.fit(X[:9], Y[:9])


def assert_same(one, other, atol, at=TEST):
    at = at if isinstance(at, tuple) else (at,)
    for a, b in zip(one.marginals(*at)["f"], other.marginals(*at)["f"], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def check_exact(driven, whole, start):
    for split in ([9, 24], [9, 10, 17, 24], [9, 21, 24]):
        now = start
        for a, b in zip(split[:-1], split[1:], strict=True):
            now = now.condition(X[a:b], Y[a:b])
        assert_same(now, whole, 1e-10)
        np.testing.assert_array_equal(now.data.args[0], X)
        assert_same(now.without(X[9:], Y[9:]), start, 1e-10)
        back = now.without(X[[3, 20]], y=Y[[3, 20]]).condition(X[[20, 3]], Y[[20, 3]])
        assert_same(back, whole, 1e-10)


def test_gaussian_data_may_come_in_any_split(gaussian, fit, half):
    check_exact(gaussian, fit, half)


@pytest.mark.slow
def test_gaussian_data_may_come_in_any_order(gaussian, fit):
    shuffled = np.random.default_rng(1).permutation(N)
    first = gaussian.fit(X[shuffled[:9]], Y[shuffled[:9]])
    assert_same(first.condition(X[shuffled[9:]], Y[shuffled[9:]]), fit, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"inducing": Z, "sites": "untied"}, {}], ids=["points", "full"]
)
def test_point_sites_may_come_in_any_split(options):
    driven = Driven(normal, 1.0, **options)
    check_exact(driven, driven.fit(X, Y), driven.fit(X[:9], Y[:9]))


@pytest.mark.slow
def test_moments_take_new_data_too(half):
    """Of the same posterior: one natural-gradient step of length one."""
    guide = AutoMomentGaussian(normal, inducing=Z)
    svi = QSVGP(normal, guide, None, site_lr=1.0, e_steps=1)
    start = {"scale_auto_loc": 0.4}
    first = svi.run(jax.random.key(0), 1, X[:9], Y[:9], init_params=start, progress_bar=False).fit
    assert_same(first.condition(X[9:], Y[9:]), half.condition(X[9:], Y[9:]), 1e-8)


def test_the_old_fit_stays_as_it_was(half):
    before = {name: np.array(value) for name, value in half.params.items()}
    half.condition(X[9:], Y[9:])
    jax.tree.map(np.testing.assert_array_equal, half.params, before)
    assert half.data.args[0].shape == (9,)


@pytest.mark.slow
def test_counts_settle_at_their_fixed_point(counts):
    """New sites are what the posterior with them asks for, and can be taken out again."""
    first = counts.fit(X[:17], COUNTS[:17])
    now = first.condition(X[17:], COUNTS[17:])
    assert_same(now.without(X[17:], COUNTS[17:]), first, 1e-6)
    whole = counts.fit(X, COUNTS)
    for a, b in zip(now.marginals(TEST)["f"], whole.marginals(TEST)["f"], strict=True):
        np.testing.assert_allclose(a, b, atol=0.1)
    again = whole.condition(X[:1], COUNTS[:1]).without(X[:1], COUNTS[:1])
    assert_same(again, whole, 1e-6)


@pytest.mark.slow
def test_points_taken_out_leave_the_fit_to_the_others(counts):
    """Of tied sums, whatever came after the points, if the fit has its data."""
    x, y = X[np.argsort(np.arange(N) % 3)], COUNTS[np.argsort(np.arange(N) % 3)]
    now = counts.fit(x[:8], y[:8])
    for rows in (slice(8, 16), slice(16, N)):
        now = now.condition(x[rows], y[rows])
    expected = counts.fit(x[8:], y[8:])
    less = now.without(x[:8], y[:8])
    assert_same(less, expected, 1e-6)
    np.testing.assert_array_equal(less.data.args[0], x[8:])
    bare = dataclasses.replace(now, call=None)
    with pytest.warns(UserWarning, match="contributed is not known for sure"):
        off = bare.without(x[:8], y[:8])
    # What the warning is of: it is nearer than nothing, and not near.
    apart = [
        float(jnp.abs(f.marginals(X)["f"].mean - expected.marginals(X)["f"].mean).max())
        for f in (off, now)
    ]
    assert 1e-3 < apart[0] < apart[1]


@pytest.mark.slow
def test_what_a_gaussian_point_contributed_is_sure(fit, recwarn):
    bare = dataclasses.replace(fit, call=None)
    assert_same(bare.without(X[:5], Y[:5]), fit.without(X[:5], Y[:5]), 1e-10)
    assert not [w for w in recwarn if "not known for sure" in str(w.message)]


@pytest.mark.slow
def test_data_far_from_what_was_expected_do_not_diverge(counts):
    """At rate one the step would overshoot to rates of exp(1000)."""
    first = counts.fit(X[:17], COUNTS[:17])
    now = first.condition(np.array([1.9, 1.95]), np.array([20_000, 18_000]))
    rate = np.exp(2 * np.asarray(now.marginals(np.array([1.92]))["f"].mean))
    assert 15_000 < rate[0] < 22_000
    assert np.isfinite(now.marginals(TEST)["f"].variance).all()


# ---- the scale of the likelihood -------------------------------------------------------------


def batches_of(X, y=None, size=N):
    """Minibatches as arguments: a batch stands for all data."""
    f = gp(X)
    with numpyro.plate("data", size, subsample_size=X.shape[0]), handlers.scale(scale=1.0):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def drawn(X, y=None, batch=6):
    data = numpyro.plate("data", X.shape[0], subsample_size=min(batch, X.shape[0]))
    with data as rows:
        x, y = jnp.asarray(X)[rows], None if y is None else jnp.asarray(y)[rows]
    f = gp(x)
    with data:
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def drawn_of(X, y=None, size=N):
    """Indexes what it is given with rows out of more than there are."""
    f = gp(X)
    with numpyro.plate("data", size, subsample_size=3) as rows:
        numpyro.sample("y", dist.Normal(f[:3], 0.3), obs=None if y is None else y[rows])


@pytest.mark.slow
def test_a_new_point_counts_once_whatever_plates_say(half):
    expected = half.condition(X[9:], Y[9:])
    first = dataclasses.replace(half, model=batches_of, guide=AutoDualGaussian(batches_of, Z))
    with pytest.warns(UserWarning, match="does not have its training data"):
        now = first.condition(X[9:], Y[9:])
    assert now.call is None
    assert_same(now, expected, 1e-10)

    first = dataclasses.replace(half, model=drawn, guide=AutoDualGaussian(drawn, Z))
    now = first.condition(X[9:], Y[9:])
    assert_same(now, expected, 1e-10)
    assert now.data.args[0].shape == (N,)

    first = dataclasses.replace(half, model=drawn_of, guide=AutoDualGaussian(drawn_of, Z))
    with pytest.raises(ValueError, match="draws 3 of 24 rows, and the model indexes"):
        first.condition(X[9:14], Y[9:14])


# ---- several GPs -----------------------------------------------------------------------------


def two(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.5), X))
    g = numpyro.sample("g", GP(0.5 * kernels.RBF(1.0), X, mean=-1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


def outputs(X, y=None):
    with numpyro.plate("outputs", 2):
        f = numpyro.sample("f", GP(kernels.RBF(jnp.array([[0.4], [0.9]])), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f.T, 0.3).to_event(1), obs=y)


@pytest.mark.slow
def test_a_batch_of_functions_with_kernels_of_their_own():
    y = np.stack([Y, -2 * Y], -1)
    svi = TSVGP(outputs, AutoDualGaussian(outputs, Z), None, site_lr=1.0)
    fits = [svi.run(jax.random.key(0), 1, X[:n], y[:n], progress_bar=False).fit for n in (10, N)]
    assert_same(fits[0].condition(X[10:], y[10:]), fits[1], 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, Riemannian()], ids=["clipped", "riemannian"])
def test_two_gps_that_meet_in_a_term(rule):
    guide = AutoDualGaussian(two, {"f": Z, "g": Z[::2]})
    svi = TSVGP(two, guide, None, e_steps=100, site_lr=0.3, rule=rule)
    first, whole = (
        svi.run(jax.random.key(0), 1, X[:n], Y[:n], progress_bar=False).fit for n in (18, N)
    )
    now = first.condition(X[18:], Y[18:])
    for name in ("f", "g"):
        a, b = (fit.marginals(TEST)[name] for fit in (now, whole))
        np.testing.assert_allclose(a.mean, b.mean, atol=0.25)
    # The others' sites are made anew, by steps that end near their fixed point.
    assert_same(now.without(X[18:], Y[18:]), first, 5e-5)


# ---- compilation -----------------------------------------------------------------------------


class Compilations(logging.Handler):
    """How many programs were compiled while it was there."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        if record.getMessage().startswith("Compiling"):
            self.found.append(record.getMessage()[:80])

    def __enter__(self):
        self.logging = jax.log_compiles()
        self.logging.__enter__()
        logging.getLogger("jax").addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("jax").removeHandler(self)
        self.logging.__exit__(*error)


def test_batches_of_varying_size_share_programs(half):
    """Five to eight rows are one program, and nothing at all is compiled for the others."""
    now = half.condition(X[9:17], Y[9:17])  # eight
    with Compilations() as compilations:
        for size in (5, 6, 7, 8):
            later = now.condition(X[:size] + 0.01, Y[:size])
            assert later.data.args[0].shape == (17 + size,)
    assert compilations.found == []
    with Compilations() as compilations:
        jax.jit(lambda x: x * 1.2345)(jnp.ones(3))
    assert compilations.found  # or the test could not fail


def centred(X, y=None):
    f = gp(X - X.mean())
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.slow
def test_a_model_that_looks_at_all_rows_gets_no_others(half):
    """Rows that are repeated would move the mean of the inputs."""
    first = dataclasses.replace(half, model=centred, guide=AutoDualGaussian(centred, Z))
    now = first.condition(X[9:12], Y[9:12])
    assert_same(
        dataclasses.replace(now, model=normal, guide=half.guide),
        half.condition(X[9:12] - X[9:12].mean(), Y[9:12]),
        1e-10,
    )


def by_group(X, group, y=None):
    """Several observations of one value of a GP: arrays are as long by chance alone."""
    f = numpyro.sample("f", GP(kernels.RBF(0.5), X))
    with numpyro.plate("data", group.shape[0]):
        numpyro.sample("y", dist.Normal(f[group], 0.3), obs=y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The fit with the new data in it")
def test_rows_that_are_repeated_never_count():
    """Where terms read other rows than their own, rows are not repeated."""
    svi = TSVGP(by_group, AutoDualGaussian(by_group, Z), None, site_lr=1.0)
    group = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8])
    first = svi.run(jax.random.key(0), 1, X[:9], group, Y[:9], progress_bar=False).fit
    now = first.condition(X[9:12], np.array([0, 0, 2]), Y[9:12])
    assert not prepared(first, Call((X[9:12], np.array([0, 0, 2]), Y[9:12]), {})).is_padded
    expected = first.condition(X[[9]], np.array([0, 0]), Y[9:11]).condition(
        X[[11]], np.array([0]), Y[[11]]
    )
    assert_same(now, expected, 1e-10, at=(TEST, np.arange(5)))


# ---- with everything else --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*carry more than")
def test_diagnostics_saving_and_collapsing(fit, half, tmp_path):
    now = half.condition(X[9:], Y[9:])
    for diagnose in (
        lambda fit: loo(fit)["leverage"],
        lambda fit: influence(fit).influence,
        lambda fit: to_arviz(jax.random.key(0), fit, num_samples=5)["posterior"]["f"],
    ):
        np.testing.assert_allclose(diagnose(now), diagnose(fit), atol=1e-6)
    save(tmp_path / "fit.npz", now)
    loaded = load(tmp_path / "fit.npz", model=normal)
    assert_same(loaded, fit, 1e-10)
    more = loaded.condition(X[:2] + 0.1, Y[:2])  # without data, there are none to join
    assert more.call is None
    assert_same(more, now.condition(X[:2] + 0.1, Y[:2]), 1e-10)
    assert_same(more.without(X[:2] + 0.1, Y[:2]), fit, 1e-10)


@pytest.mark.slow
def test_a_posterior_of_hyperparameters_of_a_conditioned_fit(fit, half):
    values = {"scale": jnp.array(0.5)}
    densities = [
        numpyro.infer.util.log_density(collapse(now), (), {}, values)[0]
        for now in (fit, half.condition(X[9:], Y[9:]))
    ]
    assert float(densities[0]) == pytest.approx(float(densities[1]), abs=1e-8)


@pytest.mark.slow
def test_point_sites_are_saved_with_their_inputs(tmp_path):
    driven = Driven(normal, 1.0, inducing=Z, sites="untied")
    now = driven.fit(X[:9], Y[:9]).condition(X[9:], Y[9:])
    save(tmp_path / "fit.npz", now)
    loaded = load(tmp_path / "fit.npz", model=normal)
    assert_same(loaded, driven.fit(X, Y), 1e-10)
    assert loaded.with_data(X, Y).refreshed(now.hyper, 1).params["f_auto_linear"].shape == (1, N)


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.slow
def test_bad_data_are_refused_before_anything_is_computed(half, counts, monkeypatch):
    of_counts = counts.fit(X[:17], COUNTS[:17])

    def never(*args, **kwargs):
        raise AssertionError("computed with bad data")

    monkeypatch.setattr("numpyro_tsvgp.infer.new_data.conditioning._conditioned", never)
    monkeypatch.setattr("numpyro_tsvgp.infer.new_data.removing._sites_at", never)
    nan = np.array([0.1, np.nan, 0.2])
    for fit, args, words in [
        (
            half,
            (np.ones((3, 2)), Y[:3]),
            "fitted to inputs with 1 columns|mean of the GP has shape",
        ),
        (half, (nan, Y[:3]), "inputs X of GP site 'f' have the value nan at index 1"),
        (half, (X[:3], nan), "site 'y' at index 1: the value nan is missing"),
        (of_counts, (X[:3], np.array([1, 2, -1])), "index 2: the value -1 lies outside"),
        (half, (X[:3],), "no observed site"),
        (half, (X[:0], Y[:0]), "inputs X of a GP are empty"),
    ]:
        for act in (fit.condition, fit.without):
            with pytest.raises(ValueError, match=words):
                act(*args)
    with pytest.raises(ValueError):
        half.condition(X[:3], Y[:4])
    with pytest.raises(ValueError, match=r"inside jax.jit"):
        jax.jit(lambda x: half.condition(x, Y[:3]).params)(X[:3])
    for rows, y in ((X[12:14], Y[12:14]), (X[:2], Y[:2] + 1.0), (X[[1, 1]], Y[[1, 1]])):
        with pytest.raises(
            ValueError, match=r"Row \d is not among the training data.*not in the fit"
        ):
            half.without(rows, y)
    with pytest.raises(ValueError, match="all of the data"):
        half.without(X[:9], Y[:9])


def test_what_a_fit_without_data_shows_of_points_that_it_has_not(half):
    bare = dataclasses.replace(half, call=None)
    with pytest.raises(ValueError, match="not in the fit"):
        bare.without(np.array([1.9]), np.array([0.3]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Site 'z' is a")
def test_latents_of_the_training_data_are_refused():
    def below(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.5), X))
        with numpyro.plate("data", X.shape[0]):
            z = numpyro.sample("z", dist.Normal(f, 0.3))
            numpyro.sample("y", dist.Normal(z, 0.3), obs=y)

    def beside(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.5), X))
        with numpyro.plate("data", X.shape[0]):
            z = numpyro.sample("z", dist.Normal(0.0, 0.3))
            numpyro.sample("y", dist.Normal(f + z, 0.3), obs=y)

    for model, words in ((below, "depends on a GP"), (beside, "in another shape")):
        svi = TSVGP(model, AutoDualGaussian(model, Z), None)
        fit = svi.run(jax.random.key(0), 1, X[:9], Y[:9], progress_bar=False).fit
        with pytest.raises(
            ValueError, match=f"Site 'z' is a latent variable that .*{words}|{words}"
        ):
            fit.condition(X[9:12], Y[9:12])


# ---- how near a fit to all data --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson"])
def test_a_drifting_stream_stays_near_the_fit_to_all_data(banana, likelihood):
    """Sorted by the first input, in 4 and in 40 batches: distances measured, in posterior sd."""
    order = np.argsort(banana.X[:, 0])
    X, y = banana.X[order], banana.y[order]
    links = {
        "bernoulli": lambda f: dist.Bernoulli(logits=f),
        "poisson": lambda f: dist.Poisson(jnp.exp(f)),
    }

    def model(X, y=None):
        f = numpyro.sample("f", GP(4.0 * kernels.Matern52(jnp.array([0.7, 0.7])), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", links[likelihood](f), obs=y)

    if likelihood == "poisson":
        y = np.random.default_rng(0).poisson(np.exp(2.0 * y - 0.5))
    Z = banana.X[::8]
    guide = AutoDualGaussian(model, Z, learn_inducing=False)
    svi = TSVGP(model, guide, None, site_lr=0.5, e_steps=60)
    whole = svi.run(jax.random.key(0), 1, X, y, progress_bar=False).fit
    batch = whole.marginals(X)["f"]
    prior = dataclasses.replace(
        whole,
        params=whole.params | guide.pack({"f": guide.unpack("f", whole.params).without_data()}),
    )
    worst = {}
    for count in (4, 40):
        now = dataclasses.replace(prior)
        for rows in np.array_split(np.arange(len(X)), count):
            now = dataclasses.replace(now.condition(X[rows], y[rows]), call=whole.call)
        q = now.marginals(X)["f"]
        sd = jnp.sqrt(batch.variance)
        worst[count] = [
            float(jnp.abs((q.mean - batch.mean) / sd).max()),
            float(jnp.abs(jnp.sqrt(q.variance) / sd - 1).max()),
            float(jnp.sqrt(jnp.mean(((q.mean - batch.mean) / sd) ** 2))),
        ]
    print(likelihood, worst)
    assert max(worst[4][2], worst[40][2]) < 0.2
