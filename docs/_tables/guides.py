"""Numbers of the how-to guides."""

import math
import re
from collections.abc import Iterator

from . import source
from .source import number, table


def inducing_points() -> str:
    found = {
        (int(r["m"]), r["placement"]): float(r["loss"])
        for r in source.read("data/inducing_points.csv")
    }
    names = [name for _, name in found if name != "none"]
    names = list(dict.fromkeys(names))
    sizes = sorted({m for m, name in found if name != "none"})
    rows = [[str(m), *(f"{found[m, name]:.1f}" for name in names)] for m in sizes]
    return table(["m", *names], rows)


def kernels_by_loo() -> str:
    """From what the example printed when it was executed."""
    printed = (source.DOCS / "gallery" / "compare_kernels.md").read_text("utf8")
    line = r"^(.*): elpd (\S+), effective parameters (\S+), behind the best by (\S+) \(.* (\S+)\)$"
    rows = [list(found) for found in re.findall(line, printed, re.MULTILINE)]
    header = ["kernel", "elpd_loo", "p_loo", "behind the best", "standard error of that"]
    return table(header, rows)


def leave_one_out_error() -> str:
    rows = []
    for row in source.read("data/loo_refits.csv"):
        keys = ("mean", "worst", "refined_mean", "refined_worst")
        rows.append([row["problem"], row["n"], *(f"{float(row[k]):.2g}" for k in keys)])
    header = ["problems", "points", "mean error", "worst point", "mean, `refine=3`"]
    return table([*header, "worst, `refine=3`"], rows)


def hyperparameter_bias() -> str:
    """Of the collapsed posterior against NUTS: distance of means in its sds, ratio of sds."""
    methods = ("refresh=0", "refresh=1", "refresh=3", "weighted")
    found: dict[tuple[str, str, str], dict[str, dict[str, source.Row]]] = {}
    for row in source.read("data/hyperparameter_bias.csv"):
        problem = found.setdefault((row["likelihood"], row["n"], row["m"]), {})
        problem.setdefault(row["hyperparameter"], {})[row["method"]] = row

    def cell(row: source.Row) -> str:
        mean, sd, nuts, nuts_sd = (float(row[k]) for k in ("mean", "sd", "nuts_mean", "nuts_sd"))
        return f"{(mean - nuts) / nuts_sd:+.2f}, {sd / nuts_sd:.2f}"

    rows = []
    for problem, of in found.items():
        names: tuple[str, ...] = problem
        for name in sorted(of, key=("lengthscale", "variance", "scale").index):
            rows.append([*names, name, *(cell(of[name][method]) for method in methods)])
            names = ("", "", "")
    return table(["likelihood", "n", "m", "hyperparameter", *methods], rows)


def collapsed_nuts() -> str:
    """NUTS with f integrated out and NUTS over everything, for each number of rows."""
    found = {(int(r["n"]), r["method"]): r for r in source.read("data/collapsed_nuts.csv")}
    rows = []
    for n in sorted({n for n, _ in found}):
        both = [found[n, method] for method in ("collapsed", "full")]
        cells = [f"{n:,}"]
        for key in ("gradient_ms", "gradients_a_draw", "ms_an_effective_draw"):
            cells += [number(float(r[key])) if r[key] else "not run" for r in both]
        rows.append(cells)
    return table(
        [
            "rows",
            *("gradient, ms", "in full"),
            *("gradients a draw", "in full"),
            *("CPU ms an effective draw", "in full"),
        ],
        rows,
    )


def streaming() -> str:
    found = {(r["data"], r["method"]): r["mean"] for r in source.read("data/streaming.csv")}
    methods = {
        "batch fit": "fit to all data",
        "leverage": "memory by leverage",
        "random": "memory at random",
        "none": "no memory",
    }
    rows = [
        [data, *(f"{float(found[data, method]):.3f}" for method in methods)]
        for data in dict.fromkeys(name for name, _ in found)
    ]
    return table(["data", *methods.values()], rows)


