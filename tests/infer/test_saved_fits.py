"""Fits as files: what comes back predicts what was saved, with the settings of the fit."""

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

from numpyro_tsvgp import (
    GP,
    QSVGP,
    TSVGP,
    AutoDualGaussian,
    AutoMomentGaussian,
    Riemannian,
    collapse,
    influence,
    kernels,
    load,
    loo,
    psis_khat,
    save,
    to_arviz,
)
from numpyro_tsvgp.gaussian.quadrature import GaussHermite

N = 16
RNG = np.random.default_rng(3)
X = jnp.asarray(np.sort(RNG.uniform(0.0, 1.0, N)))
Y = jnp.asarray(1.0 + np.sin(7.0 * X) + 0.3 * RNG.standard_normal(N))
Z = X[::3]
NEW = jnp.array([-0.3, 0.45, 1.2])


def model(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    offset = numpyro.param("offset", 0.5)
    f = numpyro.sample("f", GP(variance * kernels.Matern32(0.3), X, mean=lambda x: offset + x))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


GUIDES = {
    "tied, learned inputs": lambda: AutoDualGaussian(model, Z),
    "tied, fixed inputs": lambda: AutoDualGaussian(model, Z, learn_inducing=False),
    "untied": lambda: AutoDualGaussian(model, {"f": Z}, sites="untied", prefix="q"),
    "full": lambda: AutoDualGaussian(model),
    "moments": lambda: AutoMomentGaussian(model, Z, whiten=False),
    "whitened moments": lambda: AutoMomentGaussian(model, Z),
    "moments at the data": lambda: AutoMomentGaussian(model),
    "variational": lambda: AutoDualGaussian(model, Z, hyper_guide=AutoNormal),
}


def fitted(guide, **options):
    """A fit after one E-step, at other values than those that parameters start from."""
    driver = QSVGP if isinstance(guide, AutoMomentGaussian) else TSVGP
    svi = driver(guide.model, guide, None, **{"site_lr": 0.7, **options})
    start = {} if guide.model is not model else {"offset": 0.8}
    state = svi.init(jax.random.key(0), X, Y, init_params=start)
    state, _ = jax.jit(svi.update)(state, X, Y)
    return svi.fit(state, X, Y)


FAST = ("tied, learned inputs",)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in FAST)) for k in GUIDES]
)
def test_what_is_loaded_predicts_what_was_saved(kind, tmp_path):
    fit = fitted(GUIDES[kind]())
    save(tmp_path / "fit.npz", fit)
    loaded = load(tmp_path / "fit.npz", model=model)
    assert loaded.call is None and type(loaded.guide) is type(fit.guide)
    assert loaded.guide.kind("f") is fit.guide.kind("f")
    assert (loaded.rule, loaded.quadrature, loaded.objective, loaded.structure) == (
        fit.rule,
        fit.quadrature,
        fit.objective,
        fit.structure,
    )
    jax.tree.map(np.testing.assert_array_equal, loaded.params, fit.params)
    # Bit for bit, and without the data: also where the guide keeps a site for each of them.
    jax.tree.map(np.testing.assert_array_equal, loaded.marginals(NEW), fit.marginals(NEW))
    if kind != "variational":
        return
    key = jax.random.key(1)
    jax.tree.map(np.testing.assert_array_equal, loaded.sample(key, NEW), fit.sample(key, NEW))


@pytest.mark.slow
def test_diagnostics_of_a_loaded_fit_say_that_they_need_its_data(tmp_path):
    fit = fitted(GUIDES["tied, fixed inputs"](), quadrature=GaussHermite(7), rule=Riemannian())
    save(tmp_path / "fit.npz", fit)
    loaded = load(tmp_path / "fit.npz", model=model)
    assert (loaded.quadrature, loaded.rule) == (GaussHermite(7), Riemannian())
    key = jax.random.key(0)
    for diagnose in (
        loo,
        influence,
        collapse,
        partial(psis_khat, key),
        partial(to_arviz, key),
        lambda fit: fit.marginals(),
    ):
        with pytest.raises(ValueError, match=r"without its training data.*fit.with_data\(X, y\)"):
            diagnose(loaded)
    found, expected = loo(loaded.with_data(X, Y)), loo(fit)
    np.testing.assert_array_equal(found["leverage"], expected["leverage"])
    assert found["se"] == expected["se"]


@dataclass(frozen=True)
class Midpoint:
    """A quadrature rule of one's own."""

    size: int = 3

    def nodes(self, key, dim):
        return GaussHermite(self.size).nodes(key, dim)


@pytest.mark.slow
def test_what_a_file_cannot_name_is_asked_for(tmp_path):
    """Code is not saved: a rule, a guide and a guide of hyperparameters of one's own."""

    class OwnGuide(AutoDualGaussian):
        pass

    path = tmp_path / "fit.npz"
    narrow = partial(AutoNormal, init_scale=0.01)
    save(path, fitted(AutoDualGaussian(model, Z, hyper_guide=narrow)))
    with pytest.raises(ValueError, match="functools.partial.*AutoNormal.*not one of NumPyro's"):
        load(path, model=model)
    assert load(path, model=model, hyper_guide=narrow).guide.make_hyper_guide is narrow

    fit = fitted(OwnGuide(model, Z), quadrature=Midpoint(4))
    save(path, fit)
    with pytest.raises(ValueError, match="quadrature Midpoint.*quadrature=..."):
        load(path, model=model)
    with pytest.raises(ValueError, match="guide of class OwnGuide.*guide=guide"):
        load(path, model=model, quadrature=Midpoint(4))
    loaded = load(path, model=model, quadrature=Midpoint(4), guide=OwnGuide(model, Z))
    jax.tree.map(np.testing.assert_array_equal, loaded.marginals(NEW), fit.marginals(NEW))


@pytest.mark.slow
def test_another_process_predicts_without_the_data(tmp_path):
    (tmp_path / "models.py").write_text(
        textwrap.dedent("""
        import numpyro, numpyro.distributions as dist
        from numpyro_tsvgp import GP, kernels

        def model(X, y=None):
            variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
            f = numpyro.sample("f", GP(variance * kernels.Matern32(0.3), X))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
        """)
    )
    namespace = {}
    exec((tmp_path / "models.py").read_text(), namespace)
    fit = fitted(AutoDualGaussian(namespace["model"], Z))
    save(tmp_path / "fit.npz", fit)
    code = """
    import numpy as np
    from models import model
    from numpyro_tsvgp import load, loo

    fit = load("fit.npz", model=model)
    q = fit.marginals(np.array([-0.3, 0.45, 1.2]))["f"]
    try:
        loo(fit)
    except ValueError as error:
        print("refused:", error)
    data = np.load("data.npz")
    elpd = loo(fit.with_data(data["X"], data["Y"]), threshold=1.0)
    np.savez("found.npz", *q, elpd["leverage"])
    """
    np.savez(tmp_path / "data.npz", X=X, Y=Y)
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert "refused: This fit is without its training data" in done.stdout
    mean, variance, leverage = np.load(tmp_path / "found.npz").values()
    expected = fit.marginals(NEW)["f"]
    np.testing.assert_allclose(mean, expected.mean, rtol=1e-12)
    np.testing.assert_allclose(variance, expected.variance, rtol=1e-10)
    np.testing.assert_allclose(leverage, loo(fit, threshold=1.0)["leverage"], rtol=1e-10)
