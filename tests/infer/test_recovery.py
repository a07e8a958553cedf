"""What happens when a fit goes wrong, is interrupted or is killed: nothing fitted is lost."""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    FitError,
    TSVGPRunResult,
    TSVGPState,
    kernels,
    load,
    loop,
    save,
    sites,
)
from numpyro_tsvgp.expectations import SiteGradients
from numpyro_tsvgp.features import Features

positive = dist.constraints.positive

N = 30
RNG = np.random.RandomState(0)
X = np.sort(RNG.rand(N))
Y = np.sin(6.0 * X) + 0.1 * RNG.randn(N)
Z = np.linspace(0.0, 1.0, 6)


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    """Nothing here is run long enough to repay optimizing its code."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def model(X, y=None, jitter=None):
    lengthscale = numpyro.param("lengthscale", 0.3, constraint=positive)
    variance = numpyro.param("variance", 1.0, constraint=positive)
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X, jitter=jitter))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def make(optim=None, *, inducing=Z, model=model, **options):
    guide = AutoDualGaussian(model, inducing=inducing, learn_inducing=False)
    return TSVGP(model, guide, optim, **options)


def run(svi, steps, *args, **options):
    return svi.run(jax.random.key(0), steps, *args, progress_bar=False, **options)


def leaves(tree):
    """Leaves as NumPy arrays, random keys as their data."""
    keys = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x)
        for x in jax.tree.leaves(tree)
    ]


def identical(a, b):
    """The same arrays, bit for bit, in the same structure."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(leaves(a), leaves(b), strict=True)
    )


def finite(tree):
    return all(np.isfinite(x).all() for x in leaves(tree))


# ---- curvature -------------------------------------------------------------------------------


def student(X, y=None):
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=positive)
    variance = numpyro.param("variance", 1.0, constraint=positive)
    scale = numpyro.param("scale", 0.5, constraint=positive)
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(3.0, f, scale), obs=y)


