"""Figure 3: six UCI data sets, five folds, three methods: bound and test NLPD per EM iteration.

    python examples/paper/uci.py

Fifty inducing inputs from k-means, learned; Matern-5/2 with a lengthscale for each input; twenty EM
iterations of 8 E-steps of rate 0.7 (one of rate 1 for regression) and 15 steps of Adam at 0.2. What
has no E-step takes as many steps of Adam as the others take steps of both kinds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import ADAM, WHITENED, Results, T, load, plt, standardise
from jax.scipy.stats import norm
from numpyro.distributions import constraints
from tqdm import tqdm

from numpyro_tsvgp import GP, inducing, kernels

METHODS = (T, WHITENED, ADAM)
FOLDS, ITERATIONS, M_STEPS, INDUCING = 5, 20, 15, 50


class DataSet(NamedTuple):
    name: str
    columns: tuple[int, ...] | None = None  # which are inputs; all but the last by default
    regression: bool = True
    header: bool = True


DATA_SETS = (
    DataSet("airfoil"),
    DataSet("boston", (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13)),  # without rad, as in the paper
    DataSet("concrete", (0, 3, 5, 6, 7)),  # cement, water, coarse and fine aggregate, age
    DataSet("sonar", regression=False, header=False),
    DataSet("ionosphere", regression=False, header=False),
    DataSet("diabetes", regression=False),
)


def prior(X):
    scale = numpyro.param("scale", jnp.ones(X.shape[1]), constraint=constraints.softplus_positive)
    variance = numpyro.param("variance", 1.0, constraint=constraints.softplus_positive)
    return GP(kernels.Matern52(scale, variance), X)


def regression(X, y=None):
    f = numpyro.sample("f", prior(X))
    noise = numpyro.param("noise", 1.0, constraint=constraints.softplus_positive)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f, jnp.sqrt(noise)), obs=y)


def classification(X, y=None):
    f = numpyro.sample("f", prior(X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(probs=1e-3 + (1 - 2e-3) * norm.cdf(f)), obs=y)


def nlpd(params, f, y):
    """Minus the mean log predictive density, in closed form for both likelihoods."""
    if "noise" in params:
        return -norm.logpdf(y, f.mean, jnp.sqrt(f.variance + params["noise"])).mean()
    p = 1e-3 + (1 - 2e-3) * norm.cdf(f.mean / jnp.sqrt(1 + f.variance))
    return -jnp.log(jnp.where(y > 0, p, 1 - p)).mean()


def folds(data_set, table):
    """Training and test parts of equal size, inputs (and targets, if numbers) standardised."""
    columns = data_set.columns or tuple(range(table.shape[1] - 1))
    order = np.random.RandomState(0).permutation(len(table))[: len(table) // FOLDS * FOLDS]
    for test in order.reshape(FOLDS, -1):
        train = np.setdiff1d(order, test)
        X, X_test = standardise(table[train][:, columns], table[test][:, columns])
        y, y_test = table[train, -1], table[test, -1]
        if data_set.regression:
            y, y_test = standardise(y, y_test)
        else:
            y, y_test = (y > 0).astype(float), (y_test > 0).astype(float)
        Z = inducing.kmeans(jax.random.key(0), X, INDUCING)
        yield Z, X, y, X_test, y_test


def run(method, data_set, parts, iterations, bar):
    """Bound and NLPD after each iteration, shape (folds, iterations, 2); one compilation."""
    model = regression if data_set.regression else classification
    e_steps, rate = (1, 1.0) if data_set.regression else (8, 0.7)
    m_steps = M_STEPS + (e_steps if method is ADAM else 0)
    optim = optax.adam(0.2)
    svi = method.make(model, parts[0][0], optim, site_lr=rate, e_steps=e_steps, m_steps=m_steps)
    update = jax.jit(svi.update)

    @jax.jit
    def measure(state, X, y, X_test, y_test):
        params = svi.get_params(state)
        f = svi.guide.marginals(params, X_test)["f"]
        return -svi.evaluate(state, X, y), nlpd(params, f, y_test)

    out = []
    for Z, X, y, X_test, y_test in parts:
        state = svi.init(jax.random.key(0), X, y, init_params={"f_auto_inducing": Z})
        curve = []
        for _ in range(iterations):
            state, _ = update(state, X, y)
            curve.append(measure(state, X, y, X_test, y_test))
            bar.update()
        out.append(curve)
    return np.array(out, float)


def main() -> None:
    results = Results("uci", __doc__)
    data_sets, methods, iterations, used = DATA_SETS, METHODS, ITERATIONS, FOLDS
    if results.quick:
        data_sets, methods, iterations, used = DATA_SETS[3:4], METHODS[2:], 2, 1
    bar = tqdm(total=len(data_sets) * len(methods) * used * iterations)
    curves, rows = {}, []
    for data_set in data_sets:
        table = load_table(results, data_set)
        parts = list(folds(data_set, table))[:used]
        for method in methods:
            bar.set_description(f"{data_set.name}, {method.label}")
            values = curves[data_set.name, method.key] = run(
                method, data_set, parts, iterations, bar
            )
            for i in range(iterations):
                mean, sd = values[:, i].mean(0), values[:, i].std(0)
                numbers = (mean[0], sd[0], mean[1], sd[1])
                rows.append((data_set.name, method.key, i + 1, *map(float, numbers)))
        names = ("data", "method", "iteration", "elbo", "elbo_sd", "nlpd", "nlpd_sd")
        results.table(dict(zip(names, zip(*rows, strict=True), strict=True)))
    bar.close()
    plot(results, methods, rows)
    for (name, key), values in curves.items():
        (elbo, score), (elbo_sd, sd) = values[:, -1].mean(0), values[:, -1].std(0)
        print(f"{name} {key}: ELBO {elbo:.1f} ({elbo_sd:.1f}), NLPD {score:.4f} ({sd:.4f})")


def load_table(results, data_set):
    path = f"{data_set.name}.csv"
    if data_set.name != "boston":
        return load(results.args.data, path, data_set.header)
    rows = (results.args.data / path).read_text().splitlines()[1:]  # the first column is quoted
    return np.array([[float(x.strip('"')) for x in row.split(",")] for row in rows])


def plot(results, methods, rows):
    """Draws the rows of the table, so that a picture can be made anew from the CSV file."""
    names = list(dict.fromkeys(row[0] for row in rows))
    size = (2.6 * len(names) + 1, 6.4)
    figure, axes = plt.subplots(2, len(names), figsize=size, layout="constrained", squeeze=False)
    for name, column in zip(names, axes.T, strict=True):
        for i, ax in enumerate(column):
            last = []
            for method in methods:
                of = [row[2:] for row in rows if row[:2] == (name, method.key)]
                x, mean, sd = np.array(of, float)[:, [0, 1 + 2 * i, 2 + 2 * i]].T
                ax.plot(x, mean, color=method.colour, label=method.label)
                ax.fill_between(x, mean - sd, mean + sd, color=method.colour, alpha=0.15, lw=0)
                last += [*(mean - sd)[len(x) // 5 :], *(mean + sd)[len(x) // 5 :]]
            # The first iterations would hide the differences that last.
            low, high = np.nanmin(last), np.nanmax(last)
            pad = 0.05 * (high - low) + 1e-9
            ax.set(ylim=(low - pad, high + pad), xlim=(1, x[-1]))
        column[0].set(title=name)
        column[1].set(xlabel="EM iteration")
    axes[0, 0].set(ylabel="bound (nats)")
    axes[1, 0].set(ylabel="test NLPD (nats a point)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=len(methods),
        title="mean over folds (band: ± 1 sd over folds)",
    )
    results.picture(figure)


if __name__ == "__main__":
    main()
