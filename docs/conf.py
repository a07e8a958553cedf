"""Sphinx configuration. Build with ``python -m sphinx -W -b html docs docs/_build/html``."""

import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

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
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
nitpicky = False

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # the signatures of JAX types are long, and Args says what they are
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "numpyro_tsvgp"
html_theme_options = {"navigation_with_keys": True}
