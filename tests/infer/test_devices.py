"""Rows that are spread over devices: the numbers of one device, and no row travels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_devices_do_what_one_does():
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("devices.py")
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]
