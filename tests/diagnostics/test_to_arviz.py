"""ArviZ conversion and the checks that ArviZ users make next, on ArviZ 0.x and 1.x.

Small models, few programs: every fit of a model shares its compiled update, and a model compared
under two kernels takes the kernel as an argument, so that the second costs no compilation.
"""

import importlib.metadata
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpyro import handlers
from numpyro.infer import MCMC
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.mcmc import MCMCKernel
from scipy.special import gammaln, log_softmax

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    TSVGPRunResult,
    collapse,
    kernels,
    loo,
    to_arviz,
)
from numpyro_tsvgp.diagnostics.labels import shape_of
from numpyro_tsvgp.gaussian.quadrature import Marginals

ARVIZ_1 = int(importlib.metadata.version("arviz").split(".")[0]) >= 1
N = 30
DRAWS = 400
STEPS = 40


# ---- a binary, a count and a ten-class model, each under two kernels -------------------------


def make_model(likelihood, classes=None):
    def model(X, y=None, mix=1.0):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
        scale = numpyro.param("lengthscale", 0.3, constraint=dist.constraints.positive)
        # One program for both kernels: RBF where mix is 1, Matern 1/2 where it is 0.
        kernel = variance * (mix * kernels.RBF(scale) + (1 - mix) * kernels.Matern12(scale))
        if classes is None:
            f = numpyro.sample("f", GP(kernel, X))
        else:
            with numpyro.plate("classes", classes):
                f = numpyro.sample("f", GP(kernel, X))
        numpyro.deterministic("doubled", 2.0 * f)
        numpyro.factor("nothing", 0.0 * scale)  # a factor is no data
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(f), obs=y)

    return model


MODELS = {
    "binary": (lambda f: dist.Bernoulli(logits=f), None),
    "count": (lambda f: dist.Poisson(jnp.exp(f)), None),
    "ten-class": (lambda f: dist.Categorical(logits=f.T), 10),
}


class Case(NamedTuple):
    """A fitted model and its ArviZ objects under both kernels."""

    name: str
    classes: int | None
    args: tuple
    result: TSVGPRunResult
    data: Any
    other: Any
    marginals: Marginals

    @property
    def params(self):
        return self.result.params


FAST = ("binary",)


@pytest.fixture(
    scope="module",
    params=[pytest.param(k, marks=() if k in FAST else pytest.mark.slow) for k in MODELS],
)
def case(request):
    likelihood, classes = MODELS[request.param]
    model = make_model(likelihood, classes)
    rng = np.random.default_rng(1)
    X = jnp.asarray(np.sort(rng.uniform(0.0, 1.0, N)))
    truth = 1.5 * np.sin(7.0 * X)
    if classes is not None:
        truth = np.stack([1.5 * np.sin(7.0 * X + k) for k in range(classes)])
    y = likelihood(jnp.asarray(truth)).sample(jax.random.key(2))
    guide = AutoDualGaussian(model, inducing=X[::4], learn_inducing=False)
    svi = TSVGP(model, guide, None, site_lr=0.5)  # without M-steps it compiles in half the time

    def run(mix):
        start = {"variance_auto_loc": 1.5}
        options = dict(mix=mix, init_params=start, progress_bar=False)
        return svi.run(jax.random.key(0), STEPS, X, y, **options)

    first, second = run(jnp.asarray(1.0)), run(jnp.asarray(0.0))
    full = request.param == "binary"  # the prior, predictions and bound cost a program each
    data = to_arviz(
        jax.random.key(1),
        first.fit,
        num_samples=DRAWS,
        prior=full,
        predictions=(X[:5], None, jnp.asarray(1.0)) if full else None,
        result=first if full else None,
        dims="plates",
    )
    other = to_arviz(jax.random.key(1), second.fit, num_samples=DRAWS, prior=False, dims="plates")
    marginals = first.fit.marginals()["f"]
    return Case(request.param, classes, (X, y), first, data, other, marginals)


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def groups_of(data):
    if ARVIZ_1:
        return {name: node.to_dataset() for name, node in data.children.items()}
    return {name: data[name] for name in data.groups()}


