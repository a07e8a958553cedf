"""CSV files, and tables in Markdown."""

import csv
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
Row = dict[str, str]


def read(name: str) -> list[Row]:
    with open(DOCS / name, newline="", encoding="utf8") as file:
        return list(csv.DictReader(file))


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def number(value: float) -> str:
    """Three digits, as times are told."""
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
