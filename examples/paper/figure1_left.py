"""Figure 1, left: the M-step's objective against the kernel variance, in three parameterizations.

    python examples/paper/figure1_left.py

The E-step is run to convergence at variance 0.6; then the bound is evaluated at other variances
with the sites, q(u), or q(v) held. Compares with the 300 published numbers.
"""

import jax
import numpy as np
from common import UNWHITENED, WHITENED, Results, T, plt, published
from toy import X, Y, Z, bound_at, model
from tqdm import tqdm

METHODS = (T, WHITENED, UNWHITENED)


def curve(method, variances, steps):
    svi = method.make(model, Z, None, site_lr=0.8, e_steps=steps, learn_inducing=False)
    state = svi.run(jax.random.key(0), 1, X, Y, progress_bar=False).state
    bound = jax.jit(lambda variance: bound_at(svi, state, variance))
    return np.array([bound(v) for v in variances])


def main() -> None:
    results = Results("figure1_left", __doc__)
    table = published("fig1_left_bound_vs_variance")
    if results.quick:
        table = table[::20]
    variances = table["variance"]
    curves = {method.key: curve(method, variances, 60) for method in tqdm(METHODS)}
    results.table({"variance": variances, **curves})
    for method in METHODS:
        error = np.abs(curves[method.key] - table[method.key]).max()
        print(f"{method.label}: largest difference from the published curve {error:.1e}")

    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
    for method in METHODS:
        label, colour = method.label, method.colour
        axes[0].plot(variances, curves[method.key], color=colour, label=label)
        axes[0].plot(variances[::3], table[method.key][::3], ".", ms=4, color=colour)
        error = np.abs(curves[method.key] - table[method.key])
        axes[1].semilogy(variances, error, color=colour, label=label)
    axes[0].set(
        ylim=(-75, -68), xlabel="kernel variance", ylabel="bound", title="dots: published numbers"
    )
    axes[0].axvline(0.6, color="black", lw=0.7, ls=":")
    axes[0].legend()
    axes[1].set(xlabel="kernel variance", title="difference from the published numbers")
    results.picture(figure)


if __name__ == "__main__":
    main()
