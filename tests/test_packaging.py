"""What an installed package promises: a version, types, a light import, and honest archives."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import numpyro_tsvgp

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
# Brought by diagnostics, plotting, optimizers and fits, none of which every user needs at once.
HEAVY = (
    "arviz",
    "arviz_base",
    "xarray",
    "pandas",
    "matplotlib",
    "optax",
    "threadpoolctl",
    "tinygp",
)


def test_the_import_is_light():
    """NumPyro and what it brings itself, but nothing else that takes time to load."""
    code = (
        "import sys, numpyro; before = set(sys.modules); import numpyro_tsvgp; "
        f"print([m for m in {HEAVY!r} if m in set(sys.modules) - before])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_every_public_name_is_there_and_has_a_docstring():
    for name in numpyro_tsvgp.__all__:
        thing = getattr(numpyro_tsvgp, name)
        assert (thing.__doc__ or "").strip(), name
    assert set(numpyro_tsvgp.__all__) <= set(dir(numpyro_tsvgp))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = numpyro_tsvgp.nothing


def test_the_version_is_that_of_the_project_and_has_a_changelog_entry():
    assert numpyro_tsvgp.__version__ in (PROJECT["version"], "0+unknown")
    changelog = (ROOT / "docs" / "changelog.md").read_text("utf8")
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == PROJECT["version"]


def test_the_archives_hold_what_they_should(tmp_path):
    pytest.importorskip("hatchling")
    code = (
        "from hatchling import build; "
        f"build.build_sdist({str(tmp_path)!r}); build.build_wheel({str(tmp_path)!r})"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (sdist,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert "numpyro_tsvgp/py.typed" in names and "numpyro_tsvgp/infer/em/tsvgp.py" in names
    top = {name.split("/")[0] for name in names}
    assert top == {"numpyro_tsvgp", f"numpyro_tsvgp-{PROJECT['version']}.dist-info"}
    assert any(name.endswith("LICENSE") for name in names)
    assert "Description-Content-Type: text/markdown" in metadata

    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "tests/conftest.py",
        "tests/data/banana.csv",
        "examples/quickstart.py",
        "examples/_common.py",
        "examples/data/README.md",
        "examples/data/digits.npz",
        "docs/conf.py",
        "docs/index.md",
    ):
        assert needed in names, needed
