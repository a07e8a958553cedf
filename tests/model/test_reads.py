"""What is read, against Jacobians and Hessians; never less, and exactly where that is claimed."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.scipy.special import log_ndtr, logsumexp
from tiers import cases

from numpyro_tsvgp.model.reads import Offence, Source, reads, terms

N = 6
RNG = np.random.RandomState(0)
Y = RNG.standard_normal(N)
POSITIVE = np.abs(Y) + 0.1
UNIT = np.array([0.2, 0.4, 0.6, 0.3, 0.7, 0.5])
COUNTS = np.array([0, 2, 1, 0, 3, 1])
BINARY = np.array([0, 1, 1, 0, 1, 0])
MASK = np.array([True, False, True, True, False, False])
GROUP = np.array([2, 0, 2, 5, 1, 1])
DESIGN = np.eye(N)[GROUP]
LOWER = np.tril(np.ones((N, N)))
COVARIANCE = np.array([[1.0, 0.3], [0.3, 2.0]])


@jax.custom_vjp
def _cube(x: Any) -> Any:
    return x**3


_cube.defvjp(lambda x: (x**3, x), lambda x, cotangent: (3 * x**2 * cotangent,))


@jax.custom_batching.custom_vmap
def _double(x: Any) -> Any:
    return 2 * x


@_double.def_vmap
def _(size: Any, batched: Any, x: Any) -> Any:
    return 2 * x, batched[0]


def _mixture(f: Any) -> Any:
    parts = dist.Normal(jnp.stack([f[0], f[1]], -1), 0.5)
    return dist.MixtureSameFamily(dist.Categorical(jnp.array([0.3, 0.7])), parts).log_prob(Y)


def _newton(f: Any) -> Any:
    return jax.lax.fori_loop(0, 5, lambda _, x: x - (x**3 + x - f[0]) / (3 * x**2 + 1), f[0])


def _root(f: Any) -> Any:
    def solve(g: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 9, lambda _, x: x - g(x) / (3 * x**2 + 1), x)

    return jax.lax.custom_root(
        lambda x: x**3 + x - f[0], f[0], solve, lambda g, y: y / g(jnp.ones_like(y))
    )


def _loop_over_rows(f: Any) -> Any:
    return jax.lax.fori_loop(
        0, N, lambda i, total: total + jnp.sin(f[0][i]) * jnp.asarray(Y)[i], 0.0
    )


def _random_walk(f: Any) -> Any:
    return jax.lax.scan(lambda c, x: (0.5 * c + x, jnp.tanh(c + x)), 0.0, f[0])[1]


def _filled_by_loop(f: Any) -> Any:
    def body(i: Any, out: Any) -> Any:
        return out.at[i].set(jnp.cos(f[0][2] * f[1][i]))

    return jax.lax.fori_loop(0, N, body, jnp.zeros(N))


class Case(NamedTuple):
    """A function of latent values ``(2, N)``.

    ``tight``: exactly what the Jacobian says. ``additive``: whether all results are found to be
    sums of terms; by default, whether all of them read one row. ``meets``: whether the two latent
    functions are found to meet. ``opaque``: the operations that are not looked into. ``jacobian``:
    how it is differentiated.
    """

    function: Any
    tight: bool = True
    additive: bool | None = None
    meets: bool | None = None
    opaque: str = ""
    jacobian: Any = jax.jacfwd


LIKELIHOODS = {
    "normal": Case(lambda f: dist.Normal(f[0], 0.3).log_prob(Y), meets=False),
    "heteroscedastic": Case(lambda f: dist.Normal(f[0], jnp.exp(f[1])).log_prob(Y), meets=True),
    "bernoulli": Case(lambda f: dist.Bernoulli(logits=f[0]).log_prob(BINARY), meets=False),
    "poisson": Case(lambda f: dist.Poisson(jnp.exp(f[0])).log_prob(COUNTS)),
    "student": Case(lambda f: dist.StudentT(4.0, f[0], jnp.exp(f[1])).log_prob(Y), meets=True),
    "gamma": Case(lambda f: dist.Gamma(jnp.exp(f[0]), jnp.exp(f[1])).log_prob(POSITIVE)),
    "negative binomial": Case(
        lambda f: dist.NegativeBinomial2(jnp.exp(f[0]), jnp.exp(f[1])).log_prob(COUNTS)
    ),
    "categorical": Case(lambda f: dist.Categorical(logits=f.T).log_prob(BINARY), meets=True),
    "beta": Case(lambda f: dist.Beta(jnp.exp(f[0]), jnp.exp(f[1])).log_prob(UNIT)),
    "ordered": Case(
        lambda f: dist.OrderedLogistic(f[0], jnp.array([-1.0, 0.5, 1.0])).log_prob(COUNTS)
    ),
    "laplace": Case(lambda f: dist.Laplace(f[0], jnp.exp(f[1])).log_prob(Y)),
    "mixture": Case(_mixture, meets=True),
    "zero-inflated": Case(
        lambda f: dist.ZeroInflatedPoisson(jax.nn.sigmoid(f[0]), jnp.exp(f[1])).log_prob(COUNTS),
        tight=False,  # where the count is not zero, a case that is not taken is read
    ),
    "weibull": Case(lambda f: dist.Weibull(jnp.exp(f[0]), jnp.exp(f[1])).log_prob(POSITIVE)),
    "beta-binomial": Case(
        lambda f: dist.BetaBinomial(jnp.exp(f[0]), jnp.exp(f[1]), 4).log_prob(COUNTS)
    ),
    "multinomial": Case(
        lambda f: dist.Multinomial(logits=f.T, total_count=3).log_prob(
            np.stack([BINARY, 3 - BINARY], -1)
        )
    ),
    "von Mises": Case(lambda f: dist.VonMises(f[0], jnp.exp(f[1])).log_prob(Y)),
    "truncated": Case(
        lambda f: dist.TruncatedNormal(f[0], jnp.exp(f[1]), low=0.0).log_prob(POSITIVE)
    ),
    "correlated outputs": Case(
        lambda f: dist.MultivariateNormal(f.T, COVARIANCE).log_prob(np.stack([Y, UNIT], -1)),
        meets=True,
    ),
    "covariance of each row": Case(
        lambda f: dist.MultivariateNormal(
            jnp.zeros(2), jnp.exp(f[0])[:, None, None] * COVARIANCE
        ).log_prob(np.stack([Y, UNIT], -1)),
    ),
    "censored": Case(
        lambda f: jnp.where(MASK, log_ndtr(f[0] - Y), dist.Normal(f[0]).log_prob(Y)), meets=False
    ),
    "to event": Case(lambda f: dist.Normal(f[0]).to_event(1).log_prob(Y), additive=True),
    "masked": Case(
        lambda f: dist.Normal(f[0], jnp.exp(f[1])).mask(MASK).log_prob(Y),
        tight=False,
    ),
}

INDEXED = {
    "group": Case(lambda f: jnp.sin(f[0][GROUP]) + f[1], meets=False),
    "take": Case(lambda f: jnp.take(f[0], GROUP) ** 2),
    "take, outside": Case(lambda f: jnp.take(f[0], np.array([0, 9, 2]), mode="fill")[::2]),
    "take along": Case(lambda f: jnp.take_along_axis(f, np.array([GROUP]), 1)[0]),
    "design matrix": Case(lambda f: jnp.exp(DESIGN @ f[0])),
    "design matrix, batched": Case(
        lambda f: jnp.einsum("bij,bj->bi", np.stack([DESIGN, DESIGN[::-1]]), f)
    ),
    "matrix from the right": Case(lambda f: f @ DESIGN.T),
    "triangular matrix": Case(lambda f: jnp.sin(LOWER @ f[0])),
    "zero rows": Case(lambda f: (DESIGN * MASK[:, None]) @ f[0]),
    "dynamic slice": Case(lambda f: jax.lax.dynamic_slice(f, (1, GROUP[0]), (1, 3))),
    "update": Case(lambda f: jax.lax.dynamic_update_slice(f[0], f[1][:2], (GROUP[0],))),
    "set": Case(lambda f: f[0].at[np.array([1, 4])].set(f[1][:2])),
    "set twice": Case(lambda f: f[0].at[np.array([1, 1])].set(f[1][:2]), tight=False),
    "multiply": Case(lambda f: f[0].at[np.array([1, 4])].multiply(f[1][:2], unique_indices=True)),
    "segments": Case(lambda f: jax.ops.segment_sum(jnp.sin(f[0]), GROUP, N), additive=True),
    "function of segments": Case(lambda f: jnp.exp(jax.ops.segment_sum(f[0], GROUP, N))),
    "segment maximum": Case(lambda f: jax.ops.segment_max(f[0], GROUP, N), tight=False),
    "roll": Case(lambda f: f[0] * jnp.roll(f[1], 1), meets=True),
    "difference": Case(lambda f: jnp.abs(jnp.diff(f[0])), additive=False),
    "linear difference": Case(lambda f: jnp.diff(f[0]), additive=True),
    "pad": Case(lambda f: jax.lax.pad(f[0], 0.0, [(1, -1, 1)])),
    "tile": Case(lambda f: jnp.tile(f, (2, 1))),
    "repeat": Case(lambda f: jnp.repeat(f[0], 3)),
    "split": Case(lambda f: jnp.concatenate(jnp.split(f[0], 3)[::-1])),
    "stack": Case(lambda f: jnp.stack([f[0], f[1][::-1]], 1).reshape(3, 4).T),
    "unstack": Case(lambda f: jnp.unstack(f)[1] ** 2),
    "outer": Case(lambda f: jnp.tril(jnp.outer(f[0], f[1])), tight=False, meets=True),
    "interpolation": Case(lambda f: jnp.interp(f[0], np.linspace(-3, 3, 9), np.arange(9.0) ** 2)),
    "table": Case(lambda f: jnp.asarray(Y)[jnp.floor(f[0]).astype(int)] + f[0]),
    "where": Case(lambda f: jnp.where(MASK, f[0], f[1]), tight=False, meets=False),
    "where it is": Case(lambda f: jnp.where(f[0] > 0, f[0], f[1]), tight=False, meets=True),
}

TOGETHER = {
    "sum": Case(lambda f: jnp.sum(jnp.exp(f[0]) + f[1] ** 2), additive=True, meets=False),
    "sum, weighted": Case(lambda f: -jnp.sum(Y * jnp.exp(f[0])) / 3.0, additive=True),
    "sum of products": Case(lambda f: f[0] @ f[1], additive=True, meets=True),
    "wrong products": Case(lambda f: f[0] @ f[0][::-1], additive=False),
    "exp of sum": Case(lambda f: jnp.exp(jnp.sum(f[0])), additive=False),
    "mean": Case(lambda f: jnp.mean(jnp.sin(f)), additive=True, meets=False),
    "distance to mean": Case(lambda f: jnp.abs(f[0] - f[0].mean()), additive=False),
    "cumulative": Case(lambda f: jnp.cumsum(f[0]), additive=False),
    "cumulative, reverse": Case(lambda f: jax.lax.cumsum(f[0], reverse=True), additive=False),
    "cumulative logsumexp": Case(lambda f: jax.lax.cumlogsumexp(f[0]), additive=False),
    "associative": Case(lambda f: jnp.sin(jax.lax.associative_scan(jnp.add, f[0]))),
    "sort": Case(lambda f: jnp.sort(f[0]), tight=False, additive=False),
    "sort by": Case(lambda f: f[1][jnp.argsort(f[0])], False, False, opaque="gather"),
    "sort latents": Case(lambda f: jnp.sort(f, 0), tight=False, additive=True, meets=True),
    "maximum": Case(lambda f: jnp.max(f[0]), tight=False, additive=False),
    "largest": Case(lambda f: jax.lax.top_k(f.T, 1)[0], tight=False, additive=True),
    "median": Case(lambda f: jnp.median(f[0]), tight=False, additive=False),
    "softmax": Case(lambda f: jax.nn.log_softmax(f, 0), additive=True, meets=True),
    "softmax of rows": Case(lambda f: jax.nn.log_softmax(f[0]), additive=False),
    "softplus": Case(lambda f: jax.nn.softplus(f[0] + f[1]), meets=True),
    "logsumexp": Case(lambda f: logsumexp(f, 0), meets=True),
    "norm": Case(lambda f: jnp.linalg.norm(f, axis=0), meets=True),
    "solve": Case(lambda f: jnp.linalg.solve(COVARIANCE + jnp.zeros((N, 1, 1)), f.T[..., None])),
    "inverse": Case(lambda f: jnp.linalg.inv(jnp.exp(f[0])[:, None, None] * COVARIANCE)[:, 0, 1]),
    "determinant": Case(
        lambda f: jnp.linalg.slogdet(jnp.exp(f.T)[:, :, None] * COVARIANCE)[1], meets=True
    ),
    "fourier": Case(lambda f: jnp.abs(jnp.fft.fft(f[0])), additive=False, opaque="fft"),
    "convolution": Case(
        lambda f: jnp.convolve(f[0], np.array([1.0, 2.0])),
        tight=False,
        additive=False,
        opaque="conv_general_dilated",
    ),
}

CONTROL = {
    "vmap": Case(jax.vmap(lambda a: jnp.sin(a[0]) * a[1], in_axes=1), meets=True),
    "vmap with index": Case(
        lambda f: jax.vmap(lambda i, a: jnp.cos(f[0][i]) * a)(GROUP, f[1]), meets=True
    ),
    "jit": Case(jax.jit(lambda f: jnp.sin(f[0]))),
    "checkpoint": Case(jax.checkpoint(lambda f: jnp.sin(f[0] * f[1]))),
    "custom vjp": Case(lambda f: _cube(f[0]), jacobian=jax.jacrev),
    "custom vmap": Case(lambda f: _double(f[0]) + jax.vmap(_double)(f[1])),
    "custom root": Case(_root),
    "map": Case(lambda f: jax.lax.map(lambda a: jnp.exp(a[0]) * a[1], (f[0], Y))),
    "scan": Case(_random_walk, additive=False),
    "scan, reverse": Case(
        lambda f: jax.lax.scan(lambda c, x: (c * x, c + x), 1.0, f[0], reverse=True)[1],
        additive=False,
    ),
    "loop over rows": Case(_loop_over_rows, additive=True, meets=False),
    "loop of newton": Case(_newton),
    "loop that fills": Case(_filled_by_loop, meets=True),
    "while": Case(
        lambda f: jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * f[0]), (0, f[1])
        )[1],
        opaque="while",
    ),
    "while it is": Case(
        lambda f: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, f[0]),
        tight=False,
        additive=False,
        opaque="while",
    ),
    "while, for each row": Case(
        jax.vmap(lambda a: jax.lax.while_loop(lambda x: x[0] < 3, lambda x: x * x + 1, a), 1),
        tight=False,  # the first of two values decides about both
        meets=True,
        opaque="while",
    ),
    "cond": Case(lambda f: jax.lax.cond(Y[0] > 0, jnp.sin, jnp.cos, f[0])),
    "cond it is": Case(
        lambda f: jax.lax.cond(f[0][3] > 0, jnp.sin, jnp.cos, f[0]), tight=False, additive=False
    ),
    "switch of vmap": Case(
        lambda f: jax.vmap(lambda i, a: jax.lax.switch(i, [jnp.sin, jnp.cos], a))(BINARY, f[0])
    ),
    "precision": Case(lambda f: jnp.sin(f[0].astype(jnp.float32)).astype(float)),
    "complex": Case(lambda f: jnp.abs(jnp.exp(f[0] + 1j * f[1]) + 1.0), meets=True),
    "pytree": Case(lambda f: {"a": f[0] ** 2, "b": (jnp.sin(f[1]),)}["b"][0]),
    "stop gradient": Case(lambda f: jax.lax.stop_gradient(f[0]), tight=False),
    "nothing": Case(lambda f: jnp.asarray(Y), meets=False),
}

CASES = {**LIKELIHOODS, **INDEXED, **TOGETHER, **CONTROL}
SOURCE = Source(*np.indices((2, N)))
# Kinks that no random point crosses: the pattern is known, not found.
HIDDEN = {
    "capped sum": lambda f: jax.nn.relu(jnp.sum(jax.nn.relu(f[0])) - 60.0),
    "laplace of sum": lambda f: dist.Laplace(jnp.sum(f[0]), 1.0).log_prob(0.3),
    "laplace of mean": lambda f: dist.Laplace(f[0].mean(), 1.0).log_prob(0.3),
    "cap of maximum": lambda f: jnp.minimum(jnp.max(f[0]), -50.0),
    "penalty of range": lambda f: jnp.where(jnp.ptp(f[0]) > 40.0, -jnp.inf, 0.0),
    "rounded": lambda f: jnp.round(1e-6 * jnp.prod(f[0])),
    "index": lambda f: jnp.asarray(Y)[jnp.argmax(f[0])],
    "index of a latent": lambda f: f[1][jnp.argmax(f[0])],
    "indices of a latent": lambda f: f[1][jnp.argsort(f[0])[:2]].sum(),
    "slice of a latent": lambda f: jax.lax.dynamic_slice(f[1], (jnp.argmax(f[0]),), (1,))[0],
    "place of an update": lambda f: jnp.zeros(N).at[jnp.argmax(f[0])].set(f[1][0])[2],
    "place of an addition": lambda f: jnp.zeros(N).at[jnp.argmax(f[0])].add(f[1][0])[2],
    "payload of a sort": lambda f: jax.lax.sort((f[0], f[1]), num_keys=1)[1][0],
    "mutable": lambda f: _through_mutable(f),
    "host": lambda f: jax.pure_callback(np.sum, jax.ShapeDtypeStruct((), f.dtype), f[0]),
    "long loop": lambda f: (
        jax.lax.fori_loop(0, 5000, lambda i, c: jnp.roll(c, 1) * 0.5, f[0]).sum() ** 2
    ),
}


def _through_mutable(f: Any) -> Any:
    cell = jax.new_ref(jnp.zeros(()))
    cell[...] = jnp.sum(f[0]) ** 2
    return cell[...] * 1.0


def _derivatives(case: Case, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the Jacobian ``(*results, 2, N)`` and the Hessian of raveled results are not zero."""
    jacobian = case.jacobian(case.function)
    hessian = case.jacobian(case.jacobian(lambda f: jnp.ravel(case.function(f))))
    both = jax.jit(lambda f: (jacobian(f), hessian(f)))
    found: list[Any] = [False, False]
    for seed in range(points):
        f = np.random.RandomState(seed).standard_normal((2, N)) * (0.5 + seed)
        found = [
            old | (np.abs(np.asarray(new)) > 1e-9) for old, new in zip(found, both(f), strict=True)
        ]
    return found[0], found[1]


