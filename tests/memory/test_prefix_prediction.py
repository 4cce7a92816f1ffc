"""Prefixes that recent requests shared are kept for the next one, as far as that pays."""

from __future__ import annotations

import random
from functools import partial

import pytest
from memory_pools import full_manager, serve, window_manager

from jpaged.config import EngineConfig
from jpaged.memory import ChunkedLocalAttention, Fit, GroupSpec, MemoryManager, Need, PoolLayout
from jpaged.memory.prefix_prediction import Candidate, protected_bytes
from jpaged.memory.saving import load_memory, memory_data

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
    manager.admitted(0)
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
        manager.admitted(i)
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


# What was evicted and is asked for again bounds the protected part of the pool, and no part starves the other.

SIZE, BLOCK_BYTES = 4, 8


def predicting_manager(num_blocks: int = 10) -> MemoryManager:
    return full_manager(num_blocks, SIZE, prefix_caching=True, prefix_eviction="predicted", watermark=0)


def bound(manager: MemoryManager) -> int:
    """Blocks that may be protected."""
    return manager.parts.predicted.lost.most_bytes // BLOCK_BYTES


def prompt(start: int, blocks: int) -> list[int]:
    """A prompt of some whole blocks and a token."""
    return list(range(start, start + SIZE * blocks + 1))


def test_at_first_a_quarter_of_the_pool_may_be_protected():
    assert bound(predicting_manager(12)) == 3


def test_a_lost_prefix_that_one_request_began_with_moves_the_bound_down():
    manager = predicting_manager(10)
    manager.parts.predicted.lost.most_bytes = 10 * BLOCK_BYTES
    ask(manager, 0, prompt(0, 4))
    ask(manager, 1, prompt(100, 9))  # takes all ten blocks
    assert ask(manager, 2, prompt(0, 4)) == 0
    assert bound(manager) == 6


def test_a_lost_prefix_that_was_asked_for_again_before_moves_it_up():
    manager = predicting_manager(10)
    manager.parts.predicted.lost.most_bytes = 0
    for i in range(2):
        ask(manager, i, prompt(0, 4))
    ask(manager, 2, prompt(100, 9))
    assert ask(manager, 3, prompt(0, 4)) == 0
    assert bound(manager) == 4


def test_what_is_found_or_new_moves_nothing():
    manager = predicting_manager(10)
    for i in range(3):
        ask(manager, i, prompt(0, 4))
    ask(manager, 3, prompt(50, 2))
    assert bound(manager) == bound(predicting_manager(10)) and not manager.parts.predicted.lost.names


def test_what_another_request_is_still_computing_is_not_lost():
    manager = predicting_manager(10)
    manager.add(0, 0)
    manager.match_prefix(0, prompt(0, 4))
    manager.admitted(0)
    assert ask(manager, 1, prompt(0, 4)) == 0
    assert bound(manager) == bound(predicting_manager(10))


def test_the_bound_stays_within_the_pool():
    manager = predicting_manager(4)
    for i in range(12):
        ask(manager, i, prompt(100 * (i % 3), 3))
        assert 0 <= bound(manager) <= 4


def test_as_many_names_are_remembered_as_the_pool_has_blocks():
    manager = predicting_manager(6)
    for i in range(20):
        ask(manager, i, prompt(100 * i, 5))
    assert len(manager.parts.predicted.lost.names) == 6


def test_a_cache_that_is_forgotten_at_once_teaches_nothing():
    manager = predicting_manager(10)
    ask(manager, 0, prompt(0, 4))
    assert manager.reset_prefix_cache()
    assert ask(manager, 1, prompt(0, 4)) == 0
    assert bound(manager) == bound(predicting_manager(10))


def test_the_bound_and_the_names_are_saved():
    manager, other = predicting_manager(10), predicting_manager(10)
    for i in range(2):
        ask(manager, i, prompt(0, 4))
    ask(manager, 2, prompt(100, 9))
    ask(manager, 3, prompt(200, 3))
    load_memory(other, memory_data(manager))
    assert list(other.parts.predicted.lost.names) == list(manager.parts.predicted.lost.names) != []
    assert other.parts.predicted.lost.most_bytes == manager.parts.predicted.lost.most_bytes
    assert [ask(m, 4, prompt(0, 4)) for m in (manager, other)] == [0, 0]
    assert bound(other) == bound(manager)


