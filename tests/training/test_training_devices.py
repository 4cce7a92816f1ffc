"""Training and new weights over two devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from on_devices import printed_on_devices


@pytest.mark.nightly
def test_two_devices_agree_with_one(tmp_path):
    make_checkpoint("llama", tmp_path)
    found = printed_on_devices(2, Path(__file__).with_name("training_by_devices.py"), tmp_path)
    for one, two in (found["values"], found["norms"]):
        assert two == pytest.approx(one, rel=1e-4)
    assert found["bits"] and found["same"] and found["again"]
