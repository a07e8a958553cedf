"""Rules, objectives and rates."""

from . import source
from .source import Row, table

Method = tuple[str, str]
DEFAULT, LIKE = ("NaturalGradient()", "Bound()"), ("NaturalGradient()", "EPLike()")
TIGHTER = ("NaturalGradient()", "TighterBound(per_point=False)")
EP = ("ExpectationPropagation(power=1.0)", "EPLike()")
LAPLACE, FISHER = ("Laplace()", "Bound()"), ("FisherScoring()", "Bound()")
LAPLACE_LIKE = ("Laplace()", "EPLike()")
NUTS, GRID = ("NUTS", ""), ("importance", "")


def swept(*, inducing: bool, few_rows: bool = True) -> dict[str, dict[Method, Row]]:
    """By model and method, at 60 rows or at more of them."""
    found: dict[str, dict[Method, Row]] = {}
    for row in source.read("data/options.csv"):
        if (row["n"] == "60") == few_rows and (row["inducing"] != "0") == inducing:
            found.setdefault(row["pair"], {})[row["rule"], row["objective"]] = row
    return found


def cell(row: Row | None, column: str, digits: int = 3, sign: str = "") -> str:
    if row is None or row[column] in ("", "nan"):
        return ""
    value = round(float(row[column]), digits) + 0.0
    return f"{value:{sign}.{digits}f}" if abs(value) < 1e4 else f"{value:.0e}"


def reference_of(of: dict[Method, Row]) -> Row:
    return of[GRID if of[DEFAULT]["reference"] == "importance" else NUTS]


def options_scores() -> str:
    methods: list[Method] = [DEFAULT, LIKE, EP, LAPLACE, FISHER]
    rows = [
        [
            *(pair, cell(reference_of(of), "nlpd"), *(cell(of.get(m), "nlpd") for m in methods)),
            *(cell(of.get(m), "nlpd_integrated") for m in (DEFAULT, LIKE)),
            *(cell(of[DEFAULT], "coverage", 2), cell(of[DEFAULT], "coverage_f", 2)),
        ]
        for pair, of in swept(inducing=False).items()
    ]
    names = ["exact", "bound", "`EPLike()`", "EP rule, `EPLike()`", "Laplace", "Fisher"]
    integrated = ["bound, integrated", "`EPLike()`, integrated", "y inside 80%", "f inside 80%"]
    return table(["model", *names, *integrated], rows)


def shifts(row: Row | None) -> str:
    found = [cell(row, f"shift_{k}", 2, "+") for k in ("lengthscale", "variance")]
    return ", ".join(found) if all(found) else ""


def options_biases() -> str:
    methods = (DEFAULT, LIKE, EP, LAPLACE, LAPLACE_LIKE, FISHER)
    rows = []
    for pair, of in swept(inducing=False).items():
        check = of[NUTS if reference_of(of) is of[GRID] else GRID]
        against = f"{shifts(check)} ± {cell(of[NUTS], 'error_variance', 2)}"
        rows.append([pair, against, *(shifts(of.get(m)) for m in methods)])
    header = ["model", "NUTS", "bound", "`EPLike()`", "EP rule, `EPLike()`"]
    header += ["Laplace, bound", "Laplace, `EPLike()`", "Fisher, bound"]
    return table(header, rows)


def options_inducing() -> str:
    methods = (DEFAULT, TIGHTER, LIKE, EP)
    whole = swept(inducing=False)
    rows = [
        [
            *(pair, cell(whole[pair][DEFAULT], "nlpd")),
            *(cell(of.get(m), "nlpd") for m in methods),
            *(shifts(of.get(m)) for m in methods),
        ]
        for pair, of in swept(inducing=True).items()
        if of[DEFAULT]["nlpd"]
    ]
    names = ["tighter", "`EPLike()`", "EP rule"]
    header = ["model", "NLPD without, bound", "NLPD, bound", *names, "bias, bound", *names]
    return table(header, rows)


