"""Drawn loads make the device calls that they made before, argument by argument, in engines of the same shapes.

The device computes nothing (`scripted_device.py`). A change that means to change calls or shapes writes
device_calls.json
anew, see `calls_of_loads.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from on_devices import printed_on_devices

HERE = Path(__file__).parent
KNOWN = json.loads((HERE / "device_calls.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    return printed_on_devices(4, HERE / "calls_of_loads.py", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("load", sorted(KNOWN))
def test_a_load_makes_the_calls_it_made_before(load: str, found: dict[str, dict[str, object]]):
    assert found[load]["calls"] == KNOWN[load]["calls"]
    assert found[load]["digest"] == KNOWN[load]["digest"]


@pytest.mark.parametrize("load", sorted(KNOWN))
def test_an_engine_compiles_the_shapes_it_compiled_before(load: str, found: dict[str, dict[str, object]]):
    assert (found[load]["shapes"], found[load]["names"]) == (KNOWN[load]["shapes"], KNOWN[load]["names"])