def test_groups_and_dims(case):
    assert isinstance(
        data := case.data, xr.DataTree if ARVIZ_1 else getattr(az, "InferenceData", ())
    )
    groups = groups_of(data)
    expected = {"posterior", "posterior_predictive", "log_likelihood"}
    expected |= {"observed_data", "constant_data"}
    if case.name == "binary":
        expected |= {
            "fit_data",
            "prior",
            "prior_predictive",
            "predictions",
            "predictions_constant_data",
        }
    assert set(groups) == expected
    plates = () if case.classes is None else ("classes",)
    posterior = groups["posterior"]
    assert posterior["f"].dims == ("chain", "draw", *plates, "data")
    assert posterior["doubled"].dims == posterior["f"].dims  # along the rows of f
    assert posterior["variance"].dims == posterior["lengthscale"].dims == ("chain", "draw")
    assert posterior.sizes["chain"] == 1 and posterior.sizes["draw"] == DRAWS
    np.testing.assert_array_equal(posterior["doubled"], 2.0 * posterior["f"])
    # Points repeat: both the parameter and the MAP estimate.
    assert (posterior["lengthscale"] == float(case.params["lengthscale"])).all()
    assert (posterior["variance"] == float(case.params["variance_auto_loc"])).all()
    for group in ("posterior_predictive", "log_likelihood"):
        assert set(groups[group]) == {"y"}  # the factor is no data
        assert groups[group]["y"].dims == ("chain", "draw", "data")
    assert groups["observed_data"]["y"].dims == ("data",)
    np.testing.assert_array_equal(groups["observed_data"]["y"], case.args[1])
    np.testing.assert_array_equal(groups["constant_data"]["X"], case.args[0])
    np.testing.assert_array_equal(posterior["data"], np.arange(N))


def test_draws_are_of_the_posterior(case):
    """Moments of f, and each log density and predictive mean, against formulas."""
    posterior = groups_of(case.data)["posterior"]
    f = posterior["f"].values[0]
    q = case.marginals
    sd = np.sqrt(q.variance)
    # Means of 400 draws have a standard error of sd / 20; the largest of 30 (or 300) of them
    # stays below 4.5 of these. A variance has a relative one of sqrt(2 / 400) = 0.07.
    assert np.max(np.abs(f.mean(0) - q.mean) / sd) < 4.5 / np.sqrt(DRAWS)
    assert np.max(np.abs(f.var(0) / q.variance - 1)) < 0.35
    observed = np.asarray(case.args[1])
    log_density, mean, variance = {
        "binary": bernoulli,
        "count": poisson,
        "ten-class": categorical,
    }[case.name](f, observed)
    found = groups_of(case.data)["log_likelihood"]["y"].values[0]
    np.testing.assert_allclose(found, log_density, rtol=1e-10)
    y = groups_of(case.data)["posterior_predictive"]["y"].values[0]
    if case.name == "ten-class":
        y = y == 3
    # New data vary about their mean given f, and that mean varies with f.
    error = np.sqrt(variance.mean(0) / DRAWS)
    assert np.max(np.abs(y.mean(0) - mean.mean(0)) / error) < 4.5


def bernoulli(f, y):
    p = 1 / (1 + np.exp(-f))
    return np.log(np.where(y == 1, p, 1 - p)), p, p * (1 - p)


def poisson(f, y):
    rate = np.exp(f)
    return y * f - rate - gammaln(y + 1), rate, rate


def categorical(f, y):
    """The mean and variance are those of the indicator of class 3."""
    log_p = log_softmax(f, 1)
    p = np.exp(log_p[:, 3])
    return log_p[:, y, np.arange(len(y))], p, p * (1 - p)


