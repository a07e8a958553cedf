"""Every example runs in its quick form and leaves a picture.

They run in this process: importing JAX anew for each would take longer than most of them.
"""

import csv
import re
import runpy
import struct
import sys
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if not path.name.startswith("_"))


def test_there_are_examples():
    assert len(SCRIPTS) >= 12


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=path.stem, marks=pytest.mark.slow) for path in SCRIPTS],
)
def test_example(script, tmp_path, monkeypatch, capsys):
    picture = tmp_path / "picture.png"
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--quick", "--output", str(picture)])
    try:
        with warnings.catch_warnings():  # fits of three steps may be told so
            warnings.simplefilter("ignore", UserWarning)
            runpy.run_path(str(script), run_name="__main__")
    finally:
        plt.close("all")
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    assert width > 500 and height > 300
    assert sorted(path.name for path in tmp_path.iterdir()) == [picture.name]


@pytest.mark.parametrize("quick", [True, False])
def test_the_picture_of_a_quick_run_says_so(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    import _common

    monkeypatch.setattr(sys, "argv", ["x", "--output", str(tmp_path / "x.png")])
    args = _common.options("x", "Words.")
    args.quick = quick
    figure, ax = plt.subplots()
    _common.band(ax, np.arange(3), np.zeros(3), np.ones(3), label="a function")
    assert ax.get_legend_handles_labels()[1] == ["a function (band: ± 2 sd)"]
    _common.save(figure, args)
    plt.close(figure)
    assert [text.get_text()[:9] for text in figure.texts] == ["quick run"] * quick
    assert (tmp_path / "x.png").exists()


def test_every_example_says_how_to_run_it():
    for script in SCRIPTS:
        text = script.read_text()
        assert f"python examples/{script.name}" in text, script.name
        assert "# %%" in text, f"{script.name} has no cells"


def test_every_data_file_has_its_source_and_licence():
    """A section of its own, or a row of a table with these columns."""
    readme = (EXAMPLES / "data" / "README.md").read_text("utf8")
    sections = {part.splitlines()[0]: part for part in readme.split("\n## ")[1:]}
    rows = set(re.findall(r"^\| (\S+) (?:\|[^|\n]*\w[^|\n]*){5}\|$", readme, re.MULTILINE))
    for path in (EXAMPLES / "data").iterdir():
        section = sections.get(path.name, "")
        documented = "\nSource:" in section and "\nLicence:" in section
        assert documented or path.name in rows or path.name == "README.md", path.name


BENCHMARKS = sorted((EXAMPLES / "benchmarks").glob("[!_]*.py"))
# Names of the column that a table is about.
MEASURED = ("median_ms", "step_ms", "mean", "nlpd", "loss", "unconstrained")
MEASURED += ("n_eff", "error", "first_s", "mean_rms", "gradient_ms")


@pytest.mark.slow
@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda path: path.stem)
def test_benchmark(script, tmp_path, monkeypatch, capsys):
    """In its quick form, which leaves a table of numbers."""
    output = tmp_path / "found"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--quick", "--output", str(output)])
    runpy.run_path(str(script), run_name="__main__")
    table = output / f"{script.stem}.csv" if output.is_dir() else output
    header, *rows = csv.reader(table.read_text().splitlines())
    assert rows and all(len(row) == len(header) for row in rows)
    column = next(header.index(name) for name in MEASURED if name in header)
    found = np.array([row[column] for row in rows if row[-1] != "refused"], float)
    assert np.isfinite(found).all() and (found != 0).all()
