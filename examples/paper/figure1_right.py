"""Figure 1, right: EM on the banana data, both steps to convergence, from (1, 1).

    python examples/paper/figure1_right.py

The published setting of the inducing inputs is not known; the first 100 inputs come close. Prints
the number of EM iterations that each method takes to come within 2% of the common fixed point.
"""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import UNWHITENED, WHITENED, Results, T, load, plt, published
from jax.scipy.stats import norm
from numpyro.distributions import constraints
from tqdm import tqdm

from numpyro_tsvgp import GP, kernels

METHODS = (T, WHITENED, UNWHITENED)


def model(X, y=None):
    scale = numpyro.param("lengthscale", 1.0, constraint=constraints.positive)
    variance = numpyro.param("variance", 1.0, constraint=constraints.positive)
    f = numpyro.sample("f", GP(kernels.RBF(scale, variance), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(probs=1e-3 + (1 - 2e-3) * norm.cdf(f)), obs=y)


def path(method, X, y, Z, iterations, e_steps, m_steps):
    """Lengthscale and variance after each EM iteration."""
    svi = method.make(
        model,
        Z,
        optax.lbfgs(),
        site_lr=0.5,  # at rate 1 the E-step runs into a cycle at the larger variances
        e_steps=e_steps,
        m_steps=m_steps,
        learn_inducing=False,
    )
    state, update = svi.init(jax.random.key(0), X, y), jax.jit(svi.update)
    out = [(1.0, 1.0)]
    for _ in tqdm(range(iterations), desc=method.label):
        rests = len(out) > 20 and np.allclose(out[-1], out[-2], rtol=1e-6)
        if not rests:
            state, _ = update(state, X, y)
        params = svi.get_params(state)
        out.append((float(params["lengthscale"]), float(params["variance"])))
    return np.array(out)


def iterations_to(fixed_point, path):
    """The first iteration from which on both hyperparameters are within 2% of the fixed point."""
    near = (np.abs(path / fixed_point - 1) < 0.02).all(1)
    far = np.flatnonzero(~near)
    return int(far[-1]) + 1 if len(far) and near[-1] else None


def main() -> None:
    results = Results("figure1_right", __doc__, iterations=120)
    data = load(results.args.data, "banana.csv")
    X, y = data[:, :2], data[:, 2]
    methods, Z, iterations, e_steps, m_steps = METHODS, X[:100], results.args.iterations, 30, 12
    if results.quick:
        methods, X, y, Z = METHODS[:1], X[:60], y[:60], X[:15]
        iterations, e_steps, m_steps = 3, 5, 5
    paths = {m.key: path(m, X, y, Z, iterations, e_steps, m_steps) for m in methods}
    columns = {"iteration": range(iterations + 1)}
    for key, values in paths.items():
        columns |= {f"{key}_lengthscale": values[:, 0], f"{key}_variance": values[:, 1]}
    results.table(columns)
    fixed_point = paths["t_svgp"][-1]
    print(f"fixed point: lengthscale {fixed_point[0]:.4f}, variance {fixed_point[1]:.3f}")
    for method in methods:
        n = iterations_to(fixed_point, paths[method.key])
        print(f"{method.label}: within 2% of it after {n} EM iterations")

    table = published("fig1_right_em_path_banana")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for method in methods:
        values = paths[method.key][:21]
        style = {"color": method.colour, "label": method.label, "marker": "o", "ms": 3}
        axes[0].plot(*values.T, **style)
        axes[1].plot(values[:, 1], **style)
    for name, colour in (("t_svgp", "tab:blue"), ("q_svgp", "gray")):
        style = {"color": colour, "ls": ":", "marker": "x", "ms": 5}
        style["label"] = f"{'t' if name[0] == 't' else 'q'}-SVGP, published"
        axes[0].plot(table[f"{name}_lengthscale"], table[f"{name}_variance"], **style)
        axes[1].plot(table["iteration"], table[f"{name}_variance"], **style)
    axes[0].set(xlabel="lengthscale", ylabel="variance", title="twenty EM iterations")
    axes[1].set(xlabel="EM iteration", ylabel="variance")
    axes[1].legend()
    results.picture(figure)


if __name__ == "__main__":
    main()
