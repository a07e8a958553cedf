"""Markov sites against dense t-VGP, exact Gaussian answers and tinygp."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import tinygp
from scipy import stats

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    collapse,
    influence,
    kernels,
    load,
    loo,
    online,
    save,
)
from numpyro_tsvgp.gaussian.approximation import Noise
from numpyro_tsvgp.gaussian.quadrature import GaussHermite
from numpyro_tsvgp.gaussian.whitened import PointSites
from numpyro_tsvgp.infer.standing import doubts
from numpyro_tsvgp.infer.steps.rules import Blending
from numpyro_tsvgp.model.arguments import Call

positive = dist.constraints.positive
# Dense covariances need some jitter; what it does to answers is of this size, 1e-12 times 1e2.
JITTER = 1e-13
RNG = np.random.default_rng(0)


def hyperparameters():
    lengthscale = numpyro.param("lengthscale", 0.8, constraint=positive)
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    return scale * kernels.Matern52(lengthscale), level


def counts(t, y=None):
    kernel, level = hyperparameters()
    f = numpyro.sample("f", GP(kernel, t, mean=level, jitter=JITTER))
    with numpyro.plate("data", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def classes(t, y=None):
    kernel, level = hyperparameters()
    f = numpyro.sample("f", GP(kernel, t, mean=level, jitter=JITTER))
    with numpyro.plate("data", t.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def robust(t, y=None):
    kernel, level = hyperparameters()
    f = numpyro.sample("f", GP(kernel, t, mean=level, jitter=JITTER))
    with numpyro.plate("data", t.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, f, 0.3), obs=y)


def heteroscedastic(t, y=None):
    kernel, level = hyperparameters()
    f = numpyro.sample("f", GP(kernel, t, mean=level, jitter=JITTER))
    g = numpyro.sample("g", GP(kernels.Matern32(2.0), t, mean=-1.0, jitter=JITTER))
    with numpyro.plate("data", t.shape[0]), numpyro.handlers.mask(mask=t < 5.5):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


def data_of(model, n):
    t = np.random.default_rng(n).permutation(np.linspace(0.0, 6.0, n))
    f = np.sin(2 * t)
    if model is counts:
        return jnp.asarray(t), jnp.asarray(RNG.poisson(np.exp(f)))
    if model is classes:
        return jnp.asarray(t), jnp.asarray(
            (RNG.uniform(size=n) < 1 / (1 + np.exp(-2 * f))).astype(int)
        )
    return jnp.asarray(t), jnp.asarray(f + 0.3 * RNG.standard_t(4, n))


def both(model, n, steps=8, **options):
    t, y = data_of(model, n)
    found = {}
    for markov in (True, False):
        guide = AutoDualGaussian(model, markov=markov)
        svi = TSVGP(model, guide, optax.adam(0.05), **options)
        found[markov] = svi, svi.run(jax.random.key(0), steps, t, y, progress_bar=False)
    return t, y, found


@pytest.mark.parametrize(
    ("model", "n"),
    [
        pytest.param(counts, 40, marks=pytest.mark.slow),
        pytest.param(counts, 200, marks=pytest.mark.slow),
        pytest.param(classes, 200, marks=pytest.mark.slow),
        pytest.param(robust, 200, marks=pytest.mark.slow),
        pytest.param(heteroscedastic, 200, marks=pytest.mark.slow),
    ],
)
def test_it_is_dense_tvgp(model, n):
    """Sites, losses, marginals, gradients far from convergence, leaving out: all of it."""
    t, y, found = both(model, n)
    (svi, ours), (dense_svi, dense) = found[True], found[False]
    np.testing.assert_allclose(ours.losses, dense.losses, rtol=1e-8)
    for key, value in dense.params.items():
        np.testing.assert_allclose(ours.params[key], value, atol=1e-8, err_msg=key)
    new = jnp.array([-2.0, 0.0, 1.234, 3.0, 5.9, 40.0])
    for name, q in dense.fit.marginals(new).items():
        mine = ours.fit.marginals(new)[name]
        np.testing.assert_allclose(mine.mean, q.mean, atol=1e-8)
        np.testing.assert_allclose(mine.variance, q.variance, atol=1e-8)

    @partial(jax.jit, static_argnums=0)
    def slope(driver, state, free):
        call = Call((t, y), {})
        return jax.grad(lambda f: driver.loss(state, f, jax.random.key(0), call))(free)

    gradients = []
    for driver, result in ((svi, ours), (dense_svi, dense)):
        # Sites of other hyperparameters, so that the gradient is not that of log Z alone.
        free = jax.tree.map(lambda x: x + 0.3, driver.free(result.state.optim_state))
        gradients.append(slope(driver, result.state, free))
    for key, value in gradients[1].items():
        np.testing.assert_allclose(gradients[0][key], value, rtol=1e-8, atol=1e-8, err_msg=key)
    if n < 200:
        return
    mine, theirs = (influence(result.fit) for result in (ours, dense))
    for name in theirs:
        np.testing.assert_allclose(mine[name], theirs[name], atol=1e-8)
    mine, theirs = (loo(result.fit, threshold=1.0) for result in (ours, dense))
    pointwise = "elpd_i" if hasattr(theirs, "elpd_i") else "loo_i"  # ArviZ 1.x, 0.x
    for field in (pointwise, "leverage"):
        np.testing.assert_allclose(mine[field], theirs[field], atol=1e-8)


@pytest.mark.slow
def test_a_fit_of_many_points_in_single_precision():
    """Losses, hyperparameters and marginals of a hundred thousand counts, beside float64."""
    rng = np.random.default_rng(5)
    n = 100_000
    # Counted from the middle: the last digits of the times are those of gaps of 0.01.
    t = np.sort(rng.uniform(-500.0, 500.0, n)).astype(np.float32)
    y = rng.poisson(np.exp(np.sin(2.0 * t)))
    found = {}
    for dtype in (np.float32, np.float64):
        with jax.enable_x64(dtype == np.float64):

            def model(t, y=None):
                lengthscale = numpyro.param("lengthscale", 0.8, constraint=positive)
                f = numpyro.sample("f", GP(kernels.Matern52(lengthscale), t))
                with numpyro.plate("data", t.shape[0]):
                    numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

            svi = TSVGP(model, AutoDualGaussian(model, markov=True), optax.adam(0.05))
            fit = svi.run(jax.random.key(0), 6, t.astype(dtype), y, progress_bar=False)
            q = fit.fit.marginals(np.linspace(-499.0, 520.0, 500).astype(dtype))["f"]
            assert q.mean.dtype == dtype
            found[dtype] = jax.tree.map(np.asarray, (fit.losses, fit.params["lengthscale"], q))
    (losses, scale, q), (exact_losses, exact_scale, exact) = found.values()
    np.testing.assert_allclose(losses, exact_losses, rtol=2e-5)
    np.testing.assert_allclose(scale, exact_scale, rtol=1e-3)
    assert (np.abs(q.mean - exact.mean) / np.sqrt(exact.variance)).max() < 0.05
    np.testing.assert_allclose(q.variance, exact.variance, rtol=0.02)


@pytest.fixture(scope="module")
def small():
    t, y = data_of(counts, 40)
    svi = TSVGP(counts, AutoDualGaussian(counts, markov=True), None, site_lr=1.0)
    return t, y, svi.run(jax.random.key(0), 10, t, y, progress_bar=False)


def latent(fit, t):
    return fit.guide.latents(fit.read(fit.inputs((t,), {}), fit.hyper), fit.params)["f"]


@pytest.mark.slow
def test_joint_draws(small):
    """Draws are linear in their noise, J e + m: J J^T is the covariance that the dense fit has."""
    t, y, result = small
    new = jnp.array([-1.0, 1.1, 1.3, 1.3, 9.0, 1e4])
    dense = TSVGP(counts, AutoDualGaussian(counts), None, site_lr=1.0)
    q = dense.run(jax.random.key(0), 10, t, y, progress_bar=False).fit
    exact = latent(q, new)
    exact = exact.approximation.joint(exact.process)
    w = exact.w[0] @ exact.inverse[0].T
    covariance = w @ w.T + exact.residual_chol[0] @ exact.residual_chol[0].T
    ours = latent(result.fit, new)
    shape = ours.approximation.noise_shape(ours.process)
    joint = ours.approximation.joint(ours.process)
    none = Noise(*(jnp.zeros(part) for part in shape))
    moved = jax.jit(jax.jacfwd(joint.draw))(none)
    J = jnp.concatenate([part.reshape(len(new), -1) for part in moved], 1)
    np.testing.assert_allclose(J @ J.T, covariance, atol=1e-8)
    np.testing.assert_allclose(joint.draw(none)[0], exact.mean[0], atol=1e-8)
    some = Noise(*(jnp.asarray(RNG.normal(size=part)) for part in shape))
    flat = jnp.concatenate([part.reshape(-1) for part in some])
    np.testing.assert_allclose(joint.draw(some), joint.draw(none) + J @ flat, atol=1e-10)
    apart = jnp.array([-1.0, 1.1, 1.3, 9.0])
    q = latent(result.fit, apart)
    values = jnp.array([[[0.3, 0.5, 0.4, 1.0]]])
    keep = np.array([0, 1, 2, 4])
    exact_density = dist.MultivariateNormal(
        exact.mean[0, keep], covariance[np.ix_(keep, keep)]
    ).log_prob(values[0, 0])
    found = q.approximation.joint(q.process).log_prob(values)[0, 0]
    np.testing.assert_allclose(found, exact_density, atol=1e-4)  # jitter


@pytest.mark.slow
def test_ready_is_the_posterior(small):
    t, _, result = small
    q = latent(result.fit, jnp.array([7.0, -1.0, float(t[3]), 2.345]))
    ready = q.approximation.ready(q.process).marginals(q.process)
    for found, exact in zip(ready, q.approximation.marginals(q.process), strict=True):
        np.testing.assert_allclose(found, exact, atol=1e-12)


@pytest.mark.slow
def test_points_come_and_go(small):
    """Times that are inserted as new data, and taken out again."""
    t, _, result = small
    whole = latent(result.fit, t)
    fewer, process = whole.approximation, whole.process
    sites = PointSites(*(x[:, :3] for x in fewer.centred(process.loc)))
    gone = latent(result.fit, t[:3]).process
    without = fewer.without_points(gone, sites)
    assert without.linear.shape == (1, len(t) - 3)
    gone = dataclasses.replace(gone, means=jnp.broadcast_to(gone.loc[:, :1], (1, len(t) - 3)))
    at = without.at_new_data(gone)
    again = at.keep(at.start().add(sites, at.features))
    local = at.local(at.posterior(at.start().add(sites, at.features)))
    np.testing.assert_allclose(
        local.mean, whole.approximation.marginals_at_data(process).mean[:, :3], atol=1e-12
    )
    np.testing.assert_allclose(again.linear.sum(), fewer.linear.sum())
    with pytest.raises(ValueError, match="are not in the fit"):
        without.without_points(gone, sites)


@pytest.mark.slow
def test_saved_and_loaded(small, tmp_path):
    t, _, result = small
    save(tmp_path / "fit.npz", result.fit)
    fit = load(tmp_path / "fit.npz", model=counts)
    np.testing.assert_array_equal(fit.marginals(t)["f"].mean, result.fit.marginals(t)["f"].mean)


def gaussian(t, y=None):
    f = numpyro.sample("f", GP(1.3 * kernels.Matern32(0.8), t, mean=0.2))
    with numpyro.plate("data", t.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def fitted(t, y):
    svi = TSVGP(gaussian, AutoDualGaussian(gaussian, markov=True), None, site_lr=1.0)
    return svi.run(jax.random.key(0), 1, t, y, progress_bar=False)


def test_gaussian_data_are_exact_online():
    """Dense algebra for the evidence, and for what is forecast after data one by one."""
    t = np.sort(np.random.default_rng(3).uniform(0.0, 20.0, 34))
    y, new = np.sin(t), np.array([20.5, 23.0])
    result = fitted(jnp.asarray(t[:30]), jnp.asarray(y[:30]))

    def covariance(a, b):
        r = np.sqrt(3.0) * np.abs(a[:, None] - b) / 0.8
        return 1.3 * (1 + r) * np.exp(-r)

    first = stats.multivariate_normal(
        np.full(30, 0.2), covariance(t[:30], t[:30]) + 0.09 * np.eye(30)
    )
    np.testing.assert_allclose(-result.losses[-1], first.logpdf(y[:30]), rtol=1e-8)
    end = online(result.fit)
    for i in range(30, 34):
        end = end.update(t[i : i + 1], y[i : i + 1], steps=1)
    assert end.time == t[-1]
    forecast = end.marginals(new)["f"]
    gain = np.linalg.solve(covariance(t, t) + 0.09 * np.eye(34), covariance(t, new)).T
    np.testing.assert_allclose(forecast.mean, 0.2 + gain @ (y - 0.2), atol=1e-8)
    variance = np.diag(covariance(new, new) - gain @ covariance(t, new))
    np.testing.assert_allclose(forecast.variance, variance, atol=1e-8)
    with pytest.raises(ValueError, match="before the end"):
        end.update(t[:1], y[:1])


@pytest.mark.slow
def test_gaussian_likelihood_is_exact_and_online_too():
    """tinygp's quasiseparable solver for the evidence, and filtering for data one by one."""
    t = jnp.asarray(np.sort(RNG.uniform(0.0, 20.0, 50)))
    y, new = jnp.sin(t), jnp.array([20.5, 23.0])
    result = fitted(t, y)
    kernel = 1.3 * tinygp.kernels.quasisep.Matern32(scale=0.8)
    process = tinygp.GaussianProcess(kernel, t, diag=0.09, mean=0.2)
    np.testing.assert_allclose(-result.losses[-1], process.log_probability(y), rtol=1e-10)
    exact = process.condition(y, new).gp
    q = result.fit.marginals(new)["f"]
    np.testing.assert_allclose(q.mean, exact.mean, atol=1e-9)
    np.testing.assert_allclose(q.variance, exact.variance, atol=1e-9)
    end = online(fitted(t[:45], y[:45]).fit)
    for i in range(45, 50):
        end = end.update(t[i : i + 1], y[i : i + 1], steps=1)
    assert end.time == float(t[-1])
    forecast = end.marginals(new)["f"]
    np.testing.assert_allclose(forecast.mean, exact.mean, atol=1e-9)
    np.testing.assert_allclose(forecast.variance, exact.variance, atol=1e-9)
    with pytest.raises(ValueError, match="before the end"):
        end.update(t[:1], y[:1])


