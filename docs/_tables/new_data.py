"""Numbers of 'New data and decisions'."""

import re

from . import source
from .source import Row, table

HISTORIES = ("at once", "4 batches")


def _distances(row: Row) -> str:
    """The largest and the root mean square distance of means."""
    if row["said"] == "refused":
        return "refused"
    return ", ".join(_short(float(row[k])) for k in ("mean_largest", "mean_rms"))


def _short(value: float) -> str:
    return f"{value:.2f}" if value >= 0.095 else f"{value:.1g}".replace("e-0", "e-")


def added() -> str:
    rows = []
    for row in source.read("data/conditioning.csv"):
        if not row["taken"] and row["sites"] == "tied":
            means = [_short(float(row[k])) for k in ("mean_largest", "mean_rms")]
            wider = float(row["sd_largest"])
            spread = f"{100 * wider:.0f}%" if wider > 0.005 else _short(wider)
            rows.append([row["likelihood"], row["added"].split()[0], *means, spread])
    header = ["likelihood", "batches", "means: largest", "means: root mean square"]
    return table([*header, "standard deviations: largest"], rows)


def taken_out() -> str:
    found: dict[tuple[str, str], dict[tuple[str, str, str], Row]] = {}
    for row in source.read("data/conditioning.csv"):
        if row["taken"]:
            case = found.setdefault((row["likelihood"], row["taken"]), {})
            case[row["sites"], row["added"], row["knows"]] = row
    rows = [
        [
            likelihood,
            taken,
            _short(max(float(of["tied", how, "data"]["mean_largest"]) for how in HISTORIES)),
            *(
                _distances(of[sites, how, "sites"])
                for sites in ("untied", "tied")
                for how in HISTORIES
            ),
        ]
        for (likelihood, taken), of in found.items()
    ]
    header = ["likelihood", "taken out", "tied, with data", "points, converged"]
    more = ["points, after 4 batches", "sums alone, converged", "sums alone, after 4 batches"]
    return table([*header, *more], rows)


def _runs() -> dict[str, tuple[list[float], dict[str, list[str]]]]:
    """By method, what the example printed when it was executed: each seed, and means by round."""
    printed = (source.DOCS / "gallery" / "bayesian_optimization.md").read_text("utf8")
    found = {}
    for name, seeds, rounds in re.findall(
        r"^([\w ,]+): after \d+ rounds, by seed: (.*)\n((?:   round .*\n)+)", printed, re.MULTILINE
    ):
        line = r"round (\d+): (\S+ ± \S+); mean of those tried (\S+)"
        means = {k: [mean, tried] for k, mean, tried in re.findall(line, rounds)}
        found[name] = [float(rate) for rate in seeds.split()], means
    return found


def optimization() -> str:
    rows, rounds = [], []
    for name, (seeds, means) in _runs().items():
        rounds = list(means)
        worst = f"{min(seeds):.1f}"
        rows.append([name, *(mean for mean, _ in means.values()), worst, means[rounds[-1]][1]])
    header = [f"after {k} rounds" for k in rounds]
    return table(["settings by", *header, "worst run", "mean of those tried"], rows)


TABLES = (added, taken_out, optimization)
