"""Approximations that are right where a fit starts, and would not be where it ends."""

import dense
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from answers import Moments, Prior, gaussian, log_evidence
from scipy import optimize

from corpus.data import N, X, data, function, positive
from corpus.entries import Answer, accepted, points
from numpyro_tsvgp import GP, kernels

RNG = np.random.RandomState(11)
T = np.sort(RNG.uniform(0.0, 6.0, 60))
PULSES = 2.0 * np.exp(-(((T % 1.0 - 0.5) / 0.05) ** 2)) + 0.1 * RNG.randn(60)


def _periodic(scale):
    d = np.subtract.outer(T, T)
    return np.exp(-2.0 * np.sin(np.pi * d) ** 2 / scale**2)


def pulses_answer() -> Answer:
    found = optimize.minimize_scalar(
        lambda scale: -log_evidence(_periodic(scale), PULSES, 0.1),
        bounds=(0.1, 1.5),
        method="bounded",
    )
    return {
        "lengthscale": Moments(found.x, 0.01 * found.x),
        "loss": Moments(np.array(found.fun), np.array(0.05)),
    }


def _found(result) -> Answer:
    loss = Moments(np.asarray(result.losses[-1]), None)
    return {**points("lengthscale")(result), "loss": loss}


def pulses(name, warns=None, answer=pulses_answer, **kernel):
    """Sharp pulses: a lengthscale starts at 1 and wants to be a third of that."""

    def model(t, y=None):
        scale = positive("lengthscale", 1.0)
        f = numpyro.sample("f", GP(kernels.Periodic(scale, 1.0, **kernel), t))
        with data(t):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    model.__name__ = name
    accepted(
        *(T, PULSES),
        answer=answer,
        how="maximum of the exact evidence",
        found=_found,
        guide={"markov": True},
        optim=optax.adam(0.05),
        steps=150,
        site_lr=1.0,
        mean=1.0,
        sd=None,
        warns=warns,
    )(model)


pulses("pulses_with_harmonics_enough", order=16)
pulses("pulses_with_too_few_harmonics", order=7, warns="needs order=", answer=None)


# ---- parameters of a likelihood --------------------------------------------------------------


@accepted(
    *(X, np.ones(N, int)),
    answer=None,
    how="",
    found=lambda result: {},  # there is nothing to predict with
    optim=optax.adam(0.05),
    steps=100,
    warns="whose probs leaves its range at the hyperparameters of the fit",
)
def a_probability_without_a_constraint(X, y=None):
    w = numpyro.param("w", 0.5)
    f = function(X)
    with data(X):
        numpyro.sample("y", dist.Bernoulli(probs=w * jax.nn.sigmoid(f)), obs=y)


# ---- precise data ----------------------------------------------------------------------------

PRECISE = 1e-3
K_SMOOTH = dense.rbf(X, X, 1.0, 100.0)


def precise(name, warns=None, answer=None, **options):
    def model(X, y=None):
        f = function(X, scale=1.0, variance=100.0, **options)
        with data(X):
            numpyro.sample("y", dist.Normal(f, PRECISE), obs=y)

    model.__name__ = name
    accepted(
        *(X, 10.0 * X),
        answer=answer,
        how="Gaussian algebra",
        site_lr=1.0,
        steps=2,
        # Jitter of 1e-12 is 1e-10 beside a noise variance of 1e-6.
        mean=0.05,
        sd=0.01,
        warns=warns,
    )(model)


precise("data_that_notice_jitter", warns="jitter of GP site 'f'")
precise(
    "data_that_do_not_notice_jitter",
    answer=lambda: gaussian(Prior({"f": K_SMOOTH}), 10.0 * X, PRECISE),
    jitter=1e-12,
)