def heteroscedastic(X, y=None):
    l1 = numpyro.param("l1", 0.5, constraint=positive)
    l2 = numpyro.param("l2", 1.0, constraint=positive)
    v1 = numpyro.param("v1", 1.0, constraint=positive)
    v2 = numpyro.param("v2", 1.0, constraint=positive)
    f = numpyro.sample("f", GP(kernels.RBF(l1, v1), X))
    g = numpyro.sample("g", GP(kernels.RBF(l2, v2), X, mean=-1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


@pytest.fixture(scope="module")
def outliers():
    """A sine with a tenth of gross outliers, a hundred times the noise."""
    rng = np.random.RandomState(0)
    X = np.sort(rng.rand(150) * 6 - 3)
    y = np.sin(2 * X) + 0.1 * rng.randn(150)
    y[rng.choice(150, 15, replace=False)] += 10 * rng.randn(15)
    return X, y


def _both_curvatures(model, X, y, m, steps):
    inducing = np.linspace(X.min(), X.max(), m)
    losses = {}
    for curvature in ("clip", "riemannian"):
        options = {"site_lr": 0.5, "curvature": curvature, "quadrature": 12}
        svi = make(optax.adam(0.1), inducing=inducing, model=model, **options)
        result = run(svi, steps, X, y)
        assert finite((result.losses, result.params))
        losses[curvature] = np.asarray(result.losses)
    return losses


@pytest.mark.once
def test_curvatures_agree_on_outliers(outliers):
    losses = _both_curvatures(student, *outliers, m=15, steps=100)
    # Both settle at 99.24; Adam leaves them within 0.01 of one another.
    assert losses["clip"][-1] == pytest.approx(99.24, abs=0.05)
    assert losses["riemannian"][-1] == pytest.approx(99.24, abs=0.05)
    # They are different rules: the first steps differ by much more than that.
    assert abs(losses["clip"][3] - losses["riemannian"][3]) > 1.0


@pytest.mark.once
def test_curvatures_agree_on_two_gps(mcycle):
    X, y = mcycle.X[:, 0], mcycle.y
    X, y = (X - X.mean()) / X.std(), (y - y.mean()) / y.std()
    losses = _both_curvatures(heteroscedastic, X, y, m=20, steps=150)
    # Both settle at 76.63; Adam leaves them within 0.01 of one another.
    assert losses["clip"][-1] == pytest.approx(76.63, abs=0.05)
    assert losses["riemannian"][-1] == pytest.approx(76.63, abs=0.05)
    assert abs(losses["clip"][3] - losses["riemannian"][3]) > 1.0


def _student_gradients(y, mean, variance, scale):
    """alpha and beta of Gauss-Hermite quadrature with 20 nodes, differentiated by hand."""
    x, w = np.polynomial.hermite.hermgauss(20)
    x, w = np.sqrt(2.0) * x[:, None], w[:, None] / np.sqrt(np.pi)
    t = (y - mean - np.sqrt(variance) * x) / scale
    slope = 4.0 * t / (3.0 + t**2) / scale  # of the log-density of a Student-t with 3 degrees
    return (w * slope).sum(0), -(w * slope * x).sum(0) / np.sqrt(variance)


@pytest.mark.parametrize("curvature", ["clip", "riemannian"])
def test_step_of_the_precision(outliers, curvature):
    """One E-step in the original coordinates, from the textbook formulas.

    With P the posterior precision and H = K^-1 + sum_i beta_i a_i a_i^T that which is asked for,
    a natural-gradient step of rate r goes to P + r D, D = H - P, and the mean moves by
    r P_new^-1 times the gradient. The Riemannian step adds r^2/2 D P^-1 D to the precision;
    clipping changes H.
    """
    X, y = outliers
    X, y = X[::5], y[::5] + 2.0 * (np.arange(30) % 4 == 0)  # outliers that are not too far
    inducing, rate = np.linspace(-3, 3, 7), 0.6
    svi = make(None, inducing=inducing, model=student, site_lr=rate, curvature=curvature)
    update = jax.jit(svi.update)
    state = svi.init(jax.random.key(0), X, y)
    for _ in range(2):  # away from the start, where the precision is that of the prior
        state, _ = update(state, X, y)
    after, _ = update(state, X, y)
    duals = [svi.guide.dual_parameters(svi.get_params(s), X, y)["f"] for s in (state, after)]
    (xi, gram), (new_xi, new_gram) = jax.tree.map(np.asarray, duals)

    def rbf(A, B):
        return np.exp(-0.5 * (A[:, None] - B[None, :]) ** 2)

    K = rbf(inducing, inducing) + 1e-8 * np.eye(7)
    K_inv = np.linalg.inv(K)
    a = K_inv @ rbf(inducing, X)
    P = K_inv + gram
    S = np.linalg.inv(P)
    m = S @ xi
    mean, variance = a.T @ m, 1.0 - (a * (K @ a)).sum(0) + (a * (S @ a)).sum(0)
    alpha, beta = _student_gradients(y, mean, variance, 0.5)
    assert (beta < -0.1).any() and (beta > 0.1).any()  # or there would be nothing to choose
    if curvature == "clip":
        beta = np.maximum(beta, 0.0)
        asked = a @ (alpha + beta * mean)
        np.testing.assert_allclose(new_gram, (1 - rate) * gram + rate * (a * beta) @ a.T, **CLOSE)
        np.testing.assert_allclose(new_xi, (1 - rate) * xi + rate * asked, **CLOSE)
    else:
        D = K_inv + (a * beta) @ a.T - P
        new_P = P + rate * D + 0.5 * rate**2 * D @ S @ D
        new_m = m + rate * np.linalg.solve(new_P, a @ alpha - K_inv @ m)
        np.testing.assert_allclose(K_inv + new_gram, new_P, **CLOSE)
        np.testing.assert_allclose(np.linalg.solve(K_inv + new_gram, new_xi), new_m, **CLOSE)


# Rounding through K^-1, whose condition number is about 1e4 here.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def test_riemannian_precision_is_positive_by_construction():
    """B_new = B/2 + (B + rD) B^-1 (B + rD) / 2, so its eigenvalues are at least half of B's."""
    rng = np.random.RandomState(0)
    m, n = 5, 12
    plain_step_fails = 0
    for rate in (0.1, 0.5, 1.0):
        for _ in range(10):
            root = rng.randn(m, m)
            B = 0.05 * np.eye(m) + root @ root.T
            w, beta = rng.randn(1, n, m), 20.0 * rng.randn(1, n)
            q = sites.posterior(sites.Whitened(jnp.asarray(rng.randn(1, m)), B[None] - np.eye(m)))
            tied = sites.TiedSites(jnp.zeros((1, m)), jnp.asarray(B[None] - np.eye(m)), None)
            gradients = SiteGradients(jnp.zeros((1, n)), jnp.asarray(beta))
            features = Features(jnp.asarray(w), *jnp.zeros((2, 1, n)))
            new = sites.blend_riemannian(tied, gradients, q, features, rate)
            eigenvalues = np.linalg.eigvalsh(np.eye(m) + np.asarray(new.quadratic[0]))
            assert eigenvalues.min() >= 0.5 * np.linalg.eigvalsh(B).min() * (1 - 1e-6)
            D = np.eye(m) + (w[0].T * beta[0]) @ w[0] - B
            plain_step_fails += np.linalg.eigvalsh(B + rate * D).min() < 0
    assert plain_step_fails > 15  # or the test would not need the second-order term


# ---- variances that round to nothing ---------------------------------------------------------


def test_floored_variances_are_counted():
    """Noise of 1e-4 leaves a variance of 1e-8, less than the rounding of a prior variance of 1."""

    def sharp(X, y=None):
        f = numpyro.sample("f", GP(kernels.Matern12(0.1), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1e-4), obs=y)

    floored = {}
    for precision in ("float32", "float64"):
        jax.config.update("jax_enable_x64", precision == "float64")  # the fixture restores it
        inputs, y = (v[::3].astype(precision) for v in (X, Y))
        svi = make(None, inducing=None, model=sharp, site_lr=1.0)
        state = svi.init(jax.random.key(0), inputs, y)
        update = jax.jit(svi.update)
        for _ in range(3):
            state, loss = update(state, inputs, y)
        assert loss.dtype == precision and finite((loss, state))
        floored[precision] = int(state.floored)
        marginals = svi.guide.marginals(svi.get_params(state), inputs)["f"]
        assert (np.asarray(marginals.variance) > 0).all()
    # The first E-step sees the prior; the two others see ten variances each.
    assert floored == {"float32": 20, "float64": 0}


# ---- rejected updates ------------------------------------------------------------------------


def test_stable_update_keeps_everything():
    svi = make(optax.adam(0.1))
    stable = jax.jit(svi.stable_update)
    state, _ = stable(svi.init(jax.random.key(0), X, Y), X, Y)
    bad = Y.copy()
    bad[4] = np.nan
    plain, _ = jax.jit(svi.update)(state, X, bad)
    assert not finite((plain.optim_state, plain.sites))  # or there would be nothing to reject
    kept, loss = stable(state, X, bad)
    assert np.isnan(loss)
    assert identical((kept.optim_state, kept.sites), (state.optim_state, state.sites))
    assert (int(kept.rejected), int(kept.step)) == (1, int(state.step) + 1)
    assert not identical(kept.rng_key, state.rng_key)  # another minibatch may do better
    after, loss = stable(kept, X, Y)
    assert finite((loss, after.sites)) and int(after.rejected) == 1
    assert not identical(after.sites, kept.sites)


def subsampled(X, y):
    lengthscale = numpyro.param("lengthscale", 0.3, constraint=positive)
    with numpyro.plate("data", X.shape[0], subsample_size=5) as rows:
        batch, values = X[rows], y[rows]
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale), batch))
    with numpyro.plate("data", X.shape[0], subsample_size=5):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=values)


