"""Which kernel? Leave-one-out scores of three, compared by ArviZ, without a single refit.

    python examples/compare_kernels.py

The motorcycle data with a robust likelihood. Writes ``compare_kernels.png``.
"""

# %% Imports
import arviz as az
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _common import band, effective_parameters, elpd, load, options, save

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, loo

jax.config.update("jax_enable_x64", True)
args = options("compare_kernels", __doc__)


# %% Three kernels, one model
KERNELS = {
    "squared exponential": kernels.RBF,
    "Matern 5/2": kernels.Matern52,
    "Matern 1/2": kernels.Matern12,
}


def make_model(kernel):
    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 1.0))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        f = numpyro.sample("f", GP(kernel(lengthscale, variance), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.StudentT(4.0, f, noise), obs=y)

    return model


# %%
X, y = ((column - column.mean()) / column.std() for column in load("mcycle.csv"))
X_new = np.linspace(X.min() - 0.2, X.max() + 0.2, 200)

# %% Fit each and score it by leave-one-out
scores, fits = {}, {}
for name, kernel in KERNELS.items():
    model = make_model(kernel)
    guide = AutoDualGaussian(model)  # 133 points need no inducing inputs, which blur a rough kernel
    svi = TSVGP(model, guide, optax.adam(0.05))
    result = svi.run(jax.random.key(0), 3 if args.quick else 300, X, y)
    scores[name] = loo(result.fit)
    fits[name] = guide.marginals(result.params, X_new)["f"]
table = az.compare(scores)
print(table)
for name in table.index:
    score, size = elpd(scores[name]), effective_parameters(scores[name])
    behind, error = elpd(scores[table.index[0]]) - score, table.loc[name, "dse"]
    print(f"{name}: elpd {score:.1f}, effective parameters {size:.1f}", end=", ")
    print(f"behind the best by {behind:.1f} (standard error {error:.1f})")

# %% A picture
fig, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained")
for ax, (name, f) in zip(axes, fits.items(), strict=False):
    band(ax, X_new, f.mean, np.sqrt(f.variance))
    ax.plot(X, y, "k.", markersize=3, label="data")
    ax.set(title=name, xlabel="time (standardised)", ylim=(-3, 3))
axes[0].set_ylabel("acceleration (standardised)")
axes[0].legend(fontsize=7, loc="lower right")
best, *others = table.index
field = "elpd_i" if hasattr(scores[best], "elpd_i") else "loo_i"  # ArviZ 1.x, 0.x
pointwise = {name: np.asarray(score[field]).ravel() for name, score in scores.items()}
for name in others:
    gap = np.cumsum((pointwise[best] - pointwise[name])[np.argsort(X)])
    axes[3].plot(np.sort(X), gap, label=f"{best}\nover {name}")
axes[3].axhline(0.0, color="gray", linewidth=0.5)
axes[3].set(title="where the scores differ", xlabel="time (standardised)")
axes[3].set_ylabel("nats, summed up to that time")
axes[3].legend(fontsize=7)
save(fig, args)
