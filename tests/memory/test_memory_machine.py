"""Random lives of sequences: after every operation all invariants hold and every sequence reads its own tokens."""

from __future__ import annotations

from typing import ClassVar

import pytest
from held_images import EMBEDDINGS, IMAGE_KV
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from memory_machine import Machine, bytes_for
from thorough import examples

from jpaged.memory import (
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    GroupSpec,
    PromptBudget,
    SlidingWindow,
    StateCheckpoints,
    TokenBudget,
)
from jpaged.memory.policies import VerifiedStates
from jpaged.memory.shared_blocks import SharedBlocks

FULL_3 = GroupSpec("full", layer_bytes=2, num_layers=3, block_size=3, policy=FullAttention())
FULL_4 = GroupSpec("wide", layer_bytes=1, num_layers=4, block_size=4, policy=FullAttention())
WINDOW_4 = GroupSpec("window", layer_bytes=2, num_layers=2, block_size=2, policy=SlidingWindow(4))
WINDOW_7 = GroupSpec("far", layer_bytes=1, num_layers=5, block_size=3, policy=SlidingWindow(7))
WINDOW_1 = GroupSpec("near", layer_bytes=1, num_layers=2, block_size=4, policy=SlidingWindow(1))


CHUNK_5 = GroupSpec("chunked", layer_bytes=1, num_layers=4, block_size=2, policy=ChunkedLocalAttention(5))
STATE = GroupSpec("state", layer_bytes=5, num_layers=2, block_size=6, policy=StateCheckpoints(6))
SPARSE = GroupSpec("sparse", layer_bytes=7, num_layers=2, block_size=3, policy=StateCheckpoints(12))
IMAGES = GroupSpec("images", layer_bytes=1, num_layers=3, block_size=2, policy=CrossAttention())
BUDGET_8 = GroupSpec("pyramid", layer_bytes=2, num_layers=2, block_size=3, policy=TokenBudget(1, 3, 4))
CUT = GroupSpec("prompt budget", layer_bytes=2, num_layers=2, block_size=3, policy=PromptBudget(6))
SPREAD = GroupSpec("spread states", layer_bytes=7, num_layers=2, block_size=3, policy=StateCheckpoints(6, spacing=12))
DRAFT = GroupSpec("draft", layer_bytes=1, num_layers=2, block_size=3, policy=FullAttention())
RING = GroupSpec("verified states", layer_bytes=7, num_layers=2, block_size=3, policy=VerifiedStates(3))


class OneGroup(Machine):
    groups = (FULL_3,)
    pool_bytes = 6 * 20
    swap_bytes = 6 * 9


class OneGroupUncached(OneGroup):
    caching = False


class TwoGroups(Machine):
    groups = (FULL_3, WINDOW_4)
    pool_bytes = 12 * 14
    swap_bytes = 12 * 14


class TwoGroupsPredicted(TwoGroups):
    eviction = "predicted"


class TwoGroupsUncached(TwoGroups):
    caching = False


class TwoFullGroups(Machine):
    groups = (FULL_4, FULL_3)
    pool_bytes = 12 * 15
    swap_bytes = 12 * 8 + 7


class ThreeGroups(Machine):
    groups = (WINDOW_7, FULL_4, WINDOW_1)
    pool_bytes = 20 * 16
    swap_bytes = 20 * 9


class RecurrentAndChunked(Machine):
    groups = (FULL_3, CHUNK_5, STATE)
    pool_bytes = 60 * 12
    swap_bytes = 60 * 7


class Recurrent(Machine):
    groups = (SPARSE,)
    pool_bytes = 14 * 20
    swap_bytes = 14 * 9


class Hybrid(Machine):
    groups = (FULL_3, WINDOW_7, SPARSE)
    pool_bytes = 210 * 6
    swap_bytes = 210 * 3


class HybridPredicted(Hybrid):
    eviction = "predicted"


class Everything(Machine):
    groups = (FULL_3, WINDOW_7, CHUNK_5, SPARSE, IMAGES, BUDGET_8)
    pool_bytes = 210 * 9
    swap_bytes = 210 * 4
    image_tokens: ClassVar[dict[str | None, int]] = {None: 3, "tenant": 6}


