"""Site rules and objectives on a dozen models: what does each bring, and what does it cost?

For every pair of a model and data, and each rule, sites are iterated to their fixed point at any
values of the hyperparameters, where each objective is evaluated; its maximum with the log prior is
the MAP fit. Columns:

- nlpd: the negative log predictive density of other rows at the MAP;
- coverage: the share of these inside central 80% intervals (where data are not classes);
- coverage_f: the share of NUTS's draws of f at the training inputs inside central 80% intervals of
  the fit (hyperparameters are points in a fit and drawn by NUTS, so that less than 80% must be);
- log_*: the logarithms of the hyperparameters at the MAP;
- shift_*: the distance of the posterior mean of a log hyperparameter, on a grid, from that of NUTS,
  in standard deviations, and ratio_*, its standard deviation over that of NUTS;
- reference: what shifts refer to. Rows of an earlier form of this script have 'grid', the bound
  times importance weights of 256 draws of f on a coarser grid, in place of NUTS;
- with --timed, em_log_*: where 80 iterations of EM with Adam end, and seconds, the CPU time of one
  of them after compilation.

A row with rule NUTS has the posterior means of a long chain, their standard errors (in posterior
standard deviations) as shift_*, and the predictive density of its draws.

    python examples/benchmarks/options.py --output options.csv          # goes on where it stopped
    python examples/benchmarks/options.py --only sonar coal --output options.csv
    python examples/benchmarks/options.py --rows 200 --only banana --output options.csv
    python examples/benchmarks/options.py --output options.csv --picture options.png
"""

import argparse
import csv
import dataclasses
import itertools
import tempfile
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
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from scipy.optimize import minimize

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
    Riemannian,
    TighterBound,
    kernels,
    whiten,
)
from numpyro_tsvgp.gaussian.linalg import blas_threads

jax.config.update("jax_enable_x64", True)
DATA = Path(__file__).parent.parent / "data"
KEY = jax.random.key(0)
TRAIN = 60  # rows to learn from
CUTS = jnp.array([-1.0, 0.0, 1.0])

# Rules, and whether there are inducing inputs (a third of the rows). Without them there are no sums
# over sites for Riemannian(), and TighterBound() is the bound.
RULES = (NaturalGradient(), ExpectationPropagation(), Laplace(), FisherScoring(), Riemannian())
METHODS = [(rule, False) for rule in RULES[:4]] + [(rule, True) for rule in RULES]
OBJECTIVES = (Bound(), EPLike(), TighterBound())
# Short first steps, since counts overshoot.
RATES = jnp.array([0.05, 0.1, 0.2, 0.35] + [0.5] * 14)


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


