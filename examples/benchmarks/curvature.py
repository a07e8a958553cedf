"""What clipping negative curvature costs: NaturalGradient() beside Riemannian().

Two parts, one CSV:

- fixed point: E-steps alone, at given hyperparameters, until nothing moves. 'loss' is minus the
  bound; of the default rule also 'below', by how much its bound is below that of Riemannian(),
  'mean_off', the largest distance of means in standard deviations, and the smallest and largest
  ratio of standard deviations.
- path: 'loss' after some updates of EM with Adam, at three rates.

    python examples/benchmarks/curvature.py --output curvature.csv
"""

import argparse
import csv
import sys
from pathlib import Path

import jax
import numpy as np
import numpyro.distributions as dist
import optax

from numpyro_tsvgp import TSVGP, AutoDualGaussian, NaturalGradient, Riemannian, kernels
from numpyro_tsvgp.gaussian.linalg import blas_threads

sys.path.insert(0, str(Path(__file__).parent))
from site_rates import RATES, Driven, hard_cases, model_of

jax.config.update("jax_enable_x64", True)
KEY = jax.random.key(0)
COLUMNS = ["part", "case", "rule", "rate", "updates", "loss", "below", "mean_off"]
COLUMNS += ["sd_ratio_min", "sd_ratio_max"]
MARKS = (1, 6, 21, 51, 101, 201, 300)
# Likelihood and lengthscale. With the short one, few points share in a function value.
CASES = {
    "Cauchy": (lambda f: dist.Cauchy(f, 0.3), 0.3),
    "Cauchy, short lengthscale": (lambda f: dist.Cauchy(f, 0.3), 0.05),
    "Student-t, 3": (lambda f: dist.StudentT(3.0, f, 0.3), 0.3),
    "Student-t, 4": (lambda f: dist.StudentT(4.0, f, 0.3), 0.3),
}


def fixed_points(quick):
    for name, (likelihood, lengthscale) in CASES.items():
        model = model_of(likelihood, lambda scale=lengthscale: kernels.Matern52(scale))
        Z = np.linspace(0.0, 1.0, 25)
        drivers = {
            rule: TSVGP(
                model,
                AutoDualGaussian(model, Z, learn_inducing=False),
                None,
                site_lr=0.1,
                e_steps=3 if quick else 3000,
                rule=rule,
            )
            for rule in (Riemannian(), NaturalGradient())
        }
        updates = {rule: jax.jit(svi.update) for rule, svi in drivers.items()}
        for seed in range(1 if quick else 4):
            rng = np.random.RandomState(seed)
            X = np.sort(rng.rand(50))
            noise = rng.standard_cauchy(50) if "Cauchy" in name else rng.standard_t(3, 50)
            y = 1.2 * np.sin(7 * X) + 0.3 * noise
            found = {}
            for rule, svi in drivers.items():
                with blas_threads():
                    state, loss = updates[rule](svi.init(KEY, X, y), X, y)
                found[rule] = svi.fit(state, X, y).marginals()["f"], float(loss)
                row = {"case": f"{name}, data {seed}", "rule": repr(rule), "rate": 0.1}
                row |= {"updates": svi.e_steps, "loss": float(loss)}
                if rule == NaturalGradient():
                    (q, clipped), (best, least) = found[rule], found[Riemannian()]
                    ratio = np.sqrt(q.variance / best.variance)
                    row |= {"below": clipped - least}
                    row |= {
                        "mean_off": float(
                            np.abs((q.mean - best.mean) ** 2 / best.variance).max() ** 0.5
                        )
                    }
                    row |= {"sd_ratio_min": float(ratio.min()), "sd_ratio_max": float(ratio.max())}
                yield row
        if quick:
            return


def paths(quick):
    cases = hard_cases()
    for name in ("Student-t, gross outliers", "motorcycle, two GPs"):
        model, X, y, Z, _, _ = cases[name]
        for rule in (NaturalGradient(), Riemannian()):
            guide = AutoDualGaussian(model, Z, learn_inducing=False)
            driven = Driven(model, guide, optax.adam(0.05), (X, y), rule=rule)
            for rate in RATES:
                losses = driven.losses("fixed", rate, 2 if quick else max(MARKS))
                for mark in MARKS[:1] if quick else MARKS:
                    row = {"case": name, "rule": repr(rule), "rate": rate, "updates": mark}
                    yield row | {"loss": float(losses[mark - 1])}
            if quick:
                return


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a little of each part, for tests")
    parser.add_argument("--output", default="curvature.csv")
    args = parser.parse_args()
    with open(args.output, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for part, rows in (("fixed point", fixed_points), ("path", paths)):
            for row in rows(args.quick):
                row = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
                writer.writerow({"part": part, **row})
                file.flush()
                print(part, row, flush=True)


if __name__ == "__main__":
    main()