def test_run_tells_how_many_updates_were_rejected():
    """Some minibatches have a missing value, which the first look at the data does not see."""
    bad = Y.copy()
    bad[-4] = np.nan
    svi = make(optax.adam(0.01), model=subsampled)
    with pytest.warns(UserWarning, match=r"\d+ updates were not finite and were rejected") as seen:
        result = run(svi, 30, X, jnp.asarray(bad), stable_update=True)
    rejected = int(np.isnan(result.losses).sum())
    assert 0 < rejected < 20 and int(result.state.rejected) == rejected
    assert str(seen[0].message).startswith(f"{rejected} updates")
    assert finite(result.params)


def test_run_ends_when_every_update_is_rejected():
    """Adam at a rate of 1000 leads to infinite hyperparameters, again and again."""
    svi = make(optax.adam(1e3))
    pattern = r"last 20 updates were all rejected.*GP site 'f'.*(zero|infinity).*learning rate"
    with pytest.raises(FitError, match=pattern) as caught:
        run(svi, 400, X, Y, stable_update=True)
    result = caught.value.result
    assert len(result.losses) == 20 and np.isnan(result.losses).all()
    assert float(result.params["lengthscale"]) == 0.3  # what it was at the start
    assert finite(svi.guide.marginals(result.params, X))


