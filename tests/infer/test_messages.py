"""Mistakes in the use of guides, drivers and fits end in a sentence that says what to do.

What is wrong with a model or its data is in ``tests/model/test_checks.py``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoLaplaceApproximation, AutoNormal

from numpyro_tsvgp import (
    GP,
    QSVGP,
    TSVGP,
    AutoDualGaussian,
    AutoMomentGaussian,
    FitError,
    Riemannian,
    TSVGPRunResult,
    kernels,
)
from numpyro_tsvgp.infer.guides import memory

N = 30
RNG = np.random.RandomState(0)
X = np.sort(RNG.rand(N))
Y = np.sin(6.0 * X) + 0.1 * RNG.randn(N)
Z = np.linspace(0.0, 1.0, 6)
KEY = jax.random.key(0)

positive = dist.constraints.positive


def normal(X, y=None):
    lengthscale = numpyro.param("lengthscale", 0.3, constraint=positive)
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def other(X, y=None):
    """Another model, whose GP has the same name."""
    scale = numpyro.param("scale", 0.3, constraint=positive)
    f = numpyro.sample("f", GP(kernels.Matern52(scale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def two(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
    g = numpyro.sample("g", GP(kernels.RBF(0.3), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + g, 0.1), obs=y)


def make(model=normal, inducing=Z, optim=None, **options):
    return TSVGP(model, AutoDualGaussian(model, inducing=inducing), optim, **options)


@pytest.fixture(scope="module")
def fitted():
    """A guide and the parameters of its start."""
    svi = make()
    return svi, svi.init(KEY, X, Y)


@pytest.fixture(scope="module")
def params(fitted):
    svi, state = fitted
    return svi.get_params(state)


@pytest.fixture(scope="module")
def stranger():
    """A state of another model."""
    return make(other).init(KEY, X, Y)


# ---- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optim", "pattern"),
    [
        (optax.adam, r"optax\.adam\(0\.1\).*got adam itself, not a call of it"),
        (numpyro.optim.Adam, r"numpyro\.optim\.Adam\(0\.1\).*got Adam itself, not a call of it"),
        (0.1, r"optim must be .* or None, got <class 'float'>"),
        ("adam", r"optim must be .* or None, got <class 'str'>"),
    ],
)
def test_wrong_optimizer(optim, pattern):
    with pytest.raises(TypeError, match=pattern):
        make(optim=optim)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, np.nan, np.float32(2.0), jnp.array(2.0)])
def test_rate_outside_of_its_interval(rate):
    with pytest.raises(ValueError, match=rf"site_lr must lie in \(0, 1\], got {rate}"):
        make(site_lr=rate)


@pytest.mark.parametrize("rate", [optax.adam(0.1), numpyro.optim.Adam(0.1)])
def test_optimizer_as_rate(rate):
    pattern = r"site_lr is the rate of E-steps, a number in \(0, 1\].*third argument, optim"
    with pytest.raises(TypeError, match=pattern):
        make(site_lr=rate)


@pytest.mark.parametrize("rate", ["fast", np.ones(3)])
def test_rate_of_another_kind(rate):
    with pytest.raises(TypeError, match=rf"site_lr is the rate.*got {type(rate).__name__}\."):
        make(site_lr=rate)


@pytest.mark.parametrize(
    "rate", [0.5, np.float32(0.5), jnp.array(0.5), 1, optax.constant_schedule(1)]
)
def test_rates_that_are_taken(rate):
    make(site_lr=rate)


def test_schedule_outside_of_its_interval_at_the_start():
    with pytest.raises(ValueError, match=r"site_lr .* \(0, 1\].* gives 1\.5 at step 0"):
        make(site_lr=lambda step: 1.5).init(KEY, X, Y)


def test_schedule_that_leaves_its_interval_on_the_way(fitted):
    svi = make(site_lr=lambda step: 0.25 * (1 + step))
    with pytest.raises(ValueError, match=r"gives 1\.25 at step 4\. Bound it"):
        svi.run(KEY, 5, X, Y, progress_bar=False)


@pytest.mark.parametrize("option", ["e_steps", "m_steps"])
def test_no_steps(option):
    with pytest.raises(ValueError, match=r"e_steps and m_steps must be at least 1.* 0.*optim=None"):
        make(**{option: 0})


def test_guide_of_another_kind_or_model():
    with pytest.raises(TypeError, match=r"needs an AutoDualGaussian.*got AutoNormal"):
        TSVGP(normal, AutoNormal(normal), None)
    with pytest.raises(TypeError, match=r"got AutoMomentGaussian, which keeps moments.*QSVGP"):
        TSVGP(normal, AutoMomentGaussian(normal, Z), None)
    with pytest.raises(TypeError, match=r"needs an AutoMomentGaussian.*got AutoDualGaussian"):
        QSVGP(normal, AutoDualGaussian(normal, Z), None)
    with pytest.raises(ValueError, match="made for another model"):
        TSVGP(normal, AutoDualGaussian(other, Z), None)


def test_unknown_choices():
    with pytest.raises(TypeError, match=r"rule must be a site rule .*Riemannian\(\), got 'a'"):
        make(rule="a")
    with pytest.raises(ValueError, match=r"sites must be \"tied\" or \"untied\", got 'a'"):
        AutoDualGaussian(normal, Z, sites="a")


@pytest.mark.parametrize("number", [10, 2.5])
def test_number_of_inducing_inputs(number):
    pattern = rf"inducing={number} is a number.*shape \(m, d\).*kmeans\(key, X, {number}\)"
    with pytest.raises(TypeError, match=pattern):
        AutoDualGaussian(normal, inducing=number)


def test_riemannian_needs_tied_sites():
    for guide in (AutoDualGaussian(other), AutoDualGaussian(other, Z, sites="untied")):
        with pytest.raises(ValueError, match=r"Riemannian\(\) cannot be used for GP site 'f'"):
            TSVGP(other, guide, None, rule=Riemannian()).init(KEY, X, Y)
    # A dict may leave out a site, which is known once the model has been seen.
    with pytest.raises(ValueError, match=r"cannot be used for GP site 'g'"):
        make(two, {"f": Z}, rule=Riemannian()).init(KEY, X, Y)


def test_hyper_guide_that_needs_the_data():
    guide = AutoDualGaussian(normal, Z, hyper_guide=AutoLaplaceApproximation)
    with pytest.raises(TypeError, match=r"hyper_guide=AutoLaplaceApproximation.*AutoNormal.*NUTS"):
        TSVGP(normal, guide, None).init(KEY, X, Y)


def test_unknown_initial_parameter():
    with pytest.raises(ValueError, match=r"\['length'\].*not parameters.*f_auto_inducing"):
        make().init(KEY, X, Y, init_params={"length": 1.0})


@pytest.mark.parametrize("args", [(0, X, Y), (X, Y), (Y,)])
def test_number_of_steps(args):
    """Forgotten, it is the first argument of the model that stands in its place."""
    pattern = r"num_steps must be a positive integer.*svi\.run\(rng_key, num_steps, \*arguments"
    with pytest.raises(ValueError, match=pattern):
        make().run(KEY, *args)


def test_data_that_are_traced():
    with pytest.raises(ValueError, match=r"inside jax\.jit or jax\.vmap.*Call init outside"):
        jax.jit(lambda y: make().init(KEY, X, y))(Y)


# ---- states ----------------------------------------------------------------------------------


def test_state_of_another_model(stranger):
    def renamed(X, y=None):
        f = numpyro.sample("g", GP(kernels.RBF(0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    def same_hyperparameters(X, y=None):
        numpyro.param("lengthscale", 0.3)
        return other(X, y)

    svi = make()
    with pytest.raises(
        ValueError, match=r"another model: .*\['f'\].*\[\].*\['f'\].*\['variance'\]"
    ):
        svi.run(KEY, 2, X, Y, init_state=stranger)
    with pytest.raises(ValueError, match=r"another model: its GP sites are \['f'\].*has \['g'\]"):
        make(renamed).run(KEY, 2, X, Y, init_state=stranger)
    pattern = r"another model or guide: its parameters are .*'scale'\], .*'lengthscale', 'scale'\]"
    with pytest.raises(ValueError, match=pattern):
        make(same_hyperparameters).run(KEY, 2, X, Y, init_state=stranger)


def test_state_of_another_guide_or_of_other_data(stranger):
    with pytest.raises(ValueError, match=r"another guide or model: it has no \['f_auto_inputs'"):
        make(other, None).run(KEY, 2, X, Y, init_state=stranger)
    few = make(other, None).init(KEY, X[:20], Y[:20])
    pattern = r"state is one of other data.*GP site 'f' has shape \(1, 20\).*\(1, 30\)"
    with pytest.raises(ValueError, match=pattern):
        make(other, None).run(KEY, 2, X, Y, init_state=few)


def test_what_is_not_a_state(fitted):
    svi, state = fitted
    with pytest.raises(TypeError, match=r"what svi\.init returns, a TSVGPState; got dict"):
        svi.run(KEY, 2, X, Y, init_state=svi.get_params(state))
    with pytest.raises(TypeError, match=r"what svi\.init returns, a TSVGPState; got tuple"):
        svi.update((state, 1.0), X, Y)


# ---- parameters ------------------------------------------------------------------------------


def test_parameters_of_another_model(fitted, stranger):
    svi, _ = fitted
    pattern = r"no \['lengthscale'\], which the model of GP site 'f' has.*another model.*'scale'"
    with pytest.raises(ValueError, match=pattern):
        svi.guide.marginals(make(other).get_params(stranger), X)


@pytest.mark.parametrize("name", ["lengthscale", "f_auto_linear", "variance_auto_loc"])
def test_missing_parameter(fitted, params, name):
    svi, _ = fitted
    rest = {k: v for k, v in params.items() if k != name}
    pattern = rf"parameters have no \['{name}'\].*or incomplete.*result\.params"
    with pytest.raises(ValueError, match=pattern):
        svi.guide.marginals(rest, X)
    with pytest.raises(ValueError, match=pattern):
        svi.guide.sample_posterior(KEY, rest, X)


def test_missing_parameter_of_a_distribution_of_hyperparameters(params):
    guide = AutoDualGaussian(normal, Z, hyper_guide=AutoNormal)
    with pytest.raises(
        ValueError, match=r"no \['variance_auto_scale'\], which the guide of the hyp"
    ):
        guide.marginals(params, X)


def test_surplus_parameters_are_no_mistake(fitted, params):
    """The noise of a likelihood that predictions do not run."""
    svi, _ = fitted
    assert svi.guide.marginals({**params, "noise": 0.1}, X[:4])["f"].mean.shape == (4,)


def test_result_in_place_of_parameters(fitted):
    svi, state = fitted
    result = TSVGPRunResult(svi.get_params(state), state, jnp.zeros(1))
    pattern = (
        r"params is a TSVGPRunResult; .*guide\.marginals\(result\.params, X_new\).*result\.fit"
    )
    with pytest.raises(TypeError, match=pattern):
        svi.guide.marginals(result, X)


# ---- prediction ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "given", "cause"),
    [
        ((), {}, r"\(\)", "missing 1 required positional argument: 'X'"),
        ((), {"X": None}, r"\(X None\)", "None"),
        ((3.0,), {}, r"\(of type float\)", r"shape \(n, d\)"),
    ],
)
def test_prediction_without_inputs(fitted, params, args, kwargs, given, cause):
    guide = fitted[0].guide
    pattern = (
        rf"does not run with the arguments {given}.*no way to know where to predict.*{cause}.*"
        r"Pass the inputs.*guide\.marginals\(params, X_new\).*X\.shape\[0\]"
    )
    with pytest.raises(ValueError, match=pattern) as caught:
        guide.marginals(params, *args, **kwargs)
    assert caught.value.__cause__ is not None  # the model's own exception is not lost
    with pytest.raises(ValueError, match=pattern):
        guide.sample_posterior(KEY, params, *args, **kwargs)


def test_predictive_without_inputs(fitted, params):
    predictive = Predictive(normal, guide=fitted[0].guide, params=params, num_samples=2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'X'"):
        predictive(KEY)


def test_prediction_where_n_is_that_of_the_data():
    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    svi = make(model)
    state = svi.init(KEY, X, Y)
    with pytest.raises(ValueError, match=r"no way to know.*has no len\(\).*X\.shape\[0\]"):
        svi.guide.marginals(svi.get_params(state), X[:4])


def test_prediction_at_inputs_of_another_dimension(fitted, params):
    guide = fitted[0].guide
    pattern = r"GP site 'f' was fitted to inputs with 1 columns.*\(5, 2\).*number of columns"
    with pytest.raises(ValueError, match=pattern):
        guide.marginals(params, np.zeros((5, 2)))
    assert guide.marginals(params, np.zeros((5, 1)))["f"].mean.shape == (5,)


# ---- memory ----------------------------------------------------------------------------------


@pytest.fixture
def small_machine(monkeypatch):
    """One with 10 kB of memory, half of which holds a matrix of 25 by 25."""
    monkeypatch.setattr(memory, "memory", lambda: 10_000)


@pytest.mark.slow
def test_no_inducing_inputs_for_many_rows(small_machine):
    svi = make(other, None)
    svi.init(KEY, X[:25], Y[:25])
    pattern = r"GP site 'f' has 26 rows and no inducing inputs.*26 by 26.*memory.*inducing\.kmeans"
    with pytest.raises(ValueError, match=pattern):
        svi.init(KEY, X[:26], Y[:26])
    make(other).init(KEY, X, Y)


def test_joint_draws_at_many_inputs(small_machine, fitted, params):
    svi, state = fitted
    pattern = r"Joint draws at 26 inputs ask for a matrix of 26 by 26.*marginals.*fewer inputs"
    with pytest.raises(ValueError, match=pattern):
        svi.guide.sample_posterior(KEY, params, X[:26])
    with pytest.raises(ValueError, match=pattern):
        svi.fit(state, X, Y).sample(KEY, X[:26])
    with pytest.raises(ValueError, match=pattern):
        Predictive(normal, guide=svi.guide, params=params, num_samples=2)(KEY, X[:26])
    assert svi.guide.marginals(params, X[:26])["f"].mean.shape == (26,)


def test_memory_of_this_machine():
    """200,000 rows: 320 GB in double precision; no test machine has twice that."""
    n = 200_000
    inputs = np.linspace(0.0, 1.0, n)
    available = memory.memory()
    if available is None or available > 640e9:
        pytest.skip("it may have enough")
    assert available > 2**28
    with pytest.raises(ValueError, match=r"200,000 by 200,000, 320 GB.*GB of memory"):
        make(other, None).init(KEY, inputs, np.sin(inputs))


# ---- what is taken ---------------------------------------------------------------------------


def test_data_frames():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"time": X, "y": Y, "count": np.arange(N)})
    svi = make(other)
    plain = svi.run(KEY, 2, X[:, None], Y, progress_bar=False)
    framed = svi.run(KEY, 2, frame[["time"]], frame["y"], progress_bar=False)
    np.testing.assert_array_equal(framed.losses, plain.losses)
    expected = plain.fit.marginals(X[:4, None])["f"]
    for found in (
        framed.fit.marginals(frame[["time"]].head(4))["f"],
        svi.guide.marginals(framed.params, frame[["time"]].head(4))["f"],
    ):
        np.testing.assert_array_equal(found.mean, expected.mean)
    # By keyword, and with integer columns.
    svi.init(KEY, X=frame[["count"]], y=frame["y"])


def test_other_arguments_reach_the_model_as_they_are():
    seen = []

    def model(X, y=None, order=1, flag=False, name="", link=None, *, size=None):
        seen.append((order, flag, name, size))
        assert type(order) is int and flag is True and isinstance(name, str)
        f = numpyro.sample("f", GP(order * kernels.RBF(0.3), X[:size]))
        with numpyro.plate(name, size):
            numpyro.sample("y", dist.Normal(link(f), 0.1), obs=y if y is None else y[:size])

    svi = make(model)
    result = svi.run(KEY, 2, X, Y, 2, True, "data", jnp.tanh, size=20, progress_bar=False)
    assert set(seen) == {(2, True, "data", 20)} and np.isfinite(result.losses).all()
    # Another number is another program, and nothing is remembered of the first.
    other = svi.run(KEY, 2, X, Y, 3, True, "data", jnp.tanh, size=20, progress_bar=False)
    assert seen[-1][0] == 3 and float(other.losses[0]) != float(result.losses[0])
    q = result.fit.marginals(X[:7], None, 2, True, "data", jnp.tanh, size=5)["f"]
    assert q.mean.shape == (5,)


# ---- kernels that are no covariance ------------------------------------------------------------


def of_kernel(kernel):
    def model(X, y=None):
        f = numpyro.sample("f", GP(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    return model


def test_kernel_that_is_not_a_covariance():
    def box(a, b):
        return jnp.where(jnp.abs(a[:, None] - b[None]) < 0.3, 1.0, 0.0)

    with pytest.raises(
        ValueError, match=r"not by rounding: it has the eigenvalue -0\.\d+"
    ) as error:
        make(of_kernel(box)).init(KEY, X, Y)
    assert "too close" not in str(error.value)


@pytest.mark.slow
def test_l1_distance_of_tinygp():
    tinygp = pytest.importorskip("tinygp")
    inputs = RNG.randn(N, 2)
    with pytest.raises(ValueError, match=r"kernel is not a covariance.*distance\.L2Distance"):
        make(of_kernel(tinygp.kernels.Matern52(1.0)), None).init(KEY, inputs, Y)
    good = tinygp.kernels.Matern52(1.0, distance=tinygp.kernels.distance.L2Distance())
    make(of_kernel(good), None).init(KEY, inputs, Y)


def test_inducing_inputs_that_are_too_close_are_still_told_so():
    near = 0.5 + 1e-9 * np.arange(3.0)

    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X, jitter=-1e-12))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    with pytest.raises(ValueError, match="Inducing inputs may be too close for the lengthscale"):
        make(model, near).init(KEY, X, Y)


@pytest.mark.slow
def test_variance_that_becomes_negative():
    def model(X, y=None):
        variance = numpyro.param("variance", 0.1)  # without a constraint
        f = numpyro.sample("f", GP(variance * kernels.RBF(0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    svi = make(model, optim=optax.sgd(0.1))
    with pytest.raises(
        FitError, match=r"a kernel times -.*is not a covariance.*LogNormal"
    ) as error:
        svi.run(KEY, 30, X, 0.01 * Y, progress_bar=False)
    assert "where to predict" not in str(error.value)


def test_arguments_of_predictions_in_the_wrong_place(fitted, params):
    svi, state = fitted
    fit = svi.fit(state, X, Y)
    with pytest.raises(ValueError, match=r"looks like parameters.*fit\.marginals\(X_new\)"):
        fit.marginals(params, X)
    with pytest.raises(ValueError, match="looks like a random key, which draws take"):
        fit.marginals(KEY, X)


def test_forgotten_number_of_steps(fitted):
    with pytest.raises(
        ValueError, match=r"positive integer, got an array of shape \(30,\)\. The arg"
    ):
        fitted[0].run(KEY, X, Y)
