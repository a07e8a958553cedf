"""Models drawn at random: a clear exception, or a bound that a small E-step does not lower.

The draws are the same in every run, and shapes come from small sets: nearly all
of the time goes into compiling one update for each example.
"""

import dataclasses
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, NaturalGradient, Riemannian, kernels

KERNELS = {
    "rbf": lambda: kernels.RBF(0.4),
    "matern12": lambda: kernels.Matern12(0.5, 2.0),
    "matern52": lambda: 0.5 * kernels.Matern52(0.3),
    "rational": lambda: kernels.RationalQuadratic(0.5),
    "periodic": lambda: kernels.Periodic(0.7),
    "linear": lambda: kernels.Linear() + kernels.Constant(0.5),
    "product": lambda: kernels.Matern32(0.5) * kernels.Linear(0.5),
}


def softplus(x):
    return jax.nn.softplus(x) + 1e-2


class Likelihood(NamedTuple):
    """Takes latent functions of shape (p, n) to a distribution of shape (n,) or (p, n)."""

    distribution: Any
    data: Any  # of uniform numbers of the shape of the data
    latents: int | None = None  # how many latent functions it needs; None for any number
    log_concave: bool = True


LIKELIHOODS = {
    "normal": Likelihood(lambda f: dist.Normal(f, 0.3), lambda u: 3 * u - 1),
    "bernoulli": Likelihood(lambda f: dist.Bernoulli(logits=f), lambda u: (u > 0.4) * 1.0),
    "poisson": Likelihood(lambda f: dist.Poisson(softplus(f)), lambda u: np.floor(5 * u)),
    "exponential": Likelihood(lambda f: dist.Exponential(jnp.exp(-f)), lambda u: 0.1 + u),
    "student": Likelihood(
        lambda f: dist.StudentT(3.0, f, 0.3), lambda u: 8 * (u - 0.4) ** 3, log_concave=False
    ),
    "scale": Likelihood(
        lambda f: dist.Normal(f[0], softplus(f[1])), lambda u: 3 * u[0] - 1, 2, log_concave=False
    ),
    "softmax": Likelihood(
        lambda f: dist.Categorical(logits=f.T), lambda u: np.floor(2.99 * u[0]).astype(int), 3
    ),
}

MEANS = {
    "none": lambda X: None,
    "number": lambda X: 0.7,
    "array": lambda X: jnp.linspace(0.0, 1.0, X.shape[0], dtype=X.dtype),
    "function": lambda X: lambda x: jnp.sin(x.reshape(x.shape[0], -1).sum(-1)),
}

FLAWS = [
    "missing data",
    "infinite inputs",
    "column of data",
    "short data",
    "columns of inducing inputs",
    "duplicate inducing inputs",
    "unknown site",
    "more inducing inputs than data",
    "minibatch without inducing inputs",
    "one number as data",
    "noise as kernel",
    "mask around the GP",
    "sum over points",
    "plate around the GP",
    "no data",
]


class Example(NamedTuple):
    n: int
    shape: str  # of the inputs: (n,), (n, 1) or (n, 2)
    m: int | None
    precision: str
    kernel: str
    likelihood: str
    latents: int
    mean: str
    sites: str
    curvature: str
    minibatch: bool
    flaw: str | None


@st.composite
def examples(draw, number: int, flaw: str | None = None) -> Example:
    """Examples of the likelihood with that number; they can be fitted if they have no flaw."""

    def pick(options: Any) -> Any:
        # The first draw takes the first of everything: let that be something else each time.
        options = list(options)
        first = number % len(options)
        return draw(st.sampled_from(options[first:] + options[:first]))

    likelihood = pick(LIKELIHOODS) if flaw else list(LIKELIHOODS)[number]
    n = pick([12, 7])
    m = pick([4, None, 1, 8] if n > 8 else [4, None, 1])
    sites = pick(["tied", "untied", "tied"])
    tied = m is not None and sites == "tied"
    return Example(
        n=n,
        shape=pick(["(n,)", "(n, 1)", "(n, 2)"]),
        m=4 if flaw and "inducing" in flaw else m,
        precision=pick(["float64", "float32"]),
        kernel=pick(KERNELS),
        likelihood=likelihood,
        latents=LIKELIHOODS[likelihood].latents or pick([1, 3, 1]),
        mean=pick(MEANS),
        sites=sites,
        curvature=pick(["clip", "riemannian"]) if tied else "clip",
        minibatch=tied and not flaw and pick([False, True]),
        flaw=flaw,
    )


