"""A model that cannot be fitted says so before the fit, and one that can be is left alone.

Each message must name the site, and the index, shape or value that is wrong, and say what to do;
a pattern below that leaves one of them out would not be much of a test.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
from numpyro_tsvgp.model import batches
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.checks import inspect
from numpyro_tsvgp.model.validation import unvalidated

N = 30
RNG = np.random.RandomState(0)
X = np.sort(RNG.rand(N))
Y = np.sin(6.0 * X) + 0.1 * RNG.randn(N)
COUNTS = np.round(2.0 + 2.0 * np.sin(6.0 * X))
Z = np.linspace(0.0, 1.0, 6)


def latent(X, name="f"):
    return numpyro.sample(name, GP(kernels.RBF(0.3), X))


def data_plate(X):
    return numpyro.plate("data", X.shape[0])


def likelihood(distribution):
    """A model of one GP at X and the given distribution of y, as a function of f."""

    def model(X, y=None):
        f = latent(X)
        with data_plate(X):
            numpyro.sample("y", distribution(f), obs=y)

    return model


normal = likelihood(lambda f: dist.Normal(f, 0.1))
poisson = likelihood(lambda f: dist.Poisson(jnp.exp(f)))


def look(model, *args, **kwargs):
    """What every fit starts with."""
    return inspect(model, Call(args, kwargs).on_device())


def init(model, *args, inducing=Z):
    svi = TSVGP(model, AutoDualGaussian(model, inducing=inducing), None)
    return svi, svi.init(jax.random.key(0), *args)


# ---- what the model is made of ---------------------------------------------------------------


def test_no_gp_site():
    def model(X, y=None):
        with data_plate(X):
            numpyro.sample("y", dist.Normal(X, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"no GP site.*numpyro\.sample\(\"f\".*GP\(kernel, X\)"):
        look(model, X, Y)


def test_no_observed_site():
    with pytest.raises(ValueError, match=r"no observed site.*Pass the data.*obs=y"):
        look(normal, X)


def test_observed_gp():
    def model(X, y=None):
        numpyro.sample("f", GP(kernels.RBF(0.3), X), obs=y)

    with pytest.raises(ValueError, match=r"GP site 'f' is observed.*through a likelihood"):
        look(model, X, Y)


def test_conditioned_gp():
    model = handlers.condition(normal, data={"f": Y})
    with pytest.raises(ValueError, match=r"GP site 'f' is observed.*handlers\.substitute"):
        look(model, X, Y)


@pytest.mark.parametrize("subsample", [None, 10])
def test_gp_in_the_data_plate(subsample):
    def model(X, y):
        with numpyro.plate("data", X.shape[0], subsample_size=subsample) as rows:
            f = latent(X[rows])
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y[rows])

    size = subsample or N
    pattern = rf"'f' stands inside the data plate 'data'.*{size} independent.*outside of the plate"
    with pytest.raises(ValueError, match=pattern):
        look(model, X, Y)


def test_scaled_gp():
    def model(X, y=None):
        with handlers.scale(scale=2.0):
            f = latent(X)
        with data_plate(X):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"GP site 'f' has scale 2\.0.*around the likelihood"):
        look(model, X, Y)


@pytest.mark.parametrize("mask", [False, np.arange(N) > 3], ids=["False", "array"])
def test_masked_gp(mask):
    def model(X, y=None):
        with handlers.mask(mask=mask):
            f = latent(X)
        with data_plate(X):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"GP site 'f' stands under a mask.*around the likelihood"):
        look(model, X, Y)


def of_groups(kernel):
    def model(group, y=None):
        tau = numpyro.param("tau", 1.0)
        f = numpyro.sample("f", GP(kernel(tau), jnp.arange(5.0)))
        with data_plate(group):
            numpyro.sample("y", dist.Normal(f[group], 0.1), obs=y)

    return model


def test_kernel_of_noise_alone():
    """The obvious guess for random effects, which would draw them from the prior."""
    groups = np.arange(N) % 5
    pattern = r"kernel of GP site 'f' is noise alone.*kernel\(X, X\.copy\(\)\).*kernels\.Group"
    for kernel in (
        lambda tau: tau**2 * kernels.White(),
        lambda tau: kernels.White(tau) * kernels.RBF(0.3),
        lambda tau: lambda a, b: tau * jnp.eye(len(a)) * (a is b),
    ):
        with pytest.raises(ValueError, match=pattern):
            look(of_groups(kernel), groups, Y)
    look(of_groups(lambda tau: kernels.Group(tau**2)), groups, Y)
    look(of_groups(lambda tau: kernels.RBF(1.0) + kernels.White(tau)), groups, Y)


def test_deep_inputs():
    def model(X, y=None):
        f = latent(X)
        g = numpyro.sample("g", GP(kernels.RBF(1.0), f[:, None]))
        with data_plate(X):
            numpyro.sample("y", dist.Normal(g, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"GP site 'g' depend.*another GP.*not supported"):
        look(model, X, Y)


def test_deep_kernel():
    def model(X, y=None):
        f = latent(X)
        g = numpyro.sample("g", GP(kernels.RBF(1.0, jnp.exp(f[0])), X))
        with data_plate(X):
            numpyro.sample("y", dist.Normal(f + g, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"kernel of GP site 'g' depend.*not supported"):
        look(model, X, Y)


def test_deep_mean():
    def model(X, y=None):
        f = latent(X)
        g = numpyro.sample("g", GP(kernels.RBF(1.0), X, mean=f))
        with data_plate(X):
            numpyro.sample("y", dist.Normal(g, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"mean or kernel of GP site 'g' depend.*not supported"):
        look(model, X, Y)


def test_discrete_latent():
    def model(X, y=None):
        outlier = numpyro.sample("outlier", dist.Bernoulli(0.1))
        f = latent(X)
        with data_plate(X):
            numpyro.sample("y", dist.Normal(f, 0.1 + outlier), obs=y)

    pattern = r"Site 'outlier' is a discrete latent.*Bernoulli.*Sum it out"
    with pytest.raises(ValueError, match=pattern):
        look(model, X, Y)


def test_discrete_local_latent():
    def model(X, y=None):
        f = latent(X)
        with data_plate(X):
            k = numpyro.sample("k", dist.Categorical(jnp.ones(3) / 3))
            numpyro.sample("y", dist.Normal(f + k, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"Site 'k' is a discrete.*Categorical.*MixtureSameFamily"):
        look(model, X, Y)


def test_local_latent_warns():
    def model(X, y=None):
        f = latent(X)
        with data_plate(X):
            noise = numpyro.sample("noise", dist.Normal(0.0, 0.1))
            numpyro.sample("y", dist.Normal(f + noise, 0.1), obs=y)

    pattern = r"'noise' is a latent variable for each of the 30 points.*'data'.*point estimate"
    with pytest.warns(UserWarning, match=pattern):
        structure, _ = look(model, X, Y)
    assert structure.hyperparameters == ("noise",)


# ---- sums over data points -------------------------------------------------------------------


def ar1(X, y=None):
    f = latent(X)
    with numpyro.plate("data", X.shape[0] - 1):
        numpyro.sample("y", dist.Normal(f[1:] + 0.5 * f[:-1], 0.1), obs=y)


def correlated(X, y=None):
    f = latent(X)
    covariance = 0.1 * jnp.eye(X.shape[0]) + 0.05
    numpyro.sample("y", dist.MultivariateNormal(f, covariance), obs=y)


def cumulative(X, y=None):
    f = latent(X)
    with data_plate(X):
        numpyro.sample("y", dist.Normal(jnp.cumsum(f) / 10, 0.1), obs=y)


def far_pair(X, y=None):
    """Only two values meet, and their indices differ in nothing but the highest bit."""
    f = latent(X)
    g = f.at[0].multiply(f[X.shape[0] // 2])
    with data_plate(X):
        numpyro.sample("y", dist.Normal(g, 0.1), obs=y)


@pytest.mark.parametrize(
    ("model", "n", "pair"),
    [
        (ar1, 30, (0, 1)),
        (correlated, 30, (0, 29)),
        (cumulative, 30_000, (0, 1)),
        (far_pair, 2**15, (0, 2**14)),
    ],
)
def test_not_a_sum_over_points(model, n, pair):
    inputs = np.linspace(0.0, 1.0, n)
    y = RNG.randn(n - 1 if model is ar1 else n)
    i, j = pair
    pattern = (
        rf"not a sum over data points: one term of site 'y' reads both f\[{i}\] and f\[{j}\] of "
        r"GP site 'f'.*NUTS.*kernel"
    )
    with pytest.raises(ValueError, match=pattern):
        look(model, inputs, y)


def test_likelihood_without_finite_gradient():
    model = likelihood(lambda f: dist.Poisson(jnp.exp(2000.0 * f)))
    with pytest.raises(ValueError, match=r"no finite gradient.*near their prior mean.*jnp\.exp"):
        look(model, X, COUNTS)


@pytest.mark.parametrize(
    ("distribution", "y", "parameter"),
    [
        (lambda f: dist.Normal(0.0, 0.5 + f), Y, "Normal whose scale"),
        (lambda f: dist.Poisson(f + 1.0), COUNTS, "Poisson whose rate"),
        (lambda f: dist.Bernoulli(probs=0.5 + f), np.sign(COUNTS), "BernoulliProbs whose probs"),
    ],
)
def test_parameters_that_leave_their_range(distribution, y, parameter):
    pattern = rf"Site 'y' is a {parameter} leaves its range at values of the GPs.*link function"
    with pytest.raises(ValueError, match=pattern):
        look(likelihood(distribution), X, y)


# ---- likelihoods that are fine ---------------------------------------------------------------


def multi_output(X, y=None):
    with numpyro.plate("outputs", 3):
        f = latent(X)
    with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def mixed(X, y=None):
    W = numpyro.param("W", jnp.arange(6.0).reshape(3, 2) / 5)
    with numpyro.plate("latents", 2):
        f = latent(X)
    with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(W @ f, 0.1), obs=y)


def grouped(X, y=None):
    """Every value is read by several points, in another order than that of the data."""
    f = latent(X[:7])
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f[np.arange(X.shape[0]) % 7], 0.1), obs=y)


def two_sizes(X, y=None):
    """A GP of time and one of groups, whose values meet in terms at unlike indices."""
    f, g = latent(X), latent(X[::6], "g")
    with data_plate(X):
        numpyro.sample("y", dist.Normal(f + g[np.arange(X.shape[0]) // 6], 0.1), obs=y)


@pytest.mark.parametrize(
    ("model", "y", "coordinates"),
    [
        (multi_output, np.stack([Y, -Y, 2 * Y]), {"f": [0, 0, 0]}),
        (mixed, np.stack([Y, -Y, 2 * Y]), {"f": [0, 1]}),
        (grouped, Y, {"f": [0]}),
        (two_sizes, Y, {"f": [0], "g": [1]}),
    ],
)
def test_fine_likelihoods_are_taken(model, y, coordinates):
    structure, _ = look(model, X, y)
    assert {name: list(axes) for name, axes in structure.axes.items()} == coordinates
    assert structure.proven


def as_plate(X, y=None):
    with numpyro.plate("functions", 3):
        f = latent(X)
    numpyro.sample("y", dist.Normal(f, 0.1).to_event(2), obs=y)


def as_expansion(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), X).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(f, 0.1).to_event(2), obs=y)


def as_sample_shape(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(0.3), X), sample_shape=(3,))
    numpyro.sample("y", dist.Normal(f, 0.1).to_event(2), obs=y)


THREE = np.stack([Y, -Y, 2 * Y])


@pytest.mark.parametrize("model", [as_plate, as_expansion, as_sample_shape])
def test_three_ways_to_write_three_functions(model):
    structure, reading = look(model, X, THREE)
    assert reading.gps["f"].batch_shape == (3,)
    assert structure.coordinates == (("f", (0, 0, 0)),)


def test_expanded_gp_is_fitted_as_several_functions():
    """Against the regression formula of each, which a single function would be far from."""
    svi = TSVGP(as_expansion, AutoDualGaussian(as_expansion), None, site_lr=1.0)
    q = svi.run(jax.random.key(0), 1, X, THREE, progress_bar=False).fit.marginals()["f"]
    K = np.exp(-0.5 * (X[:, None] - X) ** 2 / 0.3**2)
    gain = np.linalg.solve(K + 0.01 * np.eye(N), K).T
    np.testing.assert_allclose(q.mean, THREE @ gain.T, atol=1e-5)
    np.testing.assert_allclose(q.variance, np.tile(0.01 * np.diag(gain), (3, 1)), atol=1e-6)


@pytest.mark.slow
def test_three_ways_are_fitted_alike():
    fits = []
    for model in (as_plate, as_expansion, as_sample_shape):
        svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), None, site_lr=1.0)
        fits.append(svi.run(jax.random.key(0), 2, X, THREE, progress_bar=False))
    for result in fits:
        np.testing.assert_allclose(result.losses, fits[0].losses, rtol=1e-10)
        q = result.fit.marginals(X[:4])["f"]
        assert q.mean.shape == (3, 4)
        np.testing.assert_allclose(q.mean[1:], [-q.mean[0], 2 * q.mean[0]], rtol=1e-7)
        draws = result.fit.sample(jax.random.key(1), X[:4], sample_shape=(2,))["f"]
        assert draws.shape == (2, 3, 4)
        assert np.abs(draws[:, 1] + draws[:, 0]).max() > 1e-3  # functions are independent


def test_multivariate_observation_is_not_taken_for_independent_ones():
    """Its covariance may be diagonal; the program does not say so for all values."""

    def model(X, y=None):
        f = latent(X)
        numpyro.sample("y", dist.MultivariateNormal(f, 0.1 * jnp.eye(X.shape[0])), obs=y)

    def independent(X, y=None):
        f = latent(X)
        numpyro.sample("y", dist.Normal(f, 0.3).to_event(1), obs=y)

    with pytest.raises(ValueError, match=r"'y' reads both f\[\d+\] and f\[\d+\] of GP site 'f'"):
        look(model, X, Y)
    look(independent, X, Y)


def test_plate_of_latents_as_large_as_the_data_is_taken():
    def model(X, y=None):
        n = X.shape[0]
        with numpyro.plate("outputs", n):
            f = latent(X)
        with numpyro.plate("outputs", n, dim=-2), numpyro.plate("data", n, dim=-1):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    look(model, X[:4], np.zeros((4, 4)))


# ---- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_inputs_not_finite(value):
    inputs = X.copy()
    inputs[[7, 9]] = value
    pattern = rf"inputs X of GP site 'f' have the value {value} at index 7\..*Remove or impute"
    with pytest.raises(ValueError, match=pattern):
        look(normal, inputs, Y)


def test_inputs_not_finite_in_a_matrix():
    inputs = np.stack([X, X], 1)
    inputs[7, 1] = np.nan
    with pytest.raises(ValueError, match=r"value nan at index \(7, 1\)"):
        look(normal, inputs, Y)


def test_missing_data():
    y = Y.copy()
    y[[3, 8]] = np.nan
    pattern = r"data of site 'y' at index 3: the value nan is missing.*obs_mask, handlers\.mask"
    with pytest.raises(ValueError, match=pattern):
        look(normal, X, y)


@pytest.mark.parametrize(
    ("distribution", "y", "value", "name"),
    [
        (lambda f: dist.Poisson(jnp.exp(f)), COUNTS, -2.0, "Poisson"),
        (lambda f: dist.Poisson(jnp.exp(f)), COUNTS, 1.5, "Poisson"),
        (lambda f: dist.Bernoulli(logits=f), np.sign(COUNTS), -1.0, "Bernoulli"),
        (lambda f: dist.Gamma(2.0, jnp.exp(f)), np.exp(Y), -0.5, "Gamma"),
        (lambda f: dist.Beta(jnp.exp(f), 1.0), 0.3 + 0.4 * X, 1.25, "Beta"),
    ],
)
def test_data_outside_of_the_support(distribution, y, value, name):
    y = y.copy()
    y[[5, 11]] = value
    pattern = rf"data of site 'y' at index 5: the value {value} lies outside .* support of {name}"
    with pytest.raises(ValueError, match=pattern):
        look(likelihood(distribution), X, y)


def test_event_outside_of_the_support():
    def model(X, y=None):
        with numpyro.plate("classes", 2):
            f = latent(X)
        concentration = jnp.exp(jnp.concatenate([f, jnp.zeros((1, X.shape[0]))])).T
        with data_plate(X):
            numpyro.sample("y", dist.Dirichlet(concentration), obs=y)

    shares = np.full((N, 3), 1 / 3)
    shares[4] = 0.5
    with pytest.raises(ValueError, match=r"site 'y' at index 4.*\[0\.5 0\.5 0\.5\].*Dirichlet"):
        look(model, X, shares)


def test_masked_values_are_not_looked_at():
    seen = np.arange(N) % 5 != 3

    def by_obs_mask(X, y):
        f = latent(X)
        with data_plate(X):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y, obs_mask=seen)

    def by_handler(X, y):
        f = latent(X)
        with data_plate(X), handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    look(by_handler, X, np.where(seen, Y, np.inf))
    look(by_obs_mask, X, np.where(seen, Y, np.nan))  # that gradients are finite is looked at, too


def test_the_other_values_of_masked_data_are_looked_at():
    seen = np.arange(N) % 5 != 3
    y = np.where(seen, Y, np.nan)
    y[4] = np.nan

    def model(X, y):
        f = latent(X)
        with data_plate(X), handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"'y' at index 4: the value nan is missing"):
        look(model, X, y)


def test_distribution_without_support_is_taken():
    class Quartic(dist.Distribution):
        pytree_data_fields = ("loc",)

        def __init__(self, loc):
            self.loc = loc
            super().__init__(loc.shape)

        def log_prob(self, value):
            return -((value - self.loc) ** 4)

    look(likelihood(Quartic), X, Y)


def test_numpyro_validation_stays_on():
    model = likelihood(lambda f: dist.Normal(f, -1.0, validate_args=True))
    with pytest.raises(ValueError, match="Normal distribution got invalid scale parameter"):
        look(model, X, Y)


# ---- shapes ----------------------------------------------------------------------------------


def test_column_of_data():
    pattern = r"site 'y' have shape \(30, 1\).*distribution has shape \(30,\).*y\[:, 0\]"
    with pytest.raises(ValueError, match=pattern):
        look(normal, X, Y[:, None])


@pytest.mark.parametrize("y", [Y[:-3], np.stack([Y, Y])])
def test_data_of_another_length(y):
    shape = str(y.shape).replace("(", r"\(").replace(")", r"\)")
    pattern = rf"site 'y' have shape {shape}.*shape \(30,\).*X and y have the same number of rows"
    with pytest.raises(ValueError, match=pattern):
        look(normal, X, y)


def test_one_column_for_several_outputs():
    def model(X, y=None):
        with numpyro.plate("outputs", 3):
            f = latent(X)
        with numpyro.plate("data", X.shape[0], dim=-2), numpyro.plate("outputs", 3, dim=-1):
            numpyro.sample("y", dist.Normal(f.T, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"'y' have shape \(30, 1\).*shape \(30, 3\)"):
        look(model, X, Y[:, None])
    look(model, X, np.stack([Y, -Y, 2 * Y], 1))


def test_plate_of_another_length():
    """NumPyro's own exception comes first; the shapes and what to look at are added to it."""

    def model(X, y):
        f = latent(X)
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    pattern = r"Incompatible shapes(?s:.*)\(of shape \(30,\), of shape \(27,\)\).*number of rows"
    with pytest.raises(ValueError, match=pattern):
        look(model, X, Y[:-3])