# ---- fits that are no longer finite ----------------------------------------------------------


def test_covariance_without_factor_at_the_start():
    close = np.r_[Z, Z[:3] + 1e-9]
    pattern = (
        r"covariance of the 9 inducing inputs of GP site 'f' is not positive definite "
        r"\(at lengthscale = 0\.3, variance = 1\).*fewer.*lengthscale.*float64.*jitter=1e-4"
    )
    with pytest.raises(ValueError, match=pattern):
        make(inducing=close).init(jax.random.key(0), X, Y, jitter=0.0)
    make(inducing=close).init(jax.random.key(0), X, Y)  # the default jitter is enough


def test_covariance_without_factor_on_the_way(tmp_path):
    """A straight line makes the lengthscale grow until, without jitter, K is singular."""
    path = tmp_path / "fit.npz"
    svi = make(optax.adam(0.3), inducing=np.linspace(0, 1, 12))
    pattern = r"no longer finite after \d+ updates.*12 inducing inputs of GP site 'f'.*more jitter"
    with pytest.raises(FitError, match=pattern) as caught:
        run(svi, 60, X, 1.0 + 2.0 * X, jitter=0.0, checkpoint=path, checkpoint_every=1)
    result = caught.value.result
    assert isinstance(result, TSVGPRunResult) and 0 < len(result.losses) < 60
    assert int(result.state.step) == len(result.losses)
    assert finite(result)
    # The parameters are of use, not merely finite.
    assert finite(svi.guide.marginals(result.params, X, jitter=0.0))
    # The file on the way is the same fit: one that cannot be gone on from is never saved.
    assert identical(load(path, like=result), result)


def test_hyperparameters_that_degenerate():
    svi = make(optax.adam(1e3))
    pattern = (
        r"after 0 updates.*GP site 'f' is zero or not finite \(at lengthscale = .*learning rate"
    )
    with pytest.raises(FitError, match=pattern) as caught:
        run(svi, 40, X, Y)
    assert finite(caught.value.result)
    assert finite(svi.guide.marginals(caught.value.result.params, X))


