"""Tables of the pages, made from the CSV files that benchmarks and experiments wrote.

    python docs/tables.py    # writes the tables of all pages anew

On a page a table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; NAME is a
function here. `sentences` are those of the prose that have numbers in them. A test fails when a
table or a sentence is not what the CSV files say.
"""

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
Row = dict[str, str]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n\n)((?:\|.*\n)*)(\n<!-- end of table -->)")


def read(name: str) -> list[Row]:
    with open(DOCS / name, newline="", encoding="utf8") as file:
        return list(csv.DictReader(file))


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def number(value: float) -> str:
    """Three digits, as times are told."""
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


# --- benchmarks ------------------------------------------------------------------------------

JOBS = {
    "mnist": "mnist",
    "mnist odd/even": "mnist odd/even",
    "em": "em",
    "em 1000": "em, 1,000 rows",
    "em minibatch": "em minibatch",
    "regression 256": "regression, m = 256",
    "regression 1024": "regression, m = 1024",
    "cold-start": "cold start, seconds",
}
SYSTEMS = {
    "numpyro_tsvgp": "this library",
    "GPflow whitened": "GPflow, whitened",
    "GPyTorch alternating": "GPyTorch",
    "GPJax whitened": "GPJax, whitened",
    "GPJax dual": "GPJax, dual",
}
MISSING = {("mnist", "GPyTorch alternating"): "failed"}
MISSING |= {("mnist", k): "one function only" for k in ("GPJax whitened", "GPJax dual")}


def compared(job: str, system: str, precision: str = "float64", cores: str = "2") -> Row | None:
    """The faster of the two ways in which a system ran: as it comes, with one BLAS thread."""
    rows = [
        row
        for row in read("data/compare.csv")
        if (row["job"], row["precision"], row["cores"]) == (job, precision, cores)
        and row["system"].removesuffix(" (one BLAS thread)") == system
    ]
    return min(rows, key=lambda row: float(row["median_ms"]), default=None)


def milliseconds(job: str, system: str, precision: str = "float64", cores: str = "2") -> float:
    row = compared(job, system, precision, cores)
    return float(row["median_ms"]) if row else float("nan")


def fastest_peer(job: str) -> float:
    return min(t for s in list(SYSTEMS)[1:] if (t := milliseconds(job, s)) == t)


def compare_times() -> str:
    rows = []
    for job, name in JOBS.items():
        scale = 1e-3 if job == "cold-start" else 1.0
        cells = [
            number(scale * t) if (t := milliseconds(job, s)) == t else MISSING.get((job, s), "")
            for s in SYSTEMS
        ]
        ratio = fastest_peer(job) / milliseconds(job, "numpyro_tsvgp")
        rows.append([name, *cells, f"{ratio:.1f} x ours"])
    return table(["job", *SYSTEMS.values(), "fastest other"], rows)


def readme_times() -> str:
    rows = []
    for job, name in JOBS.items():
        scale, unit = (1e-3, " s") if job == "cold-start" else (1.0, " ms")
        name = name.removesuffix(", seconds")
        ours, other = milliseconds(job, "numpyro_tsvgp"), fastest_peer(job)
        peer = next(v for k, v in SYSTEMS.items() if milliseconds(job, k) == other)
        times = [number(scale * t) + unit for t in (ours, other)]
        rows.append([name, times[0], f"{times[1]} ({peer.split(',')[0]})", f"{other / ours:.1f}"])
    return table(["job", "this library", "fastest other", "ratio"], rows)


def compare_scores() -> str:
    rows = []
    for job, name in list(JOBS.items())[:-1]:
        found = [compared(job, system) for system in SYSTEMS]
        cells = [f"{float(row['nlpd']):.3f}" if row else "" for row in found]
        best = min((cell for cell in cells if cell), key=float)
        rows.append([name, *(f"**{cell}**" if cell == best else cell for cell in cells)])
    return table(["job", *SYSTEMS.values()], rows)


