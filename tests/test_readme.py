"""The code of the README and of the documentation runs as it stands.

The blocks of a page are executed in turn in one namespace, which has nothing in it but what the
setup leaves that the page includes and readers can unfold, if it has one. Fits and chains are cut
short: what is tested is that the code is right, not that it converges.
"""

import ast
import functools
import re
from pathlib import Path

import pytest
from numpyro.infer import MCMC, SVI

from numpyro_tsvgp import QSVGP, TSVGP

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path for path in (ROOT / "docs").glob("*.md") if "```python\n" in path.read_text("utf8")
)


SETUP = re.compile(r"^```\{include\} (_setup/\w+\.md)\n```$", re.MULTILINE)


def blocks(path):
    """Python blocks of a page, each at its own line so that a traceback points there."""
    text = path.read_text("utf8")
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        line = text[: match.start(1)].count("\n")
        yield compile("\n" * line + match.group(1), str(path), "exec")


@pytest.mark.slow
def test_the_code_of_the_readme_runs():
    namespace = {}
    for block in blocks(ROOT / "README.md"):
        exec(block, namespace)
    # The claims of the text around it: a fit that learned something, predictions at new inputs.
    losses = namespace["result"].losses
    assert losses[-1] < losses[0] - 10
    assert namespace["mean"].shape == namespace["variance"].shape == (300,)
    assert namespace["y_new"].shape == (100, 300)


@pytest.fixture
def short(monkeypatch):
    """Two steps of every fit and chain, whatever the page says."""
    for driver in (TSVGP, QSVGP, SVI):
        run = driver.run

        def few(self, key, num_steps, *args, run=run, **kwargs):
            return run(self, key, min(num_steps, 2), *args, **{"progress_bar": False, **kwargs})

        monkeypatch.setattr(driver, "run", few)
    init = MCMC.__init__

    def tiny(self, kernel, **kwargs):
        init(self, kernel, num_warmup=2, num_samples=8, progress_bar=False)

    monkeypatch.setattr(MCMC, "__init__", tiny)


def test_there_are_pages():
    assert len(PAGES) >= 8


@functools.cache
def after(setup):
    """The names that a setup leaves, which pages share."""
    namespace = {}
    for block in blocks(ROOT / "docs" / setup):
        exec(block, namespace)
    return namespace


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_code_of_a_page_runs(page, short, tmp_path, monkeypatch, capsys):
    """By itself: a reader of one page can copy its code."""
    monkeypatch.chdir(tmp_path)
    setup = SETUP.search(page.read_text("utf8"))
    namespace = dict(after(setup[1])) if setup else {}
    for block in blocks(page):
        exec(block, namespace)


# Parts of other messages, and what only a programming error can raise.
NOT_FOR_USERS = re.compile(
    "^it (is|was|has) |^After a step|^Check that| Argument |is not the array that|has no attribute"
    "|An input of shape|Rows of a source|The inputs have the structure|^a matrix of"
    "|^Drop the last axis|^Try a smaller site_lr|^FunctionDraws"
)


def _literal(node):
    """The words of a string expression, with ... for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "..." for v in node.values)
    return _literal(node.left) + _literal(node.right) if isinstance(node, ast.BinOp) else ""


def _messages():
    for path in (ROOT / "numpyro_tsvgp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                yield _literal(node.exc.args[0])
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "warn":
                yield _literal(node.args[0])
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.expr):
                yield _literal(node.value)  # failures.diagnose


def test_troubleshooting_has_the_messages_that_exist():
    """Every heading has the words of a message, and every message has a heading."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf8")
    package = "".join(path.read_text("utf8") for path in (ROOT / "numpyro_tsvgp").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", package)  # join strings broken over lines
    words = []
    for heading in re.findall(r"^### (.*)$", text, re.MULTILINE):
        for part in re.sub(r"\(a? ?warnings?\)|f\[\.\.\.\]", "...", heading).split(" / "):
            words.append(max(re.split(r"\.\.\.|[][]", part), key=len).strip(" ,:"))
    assert len(words) > 60
    assert [w for w in words if w not in source] == []
    found = [m for m in _messages() if len(m) > 30 and " " in m and not NOT_FOR_USERS.search(m)]
    assert len(found) > 60
    assert [m for m in found if not any(w in m for w in words) and m not in text] == []
