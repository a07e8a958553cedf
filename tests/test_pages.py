"""Pages that show outputs: their code is that which was executed, and the map has every page."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def _module(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = _module("execute")


def test_every_page_shows_the_code_that_was_executed():
    """A script or page that has changed must be executed anew: ``python docs/execute.py NAME``."""
    assert execute.stale() == []


def test_a_changed_script_is_found(tmp_path, monkeypatch):
    script = '"""Title.\n\nWords.\n"""\n\n# %% Imports\nimport math\n\n# %%\nprint(math.pi)\n'
    (tmp_path / "examples").mkdir()
    (tmp_path / "gallery").mkdir()
    (tmp_path / "examples" / "one.py").write_text(script)
    for name, value in {"EXAMPLES": tmp_path / "examples", "DOCS": tmp_path}.items():
        monkeypatch.setattr(execute, name, value)
    monkeypatch.setattr(execute, "NAMES", ["one"])
    monkeypatch.setattr(execute, "PAGES", ())
    assert execute.stale() == ["one"]
    blocks = [cell.text for cell in execute.parse(script)[1] if cell.kind == "code"]
    page = execute.example_page("one", execute.run(blocks, "one", ["one"], False), "here")
    (tmp_path / "gallery" / "one.md").write_text(page)
    assert execute.stale() == []
    assert "# Title\n" in page and "3.14159" in page and "import math" in page
    (tmp_path / "examples" / "one.py").write_text(script.replace("math.pi", "math.e"))
    assert execute.stale() == ["one"]


def test_outputs_of_a_page_are_replaced_not_added():
    page = "Words.\n\n```python\nprint(1)\n```\n\nMore.\n\n```python\nx = 2\n```\n\nEnd.\n"
    results = [{"printed": "1\n", "figures": []}, {"printed": "", "figures": []}]
    once, _ = execute.executed_page(page, results)
    assert once.count(":class: output") == 1 and "More." in once
    twice, _ = execute.executed_page(once, [{"printed": "3\n", "figures": []}, results[1]])
    assert twice == once.replace("\n1\n```", "\n3\n```")
    drawn = [results[0], {"printed": "", "figures": ["figure-1-1.png"]}]
    with pytest.raises(ValueError, match="draws 1 figures"):
        execute.executed_page(page, drawn)
    with_picture = page.replace("End.", "![words](images/two.png)")
    assert execute.executed_page(with_picture, drawn)[1] == {"two.png": "figure-1-1.png"}


def test_the_gallery_has_every_example():
    """``python docs/execute.py --gallery`` writes it."""
    assert sorted(name for group in execute.GALLERY.values() for name in group) == execute.NAMES
    page = (DOCS / "examples.md").read_text("utf8")
    assert page == execute.gallery_page()
    for picture in re.findall(r"\]\(images/(\S+?)\)", page):
        assert (DOCS / "images" / picture).exists(), picture
    for name in re.findall(r"<gallery/(\w+)>$", page, re.MULTILINE):
        assert (DOCS / "gallery" / f"{name}.md").exists(), name


def test_the_map_has_every_page():
    """Each page is in one table of contents, and the first page links to each."""
    index = (DOCS / "index.md").read_text("utf8")
    entries = [
        name
        for block in re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
        for name in re.findall(r"^(\w+)$", block, re.MULTILINE)
    ]
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert sorted(entries) == sorted(pages)
    unlinked = {name for name in pages if f"({name}.md" not in index}
    assert unlinked <= {"changelog", "contributing"}


def test_the_api_pages_have_every_public_name():
    import numpyro_tsvgp

    text = "".join(path.read_text("utf8") for path in (DOCS / "api").glob("*.md"))
    documented = set(re.findall(r"auto\w+:: numpyro_tsvgp\.(\w+)$", text, re.MULTILINE))
    modules = {"inducing", "kernels", "quadrature"}
    assert set(numpyro_tsvgp.__all__) - modules <= documented
    kernels = set(re.findall(r"^\.\. auto\w+:: (?:numpyro_tsvgp\.kernels\.)?(\w+)$", text, re.M))
    internal = {"External", "Function", "Product", "Scaled", "Sum", "Stationary", "Kernel"}
    assert set(numpyro_tsvgp.kernels.__all__) - internal - {"NotACovariance"} <= kernels


tables = _module("tables")


def test_tables_are_what_the_csv_files_say():
    """After a new run of a benchmark: ``python docs/tables.py``."""
    used = set()
    for path in tables.pages():
        text = path.read_text("utf8")
        assert tables.filled(text) == text, path.name
        used |= {found[1] for found in tables.MARKED.findall(text)}
    assert used == set(tables.TABLES)


def test_sentences_are_what_the_csv_files_say():
    count = 0
    for page, sentence in tables.sentences():
        text = " ".join((DOCS / page).read_text("utf8").split())
        assert sentence in text, f"{page} should say: {sentence}"
        count += 1
    assert count > 3


def test_a_table_that_disagrees_is_found(monkeypatch):
    page = (DOCS / "benchmarks.md").read_text("utf8")
    rows = [dict(row, median_ms="1.0") for row in tables.benchmarks.source.read("data/steps.csv")]
    read = tables.benchmarks.source.read
    monkeypatch.setattr(
        tables.benchmarks.source, "read", lambda name: rows if "steps" in name else read(name)
    )
    assert tables.filled(page) != page


def test_links_of_the_readme():
    """They lead to files of the project, until it has an address: then they must be absolute."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text("utf8"))
    assert len(links) > 20
    relative = [link for link in links if not link.startswith("https://")]
    if "urls" in project:
        assert relative == []
    else:
        assert [link for link in relative if not (ROOT / link).exists()] == []