def test_likelihood_that_overflows():
    """Quadrature looks at values of a thousand, whose exponential is infinite."""

    def counts(X, y=None):
        f = numpyro.sample("f", GP(kernels.RBF(0.3, 1e6), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    svi = make(None, model=counts)
    with pytest.raises(FitError, match=r"after 0 updates.*overflows.*softplus") as caught:
        run(svi, 5, X, np.ones(N))
    assert finite(caught.value.result)


def test_negative_curvature_under_another_prior():
    """Sites of the Riemannian step can be too negative for a prior of larger variance."""
    svi = make(None, model=student, curvature="riemannian")
    state = svi.init(jax.random.key(0), X, Y)
    # Sites start in the original coordinates: B = I - 0.1 K, and K has eigenvalues up to 5.5.
    state.sites["f_auto_quadratic"] = -0.1 * state.sites["f_auto_inverse"]
    assert svi._usable(state, (X, Y), {})
    state.optim_state["variance"] = jnp.log(4.0)
    assert not svi._usable(state, (X, Y), {})
    with pytest.raises(FitError, match=r"precision of GP site 'f' is not positive.*\"clip\""):
        run(svi, 3, X, Y, init_state=state)


def test_loss_that_is_not_finite_is_not_passed_on(monkeypatch):
    """Even if the parameters are: NaN would be all that the user sees of the bound."""
    svi = make(None)
    update = svi.update

    def no_loss(state, *args):
        new, loss = update(state, *args)
        return new, jnp.where(state.step == 3, jnp.nan, loss)

    monkeypatch.setattr(svi, "update", no_loss)
    with pytest.raises(FitError, match="no longer finite after 3 updates") as caught:
        run(svi, 40, X, Y)
    assert len(caught.value.result.losses) == 3 and finite(caught.value.result)


# ---- interrupts ------------------------------------------------------------------------------


class InterruptedBar(loop.tqdm.tqdm):
    """A progress bar that presses Ctrl-C after seven updates."""

    def update(self, n=1):
        super().update(n)
        self.count = getattr(self, "count", 0) + 1
        if self.count == 7:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
            signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def straight():
    """A run that nothing happens to."""
    return run(make(optax.adam(0.05)), 40, X, Y)


def test_interrupt_returns_the_fit_so_far(monkeypatch, straight):
    svi = make(optax.adam(0.05))
    with monkeypatch.context() as patch:
        patch.setattr(loop.tqdm, "tqdm", InterruptedBar)
        with pytest.warns(UserWarning, match=r"Interrupted after 7 of 40 updates.*fit so far"):
            result = run(svi, 40, X, Y)
    assert identical(result.losses, straight.losses[:7])
    assert int(result.state.step) == 7 and finite(result)
    assert finite(svi.guide.marginals(result.params, X))
    # And one can go on as if nothing had happened.
    rest = run(svi, 33, X, Y, init_state=result.state)
    assert identical((rest.params, rest.state), (straight.params, straight.state))


def test_interrupt_of_a_fit_that_is_not_finite(monkeypatch):
    """What is returned is the last state known to be good, not the NaN after it."""
    monkeypatch.setattr(loop.tqdm, "tqdm", InterruptedBar)
    svi = make(optax.adam(1e3))
    with pytest.warns(UserWarning, match="Interrupted after 0 of 400 updates"):
        result = run(svi, 400, X, Y)
    assert finite(result)


# ---- files -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "adam": optax.adam(0.05),
    "lbfgs": optax.lbfgs(),
    "numpyro": numpyro.optim.Adam(0.05),
    "none": None,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_come_back(tmp_path, name):
    svi = make(OPTIMIZERS[name])
    state = svi.init(jax.random.key(7), X, Y)
    state = state._replace(step=state.step + 3)
    save(tmp_path / "state", state)
    fresh = make(OPTIMIZERS[name])
    loaded = load(tmp_path / "state", like=fresh.init(jax.random.key(0), X, Y))
    assert isinstance(loaded, TSVGPState)
    assert identical(loaded, state)
    assert os.listdir(tmp_path) == ["state"]


def test_results_come_back(tmp_path, straight):
    path = tmp_path / "fit.npz"
    save(path, straight)
    assert identical(load(path, like=straight), straight)
    # Without `like`, in another process, the parameters are all that prediction needs.
    loaded = load(path)
    assert sorted(loaded) == ["losses", "params", "state"]
    assert identical(loaded["params"], straight.params)
    svi = make(optax.adam(0.05))
    svi.guide.setup(X, Y)
    marginals = svi.guide.marginals(loaded["params"], X[:4])["f"]
    assert identical(marginals, svi.guide.marginals(straight.params, X[:4])["f"])
    # The state of a result can be gone on from by a fresh object.
    state = load(path, like=svi.init(jax.random.key(3), X, Y))
    assert identical(state, straight.state)


def test_old_style_keys_come_back(tmp_path):
    svi = make()
    state = svi.init(jax.random.PRNGKey(0), X, Y)
    save(tmp_path / "state", state)
    assert identical(load(tmp_path / "state", like=state), state)


def test_file_describes_itself(tmp_path, straight):
    save(tmp_path / "fit.npz", straight)
    with np.load(tmp_path / "fit.npz", allow_pickle=False) as archive:
        description = json.loads(archive["description.json"].tobytes())
    assert description["format"] == "numpyro_tsvgp fit"
    assert {"numpyro-tsvgp", "numpyro", "jax"} <= set(description["versions"])
    entries = {"/".join(e["path"]): e for e in description["entries"]}
    assert entries["params/f_auto_linear"]["shape"] == [1, 6]
    assert entries["params/f_auto_linear"]["dtype"] == "float64"


def test_truncated_files(tmp_path, straight):
    path = tmp_path / "fit.npz"
    save(path, straight)
    whole = path.read_bytes()
    for length in np.linspace(0, len(whole) - 1, 25).astype(int):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"fit\.npz' is not a complete numpyro_tsvgp fit"):
            load(path)


def test_damaged_files(tmp_path, straight):
    """A flipped byte is an error or has no effect; it never changes a number."""
    path = tmp_path / "fit.npz"
    save(path, straight)
    whole = path.read_bytes()
    errors = 0
    for position in np.linspace(0, len(whole) - 1, 40).astype(int):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            assert identical(load(path, like=straight), straight)
        except ValueError:
            errors += 1
    assert errors > 20  # most bytes matter


def _archive(path, description, **arrays):
    text = np.frombuffer(json.dumps(description).encode(), np.uint8)
    with open(path, "wb") as file:
        np.savez(file, **arrays, **{"description.json": text})


ENTRY = {"path": ["x"], "array": "a0", "shape": [2], "dtype": "float64", "key": None}
HEAD = {"format": "numpyro_tsvgp fit", "format_version": 1}


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ({"format": "something else"}, "an archive of something else"),
        ({**HEAD, "format_version": 99, "entries": []}, "newer version"),
        ({**HEAD, "entries": [{**ENTRY, "array": "a1"}]}, "a1"),
        ({**HEAD, "entries": [{**ENTRY, "shape": [3]}]}, "x is not the array that its description"),
        ({**HEAD, "entries": [{**ENTRY, "key": "no such generator"}]}, "no such generator"),
        ({**HEAD, "entries": ["a0"]}, ""),
        ([], ""),
        (HEAD, "entries"),
    ],
)
def test_foreign_archives(tmp_path, description, reason):
    path = tmp_path / "other.npz"
    _archive(path, description, a0=np.ones(2))
    with pytest.raises(ValueError, match=rf"not a complete numpyro_tsvgp fit.*{reason}"):
        load(path)