@pytest.mark.slow
def test_kernels_of_their_own_and_of_tinygp_in_a_plate():
    """A batch of kernels over a plate, and a quasiseparable kernel with a hyperparameter."""

    def model(t, y=None):
        scale = numpyro.param("scale", jnp.array([0.5, 1.0, 2.0]), constraint=positive)
        omega = numpyro.param("omega", 2.0, constraint=positive)
        with numpyro.plate("outputs", 3):
            f = numpyro.sample("f", GP(kernels.Matern32(scale[:, None]), t, jitter=JITTER))
        kernel = kernels.as_kernel(tinygp.kernels.quasisep.SHO(omega=omega, quality=2.0))
        g = numpyro.sample("g", GP(kernel, t, jitter=JITTER))
        with numpyro.plate("rows", 3, dim=-2), numpyro.plate("data", t.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f + g)), obs=y)

    t = jnp.asarray(np.random.default_rng(1).permutation(np.linspace(0.0, 6.0, 40)))
    y = jnp.asarray(RNG.poisson(2.0, (3, 40)))
    found = {}
    for markov in (True, False):
        guide = AutoDualGaussian(model, markov=markov)
        svi = TSVGP(model, guide, optax.adam(0.05), quadrature=GaussHermite(10))
        found[markov] = svi.run(jax.random.key(0), 5, t, y, progress_bar=False)
    for key, value in found[False].params.items():
        np.testing.assert_allclose(found[True].params[key], value, atol=1e-7, err_msg=key)


