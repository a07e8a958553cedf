"""Site rules and objectives on a dozen models: what does each bring, and what does it cost?

For every pair of a model and data, each rule with each objective is fitted by EM (Adam, MAP) on a
part of the data. Columns: the negative log predictive density of the rest, the share of the rest
inside central 80% intervals (where data are not classes), and seconds after compilation for one
iteration. Of the objectives, with sites made anew at each value, also the posterior of the log
hyperparameters on a grid: the distance of its mean from that under the evidence itself, in standard
deviations. There the evidence is the bound times importance weights of 256 draws.

    python examples/benchmarks/options.py --output options.csv
    python examples/benchmarks/options.py --only sonar coal --output options.csv   # appends
"""

import argparse
import csv
import itertools
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.scipy.stats import norm
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_tsvgp import (
    GP,
    TSVGP,
    AutoDualGaussian,
    Bound,
    EPLike,
    ExpectationPropagation,
    FisherScoring,
    Laplace,
    NaturalGradient,
    TighterBound,
    collapse,
    kernels,
)

jax.config.update("jax_enable_x64", True)
DATA = Path(__file__).parent.parent / "data"
KEY = jax.random.key(0)
TRAIN = 60  # rows to learn from
CUTS = jnp.array([-1.0, 0.0, 1.0])

METHODS = [
    (NaturalGradient(), Bound()),
    (NaturalGradient(), EPLike()),
    (NaturalGradient(), TighterBound()),
    (ExpectationPropagation(), EPLike()),
    (Laplace(), Bound()),
    (Laplace(), EPLike()),
    (FisherScoring(), Bound()),
]


def csv_of(name, header=1):
    return np.loadtxt(DATA / f"{name}.csv", delimiter=",", skiprows=header, ndmin=2)


def classification(name, header=1):
    table = csv_of(name, header)
    X = (table[:, :-1] - table[:, :-1].mean(0)) / (table[:, :-1].std(0) + 1e-9)
    return X / np.sqrt(X.shape[1]), (table[:, -1] > 0).astype(float)


def along_a_line(n, seed):
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(size=n))
    return X, 1.2 * np.sin(7 * X) + 0.5 * np.cos(15 * X), rng


def simulated(draw, seed):
    X, f, rng = along_a_line(160, seed)
    return X, np.asarray(draw(f, rng), float)


def coal():
    years = np.arange(1851, 1963)
    return (years - 1851) / 111.0, np.histogram(csv_of("coal"), np.arange(1851, 1964))[0] * 1.0


def two_columns(name):
    x, y = csv_of(name).T
    return (x - x.min()) / np.ptp(x), (y - y.mean()) / y.std()


def tvnews():
    table = csv_of("tvnews")
    rows = np.random.default_rng(0).choice(len(table), 260, replace=False)
    return (table[rows, 0] - 18) / 60, np.digitize(table[rows, 1], [1, 3, 6])


def digits():
    data = np.load(DATA / "digits.npz")
    X, y = (data[k] for k in data.files[:2])
    X, y = (X, y) if np.ndim(X) > 1 else (y, X)
    X, y = X.reshape(len(y), -1), np.ravel(y)
    keep = np.flatnonzero(np.isin(y, (3, 5, 8)))[:260]
    return X[keep] / 16.0 / 2.0, np.searchsorted((3, 5, 8), y[keep])


# name: (data, likelihood, functions, whether data are classes)
PAIRS = {
    "ionosphere, logit": (
        lambda: classification("ionosphere", 0),
        lambda f: dist.Bernoulli(logits=f),
        1,
        True,
    ),
    "sonar, logit": (
        lambda: classification("sonar", 0),
        lambda f: dist.Bernoulli(logits=f),
        1,
        True,
    ),
    "diabetes, logit": (
        lambda: classification("diabetes"),
        lambda f: dist.Bernoulli(logits=f),
        1,
        True,
    ),
    "banana, probit": (
        lambda: classification("banana"),
        lambda f: dist.Bernoulli(probs=jnp.clip(norm.cdf(f), 1e-9, 1 - 1e-9)),
        1,
        True,
    ),
    "coal, Poisson": (coal, lambda f: dist.Poisson(jnp.exp(f)), 1, False),
    "simulated, negative binomial": (
        lambda: simulated(
            lambda f, rng: rng.poisson(np.exp(1 + f) * rng.gamma(2.0, 0.5, f.shape)), 1
        ),
        lambda f: dist.NegativeBinomial2(jnp.exp(1 + f), 2.0),
        1,
        False,
    ),
    "simulated, zero-inflated": (
        lambda: simulated(
            lambda f, rng: rng.poisson(np.exp(1 + f)) * (rng.uniform(size=f.shape) > 0.3), 2
        ),
        lambda f: dist.ZeroInflatedPoisson(0.3, jnp.exp(1 + f)),
        1,
        False,
    ),
    "motorcycle, Student-t": (
        lambda: two_columns("mcycle"),
        lambda f: dist.StudentT(4.0, f, 0.35),
        1,
        False,
    ),
    "simulated, Laplace": (
        lambda: simulated(lambda f, rng: f + rng.laplace(scale=0.3, size=f.shape), 3),
        lambda f: dist.Laplace(f, 0.3),
        1,
        False,
    ),
    "motorcycle, two GPs": (
        lambda: two_columns("mcycle"),
        lambda f: dist.Normal(f[..., 0, :], jnp.exp(f[..., 1, :] - 1.0)),
        2,
        False,
    ),
    "tvnews, ordinal": (tvnews, lambda f: dist.OrderedLogistic(f, CUTS), 1, True),
    "digits, softmax": (
        digits,
        lambda f: dist.Categorical(logits=jnp.moveaxis(f, -2, -1)),
        3,
        True,
    ),
    "simulated, censored": (
        lambda: simulated(
            lambda f, rng: np.minimum(f + 0.3 * rng.standard_normal(f.shape), 1.0), 4
        ),
        None,
        1,
        False,
    ),
}