def options_more_rows() -> str:
    """Without inducing inputs, and with them."""
    rows = []
    with_inducing = swept(inducing=True, few_rows=False)
    for pair, of in swept(inducing=False, few_rows=False).items():
        fewer = with_inducing[pair]
        found = [of[DEFAULT], of[LIKE], *(fewer[m] for m in (DEFAULT, TIGHTER, LIKE))]
        sizes = [of[DEFAULT]["n"], fewer[DEFAULT]["inducing"]]
        scored = [cell(row, "nlpd") for row in (reference_of(of), *found)]
        rows.append([pair, *sizes, *scored, *map(shifts, found)])
    names = ["`EPLike()`", "bound, inducing inputs", "tighter", "`EPLike()`"]
    header = ["model", "rows", "inducing inputs", "NLPD, exact", "bound", *names]
    return table([*header, "bias, bound", *names], rows)


def options_seconds() -> str:
    """Medians over models of the time of an iteration, over that of the default on the model."""
    named = {"bound": DEFAULT, "`EPLike()`": LIKE, "`TighterBound()`": TIGHTER}
    named |= {"EP rule, `EPLike()`": EP, "Laplace, bound": LAPLACE, "Fisher, bound": FISHER}
    named |= {"Riemannian, bound": ("Riemannian()", "Bound()")}
    found = [swept(inducing=inducing) for inducing in (False, True)]
    rows = []
    for name, method in named.items():
        line = [name]
        for of_pairs in found:
            ratios = sorted(
                float(of[method]["seconds"]) / float(of[DEFAULT]["seconds"])
                for of in of_pairs.values()
                if method in of and of[method]["seconds"]
            )
            line.append(f"{ratios[len(ratios) // 2]:.1f}" if ratios else "")
        rows.append(line)
    return table(["", "without inducing inputs", "with ten"], rows)


def ep_like_uci() -> str:
    found: dict[str, dict[str, list[Row]]] = {}
    for row in source.read("data/ep_like_uci.csv"):
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
    for row in source.read("data/site_rates.csv"):
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


def run_cases() -> str:
    """The hard models through `run`."""
    rows = []
    for case, of in rates("run").items():
        ends = [f"{float(of[rate]['loss']):.2f}" for rate in ("default", "auto")]
        rows.append([case, *ends, of["default"]["warned"] or "none"])
    return table(["model", "default rate", "`auto`", "warning at the default rate"], rows)


def cost_of_auto() -> str:
    rows = []
    for case, of in rates("cost").items():
        fixed, auto = (float(of[rate]["update_ms"]) for rate in ("0.5", "auto from 0.5"))
        rows.append([case, f"{fixed:.2f}", f"{auto:.2f}", f"{100 * (auto / fixed - 1):.0f}%"])
    return table(["", "ms, fixed 0.5", "ms, `auto`", "longer by"], rows)


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
    for row in source.read("data/curvature.csv"):
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
    for row in source.read("data/curvature.csv"):
        if row["part"] == "path":
            loss = float(row["loss"])
            text = f"{loss:.1f}" if loss >= 100 else f"{loss:.2f}"
            found.setdefault((row["case"], row["rule"], row["rate"]), []).append(text)
    marks = [r["updates"] for r in source.read("data/curvature.csv") if r["part"] == "path"]
    rows, last = [], ""
    for (case, rule, rate), losses in found.items():
        name = "clip" if rule == "NaturalGradient()" else "riemannian"
        rows.append([case if case != last else "", name, rate, *losses])
        last = case
    return table(["data", "rule", "site_lr", *dict.fromkeys(marks)], rows)


TABLES = (
    *(options_scores, options_biases, options_inducing, options_more_rows),
    *(options_seconds, ep_like_uci),
    *(hard_cases, run_cases, ordinary_cases, cost_of_auto, minibatch_rates),
    *(clipped_curvature, curvature_paths),
)