def test_transposed_inputs():
    pattern = r"site 'y' have shape \(30,\).*distribution has shape \(2,\)"
    with pytest.raises(ValueError, match=pattern):
        look(normal, np.stack([X, X[::-1]]), Y)


@pytest.mark.parametrize("inputs", [np.zeros((1, 30, 2)), np.float64(0.3)])
def test_inputs_of_too_many_axes_or_none(inputs):
    shape = str(inputs.shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=rf"shape \(n, d\) or \(n,\); got {shape}.*one row"):
        look(normal, inputs, Y)


def test_empty_inputs():
    with pytest.raises(ValueError, match=r"inputs X of a GP are empty: their shape is \(0, 2\)"):
        look(normal, np.zeros((0, 2)), np.zeros(0))


def test_mean_of_another_length():
    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3), X, mean=np.zeros(N - 1)))
        with data_plate(X):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"mean of the GP has shape \(29,\).*30 rows of X"):
        look(model, X, Y)


@pytest.mark.parametrize("y", [0.5, np.float64(0.5), np.array([0.5])], ids=str)
def test_one_number_for_all_points(y):
    shape = str(np.shape(y)).replace("(", r"\(").replace(")", r"\)")
    pattern = (
        rf"data of site 'y' are one number, of shape {shape}.*distribution has shape \(30,\).*"
        r"one value for each data point.*jnp\.full\(\(30,\), value\)"
    )
    with pytest.raises(ValueError, match=pattern):
        look(normal, X, y)
    look(normal, X, jnp.full((N,), 0.5))


