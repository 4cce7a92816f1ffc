"""Tunix trains on other devices than the engine's: weights go over from device to device."""

from __future__ import annotations

from pathlib import Path

import wanted
from checkpoints import make_checkpoint
from on_devices import printed_on_devices
from tiny_chat_model import make_chat_model

wanted.module("tunix")


def test_weights_of_any_mesh_give_the_tokens_and_scores_of_those_given_directly(tmp_path):
    make_chat_model(tmp_path / "chat")
    make_checkpoint("deepseek_v3", tmp_path / "experts")
    found = printed_on_devices(
        8, Path(__file__).with_name("tunix_by_devices.py"), tmp_path / "chat", tmp_path / "experts"
    )
    assert found["meshes"] == dict.fromkeys(["the engine's", "others", "more", "fewer", "three"], True)
    assert found["training"] == {"steps": 4, "moved": True, "equal": True, "trainer": True}
    assert "2 devices that are not the engine's 2: with enable_expert_parallel=True it must stay" in found["refused"]