def roofline() -> str:
    found = {(r["job"], r["precision"], r["system"]): r for r in read("data/steps.csv")}
    rows = []
    for precision in ("float64", "float32"):
        for job in ("mnist", "em", "em, minibatch"):
            ours, other, floor = (
                float(found[job, precision, s]["median_ms"])
                for s in ("t-SVGP", "q-SVGP", "roofline")
            )
            seconds = float(found[job, precision, "t-SVGP"]["compile_s"])
            times = [f"{value:.1f} ms" for value in (ours, other, floor)]
            rows.append([job, precision, *times, f"{ours / floor:.1f}", f"{seconds:.1f} s"])
    header = ["job", "precision", "t-SVGP", "q-SVGP, whitened", "roofline"]
    return table([*header, "t-SVGP / roofline", "compilation"], rows)


def scaling() -> str:
    words = {"rows": "rows", "inducing": "inducing inputs", "functions": "latent functions"}
    rows = []
    for row in read("data/scaling.csv"):
        memory = float(row["peak_mb"]) - float(row["import_mb"])
        times = [f"{float(row[k]):,.1f} ms" for k in ("best_ms", "step_ms")]
        rows.append(
            [words[row["varied"]], f"{int(row[row['varied']]):,}", *times, f"{memory:.0f} MB"]
        )
    return table(["", "size", "fastest step", "median step", "peak memory above imports"], rows)


# --- the paper -------------------------------------------------------------------------------


def figure1_left() -> str:
    """Differences from the published curve, no smaller than the digits of our CSV can show."""
    ours, theirs = (
        read("paper/figure1_left.csv"),
        read("paper/published_fig1_left_bound_vs_variance.csv"),
    )
    names = {"t_svgp": "t-SVGP", "q_svgp_whitened": "q-SVGP, whitened", "q_svgp": "q-SVGP"}
    rows = []
    for key, name in names.items():
        gap = max(abs(float(a[key]) - float(b[key])) for a, b in zip(ours, theirs, strict=True))
        rows.append([name, f"{gap:.0e}".replace("e-0", "e-")])
    return table(["parameterization", "largest difference from the published curve"], rows)


def figure1_right() -> str:
    """Iterations after which both hyperparameters stay within 2% of the fixed point."""
    found = read("paper/figure1_right.csv")
    names = {"t_svgp": "t-SVGP", "q_svgp_whitened": "q-SVGP, whitened", "q_svgp": "q-SVGP"}
    what = ("lengthscale", "variance")
    fixed = [float(found[-1][f"t_svgp_{k}"]) for k in what]
    rows = []
    for key, name in names.items():
        outside = [
            any(
                abs(float(row[f"{key}_{k}"]) / v - 1) > 0.02
                for k, v in zip(what, fixed, strict=True)
            )
            for row in found
        ]
        last = max(i for i, out in enumerate(outside) if out) + 1
        rows.append([name, str(last) if last < len(found) else f"more than {len(found) - 1}"])
    return table(["", "EM iterations until within 2% of the fixed point"], rows)


def mnist_end() -> str:
    ends = {(r["method"], r["kernel"]): r for r in read("paper/mnist.csv")}  # the last step stays
    rows, before = [], ""
    for (method, kernel), row in ends.items():
        name = {"t_svgp": "t-SVGP", "q_svgp_whitened": "q-SVGP, whitened"}[method]
        values = [f"{float(row['nlpd']):.3f}", f"{float(row['elbo']):,.0f}"]
        seconds = f"{float(row['seconds']):.1f}"
        rows.append(["" if name == before else name, kernel, *values, seconds])
        before = name
    scores = read("paper/published_fig4_mnist_nlpd.csv")[-1]
    bounds = read("paper/published_fig4_mnist_elbo.csv")[-10:]
    for key, name in (("t_svgp", "t-SVGP"), ("q_svgp", "q-SVGP")):
        bound = sum(float(row[f"{key}_elbo"]) for row in bounds) / 10
        values = [f"{float(scores[key + '_nlpd']):.3f}", f"{bound:,.0f}"]
        rows.append([f"published, {name}", "", *values, f"{float(scores[key + '_seconds']):.1f}"])
    return table(["", "kernel", "NLPD", "bound", "seconds"], rows)