def test_one_row_of_inputs():
    """X of shape (1, n): its single value would be read by all data, in silence."""

    def by_data(X, y):
        f = latent(X)
        with data_plate(y):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    pattern = r"inputs X of GP site 'f' have shape \(1, 30\), one row of 30 columns.*X\.T"
    for model in (normal, by_data):
        with pytest.raises(ValueError, match=pattern):
            look(model, X[None], Y)
    look(by_data, X[None, :5], Y)  # one point with five features: an odd model, but no mistake


def test_data_that_are_not_numbers():
    labels = np.where(Y > 0, "yes", "no")
    pattern = r"data of site 'y' are not numbers, but of type .*such as 'yes'.*return_inverse=True"
    for y in (labels, list(labels), labels.astype(object)):
        with pytest.raises(TypeError, match=pattern):
            look(normal, X[::-1], y)


def test_inputs_and_data_swapped():
    with pytest.raises(ValueError, match=r"'y' have shape \(30, 2\).*are X and y swapped\?"):
        look(normal, Y, np.stack([X, X], 1))
    pattern = r"outside of the support of Poisson.* inputs of GP site 'f' do lie in it: .*swapped\?"
    with pytest.raises(ValueError, match=pattern):
        look(poisson, COUNTS, X)
    # Nothing is wrong with these shapes and values, but data are not sorted by chance.
    with pytest.warns(UserWarning, match=r"'y' are sorted and .*GP site 'f' are not.*swapped\?"):
        look(normal, Y, X)


