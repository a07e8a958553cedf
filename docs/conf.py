"""Sphinx configuration. Build with ``python -m sphinx -W -b html docs docs/_build/html``.

Nothing here needs a network: formulas become MathML while the site is built, and the addresses of
other projects' pages come from the short lists in ``inventories/``.
"""

import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_extensions")]

import inventories  # noqa: E402 (found by the path above)

project = "numpyro_tsvgp"
author = "the numpyro_tsvgp developers"
copyright = "2026, " + author  # noqa: A001 (Sphinx's name)
try:
    release = metadata.version("numpyro-tsvgp")
except metadata.PackageNotFoundError:  # built from a source tree that is not installed
    release = "development"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "offline_math",
    "page_kinds",
]
exclude_patterns = ["_build", "_setup"]
nitpicky = False

myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

intersphinx_mapping = inventories.mapping(HERE / "inventories", HERE / "_build" / "inventories")

html_theme = "furo"
html_title = f"numpyro_tsvgp {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.output) > div.highlight > pre"  # code, not what it printed
