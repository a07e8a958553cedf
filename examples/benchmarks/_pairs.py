"""Models and data that benchmarks of options share: fourteen kinds of data, most of them real.

Every model has one lengthscale and one variance, with the same priors. Inputs are of order one.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm

from numpyro_tsvgp import GP, kernels

DATA = Path(__file__).parent.parent / "data"
HYPER = ("lengthscale", "variance")
PRIOR = {"lengthscale": (-1.0, 0.7), "variance": (0.5, 1.0)}  # of their logarithms
CUTS = jnp.array([-1.0, 0.0, 1.0])
# Rows that a larger sample must leave to predict.
LEFT = 100


def csv_of(name, header=1):
    return np.loadtxt(DATA / f"{name}.csv", delimiter=",", skiprows=header, ndmin=2)


def inputs_of(table):
    X = table[:, :-1]
    return (X - X.mean(0)) / (X.std(0) + 1e-9) / np.sqrt(X.shape[1])


def classification(name, header=1):
    table = csv_of(name, header)
    return inputs_of(table), (table[:, -1] > 0).astype(float)


def regression(name):
    table = csv_of(name)
    return inputs_of(table), (table[:, -1] - table[:, -1].mean()) / table[:, -1].std()


def simulated(draw, seed):
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(size=700))
    f = 1.2 * np.sin(7 * X) + 0.5 * np.cos(15 * X)
    return X, np.asarray(draw(f, rng), float)


def coal():
    years = np.arange(1851, 1963)
    return (years - 1851) / 111.0, np.histogram(csv_of("coal"), np.arange(1851, 1964))[0] * 1.0


def two_columns(name):
    x, y = csv_of(name).T
    return (x - x.min()) / np.ptp(x), (y - y.mean()) / y.std()


def tvnews():
    age, days = csv_of("tvnews").T
    return (age - 18) / 60, np.digitize(days, [1, 3, 6])


def digits():
    data = np.load(DATA / "digits.npz")
    keep = np.isin(data["y"], (3, 5, 8))
    return data["X"][keep] / 32.0, np.searchsorted((3, 5, 8), data["y"][keep])


class Tobit(dist.Distribution):
    """A normal distribution of which values above one are known as one."""

    arg_constraints = {"loc": dist.constraints.real}
    support = dist.constraints.real

    def __init__(self, loc, validate_args=None):
        self.loc = loc
        super().__init__(jnp.shape(loc), validate_args=validate_args)

    def log_prob(self, value):
        inside = norm.logpdf(value, self.loc, 0.3)
        return jnp.where(value < 1.0, inside, norm.logsf(1.0, self.loc, 0.3))

    def sample(self, key, sample_shape=()):
        noise = jax.random.normal(key, sample_shape + self.batch_shape)
        return jnp.minimum(self.loc + 0.3 * noise, 1.0)


def logit(f):
    return dist.Bernoulli(logits=f)


# name: (data, likelihood, functions, whether data are classes)
PAIRS = {
    "ionosphere, logit": (lambda: classification("ionosphere", 0), logit, 1, True),
    "sonar, logit": (lambda: classification("sonar", 0), logit, 1, True),
    "diabetes, logit": (lambda: classification("diabetes"), logit, 1, True),
    "banana, probit": (
        lambda: classification("banana"),
        lambda f: dist.Bernoulli(probs=jnp.clip(norm.cdf(f), 1e-9, 1 - 1e-9)),
        1,
        True,
    ),
    "coal, Poisson": (coal, lambda f: dist.Poisson(jnp.exp(f)), 1, False),
    "simulated, negative binomial": (
        lambda: simulated(
            lambda f, rng: rng.poisson(np.exp(1 + f) * rng.gamma(2.0, 0.5, f.shape)), 1
        ),
        lambda f: dist.NegativeBinomial2(jnp.exp(1 + f), 2.0),
        1,
        False,
    ),
    "simulated, zero-inflated": (
        lambda: simulated(
            lambda f, rng: rng.poisson(np.exp(1 + f)) * (rng.uniform(size=f.shape) > 0.3), 2
        ),
        lambda f: dist.ZeroInflatedPoisson(0.3, jnp.exp(1 + f)),
        1,
        False,
    ),
    "motorcycle, Student-t": (
        lambda: two_columns("mcycle"),
        lambda f: dist.StudentT(4.0, f, 0.35),
        1,
        False,
    ),
    "simulated, Laplace": (
        lambda: simulated(lambda f, rng: f + rng.laplace(scale=0.3, size=f.shape), 3),
        lambda f: dist.Laplace(f, 0.3),
        1,
        False,
    ),
    "motorcycle, two GPs": (
        lambda: two_columns("mcycle"),
        lambda f: dist.Normal(f[..., 0, :], jnp.exp(f[..., 1, :] - 1.0)),
        2,
        False,
    ),
    "tvnews, ordinal": (tvnews, lambda f: dist.OrderedLogistic(f, CUTS), 1, True),
    "digits, softmax": (
        digits,
        lambda f: dist.Categorical(logits=jnp.moveaxis(f, -2, -1)),
        3,
        True,
    ),
    "simulated, censored": (
        lambda: simulated(
            lambda f, rng: np.minimum(f + 0.3 * rng.standard_normal(f.shape), 1.0), 4
        ),
        Tobit,
        1,
        False,
    ),
    "concrete, Gaussian": (
        lambda: regression("concrete"),
        lambda f: dist.Normal(f, 0.4),
        1,
        False,
    ),
}
GAUSSIAN = "concrete, Gaussian"


def model_of(likelihood, functions):
    def model(X, y=None):
        lengthscale, variance = (
            numpyro.sample(k, dist.LogNormal(*PRIOR[k])) for k in ("lengthscale", "variance")
        )
        gp = GP(variance * kernels.Matern52(lengthscale), X)
        if functions == 1:
            f = numpyro.sample("f", gp)
        else:
            with numpyro.plate("functions", functions):
                f = numpyro.sample("f", gp)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(f), obs=y)

    return model


class Pair:
    """A model, and data to learn from and to predict: `rows` and up to 200 others."""

    def __init__(self, name, rows, quick=False):
        load, self.likelihood, self.functions, self.classes = PAIRS[name]
        X, y = load()
        rows = 12 if quick else min(rows, max(len(y) - LEFT, 60))
        order = np.random.default_rng(0).permutation(len(y))
        train, test = np.sort(order[:rows]), order[rows : rows + 200]
        self.X, self.y, self.X_test, self.y_test = X[train], y[train], X[test], y[test]
        self.model = model_of(self.likelihood, self.functions)
        self.name, self.quick = name, quick
