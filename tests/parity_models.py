"""A dozen small fits whose numbers were recorded with version 0.1, and the recorder itself.

What is recorded does not depend on how the library keeps a posterior: losses, hyperparameters and
inducing inputs, and the marginals of every GP at new inputs. ``test_parity.py`` compares.

Between them the fits have every kind of guide, driver and M-step, and models that take different
ways through the library. Inducing inputs are apart by about a lengthscale and the data have no
symmetry: covariances are well conditioned and no gradient is zero but for rounding, which Adam
would blow up to a full step. So the numbers depend little on the order of operations.

``python tests/parity_models.py`` records them anew, with version 0.1 alone.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints
from numpyro.infer import init_to_uniform, init_to_value
from numpyro.infer.autoguide import AutoDelta, AutoNormal

from numpyro_tsvgp import GP, kernels

RECORD = Path(__file__).parent / "data" / "version_0_1.npz"
STEPS = 10


class Case(NamedTuple):
    """A model, its data, and how it is fitted."""

    model: Callable[..., None]  # of the inputs, and of data that may be left out
    args: tuple[np.ndarray, ...]
    new: np.ndarray  # inputs to predict at
    inducing: Any  # None for t-VGP
    make: Callable[[Any, "Case"], tuple[Any, Any]]  # (library, case) -> (guide, driver)
    rtol: float = 1e-9
    draws: bool = False  # whether the numbers depend on how random keys are used


def dual(optim: Any, *, options: Any = None, **guide: Any) -> Callable[..., tuple[Any, Any]]:
    """TSVGP with an AutoDualGaussian; ``options`` are the driver's or a function of the library."""

    def make(lib: Any, case: Case) -> tuple[Any, Any]:
        q = lib.AutoDualGaussian(case.model, case.inducing, **guide)
        more = options(lib) if callable(options) else options or {}
        return q, lib.TSVGP(case.model, q, optim, **more)

    return make


def moments(optim: Any, **guide: Any) -> Callable[..., tuple[Any, Any]]:
    """QSVGP with an AutoMomentGaussian."""

    def make(lib: Any, case: Case) -> tuple[Any, Any]:
        q = lib.AutoMomentGaussian(case.model, case.inducing, **guide)
        return q, lib.QSVGP(case.model, q, optim)

    return make


def keep_negative_curvature(lib: Any) -> dict[str, Any]:
    """The option of the driver, which version 0.1 spelled as a string."""
    if hasattr(lib, "Riemannian"):
        return {"rule": lib.Riemannian()}
    return {"curvature": "riemannian"}


def start_at(**values: float) -> Callable[..., AutoDelta]:
    """MAP from given values: by default they are the median of a few draws from the prior."""
    return partial(AutoDelta, init_loc_fn=init_to_value(values=values))


def positive(name: str, value: Any) -> Any:
    return numpyro.param(name, jnp.asarray(value), constraint=constraints.positive)


def line(rng: np.random.RandomState, n: int) -> np.ndarray:
    return np.sort(rng.uniform(-2.0, 2.0, n))


def grid(a: int, b: int, rng: np.random.RandomState) -> np.ndarray:
    """Rows of a grid in two dimensions, each moved a little."""
    rows = np.stack(np.meshgrid(np.linspace(-1.6, 1.6, a), np.linspace(-1.6, 1.6, b)), -1)
    return rows.reshape(-1, 2) + 0.1 * rng.randn(a * b, 2)


def spread(m: int, rng: np.random.RandomState) -> np.ndarray:
    return np.linspace(-1.9, 1.9, m) + 0.05 * rng.randn(m)


NEW = np.array([-2.3, -1.05, -0.2, 0.63, 1.71])
NEW_2D = np.array([[-2.1, 0.3], [-0.7, -0.4], [0.2, 1.1], [1.3, -1.5]])


# ---- models ----------------------------------------------------------------------------------


