"""Posteriors of chains of states against dense linear algebra, by both programs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tsvgp import kernels
from numpyro_tsvgp.gaussian import associative_scan, chain, sequential_scan
from numpyro_tsvgp.gaussian.approximation import Noise
from numpyro_tsvgp.gaussian.markov import Markov
from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.series import series_of
from numpyro_tsvgp.gaussian.small import inverse, psd_factor

N, P = 24, 2
RNG = np.random.default_rng(0)
TIMES = jnp.asarray(np.sort(RNG.uniform(0.0, 5.0, N))).at[7].set(1.0).at[8].set(1.0).sort()
APART = jnp.asarray(np.sort(RNG.uniform(0.0, 5.0, N)))
LINEAR = jnp.asarray(RNG.normal(size=(P, N)))
QUADRATIC = jnp.asarray(RNG.uniform(0.0, 2.0, (P, N))).at[:, 5].set(0.0)
WEIGHTS = jnp.asarray(RNG.normal(size=(2, P, N)))
HYPER = jnp.array([1.3, 0.6, 0.4])


def kernel_of(hyper):
    return hyper[0] * kernels.Matern32(hyper[1]) + hyper[2] * kernels.Matern12(2.0)


def by_chain(program, once, hyper, t, linear, quadratic):
    loc = jnp.zeros((1, N))
    series = series_of(Process(kernel_of(hyper), t, loc, loc, None, (P,)), t)
    args = series.space, series.start, series.t, linear, quadratic
    if once:
        return chain.smooth_once(*args, program)
    found = chain.smooth(*args, program)
    return found.mean, found.variance, chain.log_normaliser(found, linear, quadratic).sum()


def by_dense(hyper, t, linear, quadratic):
    K = kernel_of(hyper)(t, t)
    B = jnp.eye(N) + K[None] * quadratic[:, None]
    S = jnp.linalg.solve(B, jnp.broadcast_to(K, B.shape))
    mean = jnp.einsum("pij,pj->pi", S, linear)
    log_z = 0.5 * (linear * mean).sum() - 0.5 * jnp.linalg.slogdet(B)[1].sum()
    return mean, jnp.diagonal(S, axis1=1, axis2=2), log_z


def scored(posterior):
    def score(*args):
        mean, variance, log_z = posterior(*args)
        away = (WEIGHTS[0] * jnp.sin(mean)).sum() + (WEIGHTS[1] * variance**2).sum()
        return away + 1.7 * log_z, (mean, variance, log_z)

    return score


@pytest.mark.parametrize(
    ("program", "once"),
    [
        pytest.param(sequential_scan, True, marks=pytest.mark.slow),
        pytest.param(sequential_scan, False, marks=pytest.mark.slow),
        pytest.param(associative_scan, True, marks=pytest.mark.slow),
        pytest.param(associative_scan, False, marks=pytest.mark.slow),
    ],
)
def test_posterior_and_derivatives_of_any_function_of_it(program, once, request):
    """Marginals, log Z, and a gradient that is not that of log Z, in everything.

    Two times are the same, and a site of zero stands for a value that is missing.
    """

    def ours(*args):
        return by_chain(program, once, *args)

    # At equal times f has no slope in them.
    cases = [(TIMES, (0, 2, 3)), (APART, 1)]
    for t, wrt in cases if request.node.get_closest_marker("slow") else cases[:1]:
        args = HYPER, t, LINEAR, QUADRATIC
        gradient, values = jax.jit(jax.grad(scored(ours), wrt, has_aux=True))(*args)
        dense_gradient, dense = jax.grad(scored(by_dense), wrt, has_aux=True)(*args)
        ours_all, exact_all = (
            jax.tree.leaves(x) for x in ((values, gradient), (dense, dense_gradient))
        )
        for found, exact in zip(ours_all, exact_all, strict=True):
            np.testing.assert_allclose(found, exact, atol=1e-10)


@pytest.mark.slow
def test_programs_agree(monkeypatch):
    """Of a whole series: many missing values, ties, gaps; values, gradients and draws."""
    n, rng = 48, np.random.default_rng(3)
    t = jnp.asarray(np.sort(np.round(rng.uniform(0.0, 8.0, n), 1)) + 1e3 * (np.arange(n) > 30))
    quadratic = jnp.asarray(rng.uniform(0.0, 9.0, (P, n)) * (rng.uniform(size=(P, n)) < 0.7))
    linear = quadratic * jnp.asarray(rng.normal(size=(P, n)))
    new = jnp.array([-3.0, 5.05, 900.0, 1300.0])
    weights = jnp.asarray(rng.normal(size=(2, P, n)))

    def found(hyper, linear, quadratic):
        loc = jnp.zeros((1, n))
        series = series_of(Process(kernel_of(hyper), t, loc, loc, None, (P,)), t)
        mean, variance, log_z = series.smooth_once((linear, quadratic))
        return (weights[0] * jnp.sin(mean) + weights[1] * variance).sum() + log_z, (mean, variance)

    def draws(hyper, linear, quadratic):
        there = jnp.zeros((1, 4))
        process = Process(kernel_of(hyper), new, there, jnp.zeros((1, n)), None, (P,))
        q = Markov(linear, quadratic, t, jnp.zeros((1, n)))
        shapes = q.noise_shape(process)
        noise = Noise(*(jnp.asarray(np.random.default_rng(4).normal(size=s)) for s in shapes))
        return q.joint(process).draw(noise)

    results = []
    for program in (sequential_scan, associative_scan):
        monkeypatch.setattr(chain, "program", lambda program=program: program)
        args = HYPER, linear, quadratic
        # Other objects for each program: what is compiled knows nothing of the choice.
        value_and_grad = jax.value_and_grad(partial(found), (0, 1, 2), has_aux=True)
        results.append((jax.jit(value_and_grad)(*args), jax.jit(partial(draws))(*args)))
    # Relative to the largest numbers of each array.
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-8 * max(1.0, float(jnp.abs(one).max())))


@pytest.mark.slow
def test_a_state_of_many_numbers():
    """Trend, week and day: products that are not written out, emissions that are not the first."""

    def kernel(hyper):
        trend = kernels.IntegratedBrownian(hyper[0], origin=-1.0) + 1.0
        week = hyper[1] * kernels.Periodic(1.5, 7.0, order=10)
        return trend + week + 0.5 * kernels.Periodic(hyper[2], 1.0, order=12)

    loc = jnp.zeros((1, N))

    def ours(hyper):
        series = series_of(Process(kernel(hyper), APART, loc, loc, None, (1,)), APART)
        return series.smooth_once((LINEAR[:1], QUADRATIC[:1]))

    def dense(hyper):
        K = kernel(hyper)(APART, APART)
        B = jnp.eye(N) + K * QUADRATIC[0]
        S = jnp.linalg.solve(B, K)
        log_z = 0.5 * LINEAR[0] @ S @ LINEAR[0] - 0.5 * jnp.linalg.slogdet(B)[1]
        return (S @ LINEAR[0])[None], jnp.diag(S)[None], log_z

    def score(posterior):
        def of(hyper):
            mean, variance, log_z = posterior(hyper)
            away = (WEIGHTS[0, 0] * jnp.sin(mean)).sum() + (WEIGHTS[1, 0] * variance**2).sum()
            return away + 1.7 * log_z

        return of

    hyper = jnp.array([0.01, 0.4, 1.5])
    found = jax.jit(jax.value_and_grad(score(ours)))(hyper)
    exact = jax.value_and_grad(score(dense))(hyper)
    np.testing.assert_allclose(found[0], exact[0], rtol=1e-10)
    np.testing.assert_allclose(found[1], exact[1], rtol=1e-9)


@pytest.mark.slow
def test_second_derivatives_of_the_cheap_form_are_refused():
    def score(hyper):
        found = by_chain(sequential_scan, True, hyper, TIMES, LINEAR, QUADRATIC)
        return found[2] + found[0].sum()

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.grad(lambda hyper: jax.grad(score)(hyper).sum())(HYPER)


@pytest.mark.slow
def test_single_precision_with_a_hundred_thousand_points():
    """Gaps from 1e-6 to 1e3 lengthscales, and a sum whose parts the data cannot tell apart."""
    rng = np.random.default_rng(1)
    n = 100_000
    gaps = 10 ** rng.uniform(-6, 3, n)
    gaps[: n // 2] = 10 ** rng.uniform(-6, -3, n // 2)
    y = np.sin(np.cumsum(gaps))[None]
    kernel = kernels.Matern52(1.0) + kernels.Constant(0.3)

    @jax.jit
    def posterior(gaps, linear, quadratic):
        loc = jnp.zeros((1, 2), linear.dtype)
        series = series_of(Process(kernel, gaps[:2], loc, loc, None, (1,)), gaps[:2])
        return chain.smooth(_ByGaps(series.space), series.start, gaps, linear, quadratic)

    found = {}
    for dtype in (jnp.float64, jnp.float32):
        precision = jnp.full((1, n), 100.0, dtype)
        found[dtype] = posterior(
            jnp.asarray(gaps, dtype), precision * jnp.asarray(y, dtype), precision
        )
    exact, single = found[jnp.float64], found[jnp.float32]
    assert single.mean.dtype == jnp.float32
    error = np.abs(single.mean - exact.mean) / np.sqrt(exact.variance)
    assert error.max() < 0.05  # of a posterior standard deviation, 1e-2 of the prior's and less
    np.testing.assert_allclose(single.variance, exact.variance, rtol=0.02)


@jax.tree_util.register_pytree_node_class
class _ByGaps:
    """A form that is told gaps for times, which single precision could not tell apart."""

    def __init__(self, space):
        self.space = space

    def tree_flatten(self):
        return (self.space,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    def step(self, t0, t1):
        return self.space.step(jnp.zeros_like(t1), t1)


@pytest.mark.slow
def test_small_matrices():
    rng = np.random.default_rng(2)
    for d in (3, 6):
        matrix = rng.normal(size=(d, d, 5))
        matrix[0, 0] = 0.0  # needs a pivot
        exact = np.moveaxis(np.linalg.inv(np.moveaxis(matrix, -1, 0)), 0, -1)
        np.testing.assert_allclose(inverse(jnp.asarray(matrix)), exact, rtol=1e-8)
        half = rng.normal(size=(d, d - 1, 5))  # singular
        product = np.einsum("ikb,jkb->ijb", half, half)
        factor = psd_factor(jnp.asarray(product))
        np.testing.assert_allclose(np.einsum("ikb,jkb->ijb", factor, factor), product, atol=1e-7)
