"""Tables of the pages, made from the CSV files that benchmarks and experiments wrote.

    python docs/tables.py    # writes the tables of all pages anew

On a page a table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. NAME is a
function in one of the modules of ``docs/_tables/``, which are by topic; each of them may also have
`sentences`, those of the prose that have numbers in them. A test fails when a table or a sentence
is not what the CSV files say.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS)]

from _tables import benchmarks, guides, new_data, options, paper  # noqa: E402 (by the path above)

MARKED = re.compile(r"(<!-- table: (\w+) -->\n\n)((?:\|.*\n)*)(\n<!-- end of table -->)")
TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for topic in (benchmarks, paper, guides, new_data, options)
    for function in topic.TABLES
}


def sentences() -> Iterator[tuple[str, str]]:
    """Pages, and what must be said on them."""
    yield from benchmarks.sentences()
    yield from guides.sentences()


def filled(page: str) -> str:
    """A page with its tables made anew."""
    return MARKED.sub(lambda m: m[1] + TABLES[m[2]]() + m[4], page)


def pages() -> list[Path]:
    return [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


if __name__ == "__main__":
    for path in pages():
        text = path.read_text("utf8")
        if filled(text) != text:
            path.write_text(filled(text), "utf8")
            print(f"wrote {path.name}")