def mnist_footing() -> str:
    scores = read("paper/published_fig4_mnist_nlpd.csv")[-1]
    names = {"t_svgp": "t-SVGP", "q_svgp_whitened": "q-SVGP, whitened"}
    rows = []
    for row in sorted(read("paper/mnist_footing.csv"), key=lambda r: -float(r["lr_e"] or 1)):
        steps = ", ".join(f"{float(row[k]):,.0f}" for k in ("first", "second", "third"))
        last = f"{float(row['mean_of_last_ten']):,.0f}"
        if row["method"].endswith("published"):
            key = row["method"].split(",")[0]
            score = f"{float(scores[key + '_nlpd']):.3f}"
            name = "published, " + key.replace("_svgp", "-SVGP")
            rows.append([name, "?", steps, last, "", score])
        else:
            whole, score = f"{float(row['all_points']):,.0f}", f"{float(row['nlpd']):.3f}"
            rates = f"{row['lr_e']}, {row['lr_m']}"
            rows.append([names[row["method"]], rates, steps, last, whole, score])
    return table(["", "rates", "steps 1, 2, 3", "mean of the last ten", "all points", "NLPD"], rows)


def figure2() -> str:
    found = read("paper/figure2_em_from_2.5.csv")
    curve = read("paper/figure2.csv")
    names = {"t_svgp": "t-SVGP", "q_svgp": "q-SVGP", "q_svgp_whitened": "q-SVGP, whitened"}
    fixed = float(found[-1]["t_svgp"])
    at = min(range(1, len(curve) - 1), key=lambda i: abs(float(curve[i]["old_variance"]) - fixed))
    rows = []
    for key, name in names.items():
        low, high = curve[at - 1], curve[at + 1]
        slope = (float(high[key]) - float(low[key])) / (
            float(high["old_variance"]) - float(low["old_variance"])
        )
        first, last = (f"{float(found[i][key]):.4g}" for i in (1, 8))
        rows.append([name, f"{slope:.2g}", first, last])
    header = ["", "slope of the map near the fixed point", "after 1 iteration"]
    return table([*header, "after 8 iterations"], rows)


def uci() -> str:
    methods = {
        "t_svgp": "t-SVGP",
        "q_svgp_whitened": "q-SVGP (whitened)",
        "q_svgp_adam": "q-SVGP (whitened, Adam)",
    }
    last = {(r["data"], r["method"]): r for r in read("paper/uci.csv") if r["iteration"] == "20"}
    rows = []
    for data in dict.fromkeys(name for name, _ in last):
        for key, digits in (("elbo", 1), ("nlpd", 3)):
            found = [last[data, method] for method in methods]
            values = [float(row[key]) for row in found]
            best = max(values) if key == "elbo" else min(values)
            cells = [
                (f"**{v:.{digits}f}**" if v == best else f"{v:.{digits}f}")
                + f" ({float(row[key + '_sd']):.{digits}f})"
                for v, row in zip(values, found, strict=True)
            ]
            name, what = (data, "bound") if key == "elbo" else ("", "NLPD")
            rows.append([name, what, *cells])
    return table(["data", "", *methods.values()], rows)


def table1() -> str:
    ours = read("paper/mnist_table1.csv")
    theirs = read("paper/published_table1_mnist_nlpd.csv")
    rows = []
    for a, b in zip(ours, theirs, strict=True):
        scores = [f"{float(a[k]):.3f}" for k in ("t_svgp", "q_svgp_whitened")]
        published = [f"{float(b[k]):.3f} ({float(b[k + '_se']):.3f})" for k in ("t_svgp", "q_svgp")]
        settings = [f"{a['lr_e']}, {a['lr_m']}", f"{a['e_steps']}, {a['m_steps']}"]
        rows.append([*settings, *scores, *published])
    header = ["rate E, M", "steps E, M", "t-SVGP", "q-SVGP, whitened"]
    return table([*header, "published, t-SVGP", "published, q-SVGP"], rows)


def figure5() -> str:
    theirs = {r["m"]: r for r in read("paper/published_fig5_seconds_per_100_steps_vs_m.csv")}
    rows = []
    for row in read("paper/figure5.csv"):
        ours = [
            f"{float(row[k]):.1f} ({float(row[k + '_best']):.1f})"
            for k in ("t_svgp", "q_svgp_whitened")
        ]
        published = [f"{float(theirs[row['m']][k]):.1f}" for k in ("t_svgp", "q_svgp")]
        rows.append([row["m"], *ours, *published])
    header = ["m", "t-SVGP", "q-SVGP, whitened", "published, t-SVGP", "published, q-SVGP"]
    return table(header, rows)


# --- guides ----------------------------------------------------------------------------------