@pytest.mark.parametrize("case", ["binary"], indirect=True)
def test_fit_group(case):
    group = groups_of(case.data)["fit_data"]
    np.testing.assert_array_equal(group["losses"], case.result.losses)
    assert int(group["rejected"]) == 0
    assert group["f_inducing_inputs"].shape == (len(case.args[0][::4]),)
    # Minus the loss is the bound plus the log prior of the variance, and without M-steps the
    # last loss is that of the last state.
    log_prior = dist.LogNormal(0.0, 0.5).log_prob(case.params["variance_auto_loc"])
    loss = -float(group["bound"]) - float(log_prior)
    assert loss == pytest.approx(float(case.result.losses[-1]), rel=1e-10)


# ---- what ArviZ users do next ----------------------------------------------------------------


def drawn_artists():
    """How many lines, patches and collections the current figures hold."""
    axes = [ax for number in plt.get_fignums() for ax in plt.figure(number).axes]
    return sum(len(ax.lines) + len(ax.patches) + len(ax.collections) for ax in axes)


def test_summary(case):
    table = az.summary(case.data, var_names=["variance", "f"])
    assert len(table) == 1 + N * (case.classes or 1)
    index = "f[0]" if case.classes is None else "f[0, 0]"
    mean = float(groups_of(case.data)["posterior"]["f"].mean(("chain", "draw")).values.flat[0])
    assert abs(float(table.loc[index, "mean"]) - mean) < 0.05  # rounded to 2 digits or so


def test_psis_loo_agrees_with_cavities(case):
    """PSIS of draws from q and the cavity are two estimates of one thing when q is good."""
    psis = az.loo(case.data, pointwise=True)
    cavity = loo(case.result.fit)
    assert cavity["n_data_points"] == N
    # PSIS does not correct the variational error and has Monte Carlo error from 400 draws: a
    # few hundredths of a nat a point.
    assert abs(total(psis) - total(cavity)) < 0.03 * N
    assert total(cavity) < total(psis) + 0.03 * N
    assert np.corrcoef(pointwise(psis), pointwise(cavity))[0, 1] > 0.98
    p = cavity["p" if ARVIZ_1 else "p_loo"]
    assert 0 < p < N


def pointwise(elpd):
    return np.asarray(elpd["elpd_i" if ARVIZ_1 else "loo_i"])


def total(elpd):
    return float(elpd["elpd" if ARVIZ_1 else "elpd_loo"])


def test_compare(case):
    models = {"rbf": case.data, "matern": case.other}
    table = az.compare(models, **({"round_to": "none"} if ARVIZ_1 else {}))
    assert sorted(table["rank"]) == [0, 1]
    column = "elpd" if ARVIZ_1 else "elpd_loo"
    assert table[column].iloc[0] >= table[column].iloc[1]
    for name, data in models.items():
        assert float(table.loc[name, column]) == pytest.approx(total(az.loo(data)), abs=1e-9)


def test_posterior_predictive_plot(case):
    if not ARVIZ_1:
        az.plot_ppc(case.data, num_pp_samples=20)
    elif case.name == "binary":
        az.plot_ppc_pava(case.data)
    elif case.name == "count":
        az.plot_ppc_rootogram(case.data)
    else:
        with pytest.warns(UserWarning, match="discrete"):  # it has no plot for many classes
            az.plot_ppc_dist(case.data, num_samples=20)
    assert drawn_artists() > 1


def test_loo_pit(case):
    if ARVIZ_1:
        az.plot_loo_pit(case.data)
        pit = az.loo_pit(case.data)["y"].values
    else:
        az.plot_loo_pit(case.data, y="y")
        pit = np.asarray(az.loo_pit(case.data, y="y"))
    assert drawn_artists() > 0
    assert pit.shape == (N,) and (pit >= 0).all() and (pit <= 1).all()


def test_forest_and_trace_plots(case):
    az.plot_forest(case.data, var_names=["variance", "f"], combined=True)
    assert drawn_artists() > N
    plt.close("all")
    coords = {"data": [0]} if case.classes is None else {"data": [0], "classes": [0, 1]}
    (az.plot_trace_dist if ARVIZ_1 else az.plot_trace)(case.data, var_names=["f"], coords=coords)
    assert drawn_artists() > 1


