"""Products ask for the full precision of their type, which accelerators do not give unasked."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from canonical import CANONICAL, X_NEW, Z
from canonical import result as fitted
from jax import lax
from jax.extend.core import jaxprs_in_params
from numpyro.infer import Predictive

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    collapse,
    influence,
    kernels,
    loo,
    psis_khat,
    to_arviz,
)

HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
LOW = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)


def products(function, *args):
    """The precision of every product in the program of a function, those within others included."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found.append(eqn.params["precision"])
            for inner in jaxprs_in_params(eqn.params):
                walk(inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def model(X, A, y=None):
    weights = numpyro.param("weights", jnp.ones(2))
    low = jnp.matmul(A, weights, precision=lax.Precision.DEFAULT)
    f = numpyro.sample("f", GP(kernels.Matern52(0.3), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + A @ weights + low)), obs=y)


def test_every_product_of_an_update_is_of_full_precision():
    """Those of the user's likelihood, too, except where they ask for another."""
    X = np.linspace(0.0, 1.0, 12)
    data = X, np.ones((12, 2)), np.ones(12)
    svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), optax.adam(0.1))
    state = svi.init(jax.random.key(0), *data)
    found = products(lambda state, *data: svi.update(state, *data), state, *data)
    own = [precision for precision in found if precision != LOW]
    assert len(own) > 10 and set(own) == {HIGHEST}
    assert len(own) < len(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labels", "spread"])
def test_every_compiled_product_after_a_fit_is_of_full_precision(name, monkeypatch):
    """Looks at products as they are traced; what runs one by one on a CPU has full precision."""
    result, key, found = fitted(name), jax.random.key(0), []  # the fit is made before
    fit, data = result.fit, result.fit.data.args
    bind = lax.dot_general_p.bind

    def recorded(*args, **params):
        if any(isinstance(x, jax.core.Tracer) for x in args):
            found.append(params["precision"])
        return bind(*args, **params)

    monkeypatch.setattr(lax.dot_general_p, "bind", recorded)
    tasks = {
        "marginals": lambda: fit.marginals(X_NEW),
        "sample": lambda: fit.sample(key, X_NEW, sample_shape=(2,)),
        "predict": lambda: fit.predict(X_NEW).quantiles([0.5]),
        "predictor": lambda: fit.predictor()(X_NEW),
        "guide": lambda: Predictive(fit.model, guide=fit.guide, params=fit.params, num_samples=2)(
            key, X_NEW
        ),
        "loo": lambda: loo(fit),
        "influence": lambda: influence(fit),
        "to_arviz": lambda: to_arviz(key, fit, num_samples=2),
        "audit": lambda: fit.audit(key, num_draws=4),
        "psis_khat": lambda: psis_khat(key, fit, num_samples=50),
        "condition": lambda: fit.condition(*(part[:2] for part in data)),
    }
    for task, function in tasks.items():
        jax.clear_caches()  # or what an earlier task has traced would not be traced again
        found.clear()
        function()
        assert set(found) <= {HIGHEST}, f"{task}: {sorted(map(str, set(found)))}"
        assert found or task in ("predictor",), task


@pytest.mark.slow
def test_every_product_of_a_collapsed_density_is_of_full_precision():
    fit = fitted("labels").fit
    log_density = numpyro.infer.util.log_density
    found = products(lambda hyper: log_density(collapse(fit), (), {}, hyper)[0], fit.hyper)
    assert len(found) > 5 and set(found) == {HIGHEST}


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_on_cpu_nothing_changes(x64):
    """The compiled update is the same program but for the precision that it asks for."""
    with jax.enable_x64(x64):
        given = CANONICAL["spread"]
        svi = TSVGP(given.model, AutoDualGaussian(given.model, **given.guide), optax.adam(0.1))
        data = jnp.asarray(np.linspace(0, 1, len(given.y))), jnp.asarray(given.y)
        state = svi.init(jax.random.key(0), *data)
        asked = jax.jit(lambda state, *data: svi.update(state, *data))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "default_matmul_precision", lambda _: jax.enable_x64(x64))
            plain = jax.jit(lambda state, *data: svi.update(state, *data))
            other = plain.lower(state, *data).compile()
        same = asked.lower(state, *data).compile()
        assert "operand_precision={highest,highest}" in same.as_text()
        assert _stripped(same.as_text()) == _stripped(other.as_text())
        for left, right in zip(
            jax.tree.leaves(same(state, *data)), jax.tree.leaves(other(state, *data)), strict=True
        ):
            if not jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(left, right)


def _stripped(text):
    """A compiled program without what says where it comes from."""
    body = text[text.index("\n%") :]  # after tables of files and lines
    body = re.sub(r", (metadata|operand_precision|frontend_attributes)=\{[^}]*\}", "", body)
    return re.sub(r", (backend_config|stack_frame_id)=[^\n]*", "", body)