def inducing_points() -> str:
    found = {
        (int(r["m"]), r["placement"]): float(r["loss"]) for r in read("data/inducing_points.csv")
    }
    names = [name for _, name in found if name != "none"]
    names = list(dict.fromkeys(names))
    sizes = sorted({m for m, name in found if name != "none"})
    rows = [[str(m), *(f"{found[m, name]:.1f}" for name in names)] for m in sizes]
    return table(["m", *names], rows)


def kernels_by_loo() -> str:
    """From what the example printed when it was executed."""
    printed = (DOCS / "gallery" / "compare_kernels.md").read_text("utf8")
    line = r"^(.*): elpd (\S+), effective parameters (\S+), behind the best by (\S+) \(.* (\S+)\)$"
    rows = [list(found) for found in re.findall(line, printed, re.MULTILINE)]
    header = ["kernel", "elpd_loo", "p_loo", "behind the best", "standard error of that"]
    return table(header, rows)


def leave_one_out_error() -> str:
    rows = []
    for row in read("data/loo_refits.csv"):
        keys = ("mean", "worst", "refined_mean", "refined_worst")
        rows.append([row["problem"], row["n"], *(f"{float(row[k]):.2g}" for k in keys)])
    header = ["problems", "points", "mean error", "worst point", "mean, `refine=3`"]
    return table([*header, "worst, `refine=3`"], rows)


def sentences() -> Iterator[tuple[str, str]]:
    """Pages, and what must be said on them."""

    def beside(job: str, peer: str, precision: str, cores: str) -> tuple[str, str, str]:
        ours = milliseconds(job, "numpyro_tsvgp", precision, cores)
        other = milliseconds(job, peer, precision, cores)
        return number(ours), number(other), f"{other / ours:.1f}"

    m, e = (beside(job, "GPflow whitened", "float32", "2") for job in ("mnist", "em"))
    yield (
        "benchmarks.md",
        f"In float32 this library took {m[0]} ms against {m[1]} of GPflow on mnist ({m[2]} x) and "
        f"{e[0]} against {e[1]} on em ({e[2]} x).",
    )
    m, e = (beside(job, "GPflow whitened", "float64", "1") for job in ("mnist", "em"))
    b = beside("em minibatch", "GPJax whitened", "float64", "1")
    yield (
        "benchmarks.md",
        f"Pinned to one core, in float64, it took {m[0]} against {m[1]} on mnist ({m[2]} x), "
        f"{e[0]} against {e[1]} on em ({e[2]} x) and {b[0]} against {b[1]} of GPJax on em "
        f"minibatch ({b[2]} x).",
    )
    ratios = [fastest_peer(j) / milliseconds(j, "numpyro_tsvgp") for j in JOBS if j != "cold-start"]
    yield (
        "../README.md",
        f"the fastest other library took {min(ratios):.1f} to {max(ratios):.1f} times as long",
    )
    scores = {r["system"]: r["nlpd"] for r in read("data/compare.csv") if r["job"] == "em minibatch"
              and (r["precision"], r["cores"]) == ("float64", "2")}  # fmt: skip
    ours, theirs = (
        sorted(f"{float(v):.3f}" for k, v in scores.items() if re.fullmatch(name + r"( \(.*)?", k))
        for name in ("numpyro_tsvgp", "GPJax whitened")
    )
    yield (
        "benchmarks.md",
        f"ended at {ours[0]} and {ours[1]}, those of GPJax at {theirs[0]} and {theirs[1]}",
    )
    sizes = [r for r in read("data/scaling.csv") if r["varied"] == "rows"]
    memory = sorted(float(r["peak_mb"]) - float(r["import_mb"]) for r in sizes)
    best = sorted(float(r["best_ms"]) for r in sizes)
    yield (
        "benchmarks.md",
        f"{memory[0]:.0f} to {memory[-1]:.0f} MB from a thousand rows to two million. Neither does "
        f"the fastest step, {best[0]:.1f} to {best[-1]:.1f} ms.",
    )
    trails = kernels_by_loo().splitlines()[-1].split("|")
    yield (
        "diagnostics.md",
        f"the rough one trails by {trails[4].strip()} (standard error{trails[5]}"[:-1],
    )
    none = next(r for r in read("data/inducing_points.csv") if r["placement"] == "none")
    yield (
        "inducing_points.md",
        f"without inducing inputs (`inducing=None`) it is {float(none['loss']):.1f}",
    )


