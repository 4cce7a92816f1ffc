"""Prefixes that recent requests shared are kept for the next one, as far as that pays."""

from __future__ import annotations

import pytest
from memory_pools import full_manager, serve, window_manager

from jpaged.config import EngineConfig
from jpaged.memory import ChunkedLocalAttention, Fit, GroupSpec, MemoryManager, Need, PoolLayout
from jpaged.memory.prefix_prediction import Candidate, protected_bytes

SYSTEM = list(range(1000, 1008))


def predicting(num_blocks: int = 10, limit: int | None = None, **options) -> MemoryManager:
    """Blocks of 4 tokens and 8 bytes; `limit` blocks can be protected."""
    manager = full_manager(num_blocks, 4, prefix_caching=True, prefix_eviction="predicted", watermark=0, **options)
    return limited(manager, 8 * (num_blocks if limit is None else limit))


def limited(manager: MemoryManager, num_bytes: int) -> MemoryManager:
    predicted = manager.parts.predicted
    predicted.limit_bytes = num_bytes
    predicted.choose_limit = lambda sequence: num_bytes
    return manager


def ask(manager: MemoryManager, seq_id: int, tokens: list[int]) -> int:
    hit = serve(manager, seq_id, tokens)
    manager.free(seq_id)
    manager.check_invariants()
    return hit


def protected(manager: MemoryManager, group: int = 0) -> int:
    return len(manager.parts.allocator.groups[group].protected)


def test_what_one_request_began_with_is_not_yet_predicted():
    manager = predicting()
    ask(manager, 0, [*SYSTEM, 1, 2, 3, 4])
    assert protected(manager) == 0


def test_what_two_requests_began_with_is_protected_and_the_rest_is_not():
    manager = predicting()
    ask(manager, 0, [*SYSTEM, 1, 2, 3, 4, 5])
    assert ask(manager, 1, [*SYSTEM, 6, 7, 8, 9, 10]) == 8
    assert protected(manager) == 2
    assert len(manager.parts.allocator.groups[0].evictable) == 2


def test_requests_that_share_nothing_lose_each_others_blocks_first():
    kept = {}
    for eviction in ("aligned", "predicted"):
        manager = full_manager(10, 4, prefix_caching=True, prefix_eviction=eviction, watermark=0)
        if eviction == "predicted":
            limited(manager, 16)
        for i in range(2):
            ask(manager, i, [*SYSTEM, i])
        for i in range(2, 6):
            ask(manager, i, [i] * 20)
        kept[eviction] = ask(manager, 9, [*SYSTEM, 9])
    assert kept == {"aligned": 0, "predicted": 8}


def test_prefixes_of_which_nothing_is_active_cost_nothing():
    chunks = GroupSpec("chunked", layer_bytes=8, num_layers=1, block_size=4, policy=ChunkedLocalAttention(4))
    manager = MemoryManager(
        PoolLayout.plan([chunks], 80), prefix_caching=True, prefix_eviction="predicted", watermark=0
    )
    for i in range(3):
        assert ask(manager, i, [*SYSTEM, 1, 2, 3]) == 8  # no layer reads what lies before the last chunk


def test_a_new_request_waits_rather_than_take_protected_blocks():
    manager = predicting(10)
    for i in range(2):
        ask(manager, i, [*SYSTEM, i])
    assert protected(manager) == 2
    serve(manager, 5, [5] * 4)
    assert manager.can_admit(Need(7 * 4)) is Fit.OK
    assert manager.can_admit(Need(8 * 4)) is Fit.LATER
    manager.free(5)
    assert manager.can_admit(Need(10 * 4)) is Fit.OK, "nobody runs: waiting would never end"


def test_a_running_request_takes_them_before_anybody_is_preempted():
    manager = predicting(10)
    for i in range(2):
        ask(manager, i, [*SYSTEM, i])
    serve(manager, 5, [5] * 32)
    assert protected(manager) == 2
    assert manager.allocate(5, 40, first_write=32) == []
    assert protected(manager) == 0
    manager.check_invariants()


def test_overflow_joins_the_others_as_the_most_recently_needed():
    manager = predicting(20, limit=2)
    for i in range(2):
        ask(manager, i, [*SYSTEM, i])
    for i in range(2, 4):
        ask(manager, i, [7] * 8 + [i])
    assert protected(manager) == 2
    group = manager.parts.allocator.groups[0]
    newest = [manager.parts.cache.link(0, block) for block in group.evictable][-2:]
    chain = manager.parts.cache.chains()[4]
    chain.extend(SYSTEM, 2)
    assert newest == chain.links[::-1], "the system prompt gave way to what was shared last, its tail first"


def test_a_prefix_longer_than_the_pool_is_protected_as_far_as_it_fits():
    manager = predicting(20, limit=3)
    for i in range(2):
        ask(manager, i, [*range(40), i])
    assert protected(manager) == 3
    chain = manager.parts.cache.chains()[4]
    chain.extend(list(range(40)), 3)
    assert {manager.parts.cache.find(0, link) for link in chain.links} == set(
        manager.parts.allocator.groups[0].protected
    )


