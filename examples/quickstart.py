"""Binary classification on the banana data: from model to ArviZ in one screen of code.

    python examples/quickstart.py

Writes ``quickstart.png`` (or the file given with ``--output``): the fitted probability surface,
what the posterior is unsure about, and the loss.
"""

# %% Imports
import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import load, options, save
from numpyro.infer import MCMC, NUTS, Predictive, init_to_value

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, collapse, inducing, kernels, loo, to_arviz
from numpyro_tsvgp.gaussian.linalg import blas_threads

jax.config.update("jax_enable_x64", True)
args = options("quickstart", __doc__)
steps, draws, side = (3, 10, 10) if args.quick else (200, 300, 60)


# %% The model: plain NumPyro, with one new word
def model(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", GP(variance * kernels.Matern52(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


# %% The data: 400 points in the plane, of two classes
x1, x2, y = load("banana.csv")
X = np.stack([x1, x2], axis=1)

# %% The fit: a guide with 32 inducing inputs, and 200 EM iterations
guide = AutoDualGaussian(model, inducing=inducing.kmeans(jax.random.key(0), X, 32))
svi = TSVGP(model, guide, optax.adam(0.1))
result = svi.run(jax.random.key(1), steps, X, y)

# %% How sure are the hyperparameters? NUTS over them alone, with the GP integrated out
start = init_to_value(values=result.fit.hyper)
nuts = NUTS(collapse(result.fit), init_strategy=start)
chains = {"num_chains": 2, "chain_method": "sequential"}
mcmc = MCMC(nuts, num_warmup=draws, num_samples=draws, **chains)
with blas_threads():  # its threads compete with XLA's
    mcmc.run(jax.random.key(4), X, y)

# %% ArviZ: a summary, and the leave-one-out score, from the sites without refitting
idata = to_arviz(jax.random.key(2), result.fit, mcmc=mcmc)
print(az.summary(idata, var_names=["variance", "lengthscale"]))
print(loo(result.fit))
probability = np.asarray(idata["posterior_predictive"]["y"].mean(("chain", "draw")))
print(f"training accuracy: {np.mean((probability > 0.5) == y):.3f}")

# %% The posterior at new inputs: a grid
axis = [np.linspace(X[:, i].min() - 0.5, X[:, i].max() + 0.5, side) for i in range(2)]
grid = np.stack(np.meshgrid(*axis), -1)
f = guide.marginals(result.params, grid.reshape(-1, 2))["f"]
predict = Predictive(model, guide=guide, params=result.params, num_samples=draws)
y_new = predict(jax.random.key(3), grid.reshape(-1, 2)[::7])["y"]
print(f"predictive draws at new inputs: {y_new.shape}")

# %% [markdown]
# E[sigmoid(f)] by the probit approximation, good to a percent and smooth to look at.

# %% A picture
surface = jax.nn.sigmoid(f.mean / jnp.sqrt(1 + jnp.pi / 8 * f.variance))
fig, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
Z = np.asarray(result.params["f_auto_inducing"])
panels = (
    (surface, "probability of class 1", "RdBu_r", np.linspace(0, 1, 21)),
    (jnp.sqrt(f.variance), "posterior standard deviation of f", "viridis", 20),
)
for ax, (values, title, cmap, levels) in zip(axes, panels, strict=False):
    filled = ax.contourf(*axis, np.asarray(values).reshape(side, side), levels=levels, cmap=cmap)
    fig.colorbar(filled, ax=ax)
    for k, colour in ((0, "tab:blue"), (1, "tab:red")):
        points = dict(s=8, c=colour, edgecolors="white", linewidths=0.3, label=f"class {k}")
        ax.scatter(*X[y == k].T, **points)
    ax.set(title=title, xlabel="$x_1$", ylabel="$x_2$")
axes[0].contour(*axis, np.asarray(surface).reshape(side, side), levels=[0.5], colors="black")
axes[1].scatter(*Z.T, s=25, c="white", marker="x", label="inducing inputs")
axes[0].legend(loc="upper right", facecolor="white")
axes[1].legend(loc="upper right", facecolor="dimgray", labelcolor="white")
axes[2].plot(np.arange(1, steps + 1), result.losses)
axes[2].set(title="loss: minus bound minus log prior", xlabel="EM iteration", xscale="log")
axes[2].set_ylabel("nats")
save(fig, args)
