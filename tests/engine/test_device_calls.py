"""Drawn loads make the device calls that they made before, argument by argument, in engines of the same shapes.

The device computes nothing (`scripted_device.py`). A change that means to change calls or shapes writes
device_calls.json
anew, see `calls_of_loads.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_data_parallel import FOUR_DEVICES

HERE = Path(__file__).parent
KNOWN = json.loads((HERE / "device_calls.json").read_text())
MODULES = os.pathsep.join([str(HERE), str(HERE.parent / "models"), str(HERE.parent)])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    command = [sys.executable, str(HERE / "calls_of_loads.py"), str(tmp_path_factory.mktemp("models"))]
    path = os.pathsep.join(filter(None, [MODULES, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, env=os.environ | FOUR_DEVICES | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("load", sorted(KNOWN))
def test_a_load_makes_the_calls_it_made_before(load: str, found: dict[str, dict[str, object]]):
    assert found[load]["calls"] == KNOWN[load]["calls"]
    assert found[load]["digest"] == KNOWN[load]["digest"]


@pytest.mark.parametrize("load", sorted(KNOWN))
def test_an_engine_compiles_the_shapes_it_compiled_before(load: str, found: dict[str, dict[str, object]]):
    assert (found[load]["shapes"], found[load]["names"]) == (KNOWN[load]["shapes"], KNOWN[load]["names"])