def test_what_a_request_generated_counts_for_the_next_turn():
    manager = predicting(20)
    first = list(range(8))
    manager.add(0, 0)
    manager.match_prefix(0, first)
    manager.allocate(0, 16, first_write=0)
    manager.commit(0, list(range(16)), 16)
    manager.free(0)
    assert ask(manager, 1, list(range(20))) == 16
    assert protected(manager) == 4


def test_a_window_protects_what_lies_before_the_end_of_the_prefix():
    manager = window_manager(40, window=4, prefix_caching=True, prefix_eviction="predicted", watermark=0)
    limited(manager, 10**6)
    for i in range(2):
        manager.add(i, i)
        hit = manager.match_prefix(i, [*SYSTEM, *[i] * 8])
        for length in range(hit + 2, 18, 2):
            assert manager.allocate(i, length, first_write=length - 2) is not None
            manager.commit(i, [*SYSTEM, *[i] * 8], length)
        manager.free(i)
    assert (protected(manager, 0), protected(manager, 1)) == (4, 2)
    manager.check_invariants()


def test_a_request_that_returns_after_preemption_does_not_share_with_itself():
    manager = predicting()
    ask(manager, 0, [*SYSTEM, 1])
    ask(manager, 0, [*SYSTEM, 1])
    assert protected(manager) == 0


def test_forgetting_the_cache_forgets_protected_blocks():
    manager = predicting()
    for i in range(2):
        ask(manager, i, [*SYSTEM, i])
    assert manager.reset_prefix_cache()
    manager.check_invariants()
    assert manager.report().free_pages == 10


def test_a_request_that_ends_after_hundreds_that_came_later_is_still_known():
    manager = full_manager(1000, 4, prefix_caching=True, prefix_eviction="predicted", watermark=0)
    serve(manager, 0, [7] * 30)
    for i in range(1, 300):
        ask(manager, i, [i] * 5)
    manager.free(0)
    assert manager.parts.recent.entries[0].num_bytes == 7 * 8


def test_an_end_looks_at_no_more_requests_on_the_average_however_many_ran_at_once(monkeypatch):
    manager, looked = full_manager(4000, 4, prefix_caching=True, prefix_eviction="predicted", watermark=0), []
    monkeypatch.setattr(
        manager.parts.predicted, "choose_limit", lambda sequence: looked.append(len(manager.parts.recent.entries)) or 0
    )
    for i in range(512):
        serve(manager, i, [i] * 5)
    for i in range(512):
        manager.free(i)
    assert set(looked) == {512} and sum(looked) <= 128 * 512


def test_an_unknown_order_of_eviction_is_refused():
    with pytest.raises(ValueError, match="prefix_eviction='newest' is not one of lru, aligned, predicted"):
        full_manager(prefix_eviction="newest")
    with pytest.raises(ValueError, match="prefix_eviction='newest' is not one of lru, aligned, predicted"):
        EngineConfig(model="any", prefix_eviction="newest")


def test_plain_lru_does_not_align_the_groups():
    lost = {}
    for eviction in ("lru", "aligned"):
        manager = window_manager(40, window=50, prefix_caching=True, prefix_eviction=eviction)
        serve(manager, 0, list(range(12)))
        manager.free(0)
        lost[eviction] = {time.negative_end for g in manager.parts.allocator.groups for time in g.evictable.values()}
    assert lost == {"lru": {0}, "aligned": {-2, -4, -6, -8, -10, -12}}


# The cost model: 1000 bytes, requests of 100 bytes that generate 10 tokens.

SIZES = {"num_requests": 10, "pool_bytes": 1000, "request_bytes": 100, "output_tokens": 10}


def test_a_prefix_is_kept_when_it_saves_more_than_the_room_it_takes():
    # 100 bytes less: 10 * overhead * 100 * (1/900 - 1/1000) = overhead / 9 tokens a request.
    prefix = Candidate(uses=5, tokens=40, num_bytes=100)  # saves 20 tokens a request
    assert protected_bytes([prefix], **SIZES, step_overhead=9 * 19) == 100
    assert protected_bytes([prefix], **SIZES, step_overhead=9 * 21) == 0


def test_the_prefixes_that_save_most_a_byte_come_first():
    often, seldom = Candidate(8, 40, 100), Candidate(1, 40, 100)
    assert protected_bytes([seldom, often], **SIZES, step_overhead=9 * 8) == 100
    assert protected_bytes([seldom, often], **SIZES, step_overhead=1) == 200


def test_room_for_one_request_is_always_left():
    assert protected_bytes([Candidate(10, 10**6, 901)], **SIZES) == 0
    assert protected_bytes([Candidate(10, 10**6, 900)], **SIZES) == 900


def test_the_size_follows_what_recent_requests_shared():
    manager = full_manager(100, 4, prefix_caching=True, prefix_eviction="predicted", watermark=0)
    for i in range(20):
        ask(manager, i, [*range(80), *[i] * 8])
    assert manager.parts.predicted.limit_bytes == 20 * 8
    assert protected(manager) == 20
    for i in range(20, 20 + 200):
        ask(manager, i, [i] * 30)
    assert manager.parts.predicted.limit_bytes == 0 == protected(manager)
