"""The README's code runs as it stands, and so does every example in its quick form."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py"))


def test_the_code_of_the_readme_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    # The claims of the text around it: a fit that learned something, predictions at new inputs.
    losses = namespace["result"].losses
    assert losses[-1] < losses[0] - 10
    assert namespace["mean"].shape == namespace["variance"].shape == (300,)
    assert namespace["y_new"].shape == (100, 300)


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example(script, tmp_path):
    picture = tmp_path / "picture.png"
    run = subprocess.run(
        [sys.executable, script, "--quick", "--output", picture],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert run.returncode == 0, run.stderr
    assert picture.stat().st_size > 5000