class Tobit(dist.Distribution):
    """A normal distribution of which values above one are known as one."""

    arg_constraints = {"loc": dist.constraints.real}
    support = dist.constraints.real

    def __init__(self, loc, validate_args=None):
        self.loc = loc
        super().__init__(jnp.shape(loc), validate_args=validate_args)

    def log_prob(self, value):
        inside = norm.logpdf(value, self.loc, 0.3)
        return jnp.where(value < 1.0, inside, norm.logsf(1.0, self.loc, 0.3))

    def sample(self, key, sample_shape=()):
        noise = jax.random.normal(key, sample_shape + self.batch_shape)
        return jnp.minimum(self.loc + 0.3 * noise, 1.0)


def model_of(likelihood, functions):
    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.7))
        variance = numpyro.sample("variance", dist.LogNormal(0.5, 1.0))
        gp = GP(variance * kernels.Matern52(lengthscale), X)
        if functions == 1:
            f = numpyro.sample("f", gp)
        else:
            with numpyro.plate("functions", functions):
                f = numpyro.sample("f", gp)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(f), obs=y)

    return model


def scores(fit, likelihood, X, y, classes):
    """Negative log predictive density and coverage of 80% intervals, by draws of the marginals."""
    q = fit.marginals(X)["f"]
    z = jax.random.normal(jax.random.key(1), (2000, *q.mean.shape))
    fn = likelihood(q.mean + jnp.sqrt(q.variance) * z)
    nlpd = -(jax.nn.logsumexp(fn.log_prob(y), 0) - jnp.log(2000)).mean()
    if classes:
        return float(nlpd), np.nan
    draws = fn.sample(jax.random.key(2))
    low, high = np.quantile(np.asarray(draws), [0.1, 0.9], axis=0)
    return float(nlpd), float(((y >= low) & (y <= high)).mean())