def test_a_state_saved_without_them_is_read():
    manager, other = predicting_manager(10), predicting_manager(10)
    ask(manager, 0, prompt(0, 4))
    data = memory_data(manager)
    del data["lost"]
    load_memory(other, data)
    assert bound(other) == bound(predicting_manager(10))


# Small traces, on which no order of eviction may be much worse than plain LRU.

BLOCKS, REQUESTS = 64, 1000


@pytest.fixture
def cheap_steps(monkeypatch):
    """A device on which the cost model protects whatever is shared: only what is learned bounds it."""
    protect_all = partial(protected_bytes, step_overhead=0.0)
    monkeypatch.setattr("jpaged.memory.prefix_prediction.protected_bytes", protect_all)


def conversations(rng: random.Random) -> list[list[int]]:
    """Twelve talks at a time, any of which goes on or ends."""
    talks, prompts = [[] for _ in range(12)], []
    for number in range(REQUESTS):
        place = rng.randrange(len(talks))
        if rng.random() < 0.25:
            talks[place] = []
        talks[place] = [*talks[place], *range(1000 * number, 1000 * number + rng.randint(4, 24))][-160:]
        prompts.append(talks[place])
    return prompts


def twice(rng: random.Random) -> list[list[int]]:
    """Each prompt goes on once, when ten others have come: nothing is worth protecting."""
    return [prompt(1000 * (number // 2 - 5 * (number % 2)), 5) for number in range(10, REQUESTS)]


def popular(rng: random.Random) -> list[list[int]]:
    """Documents by Zipf's law, each with a question of its own."""
    weights = [1 / (rank + 1) for rank in range(30)]
    chosen = rng.choices(range(30), weights, k=REQUESTS)
    return [[*prompt(1000 * place, 8), 10**6 + number] for number, place in enumerate(chosen)]


def drift(rng: random.Random) -> list[list[int]]:
    """Return prompts whose popular beginnings change again and again."""
    places = [min(rng.randrange(8), rng.randrange(8)) for _ in range(REQUESTS)]
    return [prompt(1000 * (number // 60 * 8 + place), 10) for number, place in enumerate(places)]


def nothing(rng: random.Random) -> list[list[int]]:
    return [prompt(1000 * number, rng.randint(2, 12)) for number in range(REQUESTS)]


def hits(trace, eviction: str, seed: int) -> float:
    manager = full_manager(BLOCKS, SIZE, prefix_caching=True, prefix_eviction=eviction, watermark=0)
    prompts = trace(random.Random(seed))
    found = sum(serve_and_free(manager, number, tokens) for number, tokens in enumerate(prompts))
    manager.check_invariants()
    return found / sum(map(len, prompts))


def serve_and_free(manager: MemoryManager, seq_id: int, tokens: list[int]) -> int:
    hit = serve(manager, seq_id, tokens)
    manager.free(seq_id)
    return hit


TRACES = (conversations, twice, popular, drift, nothing)


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.__name__)
@pytest.mark.usefixtures("cheap_steps")
def test_the_default_is_never_far_behind_plain_lru(trace):
    for seed in range(2):
        plain, default = hits(trace, "lru", seed), hits(trace, "predicted", seed)
        assert default >= 0.98 * plain, (seed, plain, default)


@pytest.mark.usefixtures("cheap_steps")
def test_it_is_ahead_where_some_documents_are_popular():
    assert all(hits(popular, "predicted", seed) > 1.1 * hits(popular, "lru", seed) for seed in range(2))


@pytest.mark.usefixtures("cheap_steps")
def test_without_learning_it_would_starve_what_comes_back_once(monkeypatch):
    monkeypatch.setattr("jpaged.memory.prefix_prediction.LostPrefixes.requested", lambda *args: None)
    assert hits(twice, "predicted", 0) < 0.1 * hits(twice, "lru", 0)