def test_other_files(tmp_path):
    np.savez(tmp_path / "arrays.npz", x=np.ones(2))
    np.save(tmp_path / "array.npy", np.ones(2))
    (tmp_path / "text").write_text("not an archive")
    for name, reason in (
        ("arrays.npz", "no description"),
        ("array.npy", "not an archive"),
        ("text", "not an archive"),
    ):
        with pytest.raises(ValueError, match=f"{name}' is not a complete .*{reason}"):
            load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing")


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_files_run_no_code(tmp_path):
    trap = tmp_path / "trap"
    entry = {**ENTRY, "shape": [1], "dtype": "object"}
    array = np.array([Malicious(str(trap))], dtype=object)
    _archive(tmp_path / "inside.npz", {**HEAD, "entries": [entry]}, a0=array)
    (tmp_path / "raw").write_bytes(pickle.dumps(Malicious(str(trap))))
    for name in ("inside.npz", "raw"):
        with pytest.raises(ValueError, match=f"{name}' is not a complete numpyro_tsvgp fit"):
            load(tmp_path / name)
    assert not trap.exists()
    pickle.loads((tmp_path / "raw").read_bytes())
    assert trap.exists()  # the trap works


def test_objects_are_not_saved(tmp_path):
    with pytest.raises(TypeError, match="params/x is not an array: Malicious"):
        save(tmp_path / "fit.npz", {"params": {"x": Malicious("")}})
    assert os.listdir(tmp_path) == []


