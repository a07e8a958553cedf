"""Formulas as MathML, made when the site is built.

Browsers draw MathML themselves, so that a page needs neither a script nor a network to show its
mathematics.
"""

from typing import Any

from latex2mathml.converter import convert


def _formula(self: Any, latex: str, display: str) -> None:
    """Writes the formula, with its LaTeX as the text that is copied and read aloud."""
    mathml = convert(latex.strip(), display=display)
    label = self.attval(" ".join(latex.split()))
    self.body.append(mathml.replace("<math ", f'<math aria-label="{label}" ', 1))


def _inline(self: Any, node: Any) -> None:
    from docutils.nodes import SkipNode

    _formula(self, node.astext(), "inline")
    raise SkipNode


def _block(self: Any, node: Any) -> None:
    from docutils.nodes import SkipNode

    self.body.append(self.starttag(node, "div", CLASS="math formula"))
    _formula(self, node.astext(), "block")
    self.body.append("</div>\n")
    raise SkipNode


def setup(app: Any) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
