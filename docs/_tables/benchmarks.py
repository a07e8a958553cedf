"""Benchmarks: beside other libraries, against the machine, scaling."""

import re
from collections.abc import Iterator

from . import source
from .source import Row, number, table

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
        for row in source.read("data/compare.csv")
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
    found = {(r["job"], r["precision"], r["system"]): r for r in source.read("data/steps.csv")}
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
    for row in source.read("data/scaling.csv"):
        memory = float(row["peak_mb"]) - float(row["import_mb"])
        times = [f"{float(row[k]):,.1f} ms" for k in ("best_ms", "step_ms")]
        rows.append(
            [words[row["varied"]], f"{int(row[row['varied']]):,}", *times, f"{memory:.0f} MB"]
        )
    return table(["", "size", "fastest step", "median step", "peak memory above imports"], rows)


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
    scores = {
        row["system"]: row["nlpd"]
        for row in source.read("data/compare.csv")
        if (row["job"], row["precision"], row["cores"]) == ("em minibatch", "float64", "2")
    }
    ours, theirs = (
        sorted(f"{float(v):.3f}" for k, v in scores.items() if re.fullmatch(name + r"( \(.*)?", k))
        for name in ("numpyro_tsvgp", "GPJax whitened")
    )
    yield (
        "benchmarks.md",
        f"ended at {ours[0]} and {ours[1]}, those of GPJax at {theirs[0]} and {theirs[1]}",
    )
    sizes = [r for r in source.read("data/scaling.csv") if r["varied"] == "rows"]
    memory = sorted(float(r["peak_mb"]) - float(r["import_mb"]) for r in sizes)
    best = sorted(float(r["best_ms"]) for r in sizes)
    yield (
        "benchmarks.md",
        f"{memory[0]:.0f} to {memory[-1]:.0f} MB from a thousand rows to two million. Neither does "
        f"the fastest step, {best[0]:.1f} to {best[-1]:.1f} ms.",
    )


TABLES = (compare_times, readme_times, compare_scores, roofline, scaling)
