"""Site rules and objectives on fourteen models: what does each bring, and what does it cost?

For every pair of a model and data references are made first, of the posterior of f and of the
hyperparameters: on a grid of the hyperparameters with importance weights of draws of f and, with 60
rows, by NUTS, so that one checks the other. The grid, whose error is a fraction of that of a chain,
is what the rest refers to, unless its weights degenerate. Then, for every rule:

- the sites are iterated to their fixed point at a grid of values of the hyperparameters, and each
  objective is evaluated there. It is compared with the reference as a density of their logarithms;
- EM is run from the posterior mean of the reference, as `TSVGP` runs it, to where it ends.

Columns:

- nlpd: the negative log predictive density of up to 200 other rows, where EM ends, and
  nlpd_integrated, that of the mixture over the grid;
- coverage: the share of these rows inside central 80% intervals where EM ends (not for classes);
- coverage_f: the share of the reference's draws of f at the training inputs inside central 80%
  intervals of the fit (hyperparameters are points in a fit and drawn in the reference, so that
  less than 80% must be);
- log_*: the logarithms of the hyperparameters where EM ends;
- shift_*: the distance of the posterior mean of a log hyperparameter from that of the reference, in
  standard deviations of the reference, and ratio_*, its standard deviation over that of the
  reference. In rows of references log_* is the posterior mean and error_* its standard error, in
  standard deviations;
- seconds: CPU time of one iteration of EM (two E-steps, one M-step) after compilation;
- reference: what shifts refer to.

With inducing inputs (one for six rows, or for twenty where there are more than 60) there are those
methods that are about them: Riemannian(), which needs sums over sites and is the default for
likelihoods that are log-concave, and TighterBound(), which without them is the bound.

    python examples/benchmarks/options.py --output options.csv          # goes on where it stopped
    python examples/benchmarks/options.py --only sonar coal --output options.csv
    python examples/benchmarks/options.py --rows 500 --only diabetes --output options.csv
    python examples/benchmarks/options.py --output options.csv --picture options.png
"""

import argparse
import csv
import dataclasses
import tempfile
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _pairs import GAUSSIAN, HYPER, PAIRS, Pair
from _references import (
    KEY,
    RATES,
    by_importance,
    by_nuts,
    grid_of,
    moments_of,
    scores,
    weights_of,
)
from jax.scipy.stats import norm

from numpyro_tsvgp import (
    TSVGP,
    AutoDualGaussian,
    Bound,
    EPLike,
    ExpectationPropagation,
    NaturalGradient,
    Riemannian,
    TighterBound,
)
from numpyro_tsvgp.gaussian.linalg import blas_threads
from numpyro_tsvgp.infer.steps.fisher import FisherScoring
from numpyro_tsvgp.infer.steps.laplace import Laplace

jax.config.update("jax_enable_x64", True)
SMALL = 60
NG, EP, LAPLACE, FISHER, RIEMANNIAN = (
    NaturalGradient(),
    ExpectationPropagation(),
    Laplace(),
    FisherScoring(),
    Riemannian(),
)
RULES = (NG, EP, LAPLACE, FISHER, RIEMANNIAN)
BOUND, LIKE, TIGHTER, PER_POINT = Bound(), EPLike(), TighterBound(), TighterBound(per_point=True)
# By whether there are inducing inputs: rules and their objectives.
FEW_ROWS = {
    False: {rule: (BOUND, LIKE) for rule in (NG, EP, LAPLACE, FISHER)},
    True: {NG: (BOUND, LIKE, TIGHTER), RIEMANNIAN: (BOUND, TIGHTER), EP: (LIKE,)},
}
MORE_ROWS = {
    False: {NG: (BOUND, LIKE), EP: (LIKE,), LAPLACE: (BOUND,)},
    True: {NG: (BOUND, LIKE, TIGHTER), EP: (LIKE,)},
}
NOT_LOG_CONCAVE = ("motorcycle, Student-t", "motorcycle, two GPs", "simulated, zero-inflated")
# What nobody would fit with is compared on the grid alone.
NOT_FITTED = {(EP, BOUND), (LAPLACE, LIKE), (FISHER, LIKE), (RIEMANNIAN, TIGHTER)}
KEYS = ["pair", "n", "inducing", "rule", "objective"]
COLUMNS = [*KEYS, "nlpd", "nlpd_integrated", "coverage", "coverage_f"]
COLUMNS += [f"{what}_{k}" for what in ("log", "shift", "ratio", "error") for k in HYPER]
COLUMNS += ["seconds", "reference", "note"]


