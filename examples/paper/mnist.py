"""Figure 4 and Table 1: ten-class MNIST, t-SVGP beside q-SVGP, by step and by seconds.

    python examples/paper/mnist.py --data DIRECTORY

The directory has ``mnist.npz`` (``X`` of shape (70000, 784), ``y``); if not, the data are fetched
from OpenML, which needs scikit-learn. ``--footing 150`` also looks for the footing of the published
bound, and ``--table 300`` runs the six settings of Table 1, each for so many steps.
"""

import dataclasses
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import WHITENED, Results, T, plt, published
from numpyro.distributions import constraints
from tqdm import tqdm

from numpyro_tsvgp import GP, kernels, quadrature

CLASSES, BATCH, INDUCING = 10, 200, 100
METHODS = (T, WHITENED)


def model(X, y=None, size=60_000, each=False):
    start = jnp.ones(X.shape[1]) if each else 1.0
    scale = numpyro.param("lengthscale", start, constraint=constraints.softplus_positive)
    variance = numpyro.param("variance", 1.0, constraint=constraints.softplus_positive)
    with numpyro.plate("classes", CLASSES):
        f = numpyro.sample("f", GP(kernels.Matern52(scale, variance), X))
    with numpyro.plate("data", size, subsample_size=len(X)):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


