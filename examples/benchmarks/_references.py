"""Posteriors of f and hyperparameters that owe nothing to a Gaussian: NUTS, and a weighted grid.

Both give the moments of the log hyperparameters, some draws of f with them, and the scores of their
predictions.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from _pairs import HYPER, PRIOR
from jax.scipy.linalg import solve_triangular
from jax.scipy.stats import norm
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from scipy.optimize import minimize

from numpyro_tsvgp import TSVGP, AutoDualGaussian, EPLike, ExpectationPropagation, kernels, whiten
from numpyro_tsvgp.gaussian.linalg import blas_threads

KEY = jax.random.key(0)
# Rates of E-steps from the prior: short first steps, since counts overshoot.
RATES = jnp.array([0.05, 0.1, 0.2, 0.35] + [0.5] * 12)
KEPT = 200  # draws of f
BATCHES = 8  # of importance draws, for standard errors


def scores(mean, variance, pair):
    """Negative log predictive density and coverage of 80% intervals, by draws of the marginals."""
    z = jax.random.normal(jax.random.key(1), (max(1, 2000 // len(mean)), *mean.shape))
    f = (mean + jnp.sqrt(variance) * z).reshape(-1, *mean.shape[1:])
    fn = pair.likelihood(f)
    nlpd = -(jax.nn.logsumexp(fn.log_prob(pair.y_test), 0) - jnp.log(len(f))).mean()
    if pair.classes:
        return {"nlpd": float(nlpd)}
    low, high = np.quantile(np.asarray(fn.sample(jax.random.key(2))), [0.1, 0.9], axis=0)
    inside = (pair.y_test >= low) & (pair.y_test <= high)
    return {"nlpd": float(nlpd), "coverage": float(inside.mean())}


def covariance(A, B, logs):
    lengthscale, variance = jnp.exp(logs)
    return variance * kernels.Matern52(lengthscale)(A, B)


def factor(pair, logs):
    """The Cholesky factor of the covariance of f."""
    K = covariance(pair.X, pair.X, logs)
    return jnp.linalg.cholesky(K + 1e-8 * K[0, 0] * jnp.eye(len(K)))


def predicted(pair, logs, f):
    """Scores of predictions from draws of log hyperparameters and f."""

    def at_new(draw):
        logs, f = draw
        L = factor(pair, logs)
        w = solve_triangular(L, covariance(pair.X, pair.X_test, logs), lower=True)
        left = jnp.maximum(jnp.exp(logs[1]) - (w * w).sum(0), 1e-10)
        mean = solve_triangular(L, f.T, lower=True).T @ w
        return mean, jnp.broadcast_to(left, mean.shape)

    mean, variance = jax.jit(lambda *draws: jax.lax.map(at_new, draws))(
        jnp.asarray(logs), jnp.asarray(f)
    )
    return scores(mean, variance, pair)


def by_nuts(pair, draws):
    """A long chain: a row of the table, and what fits are compared with."""
    warmup, draws = (100, 100) if pair.quick else (max(250, draws // 4), draws)
    kernel = NUTS(whiten(pair.model), max_tree_depth=7)
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, progress_bar=False)
    with blas_threads():
        mcmc.run(KEY, pair.X, pair.y)
    found = mcmc.get_samples()
    logs = np.log(np.stack([found[k] for k in HYPER], -1))
    size = np.array([effective_sample_size(column[None]) for column in logs.T])
    every = max(1, len(logs) // KEPT)
    f = np.asarray(found["f"])[::every]
    row = {"rule": "NUTS", **predicted(pair, logs[::every], f)}
    for i, k in enumerate(HYPER):
        row |= {f"log_{k}": logs[:, i].mean(), f"error_{k}": size[i] ** -0.5}
    return row, {"mean": logs.mean(0), "cov": np.cov(logs.T), "f": f}


def grid_of(known, size):
    """Points along the principal directions of a posterior, up to four standard deviations."""
    reach = 4.0 if size > 5 else 3.2
    scales = np.linspace(-reach, reach, size)
    grid = np.array(list(itertools.product(scales, scales)))
    return known["mean"] + grid @ np.linalg.cholesky(known["cov"] + 1e-9 * np.eye(2)).T


def weights_of(log_density, points):
    """Probabilities of points of a grid of log hyperparameters; the density is of themselves."""
    log_density = np.asarray(log_density) + points.sum(1)
    log_density = np.where(np.isfinite(log_density), log_density, -np.inf)
    weights = np.exp(log_density - log_density.max())
    return weights / weights.sum()


def moments_of(weights, points):
    mean = weights @ points
    centred = points - mean
    return mean, (weights[:, None] * centred).T @ centred


def importance_program(pair, draws):
    """Functions of log hyperparameters: the EP-like objective, and draws of f with weights.

    The proposal is the Gaussian of expectation propagation, which the weights correct.
    """
    args, guide = (pair.X, pair.y), AutoDualGaussian(pair.model)
    svi = TSVGP(
        *(pair.model, guide, None),
        **{"rule": ExpectationPropagation(), "objective": EPLike()},
        site_lr=lambda step: RATES[jnp.minimum(step, len(RATES) - 1)],
    )
    start = svi.init(KEY, *args)
    n, functions = len(pair.X), pair.functions
    half = jax.random.normal(jax.random.key(3), (functions, n, draws // 2))
    noise = jnp.concatenate([half, -half], -1)

    def at(logs):
        held = {f"{k}_auto_loc": logs[i] for i, k in enumerate(HYPER)}
        state = dataclasses.replace(start, optim_state=held)
        return jax.lax.fori_loop(0, len(RATES), lambda _, s: svi.update(s, *args)[0], state)

    def objective(logs):
        return -svi.evaluate(at(logs), *args)

    def weighted(logs):
        kept = at(logs).approximation
        L, log_weights, f = factor(pair, logs), 0.0, []
        for i in range(functions):
            linear, quadratic = (kept[f"f_auto_{k}"][i] for k in ("linear", "quadratic"))
            A = jnp.linalg.cholesky(jnp.eye(n) + (L.T * quadratic) @ L)
            middle = solve_triangular(A, L.T @ linear, lower=True)[:, None]
            v = solve_triangular(A.T, middle + noise[i])  # whitened values of f
            f.append((L @ v).T)
            log_weights += 0.5 * ((noise[i] ** 2).sum(0) - (v**2).sum(0))
            log_weights -= jnp.log(jnp.diag(A)).sum()
        f = f[0] if functions == 1 else jnp.stack(f, 1)
        log_weights += pair.likelihood(f).log_prob(pair.y).sum(-1)
        prior = [norm.logpdf(logs[i], *PRIOR[k]) - logs[i] for i, k in enumerate(HYPER)]
        some = jax.random.categorical(jax.random.key(4), log_weights, shape=(KEPT,))
        halves = log_weights.reshape(2, -1)  # the two of a pair belong to one batch
        batches = jax.nn.logsumexp(halves.reshape(2, BATCHES, -1), (0, 2)) - jnp.log(
            draws / BATCHES
        )
        share = jax.nn.softmax(log_weights)
        return batches + sum(prior), f[some], 1 / (share**2).sum()

    return jax.jit(objective), jax.jit(weighted)


def by_importance(pair, size, draws=2048, guess=None):
    """A fine grid of hyperparameters, with importance weights of draws of f at each point.

    Returns:
      A row of the table, what fits are compared with, and the effective share of the draws.
    """
    if pair.quick:
        draws = 64
    objective, weighted = importance_program(pair, draws)
    with blas_threads():
        known = guess or _around_mode(objective)
        for _ in range(2):  # moments of one grid place the next
            points = grid_of(known, size)
            found = [weighted(jnp.asarray(point)) for point in points]
            by_batch = np.array([batches for batches, _, _ in found])  # (points, batches)
            whole = np.logaddexp.reduce(by_batch, 1) - np.log(BATCHES)
            weights = weights_of(whole, points)
            mean, cov = moments_of(weights, points)
            known = {"mean": mean, "cov": cov}
    each = [moments_of(weights_of(column, points), points)[0] for column in by_batch.T]
    error = np.std(each, 0, ddof=1) / np.sqrt(BATCHES)
    chosen = np.random.default_rng(0).choice(len(points), KEPT, p=weights)
    f = np.stack([np.asarray(found[i][1][j]) for j, i in enumerate(chosen)])
    size_of_draws = weights @ [float(effective) for _, _, effective in found]
    row = {"rule": "importance", **predicted(pair, points[chosen], f)}
    for i, k in enumerate(HYPER):
        row |= {f"log_{k}": mean[i], f"error_{k}": error[i] / np.sqrt(cov[i, i])}
    row["note"] = f"{size_of_draws:.0f} effective of {draws} draws"
    return row, known | {"f": f}, size_of_draws / draws


def _around_mode(objective):
    """A Gaussian at the mode of an objective as a density of the logarithms."""

    def minus(logs):
        return float(np.nan_to_num(-objective(jnp.asarray(logs)) - logs.sum(), nan=1e6))

    start = np.array([mean for mean, _ in PRIOR.values()])
    simplex = start + np.array([[0.0, 0.0], [0.5, 0.0], [0.0, 0.7]])
    options = {"xatol": 2e-2, "fatol": 1e-2, "maxfev": 40, "initial_simplex": simplex}
    mode = minimize(minus, start, method="Nelder-Mead", options=options).x
    step, here = 0.15, minus(mode)
    hessian = np.empty((2, 2))
    for i, j in ((0, 0), (1, 1), (0, 1)):
        a, b = step * np.eye(2)[i], step * np.eye(2)[j]
        if i == j:
            hessian[i, i] = (minus(mode + a) - 2 * here + minus(mode - a)) / step**2
        else:
            cross = minus(mode + a + b) - minus(mode + a - b) - minus(mode - a + b)
            hessian[0, 1] = hessian[1, 0] = (cross + minus(mode - a - b)) / (4 * step**2)
    values, vectors = np.linalg.eigh(hessian)
    return {"mean": mode, "cov": (vectors / np.maximum(values, 1.0)) @ vectors.T}
