"""Runs examples and pages once and keeps what they printed and drew, as pages of the site.

    python docs/execute.py counts robust    # these examples
    python docs/execute.py --pages          # the pages of PAGES
    python docs/execute.py --all            # everything, half an hour
    python docs/execute.py --gallery        # the page of all examples
    python docs/execute.py --stale          # names whose page has other code than they have

An example, ``examples/NAME.py``, becomes ``docs/gallery/NAME.md``: its cells, what each printed,
its picture (``docs/images/NAME.png``) and its run time. A page of ``PAGES`` is executed in place:
what a block of code prints is put below it, and the figures that it makes are saved under the
names of the pictures that follow it. Building the site executes nothing.

A test fails when the code of a page is no longer that of its last execution.
"""

import argparse
import ast
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
EXAMPLES = DOCS.parent / "examples"
PAGES = ("quickstart",)
# Pictures of the site that show a larger run than the script's own, and so are not overwritten.
PICTURES = {"large_data": "large_data_200000.png"}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if not path.name.startswith("_"))


GALLERY = {  # groups, and in each the title and the subject of its examples
    "Classification": {
        "quickstart": ("Two classes in the plane", "the decision surface of the banana data"),
        "mnist": ("Ten classes in minibatches", "handwritten digits, ten functions and a softmax"),
        "ordinal": ("Ordered answers", "on how many days people watch the news, by age"),
        "influence": ("Which labels look wrong?", "points ranked by influence on the posterior"),
    },
    "Counts and events": {
        "counts": ("A rate that changes", "coal-mining disasters under two likelihoods"),
        "predictions": ("Predictions in counts", "bands, draws that are functions, serving"),
        "coal_by_day": ("40,634 days", "the same disasters day by day, in linear time"),
        "time_series": ("Trend, day, week and forecast", "hourly counts with Markov sites"),
    },
    "Regression": {
        "heteroscedastic": ("Noise that changes", "a GP for the mean and one for the noise"),
        "robust": ("Outliers", "a Student-t likelihood ignores six wrong years by itself"),
        "multi_output": ("Several outputs with gaps", "twelve months, mixtures of three functions"),
        "own_likelihood": ("A likelihood of your own", "censored survival times"),
        "tinygp_kernel": (
            "A tinygp kernel",
            "carbon dioxide at Mauna Loa, predicted for ten years",
        ),
    },
    "Comparing and checking": {
        "compare_kernels": ("Which kernel?", "leave-one-out scores of three, without a refit"),
        "hyperparameters": ("Hyperparameters three ways", "a point, variational, and NUTS"),
        "nuts_side_by_side": ("NUTS and t-SVGP", "one model, three inferences, and their cost"),
    },
    "Large and growing data": {
        "large_data": ("A file that is never in memory", "counts at any number of places"),
        "flights": ("Which flights are late?", "a third of a million rows of a package"),
        "streaming": ("A stream", "batches that come in order and are then gone"),
        "bayesian_optimization": ("Bayesian optimization", "where to measure next"),
    },
}
# Examples that have not been executed for the site yet: a card without a page. Keep it empty.
NOT_EXECUTED: set[str] = set()


@dataclass
class Cell:
    """A part of a script: prose, or code with a title."""

    kind: str  # "prose" or "code"
    title: str
    text: str


def parse(script: str) -> tuple[str, list[Cell]]:
    """The docstring of a script and its ``# %%`` cells, without those that are empty."""
    docstring = ast.get_docstring(ast.parse(script)) or ""
    parts = re.split(r"^# %%(.*)\n", script, flags=re.MULTILINE)[1:]
    cells = []
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        if title.strip() == "[markdown]":
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
            cells.append(Cell("prose", "", body.strip()))
        elif body.strip():
            # A title that goes on in the comment below it is prose.
            more = re.match(r"(?:# .*\n)+", body)
            if more and title.strip():
                words = re.sub(r"^# ?", "", more.group(), flags=re.MULTILINE)
                cells.append(Cell("prose", "", f"{title.strip()} {words.strip()}"))
                title, body = "", body[more.end() :]
            cells.append(Cell("code", title.strip(), body.strip("\n")))
    return docstring, cells


def run(blocks: list[str], name: str, argv: list[str], figures: bool) -> list[dict[str, Any]]:
    """Executes blocks in one namespace. What each printed, warnings included, and its CPU time."""
    sys.argv = argv
    namespace: dict[str, Any] = {"__name__": "__main__", "__doc__": name}
    results = []
    for block in blocks:
        printed = io.StringIO()

        def show(message: Any, category: Any, *_: Any, to: io.StringIO = printed) -> None:
            to.write(f"{category.__name__}: {message}\n")

        start = time.process_time()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.showwarning = show
            exec(compile(block, f"<{name}>", "exec"), namespace)
        result = {"printed": printed.getvalue(), "seconds": time.process_time() - start}
        if figures:
            result["figures"] = _save_figures(len(results))
        results.append(result)
    return results


