"""Random lives of sequences over a pool of all kinds of layers at once, with images and pins.

Every operation is one that a scheduler makes. A shadow of the pool holds, instead of KV and states, the name of the
prefix that each block was computed from; a layer that would read another's is noticed at the next step. When memory is
short the newest sequence gives up its own, so that the oldest always ends.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import cycle

import pytest
from fuzz_lives import Fuzz
from fuzz_pools import POOLS

from jpaged.memory import StateCheckpoints
from jpaged.memory.shared_blocks import ImageBlocks


def fuzz(
    operations: int,
    seed: int,
    *,
    per_pool: int = 2000,
    check_every: int = 100,
) -> Counter[str]:
    """Make so many operations over pools of every kind, and return how many there were of each sort.

    Raises:
        AssertionError: something leaked, was overwritten while in use, or did not end.
    """
    rng, counts, done = random.Random(seed), Counter[str](), 0
    for name in cycle(POOLS):
        if done >= operations:
            break
        pool = Fuzz(POOLS[name], rng, rng.choice(["lru", "aligned", "predicted"]), rng.randint(0, 4))
        for number in range(min(per_pool, operations - done)):
            try:
                pool.run()
                if number % check_every == 0:
                    pool.check_all()
            except Exception as error:
                error.add_note(f"operation {done + number} of seed {seed}, in the pool {name!r}")
                raise
        done += number + 1
        pool.end_all()
        counts += pool.counts
        counts[name] += number + 1
    return counts


def test_random_lives_over_every_kind_of_layer_leak_nothing():
    counts = fuzz(500 * len(POOLS), seed=0, per_pool=500)
    assert all(counts[pool] == 500 for pool in POOLS)
    assert all(counts[what] for what in ("hit tokens", "forks", "swaps", "finished", "preempted", "images"))


@pytest.mark.nightly
def test_a_million_operations_leak_nothing():
    assert fuzz(1_000_000, seed=1)["images"]


@pytest.mark.parametrize("kind", ["embeddings", "image KV"])
def test_an_image_that_is_found_although_a_part_of_it_was_evicted_is_noticed(kind, monkeypatch):
    monkeypatch.setitem(globals(), "POOLS", {kind: POOLS[kind]})
    monkeypatch.setattr(ImageBlocks, "evicted", lambda self, block: None)
    with pytest.raises((AssertionError, RuntimeError), match=r"shared but empty|is another's|is still cached"):
        fuzz(4000, seed=0, per_pool=1000)


def test_a_state_that_is_not_copied_before_it_is_written_over_is_found(monkeypatch):
    monkeypatch.setattr(StateCheckpoints, "holds", lambda *args: False)
    with pytest.raises(AssertionError, match="reads another's KV"):
        fuzz(2000, seed=0, per_pool=500)
