"""What happens when a fit goes wrong or is interrupted: nothing fitted is lost, and it says why."""

import pickle
import signal

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
    Riemannian,
    TSVGPRunResult,
    kernels,
    load,
)
from numpyro_tsvgp.infer.em import loop
from numpyro_tsvgp.infer.em.interrupts import Interrupts
from numpyro_tsvgp.model.arguments import Call

positive = dist.constraints.positive

N = 30
RNG = np.random.RandomState(0)
X = np.sort(RNG.rand(N))
Y = np.sin(6.0 * X) + 0.1 * RNG.randn(N)
Z = np.linspace(0.0, 1.0, 6)


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


# ---- variances that round to nothing ---------------------------------------------------------


@pytest.mark.slow
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


def five_rows(X, y):
    """A model that counts on the size of its batches cannot be looked at on all rows at once."""
    lengthscale = numpyro.param("lengthscale", 0.3, constraint=positive)
    f = numpyro.sample("f", GP(kernels.RBF(lengthscale), X))
    with numpyro.plate("data", X.shape[0], subsample_size=5) as rows:
        numpyro.sample("y", dist.Normal(f[rows], 0.1 * jnp.ones(5)), obs=y[rows])


@pytest.fixture(scope="module")
def missing():
    """Data that lack a value, and a state from which a run has no careful start."""
    y = Y.copy()
    y[26] = np.nan
    svi = make(optax.adam(0.01), model=five_rows)
    return svi, y, svi.init(jax.random.key(0), X, Y)


@pytest.mark.slow
def test_run_tells_how_many_updates_were_rejected(missing):
    svi, y, start = missing
    with pytest.warns(UserWarning, match=r"\d+ updates were not finite and were rejected") as seen:
        result = run(svi, 30, X, y, init_state=start, stable_update=True)
    rejected = int(np.isnan(result.losses).sum())
    assert 0 < rejected < 20 and int(result.state.rejected) == rejected
    assert str(seen[0].message).startswith(f"{rejected} updates")
    assert finite(result.params)


@pytest.mark.slow
def test_row_that_ends_a_fit_is_named(missing):
    svi, y, start = missing
    pattern = r"no longer finite after \d+ updates\. The data of site 'y' at index 26: .*nan"
    with pytest.raises(FitError, match=pattern) as caught:
        run(svi, 40, X, y, init_state=start)
    assert finite(caught.value.result)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_hyperparameters_that_degenerate():
    svi = make(optax.adam(1e3))
    pattern = (
        r"after 0 updates.*GP site 'f' is zero or not finite \(at lengthscale = .*learning rate"
    )
    with pytest.raises(FitError, match=pattern) as caught:
        run(svi, 40, X, Y)
    assert finite(caught.value.result)
    assert finite(svi.guide.marginals(caught.value.result.params, X))


@pytest.mark.slow
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


@pytest.mark.slow
def test_negative_curvature_under_another_prior():
    """Sites of the Riemannian step can be too negative for a prior of larger variance."""
    svi = make(None, rule=Riemannian())
    call = Call((X, Y), {})
    state = svi.init(jax.random.key(0), X, Y)
    # Sites start in the original coordinates: B = I - 0.1 K, and K has eigenvalues up to 3.
    state.approximation["f_auto_quadratic"] = -0.1 * state.approximation["f_auto_inverse"]
    assert svi.usable(state, call)
    state.optim_state["variance"] = jnp.log(9.0)
    assert not svi.usable(state, call)
    with pytest.raises(FitError, match=r"precision of GP site 'f' is not positive.*default site"):
        run(svi, 3, X, Y, init_state=state)


@pytest.mark.slow
def test_loss_that_is_not_finite_is_not_passed_on(monkeypatch):
    """Even if the parameters are: NaN would be all that the user sees of the bound."""
    svi = make(None)
    step = svi.compiled_update

    def no_loss(state, call):
        new, loss = step(state, call)
        return new, jnp.where(state.step == 3, jnp.nan, loss)

    monkeypatch.setattr(svi, "compiled_update", no_loss)
    start = svi.init(jax.random.key(0), X, Y)  # a run from a state has no careful start
    with pytest.raises(FitError, match="no longer finite after 3 updates") as caught:
        run(svi, 40, X, Y, init_state=start)
    assert len(caught.value.result.losses) == 3 and finite(caught.value.result)


def test_errors_travel_between_processes():
    """Pools send exceptions as pickles; models and guides need not be picklable."""
    svi = make(None)
    state = svi.init(jax.random.key(0), X, Y)
    result = TSVGPRunResult(svi.get_params(state), state, jnp.zeros(3))
    result.fit = svi.fit(state, X, Y)
    error = FitError("why", result)
    assert error.result is result
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is FitError and str(again) == "why" and again.result is None


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


class Collected:
    """Garbage whose collection is interrupted, where Python ignores what is raised."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interrupts():
    """As in a terminal; a shell may have interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # as it was
    signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_that_python_loses_is_not_lost(monkeypatch, straight, interrupts):
    """Callbacks of the garbage collector swallow it, and JAX has some."""

    class Bar(loop.tqdm.tqdm):
        def update(self, n=1):
            self.count = getattr(self, "count", 0) + 1
            if self.count == 7:
                Collected()  # an interrupt that ends here

    with monkeypatch.context() as patch:
        patch.setattr(loop.tqdm, "tqdm", Bar)
        with pytest.warns(UserWarning, match="Interrupted after 7 of 40 updates"):
            result = run(make(optax.adam(0.05)), 40, X, Y)
    assert identical(result.losses, straight.losses[:7])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_that_are_lost_at_the_ends_of_a_run(interrupts):
    with pytest.raises(KeyboardInterrupt), Interrupts() as context:
        Collected()
        context.check()  # before the first step
    with Interrupts():
        Collected()  # all is done: one costs nothing
    with pytest.raises(KeyboardInterrupt), Interrupts():
        Collected()
        Collected()  # whoever presses twice wants out
    with Interrupts() as context:
        Collected()
        context.taken()
        context.check()


def test_interrupts_that_a_program_handles_are_its_own(interrupts):
    def own(signum, frame):
        pass

    signal.signal(signal.SIGINT, own)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_interrupted_audit_does_not_cost_the_fit(monkeypatch, straight, interrupts):
    def audit(*args, **options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(type(straight.fit), "audit", audit)
    with pytest.warns(UserWarning, match="Audit of the fit: It was interrupted"):
        result = run(make(optax.adam(0.05)), 40, X, Y, audit=True)
    assert identical(result.losses, straight.losses)


@pytest.mark.slow
def test_interrupt_of_a_fit_that_is_not_finite(monkeypatch):
    """What is returned is the last state known to be good, not the NaN after it."""
    monkeypatch.setattr(loop.tqdm, "tqdm", InterruptedBar)
    svi = make(optax.adam(1e3))
    with pytest.warns(UserWarning, match="Interrupted after 0 of 400 updates"):
        result = run(svi, 400, X, Y)
    assert finite(result)
