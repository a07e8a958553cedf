"""Numbers of the how-to guides."""

import re
from collections.abc import Iterator

from . import source
from .source import table


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
    line = r"^held out, (.*): log density (\S+) a flight(?:, area under the ROC curve (\S+))?$"
    rows = [[names[k], *rest] for k, *rest in re.findall(line, printed, re.MULTILINE)]
    header = [f"{count} flights held out", "log density a flight", "area under the ROC curve"]
    return table(header, rows)


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


TABLES = (
    *(inducing_points, kernels_by_loo, leave_one_out_error),
    *(hyperparameter_bias, streaming, weak_scaling, time_series_cost),
)