def build(example: Example):
    """The model, its arguments and its inducing inputs."""
    kernel, likelihood = KERNELS[example.kernel](), LIKELIHOODS[example.likelihood]
    n, p, flaw = example.n, example.latents, example.flaw
    rng = np.random.RandomState(n)
    X = rng.rand(n, 2)
    y = np.asarray(likelihood.data(rng.rand(p, n)))
    X = {"(n,)": X[:, 0], "(n, 1)": X[:, :1], "(n, 2)": X}[example.shape]
    plated = p > 1
    total = 3 * n if example.minibatch or flaw == "minibatch without inducing inputs" else n
    if flaw == "noise as kernel":
        kernel = 2.0 * kernels.White()

    def gp(X):
        with numpyro.handlers.mask(mask=flaw != "mask around the GP"):
            return numpyro.sample("f", GP(kernel, X, mean=MEANS[example.mean](X)))

    def model(X, y=None):
        rows = X.shape[0]
        data = numpyro.plate("data", total, dim=-1, subsample_size=rows)
        if flaw == "plate around the GP":
            with data:
                f = gp(X)
                numpyro.sample("y", dist.Normal(f, 0.1), obs=y if y is None else y[..., :rows])
            return
        if plated:
            with numpyro.plate("latents", p):
                f = gp(X)
        else:
            f = gp(X)[None]
        if flaw == "sum over points":
            f = jnp.cumsum(f, -1) ** 2  # the square: a sum alone can be linear in the density
        fn = likelihood.distribution(f)
        if len(fn.batch_shape) == 2:
            with numpyro.plate("outputs", p, dim=-2), data:
                numpyro.sample("y", fn, obs=y)
        else:
            with data:
                numpyro.sample("y", fn, obs=y)

    inducing = None if example.m is None else rng.rand(example.m, 2)
    if inducing is not None:
        inducing = {"(n,)": inducing[:, 0], "(n, 1)": inducing[:, :1], "(n, 2)": inducing}[
            example.shape
        ]
    if y.ndim == 2 and flaw == "plate around the GP":
        y = y[0]
    if flaw == "missing data":
        y = y.astype(float)
        y[..., 3] = np.nan
    elif flaw == "infinite inputs":
        X[2] = np.inf
    elif flaw == "column of data":
        y = y[..., None]
    elif flaw == "short data":
        y = y[..., :-1]
    elif flaw == "columns of inducing inputs":
        inducing = np.ones((4, 3)) * np.arange(4.0)[:, None]
    elif flaw == "duplicate inducing inputs":
        inducing[3] = inducing[0]
    elif flaw == "more inducing inputs than data":
        inducing = np.concatenate([inducing, X, X + 0.01])
    elif flaw == "minibatch without inducing inputs":
        inducing = None
    elif flaw == "unknown site":
        inducing = {"nothing": inducing}
    elif flaw == "one number as data":
        y = y[..., 0] if y.ndim == 1 else y[0, 0]
    elif flaw == "no data":
        y = None
    args = [a if a is None or a.dtype.kind == "i" else a.astype(example.precision) for a in (X, y)]
    return model, args, inducing


# Words of which a clear message has at least one: what it is about, by the name the user knows.
SUBJECTS = ("site 'f'", "site 'y'", "inducing", "observed site", "likelihood", "Argument 0")


def check_message(error: Exception) -> None:
    """It names what is wrong, and was raised on purpose, not by something that was run into.

    An exception of the model itself, such as NumPyro's on parameters that are NaN, comes through
    with a note.
    """
    assert isinstance(error, ValueError | TypeError)
    notes = [note for note in getattr(error, "__notes__", []) if "before the fit" in note]
    text = " ".join([str(error), *notes])
    assert any(word in text for word in SUBJECTS), error
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    assert notes or "numpyro_tsvgp" in frame.tb_frame.f_code.co_filename, error


RATES = [0.05, 0.05, 0.5, 0.5, 0.05]


def start(example: Example):
    model, args, inducing = build(example)
    guide = AutoDualGaussian(model, inducing, sites=example.sites, learn_inducing=False)
    rule = Riemannian() if example.curvature == "riemannian" else NaturalGradient()
    svi = TSVGP(model, guide, None, site_lr=lambda step: jnp.array(RATES)[step], rule=rule)
    return svi, args, svi.init(jax.random.key(0), *args)


def check_fit(example: Example) -> None:
    svi, args, state = start(example)
    update, losses = jax.jit(svi.update), []
    for _ in RATES:
        new, loss = update(state, *args)
        state = dataclasses.replace(
            new, rng_key=state.rng_key
        )  # the same nodes where they are random
        losses.append(float(loss))
    assert loss.dtype == example.precision
    assert np.isfinite(losses).all(), losses
    # A bound is a sum of terms of either sign; what is lost to rounding is relative to them.
    rounding = 1e-6 if example.precision == "float64" else 1e-4
    for before, after in ((0, 1), (3, 4)):
        slack = rounding * (example.n + abs(losses[before]))
        assert losses[after] <= losses[before] + slack, (before, losses)


@contextmanager
def quick(precision: str):
    """The precision of an example, and code that is compiled quickly rather than well."""
    before = {
        name: jax.config.read(name) for name in ("jax_enable_x64", "jax_disable_most_optimizations")
    }
    jax.config.update("jax_enable_x64", precision == "float64")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def bounded(count: int):
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        # Without shrinking, a failure is an example as it was drawn and compiles no others.
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LIKELIHOODS)))
def test_small_step_does_not_lower_the_bound(number):
    @seed(number)  # other draws for each likelihood, the same in each run
    @bounded(2)
    @given(examples(number))
    def fits(example):
        with quick(example.precision):
            check_fit(example)

    fits()


# Each flaw has a test of its own elsewhere; here the model around it is drawn.
@pytest.mark.parametrize("flaw", ["missing data", "sum over points", "one number as data"])
def test_exceptions_are_clear(flaw):
    @seed(0)
    @bounded(1)
    @given(examples(FLAWS.index(flaw), flaw))
    def raises(example):
        with quick(example.precision), pytest.raises((TypeError, ValueError)) as caught:
            start(example)
        check_message(caught.value)

    raises()


@pytest.mark.slow
@pytest.mark.parametrize("flaw", FLAWS)
def test_exceptions_are_clear_whatever_the_model_is(flaw):
    @seed(1)
    @bounded(6)
    @given(examples(FLAWS.index(flaw), flaw))
    def raises(example):
        with quick(example.precision), pytest.raises((TypeError, ValueError)) as caught:
            start(example)
        check_message(caught.value)

    raises()
