"""Recurrent layers: one running state, checkpoints every so many tokens and where a shared prompt ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_pools import run, serve

from jpaged.memory import (
    NO_BLOCK,
    Fit,
    FullAttention,
    GroupSpec,
    MemoryManager,
    Need,
    PinnedSequences,
    PoolLayout,
    SlidingWindow,
    StateCheckpoints,
)
from jpaged.memory.layout import spread_checkpoints
from jpaged.memory.policies import Policy

SIZE = 4
TOKENS = list(range(200))


@st.composite
def policies(draw: st.DrawFn) -> tuple[StateCheckpoints, int]:
    """A policy of a request whose own ends are decided, or not yet, and its block size."""
    size, blocks = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    spacing = draw(st.none() | st.integers(1, 4))
    policy: Policy = StateCheckpoints(size * blocks, spacing=None if spacing is None else size * blocks * spacing)
    policy = policy.for_request(0, draw(st.none() | st.integers(1, 90)))
    if draw(st.booleans()):
        begun = draw(st.integers(0, 12)) * size, draw(st.integers(0, 12)) * size
        policy = policy.for_prefix(*begun)
        if draw(st.booleans()):
            policy = policy.for_little_room(*begun)
    assert isinstance(policy, StateCheckpoints)
    return policy, size


def active(policy: Policy, length: int, size: int) -> set[int]:
    return {block for blocks in policy.active_blocks(length, size) for block in blocks}


def ends(policy: StateCheckpoints, most: int) -> list[int]:
    """Return where checkpoints lie, asked one by one."""
    inside, behind = policy.spacing or policy.interval, policy.interval
    return [
        n for n in range(1, most) if n % (inside if n < policy.dense_from else behind) == 0 or n in (policy.ends or ())
    ]


def test_a_state_lies_in_the_block_of_the_next_end():
    policy = StateCheckpoints(16)
    assert [sorted(active(policy, length, SIZE)) for length in (0, 1, 15, 16, 17)] == [[], [3], [3], [3], [7]]
    assert list(policy.placed(range(9), SIZE)) == [3, 7]
    assert list(policy.possible_prefix([False, True, False, True, False, False, False, True], SIZE)) == [0, 2, 4, 8]


def test_a_request_has_ends_of_its_own_where_it_begins_and_where_its_prompt_is_shared():
    policy = StateCheckpoints(16).for_prefix(8, 28)
    assert list(policy.placed(range(12), SIZE)) == [1, 3, 6, 7, 11]
    assert policy.for_prefix(4, 20) is policy, "it is decided once"
    assert StateCheckpoints(16).for_prefix(8, 4) == StateCheckpoints(16, (8,)), "what it begins with is behind it"
    assert StateCheckpoints(16).for_prefix(16, 32) == StateCheckpoints(16, ()), "regular ends need no word"
    hits = [True] * 8
    assert list(policy.possible_prefix(hits, SIZE)) == [0, 2, 4, 7, 8]


def test_a_block_is_full_once_it_holds_anything():
    policy = StateCheckpoints(16)
    assert [policy.filled_tokens(7, length, SIZE) for length in (16, 17, 32)] == [0, SIZE, SIZE]


@given(policies(), st.integers(0, 80))
def test_ends_before_and_after_a_length_are_the_nearest(case, length):
    policy, size = case
    known = ends(policy, 500)
    assert policy.end_before(length) == max((end for end in known if end < length), default=0)
    assert length == 0 or policy.end_after(length) == min(end for end in known if end >= length)
    assert policy.longest_prefix(length, size) == max((end for end in known if end <= length), default=0)
    assert list(policy.placed(range(length), size)) == [end // size - 1 for end in known if end <= length * size]
    assert list(policy.placed(range(length // 2, length), size)) == [
        end // size - 1 for end in known if (length // 2) * size < end <= length * size
    ]


@given(policies(), st.integers(0, 60), st.integers(1, 30))
def test_what_a_step_writes_was_active_or_is_new(case, length, tokens):
    policy, size = case
    written = policy.written_blocks(length, length + tokens, size)
    old = set(policy.placed(range(policy.num_blocks(length, size)), size))
    assert set(written) & old <= active(policy, length, size)
    assert active(policy, length + tokens, size) <= set(written)
    for entry in set(written) & old:
        assert policy.holds(entry, length, size), "a block that is changed has the running state"


@given(policies(), st.integers(0, 60))
def test_inactive_blocks_stay_inactive(case, length):
    policy, size = case
    gone = set(range(policy.num_blocks(length, size))) - active(policy, length, size)
    assert not gone & active(policy, length + 1, size)


@given(policies(), st.lists(st.integers(1, 30), max_size=12))
def test_peak_blocks_bounds_what_a_chunked_prefill_holds(case, chunks):
    policy, size = case
    length = sum(chunks)
    bound = policy.peak_blocks(length, max(chunks, default=1), size)
    computed = 0
    for chunk in chunks:
        new = range(policy.num_blocks(computed, size), policy.num_blocks(computed + chunk, size))
        assert len(active(policy, computed, size) | set(policy.placed(new, size))) <= bound
        computed += chunk
    assert bound <= len(policy.placed(range(policy.num_blocks(length, size)), size)) + len(policy.ends or ()) + 2


@given(policies(), st.integers(1, 60))
def test_capacity_is_the_inverse_of_num_blocks(case, length):
    policy, size = case
    blocks = policy.num_blocks(length, size)
    assert policy.capacity(blocks, size, length) >= length
    assert policy.capacity(blocks, size, length) in ends(policy, 500)


def test_inside_a_prompt_checkpoints_lie_further_apart_than_from_its_last_one_on():
    policy = StateCheckpoints(16, spacing=48).for_request(0, 150)
    assert isinstance(policy, StateCheckpoints)
    assert ends(policy, 200) == [48, 96, 144, 160, 176, 192]
    assert ends(StateCheckpoints(16, spacing=48), 60) == [16, 32, 48], "a prompt of unknown length ends anywhere"
    short = StateCheckpoints(16, spacing=48).for_request(0, 40)
    assert isinstance(short, StateCheckpoints) and ends(short, 60) == [32, 48]
    assert policy.peak_blocks(150, 150, SIZE) < StateCheckpoints(16).peak_blocks(150, 150, SIZE)
    shared = policy.for_prefix(16, 100)
    assert isinstance(shared, StateCheckpoints) and shared.ends == (16, 100), "what it began with is no regular end"


def test_an_interval_or_spacing_that_makes_no_sense_raises():
    with pytest.raises(ValueError, match="interval=0"):
        StateCheckpoints(0)
    with pytest.raises(ValueError, match="spacing=24 is not a multiple of interval=16"):
        StateCheckpoints(16, spacing=24)


# ------------------------------------------------------------------ how far apart they lie


def spacing(state_bytes: int, kv_bytes: int) -> int | None:
    """Spacing of checkpoints every 512 tokens, of a state of so many bytes beside so many of KV a token."""
    groups = [GroupSpec("state", state_bytes, 2, 16, StateCheckpoints(512))]
    if kv_bytes:
        groups.append(GroupSpec("full", 16 * kv_bytes, 1, 16, FullAttention()))
    policy = spread_checkpoints(groups)[0].policy
    assert isinstance(policy, StateCheckpoints)
    return policy.spacing


def test_checkpoints_lie_further_apart_the_larger_a_state_is_beside_the_kv_of_the_tokens_between():
    assert spacing(state_bytes=256, kv_bytes=1) == 512
    assert spacing(state_bytes=768, kv_bytes=1) == 1024
    assert spacing(state_bytes=1 << 20, kv_bytes=1) == 2048
    assert spacing(state_bytes=1, kv_bytes=0) == 2048, "without attention nothing but states fills the pool"


# ------------------------------------------------------------------ in the manager


def hybrid(num_pages: int = 40, interval: int = 16, **options) -> MemoryManager:
    """Full attention, a window and states; blocks of all are of one size, one a large page."""
    policies = (FullAttention(), SlidingWindow(6), StateCheckpoints(interval))
    specs = [GroupSpec(str(g), 8, 1, SIZE, policy) for g, policy in enumerate(policies)]
    return MemoryManager(PoolLayout.plan(specs, 8 * num_pages), prefix_caching=True, **options)


def states_only(num_pages: int = 10, **options) -> MemoryManager:
    spec = GroupSpec("state", 8, 1, SIZE, StateCheckpoints(16))
    return MemoryManager(PoolLayout.plan([spec], 8 * num_pages), prefix_caching=True, **options)


def held(manager: MemoryManager, seq_id: int, group: int) -> list[int]:
    return [i for i, block in enumerate(manager.block_table(seq_id, group)) if block != NO_BLOCK]


def ask(manager: MemoryManager, seq_id: int, tokens: list[int], **options) -> int:
    """The hit of a request that comes and goes."""
    hit = serve(manager, seq_id, tokens, **options)
    manager.free(seq_id)
    manager.check_invariants()
    return hit


def test_the_third_request_finds_the_prompt_that_it_shares_whole():
    for manager in (hybrid(), states_only()):
        prompts = [[*TOKENS[:29], 100 + i, *range(150, 157)] for i in range(4)]
        assert [ask(manager, i, prompt) for i, prompt in enumerate(prompts)] == [0, 16, 28, 28]


def test_salts_share_no_prompt():
    manager = hybrid()
    assert [ask(manager, i, TOKENS[:30], salt=salt) for i, salt in enumerate("aabab")] == [0, 16, 0, 28, 16]


def test_a_sequence_holds_one_state_and_the_checkpoints_stay_cached():
    manager = hybrid()
    serve(manager, 0, TOKENS[:37])
    assert held(manager, 0, 2) == [11], "the running state"
    assert manager.report().groups[2].evictable == 2
    assert manager.capacity(0) == 40, "the attention blocks' alone"
    run(manager, 0, TOKENS[:48], 37)
    assert held(manager, 0, 2) == [11]
    run(manager, 0, TOKENS[:49], 48)
    assert held(manager, 0, 2) == [15]
    assert manager.report().groups[2].waste == 0


def test_a_fork_copies_the_state_at_the_first_write_of_either_and_no_block_of_the_prompt():
    manager = hybrid()
    serve(manager, 0, TOKENS[:36])
    for child in (1, 2, 3):
        manager.fork(0, child)
    copies = [manager.allocate(seq_id, 37, first_write=36) for seq_id in (2, 0, 1, 3)]
    assert [[copy.group for copy in made] for made in copies] == [[2], [2], [2], []]
    assert len({manager.block_table(seq_id, 2)[11] for seq_id in range(4)}) == 4
    assert all(manager.block_table(seq_id, 0)[:9] == manager.block_table(0, 0)[:9] for seq_id in range(4))
    assert [manager.allocate(seq_id, 38, first_write=37) for seq_id in range(4)] == [[]] * 4
    manager.check_invariants()


def test_a_fork_at_the_end_of_a_checkpoint_copies_nothing():
    manager = hybrid()
    serve(manager, 0, TOKENS[:32])
    manager.fork(0, 1)
    assert manager.allocate(0, 33, first_write=32) == manager.allocate(1, 33, first_write=32) == []
    assert manager.block_table(0, 2)[7] == manager.block_table(1, 2)[7]


def test_a_step_that_crosses_checkpoints_takes_a_block_for_each():
    manager = hybrid()
    manager.add(0, 0)
    manager.allocate(0, 60, first_write=0)
    assert held(manager, 0, 2) == [3, 7, 11, 15]
    manager.commit(0, TOKENS, 60)
    assert held(manager, 0, 2) == [15]


def test_a_state_that_was_left_cannot_be_gone_back_to():
    manager = hybrid()
    serve(manager, 0, TOKENS[:40])
    with pytest.raises(ValueError, match="first_write=30 lies in a released block"):
        manager.allocate(0, 41, first_write=30)


def test_swapping_moves_the_running_state_only():
    manager = hybrid(swap_space_bytes=8 * 40)
    serve(manager, 0, TOKENS[:37])
    moved = manager.swap_space.move_out([0])
    assert [copy.group for copy in moved].count(2) == 1
    assert manager.swap_space.move_in([0]) is not None
    assert held(manager, 0, 2) == [11]
    run(manager, 0, TOKENS[:50], 37)
    manager.check_invariants()
    assert ask(manager, 1, TOKENS[:50]) == 48


def test_a_pinned_prefix_ends_where_it_was_asked_to():
    manager = hybrid()
    pins = PinnedSequences(manager, 20)
    manager.add(0, 0, kept_tokens=28)
    assert manager.match_prefix(0, TOKENS[:28]) == 0
    run(manager, 0, TOKENS[:28])
    manager.free(0)
    assert pins.pin(99, TOKENS[:29])
    assert held(manager, 99, 2) == [6] and held(manager, 99, 1) == [5, 6]
    assert manager.pinned_prefix(TOKENS[:40]) == 28
    assert ask(manager, 1, TOKENS[:40]) == 28
    pins.unpin(99)
    manager.check_invariants()


def test_a_request_that_could_begin_at_anybodys_checkpoint_is_promised_room_for_it():
    manager = states_only(3, watermark=0)
    assert manager.can_admit(Need(16)) is Fit.OK, "one state, and two for what it may begin with and others may"
    assert manager.can_admit(Need(17)) is Fit.NEVER
    assert MemoryManager(manager.layout, watermark=0).can_admit(Need(48)) is Fit.OK, (
        "without a prefix cache there are none"
    )


def test_admission_counts_a_matched_sequences_own_ends():
    manager = hybrid(watermark=0)
    manager.add(0, 0)
    assert manager.match_prefix(0, TOKENS[:20]) == 0
    manager.allocate(0, 20, first_write=0)
    assert manager.outstanding(0, 33)[2] == 1
    assert manager.outstanding(0, 32)[2] == 0


def test_an_earlier_requests_prefill_serves_a_later_one_up_to_its_last_end():
    manager = hybrid()
    manager.add(0, 0)
    manager.match_prefix(0, TOKENS[:30])
    manager.admitted(0)
    assert [manager.prefix_to_come(0, length) for length in (12, 16, 28)] == [0, 16, 16]
    manager.add(1, 1)
    manager.match_prefix(1, TOKENS[:30])
    assert [manager.prefix_to_come(1, length) for length in (12, 16, 28)] == [0, 16, 28]


# ------------------------------------------------------------------ in the pool

SHAPES = {
    # name: (attention layers, their bytes a block of 16 tokens, recurrent layers, their state's bytes)
    "Jamba-1.5-Mini": (4, 16 * 2 * 8 * 128 * 2, 28, 8192 * 16 * 4 + 8192 * 3 * 2),
    "Bamba-9B": (3, 16 * 2 * 8 * 128 * 2, 29, 128 * 64 * 128 * 4 + (8192 + 2 * 128) * 3 * 2),
    "Qwen3-Next-80B": (12, 16 * 2 * 2 * 256 * 2, 36, 32 * 128 * 128 * 4 + 8192 * 3 * 2),
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_padding_rows_keeps_the_pages_of_published_models_small_and_wastes_little(name, shards):
    layers, attention, recurrent, state = SHAPES[name]
    state = -(-state // shards // 4096) * 4096
    groups = [
        GroupSpec("full", attention // shards, layers, 16, FullAttention()),
        GroupSpec("state", state, recurrent, 16, StateCheckpoints(512), row_bytes=4096),
    ]
    layout = PoolLayout.plan(groups, 40 << 30)
    full, states = layout.groups
    assert full.padding == 0 and states.padding <= 0.03
    assert layout.page_bytes <= 2 * states.block_bytes
    assert states.num_blocks * states.layer_bytes * states.padded_layers == layout.pool_bytes, "a pure reshape"
    memory = MemoryManager(layout)
    for seq_id in range(12):
        length = 3000 + 1000 * (seq_id % 3)
        memory.add(seq_id, seq_id)
        assert memory.allocate(seq_id, length, first_write=0) is not None
        memory.commit(seq_id, range(length), length)
    report = memory.report()
    in_use = sum(group.used * group.block_bytes for group in report.groups)
    assert 1 - sum(group.token_bytes for group in report.groups) / in_use <= 0.05


def test_without_padding_their_pages_would_be_many_times_as_large():
    layers, attention, recurrent, state = SHAPES["Jamba-1.5-Mini"]
    groups = [
        GroupSpec("full", attention, layers, 16, FullAttention()),
        GroupSpec("state", state, recurrent, 16, StateCheckpoints(512)),
    ]
    layout = PoolLayout.plan(groups, 40 << 30)
    assert max(group.padding for group in layout.groups) > 0.05 or layout.page_bytes > 60 << 20
