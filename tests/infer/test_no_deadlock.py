"""No batched LAPACK on CPU.

On a machine with few cores some releases of jaxlib hang for ever when two batched Choleskys or
triangular solves run at once. A hang inside XLA cannot be caught in the process that it happens
in, so the real thing runs in a child process with a time limit; programs are also inspected.
"""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoNormal

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
from numpyro_tsvgp.gaussian import linalg

LATENTS, M, N = 10, 100, 120
# The child compiles for a quarter of a minute and then needs a second; a hang needs for ever.
SECONDS = 150


def model(X, y=None):
    """Ten latent functions with a kernel each: ten priors and ten posteriors to factorise."""
    scale = numpyro.sample("scale", dist.LogNormal(-2.0, 0.1))
    with numpyro.plate("functions", LATENTS):
        kernel = kernels.Matern32(scale * jnp.linspace(0.5, 1.5, LATENTS)[:, None])
        f = numpyro.sample("f", GP(kernel, X))
    with numpyro.plate("outputs", LATENTS, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def problem(m, n, latents=LATENTS):
    X = jnp.linspace(0.0, 1.0, n)
    y = jnp.sin(jnp.arange(1.0, latents + 1)[:, None] * X)
    # Hyperparameters that are random even in predictions: nothing can be factorised in advance.
    guide = AutoDualGaussian(model, inducing=np.linspace(0.0, 1.0, m), hyper_guide=AutoNormal)
    svi = TSVGP(model, guide, optax.adam(0.01))
    return svi, guide, X, y


def score(scale, X, values):
    """What a chain of MCMC differentiates."""
    return jax.grad(lambda s: GP(kernels.Matern32(s), X).log_prob(values).sum())(scale)


def work(m=M, n=N, steps=10, draws=4):
    """Updates, vectorized chains and parallel predictions: everything that makes batches."""
    svi, guide, X, y = problem(m, n)
    state = svi.init(jax.random.key(0), X, y)
    update = jax.jit(svi.update)
    for _ in range(steps):
        state, loss = update(state, X, y)
    print("updates", float(loss), flush=True)
    chains = jax.jit(jax.vmap(score, in_axes=(0, None, None)))
    for _ in range(steps):
        gradient = chains(jnp.linspace(0.05, 0.2, LATENTS), X, y)
    print("chains", float(gradient.sum()), flush=True)
    predictive = Predictive(
        model, guide=guide, params=svi.get_params(state), num_samples=draws, parallel=True
    )
    print("draws", float(predictive(jax.random.key(1), X)["y"].mean()), flush=True)


@pytest.mark.slow
def test_ten_latent_functions_do_not_hang():
    """Fails if the child does not come to its end in time."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
        "JAX_ENABLE_X64": "1",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(Path(__file__).resolve())]
    try:
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode()
        pytest.fail(f"the child process hangs after: {output!r}")
    assert child.returncode == 0, child.stderr
    lines = child.stdout.split()
    assert lines[::2] == ["updates", "chains", "draws"]
    assert np.isfinite(np.array(lines[1::2], float)).all()


# ---- the same, seen in the programs ----------------------------------------------------------

_CALLS = re.compile(r"@lapack_\w*|stablehlo\.(?:cholesky|triangular_solve)")
_TENSOR = re.compile(r"tensor<((?:\d+x)+)[fc]\d")


def factorisations(lowered):
    """Ranks of the largest operand of each factorisation and each solve in a CPU program."""
    ranks = []
    for line in lowered.as_text().splitlines():
        if _CALLS.search(line):
            ranks.append(max(shape.count("x") for shape in _TENSOR.findall(line)))
    return ranks


def test_the_inspection_sees_batches():
    matrices = jnp.eye(3) + jnp.zeros((4, 1, 1))
    assert factorisations(jax.jit(jnp.linalg.cholesky).lower(matrices)) == [3]
    solve = jax.jit(lambda a: jax.scipy.linalg.solve_triangular(a, a, lower=True))
    assert factorisations(solve.lower(matrices)) == [3]
    assert factorisations(solve.lower(matrices[0])) == [2]


@pytest.mark.parametrize(
    "function",
    [pytest.param(linalg.cholesky, marks=pytest.mark.slow), linalg.cholesky_and_inverse],
)
def test_factorisations_of_batches_run_one_by_one(function):
    """A leading axis, a vmap, two of them, and derivatives, forward and backward."""
    matrices = jnp.eye(5) + 0.1 * jnp.arange(1.0, 7).reshape(2, 3, 1, 1)

    def loss(a):
        return sum(x.sum() for x in jax.tree.leaves(function(a)))

    programs = [
        function,
        jax.vmap(function),
        jax.vmap(jax.vmap(function)),
        jax.grad(loss),
        jax.vmap(jax.vmap(jax.grad(loss))),
        jax.vmap(jax.hessian(loss)),
        lambda a: jax.jvp(jax.vmap(function), (a,), (a,)),
    ]
    for program in programs:
        ranks = factorisations(jax.jit(program).lower(matrices))
        assert ranks and max(ranks) == 2
    # And they are right: batched and vmapped are the same as one by one.
    for batched in (function(matrices), jax.jit(jax.vmap(jax.vmap(function)))(matrices)):
        for i in range(2):
            for j in range(3):
                single = jax.tree.leaves(function(matrices[i, j]))
                for a, b in zip(jax.tree.leaves(batched), single, strict=True):
                    np.testing.assert_allclose(a[i, j], b, rtol=1e-12, atol=1e-14)
    expected = np.linalg.cholesky(matrices)
    np.testing.assert_allclose(jax.tree.leaves(function(matrices))[0], expected, rtol=1e-12)


@pytest.mark.slow
def test_programs_of_a_fit_and_of_predictions():
    svi, guide, X, y = problem(4, 5)
    state = svi.init(jax.random.key(0), X, y)
    params = svi.get_params(state)

    def predict(key, params):
        predictive = Predictive(model, guide=guide, params=params, num_samples=3, parallel=True)
        return predictive(key, X)

    def draw(key, params):
        return guide.sample_posterior(key, params, X, sample_shape=(3,))

    def evaluate(approximation):
        return svi.evaluate(dataclasses.replace(state, approximation=approximation), X, y)

    key = jax.random.key(0)
    programs = {
        "update": jax.jit(svi.update).lower(state, X, y),
        "stable_update": jax.jit(svi.stable_update).lower(state, X, y),
        "gradient": jax.jit(jax.grad(evaluate)).lower(state.approximation),
        "chains": jax.jit(jax.vmap(score, in_axes=(0, None, None))).lower(jnp.ones(4), X, y),
        "marginals": jax.jit(lambda p: guide.marginals(p, X)).lower(params),
        "predictive": jax.jit(predict).lower(key, params),
        "draws": jax.jit(draw).lower(key, params),
        "fits side by side": jax.jit(jax.vmap(svi.update, in_axes=(0, None, None))).lower(
            jax.tree.map(lambda x: jnp.stack([x, x]), state), X, y
        ),
    }
    for name, program in programs.items():
        ranks = factorisations(program)
        assert ranks, f"{name} factorises nothing, so this looked at the wrong program"
        assert max(ranks) == 2, f"{name} has batched LAPACK calls"


if __name__ == "__main__":
    work()