def scores(mean, variance, likelihood, y, classes):
    """Negative log predictive density and coverage of 80% intervals, by draws of the marginals."""
    z = jax.random.normal(jax.random.key(1), (2000 // mean.shape[0], *mean.shape))
    f = (mean + jnp.sqrt(variance) * z).reshape(-1, *mean.shape[1:])
    fn = likelihood(f)
    nlpd = -(jax.nn.logsumexp(fn.log_prob(y), 0) - jnp.log(len(f))).mean()
    if classes:
        return float(nlpd), np.nan
    draws = fn.sample(jax.random.key(2))
    low, high = np.quantile(np.asarray(draws), [0.1, 0.9], axis=0)
    return float(nlpd), float(((y >= low) & (y <= high)).mean())


class Pair:
    """A model, and data to learn from and to predict."""

    def __init__(self, name, rows, quick, draws=1000):
        load, likelihood, functions, self.classes = PAIRS[name]
        X, y = load()
        order = np.random.default_rng(0).permutation(len(y))
        train, test = np.sort(order[: 12 if quick else rows]), order[rows : rows + 200]
        self.X, self.y, self.X_test, self.y_test = X[train], y[train], X[test], y[test]
        self.likelihood = likelihood or Tobit
        self.model = model_of(self.likelihood, functions)
        self.quick, self.draws = quick, draws


def reference(pair):
    """Moments of log hyperparameters, draws of f, and scores of a long chain."""
    warmup, draws = (20, 20) if pair.quick else (pair.draws // 4, pair.draws)
    kernel = NUTS(whiten(pair.model), max_tree_depth=7)
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, progress_bar=False)
    with blas_threads():
        mcmc.run(KEY, pair.X, pair.y)
    draws = mcmc.get_samples()
    logs = np.log(np.stack([draws[k] for k in HYPER], -1))
    size = np.array([effective_sample_size(column[None]) for column in logs.T])
    some = {k: v[:: max(1, len(v) // 200)] for k, v in draws.items()}

    def at_new(draw):
        def prior(A, B):
            return draw["variance"] * kernels.Matern52(draw["lengthscale"])(A, B)

        K = prior(pair.X, pair.X) + 1e-8 * draw["variance"] * jnp.eye(len(pair.X))
        a = jnp.linalg.solve(K, prior(pair.X, pair.X_test))
        left = draw["variance"] - (prior(pair.X, pair.X_test) * a).sum(0)
        mean = draw["f"] @ a
        return mean, jnp.broadcast_to(jnp.maximum(left, 1e-10), mean.shape)

    mean, variance = jax.jit(lambda some: jax.lax.map(at_new, some))(some)
    nlpd, coverage = scores(mean, variance, pair.likelihood, pair.y_test, pair.classes)
    row = {"rule": "NUTS", "objective": "", "nlpd": nlpd, "coverage": coverage}
    for i, k in enumerate(HYPER):
        row |= {f"log_{k}": logs[:, i].mean(), f"shift_{k}": size[i] ** -0.5}
        row |= {f"ratio_{k}": 1.0}
    keep = {"mean": logs.mean(0), "sd": logs.std(0), "f": np.asarray(some["f"])}
    return row, keep


def guide_for(pair, rule, sparse):
    untied = sparse and isinstance(rule, ExpectationPropagation)
    options = {"sites": "untied"} if untied else {}
    return AutoDualGaussian(
        pair.model, pair.X[::3] if sparse else None, learn_inducing=False, **options
    )


def program(pair, rule, sparse):
    """A compiled function of log hyperparameters: log densities by objective, and marginals."""
    guide, args = guide_for(pair, rule, sparse), (pair.X, pair.y)
    drivers = [
        TSVGP(pair.model, guide, None, rule=rule, objective=o, site_lr=lambda step: RATES[step])
        for o in OBJECTIVES[: 2 + sparse]
    ]
    start = drivers[0].init(KEY, *args)

    def evaluate(point):
        held = {f"{k}_auto_loc": point[i] for i, k in enumerate(HYPER)}
        assert held.keys() == start.optim_state.keys()
        state = dataclasses.replace(start, optim_state=held)
        state, _ = jax.lax.scan(
            lambda state, _: (drivers[0].update(state, *args)[0], None), state, None, len(RATES)
        )
        params = drivers[0].get_params(state)
        q = [guide.marginals(params, X)["f"] for X in (pair.X, pair.X_test)]
        return jnp.stack([-svi.evaluate(state, *args) for svi in drivers]), q

    return jax.jit(evaluate)


def cells(pair, known, rule, sparse, timed):
    """One rule with every objective on one pair."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluate = program(pair, rule, sparse)
            size = 3 if pair.quick else 7
            scales = np.linspace(-3.5, 3.5, size)
            grid = np.array(list(itertools.product(scales, scales)))
            points = known["mean"] + known["sd"] * grid
            with blas_threads():
                values = np.array([evaluate(point)[0] for point in points])
    except (ValueError, RuntimeError) as error:
        for objective in OBJECTIVES[: 2 + sparse]:
            yield objective, {"note": str(error).split(":")[0][:90]}
        return
    for i, objective in enumerate(OBJECTIVES[: 2 + sparse]):
        row = beside(values[:, i], points, known)
        best = minimize(
            lambda point, i=i: float(np.nan_to_num(-evaluate(point)[0][i], nan=1e6)),
            points[np.nanargmax(values[:, i])],
            method="Nelder-Mead",
            options={"xatol": 1e-2, "fatol": 1e-3, "maxfev": 5 if pair.quick else 45},
        ).x
        train, test = ((q.mean, q.variance) for q in evaluate(best)[1])
        nlpd, coverage = scores(
            test[0][None], test[1][None], pair.likelihood, pair.y_test, pair.classes
        )
        inside = np.abs(known["f"] - train[0]) <= norm.ppf(0.9) * np.sqrt(train[1])
        row |= {"nlpd": nlpd, "coverage": coverage, "coverage_f": float(inside.mean())}
        row |= {f"log_{k}": best[j] for j, k in enumerate(HYPER)}
        yield objective, row | (by_em(pair, rule, sparse, objective) if timed else {})


def by_em(pair, rule, sparse, objective):
    """Where EM ends, and the CPU time of an iteration."""
    svi = TSVGP(
        *(pair.model, guide_for(pair, rule, sparse), optax.adam(0.1)),
        **{"rule": rule, "objective": objective, "site_lr": 0.5, "e_steps": 2},
    )
    steps, args = 3 if pair.quick else 80, (pair.X, pair.y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = svi.run(KEY, steps, *args, progress_bar=False)
        start = time.process_time()
        svi.run(KEY, steps, *args, init_state=result.state, progress_bar=False)
    row = {"seconds": (time.process_time() - start) / steps}
    return row | {f"em_log_{k}": float(jnp.log(result.fit.hyper[k])) for k in HYPER}


def beside(values, points, known):
    """Moments of log hyperparameters under densities on a grid, beside those of NUTS."""
    log_density = values + points.sum(1)  # of the logarithms
    lost = (~np.isfinite(log_density)).sum()
    log_density = np.where(np.isfinite(log_density), log_density, -np.inf)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = weights @ points
    sd = np.sqrt(weights @ (points - mean) ** 2)
    row = {f"shift_{k}": ((mean - known["mean"]) / known["sd"])[i] for i, k in enumerate(HYPER)}
    row |= {f"ratio_{k}": (sd / known["sd"])[i] for i, k in enumerate(HYPER)}
    return row | (
        {"note": f"{lost} of {len(points)} values on the grid not finite"} if lost else {}
    )


def picture(source, target):
    """Predictive densities beside the default, and biases of the log variance, at 60 rows."""
    import matplotlib.pyplot as plt

    with open(source, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["n"] == str(TRAIN) and row["nlpd"]]
    pairs = [name for name in PAIRS if any(row["pair"] == name for row in rows)]
    at = {row["pair"]: {} for row in rows}
    for row in rows:
        at[row["pair"]][row["inducing"] != "0", row["rule"], row["objective"]] = row
    default = False, repr(NaturalGradient()), repr(Bound())
    figure, axes = plt.subplots(1, 2, figsize=(12, 0.42 * len(pairs) + 2.4), sharey=True)
    markers = {repr(Bound()): "o", repr(EPLike()): "s", repr(TighterBound()): "^", "": "D"}
    rules = ["NUTS", *map(repr, RULES)]

    def panel(ax, methods, value):
        for j, (sparse, rule, objective) in enumerate(methods):
            found = [(at[pair].get((sparse, rule, objective)), i) for i, pair in enumerate(pairs)]
            found = [(row, i) for row, i in found if row is not None]
            height = [i + 0.75 * (j / max(1, len(methods) - 1) - 0.5) for _, i in found]
            label = f"{rule.split('(')[0]}" + (f", {objective.split('(')[0]}" if objective else "")
            style = {"color": f"C{rules.index(rule)}", "ms": 5, "label": label}
            ax.plot([value(row) for row, _ in found], height, markers[objective], **style)

    def beside_default(row):
        return float(row["nlpd"]) - float(at[row["pair"]][default]["nlpd"])

    full = [(False, repr(r), repr(o)) for r in RULES[:4] for o in OBJECTIVES[:2]]
    panel(axes[0], [(False, "NUTS", ""), *full[1:]], beside_default)
    panel(axes[1], full, lambda row: float(row["shift_variance"] or "nan"))
    axes[0].set_yticks(range(len(pairs)), pairs)
    axes[0].set_ylim(len(pairs) - 0.4, -0.6)
    axes[0].set_xlabel("test NLPD, less that of the default (left is better)")
    axes[1].set_xlabel("bias of log variance, in posterior sd")
    for ax in axes:
        ax.axvline(0.0, color="0.6", lw=1)
        for i in range(len(pairs) + 1):
            ax.axhline(i - 0.5, color="0.9", lw=1)
    handles, labels = axes[0].get_legend_handles_labels()
    first, name = axes[1].get_legend_handles_labels()
    handles, labels = [first[0], *handles], [name[0], *labels]
    figure.legend(handles, labels, fontsize=8, loc="upper center", ncol=5)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.6 / figure.get_figheight()))
    figure.savefig(target, dpi=110)
    print(f"wrote {target}")


HYPER = ("lengthscale", "variance")
KEYS = ["pair", "n", "inducing", "rule", "objective"]
COLUMNS = [*KEYS, "nlpd", "coverage", "coverage_f"]
COLUMNS += [f"{what}_{k}" for what in ("log", "shift", "ratio", "em_log") for k in HYPER]
COLUMNS += ["seconds", "reference", "note"]


def sweep(args):
    output, started = Path(args.output), time.monotonic()
    done = set()
    if output.exists():
        with open(output, newline="") as file:
            rows = list(csv.DictReader(file))
        known = [row for row in rows if row["reference"] == "NUTS" or row["note"]]
        done = {tuple(row[k] for k in KEYS) for row in known}
    names = [n for n in PAIRS if not args.only or any(part in n for part in args.only)]
    chains = Path(args.chains or tempfile.mkdtemp())
    chains.mkdir(exist_ok=True)
    with open(output, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not file.tell():
            writer.writeheader()

        def write(place, row):
            row = {**dict(zip(KEYS, place, strict=True)), "reference": "NUTS", **row}
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
            file.flush()
            print(row, flush=True)

        for name in names[:1] if args.quick else names:
            pair = Pair(name, args.rows, args.quick, args.draws)
            n = len(pair.X)
            chain = chains / f"{name.replace(', ', '-').replace(' ', '_')}-{n}.npz"
            if not chain.exists():
                row, keep = reference(pair)
                np.savez_compressed(chain, **keep)
                write((name, n, 0, "NUTS", ""), row)
            known = np.load(chain)
            for i in args.methods[:1] if args.quick else args.methods:
                rule, sparse = METHODS[i]
                place = name, n, len(pair.X[::3]) * sparse, repr(rule)
                if (*map(str, place), repr(Bound())) in done:
                    continue
                for objective, row in cells(pair, known, rule, sparse, args.timed):
                    write((*place, repr(objective)), row)
                jax.clear_caches()
                if time.monotonic() - started > 60 * args.minutes:
                    return


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small fit, for tests")
    parser.add_argument("--only", nargs="*", help="pairs whose names contain one of these")
    parser.add_argument("--rows", type=int, default=TRAIN, help="rows to learn from")
    parser.add_argument(
        "--methods", nargs="*", type=int, default=range(len(METHODS)), help="numbers of METHODS"
    )
    parser.add_argument(
        "--output", default="options.csv", help="the CSV; cells in it are not redone"
    )
    parser.add_argument("--timed", action="store_true", help="also run EM, and time it")
    parser.add_argument("--draws", type=int, default=1000, help="of NUTS, after a quarter as many")
    parser.add_argument("--minutes", type=float, default=np.inf, help="when to stop")
    parser.add_argument("--chains", help="a folder to keep the chains of NUTS in")
    parser.add_argument("--picture", help="draw the CSV into this file, and compute nothing")
    args = parser.parse_args()
    if args.picture:
        picture(args.output, args.picture)
    else:
        sweep(args)


if __name__ == "__main__":
    main()
