"""Arrays go to other devices and shardings without the host."""

from __future__ import annotations

from pathlib import Path

from on_devices import printed_on_devices


def test_every_mesh_s_arrays_come_to_every_other_one_from_device_to_device():
    found = printed_on_devices(8, Path(__file__).with_name("resharding_by_devices.py"))
    assert found == {"cases": 7 * 6 * 2, "wrong": [], "shared": 0, "seen": True, "on_devices": [True, False, False]}
