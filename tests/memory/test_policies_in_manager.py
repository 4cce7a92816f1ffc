"""Kinds of layers other than plain attention, through the manager: what is held, shared, copied and hit."""

from __future__ import annotations

import pytest
from memory_pools import run, serve

from jpaged.memory import (
    NO_BLOCK,
    ChunkedLocalAttention,
    CrossAttention,
    Fit,
    FullAttention,
    GroupSpec,
    MemoryManager,
    Need,
    PoolLayout,
    SlidingWindow,
    StateCheckpoints,
    TokenBudget,
)

TOKENS = list(range(200))


def manager_of(*groups: tuple[object, int], num_blocks: int = 60, **options) -> MemoryManager:
    """Groups of (policy, block size) whose blocks are all of one size, one a large page."""
    specs = [GroupSpec(str(g), 8, 1, size, policy) for g, (policy, size) in enumerate(groups)]
    return MemoryManager(PoolLayout.plan(specs, 8 * num_blocks), **options)


def held(manager: MemoryManager, seq_id: int, group: int) -> list[int]:
    return [i for i, block in enumerate(manager.block_table(seq_id, group)) if block != NO_BLOCK]


def test_chunked_attention_gives_back_a_whole_chunk_when_the_next_begins():
    manager = manager_of((FullAttention(), 2), (ChunkedLocalAttention(8), 2))
    for length in range(1, 20):
        run(manager, 0, TOKENS[:length], length - 1) if length > 1 else serve(manager, 0, TOKENS[:1])
        assert held(manager, 0, 1) == list(range(length // 8 * 4, -(-length // 2)))


def test_a_hit_at_a_chunk_border_attaches_nothing_of_the_chunk_before():
    manager = manager_of((FullAttention(), 2), (ChunkedLocalAttention(8), 2), prefix_caching=True)
    serve(manager, 0, TOKENS[:16])
    manager.free(0)
    manager.add(1, 1)
    assert manager.match_prefix(1, TOKENS[:17]) == 16
    assert held(manager, 1, 1) == [] and len(held(manager, 1, 0)) == 8


def test_a_recurrent_group_holds_one_state_and_a_fork_copies_it():
    manager = manager_of((StateCheckpoints(1000), 1000))
    serve(manager, 0, TOKENS[:50])
    assert held(manager, 0, 0) == [0] and manager.capacity(0) == 1000
    manager.fork(0, 1)
    (copy,) = manager.allocate(1, 51, first_write=50)
    assert (copy.src, copy.dst) == (manager.block_table(0, 0)[0], manager.block_table(1, 0)[0])
    assert manager.allocate(0, 51, first_write=50) == []


def test_prefixes_of_a_recurrent_model_end_with_a_snapshot():
    manager = manager_of((FullAttention(), 2), (StateCheckpoints(8), 8), prefix_caching=True)
    serve(manager, 0, TOKENS[:21])
    assert held(manager, 0, 1) == [2], "snapshots are no longer owned"
    manager.free(0)
    manager.add(1, 1)
    assert manager.match_prefix(1, TOKENS[:21]) == 16
    assert held(manager, 1, 1) == [1] and len(held(manager, 1, 0)) == 8


def test_a_step_that_crosses_snapshots_takes_a_block_for_each():
    manager = manager_of((StateCheckpoints(8), 8))
    manager.add(0, 0)
    manager.allocate(0, 30, first_write=0)
    assert held(manager, 0, 0) == [0, 1, 2, 3]
    manager.commit(0, TOKENS, 30)
    assert held(manager, 0, 0) == [3]


def vision(**options) -> MemoryManager:
    return manager_of((FullAttention(), 4), (CrossAttention(), 2), **options)


def test_image_blocks_are_taken_with_the_first_token_and_never_again():
    manager = vision()
    manager.add(0, 0, encoder_tokens=5)
    manager.allocate(0, 1, first_write=0)
    assert [len(manager.block_table(0, g)) for g in (0, 1)] == [1, 3]
    manager.allocate(0, 40, first_write=1)
    assert [len(manager.block_table(0, g)) for g in (0, 1)] == [10, 3]
    assert manager.capacity(0) == 40
    assert manager.report({0: 40}).groups[1].token_bytes == 5 * 8 // 2


def test_a_fork_shares_the_images_for_good():
    manager = vision()
    manager.add(0, 0, encoder_tokens=4)
    run(manager, 0, TOKENS[:6])
    manager.fork(0, 1)
    for seq_id in (0, 1):
        run(manager, seq_id, TOKENS[:30], start=6)
    assert manager.block_table(0, 1) == manager.block_table(1, 1)


def test_the_same_image_hits_with_any_prefix_and_another_image_does_not():
    manager = vision(prefix_caching=True)

    def ask(seq_id, tokens, image):
        manager.add(seq_id, seq_id, encoder_tokens=4)
        hit = manager.match_prefix(seq_id, tokens, salt=image)
        run(manager, seq_id, tokens, hit)
        manager.free(seq_id)
        return hit

    assert ask(0, TOKENS[:9], "cat") == 0
    assert ask(1, [*TOKENS[:5], 77], "cat") == 4
    assert ask(2, TOKENS[:9], "dog") == 0
    assert ask(3, TOKENS[:9], "dog") == 8


def test_one_lost_image_block_loses_the_prefix():
    manager = vision(prefix_caching=True)
    manager.add(0, 0, encoder_tokens=4)
    manager.match_prefix(0, TOKENS[:9], salt="cat")
    run(manager, 0, TOKENS[:9])
    last = manager.block_table(0, 1)[1]
    manager.free(0)
    manager.parts.cache.forget(1, last)
    manager.add(1, 1, encoder_tokens=4)
    assert manager.match_prefix(1, TOKENS[:9], salt="cat") == 0


def test_admission_counts_the_images():
    manager = vision(num_blocks=10, watermark=0)
    assert manager.can_admit(Need(16, encoder_tokens=12)) is Fit.OK  # 4 + 6
    assert manager.can_admit(Need(16, encoder_tokens=13)) is Fit.NEVER
    assert manager.can_admit(Need(16, num_seqs=2, encoder_tokens=10)) is Fit.OK  # 4 + 5, and a copied tail


def test_encoder_tokens_are_refused_where_nobody_reads_them_or_the_request_has_others():
    with pytest.raises(ValueError, match="encoder_tokens=3: no layer group has cross-attention"):
        manager_of((FullAttention(), 4)).add(0, 0, encoder_tokens=3)
    with pytest.raises(ValueError, match="encoder_tokens=3: no layer group"):
        manager_of((FullAttention(), 4)).can_admit(Need(1, encoder_tokens=3))
    manager = vision()
    manager.add(0, 7, encoder_tokens=3)
    with pytest.raises(ValueError, match="encoder_tokens=4 is not the number of the request's other sequences, 3"):
        manager.add(1, 7, encoder_tokens=4)


def budgeted(**options) -> MemoryManager:
    return manager_of((FullAttention(), 4), (TokenBudget(sink=2, recent=4, top=6), 4), **options)


def test_the_table_of_a_token_budget_stops_growing():
    manager = budgeted()
    serve(manager, 0, TOKENS[:30])
    assert [len(manager.block_table(0, g)) for g in (0, 1)] == [8, 3]
    assert manager.report().groups[1].token_bytes == 12 * 8 // 4
    assert manager.capacity(0) == 32, "the other group alone decides"


def test_a_fork_beyond_the_budget_copies_the_whole_budget_once():
    manager = budgeted()
    serve(manager, 0, TOKENS[:16])
    manager.fork(0, 1)
    assert [copy.group for copy in manager.allocate(1, 17, first_write=16)] == [1, 1, 1]
    assert manager.allocate(1, 18, first_write=17) == manager.allocate(0, 17, first_write=16) == []


def test_a_prefix_within_the_budget_hits_until_its_owner_outgrows_the_budget():
    manager = budgeted(prefix_caching=True)
    serve(manager, 0, TOKENS[:12])
    assert serve(manager, 1, TOKENS[:12]) == 8
    copies = manager.allocate(0, 13, first_write=12)
    assert [copy.group for copy in copies] == [1, 1], "the two blocks that both hold"
    manager.free(0)
    assert serve(manager, 2, TOKENS[:12]) == 8, "the other sequence still holds what they shared"
    for seq_id in (1, 2):
        run(manager, seq_id, TOKENS[:13], start=12)
    assert serve(manager, 3, TOKENS[:12]) == 0


def test_a_draft_models_layers_are_one_more_group_of_the_same_sequence():
    manager = MemoryManager(
        PoolLayout.plan(
            [
                GroupSpec("target", layer_bytes=32, num_layers=6, block_size=4, policy=FullAttention()),
                GroupSpec("draft", layer_bytes=8, num_layers=2, block_size=4, policy=FullAttention()),
            ],
            192 * 20,
        ),
        prefix_caching=True,
    )
    assert [group.blocks_per_page for group in manager.layout.groups] == [1, 12]
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    assert [copy.group for copy in manager.allocate(1, 11, first_write=10)] == [0, 1]
    assert serve(manager, 2, TOKENS[:10]) == 8


def serve_in_blocks(manager: MemoryManager, number: int, prompt: list[int], block: int) -> None:
    """Serve a prompt, one block a step, and end it."""
    manager.add(number, number, prompt_tokens=len(prompt))
    cached = manager.match_prefix(number, prompt)
    for length in range(cached + block, len(prompt) + block, block):
        assert manager.allocate(number, length, first_write=length - block) is not None
        manager.commit(number, prompt, length)
        manager.check_invariants()
    manager.free(number)


@pytest.mark.parametrize("order, kept", [("aligned", True), ("predicted", True), ("lru", False)])
def test_blocks_that_a_window_passed_far_from_an_end_are_evicted_before_older_ones(order, kept):
    manager = manager_of((SlidingWindow(128), 64), num_blocks=20, prefix_caching=True, prefix_eviction=order)
    first, second = list(range(1280)), list(range(2000, 3280))
    for number, prompt in enumerate((first, second, second)):  # each takes all 20 blocks, two active ones at once
        serve_in_blocks(manager, number, prompt, 64)
    manager.add(9, 9)
    assert (manager.match_prefix(9, first) > 0) == kept


@pytest.mark.parametrize("question, found", [(64, 1024), (512, 1024), (640, 0)])
def test_another_question_about_a_document_finds_a_window_that_is_shorter_than_the_question(question, found):
    manager = manager_of((SlidingWindow(128), 64), num_blocks=30, prefix_caching=True)
    document = list(range(1024))
    serve_in_blocks(manager, 0, [*document, *range(2000, 2000 + question)], 64)
    serve_in_blocks(manager, 1, list(range(10_000, 11_600)), 64)
    manager.add(9, 9)
    assert manager.match_prefix(9, [*document, *range(3000, 3000 + question)]) == found
