"""Rules, objectives and rates."""

from . import source
from .source import Row, table

Method = tuple[str, str]
DEFAULT, LIKE = ("NaturalGradient()", "Bound()"), ("NaturalGradient()", "EPLike()")
EP = ("ExpectationPropagation(power=1.0)", "EPLike()")
LAPLACE, FISHER = ("Laplace()", "Bound()"), ("FisherScoring()", "Bound()")


def swept() -> dict[str, dict[Method, Row]]:
    """By model and method, at 60 rows without inducing inputs; the last row of each counts."""
    found: dict[str, dict[Method, Row]] = {}
    for row in source.read("data/options.csv"):
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
    *(options_scores, options_biases, ep_like_uci),
    *(hard_cases, ordinary_cases, minibatch_rates, clipped_curvature, curvature_paths),
)