def test_data_of_a_hyperparameter_are_taken():
    """Observations that read no GP, without a plate, as NumPyro allows."""

    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
        numpyro.sample("calibration", dist.Normal(0.0, noise), obs=np.array([0.1, -0.2, 0.1]))
        f = latent(X)
        with data_plate(X):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    look(model, X, Y)


# ---- rows that the first batch does not show --------------------------------------------------


def of_batches(size):
    def model(X, y):
        with numpyro.plate("data", X.shape[0], subsample_size=size) as rows:
            batch, values = X[rows], y[rows]
        f = latent(batch)
        with numpyro.plate("data", X.shape[0], subsample_size=size):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=values)

    return model


@pytest.mark.parametrize("chunk", [2**16, 10])
def test_all_rows_of_minibatches_are_looked_at(monkeypatch, chunk):
    """In one run of the model, or, where there are too many rows, in several of the same size."""
    monkeypatch.setattr(batches, "_ROWS_AT_ONCE", chunk)
    y = COUNTS.copy()
    y[27] = np.nan
    with pytest.raises(ValueError, match=r"data of site 'y' at index 27: the value nan is missing"):
        look(of_batches(8), X, y)
    y[27], y[19] = 2.0, 1.5
    with pytest.raises(ValueError, match=r"'y' at index 19: the value 1\.5 lies outside"):
        look(of_batches(8), X, y)
    inputs = X.copy()
    inputs[25] = np.inf
    with pytest.raises(ValueError, match=r"inputs X of GP site 'f' have the value inf at index 25"):
        look(of_batches(8), inputs, COUNTS)
    look(of_batches(8), X, COUNTS)