def size_of(pair, sparse):
    """How many values of each hyperparameter a grid has."""
    return 3 if pair.quick else 9 if sparse or len(pair.X) <= SMALL else 5


def inducing_of(pair):
    return pair.X[:: 6 if len(pair.X) <= SMALL else 20]


def guide_for(pair, rule, sparse):
    options = {"sites": "untied"} if sparse and rule == EP else {}
    Z = inducing_of(pair) if sparse else None
    return AutoDualGaussian(pair.model, Z, learn_inducing=False, **options)


def program(pair, guide, rule, objectives):
    """A compiled function of log hyperparameters: objectives, marginals, and what is kept."""
    args = pair.X, pair.y
    drivers = [
        TSVGP(
            *(pair.model, guide, None),
            **{"rule": rule, "objective": o, "site_lr": lambda step: RATES[step]},
        )
        for o in objectives
    ]
    start = drivers[0].init(KEY, *args)
    for driver in drivers[1:]:
        driver.init(KEY, *args)  # an objective that is not defined says so

    def evaluate(point):
        held = {f"{k}_auto_loc": point[i] for i, k in enumerate(HYPER)}
        assert held.keys() == start.optim_state.keys()
        state = dataclasses.replace(start, optim_state=held)
        state = jax.lax.fori_loop(0, len(RATES), lambda _, s: drivers[0].update(s, *args)[0], state)
        q = guide.marginals(drivers[0].get_params(state), pair.X_test)["f"]
        values = jnp.stack([-svi.evaluate(state, *args) for svi in drivers])
        return values, (q.mean, q.variance), state.approximation

    return jax.jit(evaluate)


def by_em(pair, guide, rule, objective, point, approximation):
    """Where EM ends from a point: log hyperparameters, marginals, and seconds of an iteration."""
    is_cheap = len(pair.X) <= SMALL or guide.inducing is not None
    steps = 3 if pair.quick else 250 if is_cheap else 60
    args = pair.X, pair.y
    svi = TSVGP(
        *(pair.model, guide, optax.adam(optax.cosine_decay_schedule(0.1, steps))),
        **{"rule": rule, "objective": objective, "site_lr": 0.5, "e_steps": 2},
    )
    start = svi.init(KEY, *args)
    i, (_, memory) = start.optim_state
    held = {f"{k}_auto_loc": jnp.asarray(point[i]) for i, k in enumerate(HYPER)}
    start = dataclasses.replace(start, optim_state=(i, (held, memory)), approximation=approximation)

    @jax.jit
    def run(state, steps):
        return jax.lax.fori_loop(0, steps, lambda _, s: svi.update(s, *args)[0], state)

    end = jax.block_until_ready(run(start, steps))
    few = 2 if pair.quick else 10
    began = time.process_time()
    jax.block_until_ready(run(start, few))
    seconds = (time.process_time() - began) / few
    params = svi.get_params(end)
    logs = np.array([float(jnp.log(params[f"{k}_auto_loc"])) for k in HYPER])
    q = [guide.marginals(params, X)["f"] for X in (pair.X, pair.X_test)]
    return logs, [(np.asarray(m.mean), np.asarray(m.variance)) for m in q], seconds


def cells(pair, known, rule, sparse, objectives):
    """One rule with its objectives on one pair."""
    guide = guide_for(pair, rule, sparse)
    points = grid_of(known, size_of(pair, sparse))
    try:
        with warnings.catch_warnings(), blas_threads():
            warnings.simplefilter("ignore")
            evaluate = program(pair, guide, rule, objectives)
            found = [evaluate(jnp.asarray(point)) for point in points]
    except (ValueError, RuntimeError) as error:
        for objective in objectives:
            yield objective, {"note": str(error).split(":")[0][:90]}
        return
    centre = len(points) // 2
    mean, variance = (np.stack([np.asarray(q[i]) for _, q, _ in found]) for i in (0, 1))
    for i, objective in enumerate(objectives):
        values = np.array([float(v[i]) for v, _, _ in found])
        weights = weights_of(values, points)
        row = beside(weights, points, known)
        lost = int((~np.isfinite(values)).sum())
        if lost:
            row["note"] = f"{lost} of {len(points)} values on the grid not finite"
        elif np.argmax(weights) in edge_of(points):
            row["note"] = "highest at the edge of the grid"
        drawn = np.random.default_rng(0).choice(len(points), 2000, p=weights)
        row["nlpd_integrated"] = scores(mean[drawn], variance[drawn], pair)["nlpd"]
        if (rule, objective) in NOT_FITTED:
            yield objective, row
            continue
        with warnings.catch_warnings(), blas_threads():
            warnings.simplefilter("ignore")
            logs, (train, test), row["seconds"] = by_em(
                pair, guide, rule, objective, points[centre], found[centre][2]
            )
        row |= scores(test[0][None], test[1][None], pair)
        inside = np.abs(known["f"] - train[0]) <= norm.ppf(0.9) * np.sqrt(train[1])
        row["coverage_f"] = float(inside.mean())
        yield objective, row | {f"log_{k}": logs[j] for j, k in enumerate(HYPER)}


