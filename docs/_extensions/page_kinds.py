"""Each page says above its title what it is: a tutorial, a guide, an explanation, or reference.

The kinds are the captions of the tables of contents on the first page, so a page has its kind
from its place there and from nothing else.
"""

from typing import Any

from docutils import nodes
from sphinx import addnodes

KINDS = {
    "Tutorials": "Tutorial",
    "How-to guides": "How-to guide",
    "Explanation": "Explanation",
    "Reference": "Reference",
}


def _kinds(app: Any) -> dict[str, str]:
    """Kind of each page, those below a listed page included."""
    found: dict[str, str] = {}

    def visit(page: str, kind: str) -> None:
        found[page] = kind
        for child in app.env.toctree_includes.get(page, ()):
            visit(child, kind)

    for toctree in app.env.get_doctree(app.config.root_doc).findall(addnodes.toctree):
        for _, page in toctree["entries"]:
            if page in app.env.found_docs:
                visit(page, KINDS[toctree["caption"]])
    return found


def _label(app: Any, doctree: nodes.document, page: str) -> None:
    kind = _kinds(app).get(page)
    title = next(doctree.findall(nodes.title), None)
    if kind is not None and title is not None:
        paragraph = nodes.paragraph("", kind, classes=["page-kind"])
        title.parent.insert(title.parent.index(title), paragraph)


def setup(app: Any) -> dict[str, Any]:
    app.connect("doctree-resolved", _label)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
