"""The rate of E-steps: fixed ones, site_lr="auto", and schedules for minibatches.

Five parts, one CSV:

- hard: models on which some fixed rate goes wrong, in a loop of `update`. 'loss' is minus the bound
  at the end, 'swing' its range over the last ten updates.
- run: the same models through `run`, with the default rate and with "auto"; 'warned' is how the
  warnings of it begin.
- ordinary: the pairs of _pairs.py (60 rows, EM with Adam). 'loss' is minus the bound (and the log
  prior) after 80 updates, 'reached' the first update within half a nat of the best of all rates.
- cost: CPU milliseconds of one update, the least of 25 blocks, fixed and 'auto' in turns: what else
  runs on a machine can only add to it.
- minibatch: schedules on batches. 'loss' is minus the bound of all data, after 3, 10 and 30 epochs,
  the mean of two orders of the batches and 'swing' the range of these.

    python examples/benchmarks/site_rates.py --output site_rates.csv
    python examples/benchmarks/site_rates.py --parts cost --output site_rates.csv
"""

import argparse
import csv
import dataclasses
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _pairs import PAIRS, Pair
from jax.scipy.stats import norm

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
from numpyro_tsvgp.gaussian.linalg import blas_threads

jax.config.update("jax_enable_x64", True)
DATA = Path(__file__).parent.parent / "data"
KEY = jax.random.key(0)
RATES = [0.1, 0.5, 1.0]
COLUMNS = ["part", "case", "rate", "updates", "loss", "swing", "reached", "update_ms", "warned"]
positive = dist.constraints.positive


def table(name, header=1):
    return np.loadtxt(DATA / f"{name}.csv", delimiter=",", skiprows=header)


