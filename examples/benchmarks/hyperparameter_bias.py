"""How far is the collapsed posterior of the hyperparameters from that of the full model?

The reference is NUTS on the full model: every value of f and the hyperparameters together,
whitened. The collapsed densities have two or three dimensions, so their moments are computed on a
grid, without sampling noise. Distances are in standard deviations of the reference; ratios are
of standard deviations. All of it is about logarithms of hyperparameters.

    python examples/benchmarks/hyperparameter_bias.py --output bias.csv
"""

import argparse
import csv
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, init_to_value
from numpyro.infer.util import log_density

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, collapse, kernels, whiten
from numpyro_tsvgp.gaussian.linalg import blas_threads

jax.config.update("jax_enable_x64", True)

LIKELIHOODS = {
    "Poisson": lambda f, scale: dist.Poisson(jnp.exp(f)),
    "Bernoulli": lambda f, scale: dist.Bernoulli(logits=f),
    "Student-t": lambda f, scale: dist.StudentT(3.0, f, scale),
}
PROBLEMS = [
    ("Poisson", 50, 15),
    ("Poisson", 50, 50),
    ("Bernoulli", 100, 30),
    ("Student-t", 100, 30),
]
REFRESH = (0, 1, 2, 3, 8)


def simulate(name, n):
    rng = np.random.default_rng(n)
    X = np.sort(rng.uniform(size=n))
    f = 1.2 * np.sin(7 * X) + 0.5 * np.cos(15 * X)
    if name == "Poisson":
        return X, rng.poisson(np.exp(f)).astype(float)
    if name == "Bernoulli":
        return X, (rng.uniform(size=n) < 1 / (1 + np.exp(-2.5 * f))).astype(float)
    return X, f + 0.3 * rng.standard_t(3, n)


def hyperparameters(name):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.5, 0.7))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 1.0)) if name == "Student-t" else None
    return variance * kernels.Matern52(lengthscale), scale


def make_model(name):
    def model(X, y=None):
        kernel, scale = hyperparameters(name)
        f = numpyro.sample("f", GP(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", LIKELIHOODS[name](f, scale), obs=y)

    return model


def reference(model, X, y, start, draws, chains):
    """Mean, standard deviation and effective sample size of each log hyperparameter."""
    kernel = NUTS(whiten(model), init_strategy=init_to_value(values=start))
    mcmc = MCMC(
        kernel,
        num_warmup=draws // 2,
        num_samples=draws,
        num_chains=chains,
        chain_method="sequential",
        progress_bar=False,
    )
    with blas_threads():  # its threads fight XLA's
        mcmc.run(jax.random.key(0), X, y)
    logs = {k: np.log(v) for k, v in mcmc.get_samples(group_by_chain=True).items() if k in start}
    return {k: (v.mean(), v.std(), effective_sample_size(v)) for k, v in logs.items()}


def moments(log_densities, points):
    """Means and standard deviations under a density given at the points of a regular grid."""
    weights = np.exp(log_densities - log_densities.max())
    weights /= weights.sum()
    mean = weights @ points
    return mean, np.sqrt(weights @ (points - mean) ** 2)


def compare(name, n, m, quick):
    X, y = simulate(name, n)
    model = make_model(name)
    guide = AutoDualGaussian(
        model, inducing=np.quantile(X, np.linspace(0, 1, m)), learn_inducing=False
    )
    svi = TSVGP(model, guide, optax.adam(0.05), site_lr=0.7)
    fit = svi.run(jax.random.key(0), 20 if quick else 400, X, y, progress_bar=False).fit
    nuts = reference(model, X, y, fit.hyper, *((20, 1) if quick else (2500, 2)))
    size = 5 if quick else (25 if len(nuts) == 2 else 15)
    axes = [np.linspace(mu - 4.5 * sd, mu + 4.5 * sd, size) for mu, sd, _ in nuts.values()]
    points = np.array(list(itertools.product(*axes)))
    hyper = {k: jnp.exp(points[:, i]) for i, k in enumerate(nuts)}

    rows = []

    def report(method, log_densities):
        mean, sd = moments(log_densities, points)
        for i, (k, (mu, reference_sd, ess)) in enumerate(nuts.items()):
            row = (name, n, m, method, k, mean[i], sd[i], mu, reference_sd, ess)
            rows.append(row)
            shift, ratio = (mean[i] - mu) / reference_sd, sd[i] / reference_sd
            print(f"{name:10} n={n:<4} m={m:<3} {method:12} {k:12} {shift:+.2f} {ratio:.2f}")

    for refresh in (0, 1) if quick else REFRESH:
        collapsed = collapse(fit, refresh=refresh)

        def one(values, collapsed=collapsed):
            log_joint = log_density(handlers.seed(collapsed, 0), (X, y), {}, values)[0]
            return log_joint + sum(jnp.log(v) for v in values.values())  # density of the logs

        found = np.asarray(jax.jit(lambda values, one=one: jax.lax.map(one, values))(hyper))
        report(f"refresh={refresh}", found)
        if refresh == (1 if quick else 3):
            draws = 8 if quick else 256
            weights = collapsed.log_weights(jax.random.key(1), hyper, num_draws=draws)
            report("weighted", found + np.asarray(weights))
    for k, (_, _, ess) in nuts.items():
        print(f"  reference {k}: effective sample size {ess:.0f}")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small problem, few draws")
    parser.add_argument("--output", default="hyperparameter_bias.csv", help="where to put the CSV")
    args = parser.parse_args()
    header = ["likelihood", "n", "m", "method", "hyperparameter", "mean", "sd"]
    header += ["nuts_mean", "nuts_sd", "nuts_ess"]
    with open(args.output, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for name, n, m in [("Poisson", 12, 6)] if args.quick else PROBLEMS:
            writer.writerows(compare(name, n, m, args.quick))
            file.flush()


if __name__ == "__main__":
    main()
