"""What users of ArviZ do without thinking: labels, plots and texts of both generations."""

import warnings

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
import xarray as xr
from numpyro.infer import MCMC, NUTS

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, loo, loo_pit, to_arviz
from numpyro_tsvgp.diagnostics import cavities

N = 10
X = np.linspace(0.0, 3.0, N)
Y = np.sin(2.0 * X) + 0.3 * np.random.RandomState(0).randn(N)
KEY = jax.random.key(0)
OLD = int(az.__version__.split(".")[0]) == 0
NOISE = 0.5


def plain(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(1.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def both(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(1.5), X))
    numpyro.deterministic("g", 2.0 * f)
    with numpyro.plate("kinds", 2):
        h = numpyro.sample("h", GP(kernels.RBF(1.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + h.sum(0), NOISE), obs=y)


def fitted(model, *args, steps=1, rate=1.0, **options):
    guide = AutoDualGaussian(model, learn_inducing=False, **options)
    return TSVGP(model, guide, None, site_lr=rate).run(KEY, steps, *args, progress_bar=False)


@pytest.fixture(scope="module")
def result():
    return fitted(both, X, Y)


def converted(result, **options):
    options = {"num_samples": 4, "prior": False, **options}
    return to_arviz(KEY, result.fit, result=result, **options)


# ---- objects ---------------------------------------------------------------------------------


def test_names_of_axes(result):
    """As az.from_numpyro has them, and in one word those of plates."""
    data = converted(result)
    found = {name: data.posterior[name].dims[2:] for name in ("f", "g", "h")}
    last = "h_dim_1" if OLD else "h_dim_0"  # generations count differently
    assert found == {"f": ("f_dim_0",), "g": ("g_dim_0",), "h": ("kinds", last)}
    assert data.observed_data["y"].dims == ("data",)
    some = converted(result, rows=[2, 5]).posterior["f"]
    np.testing.assert_array_equal(some.coords["f_dim_0"], [2, 5])
    plates = converted(result, dims="plates").posterior
    assert plates["f"].dims == plates["g"].dims == ("chain", "draw", "data")
    assert plates["h"].dims == ("chain", "draw", "kinds", "data")


def named(X, y=None):
    """A model that names the rows of a GP itself."""
    with numpyro.plate("kinds", 2):
        f = numpyro.sample("f", GP(kernels.RBF(1.5), X), infer={"event_dims": ["data"]})
    numpyro.deterministic("g", 2.0 * f)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f[0] + f[1], NOISE), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("model", [both, named], ids=["numbered", "named"])
def test_what_nuts_found_subtracts_and_concatenates(model):
    mcmc = MCMC(NUTS(model), num_warmup=2, num_samples=4, progress_bar=False)
    mcmc.run(KEY, X, Y)
    theirs = az.from_numpyro(mcmc)
    ours = converted(fitted(model, X, Y), num_samples=4)
    for name in ("f", "g", "h")[: 3 if model is both else 2]:
        mine, other = ours.posterior[name], theirs.posterior[name]
        assert mine.dims == other.dims
        assert (mine - other).shape == other.shape  # no outer product
        assert xr.concat([mine, other], "chain").shape == (2, *other.shape[1:])
        for dim in other.dims[2:]:
            np.testing.assert_array_equal(mine.coords[dim], other.coords[dim])
    assert ours.observed_data["y"].dims == theirs.observed_data["y"].dims
    assert ours.log_likelihood["y"].dims == ("chain", "draw", "data")
    if model is named:
        assert ours.posterior["f"].dims == ("chain", "draw", "kinds", "data")


@pytest.mark.slow
def test_labels(result):
    years, coming = 2000 + np.arange(N), np.array([2010, 2011, 2012])
    data = converted(
        result,
        predictions=X[:3] + 5.0,
        coords={"data": years, "kinds": ["a", "b"]},
        pred_coords={"data": coming},
        dims={"f": ["data"], "g": ["time"]},
    )
    assert list(data.posterior["f"].coords["data"].values) == list(years)
    assert list(data.predictions["f"].coords["data"].values) == list(coming)
    assert list(data.observed_data["y"].coords["data"].values) == list(years)
    assert data.posterior["h"].sel(kinds="b").shape == (1, 4, N)
    assert data.posterior["g"].dims == ("chain", "draw", "time")
    for group in (data.predictions, data.predictions_constant_data):
        assert list(group.coords["data"].values) == list(coming)
    # Without labels of their own, predictions do not get those of the training data.
    plain = converted(result, predictions=X, coords={"data": years})
    assert list(plain.predictions.coords["data"].values) == list(range(N))


def test_labels_that_do_not_fit(result):
    with pytest.raises(ValueError, match=r"coords has 3 labels for the dim 'data', which has size"):
        converted(result, coords={"data": [1, 2, 3]})
    with pytest.raises(ValueError, match=r"coords has \['dta'\], but the dims are .*'data'"):
        converted(result, coords={"dta": X})
    with pytest.raises(ValueError, match=r"dims has \['a', 'b'\] for 'f', which has 1 axes"):
        converted(result, dims={"f": ["a", "b"]})
    with pytest.raises(ValueError, match='dims takes names by site, "numpyro"'):
        converted(result, dims="from_numpyro")


def test_attributes_and_tables(result):
    data = converted(result)
    attrs = data.posterior.attrs
    assert attrs["inference_library"] == "numpyro_tsvgp"
    if OLD:
        assert attrs["arviz_version"] == az.__version__
        assert len(data.to_dataframe()) == 4  # the group of the result is no table of draws
    else:
        assert attrs["creation_library"] == "ArviZ" and attrs["creation_library_version"]


# ---- leaving one out -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact():
    return fitted(plain, X, Y).fit


def test_text_and_plot_of_scores(exact):
    found = loo(exact)
    text = str(found)
    assert text.startswith(f"Computed from the sites of {N} observations, leaving out each in turn")
    assert "posterior samples" not in text and "elpd_loo" in text and "p_loo" in text
    assert "0 of 10 have a leverage (pareto_k) above 0.7." in text
    np.testing.assert_array_equal(found["pareto_k"], found["leverage"])
    az.plot_khat(found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(az.compare({"one": found, "other": loo(exact)})) == 2


def dense(y):
    """Leave-one-out means and variances of an exact regression."""
    K = np.asarray(kernels.RBF(1.5)(X, X)) + (NOISE**2 + 1e-8) * np.eye(N)
    precision = np.linalg.inv(K)
    variance = 1.0 / np.diag(precision)
    return y - variance * (precision @ y), variance


def test_transforms_are_those_of_refits(exact):
    mean, variance = dense(Y)
    expected = scipy.stats.norm.cdf((Y - mean) / np.sqrt(variance))
    found = loo_pit(exact)
    assert found.dims == ("data",)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["binary", "counts"])
def test_transforms_of_discrete_data(kind):
    """Against sums over nodes of the cavities."""
    is_binary = kind == "binary"
    reference = scipy.stats.bernoulli if is_binary else scipy.stats.poisson
    y = (Y > 0).astype(int) if is_binary else np.round(np.exp(Y))

    def discrete(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(1.5), X))
        with numpyro.plate("data", X.shape[0]):
            fn = dist.Bernoulli(logits=f) if is_binary else dist.Poisson(jnp.exp(f))
            numpyro.sample("y", fn, obs=y)

    fit = fitted(discrete, X, y, steps=20, rate=0.5).fit
    q = cavities.at_points(cavities.Frame.of(fit, {}))["f"].without
    z, w = np.polynomial.hermite_e.hermegauss(60)
    f = np.asarray(q.mean[0])[:, None] + np.sqrt(np.asarray(q.variance[0]))[:, None] * z
    rate = 1 / (1 + np.exp(-f)) if is_binary else np.exp(f)
    less, no_more = ((reference.cdf(v[:, None], rate) * w).sum(1) / w.sum() for v in (y - 1, y))
    np.testing.assert_allclose(loo_pit(fit), 0.5 * (less + no_more), atol=1e-6)
    drawn = np.asarray(loo_pit(fit, rng_key=KEY))
    assert ((drawn >= less - 1e-9) & (drawn <= no_more + 1e-9)).all()