def _bounds(pattern: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest row of a pattern, in the convention of ``Reads``."""
    rows = np.arange(pattern.shape[-1])
    low = np.where(pattern, rows, np.iinfo(np.int32).max).min(-1)
    return low, np.where(pattern, rows, -1).max(-1)


def _check(case: Case, found: Any, points: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Never less than derivatives say; the rows that these say are returned."""
    jacobian, hessian = _derivatives(case, points)
    low, high = _bounds(jacobian)
    assert (found.reads.low <= low).all() and (found.reads.high >= high).all()
    assert not (hessian.any((0, 2, 4)) & ~found.meets).any()
    other = ~np.eye(N, dtype=bool)
    for latent in range(2):
        several = (hessian[:, latent, :, latent] & other).any((1, 2))
        assert not (several & found.additive.ravel()).any()
    return low, high


@pytest.mark.parametrize("name", cases(CASES, fast=list(CASES)[::3]))
def test_reads_and_terms_are_what_derivatives_say(name: str) -> None:
    case = CASES[name]
    found, opaque = terms(lambda f, _: case.function(f), jnp.zeros((2, N)), SOURCE)
    assert opaque == set(case.opaque.split())
    low, high = _check(case, found)
    if case.tight:
        np.testing.assert_array_equal(found.reads.low, low)
        np.testing.assert_array_equal(found.reads.high, high)
    additive = found.reads.one.all() if case.additive is None else case.additive
    assert found.additive.all() == additive
    assert (found.offence is None) == additive
    if case.meets is not None:
        assert found.meets[0, 1] == case.meets


@pytest.mark.parametrize("name", HIDDEN)
def test_kinks_that_are_not_crossed_are_read(name: str) -> None:
    found = terms(lambda f, _: HIDDEN[name](f), jnp.zeros((2, N)), SOURCE).results
    assert found.reads.low[..., 0] == 0 and found.reads.high[..., 0] == N - 1
    assert not found.additive.any()
    assert found.element == ()
    assert found.offence[:3] == (0, 0, N - 1)


@pytest.mark.float32
def test_unknown_values_may_be_anything() -> None:
    f, source = jnp.zeros(N), Source(np.zeros(N, int), np.arange(N))
    start = {"weights": jnp.eye(N), "index": jnp.arange(N), "scale": jnp.ones(())}

    def one(function: Any) -> list[bool]:
        return reads(function, f, source, start).results.one.tolist()

    assert one(lambda f, h: h["weights"] @ f) == [False] * N
    assert one(lambda f, h: f[h["index"]]) == [False] * N
    assert one(lambda f, h: jax.lax.dynamic_slice(f, (h["index"][0],), (2,))) == [False] * 2
    assert one(lambda f, h: jnp.zeros(N).at[h["index"]].set(f)) == [False] * N
    assert one(lambda f, h: h["scale"] * jnp.sin(f * h["weights"][0])) == [True] * N
    # The class that is looked up is not known, the row is.
    pair = Source(*np.indices((2, N)))
    found = reads(
        lambda f, h: jnp.take_along_axis(f, h["index"][None] % 2, 0), jnp.zeros((2, N)), pair, start
    )
    assert found.results.one.all() and found.results.which.all()
    assert found.opaque == {"gather"}


def test_terms_of_unknown_weights_are_sums() -> None:
    f, source = jnp.zeros(N), Source(np.zeros(N, int), np.arange(N))
    found = terms(lambda f, w: w @ jnp.sin(f), f, source, jnp.eye(N)).results
    assert not found.reads.one.any() and found.additive.all()
    found = terms(lambda f, w: jnp.sin(w @ f), f, source, jnp.eye(N)).results
    assert not found.additive.any()
    assert found.element == (0,)
    assert found.offence == Offence(0, 0, N - 1, "sin")


def test_a_mask_or_a_factor_of_the_data_does_not_hide_a_read() -> None:
    nothing = np.zeros(N)
    for function in (
        lambda f, _: jnp.where(nothing == 1.0, f[0], 0.0),
        lambda f, _: nothing * f[0],
        lambda f, _: jax.lax.cond(nothing[0] > 1.0, jnp.sin, jnp.zeros_like, f[0]),
    ):
        found = reads(function, jnp.zeros((2, N)), SOURCE).results
        assert found.which[:, 0].all() and found.none[:, 1].all()


def test_the_example_is_of_a_term_of_the_element() -> None:
    def function(f: Any, _: Any) -> Any:
        good = jnp.sum(jnp.sin(f))
        first, second = jnp.exp(f[0][1] + f[0][2]), jnp.abs(f[1][3] - f[1][5])
        return jnp.stack([good, good + second, first + good])

    found = terms(function, jnp.zeros((2, N)), SOURCE).results
    assert found.additive.tolist() == [True, False, False]
    assert found.element == (1,)
    assert found.offence == Offence(1, 3, 5, "abs")


def test_inputs_of_several_arrays_and_rows_of_their_own() -> None:
    tracked = {"f": jnp.zeros((2, 3)), "g": jnp.zeros(4)}
    sources = {
        "f": Source(np.array([[0] * 3, [1] * 3]), np.tile([7, 8, 9], (2, 1))),
        "g": Source(np.array([2, 2, -1, -1]), np.arange(4)),
    }
    found = reads(
        lambda v, _: (v["f"][0] + v["g"][:3], v["g"][2:], {"nothing": None}), tracked, sources
    ).results
    assert found[0].which.tolist() == [[1, 0, 1], [1, 0, 1], [1, 0, 0]]
    assert found[0].low[:, 0].tolist() == found[0].high[:, 0].tolist() == [7, 8, 9]
    assert found[1].none.all() and found[1].one.all()
    assert found[2] == {"nothing": None}


def test_an_effect_inside_of_a_branch_is_seen() -> None:
    def function(f: Any, _: Any) -> Any:
        cell = jax.new_ref(jnp.zeros(()))
        cell[...] = jnp.sum(f[0])
        return jax.lax.cond(Y[0] > 0, lambda: cell[...], lambda: 0.0)

    assert not reads(function, jnp.zeros((2, N)), SOURCE).results.one

    def printed(f: Any, _: Any) -> Any:
        jax.lax.cond(Y[0] > 0, lambda: jax.debug.print("x"), lambda: None)
        return jnp.sin(f[0])

    assert reads(printed, jnp.zeros((2, N)), SOURCE).results.one.all()


def test_wrong_sources_are_refused() -> None:
    f = jnp.zeros(3)
    with pytest.raises(ValueError, match="shape"):
        reads(lambda f, _: f, f, Source(np.zeros(2, int), np.zeros(2, int)))
    with pytest.raises(ValueError, match="structure"):
        reads(lambda f, _: f, [f, f], [Source(np.zeros(3, int), np.arange(3))])
    with pytest.raises(ValueError, match="at least 0"):
        reads(lambda f, _: f, f, Source(np.zeros(3, int), np.array([0, -1, 2])))


def test_works_while_another_function_is_traced() -> None:
    seen = []

    @jax.jit
    def outer(x: Any) -> Any:
        found = reads(lambda f, _: jnp.sin(f[0][GROUP]) * x, jnp.zeros((2, N)), SOURCE)
        seen.append(found.results.low[:, 0])
        return x

    outer(1.0)
    np.testing.assert_array_equal(seen[0], GROUP)


def test_large_likelihoods() -> None:
    n = 100_000
    y = np.random.RandomState(0).standard_normal(n)
    begin = time.perf_counter()
    found = terms(
        lambda f, scale: dist.Normal(f[0], scale * jnp.exp(f[1])).log_prob(y).sum(),
        jax.ShapeDtypeStruct((2, n), jnp.zeros(()).dtype),
        Source(*np.indices((2, n))),
        jnp.ones(()),
    ).results
    print(f"n={n}: {time.perf_counter() - begin:.3f} s")
    assert found.additive and found.meets.all()
    assert (found.reads.low == 0).all() and (found.reads.high == n - 1).all()


# --- random programs --------------------------------------------------------------------------

UNARY = [
    jnp.sin,
    jnp.abs,
    jnp.cumsum,
    jnp.sort,
    lambda x: -x,
    lambda x: x[::-1],
    lambda x: x[GROUP],
    lambda x: DESIGN @ x,
    lambda x: LOWER[::2].repeat(2, 0) @ x,
    lambda x: jnp.where(MASK, x, 2.0),
    lambda x: x.at[GROUP].add(Y),
    lambda x: jnp.zeros(N).at[GROUP].add(x),
    lambda x: jnp.full(N, x[2]),
    lambda x: x - x.mean(),
    lambda x: jax.lax.dynamic_update_slice(x, x[:2], (3,)),
    lambda x: jax.lax.map(lambda a: a * jnp.cos(a), x),
    lambda x: jax.lax.scan(lambda c, a: (a, 0.5 * c + a), 0.0, x)[1],
    lambda x: x.reshape(2, 3).T.ravel(),
]
BINARY_OPERATIONS = [
    jnp.add,
    jnp.multiply,
    jnp.subtract,
    jnp.maximum,
    lambda a, b: jnp.where(MASK, a, b),
    lambda a, b: jnp.concatenate([a[:3], b[3:]]),
    lambda a, b: jnp.where(a > b, a, 1.0),
    lambda a, b: a * (a @ b),
]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(UNARY) + len(BINARY_OPERATIONS) - 1),
            st.integers(0, 7),
            st.integers(0, 7),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_random_programs(steps: list[tuple[int, int, int]]) -> None:
    def function(f: Any) -> Any:
        made = [f[0], f[1]]
        for operation, first, second in steps:
            a, b = made[first % len(made)], made[second % len(made)]
            if operation < len(UNARY):
                made.append(UNARY[operation](a))
            else:
                made.append(BINARY_OPERATIONS[operation - len(UNARY)](a, b))
        return made[-1]

    found = terms(lambda f, _: function(f), jnp.zeros((2, N)), SOURCE)
    assert found.opaque <= {"gather"}
    _check(Case(function), found.results, points=2)