@pytest.mark.slow
def test_all_entries_of_two_plates_are_looked_at(monkeypatch):
    monkeypatch.setattr(batches, "_ROWS_AT_ONCE", 16)

    def model(X, y):
        outputs = numpyro.plate("outputs", 6, subsample_size=2, dim=-2)
        data = numpyro.plate("data", X.shape[0], subsample_size=4, dim=-1)
        with outputs as p, data as i:
            values = y[p[:, None], i]
        f = latent(X[i])
        with outputs, data:
            numpyro.sample("y", dist.Normal(f, 0.1), obs=values)

    y = np.tile(Y[:12], (6, 1))
    look(model, X[:12], y)
    y[5, 11] = np.nan
    with pytest.raises(ValueError, match=r"data of site 'y' at index \(5, 11\): the value nan"):
        look(model, X[:12], y)


def test_one_batch_as_argument_is_all_there_is():
    def model(X, y, total):
        f = latent(X)
        with numpyro.plate("data", total, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    look(model, X[:5], Y[:5], N)
    y = Y[:5].copy()
    y[3] = np.nan
    with pytest.raises(ValueError, match="at index 3: the value nan is missing"):
        look(model, X[:5], y, N)


# ---- inducing inputs -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "inducing", "pattern"),
    [
        (np.stack([X, X], 1), Z, r"'f' have shape \(6,\).*\(30, 2\).*number of columns"),
        (np.stack([X, X], 1), np.ones((6, 3)), r"\(6, 3\).*\(30, 2\).*number of columns"),
        (X, np.ones((6, 2)), r"'f' have shape \(6, 2\).*\(30,\).*number of columns"),
        (X, np.r_[Z, Z[:2]], r"GP site 'f' have 2 duplicate rows.*singular.*inducing\.greedy"),
        (X, np.linspace(0, 1, 40), r"'f' has 40 inducing inputs.*30 data points.*inducing=None"),
        (X, np.r_[Z, np.nan], r"inducing inputs of GP site 'f'.*value nan at index 6"),
        (X, np.zeros(0), r"inducing inputs of GP site 'f' are empty"),
        (X, {"g": Z}, r"inducing has inputs for \['g'\].*GP sites of the model are \['f'\]"),
    ],
)
def test_inducing_inputs(inputs, inducing, pattern):
    with pytest.raises(ValueError, match=pattern):
        init(normal, inputs, Y, inducing=inducing)


