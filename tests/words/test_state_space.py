"""State-space forms of kernels against the kernels themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import cases
from tinygp.kernels import quasisep

from numpyro_tsvgp import kernels
from numpyro_tsvgp.gaussian.process import FlatKernel

# Ties, gaps of 1e-6 and of many lengthscales.
TIMES = jnp.array([0.3, 0.3, 0.300001, 0.9, 1.7, 1.7, 2.2, 4.0, 5.1, 90.0])

FORMS = {
    "Matern12": kernels.Matern12(0.7, 2.0),
    "Matern32": kernels.Matern32(0.7, 2.0),
    "Matern52": kernels.Matern52(0.7, 2.0),
    "Cosine": kernels.Cosine(1.3, 0.4),
    "Constant": kernels.Constant(3),
    "Linear": kernels.Linear(2.0, 0.5),
    "IntegratedBrownian": kernels.IntegratedBrownian(0.3, origin=0.5),
    "Periodic": kernels.Periodic(1.0, 2.0, order=14),
    "sum": kernels.Matern12(0.3) + 0.3 * kernels.Cosine(2.0) + 0.2,
    "product": kernels.Matern32(2.0) * kernels.Cosine(1.5),
    "product that is not stationary": 2.0 * kernels.Linear() * kernels.Matern12(3.0),
    "batch": kernels.Matern52(jnp.array([[0.5], [1.0]]), jnp.array([1.0, 2.0])) + 0.3,
    "tinygp": kernels.as_kernel(1.5 * quasisep.SHO(omega=2.0, quality=3.0, sigma=1.2))
    + kernels.Constant(0.2),
    "tinygp sum": kernels.as_kernel(
        quasisep.Matern52(scale=1.3, sigma=2.0) + quasisep.Celerite(1.0, 0.1, 0.5, 2.0)
    ),
    "tinygp product": kernels.as_kernel(quasisep.Matern32(scale=2.0) * quasisep.Cosine(scale=3.0)),
}


@pytest.mark.parametrize("name", cases(FORMS, fast=[*list(FORMS)[:-3:2], "tinygp"]))
def test_form_is_the_kernel(name):
    kernel, t = FORMS[name], TIMES
    k = 2 if name == "batch" else 1
    space = FlatKernel(kernel, (k,)).state_space()
    n = len(t)
    i, j = np.triu_indices(n)
    A, Q = (np.broadcast_to(x, (*x.shape[:2], k, len(i))) for x in space.step(t[i], t[j]))
    C = np.broadcast_to(space.covariance(t), (space.dim, space.dim, k, n))
    h = np.broadcast_to(space.emission(), (space.dim, k))
    found = np.einsum("ak,abkn,bckn,ck->kn", h, A, C[..., i], h)
    exact = np.asarray(kernel(t, t)).reshape(k, n, n)[:, i, j]
    scale = np.abs(exact).max()
    np.testing.assert_allclose(found, exact, atol=1e-10 * scale)
    # What the transition carries over and the noise make the covariance at the later time.
    grown = np.einsum("abkn,bckn,dckn->adkn", A, C[..., i], A) + Q
    np.testing.assert_allclose(grown, C[..., j], atol=1e-10 * np.abs(C).max())
    still = np.asarray(t[i] == t[j])
    assert (A[..., still] == np.eye(space.dim)[..., None, None]).all()
    assert (Q[..., still] == 0).all()


@pytest.mark.slow
def test_noise_of_short_gaps_in_single_precision():
    """By subtraction it would be rounding error: at 1e-6 the smallest entry is 1e-31."""
    for gap in (1e-6, 1e-3, 0.9, 1.1, 30.0):
        exact, found = (
            kernels.Matern52(jnp.asarray(1.0, dtype), jnp.asarray(1.0, dtype))
            .state_space()
            .flattened(jnp.atleast_1d)
            .step(jnp.zeros(1, dtype), jnp.full(1, gap, dtype))[1]
            for dtype in (jnp.float64, jnp.float32)
        )
        assert found.dtype == jnp.float32
        diagonal = np.sqrt(np.einsum("iikb->ikb", exact))
        error = np.abs(found - exact) / (diagonal[:, None] * diagonal[None])
        assert error.max() < 1e-5


@pytest.mark.slow
def test_order_of_the_periodic_series():
    t = jnp.linspace(0.0, 1.0, 20)
    errors = []
    for order in (3, 7, 14):
        space = kernels.Periodic(0.8, 1.0, order=order).state_space().flattened(jnp.atleast_1d)
        A, _ = space.step(jnp.zeros_like(t), t)
        C, h = space.covariance(t[:1]), space.emission()[:, 0]
        found = jnp.einsum("i,ijb,jk,k->b", h, A[:, :, 0], C[:, :, 0, 0], h)
        errors.append(float(jnp.abs(found - kernels.Periodic(0.8, 1.0)(t, t)[0]).max()))
    assert 1e-2 > errors[0] > 1e-4 > errors[1] > errors[2]
    assert errors[2] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("base", ["RBF", "Matern52"])
def test_needed_order(base):
    """The error of a form is the share of the variance that it leaves out, where times coincide."""
    t = jnp.linspace(0.0, 1.0, 40)
    for error in (1e-2, 1e-3):
        order = kernels.Periodic(0.6, base=base).needed_order(error)
        for enough, by in ((True, 0), (False, -1)):
            kernel = kernels.Periodic(0.6, base=base, order=order + by)
            space = kernel.state_space().flattened(jnp.atleast_1d)
            A, _ = space.step(jnp.zeros_like(t), t)
            C, h = space.covariance(t[:1]), space.emission()[:, 0]
            found = jnp.einsum("i,ijb,jk,k->b", h, A[:, :, 0], C[:, :, 0, 0], h)
            off = float(jnp.abs(found - kernel(t[:1], t)[0]).max())
            assert (off <= error) == enough
    assert kernels.Periodic(base="Matern12").needed_order(1e-4) is None


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (kernels.RBF(), "the kernel RBF has no state-space form: Matern12, Matern32"),
        (kernels.Matern12() + kernels.RationalQuadratic(), "RationalQuadratic has no"),
        (kernels.White(), "put the noise into the likelihood"),
        (kernels.as_kernel(lambda a, b: a), "the kernel Function"),
        (kernels.Matern12(jnp.array([1.0, 2.0])), "one input, the time"),
    ],
)
def test_kernels_without_a_form_are_refused_by_name(kernel, words):
    with pytest.raises(TypeError, match=words):
        kernel.state_space()


def test_integrated_brownian_motion():
    kernel = kernels.IntegratedBrownian(2.0, origin=1.0)
    t = jnp.array([0.5, 1.5, 3.0])
    u = np.maximum(np.asarray(t) - 1.0, 0.0)
    grid = np.linspace(0.0, 2.0, 20001)
    # The covariance of integrals of white noise: 2 * int (u - s)+ (v - s)+ ds.
    parts = np.maximum(u[:, None] - grid, 0.0)
    exact = 2.0 * (parts[:, None] * parts[None]).mean(-1) * 2.0
    np.testing.assert_allclose(kernel(t, t), exact, atol=2e-4)
    np.testing.assert_allclose(kernel.diag(t), np.diag(kernel(t, t)))
    assert jnp.isfinite(jax.grad(lambda x: kernel(x, x).sum())(t)).all()
    with pytest.raises(ValueError, match="one input, the time"):
        kernel(jnp.ones((2, 2)), jnp.ones((2, 2)))
