"""This library: t-SVGP, or its q-SVGP in moments, one compiled update an iteration."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints
from protocol import serve

from numpyro_tsvgp import GP, QSVGP, TSVGP, AutoDualGaussian, AutoMomentGaussian, kernels
from numpyro_tsvgp.gaussian.linalg import blas_threads

POSITIVE = constraints.softplus_positive  # as all the others have it


def make_model(job):
    def model(X, y=None):
        lengthscale = numpyro.param("lengthscale", job.lengthscale, constraint=POSITIVE)
        variance = numpyro.param("variance", job.variance, constraint=POSITIVE)
        kernel = variance * kernels.Matern52(lengthscale)
        if job.likelihood == "softmax":
            with numpyro.plate("functions", job.functions):
                f = numpyro.sample("f", GP(kernel, X))
            likelihood = dist.Categorical(logits=f.T)
        elif job.likelihood == "bernoulli":
            likelihood = dist.Bernoulli(logits=numpyro.sample("f", GP(kernel, X)))
        else:
            noise = numpyro.param("noise", job.noise, constraint=POSITIVE)
            likelihood = dist.Normal(numpyro.sample("f", GP(kernel, X)), jnp.sqrt(noise))
        size = X.shape[0] if y is None else job.rows
        with numpyro.plate("data", size, subsample_size=X.shape[0]):
            numpyro.sample("y", likelihood, obs=y)

    return model


class Ours:
    def __init__(self, job, data, variant):
        jax.config.update("jax_enable_x64", job.precision == "float64")
        self.job, self.data, self.state = job, data, None
        model = make_model(job)
        dual = "q-SVGP" not in variant
        driver, family = (TSVGP, AutoDualGaussian) if dual else (QSVGP, AutoMomentGaussian)
        self.svi = driver(
            model,
            family(model, inducing=data.Z),
            optax.adam(job.m_rate),
            site_lr=job.e_rate,
            e_steps=job.e_steps,
            m_steps=job.m_steps,
        )
        self.update = jax.jit(self.svi.update, donate_argnums=0)
        self.evaluate = jax.jit(self.svi.evaluate)

    def batch(self, X, y):
        return jnp.asarray(X), jnp.asarray(y)

    def step(self, X, y):
        if self.state is None:
            self.state = self.svi.init(jax.random.key(0), X, y)
        self.state, _ = jax.block_until_ready(self.update(self.state, X, y))

    def around(self):
        return blas_threads(self.job.m)  # as `run` has it

    def fit(self, steps, X, y):
        result = self.svi.run(jax.random.key(0), steps, X, y, progress_bar=False)
        self.state = jax.block_until_ready(result.state)

    def bound(self, X, y):
        return -float(self.evaluate(self.state, X, y))

    def marginals(self, X):
        return self.svi.guide.marginals(self.svi.get_params(self.state), X)["f"]

    def noise(self):
        return float(self.svi.get_params(self.state).get("noise", 0.0))


if __name__ == "__main__":
    serve(Ours)