def test_the_citation_has_the_version_of_the_project():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    citation = (DOCS / "CITATION.cff").read_text("utf8")
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation


def test_what_is_returned_is_not_taken_for_a_type():
    """Sphinx takes what is before a colon in the first line of Returns for the type."""
    found = []
    for path in (ROOT / "numpyro_tsvgp").rglob("*.py"):
        for line in re.findall(r"^ +Returns:\n +(.*)$", path.read_text("utf8"), re.MULTILINE):
            words = re.sub(r":\w+:`[^`]*`|`+[^`]*`+", "", line)
            if ":" in words:
                found.append(f"{path.name}: {line}")
    assert found == []


def test_docstrings_have_one_style():
    """Sections by their names, two spaces in, in one order; the example comes after the words."""
    order = ("Args", "Attributes", "Returns", "Yields", "Raises", "Examples", "References")
    found, count = [], 0
    for path in (ROOT / "numpyro_tsvgp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf8"))):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            text = ast.get_docstring(node) or ""
            sections = re.findall(r"^([A-Z]\w+):\n( *)", text, re.MULTILINE)
            count += len(sections)
            names = [name for name, _ in sections]
            known = set(names) <= set(order) and names == sorted(names, key=order.index)
            if not known or any(indent != "  " for _, indent in sections):
                found.append(f"{path.name}:{node.lineno} {node.name} {names}")
    assert found == []
    assert count > 500


def test_addresses_of_other_projects(tmp_path):
    """Lists of names become inventories that Sphinx reads: a head, and compressed lines."""
    import zlib

    inventories = _module("_extensions/inventories")
    found = inventories.mapping(DOCS / "inventories", tmp_path)
    assert set(found) == {"numpyro", "jax", "arviz"}
    for site, file in found.values():
        assert site.startswith("https://") and site.endswith("/")
        head, body = Path(file).read_bytes().split(b"zlib.\n", 1)
        assert head.startswith(b"# Sphinx inventory version 2\n")
        for line in zlib.decompress(body).decode().splitlines():
            name, kind, priority, address, shown = line.split(" ")
            assert kind in ("py:class", "py:function") and (priority, shown) == ("1", "-")
            assert name in address