def test_saves_and_loads(case, tmp_path):
    path = tmp_path / "fit.nc"
    case.data.to_netcdf(path, engine="h5netcdf")
    loaded = az.from_netcdf(path, engine="h5netcdf") if ARVIZ_1 else az.from_netcdf(path)
    before, after = groups_of(case.data), groups_of(loaded)
    assert set(before) == set(after)
    for name, group in before.items():
        xr.testing.assert_equal(after[name].load(), group)
    assert after["posterior"].attrs["inference_library"] == "numpyro_tsvgp"
    if not ARVIZ_1:
        loaded.close()


# ---- the groups that only some ask for -------------------------------------------------------


@pytest.fixture(scope="module")
def normal():
    """A regression with a sampled and a held hyperparameter, fitted."""

    def model(X, y=None, mask=True):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
        noise = numpyro.param("noise", 0.3, constraint=dist.constraints.positive)
        f = numpyro.sample("f", GP(variance * kernels.Matern32(0.3), X, mean=0.5))
        with numpyro.plate("data", X.shape[0]), handlers.mask(mask=mask):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    rng = np.random.default_rng(4)
    X = jnp.asarray(np.sort(rng.uniform(0.0, 1.0, 25)))
    y = jnp.asarray(np.sin(7.0 * X) + 0.3 * rng.standard_normal(25))
    args = (X, y, jnp.ones(25, bool))
    guide = AutoDualGaussian(model, inducing=X[::3], learn_inducing=False)
    svi = TSVGP(model, guide, None, site_lr=1.0)
    state, _ = jax.jit(svi.update)(svi.init(jax.random.key(0), *args), *args)
    return SimpleNamespace(model=model, args=args, fit=svi.fit(state, *args))


@pytest.mark.parametrize("case", ["binary"], indirect=True)
def test_prior_and_predictions(case):
    groups = groups_of(case.data)
    prior = groups["prior"]
    assert set(prior) == {"variance", "f", "doubled"}
    log = np.log(prior["variance"].values.ravel())
    assert abs(log.mean()) < 4 * 0.5 / np.sqrt(DRAWS)
    assert abs(log.std() - 0.5) < 4 * 0.5 / np.sqrt(2 * DRAWS)
    f = prior["f"].values[0]
    standard = f / np.sqrt(prior["variance"].values[0])[:, None]  # RBF: marginally N(0, 1)
    assert np.abs(standard.mean(0)).max() < 4.5 / np.sqrt(DRAWS)
    assert np.abs(standard.var(0) - 1).max() < 0.35
    X = np.asarray(case.args[0])
    k = np.exp(-0.5 * ((X[0] - X[8]) / float(case.params["lengthscale"])) ** 2)
    assert abs(np.corrcoef(standard[:, 0], standard[:, 8])[0, 1] - k) < 4 / np.sqrt(DRAWS)
    assert groups["prior_predictive"]["y"].dims == ("chain", "draw", "data")
    assert 0.3 < float(groups["prior_predictive"]["y"].mean()) < 0.7
    new = groups["predictions"]
    assert set(new) == {"f", "doubled", "y"} and new.sizes["data"] == 5
    mean, variance = (np.asarray(x)[:5] for x in case.marginals)
    error = np.abs(new["f"].values[0].mean(0) - mean) / np.sqrt(variance)
    assert np.max(error) < 4.5 / np.sqrt(DRAWS)
    np.testing.assert_array_equal(groups["predictions_constant_data"]["X"], X[:5])


