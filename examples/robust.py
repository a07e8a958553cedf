"""Robust regression: telephone calls from Belgium, six years of which are wrong.

    python examples/robust.py

From 1964 to 1969 minutes were counted in place of calls (and partly so in 1963 and 1970). A
Gaussian likelihood believes them, a Student-t likelihood does not. Writes ``robust.png``.
"""

# %% Imports
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import band, load, options, save

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

jax.config.update("jax_enable_x64", True)
args = options("robust", __doc__)
steps = 3 if args.quick else 300

# %%
year, calls = load("telephone.csv")
X = (year - 1950.0) / 10.0
y = np.log(calls)


# %% [markdown]
# The two models differ in the likelihood alone. There is no inducing input: 24 points are few,
# and `inducing=None` keeps a site for each.


# %%
def make_model(likelihood):
    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 0.3))
        noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        kernel = kernels.RBF(lengthscale) + 4.0 * (kernels.Linear() + 1.0)  # around a line
        f = numpyro.sample("f", GP(kernel, X))
        with numpyro.plate("years", X.shape[0]):
            numpyro.sample("y", likelihood(f, noise), obs=y)

    return model


likelihoods = {
    "Gaussian": dist.Normal,
    "Student-t, 2 degrees of freedom": lambda f, noise: dist.StudentT(2.0, f, noise),
}

# %%
X_new = np.linspace(0.0, 2.5, 200)
fits, weights = {}, {}
for name, likelihood in likelihoods.items():
    model = make_model(likelihood)
    guide = AutoDualGaussian(model)
    result = TSVGP(model, guide, optax.adam(0.05)).run(jax.random.key(0), steps, X, y)
    fits[name] = guide.marginals(result.params, X_new)["f"]
    noise = float(guide.median(result.params, X)["noise"])
    weights[name] = noise**2 * result.params["f_auto_quadratic"][0]
    print(f"{name}: noise scale {noise:.3f}")

# %% [markdown]
# The precision of a point's site is how much the fit listens to it. Under the Student-t likelihood
# it goes to zero for the six wrong years, by itself.

# %% A picture
fig, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for i, (name, f) in enumerate(fits.items()):
    band(axes[0], 1950 + 10 * X_new, f.mean, np.sqrt(f.variance), f"C{i}", name)
    axes[1].plot(year, weights[name], "o-", color=f"C{i}", label=name, markersize=4)
axes[0].plot(year, y, "k.", label="as recorded")
axes[0].set(title="telephone calls from Belgium", xlabel="year")
axes[0].set_ylabel("log of the calls in millions")
axes[0].legend()
axes[1].set(title="how much each point counts", xlabel="year", ylabel="noise$^2$ × site precision")
axes[1].set_ylim(bottom=0)
axes[1].legend()
save(fig, args)
