"""The contracts from outside: a site rule and an approximation that know nothing of the package's.

The approximation is not by inducing values and shares no code with those of the package: sites of
points with textbook formulas, dense and without whitening. What it must give is known to the last
digits, because the package has the same family.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import Array

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, loo, to_arviz
from numpyro_tsvgp.gaussian.approximation import Local, Noise
from numpyro_tsvgp.gaussian.linalg import add_jitter, cholesky, cholesky_of_residual
from numpyro_tsvgp.gaussian.quadrature import Marginals, SiteGradients, site_gradients
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.guides.guide import GPGuide
from numpyro_tsvgp.infer.steps.rules import Blending

RNG = np.random.RandomState(4)
X = np.sort(RNG.uniform(-2.0, 2.0, 16))
OUTLIERS = np.sin(2.0 * X) + 0.2 * RNG.randn(16) + 3.0 * (np.arange(16) % 6 == 2)
COUNTS = RNG.poisson(np.exp(0.5 + np.sin(2.0 * X))).astype(float)
NEW = np.array([-2.2, -0.3, 0.9])
KEY = jax.random.key(0)


# ---- a site rule -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Floored(Blending):
    """Curvature is raised to a floor, and steps are shorter than asked for."""

    floor: float
    damping: float = 1.0

    def refuses(self, approximation):
        return "it is for sites of points" if approximation.keeps_sums else None

    def asks(self, query):
        return {
            name: SiteGradients(g.alpha, jnp.maximum(g.beta, self.floor))
            for name, g in query.gradients.items()
        }

    def step(self, carry, asked, rate):
        return super().step(carry, asked, self.damping * rate)


def robust(X, y=None):
    f = numpyro.sample("f", GP(kernels.Matern52(0.8), X, mean=0.5))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(3.0, f, 0.3), obs=y)


def test_a_rule_of_ones_own():
    svi = TSVGP(robust, AutoDualGaussian(robust), None, rule=Floored(0.4), site_lr=0.5, e_steps=80)
    fit = svi.run(KEY, 1, X, OUTLIERS, progress_bar=False).fit
    assert fit.rule == Floored(0.4)
    linear, quadratic = fit.params["f_auto_linear"][0], fit.params["f_auto_quadratic"][0]
    # At its fixed point the sites are what the rule makes of the likelihood, as statements on f.
    q = fit.marginals()["f"]

    def likelihood(values):
        return dist.StudentT(3.0, values["f"], 0.3).log_prob(OUTLIERS).sum()

    _, asked = site_gradients(
        likelihood, {"f": Marginals(q.mean[None], q.variance[None])}, fit.nodes()
    )
    alpha, beta = (x[0] for x in asked["f"])
    assert (beta < 0.4).any() and (beta > 0.4).any()
    np.testing.assert_allclose(quadratic, np.maximum(beta, 0.4), rtol=1e-6)
    np.testing.assert_allclose(linear, alpha + quadratic * q.mean, rtol=1e-6, atol=1e-6)
    # Steps of half the size lead to where steps of half the rate lead.
    half = TSVGP(
        robust, AutoDualGaussian(robust), None, rule=Floored(0.4, 0.5), site_lr=1.0, e_steps=80
    )
    same = half.run(KEY, 1, X, OUTLIERS, progress_bar=False)
    np.testing.assert_allclose(same.params["f_auto_linear"][0], linear, rtol=1e-12)
    tied = TSVGP(robust, AutoDualGaussian(robust, X[::4]), None, rule=Floored(0.4))
    with pytest.raises(ValueError, match="GP site 'f': it is for sites of points"):
        tied.init(KEY, X, OUTLIERS)


# ---- an approximation ------------------------------------------------------------------------


class Sites(NamedTuple):
    """What E-steps carry: sites about f without its mean, each (1, n)."""

    linear: Array
    quadratic: Array

    def add(self, sites, at):
        return Sites(self.linear + sites.linear, self.quadratic + sites.quadratic)

    def blend(self, sites, at, rate):
        return Sites(*((1 - rate) * old + rate * new for old, new in zip(self, sites, strict=True)))


class Moments(NamedTuple):
    mean: Array  # (n,), without the prior mean
    covariance: Array  # (n, n)


def prior(process, inputs):
    return add_jitter(process.kernel(inputs, inputs)[0], process.jitter)


def moments(K, sites):
    """S = K - K (K + W^-1)^-1 K, with roots of W because W may be zero."""
    root = jnp.sqrt(sites.quadratic[0])
    half = jnp.linalg.solve(jnp.eye(len(K)) + root[:, None] * K * root, root[:, None] * K)
    S = K - (K * root) @ half
    S = 0.5 * (S + S.T)
    return Moments(S @ sites.linear[0], S)


def divergence(K, q):
    m, S = q
    trace = jnp.trace(jnp.linalg.solve(K, S)) + m @ jnp.linalg.solve(K, m)
    return 0.5 * (trace - len(m) + jnp.linalg.slogdet(K)[1] - jnp.linalg.slogdet(S)[1])


class Draws(NamedTuple):
    """f = mean + A^T root eps + rest eps'."""

    mean: Array  # (1, n)
    explained: Array  # (n, inputs)
    rest: Array  # (n, n)

    @property
    def covariance(self):
        return self.explained @ self.explained.T + self.rest @ self.rest.T

    @property
    def variance(self):
        return jnp.diagonal(self.covariance)[None]

    def noise_shape(self):
        n, inner = self.explained.shape
        return Noise((1, inner), (1, n))

    def draw(self, noise):
        return self.mean + noise.inner @ self.explained.T + noise.rest @ self.rest.T

    def log_prob(self, values):
        return jax.scipy.stats.multivariate_normal.logpdf(values, self.mean[0], self.covariance)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Textbook:
    """Sites of points about f, at the inputs where they were made."""

    linear: Array
    quadratic: Array
    inputs: Array
    prior_mean: Array

    optimized: ClassVar[frozenset[str]] = frozenset()
    keeps_sums: ClassVar[bool] = False
    keeps_points: ClassVar[bool] = True
    follows_inputs: ClassVar[bool] = True

    inducing = mean_inputs = property(lambda self: self.inputs)
    known_means = property(lambda self: self.prior_mean)
    largest_factor = property(lambda self: self.inputs.shape[0])
    input_columns = property(lambda self: 1)

    def centred(self, mean):
        return Sites(self.linear - self.quadratic * mean, self.quadratic)

    def posterior(self, process):
        K = prior(process, self.inputs)
        return K, moments(K, self.centred(process.means))

    def at_data(self, process):
        return TextbookAtData(self.synced(process), process, prior(process, process.X))

    at_data_for_gradient = at_data

    def synced(self, process):
        return dataclasses.replace(self, inputs=process.X, prior_mean=process.loc)

    def marginals(self, process):
        K, (m, S) = self.posterior(process)
        k = process.kernel(self.inputs, process.X)[0]
        A = jnp.linalg.solve(K, k)
        explained = (A * (S @ A)).sum(0)
        variance = process.kernel.diag(process.X)[0] - (k * A).sum(0) + explained
        return Local((A.T @ m)[None], variance[None], explained[None])

    def marginals_at_data(self, process):
        at = self.at_data(process)
        return at.local(at.posterior(at.start()))

    def kl(self, process):
        return divergence(*self.posterior(process))

    def joint(self, process):
        K, (m, S) = self.posterior(process)
        k = process.kernel(self.inputs, process.X)[0]
        A = jnp.linalg.solve(K, k)
        left = process.kernel(process.X, process.X)[0] - k.T @ A
        scale = process.kernel.diag(process.X).mean()
        rest = cholesky_of_residual(left, scale, process.jitter)
        return Draws(process.loc + (A.T @ m)[None], A.T @ cholesky(S), rest)

    def joint_factor(self, process):
        return process.rows

    def noise_shape(self, process):
        return Noise((1, self.inputs.shape[0]), (1, process.rows))

    def draw_marginally(self, process, noise):
        return self.joint(process).draw(noise)

    def log_ratio(self, process, noise):
        K, (m, S) = self.posterior(process)
        root = cholesky(S)
        u = m + noise.inner[..., 0, :] @ root.T
        log_pdf = jax.scipy.stats.multivariate_normal.logpdf
        return log_pdf(u, jnp.zeros(len(m)), K) - log_pdf(u, m, S)

    def without_data(self):
        zero = jnp.zeros_like(self.linear)
        return dataclasses.replace(self, linear=zero, quadratic=zero)

    def responses(self, process):
        K, (_, S) = self.posterior(process)
        A = jnp.linalg.solve(K, process.kernel(self.inputs, process.X)[0])
        return (S @ A).T[None]

    def factors(self, process):
        return self.posterior(process)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TextbookAtData:
    kept: Textbook
    process: object
    K: Array
    features: None = None

    def start(self):
        return self.kept.centred(self.process.loc)

    def posterior(self, carry):
        return moments(self.K, carry)

    def point_sites(self, carry):
        return PointSites(*carry)

    def local(self, posterior):
        mean, variance = posterior.mean[None], jnp.diagonal(posterior.covariance)[None]
        return Local(mean, variance, variance)

    def divergence(self, posterior):
        return divergence(self.K, posterior)

    def count_floored(self, posterior):
        return jnp.zeros((), int)

    def keep(self, carry):
        linear = carry.linear + carry.quadratic * self.process.loc
        return dataclasses.replace(self.kept, linear=linear, quadratic=carry.quadratic)

    def bound(self):
        return self.fresh_bound(self.kept)

    def fresh_bound(self, kept):
        q = self.posterior(kept.centred(self.process.loc))
        local = self.local(q)
        return Marginals(local.mean, local.variance), self.divergence(q)


