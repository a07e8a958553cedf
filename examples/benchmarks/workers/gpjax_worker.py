"""GPJax: its natural-gradient steps, dual (t-SVGP) or of a Gaussian's moments, and Adam."""

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from gpjax.natural_gradients import natural_gradient_step, partition_variational
from protocol import serve

FAMILIES = {
    "dual": gpx.variational_families.DualVariationalGaussian,
    "whitened": gpx.variational_families.WhitenedVariationalGaussian,
    "unwhitened": gpx.variational_families.VariationalGaussian,
}


def strong(tree):
    """Arrays without weak types, which would make the second step compile anew."""
    return jax.tree.map(
        lambda x: jax.lax.convert_element_type(x, x.dtype) if eqx.is_array(x) else x, tree
    )


class LogisticBernoulli(gpx.likelihoods.Bernoulli):
    """With the link of the job; GPJax's own has a probit link."""

    def link_function(self, f):
        return dist.Bernoulli(logits=f)


class GPJax:
    def __init__(self, job, data, variant):
        jax.config.update("jax_enable_x64", job.precision == "float64")
        self.job = job
        kernel = gpx.kernels.Matern52(
            lengthscale=jnp.asarray(job.lengthscale), variance=jnp.asarray(job.variance)
        )
        jitter = 1e-6 if job.precision == "float64" else 1e-5
        prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=kernel, jitter=jitter)
        gaussian = job.likelihood == "gaussian"
        likelihood = (
            gpx.likelihoods.Gaussian(obs_stddev=job.noise**0.5) if gaussian else LogisticBernoulli()
        )
        bound = gpx.objectives.dual_elbo if variant == "dual" else gpx.objectives.elbo
        Z = jnp.asarray(data.Z)
        start = {}
        if variant == "unwhitened":
            gram = kernel.gram(Z).as_matrix() + jitter * jnp.eye(job.m)
            start = {"variational_root_covariance": jnp.linalg.cholesky(gram)}
        family = FAMILIES[variant](model=prior * likelihood, inducing_inputs=Z, **start)
        self.family, self.bound_of = family, bound
        self.q, self.rest = strong(partition_variational(family))
        adam = self.adam = optax.adam(job.m_rate)
        self.memory = strong(adam.init(eqx.filter(self.rest, eqx.is_array)))

        def loss(family, data):
            return -bound(family, data)

        def iteration(q, rest, memory, X, y):
            data = self.dataset(X, y)
            rate = jnp.asarray(job.e_rate, X.dtype)

            def e_step(q, _):
                return natural_gradient_step(q, rest, data, loss, rate)[0], None

            q, _ = jax.lax.scan(e_step, q, length=job.e_steps)

            def m_step(carry, _):
                rest, memory = carry
                gradient = eqx.filter_grad(lambda rest: loss(eqx.combine(q, rest), data))(rest)
                updates, memory = adam.update(gradient, memory, eqx.filter(rest, eqx.is_array))
                return (eqx.apply_updates(rest, updates), memory), None

            (rest, memory), _ = jax.lax.scan(m_step, (rest, memory), length=job.m_steps)
            return q, rest, memory

        self.iteration = eqx.filter_jit(iteration)
        self.loss = loss
        self.evaluate = eqx.filter_jit(lambda q, rest, data: bound(eqx.combine(q, rest), data))

        def predict(q, rest, X):
            f = eqx.combine(q, rest).condition(None)(X, covariance="diagonal")
            return f.mean, f.variance

        self.predict = eqx.filter_jit(predict)

    def dataset(self, X, y):
        return gpx.Dataset(X=X, y=y, n_total=self.job.rows)

    def batch(self, X, y):
        return jnp.asarray(X), jnp.asarray(y, X.dtype)[:, None]

    def step(self, X, y):
        done = self.iteration(self.q, self.rest, self.memory, X, y)
        self.q, self.rest, self.memory = jax.block_until_ready(done)

    def fit(self, steps, X, y):
        fitted, _ = gpx.fit_natgrads(
            model=self.family,
            objective=self.loss,
            train_data=self.dataset(X, y),
            optim=self.adam,
            natgrad_lr=self.job.e_rate,
            num_iters=steps,
            verbose=False,
        )
        self.q, self.rest = jax.block_until_ready(partition_variational(fitted))

    def bound(self, X, y):
        return float(self.evaluate(self.q, self.rest, self.dataset(X, y)))

    def marginals(self, X):
        return self.predict(self.q, self.rest, jnp.asarray(X))

    def noise(self):
        gaussian = self.job.likelihood == "gaussian"
        family = eqx.combine(self.q, self.rest)
        return float(gpx.parameters.val(family.model.likelihood.obs_stddev)) ** 2 if gaussian else 0


if __name__ == "__main__":
    serve(GPJax)