def fits(name, methods, quick):
    load, likelihood, functions, classes = PAIRS[name]
    likelihood = likelihood or Tobit
    X, y = load()
    rows = np.random.default_rng(0).permutation(len(y))
    train, test = np.sort(rows[: 12 if quick else TRAIN]), rows[TRAIN : TRAIN + 200]
    model = model_of(likelihood, functions)
    m = len(train) // 3
    first = None
    for rule, objective in methods[:2] if quick else methods:
        sparse = isinstance(objective, TighterBound)  # it is about inducing inputs alone
        row = {"pair": name, "n": len(train), "rule": repr(rule), "objective": repr(objective)}
        guide = AutoDualGaussian(model, X[train][:: len(train) // m] if sparse else None)
        svi = TSVGP(
            model, guide, optax.adam(0.1), rule=rule, objective=objective, site_lr=0.5, e_steps=2
        )
        steps = 3 if quick else 80
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = svi.run(KEY, steps, X[train], y[train], progress_bar=False)
        except (ValueError, RuntimeError) as error:
            yield {**row, "note": str(error)[:60]}
            continue
        start = time.process_time()
        svi.run(KEY, steps, X[train], y[train], init_state=result.state, progress_bar=False)
        seconds = (time.process_time() - start) / steps
        nlpd, coverage = scores(result.fit, likelihood, X[test], y[test], classes)
        logs = {f"log_{k}": float(jnp.log(v)) for k, v in result.fit.hyper.items()}
        row |= {"nlpd": nlpd, "coverage": coverage, "seconds": seconds, **logs}
        first = result.fit if first is None else first
        if rule == NaturalGradient() and not sparse:
            row |= bias(first, objective, X[train], y[train], 3 if quick else 9)
        yield row


def bias(fit, objective, X, y, size):
    """Distance of posterior means of log hyperparameters from those under the evidence."""
    centre = {k: float(jnp.log(v)) for k, v in fit.hyper.items()}
    axes = [np.linspace(c - 1.6, c + 2.4, size) for c in centre.values()]
    points = np.array(list(itertools.product(*axes)))
    hyper = {k: jnp.exp(points[:, i]) for i, k in enumerate(centre)}

    def on_grid(objective):
        collapsed = collapse(fit, objective=objective, refresh=4)

        def one(values):
            log_joint = log_density(handlers.seed(collapsed, 0), (X, y), {}, values)[0]
            return log_joint + sum(jnp.log(v) for v in values.values())

        return np.asarray(jax.jit(lambda values: jax.lax.map(one, values))(hyper)), collapsed

    def moments(log_densities):
        usable = np.where(np.isfinite(log_densities), log_densities, -np.inf)
        weights = np.exp(usable - usable.max())
        weights /= weights.sum()
        mean = weights @ points
        return mean, np.sqrt(weights @ (points - mean) ** 2)

    bound, collapsed = on_grid(Bound())
    weights = np.asarray(collapsed.log_weights(KEY, hyper, num_draws=256))
    mean, sd = moments(bound + weights)
    found = bound if objective == Bound() else on_grid(objective)[0]
    shift = (moments(found)[0] - mean) / sd
    return {f"shift_{k}": shift[i] for i, k in enumerate(centre)}


def picture(source, target):
    """Predictive densities against the default, and the bias of hyperparameters by objective."""
    import matplotlib.pyplot as plt

    with open(source, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["nlpd"]]
    pairs = list(dict.fromkeys(row["pair"] for row in rows))
    default = {
        row["pair"]: float(row["nlpd"])
        for row in rows
        if (row["rule"], row["objective"]) == ("NaturalGradient()", "Bound()")
    }
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.4 * len(pairs) + 1.6), sharey=True)
    methods = list(dict.fromkeys((row["rule"], row["objective"]) for row in rows))
    for i, (rule, objective) in enumerate(methods):
        own = [row for row in rows if (row["rule"], row["objective"]) == (rule, objective)]
        own = [row for row in own if row["pair"] in default]
        at = [pairs.index(row["pair"]) + 0.08 * (i - len(methods) / 2) for row in own]
        label = f"{rule.split('(')[0]}, {objective.split('(')[0]}"
        change = [float(row["nlpd"]) - default[row["pair"]] for row in own]
        axes[0].plot(change, at, "o", color=f"C{i}", ms=5, label=label)
        biased = [(row, y) for row, y in zip(own, at, strict=True) if row["shift_variance"]]
        for name, marker in (("shift_lengthscale", "<"), ("shift_variance", "s")):
            shifts = [float(row[name]) for row, _ in biased]
            axes[1].plot(shifts, [y for _, y in biased], marker, color=f"C{i}", ms=5)
    axes[0].set_yticks(range(len(pairs)), pairs)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("test NLPD, less that of the default (left is better)")
    axes[1].set_xlabel("bias of log lengthscale (triangle), variance (square), in sd")
    for ax in axes:
        ax.axvline(0.0, color="0.6", lw=1)
        ax.grid(axis="y", color="0.92")
    axes[0].legend(fontsize=8, loc="best")
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    print(f"wrote {target}")


COLUMNS = ["pair", "n", "rule", "objective", "nlpd", "coverage", "seconds", "log_lengthscale"]
COLUMNS += ["log_variance", "shift_lengthscale", "shift_variance", "note"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small fit, for tests")
    parser.add_argument("--only", nargs="*", help="pairs whose names contain one of these")
    parser.add_argument(
        "--methods", nargs="*", type=int, default=range(len(METHODS)), help="numbers of METHODS"
    )
    parser.add_argument("--output", default="options.csv", help="the CSV, which is appended to")
    parser.add_argument("--picture", help="draw the CSV into this file, and compute nothing")
    args = parser.parse_args()
    if args.picture:
        picture(args.output, args.picture)
        return
    names = [n for n in PAIRS if not args.only or any(part in n for part in args.only)]
    is_new = not Path(args.output).exists()
    with open(args.output, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        for name in names[:1] if args.quick else names:
            for row in fits(name, [METHODS[i] for i in args.methods], args.quick):
                writer.writerow(row)
                file.flush()
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})


if __name__ == "__main__":
    main()