def test_what_has_no_transform():
    def two(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(1.5), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)
            numpyro.sample("z", dist.Normal(f, NOISE), obs=y)

    with pytest.raises(ValueError, match=r"\['y', 'z'\] hold several data points for each row"):
        loo_pit(fitted(two, X, Y).fit)


# ---- layouts ---------------------------------------------------------------------------------


GROUP = np.arange(N) % 3


@pytest.mark.slow
def test_effects_of_groups():
    group = GROUP

    def whole(table, y=None):
        """As the message has it, and as one GP, whose sites know what the two have in common."""
        kernel = kernels.RBF(1.5, active_dims=0) + kernels.Group(0.5, active_dims=1)
        f = numpyro.sample("f", GP(kernel, table))
        with numpyro.plate("data", table.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    table = np.stack([X, group], 1)
    found = loo(fitted(whole, table, Y).fit, threshold=1.0)
    K = np.asarray(kernels.RBF(1.5)(X, X)) + 0.5 * (group[:, None] == group)
    precision = np.linalg.inv(K + (NOISE**2 + 1.5e-8) * np.eye(N))
    variance = 1.0 / np.diag(precision)
    mean = Y - variance * (precision @ Y)
    expected = scipy.stats.norm.logpdf(Y, mean, np.sqrt(variance)).sum()
    key = "elpd_loo" if OLD else "elpd"
    assert float(found[key]) == pytest.approx(expected, rel=1e-5)

    def each(X, group, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(1.5), X))
        b = numpyro.sample("b", GP(kernels.Group(0.5), group))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + b, NOISE), obs=y)

    Z = {"f": X[::2], "b": np.arange(3.0)}
    fit = fitted(each, X, group, Y, steps=20, rate=0.5, inducing=Z).fit
    assert np.isfinite(float(loo(fit, threshold=1.0)[key]))
