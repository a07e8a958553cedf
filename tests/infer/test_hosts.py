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
# Seconds. Most of the time is compilation, which every process does for itself: four processes
# need two minutes of processor time in all, which other work on the machine can make many more.
LIMIT = 500


def start(folder, count, what):
    """Processes of one fit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    return [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(count), str(port), folder, what],
            env=environment,
            stdout=(folder / f"{what}-{rank}.txt").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(count)
    ]


def ended(processes):
    """Return codes, within a limit of time."""
    deadline = time.monotonic() + LIMIT
    try:
        return [p.wait(timeout=max(deadline - time.monotonic(), 1)) for p in processes]
    finally:
        for process in processes:
            process.kill()


def results(folder, count, what):
    """What each process found."""
    folder.mkdir(exist_ok=True)
    codes = ended(start(folder, count, what))
    said = [(folder / f"{what}-{rank}.txt").read_text() for rank in range(count)]
    assert codes == [0] * count, "\n".join(said)[-5000:]
    return [json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one process with all rows finds."""
    (found,) = results(tmp_path_factory.mktemp("one"), 1, "everything")
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return results(tmp_path_factory.mktemp("two"), 2, "everything")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return results(tmp_path_factory.mktemp("four"), 4, "fits")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("several", ["two", "four"])
def test_processes_fit_as_one_does_and_agree_on_what_is_wrong(one, several, request):
    everyone = request.getfixturevalue(several)
    count = len(everyone)
    first, last = everyone[0], everyone[-1]
    names = ("losses", "made", "loss", "pass", "before", "after", "batches")
    for found in everyone:
        for name in (*names, "said"):
            assert found[name] == first[name], name
    for name in names:
        np.testing.assert_allclose(first[name], one[name], rtol=1e-10, err_msg=name)
    assert first["made"] == first["losses"]
    said = first["said"]
    size = 80 // count
    assert "index 77" in one["said"]["bad rows"]
    assert f"index {size - 3}" in said["bad rows"] and f"process, {80 - size}" in said["bad rows"]
    assert f"index {size // 2 - 3}" in said["bad batch"]
    for name in ("bad rows", "bad batch", "bad pass"):
        assert f"found by process {count - 1}" in said[name]
    assert "40 rows" in said["few rows"] and f"all {count} processes together" in said["few rows"]
    assert "random keys of the processes are not the same" in said["keys"]
    assert "inducing inputs of the processes are not the same" in said["inducing"]
    assert "each would make a fit of its own" in said["alone"]
    assert "each would make a fit of its own" in said["batches alone"]
    assert f"processes {list(range(1, count))} ended before" in said["ends"]
    if count == 2:
        for name in ("hyper", "mean", "predicted", "predictor", "loaded", "conditioned"):
            assert name not in last
            np.testing.assert_allclose(first[name], one[name], rtol=1e-9, err_msg=name)
        for name in ("marginals", "loo", "influence", "loo of batches"):
            both = np.concatenate([found["rows"][name] for found in everyone])
            np.testing.assert_allclose(both, one["rows"][name], rtol=1e-8, err_msg=name)
        assert [len(found["rows"]["log likelihood"]) for found in everyone] == [40, 40]
        assert one["gain"] is not None and first["gain"] is None


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_is_killed_and_all_go_on_from_the_checkpoint(tmp_path, four):
    codes = ended(start(tmp_path, 4, "killed"))
    assert all(codes), "the others end with an error, too"
    assert not list(tmp_path.glob("*.json")) and (tmp_path / "run.npz").exists()
    for found in results(tmp_path, 4, "resumed"):
        assert found["batches"] == four[0]["batches"], "bit for bit"