class TextbookGuide(GPGuide):
    def kind(self, name):
        return Textbook

    def initial(self, name, site, reading):
        process = site.process()
        zero = jnp.zeros((1, process.rows))
        return Textbook(zero, zero, process.X, process.loc)


def counts(X, y=None):
    lengthscale = numpyro.param("lengthscale", 0.8, constraint=dist.constraints.positive)
    b = numpyro.sample("b", dist.Normal(0.0, 2.0))
    f = numpyro.sample("f", GP(kernels.Matern52(lengthscale), X, mean=lambda x: b))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.fixture(scope="module")
def fits():
    """The same fit with an approximation of the package and with our own."""
    out = []
    for guide in (AutoDualGaussian(counts), TextbookGuide(counts)):
        svi = TSVGP(counts, guide, optax.adam(0.05))
        out.append(svi.run(KEY, 30, X, COUNTS, progress_bar=False))
    return out


@pytest.mark.slow
def test_an_approximation_of_ones_own(fits):
    theirs, ours = fits
    assert set(ours.params) == set(theirs.params)  # the fields have the same names
    # Rounding through a solve with K, whose condition number is 1e4.
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-9)
    for name, value in theirs.params.items():
        np.testing.assert_allclose(ours.params[name], value, rtol=1e-6, atol=1e-8, err_msg=name)
    assert ours.losses[-1] < ours.losses[0] - 1.0
    for at in ((NEW,), ()):  # elsewhere, and at the data
        a, b = (result.fit.marginals(*at)["f"] for result in fits)
        np.testing.assert_allclose(a.mean, b.mean, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(a.variance, b.variance, rtol=1e-6, atol=1e-7)
    draws = ours.fit.sample(jax.random.key(1), NEW, sample_shape=(4000,))["f"]
    q = ours.fit.marginals(NEW)["f"]
    assert (np.abs(draws.mean(0) - q.mean) < 5 * np.sqrt(q.variance / 4000)).all()
    np.testing.assert_allclose(draws.var(0), q.variance, rtol=5 * np.sqrt(2 / 4000))


@pytest.mark.slow
def test_diagnostics_do_not_ask_which_approximation_it_is(fits):
    a, b = (loo(result.fit, threshold=1.0) for result in fits)
    name = "elpd_i" if hasattr(a, "elpd_i") else "loo_i"  # of ArviZ 1 and before
    np.testing.assert_allclose(a[name], b[name], rtol=1e-5)
    audit = fits[1].fit.audit(jax.random.key(2))
    assert not audit.concerns
    idata = to_arviz(jax.random.key(3), fits[1].fit, num_samples=20)
    assert idata["posterior"]["f"].shape == (1, 20, 16)