# --- rules, objectives and rates ---------------------------------------------------------------

Method = tuple[str, str]
DEFAULT, LIKE = ("NaturalGradient()", "Bound()"), ("NaturalGradient()", "EPLike()")
EP = ("ExpectationPropagation(power=1.0)", "EPLike()")
LAPLACE, FISHER = ("Laplace()", "Bound()"), ("FisherScoring()", "Bound()")


def swept() -> dict[str, dict[Method, Row]]:
    """By model and method, at 60 rows without inducing inputs; the last row of each counts."""
    found: dict[str, dict[Method, Row]] = {}
    for row in read("data/options.csv"):
        if (row["n"], row["inducing"]) == ("60", "0"):
            found.setdefault(row["pair"], {})[row["rule"], row["objective"]] = row
    return found


def cell(row: Row | None, column: str, digits: int = 3) -> str:
    return "" if row is None or row[column] in ("", "nan") else f"{float(row[column]):.{digits}f}"


def options_scores() -> str:
    methods: list[Method] = [("NUTS", ""), DEFAULT, LIKE, EP, LAPLACE, FISHER]
    rows = [
        [pair, *(cell(of.get(m), "nlpd") for m in methods), cell(of[DEFAULT], "coverage", 2)]
        for pair, of in swept().items()
    ]
    names = ["NUTS", "bound", "`EPLike()`", "EP rule, `EPLike()`", "Laplace", "Fisher"]
    return table(["model", *names, "inside 80%"], rows)


def options_biases() -> str:
    def shifts(row: Row | None) -> str:
        if row is None or not row["shift_variance"]:
            return ""
        return ", ".join(f"{float(row[f'shift_{k}']):+.2f}" for k in ("lengthscale", "variance"))

    rows = []
    like = [(rule, "EPLike()") for rule, _ in (LAPLACE, FISHER)]
    for pair, of in swept().items():
        by_nuts = of[DEFAULT]["reference"] == "NUTS"
        against = f"NUTS ± {cell(of['NUTS', ''], 'shift_variance', 2)}" if by_nuts else "grid"
        methods = (DEFAULT, LIKE, EP, LAPLACE, like[0], FISHER, like[1])
        rows.append([pair, against, *(shifts(of.get(m)) for m in methods)])
    header = ["model", "against", "bound", "`EPLike()`", "EP rule, `EPLike()`"]
    for rule in ("Laplace", "Fisher"):
        header += [f"{rule}, bound", f"{rule}, `EPLike()`"]
    return table(header, rows)


def ep_like_uci() -> str:
    found: dict[str, dict[str, list[Row]]] = {}
    for row in read("data/ep_like_uci.csv"):
        found.setdefault(row["data"], {}).setdefault(row["objective"], []).append(row)
    rows = []
    for data in ("ionosphere", "sonar", "diabetes"):
        of = [sorted(found[data][k], key=lambda r: r["fold"]) for k in ("Bound()", "EPLike()")]
        means = {
            k: [sum(float(r[k]) for r in rows) / len(rows) for rows in of]
            for k in ("nlpd", "error", "variance")
        }
        gains = [float(b["nlpd"]) - float(a["nlpd"]) for a, b in zip(*of, strict=True)]
        n = len(gains)
        mean = sum(gains) / n
        error = (sum((g - mean) ** 2 for g in gains) / (n - 1) / n) ** 0.5
        scores = [f"{v:.3f}" for v in means["nlpd"]]
        gain = f"{mean + 0.0:.3f} ± {error:.3f}".replace("-0.000", "0.000")
        rest = [f"{v:.3f}" for v in means["error"]] + [f"{v:.0f}" for v in means["variance"]]
        rows.append([data, str(n), *scores, gain, *rest])
    header = ["data", "folds", "NLPD, bound", "NLPD, `EPLike()`", "difference ± standard error"]
    for what in ("error", "variance"):
        header += [f"{what}, bound", f"{what}, `EPLike()`"]
    return table(header, rows)


def rates(part: str) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in read("data/site_rates.csv"):
        if row["part"] == part:
            found.setdefault(row["case"], {})[row["rate"]] = row
    return found


