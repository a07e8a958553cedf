"""Ordinal regression: on how many days of the week do people of an age watch the news?

    python examples/ordinal.py

Answers of 944 people in 1996: 0 to 7 days. An ordered likelihood with cutpoints that are fitted.
Writes ``ordinal.png``.
"""

# %% Imports
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import band, load, options, save

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

jax.config.update("jax_enable_x64", True)
args = options("ordinal", __doc__)
steps, draws = (3, 10) if args.quick else (200, 500)

# %%
age, days = load("tvnews.csv")
days = days.astype(int)
levels = 8


# %% [markdown]
# Cutpoints are increasing numbers with a prior, the latent function is smooth in age.


# %%
def model(age, days=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(3.0, 0.5))
    deviation = numpyro.sample("deviation", dist.HalfNormal(2.0))
    ordered = dist.transforms.OrderedTransform()
    gaps = dist.Normal(0.0, 1.0).expand([levels - 1]).to_event(1)
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(gaps, ordered))
    f = numpyro.sample("f", GP(deviation**2 * kernels.Matern52(lengthscale), age))
    with numpyro.plate("people", age.shape[0]):
        numpyro.sample("days", dist.OrderedLogistic(f, cuts), obs=days)


guide = AutoDualGaussian(model, inducing=np.linspace(19.0, 91.0, 15))
svi = TSVGP(model, guide, optax.adam(0.05))
result = svi.run(jax.random.key(0), steps, age, days)

# %% [markdown]
# The probability of each answer at each age, averaged over the posterior of the function.

# %%
age_new = np.linspace(19.0, 91.0, 100)
sample = guide.sample_posterior(jax.random.key(1), result.params, age_new, sample_shape=(draws,))
likelihood = dist.OrderedLogistic(sample["f"], sample["cuts"][0])
probability = np.asarray(jnp.mean(likelihood.probs, axis=0))
assert np.allclose(probability.sum(-1), 1)
expected = likelihood.probs @ np.arange(levels)
for a in (25, 50, 75):
    print(f"age {a}: {float(expected.mean(0)[np.argmin(abs(age_new - a))]):.2f} days a week")

# %% A picture
fig, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
colors = plt.get_cmap("viridis")(np.linspace(0, 1, levels))
axes[0].stackplot(age_new, probability.T, colors=colors, labels=[f"{k} days" for k in range(8)])
axes[0].set(title="probability of each answer", xlabel="age in years", ylabel="probability")
axes[0].set(xlim=(19, 91), ylim=(0, 1))
axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, reverse=True)
band(axes[1], age_new, expected.mean(0), expected.std(0), label="expected number of days")
decade = np.arange(19, 90, 6)
inside = [(age >= a) & (age < a + 6) for a in decade]
axes[1].plot(
    decade + 3, [days[i].mean() for i in inside], "ko", label="data, mean of six years of age"
)
axes[1].set(title="watching the news on television", xlabel="age in years", ylim=(0, 7))
axes[1].set_ylabel("days a week")
axes[1].legend()
save(fig, args)
