"""A prompt that waits is asked about in every step: its blocks are named once, and always as they would be anew."""

from __future__ import annotations

import pytest
from memory_pools import serve

from jpaged.memory import FullAttention, GroupSpec, MemoryManager, PoolLayout, StateCheckpoints, prefix_lookup
from jpaged.memory.hash_chain import HashChain
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.prefix_lookup import MOST_NAMED
from jpaged.memory.recent_prefixes import RecentPrefixes

SIZE = 4
TOKENS = list(range(41))


def manager_of(num_pages: int = 60, **options) -> MemoryManager:
    policies = (FullAttention(), StateCheckpoints(8))
    specs = [GroupSpec(str(g), 8, 1, SIZE, policy) for g, policy in enumerate(policies)]
    return MemoryManager(PoolLayout.plan(specs, 8 * num_pages), prefix_caching=True, **options)


def test_a_prompt_teaches_once_when_it_is_admitted_and_not_while_it_waits():
    manager = manager_of(prefix_eviction="predicted")
    serve(manager, 1, TOKENS)
    manager.free(1)
    parts, limits = manager.parts, []
    parts.predicted.choose_limit = lambda sequence: limits.append(0) or 0
    known = list(parts.recent.entries)
    for _ in range(50):
        assert ask(manager, [*TOKENS[:33], 99]) == 32
    assert parts.checkpoints.seen == [0, 0] and list(parts.recent.entries) == known and limits == []
    for _ in range(2):  # as if it were preempted in between
        manager.add(0, 0)
        manager.match_prefix(0, [*TOKENS[:33], 99])
        manager.admitted(0)
        manager.admitted(0)
        manager.free(0)
    assert parts.checkpoints.seen == [0, 1] and list(parts.recent.entries) == [*known, 0]
    ask(manager, [*TOKENS[:33], 99])
    assert len(limits) == 2, "it ended twice, and then only waited"


@pytest.fixture
def named(monkeypatch):
    """Return how many blocks were named, a list of one number for each call."""
    counts, extend = [], HashChain.extend

    def counted(self, token_ids, num_blocks):
        counts.append(max(0, num_blocks - len(self.links)))
        extend(self, token_ids, num_blocks)

    monkeypatch.setattr(HashChain, "extend", counted)
    return counts


def ask(manager: MemoryManager, tokens: list[int], **options) -> int:
    manager.add(0, 0)
    hit = manager.match_prefix(0, tokens, **options)
    manager.free(0)
    return hit


def test_a_prompt_that_is_asked_about_again_is_not_named_again(named):
    manager = manager_of()
    assert ask(manager, TOKENS) == 0 and sum(named) == 10
    for _ in range(5):
        ask(manager, TOKENS)
    assert sum(named) == 10
    others = [[*TOKENS[:20], 100 + n, *TOKENS[21:]] for n in range(MOST_NAMED)]
    for prompt in others:
        ask(manager, prompt)
    ask(manager, TOKENS)
    assert sum(named) == 10 * (MOST_NAMED + 2), "so many others since: it is forgotten"


def test_what_the_cache_has_by_now_is_found():
    manager = manager_of()
    assert ask(manager, TOKENS) == 0
    serve(manager, 1, TOKENS)
    assert ask(manager, TOKENS) == 40
    manager.free(1)
    manager.check_invariants()


def test_other_salts_limits_and_tokens_have_names_of_their_own():
    manager = manager_of()
    serve(manager, 1, TOKENS, salt="a")
    assert [ask(manager, TOKENS, salt=salt) for salt in ("a", None, "a", 1, True)] == [40, 0, 40, 0, 0]
    assert [ask(manager, TOKENS, salt="a", max_tokens=most) for most in (40, 17, 40, 0)] == [40, 16, 40, 0]
    assert ask(manager, [*TOKENS[:17], 99, *TOKENS[18:]], salt="a") == 16
    manager.free(1)


def test_tokens_that_follow_do_not_change_what_is_remembered():
    manager = manager_of()
    ask(manager, TOKENS)
    for seq_id, more in ((1, range(200, 220)), (2, range(300, 320))):
        serve(manager, seq_id, [*TOKENS, *more])
        manager.free(seq_id)
        assert ask(manager, TOKENS) == 40
        assert ask(manager, [*TOKENS, *more]) == 60 // 8 * 8


def test_a_look_at_a_prompt_that_waits_neither_counts_its_blocks_nor_remembers_it_again(monkeypatch):
    manager = manager_of()
    serve(manager, 1, TOKENS)
    manager.free(1)
    counted, remembered, count = [], [], prefix_lookup.leading_hits
    monkeypatch.setattr(prefix_lookup, "leading_hits", lambda hits: counted.append(len(hits)) or count(hits))
    monkeypatch.setattr(RecentPrefixes, "remember", lambda *args: remembered.append(args))
    assert [ask(manager, TOKENS) for _ in range(9)] == [40] * 9
    assert counted == [10] and not remembered


def test_a_prompt_that_waits_is_matched_again_only_after_a_block_of_its_own_came_or_went(monkeypatch):
    manager = manager_of(30)
    serve(manager, 1, TOKENS)
    manager.free(1)
    calls, match = [], PrefixCache.match
    tracked, track = [], PrefixCache.track

    def counted(*args, **more):
        calls.append(args)
        return match(*args, **more)

    def counted_tracks(cache, digests):
        tracked.append(len(digests))
        track(cache, digests)

    monkeypatch.setattr(PrefixCache, "match", counted)
    monkeypatch.setattr(PrefixCache, "track", counted_tracks)
    assert [ask(manager, TOKENS) for _ in range(4)] == [40] * 4
    assert len(calls) == 1, "what the second look found is remembered"
    serve(manager, 2, list(range(500, 520)))
    calls.clear()
    assert ask(manager, TOKENS) == 40 and not calls, "other blocks came"
    manager.free(2)
    serve(manager, 3, list(range(600, 680)))
    calls.clear()
    assert ask(manager, TOKENS) < 40 and len(calls) == 1, "it lost some to another sequence"
    assert len(tracked) == 1, "its contents are the same as before"
    manager.free(3)
    serve(manager, 4, TOKENS)
    assert ask(manager, TOKENS) == 40, "and are back"
    manager.free(4)
    manager.check_invariants()
