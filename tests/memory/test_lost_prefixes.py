"""What was evicted and is asked for again bounds the protected part of the pool, and no part starves the other."""

from __future__ import annotations

import random
from functools import partial

import pytest
from memory_pools import full_manager, serve

from jpaged.memory import MemoryManager
from jpaged.memory.prefix_prediction import protected_bytes
from jpaged.memory.saving import load_memory, memory_data

SIZE, BLOCK_BYTES = 4, 8


def predicting(num_blocks: int = 10) -> MemoryManager:
    return full_manager(num_blocks, SIZE, prefix_caching=True, prefix_eviction="predicted", watermark=0)


def ask(manager: MemoryManager, seq_id: int, tokens: list[int]) -> int:
    hit = serve(manager, seq_id, tokens)
    manager.free(seq_id)
    manager.check_invariants()
    return hit


def bound(manager: MemoryManager) -> int:
    """Blocks that may be protected."""
    return manager.parts.predicted.lost.most_bytes // BLOCK_BYTES


def prompt(start: int, blocks: int) -> list[int]:
    """A prompt of some whole blocks and a token."""
    return list(range(start, start + SIZE * blocks + 1))


def test_at_first_a_quarter_of_the_pool_may_be_protected():
    assert bound(predicting(12)) == 3


def test_a_lost_prefix_that_one_request_began_with_moves_the_bound_down():
    manager = predicting(10)
    manager.parts.predicted.lost.most_bytes = 10 * BLOCK_BYTES
    ask(manager, 0, prompt(0, 4))
    ask(manager, 1, prompt(100, 9))  # takes all ten blocks
    assert ask(manager, 2, prompt(0, 4)) == 0
    assert bound(manager) == 6


def test_a_lost_prefix_that_was_asked_for_again_before_moves_it_up():
    manager = predicting(10)
    manager.parts.predicted.lost.most_bytes = 0
    for i in range(2):
        ask(manager, i, prompt(0, 4))
    ask(manager, 2, prompt(100, 9))
    assert ask(manager, 3, prompt(0, 4)) == 0
    assert bound(manager) == 4


def test_what_is_found_or_new_moves_nothing():
    manager = predicting(10)
    for i in range(3):
        ask(manager, i, prompt(0, 4))
    ask(manager, 3, prompt(50, 2))
    assert bound(manager) == bound(predicting(10)) and not manager.parts.predicted.lost.names


def test_what_another_request_is_still_computing_is_not_lost():
    manager = predicting(10)
    manager.add(0, 0)
    manager.match_prefix(0, prompt(0, 4))
    assert ask(manager, 1, prompt(0, 4)) == 0
    assert bound(manager) == bound(predicting(10))


def test_the_bound_stays_within_the_pool():
    manager = predicting(4)
    for i in range(12):
        ask(manager, i, prompt(100 * (i % 3), 3))
        assert 0 <= bound(manager) <= 4


def test_as_many_names_are_remembered_as_the_pool_has_blocks():
    manager = predicting(6)
    for i in range(20):
        ask(manager, i, prompt(100 * i, 5))
    assert len(manager.parts.predicted.lost.names) == 6


def test_a_cache_that_is_forgotten_at_once_teaches_nothing():
    manager = predicting(10)
    ask(manager, 0, prompt(0, 4))
    assert manager.reset_prefix_cache()
    assert ask(manager, 1, prompt(0, 4)) == 0
    assert bound(manager) == bound(predicting(10))


def test_the_bound_and_the_names_are_saved():
    manager, other = predicting(10), predicting(10)
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
    manager, other = predicting(10), predicting(10)
    ask(manager, 0, prompt(0, 4))
    data = memory_data(manager)
    del data["lost"]
    load_memory(other, data)
    assert bound(other) == bound(predicting(10))


# Small traces, on which no order of eviction may be far behind plain LRU.

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
    """What is popular changes again and again."""
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
