"""Training and new weights over two devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint


@pytest.mark.nightly
def test_two_devices_agree_with_one(tmp_path):
    make_checkpoint("llama", tmp_path)
    flags = "--xla_force_host_platform_device_count=2"
    program = Path(__file__).with_name("training_by_devices.py")
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    for one, two in (found["values"], found["norms"]):
        assert two == pytest.approx(one, rel=1e-4)
    assert found["bits"] and found["same"] and found["again"]