def weak_scaling() -> str:
    found = {(r["kind"], r["count"]): r for r in source.read("data/weak_scaling.csv")}
    counts = ("1", "2", "4")
    rows = []
    for kind, name in (("devices", "devices of one process"), ("processes", "processes")):
        each = [float(found[kind, k]["processor_ms"]) / int(k) for k in counts]
        one = "device" if kind == "devices" else "process"
        what = f"{name}: processor time of an update for each {one}, ms"
        rows.append([what, *(f"{v:.0f}" for v in each)])
    for kind in ("devices", "processes"):
        times = [f"{float(found[kind, k]['median_ms']):,.0f}" for k in counts]
        rows.append([f"{kind}: median time of an update, ms", *times])
    return table(["", *counts], rows)


def time_series_cost() -> str:
    def time(milliseconds: float) -> str:
        if milliseconds < 999.5:
            return f"{milliseconds:.{1 if milliseconds < 10 else 0}f} ms"
        return f"{milliseconds / 1e3:.1f} s"

    rows = []
    for row in source.read("data/time_series.csv"):
        if row["what"] == "EM iteration":
            memory = float(row["peak_mb"]) - float(row["import_mb"])
            size = f"{memory:.0f} MB" if memory < 999.5 else f"{memory / 1e3:.1f} GB"
            each = f"{float(row['microseconds_a_point']):.1f} µs"
            rows.append([f"{int(row['points']):,}", time(float(row["step_ms"])), each, size])
    return table(["points", "an iteration", "a point", "peak memory above imports"], rows)


def flights_scores() -> str:
    """From what the example printed when it was executed."""
    printed = (source.DOCS / "gallery" / "flights.md").read_text("utf8")
    (count,) = re.findall(r"([\d,]+) held out", printed)
    names = {
        "share": "the share of late flights",
        "logistic regression": "logistic regression on the same columns",
        "GP": "t-SVGP",
    }
    line = (
        r"^held out, (.*): log density (\S+) for each flight(?:, area under the ROC curve (\S+))?$"
    )
    rows = [[names[k], *rest] for k, *rest in re.findall(line, printed, re.MULTILINE)]
    header = [f"{count} flights held out", "log density, mean", "area under the ROC curve"]
    return table(header, rows)


def whitened_nuts() -> str:
    rows, before = [], ""
    for row in source.read("data/whitened_nuts.csv"):
        name = row["hyperparameters"]
        size = float(row["n_eff"])
        cells = [f"{size:.0f}" if size >= 10 else f"{size:.1f}", f"{float(row['r_hat']):.2f}"]
        cells += [row["divergences"], f"{round(int(row['gradients']), -3):,}"]
        rows.append(["" if name == before else name, f"`{row['how']}`", *cells])
        before = name
    header = ["hyperparameters", "", "smallest n_eff", "largest r_hat", "divergences"]
    return table([*header, "gradients, without warmup"], rows)


def random_features() -> str:
    found: dict[str, list[str]] = {}
    for row in source.read("data/random_features.csv"):
        error = float(row["error"])
        digits = f"{error:.0e}".replace("e-0", "e-") if error < 1e-4 else f"{error:.1g}"
        found.setdefault(row["kernel"], []).append(digits)
    rows = [[kernel, *errors] for kernel, errors in found.items()]
    exact = "`Linear`, `Polynomial`, `Constant`, `Cosine`, `Coregion`"  # tests have them to 1e-12
    return table(["kernel", "512 frequencies", "2048"], [*rows, [exact, "exact", "exact"]])


def first_prediction() -> str:
    names = {
        "fit": "the fit, `fit.marginals(X)`",
        "predictor and model": "the predictor and the model",
        "predictor alone": "the predictor alone",
    }
    rows = [
        [
            names[r["loaded"]],
            *(f"{float(r[k]):.2g} s" for k in ("load_s", "first_s")),
            r["programs"],
        ]
        for r in source.read("data/first_prediction.csv")
    ]
    return table(["loaded", "to load", "first prediction", "programs compiled"], rows)