def test_inducing_inputs_that_differ_in_their_axes_alone_are_taken():
    """(m, 1) for inputs of shape (n,), and (m,) for inputs of shape (n, 1)."""
    _, state = init(normal, X, Y, inducing=Z[:, None])
    assert state.optim_state["f_auto_inducing"].shape == (6,)
    _, state = init(normal, X[:, None], Y, inducing=Z)
    assert state.optim_state["f_auto_inducing"].shape == (6, 1)


def one_batch(X, y, total):
    f = latent(X)
    with numpyro.plate("data", total, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def test_more_inducing_inputs_than_rows_of_a_minibatch_are_taken():
    init(one_batch, X[:5], Y[:5], N)
    with pytest.raises(ValueError, match=r"6 inducing inputs.*5 data points.*subsample_size"):
        init(one_batch, X[:5], Y[:5], 5)


def test_point_sites_need_all_rows():
    pattern = r"GP site 'f' is given a minibatch of 5 rows, but inducing=None.*sites=\"tied\""
    with pytest.raises(ValueError, match=pattern):
        init(one_batch, X[:5], Y[:5], N, inducing=None)


# ---- densities that are not finite, and supports that move -------------------------------------


def test_data_at_the_edge_of_a_support():
    edge = np.clip(np.abs(Y) / 2.0, 0.0, 0.9)
    edge[3] = 0.0
    model = likelihood(lambda f: dist.Beta(2.0 + jnp.exp(f), 2.0))
    with pytest.raises(ValueError, match=r"log density.*'y' is -inf at index 3.*0\.0.*inwards"):
        look(model, X, edge)
    look(model, X, np.clip(edge, 1e-3, 1.0))


@pytest.mark.parametrize(
    "distribution",
    [lambda f: dist.Uniform(f - 3.0, f + 3.0), lambda f: dist.Uniform(0.0, jnp.exp(f))],
)
def test_supports_that_move(distribution):
    """NumPyro's Uniform has no -inf outside: the fit would be one of a wrong density."""
    pattern = r"support of site 'y', a Uniform, moves with the GPs.*at index \d+ lie outside"
    with pytest.raises(ValueError, match=pattern):
        look(likelihood(distribution), X, np.abs(Y) / 20.0)


def test_truncated_data_are_taken():
    look(likelihood(lambda f: dist.TruncatedNormal(f, 0.3, low=0.0)), X, np.abs(Y))


def test_range_that_is_left_far_out():
    def model(X, y=None):
        f = numpyro.sample("f", GP(0.02 * kernels.RBF(0.3), X, mean=0.5))
        with data_plate(X):
            numpyro.sample("y", dist.Bernoulli(probs=f), obs=y)

    with pytest.warns(UserWarning, match=r"BernoulliProbs whose probs leaves its range where a GP"):
        look(model, X, (Y > 0).astype(int))


def test_a_gp_that_is_not_sampled():
    def model(X, y=None):
        f = GP(kernels.RBF(0.3), X)
        with data_plate(X):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    with pytest.raises(TypeError) as error:
        look(model, X, Y)
    assert 'sample it, as in f = numpyro.sample("f", GP(kernel, X))' in error.value.__notes__[0]


def test_other_errors_of_a_model_with_a_gp_are_not_blamed_on_it():
    def model(X, y=None):
        gp = GP(kernels.RBF(0.3), X)
        f = numpyro.sample("f", gp)
        numpyro.sample("y", dist.Normal(f[:3] + f[:2], 0.1), obs=y)

    with pytest.raises(TypeError) as error:
        look(model, X, Y)
    assert "sample it" not in error.value.__notes__[0]


def test_warnings_point_at_the_line_of_the_user():
    with pytest.warns(UserWarning, match="inducing inputs of GP site 'f' lie further") as found:
        init(normal, X, Y, inducing=Z + 100.0)
    assert {warning.filename for warning in found} == {__file__}


def test_inducing_inputs_somewhat_outside_are_taken():
    init(normal, X, Y, inducing=np.linspace(-0.5, 1.5, 6))


def test_threads_that_leave_in_another_order_leave_validation_on():
    first, second = unvalidated(), unvalidated()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    dist.Normal(0.0, -1.0)
    second.__exit__(None, None, None)
    with pytest.raises(ValueError, match="invalid scale"):
        dist.Normal(0.0, -1.0)