def edge_of(points):
    size = round(len(points) ** 0.5)
    place = np.arange(len(points)).reshape(size, size)
    return {*place[0], *place[-1], *place[:, 0], *place[:, -1]}


def beside(weights, points, known):
    """Moments of log hyperparameters on a grid, beside those of the reference."""
    mean, cov = moments_of(weights, points)
    sd = np.sqrt(np.diag(known["cov"]))
    shift, ratio = (mean - known["mean"]) / sd, np.sqrt(np.diag(cov)) / sd
    row = {f"shift_{k}": shift[i] for i, k in enumerate(HYPER)}
    return row | {f"ratio_{k}": ratio[i] for i, k in enumerate(HYPER)}


def references(pair, args):
    """Rows of the references of a pair, and the one that fits are compared with."""
    if len(pair.X) > SMALL:
        row, known, _ = by_importance(pair, 7)
        return [row | {"reference": row["rule"]}], known | {"what": row["rule"]}
    found = [by_nuts(pair, args.draws)]
    guess = {k: found[0][1][k] for k in ("mean", "cov")}
    *grid, share = by_importance(pair, size_of(pair, False), guess=guess)
    found.append(grid)
    # Weights like those of one draw in ten at least, or the chain counts.
    row, known = found[int(share > 0.1)]
    known = known | {"what": row["rule"]}
    sd = np.sqrt(np.diag(known["cov"]))
    for row, other in found:
        row["reference"] = known["what"]
        for i, k in enumerate(HYPER):
            row[f"shift_{k}"] = (other["mean"] - known["mean"])[i] / sd[i]
            row[f"ratio_{k}"] = np.sqrt(other["cov"][i, i]) / sd[i]
    return [row for row, _ in found], known


def picture(source, target):
    """Predictive densities beside the default, and biases of the log variance, at 60 rows."""
    import matplotlib.pyplot as plt

    with open(source, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["n"] == str(SMALL) and row["nlpd"]]
    pairs = [name for name in PAIRS if any(row["pair"] == name for row in rows)]
    at = {row["pair"]: {} for row in rows}
    for row in rows:
        at[row["pair"]][row["inducing"] != "0", row["rule"], row["objective"]] = row
    default = False, repr(NG), repr(BOUND)
    figure, axes = plt.subplots(1, 3, figsize=(14, 0.42 * len(pairs) + 2.4), sharey=True)
    markers = {repr(BOUND): "o", repr(LIKE): "s", repr(TIGHTER): "^", "": "D"}
    colours = {"NUTS": "k"} | {repr(rule): f"C{i}" for i, rule in enumerate(RULES)}

    def panel(ax, methods, value, low, high):
        for j, (sparse, rule, objective) in enumerate(methods):
            found = [(at[pair].get((sparse, rule, objective)), i) for i, pair in enumerate(pairs)]
            found = [(row, i) for row, i in found if row is not None]
            height = [i + 0.75 * (j / max(1, len(methods) - 1) - 0.5) for _, i in found]
            label = f"{rule.split('(')[0]}" + (f", {objective.split('(')[0]}" if objective else "")
            style = {"color": colours[rule], "ms": 5, "label": label}
            places = np.clip([value(row) for row, _ in found], low, high)
            ax.plot(places, height, markers[objective], clip_on=False, **style)
        ax.set_xlim(low, high)
        ax.locator_params(axis="x", nbins=5)

    def beside_default(row):
        return float(row["nlpd"]) - float(at[row["pair"]][default]["nlpd"])

    def bias(row):
        return float(row["shift_variance"] or "nan")

    full, sparse = (
        [
            (inducing, repr(rule), repr(objective))
            for rule, of in FEW_ROWS[inducing].items()
            for objective in of
            if (rule, objective) not in NOT_FITTED
        ]
        for inducing in (False, True)
    )
    panel(axes[0], [(False, "NUTS", ""), *full], beside_default, -0.1, 0.1)
    panel(axes[1], full, bias, -1.5, 1.5)
    panel(axes[2], sparse, bias, -4.5, 4.5)
    axes[0].set_yticks(range(len(pairs)), pairs)
    axes[0].set_ylim(len(pairs) - 0.4, -0.6)
    axes[0].set_xlabel(
        "test NLPD, less that of the default (left is better)\n(marks on a frame are beyond it)"
    )
    axes[1].set_xlabel("bias of log variance, in posterior sd")
    axes[2].set_xlabel("the same with 10 inducing inputs")
    for ax in axes:
        ax.axvline(0.0, color="0.6", lw=1)
        for i in range(len(pairs) + 1):
            ax.axhline(i - 0.5, color="0.9", lw=1)
    found = {}
    for ax in axes:
        found |= dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(found.values(), found.keys(), fontsize=8, loc="upper center", ncol=6)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.6 / figure.get_figheight()))
    figure.savefig(target, dpi=110)
    print(f"wrote {target}")