def _save_figures(number: int) -> list[str]:
    """Saves and closes the open figures of Matplotlib, if it has been imported at all."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    import matplotlib.pyplot as plt

    names = []
    for k in plt.get_fignums():
        names.append(f"figure-{number}-{k}.png")
        plt.figure(k).savefig(names[-1], dpi=110, bbox_inches="tight")
    plt.close("all")
    return names


def in_a_process(blocks: list[str], name: str, argv: list[str], folder: Path, figures: bool) -> Any:
    """`run` in a new interpreter, so that nothing is imported or compiled before."""
    job = json.dumps([blocks, name, argv, figures])
    code = (
        f"import json, sys; sys.path[:0] = [{str(EXAMPLES)!r}, {str(DOCS)!r}]; import execute; "
        "out = sys.stdout; found = execute.run(*json.load(sys.stdin)); json.dump(found, out)"
    )
    path = os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": path}
    found = subprocess.run(
        [sys.executable, "-c", code],
        input=job,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
        env=environment,
    )
    return json.loads(found.stdout[found.stdout.index("[{") :])


def block_of_output(printed: str) -> str:
    lines = [line.rstrip() for line in printed.rstrip().splitlines()]
    return "```{code-block} text\n:class: output\n\n" + "\n".join(lines) + "\n```\n"


def _markdown(docstring: str) -> str:
    """The prose of a docstring: indented lines are commands, double backticks single ones."""
    text = re.sub(r"``([^`]+)``", r"`\1`", docstring)
    return re.sub(
        r"(?:^    .*\n?)+",
        lambda m: "```bash\n" + re.sub(r"^    ", "", m.group(), flags=re.M).strip("\n") + "\n```\n",
        text,
        flags=re.MULTILINE,
    )


def example_page(name: str, results: list[dict[str, Any]], where: str) -> str:
    """The page of an example."""
    docstring, cells = parse((EXAMPLES / f"{name}.py").read_text("utf8"))
    title, _, rest = docstring.partition("\n")
    seconds = sum(result["seconds"] for result in results)
    picture = PICTURES.get(name, f"{name}.png")
    page = [
        "<!-- Written by docs/execute.py: change the script, not this page. -->",
        f"# {title.rstrip('.')}\n",
        _markdown(rest.strip("\n")) + "\n",
        f"{{download}}`Download {name}.py <../../examples/{name}.py>` (it reads from "
        f"the folder `examples/`).\nRun time: {seconds:.0f} s of CPU time, with imports and "
        f"compilation ({where}).\n",
    ]
    left = iter(results)
    for cell in cells:
        if cell.kind == "prose":
            page.append(cell.text + "\n")
            continue
        code = f"```python\n{cell.text}\n```\n"
        if cell.title == "Imports":
            summary = "<summary>Imports and settings</summary>"
            page.append(f'<details class="setup">{summary}\n\n{code}\n</details>\n')
        else:
            page.append((f"## {cell.title}\n\n" if cell.title else "") + code)
        printed = next(left)["printed"]
        wrote = f"wrote {picture}\n" in printed
        printed = printed.replace(f"wrote {picture}\n", "")
        if printed.strip():
            page.append(block_of_output(printed))
        if wrote:
            page.append(f"![{title.rstrip('.')}](../images/{picture})\n")
    return "\n".join(page)


def gallery_page() -> str:
    """The page of all examples, with a thumbnail of each."""
    out = [
        "<!-- Written by docs/execute.py --gallery. -->",
        "# Examples\n",
        "Each page is one script with its code, its output, its picture and its run time. The data",
        "are simulated or in `examples/data/`, where a README says where they are from; the",
        "flights are in a package. In a clone:\n",
        '```bash\npip install ".[examples]"\npython examples/counts.py\n```\n',
        "Scripts are divided into cells (`# %%`) that notebook editors understand. With `--quick`",
        "they take a few steps only, and say so in the picture.\n",
    ]
    for group, examples in GALLERY.items():
        out.append(f"## {group}\n\n:::::{{container}} gallery")
        for name, (title, subject) in examples.items():
            image = f"![{title}](images/{PICTURES.get(name, name + '.png')})"
            page = f"gallery/{name}.md"
            if name in NOT_EXECUTED:
                script = f"{{download}}`{title} <../examples/{name}.py>`"
                image, link = image.replace("large_data_200000", "large_data"), script
            else:
                image, link = f"[{image}]({page})", f"[{title}]({page})"
            out.append(f"::::{{container}} card\n{image}\n\n{link}: {subject}.\n::::\n")
        out.append(":::::\n")
    toctree = "\n".join(
        f"{title} <gallery/{name}>"
        for group in GALLERY.values()
        for name, (title, _) in group.items()
        if name not in NOT_EXECUTED
    )
    return "\n".join([*out, f"```{{toctree}}\n:hidden:\n\n{toctree}\n```\n"])


def code_of(page: str) -> list[str]:
    """The blocks of Python on a page."""
    return re.findall(r"^```python\n(.*?)\n?^```$", page, re.DOTALL | re.MULTILINE)


def digest(page: str) -> str:
    return hashlib.sha256("\n".join(code_of(page)).encode()).hexdigest()[:16]


def executed_page(page: str, results: list[dict[str, Any]]) -> tuple[str, dict[str, str]]:
    """A page with new outputs below its blocks, and the pictures that its figures become."""
    page = re.sub(
        r"\n```\{code-block\} text\n:class: output\n.*?^```\n", "", page, flags=re.S | re.M
    )
    page = re.sub(r"\n*<!-- executed: \w+ -->\n*$", "\n", page)
    parts = re.split(r"(^```python\n.*?^```\n)", page, flags=re.DOTALL | re.MULTILINE)
    pictures: dict[str, str] = {}
    for i, result in enumerate(results):
        if result["printed"].strip():
            parts[2 * i + 1] += "\n" + block_of_output(result["printed"])
        names = re.findall(r"^!\[[^\]]*\]\(images/(\S+)\)$", parts[2 * i + 2], re.MULTILINE)
        if len(names) != len(result["figures"]):
            raise ValueError(f"block {i} draws {len(result['figures'])} figures; below it: {names}")
        pictures.update(zip(names, result["figures"], strict=True))
    text = "".join(parts)
    return text.rstrip() + f"\n\n<!-- executed: {digest(text)} -->\n", pictures


def circumstances() -> str:
    python = ".".join(map(str, sys.version_info[:2]))
    names = ("JAX", "NumPyro", "ArviZ")
    return f"Python {python}, " + ", ".join(f"{k} {metadata.version(k.lower())}" for k in names)


def execute_example(name: str) -> None:
    blocks = [c.text for c in parse((EXAMPLES / f"{name}.py").read_text("utf8"))[1]
              if c.kind == "code"]  # fmt: skip
    argv = [f"{name}.py", "--output", PICTURES.get(name, f"{name}.png")]
    results = in_a_process(blocks, name, argv, DOCS / "images", figures=False)
    (DOCS / "gallery").mkdir(exist_ok=True)
    (DOCS / "gallery" / f"{name}.md").write_text(example_page(name, results, circumstances()))


def execute_page(name: str) -> None:
    import tempfile

    path = DOCS / f"{name}.md"
    page = path.read_text("utf8")
    with tempfile.TemporaryDirectory() as folder:
        results = in_a_process(code_of(page), name, [name], Path(folder), figures=True)
        text, pictures = executed_page(page, results)
        for picture, figure in pictures.items():
            (DOCS / "images" / picture).write_bytes((Path(folder) / figure).read_bytes())
    path.write_text(text, "utf8")


def stale() -> list[str]:
    """Names of examples and pages whose code has changed since they were executed."""
    found = []
    for name in sorted(set(NAMES) - NOT_EXECUTED):
        page = DOCS / "gallery" / f"{name}.md"
        cells = parse((EXAMPLES / f"{name}.py").read_text("utf8"))[1]
        blocks = [cell.text for cell in cells if cell.kind == "code"]
        if not page.exists() or code_of(page.read_text("utf8")) != blocks:
            found.append(name)
    for name in PAGES:
        page_text = (DOCS / f"{name}.md").read_text("utf8")
        if f"<!-- executed: {digest(page_text)} -->" not in page_text:
            found.append(f"{name}.md")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="execute examples and pages")
    parser.add_argument("names", nargs="*", help="examples, by the names of their scripts")
    parser.add_argument("--pages", action="store_true", help="the pages that show their outputs")
    parser.add_argument("--all", action="store_true", help="all examples and pages")
    parser.add_argument("--gallery", action="store_true", help="the page of all examples")
    parser.add_argument("--stale", action="store_true", help="print what should be executed")
    args = parser.parse_args()
    if args.stale:
        print("\n".join(stale()))
        return
    if args.gallery or args.all:
        (DOCS / "examples.md").write_text(gallery_page(), "utf8")
    for name in NAMES if args.all else args.names:
        start = time.perf_counter()
        execute_example(name)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    if args.pages or args.all:
        for name in PAGES:
            execute_page(name)


if __name__ == "__main__":
    main()