def harmonics() -> str:
    """What the first harmonics of a periodic kernel leave out, from Bessel functions.

    The kernel is the sum of w_k cos(k angle) with w_0 = e^-x I_0(x), w_k = 2 e^-x I_k(x) and
    x = 1 / lengthscale^2. All weights are positive, so the error is largest at distance zero.
    """

    def bessel(k: int, x: float) -> float:
        term = total = (x / 2) ** k / math.factorial(k)
        for j in range(1, 80):
            term *= (x / 2) ** 2 / (j * (j + k))
            total += term
        return total

    orders = (3, 5, 7, 10, 14)
    rows = []
    for lengthscale in (3, 2, 1.5, 1, 0.7, 0.5, 0.3):
        x = lengthscale**-2
        missing = [2 * math.exp(-x) * sum(bessel(k, x) for k in range(o + 1, 100)) for o in orders]
        cells = [f"{error:.0e}" if error > 1e-14 else "below 1e-14" for error in missing]
        rows.append([f"{lengthscale:g}", *cells])
    return table(["lengthscale", *(f"`order={order}`" for order in orders)], rows)


def sentences() -> Iterator[tuple[str, str]]:
    """Pages, and what must be said on them."""
    trails = kernels_by_loo().splitlines()[-1].split("|")
    yield (
        "diagnostics.md",
        f"the rough one trails by {trails[4].strip()} (standard error{trails[5]}"[:-1],
    )
    none = next(r for r in source.read("data/inducing_points.csv") if r["placement"] == "none")
    yield (
        "inducing_points.md",
        f"without inducing inputs (`inducing=None`) it is {float(none['loss']):.1f}",
    )
    folds = [
        [-float(row[k]) for k in ("unconstrained", "default")]
        for row in source.read("data/map_scale.csv")
        if row["data"] == "breast_cancer"
    ]
    means = [f"{sum(values) / len(folds):.3f}" for values in zip(*folds, strict=True)]
    better = sum(a < b for a, b in folds)
    yield (
        "hyperparameters.md",
        f"lower in {'all of five' if better == len(folds) == 5 else better} folds, "
        f"{means[0]} against {means[1]} in the mean",
    )
    series = {r["what"]: r for r in source.read("data/time_series.csv")}
    ours, theirs = (float(series[k]["step_ms"]) for k in ("evidence", "evidence, tinygp"))
    yield "time_series.md", f"{ours:.0f} ms here, {theirs:.0f} ms in tinygp"
    times = {
        int(r["points"]): float(r["step_ms"])
        for r in source.read("data/time_series.csv")
        if r["what"] == "EM iteration"
    }
    power = math.log10(times[1_000_000] / times[100_000])
    yield "time_series.md", f"time grows with the power {power:.2f} of their number"
    flights = (source.DOCS / "gallery" / "flights.md").read_text("utf8")
    ((seconds, before, after),) = re.findall(
        r"E-step: (\d+) s of CPU time\n.* rows: (\S+) before that E-step and (\S+) after", flights
    )
    yield "large_data.md", f"with an exact E-step at the end: {seconds} s of CPU time"
    yield "large_data.md", f"was {before}, and {after} after the exact E-step"
    day, hour, arrival = (
        float(re.findall(rf"lengthscale of {k}: (\S+)", flights)[0])
        for k in ("day of the year", "departure", "arrival")
    )
    yield "large_data.md", f"the day of the year is {day:.2f} standard deviations"
    yield "large_data.md", f"departure {hour:.1f}, and that of the hour of arrival {arrival:.0f}"
    sizes = {
        r["how"]: f"{float(r['n_eff']):.0f}"
        for r in source.read("data/whitened_nuts.csv")
        if r["hyperparameters"] == "held at 1"
    }
    yield (
        "../README.md",
        f"an effective size of {sizes['NUTS(whiten(model))']} with `whiten` and "
        f"[of {sizes['NUTS(model)']} without]",
    )


TABLES = (
    *(inducing_points, kernels_by_loo, leave_one_out_error),
    *(hyperparameter_bias, collapsed_nuts, streaming, weak_scaling, time_series_cost),
    flights_scores,
    *(whitened_nuts, random_features, first_prediction, harmonics),
)
