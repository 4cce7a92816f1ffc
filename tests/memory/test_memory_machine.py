"""Random lives of sequences: after every operation all invariants hold and every sequence reads its own tokens."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import HealthCheck, settings
from memory_machine import Machine
from thorough import examples

from jpaged.memory import (
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    GroupSpec,
    SlidingWindow,
    StateCheckpoints,
    TokenBudget,
)

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


COMMON = settings(
    max_examples=examples(150), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
for machine in (OneGroup, OneGroupUncached, TwoGroups, TwoGroupsUncached, TwoFullGroups, ThreeGroups):
    machine.TestCase.settings = COMMON
for machine in (RecurrentAndChunked, Vision, Budgeted, TwoGroupsPredicted):
    machine.TestCase.settings = settings(COMMON, max_examples=60)
for machine in (Recurrent, Hybrid, HybridPredicted, Everything):  # `test_random_lives.py` goes further
    machine.TestCase.settings = settings(COMMON, max_examples=examples(60))
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