def sweep(args):
    output, started = Path(args.output), time.monotonic()
    done = set()
    if output.exists():
        with open(output, newline="") as file:
            done = {tuple(row[k] for k in KEYS) for row in csv.DictReader(file)}
    names = [n for n in PAIRS if not args.only or any(part in n for part in args.only)]
    chains = Path(args.chains or tempfile.mkdtemp())
    chains.mkdir(exist_ok=True)
    with open(output, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not file.tell():
            writer.writeheader()

        def write(place, row):
            row = {**dict(zip(KEYS, place, strict=True)), **row}
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
            file.flush()
            print(f"{(time.monotonic() - started) / 60:.1f} min", row, flush=True)

        for name in names[:1] if args.quick else names:
            pair = Pair(name, args.rows, args.quick)
            n = len(pair.X)
            chain = chains / f"{name.replace(', ', '-').replace(' ', '_')}-{n}.npz"
            if not chain.exists():
                rows, known = references(pair, args)
                np.savez_compressed(chain, **known)
                for row in rows:
                    write((name, n, 0, row["rule"], ""), row)
                jax.clear_caches()
            known = dict(np.load(chain))
            what = str(known["what"])
            methods = FEW_ROWS if n <= SMALL else MORE_ROWS
            for sparse, rule in [(s, r) for s, rules in methods.items() for r in rules]:
                if rule == RIEMANNIAN and name not in NOT_LOG_CONCAVE:
                    continue
                if args.rules and type(rule).__name__ not in args.rules:
                    continue
                objectives = methods[sparse][rule]
                if sparse and name == GAUSSIAN and rule == NG:
                    objectives += (PER_POINT,)
                place = name, n, len(inducing_of(pair)) * sparse, repr(rule)
                if (*map(str, place), repr(objectives[-1])) in done:
                    continue
                for objective, row in cells(pair, known, rule, sparse, objectives):
                    if (*map(str, place), repr(objective)) not in done:
                        write((*place, repr(objective)), {"reference": what, **row})
                jax.clear_caches()
                if args.quick or time.monotonic() - started > 60 * args.minutes:
                    return


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small fit, for tests")
    parser.add_argument("--only", nargs="*", help="pairs whose names contain one of these")
    parser.add_argument("--rules", nargs="*", help="names of rules; all if there are none")
    parser.add_argument("--rows", type=int, default=SMALL, help="rows to learn from")
    parser.add_argument(
        "--output", default="options.csv", help="the CSV; cells in it are not redone"
    )
    parser.add_argument("--draws", type=int, default=1000, help="of NUTS, after a quarter as many")
    parser.add_argument("--minutes", type=float, default=np.inf, help="when to stop")
    parser.add_argument("--chains", help="a folder to keep the references in, to go on with")
    parser.add_argument("--picture", help="draw the CSV into this file, and compute nothing")
    args = parser.parse_args()
    if args.picture:
        picture(args.output, args.picture)
    else:
        sweep(args)


if __name__ == "__main__":
    main()