def hard_cases() -> str:
    def ended(row: Row) -> str:
        loss, swing = float(row["loss"]), float(row["swing"])
        if loss != loss:
            return "not finite"
        if loss > 1e4:
            return f"{loss:.0e}"
        return f"{loss:.2f}" + (f" ± {swing / 2:.2g}" if swing > 0.05 else "")

    order = ("auto from 0.1", "auto from 0.5", "auto from 1.0", "0.1", "0.5", "1")
    rows = [
        [case, of["0.5"]["updates"], *(ended(of[rate]) for rate in order)]
        for case, of in rates("hard").items()
    ]
    header = ["model", "updates", "auto from 0.1", "from 0.5", "from 1"]
    return table([*header, "fixed 0.1", "fixed 0.5", "fixed 1"], rows)


def ordinary_cases() -> str:
    kinds = ("0.5", "1", "auto from 0.5")
    rows = []
    for case, of in rates("ordinary").items():
        ends = [f"{float(of[kind]['loss']):.2f}" for kind in kinds]
        rows.append([case, *ends, *(of[kind]["reached"] for kind in kinds)])
    header = ["model", "fixed 0.5", "fixed 1", "auto", "updates, fixed 0.5", "fixed 1", "auto"]
    return table(header, rows)


def minibatch_rates() -> str:
    found = rates("minibatch")
    cases = ("banana, logit, E-steps", "banana, logit, EM", "digits 3, 5, 8, softmax, E-steps")
    default = "0.5 sqrt(M/N) / (1 + epochs/10)"
    names = [default, *(k for k in found[f"{cases[0]}, 3 epochs"] if k != default)]
    rows = []
    for name in names:
        label = f"`{name}`" + ", the default" * (name == default) if "/" in name else name
        losses = [
            f"{float(found[f'{case}, {epochs} epochs'][name]['loss']):.1f}"
            for case in cases
            for epochs in (3, 10, 30)
        ]
        rows.append([label, *losses])
    header = ["rate"]
    for case in ("banana, E-steps", "banana, EM", "digits, E-steps"):
        header += [f"{case}, 3", "10", "30"]
    return table(header, rows)


def clipped_curvature() -> str:
    found: dict[str, list[Row]] = {}
    for row in read("data/curvature.csv"):
        if row["below"]:
            found.setdefault(row["case"].rsplit(", data", 1)[0], []).append(row)
    rows = []
    for case, of in found.items():
        values = {k: [float(r[k]) for r in of] for k in of[0] if k not in ("part", "case", "rule")}
        rows.append(
            [
                case,
                f"{min(values['below']):.4f} to {max(values['below']):.4f}",
                f"{max(values['mean_off']):.3f}",
                f"{min(values['sd_ratio_min']):.2f} to {max(values['sd_ratio_max']):.2f}",
            ]
        )
    return table(
        ["likelihood", "bound below that of `Riemannian()`", "means, in sd, up to", "ratio of sds"],
        rows,
    )


def curvature_paths() -> str:
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in read("data/curvature.csv"):
        if row["part"] == "path":
            loss = float(row["loss"])
            text = f"{loss:.1f}" if loss >= 100 else f"{loss:.2f}"
            found.setdefault((row["case"], row["rule"], row["rate"]), []).append(text)
    marks = [r["updates"] for r in read("data/curvature.csv") if r["part"] == "path"]
    rows, last = [], ""
    for (case, rule, rate), losses in found.items():
        name = "clip" if rule == "NaturalGradient()" else "riemannian"
        rows.append([case if case != last else "", name, rate, *losses])
        last = case
    return table(["data", "rule", "site_lr", *dict.fromkeys(marks)], rows)


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        *(compare_times, readme_times, compare_scores, roofline, scaling),
        *(figure1_left, figure1_right, figure2, uci),
        *(mnist_end, mnist_footing, table1, figure5),
        *(inducing_points, kernels_by_loo, leave_one_out_error),
        *(options_scores, options_biases, ep_like_uci),
        *(hard_cases, ordinary_cases, minibatch_rates, clipped_curvature, curvature_paths),
    )
}


def filled(page: str) -> str:
    """A page with its tables made anew."""
    return MARKED.sub(lambda m: m[1] + TABLES[m[2]]() + m[4], page)


def pages() -> list[Path]:
    return [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


if __name__ == "__main__":
    for path in pages():
        text = path.read_text("utf8")
        if filled(text) != text:
            path.write_text(filled(text), "utf8")
            print(f"wrote {path.name}")