def model_of(likelihood, kernel):
    """One GP at plain inputs; `kernel` is called inside of the model and has its parameters."""

    def model(X, y=None):
        f = numpyro.sample("f", GP(kernel(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(f), obs=y)

    return model


def learned(name, start):
    return numpyro.param(name, start, constraint=positive)


def two_gps(X, y=None):
    f = numpyro.sample("f", GP(kernels.RBF(learned("l1", 0.5), learned("v1", 1.0)), X))
    g = numpyro.sample("g", GP(kernels.RBF(learned("l2", 1.0), learned("v2", 1.0)), X, mean=-1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


def hard_cases():
    """By name: model, inputs, data, inducing inputs, whether there are M-steps, updates."""
    line = np.linspace(0.0, 1.0, 40)
    wave = np.sin(6.0 * line) + 0.3 * np.random.RandomState(0).randn(40)
    counts = np.random.RandomState(1).poisson(np.exp(4.0 + 1.5 * np.sin(6.0 * line))) * 1.0
    rng = np.random.RandomState(0)
    spread = np.sort(rng.rand(150) * 6 - 3)
    outliers = np.sin(2 * spread) + 0.1 * rng.randn(150)
    outliers[rng.choice(150, 15, replace=False)] += 10 * rng.randn(15)
    t, a = table("mcycle").T
    t, a = (t - t.mean()) / t.std(), (a - a.mean()) / a.std()
    banana = table("banana")
    labels = (banana[:, 2] > 0) * 1.0
    places = np.linspace(-3, 3, 25)

    def probit(f):  # as in the paper, never closer to 0 or 1 than 1e-3
        return dist.Bernoulli(probs=1e-3 + (1 - 2e-3) * norm.cdf(f))

    def rbf():
        return kernels.RBF(0.3)

    def learned_rbf():
        return kernels.RBF(learned("lengthscale", 1.0), learned("variance", 1.0))

    def held(likelihood, y):
        return model_of(likelihood, rbf), line, y, line[::3], False, 120

    return {
        "banana, probit, variance 16": (
            model_of(probit, lambda: kernels.RBF(0.814, 15.99)),
            *(banana[:, :2], labels, banana[:100, :2], False, 120),
        ),
        "banana, probit, EM": (
            model_of(probit, learned_rbf),
            *(banana[:, :2], labels, banana[:100, :2], True, 300),
        ),
        "labels, steep logit": held(lambda f: dist.Bernoulli(logits=5 * f), (wave > 0) * 1.0),
        "counts up to 259": (
            model_of(
                lambda f: dist.Poisson(jnp.exp(f)), lambda: kernels.RBF(0.3, learned("v", 1.0))
            ),
            *(line, counts, line[::3], True, 300),
        ),
        "narrow logistic": held(lambda f: dist.Logistic(f, 0.02), wave),
        "Student-t, scale 0.1": held(lambda f: dist.StudentT(3.0, f, 0.1), wave),
        "Cauchy, scale 0.1": held(lambda f: dist.Cauchy(f, 0.1), wave),
        "Laplace, scale 0.02": held(lambda f: dist.Laplace(f, 0.02), wave),
        "Student-t, gross outliers": (
            model_of(lambda f: dist.StudentT(3.0, f, learned("scale", 0.5)), learned_rbf),
            *(spread, outliers, places, True, 300),
        ),
        "motorcycle, two GPs": (two_gps, t, a, np.linspace(t.min(), t.max(), 25), True, 300),
    }


class Driven:
    """A driver whose fixed rate is an argument of the compiled loop, so that one program does."""

    def __init__(self, model, guide, optim, args, **options):
        self.table = jnp.full(1, 0.5)
        self.args = tuple(jnp.asarray(a) for a in args)
        fixed = TSVGP(model, guide, optim, site_lr=self.rate, **options)
        auto = TSVGP(model, guide, optim, site_lr="auto", **options)
        self.start = {"fixed": fixed.init(KEY, *args), "auto": auto.init(KEY, *args)}
        self.loops = {"fixed": self._loop(fixed), "auto": self._loop(auto)}

    def rate(self, step):
        return self.table[jnp.minimum(step, len(self.table) - 1)]

    def _loop(self, svi):
        def loop(state, rates, steps):
            self.table = rates
            return jax.lax.scan(
                lambda s, _: svi.update(s, *self.args), state, None, length=len(steps)
            )[1]

        return jax.jit(loop)

    def losses(self, kind, rate, updates):
        start, self.table = self.start[kind], jnp.full(1, rate)
        if kind == "auto":
            start = dataclasses.replace(start, rate=jnp.asarray(rate))
        with blas_threads():
            return np.asarray(self.loops[kind](start, self.table, jnp.zeros(updates)))


def hard(quick):
    cases = hard_cases()
    for name in list(cases)[2:3] if quick else cases:
        model, X, y, Z, learns, updates = cases[name]
        guide = AutoDualGaussian(model, Z, learn_inducing=False)
        driven = Driven(model, guide, optax.adam(0.05) if learns else None, (X, y))
        for kind in ("fixed", "auto"):
            for rate in RATES[1:2] if quick else RATES:
                found = driven.losses(kind, rate, updates)
                row = {"loss": found[-1], "swing": np.ptp(found[-10:]), "updates": updates}
                yield {"case": name, "rate": _label(kind, rate), **row}


def through_run(quick):
    cases = hard_cases()
    for name in list(cases)[2:3] if quick else cases:
        model, X, y, Z, learns, updates = cases[name]
        guide = AutoDualGaussian(model, Z, learn_inducing=False)
        for rate in (None, "auto"):
            svi = TSVGP(model, guide, optax.adam(0.05) if learns else None, site_lr=rate)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                result = svi.run(KEY, 5 if quick else updates, X, y, progress_bar=False)
            found = np.asarray(result.losses)
            row = {"loss": found[-1], "swing": np.ptp(found[-10:]), "updates": len(found)}
            row["warned"] = "; ".join(sorted({str(w.message)[:60] for w in told}))
            yield {"case": name, "rate": rate or "default", **row}


def _label(kind, rate):
    return f"auto from {rate}" if kind == "auto" else rate


def ordinary(quick):
    for name in list(PAIRS)[:1] if quick else PAIRS:
        pair = Pair(name, 60, quick)
        guide = AutoDualGaussian(pair.model)
        driven = Driven(pair.model, guide, optax.adam(0.1), (pair.X, pair.y))
        found = {
            (kind, rate): driven.losses(kind, rate, 3 if quick else 80)
            for kind, rate in (("fixed", 0.5), ("fixed", 1.0), ("auto", 0.5))
        }
        best = np.nanmin([losses[-1] for losses in found.values()])
        for (kind, rate), losses in found.items():
            near = np.append(np.flatnonzero(~(losses < best + 0.5)), -1).max() + 1
            row = {"loss": losses[-1], "swing": np.ptp(losses[-10:]), "updates": len(losses)}
            yield {"case": name, "rate": _label(kind, rate), **row, "reached": near}


def cost(quick):
    """One core; CPU time of blocks of updates, by turns."""
    model = model_of(
        lambda f: dist.Bernoulli(logits=f),
        lambda: learned("variance", 1.0) * kernels.Matern52(learned("lengthscale", 1.0)),
    )
    rng = np.random.RandomState(0)
    shapes = [(300, 30), (2000, 100)]
    for (n, m), (e, k) in [(s, p) for s in shapes for p in ((1, 1), (1, 4), (5, 5))]:
        X = rng.randn(n, 2)
        y = (np.sin(3 * X[:, 0]) + 0.3 * rng.randn(n) > 0) * 1.0
        driven = Driven(
            model,
            AutoDualGaussian(model, X[:m]),
            optax.adam(0.01),
            (X, y),
            e_steps=e,
            m_steps=k,
        )
        updates = 2 if quick else max(5, 60_000 // (n * (e + k)))
        losses = {kind: driven.losses(kind, 0.5, updates)[-1] for kind in ("fixed", "auto")}
        times = {"fixed": [], "auto": []}
        for _ in range(2 if quick else 25):
            for kind, found in times.items():
                start = time.process_time()
                driven.losses(kind, 0.5, updates)
                found.append(1e3 * (time.process_time() - start) / updates)
        for kind, found in times.items():
            case = f"{n} rows, {m} inducing inputs, {e} E-steps, {k} M-steps"
            row = {"updates": updates, "loss": losses[kind], "update_ms": min(found)}
            yield {"case": case, "rate": _label(kind, 0.5), **row}
        if quick:
            return


def schedules(ratio, updates):
    """By name the rate of each update, where batches are a share `ratio` of the data."""
    t = np.arange(updates)
    start = 0.5 * np.sqrt(ratio)
    return {
        "0.5 sqrt(M/N)": np.full(updates, start),
        "M/N": np.full(updates, ratio),
        "0.05": np.full(updates, 0.05),
        "0.2": np.full(updates, 0.2),
        "0.5": np.full(updates, 0.5),
        "1 / (1 + t/10)": 1 / (1 + 0.1 * t),
        # The running average of all batches so far, until it remembers one epoch.
        "max(M/N, 1/(1+t))": np.maximum(ratio, 1 / (1 + t)),
        # Falls from the first one as the square root of epochs, after ten of them.
        "0.5 sqrt(M/N) / sqrt(1 + epochs/10)": start / np.sqrt(1 + t * ratio / 10),
        "0.5 sqrt(M/N) / (1 + epochs/10)": start / (1 + t * ratio / 10),
    }


def minibatch_cases():
    """By name: inputs, data, size of batches, inducing inputs, without and with M-steps."""
    banana = table("banana")
    with np.load(DATA / "digits.npz") as data:
        X, y = (data[k] for k in data.files[:2])
    X, y = (X, y) if np.ndim(X) > 1 else (y, X)
    X, y = X.reshape(len(y), -1) / 32.0, np.ravel(y)
    keep = np.isin(y, (3, 5, 8))
    X, y = X[keep], np.searchsorted((3, 5, 8), y[keep])
    return {
        "banana, logit": (banana[:, :2], (banana[:, 2] > 0) * 1.0, 40, 60, (False, True)),
        "digits 3, 5, 8, softmax": (X, y, 50, 80, (False,)),
    }


def batched_model(name, size):
    def model(X, y=None):
        lengthscale, variance = learned("lengthscale", 1.0), learned("variance", 1.0)
        gp = GP(variance * kernels.Matern52(lengthscale), X)
        if "softmax" in name:
            with numpyro.plate("classes", 3):
                f = numpyro.sample("f", gp)
            likelihood = dist.Categorical(logits=f.T)
        else:
            likelihood = dist.Bernoulli(logits=numpyro.sample("f", gp))
        with numpyro.plate("data", size, subsample_size=X.shape[0]):
            numpyro.sample("y", likelihood, obs=y)

    return model


def minibatch(quick):
    cases = minibatch_cases()
    for name in list(cases)[:1] if quick else cases:
        X, y, batch, m, kinds = cases[name]
        batches = len(y) // batch
        rows = np.random.RandomState(0).permutation(len(y))[: batch * batches]
        X, y = jnp.asarray(X[rows]), jnp.asarray(y[rows])
        model = batched_model(name, len(y))
        for learns in kinds:
            guide = AutoDualGaussian(model, np.asarray(X[:m]), learn_inducing=False)
            held = {}
            svi = TSVGP(
                model,
                guide,
                optax.adam(0.01) if learns else None,
                site_lr=lambda step, held=held: held.get("table", jnp.full(1, 0.5))[step],
            )
            start = svi.init(KEY, X[:batch], y[:batch])

            @jax.jit
            def epochs(state, table, order, svi=svi, held=held, X=X, y=y, batch=batch):
                held["table"] = table

                def update(state, some):
                    return svi.update(state, X[some], y[some])[0], None

                state, _ = jax.lax.scan(update, state, order.reshape(-1, batch))
                return state, svi.evaluate(state, X, y)

            marks = (1, 2) if quick else (3, 7, 20)  # epochs from one evaluation to the next
            updates = sum(marks) * batches
            for label, rates in schedules(batch / len(y), updates).items():
                found = []
                for seed in range(1 if quick else 2):
                    rng, state, losses = np.random.RandomState(seed), start, []
                    for mark in marks:
                        order = np.concatenate([rng.permutation(len(y)) for _ in range(mark)])
                        with blas_threads():
                            state, loss = epochs(state, jnp.asarray(rates), order)
                        losses.append(float(loss))
                    found.append(losses)
                for after, values in zip(np.cumsum(marks), np.transpose(found), strict=True):
                    case = f"{name}, {'EM' if learns else 'E-steps'}, {after} epochs"
                    row = {"loss": np.mean(values), "swing": np.ptp(values)}
                    yield {"case": case, "rate": label, "updates": after * batches, **row}
                if quick:
                    return


PARTS = {
    "hard": hard,
    "run": through_run,
    "ordinary": ordinary,
    "cost": cost,
    "minibatch": minibatch,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a little of each part, for tests")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", default="site_rates.csv", help="the CSV; parts in it are kept")
    args = parser.parse_args()
    output, done = Path(args.output), set()
    if output.exists():
        with open(output, newline="") as file:
            done = {row["part"] for row in csv.DictReader(file)}
    with open(output, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not done:
            writer.writeheader()
        for part in args.parts:
            if part in done:
                continue
            for row in PARTS[part](args.quick):
                row = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
                writer.writerow({"part": part, **row})
                file.flush()
                print(part, row, flush=True)


if __name__ == "__main__":
    main()