@pytest.mark.parametrize("case", ["binary"], indirect=True)
def test_draws_through_the_inducing_values(case):
    """What large data get: exact marginals, and correlations that the inducing values carry."""
    data = to_arviz(
        jax.random.key(5),
        case.result.fit,
        num_samples=DRAWS,
        prior=False,
        log_likelihood=False,
        predictive=False,
        joint=False,
        rows=[2, 3, 29],
        dims="plates",
    )
    groups = groups_of(data)
    assert "posterior_predictive" not in groups and "log_likelihood" not in groups
    assert groups["posterior"]["f"].shape == (1, DRAWS, 3)
    np.testing.assert_array_equal(groups["posterior"]["data"], [2, 3, 29])
    np.testing.assert_array_equal(groups["posterior"]["doubled"], 2.0 * groups["posterior"]["f"])
    f = groups["posterior"]["f"].values[0]
    mean, variance = (np.asarray(x)[[2, 3, 29]] for x in case.marginals)
    assert np.max(np.abs(f.mean(0) - mean) / np.sqrt(variance)) < 4.5 / np.sqrt(DRAWS)
    assert np.max(np.abs(f.var(0) / variance - 1)) < 0.3
    assert np.corrcoef(f[:, 0], f[:, 1])[0, 1] > 0.8  # neighbours


def test_subsampling_plates_give_all_their_data():
    def model(X, y=None):
        with numpyro.plate("data", 20, subsample_size=5) as rows:
            batch = X[rows]
        f = numpyro.sample("f", GP(kernels.RBF(0.3), batch))
        with numpyro.plate("data", 20, subsample_size=5) as rows:
            numpyro.sample("y", dist.Normal(f, 0.3), obs=None if y is None else y[rows])

    X = jnp.linspace(0.0, 1.0, 20)
    y = jnp.sin(6.0 * X)
    svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::4], learn_inducing=False), None)
    fit = svi.fit(svi.init(jax.random.key(0), X, y), X, y)
    shape = shape_of(fit.of_all_data(), fit.of_all_data().data)
    np.testing.assert_array_equal(shape.trace["y"]["value"], y)
    assert shape.trace["y"]["scale"] in (None, 1.0)
    np.testing.assert_array_equal(shape.inputs()["X"], X)
    assert shape.inputs()["X"].dims == ("data",)
    assert not fit.data.whole  # the fit itself still subsamples


@pytest.mark.slow
def test_axes_are_named_after_plates():
    """Without a draw: those of functions in a plate, of events and of what follows from them."""

    def model(X, y=None):
        loadings = numpyro.sample("loadings", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("functions", 2):
            f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
        numpyro.deterministic("mix", jnp.einsum("p,pn->n", loadings, f))
        numpyro.deterministic("total", f.sum())
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(f.T, 0.3).to_event(1), obs=y)

    X = jnp.linspace(0.0, 1.0, 9)
    y = jnp.zeros((9, 2))
    svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::3]), None)
    fit = svi.fit(svi.init(jax.random.key(0), X, y), X, y)
    shape = shape_of(fit, fit.data, rows=slice(2, 5))
    draws = {"loadings": (4, 2), "f": (4, 2, 3), "mix": (4, 3), "total": (4,)}
    found = shape.named(2)({name: np.zeros(size) for name, size in draws.items()})
    assert {name: value.dims[2:] for name, value in found.items()} == {
        "loadings": ("loadings_dim_0",),
        "f": ("functions", "rows"),
        "mix": ("rows",),
        "total": (),
    }
    assert shape.named(2)({"y": np.zeros((4, 9, 2))})["y"].dims[2:] == ("rows", "y_dim_1")
    assert found["f"].shape == (2, 2, 2, 3)
    np.testing.assert_array_equal(found["mix"]["rows"], [2, 3, 4])


class Independent(MCMCKernel):
    """A sampler that needs no gradient and so compiles at once: independent draws."""

    sample_field = "z"

    def __init__(self, model):
        self.model = model

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        return IndependentState({"variance": jnp.ones(())}, jnp.zeros(()), rng_key)

    def sample(self, state, model_args, model_kwargs):
        key, rng_key = jax.random.split(state.rng_key)
        log = -0.3 + 0.3 * jax.random.normal(key)
        return IndependentState({"variance": jnp.exp(log)}, log**2, rng_key)


class IndependentState(NamedTuple):
    z: dict
    potential_energy: jax.Array
    rng_key: jax.Array