class Vision(Machine):
    groups = (FULL_3, IMAGES)
    pool_bytes = 6 * 24
    swap_bytes = 6 * 11
    image_tokens: ClassVar[dict[str | None, int]] = {None: 3, "tenant": 6}


class Budgeted(Machine):
    groups = (FULL_3, BUDGET_8)
    pool_bytes = 12 * 16
    swap_bytes = 12 * 9


class LongPrompts(Machine):
    groups = (FULL_3, SPREAD)
    pool_bytes = bytes_for(groups, 40, 2)
    swap_bytes = pool_bytes // 2


class Drafting(Machine):
    groups = (FULL_3, WINDOW_7, SPARSE, DRAFT, RING)
    pool_bytes = bytes_for(groups, 40, 2)
    swap_bytes = pool_bytes // 2


class Embeddings(Machine):
    groups = (FULL_3, WINDOW_7, EMBEDDINGS, DRAFT)
    pool_bytes = bytes_for(groups, 40, 2)
    swap_bytes = pool_bytes // 2


class ImageKV(Machine):
    groups = (FULL_3, WINDOW_7, SPARSE, IMAGE_KV)
    pool_bytes = bytes_for(groups, 40, 2)
    swap_bytes = pool_bytes // 2


class AllKinds(Machine):
    groups = (FULL_3, WINDOW_7, CHUNK_5, SPARSE, IMAGES, BUDGET_8, CUT, DRAFT, RING, EMBEDDINGS)
    pool_bytes = bytes_for(groups, 40, 3)
    swap_bytes = pool_bytes // 2
    image_tokens: ClassVar[dict[str | None, int]] = {None: 3, "tenant": 6}


COMMON = settings(
    max_examples=examples(60), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
SIMPLE, SLOW = settings(COMMON, max_examples=examples(150, of=8)), settings(COMMON, max_examples=examples(60, of=5))
for machine in (Recurrent, RecurrentAndChunked, Hybrid, HybridPredicted, TwoGroupsPredicted, Everything, LongPrompts):
    machine.TestCase.settings = COMMON
for machine in (Vision, Budgeted, Drafting, Embeddings, ImageKV):
    machine.TestCase.settings = COMMON
for machine in (OneGroup, OneGroupUncached, TwoGroups, TwoGroupsUncached, TwoFullGroups, ThreeGroups):
    machine.TestCase.settings = SIMPLE
AllKinds.TestCase.settings = SLOW
TestOneGroup = OneGroup.TestCase
TestOneGroupUncached = OneGroupUncached.TestCase
TestTwoGroups = TwoGroups.TestCase
TestTwoGroupsUncached = TwoGroupsUncached.TestCase
TestTwoFullGroups = TwoFullGroups.TestCase
TestThreeGroups = ThreeGroups.TestCase
TestRecurrentAndChunked = RecurrentAndChunked.TestCase
TestRecurrent = Recurrent.TestCase
TestHybrid = Hybrid.TestCase
TestHybridPredicted = HybridPredicted.TestCase
TestEverything = Everything.TestCase
TestVision = Vision.TestCase
TestTwoGroupsPredicted = TwoGroupsPredicted.TestCase
TestBudgeted = Budgeted.TestCase
TestLongPrompts = LongPrompts.TestCase
TestDrafting = Drafting.TestCase
TestEmbeddings = Embeddings.TestCase
TestImageKV = ImageKV.TestCase
TestAllKinds = AllKinds.TestCase

NOTICED = r"shared but empty|is another's|is still cached|are not its own"
MUTANT = settings(COMMON, max_examples=300, derandomize=True, database=None, phases=[Phase.generate])


@pytest.mark.parametrize("machine", [Embeddings, ImageKV])
def test_an_image_that_is_found_although_a_part_of_it_was_evicted_is_noticed(machine, monkeypatch):
    monkeypatch.setattr(SharedBlocks, "evicted", lambda self, block: None)
    with pytest.raises((AssertionError, RuntimeError), match=NOTICED):
        run_state_machine_as_test(machine, settings=MUTANT)


def test_a_state_that_is_not_copied_before_it_is_written_over_is_found(monkeypatch):
    monkeypatch.setattr(StateCheckpoints, "holds", lambda *args: False)
    with pytest.raises(AssertionError, match="reads another's KV"):
        run_state_machine_as_test(Recurrent, settings=MUTANT)