def bernoulli(X, y=None):
    """A hyperparameter of each kind, and a lengthscale for each of two inputs."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = positive("lengthscale", [0.8, 1.3])
    f = numpyro.sample("f", GP(variance * kernels.Matern52(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def overdispersed(X, y=None):
    """White noise in the kernel: new inputs do not share it."""
    smooth = kernels.RBF(positive("lengthscale", 0.7), positive("variance", 0.9))
    f = numpyro.sample("f", GP(smooth + kernels.White(positive("noise", 0.2)), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def student_t(X, y=None):
    f = numpyro.sample("f", GP(kernels.Matern32(positive("lengthscale", 0.8)), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, f, positive("scale", 0.3)), obs=y)


def regression(X, y=None):
    """A prior mean with coefficients that are not learned."""
    kernel = kernels.RationalQuadratic(positive("lengthscale", 0.9), positive("alpha", 1.5))
    f = numpyro.sample("f", GP(kernel, X, mean=lambda x: 0.4 - 0.8 * x))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, positive("noise", 0.5)), obs=y)


def heteroscedastic(X, y=None):
    """Two GPs meet in each term, each with its own inducing inputs."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(kernels.Matern52(lengthscale), X))
    g = numpyro.sample("g", GP(positive("spread", 0.5) * kernels.RBF(1.1), X, mean=-1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


def softmax(X, y=None):
    """Three latent functions of one kernel."""
    kernel = kernels.RBF(positive("lengthscale", 1.1), positive("variance", 1.4))
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", GP(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


def own_kernels(X, counts=None, labels=None):
    """Two latent functions with a kernel each, and two observed sites."""
    lengthscale, variance = (
        positive("lengthscale", [[0.6], [0.9]]),
        positive("variance", [0.7, 2.0]),
    )
    with numpyro.plate("functions", 2):
        f = numpyro.sample("f", GP(kernels.Matern52(lengthscale, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("counts", dist.Poisson(jnp.exp(f[0])), obs=counts)
        numpyro.sample("labels", dist.Bernoulli(logits=f[1]), obs=labels)


def minibatch(X, y=None):
    """The GP sees a third of its inputs in each step."""
    size = None if y is None else X.shape[0] // 3
    data = numpyro.plate("data", X.shape[0], subsample_size=size)
    with data as rows:
        x, y = X[rows], None if y is None else y[rows]
    kernel = kernels.Matern52(positive("lengthscale", 0.7), positive("variance", 1.2))
    f = numpyro.sample("f", GP(kernel, x))
    with data:
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def missing(X, y=None, seen=None):
    """Some points were not observed."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    kernel = variance * kernels.Matern32(positive("lengthscale", 0.8))
    f = numpyro.sample("f", GP(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y, obs_mask=seen)


def outliers(X, y=None):
    """Far from the mean this likelihood is not log-concave."""
    kernel = kernels.RBF(positive("lengthscale", 0.7), positive("variance", 0.8))
    f = numpyro.sample("f", GP(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(3.0, f, positive("scale", 0.3)), obs=y)


def probit(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(variance * kernels.Matern32(positive("lengthscale", 0.9)), X))
    p = 0.01 + 0.98 * jax.scipy.stats.norm.cdf(f)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(probs=p), obs=y)


def sampled(X, y=None):
    """Every hyperparameter has a prior."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.4, 0.3))
    f = numpyro.sample("f", GP(kernels.Matern52(lengthscale, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


# ---- data and fits ---------------------------------------------------------------------------


def _bernoulli() -> Case:
    rng = np.random.RandomState(1)
    X = rng.uniform(-2.0, 2.0, (50, 2))
    y = (np.sin(2.0 * X[:, 0]) + 0.5 * X[:, 1] + 0.5 * rng.randn(50) > 0.2).astype(int)
    return Case(bernoulli, (X, y), NEW_2D, grid(4, 3, rng), dual(optax.adam(0.05)), draws=True)


def _overdispersed() -> Case:
    rng = np.random.RandomState(2)
    X = line(rng, 40)
    y = rng.poisson(np.exp(0.6 + np.sin(2.0 * X) + 0.4 * rng.randn(40)))
    return Case(overdispersed, (X, y), NEW, spread(7, rng), dual(optax.adam(0.03), sites="untied"))


def _student_t() -> Case:
    rng = np.random.RandomState(3)
    X = line(rng, 25)
    y = np.cos(2.0 * X) + 0.3 * X + 0.3 * rng.standard_t(4, 25)
    return Case(student_t, (X, y), NEW, None, dual(numpyro.optim.Adam(0.05)))


def _regression() -> Case:
    rng = np.random.RandomState(4)
    X = line(rng, 40)
    y = 0.4 - 0.8 * X + np.sin(3.0 * X) + 0.3 * rng.randn(40)
    make = dual(optax.adam(0.05), options={"site_lr": 1.0}, learn_inducing=False)
    return Case(regression, (X, y), NEW, spread(8, rng), make)


def _heteroscedastic() -> Case:
    rng = np.random.RandomState(5)
    X = line(rng, 50)
    y = np.sin(2.5 * X) + np.exp(-1.2 + 0.5 * X) * rng.randn(50)
    inducing = {"f": spread(9, rng), "g": spread(5, rng)}
    make = dual(optax.adam(0.05), hyper_guide=start_at(lengthscale=0.8))
    return Case(heteroscedastic, (X, y), NEW, inducing, make)


def _softmax() -> Case:
    rng = np.random.RandomState(6)
    X = rng.uniform(-2.0, 2.0, (45, 2))
    scores = np.stack([X[:, 0], np.sin(2.0 * X[:, 1]), 0.3 - X[:, 0] * X[:, 1]])
    y = (2.0 * scores + rng.gumbel(size=scores.shape)).argmax(0)
    return Case(softmax, (X, y), NEW_2D, grid(3, 3, rng), dual(optax.adam(0.05)))


def _own_kernels() -> Case:
    rng = np.random.RandomState(7)
    X = line(rng, 40)
    counts = rng.poisson(np.exp(0.5 + np.sin(3.0 * X)))
    labels = (np.cos(2.0 * X) + 0.3 + 0.5 * rng.randn(40) > 0).astype(int)
    make = dual(optax.adam(0.03), options={"e_steps": 2, "m_steps": 3})
    return Case(own_kernels, (X, counts, labels), NEW, spread(8, rng), make)


def _minibatch() -> Case:
    rng = np.random.RandomState(8)
    X = line(rng, 60)
    y = rng.poisson(np.exp(0.8 + np.sin(2.0 * X)))
    make = dual(optax.adam(0.03), options={"site_lr": 0.5 / 3**0.5})  # of 0.1, by default
    return Case(minibatch, (X, y), NEW, spread(8, rng), make, draws=True)


def _missing() -> Case:
    rng = np.random.RandomState(9)
    X = line(rng, 50)
    seen = rng.rand(50) < 0.8
    y = (np.sin(2.0 * X) + 0.3 + 0.6 * rng.randn(50) > 0).astype(int)
    make = dual(optax.lbfgs(), options={"m_steps": 5}, hyper_guide=start_at(variance=1.5))
    # A line search compares values that differ by rounding alone, and ends elsewhere by 1e-10.
    return Case(missing, (X, np.where(seen, y, 0), seen), NEW, spread(7, rng), make, rtol=1e-8)


def _outliers() -> Case:
    rng = np.random.RandomState(10)
    X = line(rng, 50)
    y = np.sin(2.0 * X) + 0.2 * rng.randn(50) + 3.0 * (rng.rand(50) < 0.1)
    make = dual(optax.adam(0.03), options=keep_negative_curvature)
    return Case(outliers, (X, y), NEW, spread(7, rng), make)


def _probit() -> Case:
    rng = np.random.RandomState(11)
    X = line(rng, 50)
    y = (np.sin(2.0 * X) - 0.2 + 0.5 * rng.randn(50) > 0).astype(int)
    make = moments(optax.adam(0.05), whiten=True, hyper_guide=start_at(variance=1.2))
    return Case(probit, (X, y), NEW, spread(8, rng), make)


def _sampled() -> Case:
    rng = np.random.RandomState(12)
    X = line(rng, 40)
    y = rng.poisson(np.exp(0.7 + np.cos(2.0 * X)))
    # Where NumPyro's own guides start; ours start at the median of the prior since.
    start = partial(AutoNormal, init_loc_fn=init_to_uniform)
    make = dual(optax.adam(0.03), hyper_guide=start)
    return Case(sampled, (X, y), NEW, spread(8, rng), make, draws=True)


CASES: dict[str, Case] = {
    "bernoulli": _bernoulli(),
    "untied-white": _overdispersed(),
    "student-t-full": _student_t(),
    "gaussian-fixed-inducing": _regression(),
    "heteroscedastic": _heteroscedastic(),
    "softmax": _softmax(),
    "own-kernels-many-steps": _own_kernels(),
    "minibatch": _minibatch(),
    "lbfgs-missing-data": _missing(),
    "student-t-riemannian": _outliers(),
    "qsvgp-whitened": _probit(),
    "variational-hyperparameters": _sampled(),
}


# ---- numbers ---------------------------------------------------------------------------------


def numbers(lib: Any, case: Case) -> dict[str, np.ndarray]:
    """What a short fit gives, by name, without anything of the guide's representation."""
    guide, svi = case.make(lib, case)
    result = svi.run(jax.random.key(0), STEPS, *case.args, progress_bar=False)
    marginals = guide.marginals(result.params, case.new)
    out = {"losses": result.losses}
    for name, value in result.params.items():
        gps = [gp for gp in marginals if name.startswith(f"{gp}_auto_")]
        if not gps or (case.inducing is not None and name == f"{gps[0]}_auto_inducing"):
            out[f"params/{name}"] = value
    for gp, (mean, variance) in marginals.items():
        out |= {f"marginals/{gp}/mean": mean, f"marginals/{gp}/variance": variance}
    return {name: np.asarray(value) for name, value in out.items()}


def recorded(name: str) -> dict[str, np.ndarray]:
    """The numbers of version 0.1 of one case."""
    with np.load(RECORD) as file:
        start = f"{name}/"
        return {key.removeprefix(start): file[key] for key in file if key.startswith(start)}


def record(lib: Any, path: Path) -> None:
    arrays = {}
    for name, case in CASES.items():
        arrays |= {f"{name}/{key}": value for key, value in numbers(lib, case).items()}
    assert all(np.isfinite(value).all() for value in arrays.values())
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    import numpyro_tsvgp

    if hasattr(numpyro_tsvgp, "Riemannian"):
        raise SystemExit("The record is of version 0.1; a later one would compare with itself.")
    jax.config.update("jax_enable_x64", True)
    record(numpyro_tsvgp, RECORD)
