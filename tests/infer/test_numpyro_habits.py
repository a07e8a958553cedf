"""What users of NumPyro do without thinking works, or says what to do instead."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import Predictive, RenyiELBO, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoNormal
from numpyro.primitives import mutable

from numpyro_tsvgp import (
    GP,
    QSVGP,
    TSVGP,
    AutoDualGaussian,
    AutoMomentGaussian,
    AutoUnconstrainedDelta,
    kernels,
    load,
    save,
    to_arviz,
)

N = 24
X = np.linspace(0.0, 3.0, N)
Y = np.sin(2.0 * X) + 0.1 * np.random.RandomState(0).randn(N)
Z = X[::4]
KEY = jax.random.key(0)


def model(X, y=None, flag=False):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale), X))
    numpyro.deterministic("doubled", 2.0 * f * lengthscale)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(-f if flag else f, 0.1), obs=y)


def make(model=model, *args, hyper_guide=None, **options):
    guide = AutoDualGaussian(model, inducing=Z, hyper_guide=hyper_guide, **options)
    return TSVGP(model, guide, optax.adam(0.05), *args)


def run(svi, *args, steps=3, **kwargs):
    return svi.run(KEY, steps, *args, progress_bar=False, **kwargs)


@pytest.fixture(scope="module")
def svi():
    return make()


@pytest.fixture(scope="module")
def result(svi):
    return run(svi, X, Y)


# ---- the driver ------------------------------------------------------------------------------


def test_the_loss_of_svi_is_taken(result):
    np.testing.assert_array_equal(run(make(model, Trace_ELBO()), X, Y).losses, result.losses)
    QSVGP(model, AutoMomentGaussian(model, inducing=Z), optax.adam(0.1), Trace_ELBO())
    for loss, name in ((RenyiELBO(), "RenyiELBO"), (Trace_ELBO, "Trace_ELBO"), (0.5, "float")):
        with pytest.raises(TypeError, match=rf"loss is built in.*but not {name}\. Leave it out"):
            make(model, loss)


def test_forward_mode_is_refused(svi, result):
    with pytest.raises(ValueError, match="forward_mode_differentiation=True cannot be had.*scan"):
        svi.update(result.state, X, Y, forward_mode_differentiation=True)
    with pytest.raises(ValueError, match="forward_mode_differentiation"):
        svi.run(KEY, 1, X, Y, forward_mode_differentiation=True)


@pytest.mark.slow
def test_static_keyword_arguments_reach_the_model():
    guide = AutoDualGaussian(model, inducing=Z)
    svi = TSVGP(model, guide, optax.adam(0.05), flag=True)
    found, turned = run(svi, X, Y), run(make(), X, -Y)
    np.testing.assert_allclose(found.losses, turned.losses)
    assert found.fit.data.kwargs == {"flag": True}
    with pytest.raises(TypeError, match=r"\['site_rate'\] are neither settings.*'y', 'flag'"):
        TSVGP(model, guide, None, site_rate=0.5)


def test_start_of_hyperparameters():
    start = make(init_loc_fn=init_to_value(values={"lengthscale": 0.7})).init(KEY, X, Y)
    svi = make(hyper_guide=AutoNormal)
    found = svi.get_params(svi.init(KEY, X, Y))
    assert float(make().get_params(start)["lengthscale_auto_loc"]) == pytest.approx(0.7)
    # The median of fifteen draws of a standard normal, and not one uniform in (-2, 2).
    assert all(
        abs(float(svi.get_params(svi.init(key, X, Y))["lengthscale_auto_loc"])) < 1.0
        for key in jax.random.split(KEY, 5)
    )
    assert found["lengthscale_auto_scale"] == pytest.approx(0.1)


def test_a_strategy_of_the_hyper_guide_itself_is_kept():
    from functools import partial

    at = partial(AutoNormal, init_loc_fn=init_to_value(values={"lengthscale": 2.0}))
    svi = make(hyper_guide=at)
    found = svi.get_params(svi.init(KEY, X, Y))["lengthscale_auto_loc"]
    assert float(found) == pytest.approx(np.log(2.0))


@pytest.mark.slow
def test_keys_may_be_traced(svi):
    keys = jax.random.split(jax.random.key(3), 2)
    many = jax.vmap(lambda key: svi.init(key, X, Y))(keys)
    each = [svi.init(key, X, Y) for key in keys]
    found = svi.get_params(many)["lengthscale_auto_loc"]
    expected = [svi.get_params(state)["lengthscale_auto_loc"] for state in each]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    # Nothing of the trace has stayed behind.
    assert np.isfinite(run(svi, X, Y).losses).all()


def test_data_that_are_traced_are_told_what_to_do(svi):
    with pytest.raises(ValueError, match=r"inside jax\.jit or jax\.vmap where the data.*svi\.upd"):
        jax.jit(svi.init)(KEY, X, Y)


@pytest.mark.slow
def test_many_data_sets_at_once(svi):
    many = np.stack([Y, 2.0 * Y])
    state = svi.init(KEY, X, Y)  # as the message says
    _, found = jax.jit(jax.vmap(lambda y: svi.update(state, X, y)))(many)
    update = jax.jit(svi.update)
    expected = [update(svi.init(KEY, X, y), X, y)[1] for y in many]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


# ---- the guide -------------------------------------------------------------------------------


@pytest.mark.slow
def test_deterministic_sites_are_drawn(svi, result):
    for draws in (
        result.fit.sample(KEY, X[:5], sample_shape=(2, 3)),
        svi.guide.sample_posterior(KEY, result.params, X[:5], sample_shape=(2, 3)),
    ):
        assert draws["doubled"].shape == (2, 3, 5)
        expected = 2.0 * draws["f"] * draws["lengthscale"][..., None]
        np.testing.assert_allclose(draws["doubled"], expected)
    assert result.fit.sample(KEY, X[:5])["doubled"].shape == (5,)
    median = svi.guide.median(result.params, X[:5])
    np.testing.assert_allclose(median["doubled"], 2.0 * median["f"] * median["lengthscale"])
    new = Predictive(model, draws, params=result.params, batch_ndims=2)(KEY, X[:5])
    assert new["y"].shape == (2, 3, 5)


def test_density_on_another_scale():
    """Of a scale factor in (0, inf), the density of its logarithm has the factor as Jacobian."""

    def prior():
        numpyro.sample("a", dist.LogNormal(2.0, 1.0))
        numpyro.sample("b", dist.Normal())

    guide = AutoUnconstrainedDelta(prior)
    with handlers.seed(rng_seed=0):
        guide()
    values = {"a": jnp.array(3.0), "b": jnp.array(-2.0)}
    assert float(guide.log_jacobian(values)) == pytest.approx(np.log(3.0))


@pytest.mark.slow
def test_scale_of_the_mode(tmp_path):
    """Data that say nothing leave a LogNormal(2, 1) at its mode, or at its median."""

    def flat(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(2.0, 1.0))
        f = numpyro.sample("f", GP(kernels.RBF(lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1e6), obs=y)

    found = {}
    for kind in (None, AutoUnconstrainedDelta):
        guide = AutoDualGaussian(flat, inducing=Z, hyper_guide=kind, learn_inducing=False)
        svi = TSVGP(flat, guide, optax.adam(0.1), site_lr=1.0)
        found[kind] = run(svi, X, Y, steps=150).fit
    assert float(found[None].hyper["lengthscale"]) == pytest.approx(np.exp(1.0), rel=1e-3)
    fit = found[AutoUnconstrainedDelta]
    assert float(fit.hyper["lengthscale"]) == pytest.approx(np.exp(2.0), rel=1e-3)
    save(tmp_path / "fit.npz", fit)
    again = load(tmp_path / "fit.npz", model=flat)
    assert again.guide.make_hyper_guide is AutoUnconstrainedDelta


# ---- models ----------------------------------------------------------------------------------


def improper(X, y=None):
    level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ()))
    noise = numpyro.sample("noise", dist.ImproperUniform(dist.constraints.positive, (), ()))
    f = numpyro.sample("f", GP(kernels.RBF(0.5), X, mean=lambda x: level))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.slow
def test_improper_priors():
    found = run(make(improper), X, Y)
    assert np.isfinite(found.losses).all()
    assert found.fit.marginals(X[:3])["f"].mean.shape == (3,)


@pytest.mark.slow
def test_improper_priors_are_parameters():
    def proper(X, y=None):
        """The same density: constants are parameters."""
        level = numpyro.param("level", 0.2)
        noise = numpyro.param("noise", 0.7, constraint=dist.constraints.positive)
        f = numpyro.sample("f", GP(kernels.RBF(0.5), X, mean=lambda x: level))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    at = {"level_auto_loc": 0.2, "noise_auto_loc": 0.7}
    found = run(make(improper), X, Y, init_params=at)
    np.testing.assert_allclose(found.losses, run(make(proper), X, Y).losses)
    with pytest.warns(UserWarning, match="A prior of the model cannot be sampled"):
        data = to_arviz(KEY, found.fit, num_samples=3)
    assert data.posterior_predictive["y"].shape == (1, 3, N)
    assert not hasattr(data, "prior")


class Bare(dist.Distribution):
    """A density and nothing else."""

    support = dist.constraints.real

    def __init__(self, loc):
        self.loc = loc
        super().__init__(jnp.shape(loc), ())

    def log_prob(self, value):
        return dist.Normal(self.loc, 0.1).log_prob(value)


def bare(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", Bare(f), obs=y)


def normal(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


@pytest.fixture(scope="module")
def bare_fit():
    return run(make(bare), X, Y).fit


@pytest.mark.slow
def test_likelihood_without_draws(bare_fit):
    assert np.isfinite(bare_fit.marginals(X[:3])["f"].mean).all()
    assert bare_fit.sample(KEY, X[:3])["f"].shape == (3,)


@pytest.mark.slow
def test_nothing_is_made_up_of_a_likelihood_without_draws(bare_fit):
    expected = run(make(normal), X, Y).fit.marginals(X[:3])["f"].mean
    np.testing.assert_allclose(bare_fit.marginals(X[:3])["f"].mean, expected)
    data = to_arviz(KEY, bare_fit, num_samples=3, predictions=X[:3], prior=False)
    assert "y" not in data.predictions and "f" in data.predictions


def test_mutable_state_is_refused():
    def counting(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.5), X))
        mutable("calls", {"n": jnp.zeros(())})
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"mutable state, 'calls'.*numpyro\.param"):
        make(counting).init(KEY, X, Y)


MANY = np.stack([Y, -Y])


def test_a_gp_inside_of_scan_is_refused():
    def inside(X, y=None):
        def body(carry, y):
            f = numpyro.sample("f", GP(kernels.RBF(0.5), X))
            return carry, numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

        scan(body, 0.0, y, length=2)

    with pytest.raises(ValueError, match="GP site 'f' stands inside of a scan.*before the loop"):
        make(inside).init(KEY, X, MANY)


@pytest.mark.slow
def test_gps_before_a_scan_are_taken():
    def before(X, y=None):
        with numpyro.plate("steps", 2):
            f = numpyro.sample("f", GP(kernels.RBF(0.5), X))

        def body(carry, at):
            f, y = at
            return carry, numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

        scan(body, 0.0, (f, y), length=2)

    def plates(X, y=None):
        with numpyro.plate("steps", 2, dim=-1):
            f = numpyro.sample("f", GP(kernels.RBF(0.5), X))
        with numpyro.plate("steps", 2, dim=-2), numpyro.plate("data", N, dim=-1):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    found, expected = run(make(before), X, MANY), run(make(plates), X, MANY)
    np.testing.assert_allclose(found.losses, expected.losses)


# ---- several threads, and precisions ---------------------------------------------------------


def test_fits_and_predictions_in_several_threads(result):
    """NumPyro's handlers are those of all threads: each fit must see its own alone."""
    expected = result.fit.marginals(X[:3])["f"].mean
    found, barrier = {}, threading.Barrier(4)

    def work(i):
        barrier.wait()
        if i < 2:
            found[i] = run(make(), X, Y).losses
        else:
            found[i] = [result.fit.marginals(X[:3])["f"].mean for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(found) == [0, 1, 2, 3]  # none has raised
    for i in (0, 1):
        np.testing.assert_allclose(found[i], result.losses)
    for mean in (*found[2], *found[3]):
        np.testing.assert_allclose(mean, expected)
    with handlers.trace() as trace:
        numpyro.sample("x", dist.Normal(), rng_key=KEY)
    assert list(trace) == ["x"]  # nothing was left on the stack


@pytest.mark.slow
def test_data_in_single_precision_without_a_hyperparameter():
    single = [x.astype(np.float32) for x in (X, Y)]
    found = run(make(normal), *single)
    assert np.isfinite(found.losses).all() and found.losses[-1] < found.losses[0]
    assert np.asarray(found.fit.marginals(single[0])["f"].mean).dtype == np.float32


@pytest.mark.slow
def test_losses_in_single_precision():
    single = [x.astype(np.float32) for x in (X, Y)]
    found, expected = run(make(normal), *single), run(make(normal), X, Y)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-2)


