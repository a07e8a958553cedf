"""Several processes on this machine, over the loopback interface: as one process would do it."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("hosts.py")
LIMIT = 240  # seconds, for processes that share few cores


def start(folder, count, kill=-1):
    """Processes of one fit, and when they were started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    return [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(count), str(port), folder, str(kill)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]


def ended(processes):
    """Return codes, within a limit of time."""
    deadline = time.monotonic() + LIMIT
    try:
        said = [p.communicate(timeout=max(deadline - time.monotonic(), 1))[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    return [p.returncode for p in processes], said


def results(folder, count):
    codes, said = ended(start(folder, count))
    assert codes == [0] * count, "\n".join(said)[-3000:]
    return [json.loads((folder / f"{count}-{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_fit_as_one_does_and_agree_on_what_is_wrong(tmp_path):
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
    (one,) = results(tmp_path / "1", 1)
    first, second = results(tmp_path / "2", 2)
    assert first == second
    for name in ("losses", "loss", "mean", "batches"):
        np.testing.assert_allclose(first[name], one[name], rtol=1e-10, err_msg=name)
    assert "index 77" in one["bad rows"] and "index 77" in first["bad rows"]
    assert "index 17" in first["bad batch"] and "process 1" in first["bad batch"]
    assert "random keys of the processes are not the same" in first["keys"]
    assert "processes [1] ended before" in first["ends"]
    # One is killed in the middle: the other ends, and both go on from the checkpoint.
    folder = tmp_path / "killed"
    folder.mkdir()
    codes, _ = ended(start(folder, 2, kill=6))
    assert all(codes)
    assert not list(folder.glob("*.json"))
    codes, said = ended(start(folder, 2, kill=1000))
    assert codes == [0, 0], "\n".join(said)[-3000:]
    resumed = json.loads((folder / "2-0.json").read_text())
    np.testing.assert_array_equal(resumed["batches"], first["batches"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_processes(tmp_path):
    losses = {}
    for count in (1, 4):
        folder = tmp_path / str(count)
        folder.mkdir()
        codes, said = ended(start(folder, count, kill=1000))  # the run on batches alone
        assert codes == [0] * count, "\n".join(said)[-3000:]
        losses[count] = json.loads((folder / f"{count}-{count - 1}.json").read_text())["batches"]
    np.testing.assert_allclose(losses[4], losses[1], rtol=1e-10)