def test_fits_of_another_kind(tmp_path, straight):
    path = tmp_path / "fit.npz"
    save(path, straight)
    key = jax.random.key(0)
    other = make(numpyro.optim.Momentum(0.1, 0.9)).init(key, X, Y)
    with pytest.raises(ValueError, match=r"belongs to another fit: it lacks .*optimizer"):
        load(path, like=other)
    other = make(optax.adam(0.1), inducing=Z[:4]).init(key, X, Y)
    pattern = r"another fit: sites/f_auto_\w+ has shape \(.*6.*\) .*\(.*4.*\).*number of inducing"
    with pytest.raises(ValueError, match=pattern):
        load(path, like=other)
    jax.config.update("jax_enable_x64", False)  # the fixture restores it
    with pytest.raises(ValueError, match=r"params/f_auto_\w+ in .* is float64.*jax_enable_x64"):
        load(path)


def test_types_that_differ(tmp_path, straight):
    path = tmp_path / "fit.npz"
    save(path, straight)
    other = straight._replace(losses=straight.losses.astype("float32"))
    with pytest.raises(ValueError, match=r"losses has shape \(40,\) and type float64.*float32"):
        load(path, like=other)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_failure_while_writing_leaves_the_old_file(tmp_path, monkeypatch, straight, error):
    path = tmp_path / "fit.npz"
    save(path, straight)
    whole = path.read_bytes()

    def broken(file, **arrays):
        file.write(b"half of an archive")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", broken)
        with pytest.raises(type(error)):
            save(path, straight._replace(losses=straight.losses * 2))
    assert path.read_bytes() == whole
    assert os.listdir(tmp_path) == ["fit.npz"]
    # The same for a failure of the last step, the move into place.
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            save(path, straight._replace(losses=straight.losses * 2))
    assert path.read_bytes() == whole
    assert os.listdir(tmp_path) == ["fit.npz"]


# ---- checkpoints -----------------------------------------------------------------------------


def test_run_goes_on_from_a_checkpoint(tmp_path, monkeypatch, straight):
    path = tmp_path / "run.npz"
    saved = []

    def counted(file, fit):
        saved.append(len(fit.losses))
        save(file, fit)

    monkeypatch.setattr(loop, "save", counted)
    first = run(make(optax.adam(0.05)), 17, X, Y, checkpoint=path, checkpoint_every=5)
    assert saved == [5, 10, 15, 17]
    assert identical(first.losses, straight.losses[:17])
    rest = run(make(optax.adam(0.05)), 40, X, Y, checkpoint=path, checkpoint_every=20)
    assert saved == [5, 10, 15, 17, 20, 40]
    assert identical(rest, straight)
    # Nothing is left to do, and nothing changes.
    again = run(make(optax.adam(0.05)), 40, X, Y, checkpoint=path)
    assert saved[6:] == [] and identical(again, straight)


