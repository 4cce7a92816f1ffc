"""The fuzz of the memory in its short form: all kinds of layers in one pool."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fuzz_memory import POOLS, fuzz

from jpaged.memory import StateCheckpoints
from jpaged.memory.images import ImageBlocks


def test_random_lives_over_every_kind_of_layer_leak_nothing():
    counts = fuzz(500 * len(POOLS), seed=0, per_pool=500)
    assert all(counts[pool] == 500 for pool in POOLS)
    assert all(counts[what] for what in ("hit tokens", "forks", "swaps", "finished", "preempted", "images"))


@pytest.mark.nightly
def test_a_million_operations_leak_nothing():
    assert fuzz(1_000_000, seed=1)["images"]


@pytest.mark.parametrize("kind", ["embeddings", "image KV"])
def test_an_image_that_is_found_although_a_part_of_it_was_evicted_is_noticed(kind, monkeypatch):
    monkeypatch.setattr("fuzz_memory.POOLS", {kind: POOLS[kind]})
    monkeypatch.setattr(ImageBlocks, "lost", lambda self, block: None)
    with pytest.raises((AssertionError, RuntimeError), match=r"shared but empty|is another's|is still cached"):
        fuzz(4000, seed=0, per_pool=1000)


def test_a_state_that_is_not_copied_before_it_is_written_over_is_found(monkeypatch):
    monkeypatch.setattr(StateCheckpoints, "holds", lambda *args: False)
    with pytest.raises(AssertionError, match="reads another's KV"):
        fuzz(2000, seed=0, per_pool=500)
