"""Set-up shared by the suite: precision, BLAS threads, plotting backend, data.

The suite runs in float64. With ``TSVGP_TEST_FLOAT32=1`` JAX stays in float32, and only tests
marked ``float32`` run; the others are skipped.

There are two tiers. Every capability is in the fast one. Tests marked ``slow`` (long fits,
samplers, killed processes, published numbers, further cases of the same) and examples of docstrings
that fit a model are skipped unless the option ``--slow`` is given or ``TSVGP_TEST_SLOW=1`` is set.

Compiled programs are kept in a folder that all processes of a run share and that is gone after it:
most of the time is compilation, and the same program is often compiled by several objects. To keep
them between runs set ``JAX_COMPILATION_CACHE_DIR`` (JAX's own variable) to a folder on the machine;
a compiled CPU program is tied to the machine it was made on. Set it to an empty string for none.
"""

import atexit
import gc
import os
import re
import shutil
import tempfile

# Before JAX (and the BLAS it borrows from SciPy) is loaded: BLAS threads spin against XLA's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# The suite spends its time compiling small programs that then run for milliseconds. With this
# they compile in two thirds of the time; set it to 0 to test what users run, which is optimised.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # in workers it is that of their parent
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="tsvgp_tests_")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

# Compiled programs stay for the whole session: looking for garbage among them is in vain.
gc.set_threshold(100_000, 50, 1000)

FLOAT32 = os.environ.get("TSVGP_TEST_FLOAT32", "") not in ("", "0")
jax.config.update("jax_enable_x64", not FLOAT32)
FITS = re.compile(r"\.run\(|TSVGP\(|Stream\(")  # in the text of an example
SLOW = os.environ.get("TSVGP_TEST_SLOW", "") not in ("", "0")

DATA = Path(__file__).parent / "data"

# Scripts that tests start in processes of their own.
collect_ignore = ["infer/devices.py", "infer/hosts.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", default=SLOW, help="run slow tests, too")


def pytest_report_header(config: pytest.Config) -> str:
    precision = "float32" if FLOAT32 else "float64"
    tiers = "both tiers" if config.getoption("slow") else "fast tier"
    return f"jax {jax.__version__}, {jax.default_backend()}, {precision}, {tiers}"


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = config.getoption("slow")
    too_slow = pytest.mark.skip(reason="slow (--slow or TSVGP_TEST_SLOW=1 runs it)")
    need64 = pytest.mark.skip(reason="needs float64 (TSVGP_TEST_FLOAT32 is set)")
    need32 = pytest.mark.skip(reason="float32 session only (set TSVGP_TEST_FLOAT32=1)")
    for item in items:
        # An example that fits a model compiles one of its own, as tests of the same thing do.
        if isinstance(item, pytest.DoctestItem) and FITS.search(item.dtest.docstring):
            item.add_marker("slow")
        if not slow and item.get_closest_marker("slow") is not None:
            item.add_marker(too_slow)
        marker = item.get_closest_marker("float32")
        if FLOAT32 and marker is None:
            item.add_marker(need64)
        elif not FLOAT32 and marker is not None and marker.kwargs.get("only", False):
            item.add_marker(need32)


@pytest.fixture(autouse=True)
def _precision_is_restored():
    """A test that switches precision must not change it for the next one."""
    yield
    if jax.config.jax_enable_x64 == FLOAT32:
        jax.config.update("jax_enable_x64", not FLOAT32)


class Data(NamedTuple):
    """Inputs and targets, as read-only float64 NumPy arrays; ``X, y = banana`` works."""

    X: np.ndarray
    y: np.ndarray


def _load(name: str, columns: int) -> Data:
    table = np.loadtxt(DATA / name, delimiter=",", skiprows=1, ndmin=2)
    assert table.shape[1] == columns and np.isfinite(table).all()
    table.setflags(write=False)
    return Data(table[:, :-1], table[:, -1])


@pytest.fixture(scope="session")
def banana() -> Data:
    """Binary classification: X of shape (400, 2), y of shape (400,) with values 0.0 and 1.0."""
    data = _load("banana.csv", 3)
    assert data.X.shape == (400, 2)
    return data


@pytest.fixture(scope="session")
def mcycle() -> Data:
    """Regression: X of shape (133, 1), time in ms; y of shape (133,), acceleration in g."""
    data = _load("mcycle.csv", 2)
    assert data.X.shape == (133, 1)
    return data