def test_checkpoints_that_cannot_be(tmp_path, straight):
    svi = make(optax.adam(0.05))
    with pytest.raises(ValueError, match="checkpoint_every must be at least 1, got 0"):
        run(svi, 5, X, Y, checkpoint=tmp_path / "a", checkpoint_every=0)
    with pytest.raises(FileNotFoundError, match=r"no directory .*nowhere to save to"):
        run(svi, 5, X, Y, checkpoint=tmp_path / "nowhere" / "a")
    save(tmp_path / "state", straight.state)
    with pytest.raises(ValueError, match=r"state' is not a checkpoint of a run.*init_state"):
        run(svi, 5, X, Y, checkpoint=tmp_path / "state")
    save(tmp_path / "fit", straight)
    with pytest.raises(ValueError, match=r"fit' belongs to another fit"):
        run(make(optax.adam(0.05), inducing=Z[:4]), 5, X, Y, checkpoint=tmp_path / "fit")


KILLS = 10

CHILD = """
import sys
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

jax.config.update("jax_enable_x64", True)
from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, save


def model(X, y):
    scale = numpyro.param("scale", 0.5, constraint=dist.constraints.positive)
    with numpyro.plate("data", X.shape[0], subsample_size=8) as rows:
        batch, values = X[rows], y[rows]
    f = numpyro.sample("f", GP(kernels.RBF(scale), batch))
    with numpyro.plate("data", X.shape[0], subsample_size=8):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=values)


rng = np.random.RandomState(0)
X = jax.numpy.asarray(rng.rand(40))
y = (jax.numpy.sin(9 * X) > 0).astype(float)
folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
svi = TSVGP(model, AutoDualGaussian(model, np.linspace(0, 1, 5)), optax.adam(0.02))
for number in range(first, last):
    print("start", number, flush=True)
    # Number 0 is the run that is never interrupted, without checkpoints.
    files = {"checkpoint": folder / f"{number}.npz", "checkpoint_every": 5} if number else {}
    result = svi.run(jax.random.key(1), 250, X, y, progress_bar=False, **files)
    save(folder / f"end{number}.npz", result)
"""


@pytest.mark.once
@pytest.mark.timeout(600)
def test_killed_runs_end_as_if_they_had_not_been(tmp_path):
    """Ten runs are killed at a random moment each, and resumed by another process.

    A process first ends the run that the one before it was killed in, and then starts the next,
    in which it is killed. The runs draw minibatches, so the random key must be resumed too.
    """
    environment = {
        **os.environ,
        # Only the first process compiles.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(Path(loop.__file__).parents[1]),
    }
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))

    def start(first, last):
        command = [sys.executable, str(script), str(tmp_path), str(first), str(last + 1)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def updates_saved(number):
        path = tmp_path / f"{number}.npz"
        return len(load(path)["losses"]) if path.exists() else 0

    def end(number):
        return tmp_path / f"end{number}.npz"

    def kill_in(process, number):
        """Kills a process in a run, a moment after the run has saved some number of updates."""
        after = moment.randint(0, 150)
        with process:
            try:
                assert any(line.split() == ["start", str(number)] for line in process.stdout)
                while updates_saved(number) < after and process.poll() is None:
                    time.sleep(0.002)
                time.sleep(moment.uniform(0.0, 0.03))
            finally:
                process.kill()  # SIGKILL

    with start(0, 0) as process:
        assert process.wait() == 0
    wanted = load(end(0))
    assert finite(wanted["losses"]) and wanted["losses"].shape == (250,)
    moment, resumed_from = random.Random(), []
    for number in range(1, KILLS + 1):
        kill_in(start(max(number - 1, 1), number), number)
        while end(number).exists():  # it was over before this process had its turn: once more
            end(number).unlink()
            (tmp_path / f"{number}.npz").unlink()
            kill_in(start(number, number), number)
        resumed_from.append(updates_saved(number))
    with start(KILLS, KILLS) as process:
        assert process.wait() == 0
    assert len(set(resumed_from)) > 3 and max(resumed_from) > 0  # they were different moments
    for number in range(1, KILLS + 1):
        assert identical(load(end(number)), wanted), (number, resumed_from)
