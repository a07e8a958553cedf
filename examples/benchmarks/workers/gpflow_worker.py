"""GPflow: natural gradients for q(u) and Adam for the rest, all of an iteration in one graph."""

import gpflow
import numpy as np
import tensorflow as tf
from gpflow.keras import tf_keras
from protocol import affinity, serve


def make_likelihood(job):
    if job.likelihood == "softmax":
        likelihood = gpflow.likelihoods.Softmax(job.functions)
        likelihood.num_monte_carlo_points = job.samples
        return likelihood
    if job.likelihood == "bernoulli":
        return gpflow.likelihoods.Bernoulli(invlink=tf.sigmoid)
    return gpflow.likelihoods.Gaussian(job.noise)


class GPflow:
    def __init__(self, job, data, variant):
        tf.random.set_seed(0)
        tf.config.threading.set_intra_op_parallelism_threads(len(affinity()))
        tf.config.threading.set_inter_op_parallelism_threads(len(affinity()))
        gpflow.config.set_default_float(np.dtype(job.precision).type)
        if job.precision == "float32":
            gpflow.config.set_default_jitter(1e-5)
        self.job = job
        kernel = gpflow.kernels.Matern52(variance=job.variance, lengthscales=job.lengthscale)
        inducing = gpflow.inducing_variables.InducingPoints(data.Z)
        if job.functions > 1:
            kernel = gpflow.kernels.SharedIndependent(kernel, output_dim=job.functions)
            inducing = gpflow.inducing_variables.SharedIndependentInducingVariables(inducing)
        self.model = gpflow.models.SVGP(
            kernel,
            make_likelihood(job),
            inducing,
            num_latent_gps=job.functions,
            num_data=job.rows,
            whiten=variant == "whitened",
        )
        if variant == "unwhitened":  # start at the prior, as the others do
            factor = tf.linalg.cholesky(gpflow.covariances.Kuu(inducing, kernel, jitter=1e-6))
            self.model.q_sqrt.assign(tf.broadcast_to(factor, self.model.q_sqrt.shape))
        moments = [(self.model.q_mu, self.model.q_sqrt)]
        gpflow.set_trainable(self.model.q_mu, False)
        gpflow.set_trainable(self.model.q_sqrt, False)
        natural = gpflow.optimizers.NaturalGradient(gamma=job.e_rate)
        adam = tf_keras.optimizers.Adam(job.m_rate)
        variables = self.model.trainable_variables
        adam.build(variables)

        def iteration(X, y):
            def loss():
                return self.model.training_loss((X, y))

            for _ in tf.range(job.e_steps):
                natural.minimize(loss, moments)
            for _ in tf.range(job.m_steps):
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(variables)
                    value = loss()
                adam.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))

        self.iteration = tf.function(iteration)
        self.elbo = tf.function(lambda X, y: self.model.elbo((X, y)))
        self.predict = tf.function(self.model.predict_f)

    def batch(self, X, y):
        labels = y.astype(np.int32) if self.job.likelihood == "softmax" else y.astype(X.dtype)
        return tf.constant(X), tf.constant(labels[:, None])

    def step(self, X, y):
        self.iteration(X, y)

    def bound(self, X, y):
        return float(self.elbo(X, y))

    def marginals(self, X):
        mean, variance = self.predict(tf.constant(X))
        return mean.numpy().T, variance.numpy().T

    def noise(self):
        gaussian = self.job.likelihood == "gaussian"
        return float(self.model.likelihood.variance.numpy()) if gaussian else 0.0


if __name__ == "__main__":
    serve(GPflow)