# ---- words -----------------------------------------------------------------------------------


def with_kernel(kernel):
    def model(t, y=None):
        f = numpyro.sample("f", GP(kernel, t))
        with numpyro.plate("data", t.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    return model


@pytest.mark.parametrize(
    ("kernel", "shape", "words"),
    [
        (kernels.RBF(), (5,), "GP site 'f' cannot have Markov sites: the kernel RBF has no"),
        (kernels.Matern12(), (5, 2), "functions of one input, the time"),
        pytest.param(
            *(kernels.Periodic(0.1), (5,)),
            "lengthscale of 0.1 needs order=39, it has order=10",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(kernels.Periodic(base=kernels.Matern12), (5,)),
            "over Matern12 .* too many harmonics",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_refused_in_words(kernel, shape, words):
    model = with_kernel(kernel)
    t = jnp.asarray(np.random.default_rng(0).uniform(size=shape))
    svi = TSVGP(model, AutoDualGaussian(model, markov=True), None)
    with pytest.raises(ValueError, match=words):
        svi.init(jax.random.key(0), t, jnp.zeros(5))


def seasons(t, y=None):
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=positive)
    f = numpyro.sample("f", GP(kernels.Periodic(lengthscale, 1.0), t))
    with numpyro.plate("data", t.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


@pytest.fixture(scope="module")
def strayed():
    """A fit, and the same with a lengthscale that its truncated series is not right for."""
    t = jnp.linspace(0.0, 3.0, 20)
    svi = TSVGP(seasons, AutoDualGaussian(seasons, markov=True), None, site_lr=1.0)
    result = svi.run(jax.random.key(0), 1, t, jnp.sin(6.3 * t), progress_bar=False)
    away = {**result.params, "lengthscale": jnp.asarray(0.2)}
    return svi, result, dataclasses.replace(result.fit, params=away)


WORDS = "kernel of GP site 'f' differs from the kernel by .* needs order=.* it has order=10"


@pytest.mark.slow
def test_a_form_is_looked_at_where_a_fit_stands(strayed):
    _, result, away = strayed
    assert doubts(result.fit) == []
    (words,) = doubts(away)
    assert re.search(WORDS, words)
    with pytest.warns(UserWarning, match=WORDS):
        online(away)
    # A few precise data make an error of a millionth matter; that of 1e-3 is always too large.
    precise = {**result.params, "lengthscale": jnp.asarray(0.45)}
    precise["f_auto_quadratic"] = 1e5 * precise["f_auto_quadratic"]
    (words,) = doubts(dataclasses.replace(result.fit, params=precise))
    assert re.search("worth about .* nats", words)


@pytest.mark.slow
def test_every_way_to_hand_on_a_fit_says_so(strayed):
    svi, result, away = strayed
    (concern,) = [words for words in away.audit(jax.random.key(0)).concerns if "form" in words]
    assert re.search(WORDS, concern)
    with pytest.warns(UserWarning, match=WORDS):
        away.condition(jnp.array([3.1]), jnp.array([0.2]))
    free = svi.init(jax.random.key(0), *result.fit.data.args).optim_state
    state = dataclasses.replace(
        result.state, optim_state={**free, "lengthscale": jnp.log(jnp.asarray(0.2))}
    )
    with pytest.warns(UserWarning, match=WORDS):
        svi.fit(state, *result.fit.data.args)


@pytest.mark.slow
def test_draws_of_a_sampler_are_looked_at():
    def model(t, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", GP(kernels.Periodic(lengthscale, 1.0), t))
        with numpyro.plate("data", t.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    t = jnp.linspace(0.0, 3.0, 20)
    svi = TSVGP(model, AutoDualGaussian(model, markov=True), None, site_lr=1.0)
    fit = svi.run(jax.random.key(0), 1, t, jnp.sin(6.3 * t), progress_bar=False).fit
    with pytest.warns(UserWarning, match=WORDS):
        collapse(fit).marginals({"lengthscale": jnp.array([1.0, 0.2])})


@dataclasses.dataclass(frozen=True)
class Unclipped(Blending):
    """Natural-gradient steps that keep negative curvature."""

    def asks(self, query):
        return query.gradients


@pytest.mark.slow
def test_negative_curvature_has_no_draws():
    """An outlier of a Student-t likelihood asks for it."""

    def model(t, y=None):
        f = numpyro.sample("f", GP(kernels.Matern32(1.0), t))
        with numpyro.plate("data", t.shape[0]):
            numpyro.sample("y", dist.StudentT(3.0, f, 0.3), obs=y)

    t = jnp.linspace(0.0, 6.0, 30)
    y = jnp.sin(t).at[10].add(4.0)
    svi = TSVGP(model, AutoDualGaussian(model, markov=True), None, rule=Unclipped())
    with pytest.warns(UserWarning, match="sites of GP site 'f' hold negative curvature"):
        fit = svi.run(jax.random.key(0), 30, t, y, progress_bar=False).fit
    # The posterior is there, and is that of the sites: precision K^-1 + diag(beta).
    sites = fit.guide.unpack("f", fit.params)
    K = np.asarray(kernels.Matern32(1.0)(t, t))
    S = np.linalg.inv(np.linalg.inv(K) + np.diag(sites.quadratic[0]))
    np.testing.assert_allclose(fit.marginals(t)["f"].variance, np.diag(S), atol=1e-8)
    with pytest.raises(ValueError, match="curvature is zero or more"):
        fit.sample(jax.random.key(0), t)


def test_inducing_inputs_and_markov_sites_exclude_each_other():
    with pytest.raises(ValueError, match="needs no inducing inputs"):
        AutoDualGaussian(gaussian, jnp.zeros(3), markov=True)


@pytest.mark.slow
def test_online_is_for_markov_sites():
    t = jnp.arange(4.0)
    svi = TSVGP(gaussian, AutoDualGaussian(gaussian), None)
    fit = svi.run(jax.random.key(0), 1, t, t, progress_bar=False).fit
    with pytest.raises(ValueError, match="markov=True"):
        online(fit)