def load_mnist(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    path = directory / "mnist.npz"
    if path.exists():
        data = np.load(path)
        X, y = data["X"], data["y"]
    else:
        from sklearn.datasets import fetch_openml

        X, y = fetch_openml("mnist_784", return_X_y=True, as_frame=False)
    return X.reshape(len(X), -1) / 255.0, y.astype(int)


@jax.jit
def log_densities(f, y):
    """log E[softmax(f)_y] at each point, by 256 quasi-random nodes, in blocks of points."""
    nodes, weights = quadrature.QuasiMonteCarlo(256).nodes(jax.random.key(0), CLASSES)

    def block(inputs):
        mean, variance, y = inputs  # (rows, classes)
        values = mean[None] + jnp.sqrt(variance) * nodes[:, None, :]
        log_p = jnp.take_along_axis(jax.nn.log_softmax(values), y[None, :, None], -1)[..., 0]
        return jax.nn.logsumexp(log_p, axis=0, b=weights[:, None])

    rows = (f.mean.T.reshape(-1, 100, CLASSES), f.variance.T.reshape(-1, 100, CLASSES))
    return jax.lax.map(block, (*rows, y.reshape(-1, 100))).ravel()


class Run:
    """One method with one kernel and one setting of rates, and how far it has come."""

    def __init__(
        self, method, data, each, rate, learning_rate, e_steps=1, m_steps=1, m=INDUCING, seed=0
    ):
        (X, y), self.test = data
        self.X, self.y, self.rng = X, y, np.random.RandomState(seed)
        self.model = partial(model, size=len(X), each=each)
        self.svi = method.make(
            self.model,
            X[:m],
            optax.adam(learning_rate),
            site_lr=rate,
            e_steps=e_steps,
            m_steps=m_steps,
        )
        self.state = self.svi.init(jax.random.key(seed), *self.batch())
        self.update, self.evaluate = jax.jit(self.svi.update), jax.jit(self.svi.evaluate)
        self.seconds, self.losses = [], []
        self.update(self.state, *self.batch())  # compiles; the state is not kept
        self.rng.seed(seed)

    def batch(self):
        rows = self.rng.choice(len(self.X), BATCH, replace=False)
        return self.X[rows], self.y[rows]

    def step(self):
        batch, old = self.batch(), self.state
        start = time.perf_counter()
        self.state, _ = jax.block_until_ready(self.update(old, *batch))
        self.seconds.append(time.perf_counter() - start)
        # The loss that an update reports is that of sites which have not seen the batch. Published
        # is that of sites which have, at the hyperparameters before the M-step.
        at = dataclasses.replace(self.state, optim_state=old.optim_state, rng_key=old.rng_key)
        self.losses.append(float(self.evaluate(at, *batch)))

    def elbo(self):
        """The bound on all training points: the mean of the bounds of equal parts."""
        part = min(4000, len(self.X))
        rows = [slice(i, i + part) for i in range(0, len(self.X) - part + 1, part)]
        return -np.mean([self.evaluate(self.state, self.X[i], self.y[i]) for i in rows])

    def nlpd(self):
        X, y = self.test
        f = self.svi.guide.marginals(self.svi.get_params(self.state), X)["f"]
        return -float(log_densities(f, y).mean())

    def kl(self):
        fit = self.svi.fit(self.state, self.X[:1])
        process, approximation = fit.guide.latents(fit.read(), fit.params)["f"]
        return float(approximation.kl(process))


def train(runs, steps, every=()):
    """Steps of all runs in turn, so that a busy machine slows them alike; rows of measurements."""
    rows = []
    for i in tqdm(range(1, steps + 1)):
        for run in runs.values():
            run.step()
        if i in every:
            for (key, kernel), run in runs.items():
                done = (i, float(np.sum(run.seconds)), run.nlpd(), float(run.elbo()))
                rows.append((key, kernel, *done))
    return rows


def figure4(results, data, steps):
    """The two methods with both kernels, 150 steps: NLPD and bound against step and seconds."""
    variants = {"one lengthscale": False, "one a pixel": True}
    runs = {
        (method.key, name): Run(method, data, each, 0.03, 0.02)
        for method in (METHODS[1:] if results.quick else METHODS)
        for name, each in variants.items()
        if each or not results.quick
    }
    every = {1, 2, 5, steps, *range(10, steps, 10)}
    rows = train(runs, steps, every)
    names = ("method", "kernel", "step", "seconds", "nlpd", "elbo")
    results.table(dict(zip(names, zip(*rows, strict=True), strict=True)))
    results.table(
        {
            "step": range(1, steps + 1),
            **{
                f"{key} {kernel} {what}": values
                for (key, kernel), run in runs.items()
                for what, values in (("loss", run.losses), ("seconds", run.seconds))
            },
        },
        "mnist_steps",
    )
    plot(results, rows, runs)


def plot(results, rows, runs):
    nlpd, elbo = published("fig4_mnist_nlpd"), published("fig4_mnist_elbo")
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained", sharey="row")
    for method in METHODS:
        name = "t_svgp" if method is T else "q_svgp"
        label = "t-SVGP, published" if method is T else "q-SVGP, published"
        style = {"color": method.colour, "ls": ":", "label": label}
        for row, table, what in ((0, nlpd, "nlpd"), (1, elbo, "elbo")):
            axes[row, 0].plot(table["step"], table[f"{name}_{what}"], **style)
            axes[row, 1].plot(table[f"{name}_seconds"], table[f"{name}_{what}"], **style)
    for key, kernel in runs:
        method = next(m for m in METHODS if m.key == key)
        curve = np.array([row[2:] for row in rows if row[:2] == (key, kernel)])
        style = {"color": method.colour, "ls": "--" if "pixel" in kernel else "-"}
        style["label"] = f"{method.label}, {kernel}"
        for row, column in ((0, 2), (1, 3)):
            axes[row, 0].plot(curve[:, 0], curve[:, column], **style)
            axes[row, 1].plot(curve[:, 1], curve[:, column], **style)
    axes[0, 0].set(ylabel="NLPD on the test images")
    axes[1, 0].set(ylabel="bound on the training images", xlabel="step")
    axes[1, 1].set(xlabel="seconds", xscale="log")
    axes[0, 1].set(xscale="log")
    axes[0, 0].legend(fontsize=8)
    results.picture(figure)


def footing(results, data, steps):
    """On what footing is the published bound? The first and the last steps on 56,000 points.

    The paper counts 70,000 images; four fifths of them are 56,000.
    """
    X, y = (np.concatenate(parts) for parts in zip(*data, strict=True))
    data = (X[:56_000], y[:56_000]), (X[56_000:], y[56_000:])
    elbo, rows = published("fig4_mnist_elbo"), []
    for key in ("t_svgp", "q_svgp"):
        curve = elbo[f"{key}_elbo"]
        rows.append((f"{key}, published", "", "", *curve[:3], curve[-10:].mean(), "", "", ""))
    for rates in ((0.03, 0.02), (0.04, 0.05)):
        runs = {(m.key, ""): Run(m, data, True, *rates) for m in METHODS}
        train(runs, steps)
        for (key, _), run in runs.items():
            losses = -np.array(run.losses)
            bound, kl, score = float(run.elbo()), run.kl(), run.nlpd()
            rows.append((key, *rates, *losses[:3], losses[-10:].mean(), bound, kl, score))
    names = ("method", "lr_e", "lr_m", "first", "second", "third", "mean_of_last_ten")
    names += ("all_points", "kl", "nlpd")
    results.table(dict(zip(names, zip(*rows, strict=True), strict=True)), "mnist_footing")


def table1(results, data, steps):
    """The six settings of Table 1."""
    table, rows = published("table1_mnist_nlpd"), []
    for setting in table:
        options = (setting["lr_e"], setting["lr_m"], int(setting["e_steps"]))
        options += (int(setting["m_steps"]),)
        runs = {(m.key, ""): Run(m, data, True, *options) for m in METHODS}
        train(runs, steps)
        scores = [run.nlpd() for run in runs.values()]
        print(*options, *scores, flush=True)
        rows.append((*options, *scores, float(setting["t_svgp"]), float(setting["q_svgp"]), steps))
        names = ("lr_e", "lr_m", "e_steps", "m_steps", "t_svgp", "q_svgp_whitened")
        names += ("published_t_svgp", "published_q_svgp", "steps")
        results.table(dict(zip(names, zip(*rows, strict=True), strict=True)), "mnist_table1")


def main() -> None:
    results = Results("mnist", __doc__, steps=150, footing=0, table=0)
    X, y = load_mnist(results.args.data)
    data = (X[:60_000], y[:60_000]), (X[60_000:], y[60_000:])
    steps = results.args.steps
    if results.quick:
        data = (X[:400], y[:400]), (X[-100:], y[-100:])
        steps = 2
    if steps:
        figure4(results, data, steps)
    if results.args.footing:
        footing(results, data, results.args.footing)
    if results.args.table:
        table1(results, data, results.args.table)


if __name__ == "__main__":
    main()