# ---- messages --------------------------------------------------------------------------------


def mistaken(likelihood, kernel=None):
    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3) if kernel is None else kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(f), obs=y)

    return model


def noted(error):
    return " ".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize(
    ("model", "change", "kind", "pattern"),
    [
        (mistaken(lambda f: dist.Normal(0.0, f)), {}, ValueError, "invalid scale.*link function"),
        (mistaken(lambda f: dist.Categorical(logits=f)), {"y": 0}, ValueError, "each class has a"),
        (mistaken(lambda f: dist.Normal(f, 0.1)), {"y": np.inf}, ValueError, "inf is infinite"),
        (
            mistaken(lambda f: dist.Uniform(0.0, jnp.exp(f))),
            {"y": 3.0},
            ValueError,
            "support of Uniform, which depends on its parameters, here at the prior mean",
        ),
        (
            mistaken(lambda f: dist.Normal(f, 0.1)),
            {"X": "a"},
            ValueError,
            "Inputs of a GP are numb",
        ),
    ],
    ids=["scale", "classes", "infinite", "uniform", "strings"],
)
def test_mistakes_are_told_in_words(model, change, kind, pattern):
    inputs = np.array(["a"] * 9) if "X" in change else np.linspace(0.0, 1.0, 9)
    y = np.full(9, 0.5)
    if "y" in change:
        y[7:] = change["y"]
    y = np.zeros(9, int) if change.get("y") == 0 else y
    svi = TSVGP(model, AutoDualGaussian(model, inducing=np.array([0.1, 0.9])), None)
    with pytest.raises(kind) as caught:
        svi.init(KEY, inputs, y)
    assert re.search(pattern, noted(caught.value))
    assert "swapped" not in noted(caught.value)


def test_arguments_in_another_order_are_told_in_words():
    model = mistaken(lambda f: dist.Normal(f, 0.1))
    svi = TSVGP(model, AutoDualGaussian(model), None)
    with pytest.raises(TypeError, match=r"rng_key must be a random key.*got 0"):
        svi.run(0, 3, np.zeros(3), np.zeros(3))
    with pytest.raises(TypeError, match=r"an array of shape \(3,\): the kernel comes first"):
        GP(jnp.zeros(3), kernels.RBF(0.3))
    with pytest.raises(TypeError, match=r"The path comes first, save\(path, fit\); got dict"):
        save({}, "fit.npz")
