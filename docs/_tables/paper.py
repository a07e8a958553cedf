"""The experiments of the paper."""

from . import source
from .source import table


def figure1_left() -> str:
    """Differences from the published curve, no smaller than the digits of our CSV can show."""
    ours, theirs = (
        source.read("paper/figure1_left.csv"),
        source.read("paper/published_fig1_left_bound_vs_variance.csv"),
    )
    names = {"t_svgp": "t-SVGP", "q_svgp_whitened": "q-SVGP, whitened", "q_svgp": "q-SVGP"}
    rows = []
    for key, name in names.items():
        gap = max(abs(float(a[key]) - float(b[key])) for a, b in zip(ours, theirs, strict=True))
        rows.append([name, f"{gap:.0e}".replace("e-0", "e-")])
    return table(["parameterization", "largest difference from the published curve"], rows)


def figure1_right() -> str:
    """Iterations after which both hyperparameters stay within 2% of the fixed point."""
    found = source.read("paper/figure1_right.csv")
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
    ends = {
        (r["method"], r["kernel"]): r for r in source.read("paper/mnist.csv")
    }  # the last step stays
    rows, before = [], ""
    for (method, kernel), row in ends.items():
        name = {"t_svgp": "t-SVGP", "q_svgp_whitened": "q-SVGP, whitened"}[method]
        values = [f"{float(row['nlpd']):.3f}", f"{float(row['elbo']):,.0f}"]
        seconds = f"{float(row['seconds']):.1f}"
        rows.append(["" if name == before else name, kernel, *values, seconds])
        before = name
    scores = source.read("paper/published_fig4_mnist_nlpd.csv")[-1]
    bounds = source.read("paper/published_fig4_mnist_elbo.csv")[-10:]
    for key, name in (("t_svgp", "t-SVGP"), ("q_svgp", "q-SVGP")):
        bound = sum(float(row[f"{key}_elbo"]) for row in bounds) / 10
        values = [f"{float(scores[key + '_nlpd']):.3f}", f"{bound:,.0f}"]
        rows.append([f"published, {name}", "", *values, f"{float(scores[key + '_seconds']):.1f}"])
    return table(["", "kernel", "NLPD", "bound", "seconds"], rows)


def mnist_footing() -> str:
    scores = source.read("paper/published_fig4_mnist_nlpd.csv")[-1]
    names = {"t_svgp": "t-SVGP", "q_svgp_whitened": "q-SVGP, whitened"}
    rows = []
    for row in sorted(source.read("paper/mnist_footing.csv"), key=lambda r: -float(r["lr_e"] or 1)):
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
    found = source.read("paper/figure2_em_from_2.5.csv")
    curve = source.read("paper/figure2.csv")
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
    last = {
        (r["data"], r["method"]): r for r in source.read("paper/uci.csv") if r["iteration"] == "20"
    }
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
    ours = source.read("paper/mnist_table1.csv")
    theirs = source.read("paper/published_table1_mnist_nlpd.csv")
    rows = []
    for a, b in zip(ours, theirs, strict=True):
        scores = [f"{float(a[k]):.3f}" for k in ("t_svgp", "q_svgp_whitened")]
        published = [f"{float(b[k]):.3f} ({float(b[k + '_se']):.3f})" for k in ("t_svgp", "q_svgp")]
        settings = [f"{a['lr_e']}, {a['lr_m']}", f"{a['e_steps']}, {a['m_steps']}"]
        rows.append([*settings, *scores, *published])
    header = ["rate E, M", "steps E, M", "t-SVGP", "q-SVGP, whitened"]
    return table([*header, "published, t-SVGP", "published, q-SVGP"], rows)


def figure5() -> str:
    theirs = {r["m"]: r for r in source.read("paper/published_fig5_seconds_per_100_steps_vs_m.csv")}
    rows = []
    for row in source.read("paper/figure5.csv"):
        ours = [
            f"{float(row[k]):.1f} ({float(row[k + '_best']):.1f})"
            for k in ("t_svgp", "q_svgp_whitened")
        ]
        published = [f"{float(theirs[row['m']][k]):.1f}" for k in ("t_svgp", "q_svgp")]
        rows.append([row["m"], *ours, *published])
    header = ["m", "t-SVGP", "q-SVGP, whitened", "published, t-SVGP", "published, q-SVGP"]
    return table(header, rows)


TABLES = (
    *(figure1_left, figure1_right, figure2, uci),
    *(mnist_end, mnist_footing, table1, figure5),
)
