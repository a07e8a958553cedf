"""Data added to a fit, and taken out of it, against fits to the data that are then in it.

    python examples/benchmarks/conditioning.py --output docs/data/conditioning.csv

The banana data, sorted by the first input so that each batch comes from elsewhere, at fixed
hyperparameters, with binary data and with counts. Distances are of marginals at all inputs, in
standard deviations of the fit to the same data: the largest and the root mean square of means, and
the largest of standard deviations.

``added`` says how data came to the fit, ``taken`` what was taken out of it, and ``knows`` what the
fit had then: its data, or the sites alone, as a fit that was loaded.
"""

import argparse
import csv
import dataclasses
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels

jax.config.update("jax_enable_x64", True)
DATA = Path(__file__).parents[1] / "data"
parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--quick", action="store_true", help="a few points only, for tests")
parser.add_argument("--output", type=Path, default=Path("conditioning.csv"), help="the table")
options = parser.parse_known_args()[0]

banana = np.loadtxt(DATA / "banana.csv", delimiter=",", skiprows=1)
Z = banana[::8, :2]
banana = banana[np.argsort(banana[:, 0], kind="stable")]
SPLITS, OUT = (4, 40), (5, 40, 100)
if options.quick:
    banana, Z, SPLITS, OUT = banana[::8], Z[::5], (4,), (2,)
X, label = banana[:, :2], (banana[:, -1] > 0) * 1
EVERYTHING = np.arange(len(X))
rng = np.random.default_rng(0)
LIKELIHOODS = {
    "Bernoulli": (lambda f: dist.Bernoulli(logits=f), label),
    "Poisson": (lambda f: dist.Poisson(jnp.exp(f)), rng.poisson(np.exp(2.0 * label - 0.5))),
}


def distances(fit, expected):
    """Of means, the largest and the root mean square; of standard deviations, the largest."""
    a, b = (f.marginals(X)["f"] for f in (fit, expected))
    sd = jnp.sqrt(b.variance)
    z = (a.mean - b.mean) / sd
    wider = jnp.sqrt(a.variance) / sd - 1
    return [float(x) for x in (jnp.abs(z).max(), jnp.sqrt((z**2).mean()), jnp.abs(wider).max())]


class Case:
    """A likelihood with a kind of sites."""

    def __init__(self, name, sites):
        link, self.y = LIKELIHOODS[name]

        def model(X, y=None):
            f = numpyro.sample("f", GP(4.0 * kernels.Matern52(jnp.array([0.7, 0.7])), X))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", link(f), obs=y)

        self.name, self.sites = name, sites
        self.guide = AutoDualGaussian(model, Z, learn_inducing=False, sites=sites)
        self.svi = TSVGP(model, self.guide, None, site_lr=0.5, e_steps=80)

    def fitted(self, rows):
        """The fit to some rows, all at once."""
        return self.svi.run(jax.random.key(0), 1, X[rows], self.y[rows], progress_bar=False).fit

    def in_batches(self, split, whole):
        """The fit to all rows, which came one batch after the other."""
        first, *others = np.array_split(EVERYTHING, split)
        if len(first) < len(Z):  # a fit needs more points, so that one without any takes the first
            nothing = self.guide.unpack("f", whole.params).without_data()
            params = {**whole.params, **self.guide.pack({"f": nothing})}
            now, others = dataclasses.replace(whole, params=params, call=None), [first, *others]
        else:
            now = self.fitted(first)
        for rows in others:
            now = now.condition(X[rows], self.y[rows])
        return dataclasses.replace(now, call=whole.call)

    def row(self, added, taken, knows, fit, expected, said=""):
        found = ["", "", ""] if fit is None else [f"{d:.2g}" for d in distances(fit, expected)]
        row = [self.name, self.sites, added, taken, knows, *found, said]
        print(*row, flush=True)
        return row

    def taken_out(self, added, taken, knows, fit, out, expected):
        """A row for points that are taken out, with what was said of it."""
        if knows == "sites":
            fit = dataclasses.replace(fit, call=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                less = fit.without(X[out], self.y[out])
            except ValueError:
                return self.row(added, taken, knows, None, expected, "refused")
        warned = any("not known for sure" in str(w.message) for w in caught)
        return self.row(added, taken, knows, less, expected, "warned" if warned else "")

    def rows(self):
        fits = {"at once": (whole := self.fitted(EVERYTHING))}
        # Point sites compile for every number of them, so that forty batches would take long.
        for split in SPLITS if self.sites == "tied" else SPLITS[:1]:
            fits[f"{split} batches"] = now = self.in_batches(split, whole)
            yield self.row(f"{split} batches", "", "data", now, whole)
        rng = np.random.default_rng(1)
        taken = {f"{k} at random": rng.choice(len(X), k, replace=False) for k in OUT}
        taken[f"the first {len(X) // 4}"] = EVERYTHING[: len(X) // 4]
        for what, out in taken.items():
            expected = self.fitted(np.setdiff1d(EVERYTHING, out))
            for added in ("at once", f"{SPLITS[0]} batches"):
                for knows in ("data", "sites") if self.sites == "tied" else ("sites",):
                    yield self.taken_out(added, what, knows, fits[added], out, expected)


rows = [["likelihood", "sites", "added", "taken", "knows", "mean_largest", "mean_rms"]]
rows[0] += ["sd_largest", "said"]
for name in LIKELIHOODS:
    for sites in ("tied", "untied"):
        rows += Case(name, sites).rows()
        with options.output.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
print(f"wrote {options.output}")