def sampled(model, *args):
    mcmc = MCMC(
        Independent(model),
        num_warmup=1,
        num_samples=150,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(3), *args, extra_fields=("potential_energy",))
    return mcmc


@pytest.mark.slow
def test_chains_of_an_mcmc_over_hyperparameters(normal):
    """As of MCMC(NUTS(collapse(fit))), with a sampler that is quick to build."""
    X, y, mask = normal.args
    mcmc = sampled(collapse(normal.fit, refresh=1), X, y, mask)
    data = to_arviz(jax.random.key(1), normal.fit, mcmc=mcmc, prior=False)
    groups = groups_of(data)
    posterior = groups["posterior"]
    assert posterior["f"].shape == (2, 150, 25)
    grouped = np.asarray(mcmc.get_samples(group_by_chain=True)["variance"])
    np.testing.assert_array_equal(posterior["variance"], grouped)
    log = np.log(grouped)
    np.testing.assert_allclose(groups["sample_stats"]["lp"], -(log**2), atol=1e-12)
    table = az.summary(data, var_names=["variance", "f"])
    assert table.loc["variance", "r_hat"].astype(float) < 1.1
    assert float(table.loc["f[0]", "r_hat"]) < 1.1
    assert float(table.loc["variance", "ess_bulk"]) > 150  # the draws are independent

    # f is a draw given the hyperparameters of its own draw: standardised, it is N(0, 1).
    K, k = (np.asarray(kernels.Matern32(0.3)(X[::3], x)) for x in (X[::3], X))
    a = np.linalg.solve(K, k)  # the variance cancels
    z = []
    for variance, f in zip(grouped.ravel(), posterior["f"].values.reshape(300, 25), strict=True):
        S = np.linalg.inv(np.linalg.inv(variance * K) + a @ a.T / 0.3**2)
        marginal = variance * (1 - (a * k).sum(0)) + (a * (S @ a)).sum(0)
        mean = 0.5 + a.T @ S @ a @ (np.asarray(y) - 0.5) / 0.3**2
        z.append((f - mean) / np.sqrt(marginal))
    z = np.array(z)
    assert np.abs(z.mean(0)).max() < 4.5 / np.sqrt(300)
    assert np.abs(z.var(0) - 1).max() < 0.4
    assert abs(np.corrcoef(grouped.ravel(), z[:, 5])[0, 1]) < 4 / np.sqrt(300)


@pytest.mark.slow
def test_an_mcmc_of_another_model_is_refused(normal):
    """Its draws would be taken for those of hyperparameters that go with the sites of the fit."""
    mcmc = sampled(normal.model, *normal.args)
    for convert in (partial(to_arviz, jax.random.key(1)), loo):
        with pytest.raises(ValueError, match=r"run on NUTS\(collapse\(fit\)\).*it samples"):
            convert(normal.fit, mcmc=mcmc)
    stub = SimpleNamespace(
        sampler=SimpleNamespace(model=collapse(normal.fit)),
        get_samples=lambda **_: {"other": np.zeros((1, 5))},
    )
    with pytest.raises(ValueError, match=r"draws of \['other'\].*\['variance'\].*collapse"):
        to_arviz(jax.random.key(1), normal.fit, mcmc=stub)


@pytest.mark.slow
def test_variational_hyperparameters_are_drawn(normal):
    guide = AutoDualGaussian(normal.model, inducing=normal.args[0][::3], hyper_guide=AutoNormal)
    svi = TSVGP(normal.model, guide, None)
    fit = svi.fit(svi.init(jax.random.key(0), *normal.args), *normal.args)
    options = dict(num_samples=200, prior=False, predictive=False, log_likelihood=False)
    data = to_arviz(jax.random.key(1), fit, **options)
    log = np.log(groups_of(data)["posterior"]["variance"].values.ravel())
    loc, scale = fit.params["variance_auto_loc"], fit.params["variance_auto_scale"]
    assert abs(log.mean() - loc) < 4 * scale / np.sqrt(200)
    assert abs(log.std() / scale - 1) < 4 / np.sqrt(400)
