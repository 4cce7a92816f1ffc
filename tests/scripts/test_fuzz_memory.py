"""The fuzz of the memory in its short form: all kinds of layers in one pool."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fuzz_memory import POOLS, fuzz

from jpaged.memory import StateCheckpoints


def test_random_lives_over_every_kind_of_layer_leak_nothing():
    counts = fuzz(2000, seed=0, per_pool=500)
    assert all(counts[pool] == 500 for pool in POOLS)
    assert all(counts[what] for what in ("hit tokens", "forks", "swaps", "finished", "preempted"))


def test_a_state_that_is_not_copied_before_it_is_written_over_is_found(monkeypatch):
    monkeypatch.setattr(StateCheckpoints, "holds", lambda *args: False)
    with pytest.raises(AssertionError, match="reads another's KV"):
        fuzz(2000, seed=0, per_pool=500)
