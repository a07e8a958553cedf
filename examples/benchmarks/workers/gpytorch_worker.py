"""GPyTorch: NGD for q(u) and Adam for the rest, in turns or from one backward pass."""

import gpytorch
import torch
from protocol import affinity, serve


class LogisticBernoulli(gpytorch.likelihoods.BernoulliLikelihood):
    """With the link of the job; GPyTorch's own has a probit link."""

    def expected_log_prob(self, observations, function_dist, *params, **kwargs):
        sign = 2.0 * observations - 1.0
        return self.quadrature(lambda f: torch.nn.functional.logsigmoid(sign * f), function_dist)


def make_likelihood(job):
    if job.likelihood == "softmax":
        return gpytorch.likelihoods.SoftmaxLikelihood(
            num_classes=job.functions, mixing_weights=False
        )
    if job.likelihood == "bernoulli":
        return LogisticBernoulli()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = job.noise
    return likelihood


class Model(gpytorch.models.ApproximateGP):
    def __init__(self, job, Z):
        several = job.functions > 1
        q = gpytorch.variational.NaturalVariationalDistribution(
            job.m, batch_shape=torch.Size([job.functions] if several else []), mean_init_std=0.0
        )
        strategy = gpytorch.variational.VariationalStrategy(self, Z, q)
        if several:
            strategy = gpytorch.variational.IndependentMultitaskVariationalStrategy(
                strategy, num_tasks=job.functions
            )
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))
        self.covar_module.outputscale = job.variance
        self.covar_module.base_kernel.lengthscale = job.lengthscale

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class GPyTorch:
    def __init__(self, job, data, variant):
        torch.manual_seed(0)
        torch.set_num_threads(len(affinity()))
        torch.set_default_dtype(getattr(torch, job.precision))
        self.job, self.joint = job, variant == "joint"
        self.model, self.likelihood = Model(job, torch.tensor(data.Z)), make_likelihood(job)
        self.model.train(), self.likelihood.train()
        self.q = list(self.model.variational_parameters())
        self.rest = [*self.model.hyperparameters(), *self.likelihood.parameters()]
        self.natural = gpytorch.optim.NGD(self.q, num_data=job.rows, lr=job.e_rate)
        self.adam = torch.optim.Adam(self.rest, lr=job.m_rate)
        self.mll = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=job.rows)

    def batch(self, X, y):
        y = torch.tensor(y)
        return torch.tensor(X), y.long() if self.job.likelihood == "softmax" else y.to(
            torch.get_default_dtype()
        )

    def elbo(self, X, y):
        with gpytorch.settings.num_likelihood_samples(self.job.samples):
            return self.mll(self.model(X), y).sum()

    def gradients(self, parameters, X, y):
        """Gradients of these parameters alone: the others' part of the graph is not walked."""
        values = torch.autograd.grad(-self.elbo(X, y), parameters)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = value

    def step(self, X, y):
        if self.joint:
            self.gradients(self.q + self.rest, X, y)
            self.natural.step()
            self.adam.step()
            return
        for _ in range(self.job.e_steps):
            self.gradients(self.q, X, y)
            self.natural.step()
        for _ in range(self.job.m_steps):
            self.gradients(self.rest, X, y)
            self.adam.step()

    @torch.no_grad()
    def bound(self, X, y):
        return float(self.elbo(X, y)) * self.job.rows

    @torch.no_grad()
    def marginals(self, X):
        self.model.eval()
        f = self.model(torch.tensor(X))
        self.model.train()
        mean, variance = f.mean, f.variance
        shape = (len(X), -1)
        return mean.reshape(shape).T.numpy(), variance.reshape(shape).T.numpy()

    def noise(self):
        return self.likelihood.noise.item() if self.job.likelihood == "gaussian" else 0.0


if __name__ == "__main__":
    serve(GPyTorch)
