"""A likelihood of your own: survival times, some of them censored.

    python examples/own_likelihood.py

205 patients with melanoma. For those who were alive at the end we know that they lived *at least*
so long. The log-logistic distribution with censoring is not in NumPyro: twenty lines make it, and
nothing else is needed. Writes ``own_likelihood.png``.
"""

# %% Imports
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import load, options, save

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, inducing, kernels

jax.config.update("jax_enable_x64", True)
args = options("own_likelihood", __doc__)
steps, side = (3, 8) if args.quick else (200, 60)


# %% [markdown]
# An ordinary NumPyro distribution with a `log_prob`. t-SVGP takes the expectations of it that it
# needs by quadrature, and their gradients by automatic differentiation.


# %%
class CensoredLogLogistic(dist.Distribution):
    """Times with median ``exp(log_median)``; where ``died`` is 0 the event came later."""

    support = dist.constraints.positive
    pytree_data_fields = ("log_median", "shape_", "died")

    def __init__(self, log_median, shape, died, *, validate_args=None):
        self.log_median, self.shape_, self.died = log_median, shape, died
        batch = jnp.broadcast_shapes(*map(jnp.shape, (log_median, shape, died)))
        super().__init__(batch, (), validate_args=validate_args)

    def log_prob(self, time):
        z = self.shape_ * (jnp.log(time) - self.log_median)
        log_survival = -jnp.logaddexp(0.0, z)
        log_hazard = jnp.log(self.shape_ / time) - jnp.logaddexp(0.0, -z)
        return log_survival + self.died * log_hazard

    def sample(self, key, sample_shape=()):
        logistic = jax.random.logistic(key, self.shape(sample_shape))
        return jnp.exp(self.log_median + logistic / self.shape_)


# %%
days, died, age, thickness = load("melanoma.csv")
years = days / 365.25
X = np.stack([np.log(thickness), age / 20.0], axis=1)
X[:, 1] -= X[:, 1].mean()


def model(X, years=None, died=1.0):
    scales = numpyro.sample("lengthscale", dist.LogNormal(0.5, 0.5).expand([2]).to_event(1))
    deviation = numpyro.sample("deviation", dist.HalfNormal(1.0))
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 0.5))
    level = numpyro.sample("level", dist.Normal(2.0, 1.0))
    f = numpyro.sample("f", GP(deviation**2 * kernels.RBF(scales), X, mean=level))
    with numpyro.plate("patients", X.shape[0]):
        numpyro.sample("years", CensoredLogLogistic(f, shape, died), obs=years)


guide = AutoDualGaussian(model, inducing=inducing.kmeans(jax.random.key(0), X, 20))
result = TSVGP(model, guide, optax.adam(0.05)).run(jax.random.key(1), steps, X, years, died)
points = guide.median(result.params, X)
print({name: np.round(value, 2).tolist() for name, value in points.items() if name != "f"})

# %% [markdown]
# The probability of living five years, over tumour thickness and age.

# %%
axis = [np.linspace(X[:, i].min(), X[:, i].max(), side) for i in range(2)]
grid = np.stack(np.meshgrid(*axis), -1).reshape(-1, 2)
draws = guide.sample_posterior(jax.random.key(2), result.params, grid, sample_shape=(200,))


def survival(log_median, at):
    return jax.nn.sigmoid(-points["shape"] * (np.log(at) - log_median))


surface = survival(draws["f"], 5.0).mean(0).reshape(side, side)

# %% A picture
fig, axes = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
centre = age.mean() / 20.0
ticks = np.exp(axis[0]), 20.0 * (axis[1] + centre)
filled = axes[0].contourf(*ticks, surface, levels=np.linspace(0, 1, 21), cmap="RdYlGn")
fig.colorbar(filled, ax=axes[0], label="posterior mean of the probability")
for value, marker, label in ((1, "kx", "died of melanoma"), (0, "w.", "did not")):
    axes[0].plot(thickness[died == value], age[died == value], marker, label=label, markersize=5)
axes[0].set(xscale="log", xlabel="tumour thickness (mm)", ylabel="age in years")
axes[0].set(title="probability of living five years")
axes[0].legend(facecolor="0.6")
at = np.linspace(0.05, 14.0, 100)
for mm, color in ((0.5, "C2"), (3.0, "C1"), (10.0, "C3")):
    one = jnp.array([[np.log(mm), 0.0]])
    f = guide.sample_posterior(jax.random.key(3), result.params, one, sample_shape=(500,))["f"]
    curves = survival(f, at)
    low, high = np.quantile(curves, [0.025, 0.975], axis=0)
    axes[1].fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)
    axes[1].plot(at, curves.mean(0), color=color, label=f"{mm:g} mm")
axes[1].set(title=f"survival at age {age.mean():.0f}: mean and 95% band", ylim=(0, 1))
axes[1].set(xlabel="years since the operation", ylabel="probability of being alive")
axes[1].legend(title="tumour thickness")
save(fig, args)
