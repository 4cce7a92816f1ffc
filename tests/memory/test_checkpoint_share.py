"""Where states are left for later requests, by which tokens they are named, and how many stay."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_pools import run

from jpaged.cache_retention import DEFAULT_PRIORITY, CacheRetention, RetentionDirective
from jpaged.memory import (
    NO_BLOCK,
    Fit,
    FullAttention,
    GroupSpec,
    MemoryManager,
    Need,
    PoolLayout,
    StateCheckpoints,
)
from jpaged.memory.checkpoint_share import CheckpointShare, Guess
from jpaged.memory.eviction_levels import IN_USE, UNLIKELY
from jpaged.memory.hash_chain import HashChain, TokenSpan
from jpaged.memory.saving import Fitting, load_memory, memory_data

SIZE, INTERVAL = 4, 64
ANSWERS = INTERVAL // 8
KINDS = {"hybrid": (FullAttention(), StateCheckpoints(INTERVAL)), "states": (StateCheckpoints(INTERVAL),)}


def manager_of(kind: str = "hybrid", num_pages: int = 200, **options) -> MemoryManager:
    specs = [GroupSpec(str(g), 8, 1, SIZE, policy) for g, policy in enumerate(KINDS[kind])]
    return MemoryManager(PoolLayout.plan(specs, 8 * num_pages), prefix_caching=True, watermark=0.0, **options)


def ask(manager, seq_id: int, prompt: list[int], answer: list[int] = [], marks=(), spans=()) -> int:  # noqa: B006
    """The hit of a request that comes, is answered token by token, and goes."""
    tokens = [*prompt, *answer]
    manager.add(seq_id, seq_id, prompt_tokens=len(prompt), marks=marks)
    hit = manager.match_prefix(seq_id, prompt, spans=spans)
    run(manager, seq_id, prompt, hit)
    for length in range(len(prompt) + 1, len(tokens) + 1):
        if length > manager.capacity(seq_id):
            assert manager.allocate(seq_id, length, first_write=length - 1) is not None
            manager.dispatched()
        if length >= manager.capacity(seq_id):
            manager.commit(seq_id, tokens[:length], length)
    manager.free(seq_id)
    manager.check_invariants()
    return hit


def tokens(number: int, first: int = 0) -> list[int]:
    return list(range(first, first + number))


# ------------------------------------------------------------------ known boundaries, and learnt ones


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [8, 30, 63, 64, 65, 100, 127])
def test_the_second_request_goes_on_from_the_end_of_the_firsts_prompt(kind, length):
    manager = manager_of(kind)
    prompt = tokens(length)
    assert ask(manager, 0, prompt) == 0
    assert ask(manager, 1, [*prompt, *tokens(9, 500)]) == length // SIZE * SIZE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mark", [9, 40, 64, 71, 100])
def test_the_second_request_parts_where_the_first_said(kind, mark):
    manager = manager_of(kind)
    assert ask(manager, 0, tokens(130), marks=(mark,)) == 0
    assert ask(manager, 1, [*tokens(mark), *tokens(60, 500)]) == mark // SIZE * SIZE


def test_the_likeliest_ends_are_kept_where_a_pool_has_few_blocks_or_they_lie_close():
    marks = (25, 12, 37, 50)
    for pages, kept in ((200, 4), (47, 2), (31, 1)):
        manager = manager_of(num_pages=pages)
        assert ask(manager, 0, tokens(60), marks=marks) == 0
        hits = [manager.cached_prefix([*tokens(mark), 999, 999]) for mark in marks]
        assert [hit == mark // SIZE * SIZE for hit, mark in zip(hits, marks, strict=True)] == [
            n < kept for n in range(4)
        ]
    manager = manager_of()
    ask(manager, 0, tokens(130), marks=(50, 52, 44, 60))
    assert [manager.cached_prefix([*tokens(mark), 999, 999]) for mark in (44, 50, 52, 60)] == [0, 48, 48, 60]


def shown(*pictures: tuple[int, int, str]) -> tuple[TokenSpan, ...]:
    return tuple(TokenSpan(start, length, name.encode(), False) for start, length, name in pictures)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("question", [1, 7, 30, 90])
@pytest.mark.parametrize("pictures", [((3, 20, "a"),), ((0, 64, "a"),), ((5, 30, "a"), (35, 41, "b")), ((2, 1, "a"),)])
def test_all_questions_on_a_picture_but_the_first_go_on_from_its_end(kind, question, pictures):
    manager, spans = manager_of(kind), shown(*pictures)
    begin = tokens(spans[-1].stop)
    hits = [ask(manager, n, [*begin, *tokens(question, 1000 * n)], tokens(9, 500), spans=spans) for n in range(1, 9)]
    assert hits == [0] + [len(begin) // SIZE * SIZE] * 7
    other = shown(*pictures[:-1], (*pictures[-1][:2], "other"))
    assert ask(manager, 9, [*begin, *tokens(question, 9000)], spans=other) <= spans[-1].start


def test_a_turn_after_a_picture_goes_on_from_the_prompts_end_too():
    manager, spans = manager_of(), shown((3, 20, "a"))
    prompt = [*tokens(23), *tokens(40, 500)]
    assert ask(manager, 0, prompt, spans=spans) == 0
    assert ask(manager, 1, [*prompt, *tokens(9, 700)], spans=spans) == 60
    assert ask(manager, 2, [*tokens(23), *tokens(9, 800)], spans=spans) == 20


def test_pictures_of_many_users_stay_where_questions_follow_later():
    manager, users, hits = manager_of(num_pages=400), range(8), []
    for n in range(48):  # so that prompts are known to part inside
        ask(manager, n, [*tokens(80), *tokens(30, 1000 * n)], spans=shown((0, 80, "of one")))
    for turn in range(1, 4):
        spans = {user: shown((0, 80, f"of {user}")) for user in users}
        asked = [*tokens(80), *tokens(30, 1000 * turn)]
        hits.append([ask(manager, 100 * turn + user, asked, spans=spans[user]) for user in users])
    assert hits == [[0] * 8, [80] * 8, [80] * 8]


@pytest.mark.parametrize("kind", KINDS)
def test_the_third_request_parts_where_the_second_did(kind):
    manager = manager_of(kind)
    prompts = [[*tokens(50), *tokens(60, 100 * n)] for n in range(2, 6)]
    assert [ask(manager, n, prompt) for n, prompt in enumerate(prompts)] == [0, 0, 48, 48]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt", "answer"), [(30, 40), (30, 9), (64, 64), (61, 90), (10, 200)])
def test_the_next_turn_goes_on_from_the_last_eighth_of_an_interval_of_the_answer(kind, prompt, answer):
    manager = manager_of(kind)
    said = tokens(prompt + answer)
    assert ask(manager, 0, said[:prompt], said[prompt:]) == 0
    left = manager.report().groups[-1].evictable
    # The last token is drawn and not computed in a scheduler; here it is, and the state after it is not copied.
    last = (prompt + answer - 1) // ANSWERS * ANSWERS
    regular = (prompt + answer) // INTERVAL * INTERVAL
    expected = max(prompt // SIZE * SIZE, regular, last if last > prompt else 0)
    assert ask(manager, 1, [*said, *tokens(5, 900)]) == expected
    assert left <= 2 + (prompt + answer) // INTERVAL, "of an answer the newest is kept alone"


def test_a_state_after_a_token_in_flight_is_dropped():
    manager = manager_of()
    prompt, said = tokens(30), tokens(50)
    manager.add(0, 0, prompt_tokens=30)
    manager.match_prefix(0, prompt)
    run(manager, 0, prompt)
    for length in range(31, 50):
        if length > manager.capacity(0):
            manager.allocate(0, length, first_write=length - 1)
            manager.dispatched()
        manager.commit(0, said[: min(length, 39)], length)  # token 39 is never known
    manager.free(0)
    manager.check_invariants()
    assert ask(manager, 1, [*said, 1, 2]) == 32


def test_a_copy_for_a_later_request_preempts_nothing():
    manager = manager_of(num_pages=20)
    prompt = tokens(30)
    manager.add(0, 0, prompt_tokens=30)
    manager.match_prefix(0, prompt)
    run(manager, 0, prompt)
    manager.add(1, 1)
    for length in range(4, 100, 4):
        if manager.allocate(1, length, first_write=length - 4) is None:
            break
        manager.dispatched()
    manager.free(1)
    manager.add(2, 2)
    manager.allocate(2, 4 * (manager.num_available_pages - 3), first_write=0)
    used = manager.num_used_blocks
    assert manager.allocate(0, 33, first_write=32) is not None
    assert manager.num_used_blocks - used <= 2
    manager.check_invariants()


# ------------------------------------------------------------------ where running requests part


def crowd(manager, first: int, times: int = 6) -> None:
    """Serve unrelated prompts, one after another, that together evict what nothing keeps."""
    for n in range(first, first + times):
        ask(manager, n, tokens(2 * INTERVAL, 1000 * n))


def test_the_state_where_a_running_request_parts_stays_until_the_request_ends():
    manager, head = manager_of(num_pages=80), tokens(2 * INTERVAL)
    ask(manager, 0, [*head, *tokens(5, 500)])
    second = [*head, *tokens(5, 600)]
    manager.add(1, 1, prompt_tokens=len(second))
    run(manager, 1, second, manager.match_prefix(1, second))
    third = [*head, *tokens(5, 700)]
    manager.add(2, 2, prompt_tokens=len(third))
    run(manager, 2, third, manager.match_prefix(2, third))
    crowd(manager, 3)
    assert manager.cached_prefix([*head, 999]) == len(head)
    manager.free(1)
    crowd(manager, 10)
    assert manager.cached_prefix([*head, 999]) == len(head), "another request uses its KV"
    manager.free(2)
    crowd(manager, 20)
    assert manager.cached_prefix([*head, 999]) == 0


def begin(manager, seq_id, said, **asked):
    """Run a request's prompt and let it be."""
    manager.add(seq_id, seq_id, prompt_tokens=len(said), **asked)
    run(manager, seq_id, said, manager.match_prefix(seq_id, said))


def test_a_running_prompt_that_begins_like_no_other_keeps_its_last_regular_state():
    manager, document = manager_of(num_pages=80), tokens(2 * INTERVAL)
    begin(manager, 0, [*document, *tokens(5, 500)])
    crowd(manager, 1)
    assert manager.cached_prefix([*document, 999]) == len(document), "another question about it may come"
    manager.free(0)
    crowd(manager, 10, 12)
    assert manager.cached_prefix([*document, 999]) == 0


def test_a_state_in_use_is_no_guess_until_no_request_uses_its_kv():
    manager, document = manager_of(num_pages=120), tokens(2 * INTERVAL)
    begin(manager, 0, [*document, *tokens(5, 500)])
    share = manager.parts.checkpoints
    assert share is not None
    share.limit_bytes = lambda guess: 8  # one state
    ask(manager, 1, tokens(INTERVAL + 5, 1000))
    ask(manager, 2, tokens(INTERVAL + 5, 2000))
    assert manager.cached_prefix([*document, 999]) == len(document), "those that are too many go, and it is none"
    manager.free(0)
    assert manager.cached_prefix([*document, 999]) == len(document)
    ask(manager, 3, tokens(INTERVAL + 5, 3000))
    assert manager.cached_prefix([*document, 999]) == 0, "a guess like any other"


def test_a_state_in_use_that_prompts_go_on_past_goes_before_the_request_does():
    manager = manager_of(num_pages=120)
    said = tokens(2 * INTERVAL + 20)
    begin(manager, 0, said)
    assert IN_USE in levels(manager)
    said += tokens(30, 800)
    begin(manager, 1, said)  # it goes on from an end, as more prompts do than part inside
    ask(manager, 2, tokens(20, 1000))
    assert IN_USE not in levels(manager)


@pytest.mark.parametrize("spare", [0, 1])
def test_the_state_of_an_answer_does_not_take_the_room_of_one_in_use(spare):
    manager, document = manager_of(num_pages=80), tokens(2 * INTERVAL)
    said = [*document, *tokens(ANSWERS, 500)]
    begin(manager, 0, said)
    allocator, end = manager.parts.allocator, len(said) + ANSWERS
    others = allocator.pages.num_available - levels(manager).count(IN_USE)
    needed = ANSWERS // SIZE + 1  # blocks of KV; the running state takes one, and leaves that of the prompt's end
    assert allocator.take([others - needed - spare, 0], allocator.new_request()) is not None
    said += tokens(ANSWERS + 1, 600)
    for start, stop in ((end - ANSWERS, end), (end, end + 1)):  # the second changes the state at `end`
        assert manager.allocate(0, stop, first_write=start) is not None
        manager.dispatched()
        manager.commit(0, said[:stop], stop)
    assert IN_USE in levels(manager)
    assert manager.cached_prefix([*said[:end], 999]) == (end if spare else len(document))


def levels(manager):
    return sorted(key.level for _, key in manager.parts.allocator.groups[1].evictable.items())


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("first", ["parts", "goes on"])
def test_a_state_in_use_does_not_outlast_a_request_that_parts_nowhere(first, restored):
    manager, head = manager_of(num_pages=120), tokens(2 * INTERVAL)
    earlier, parting = [*head, *tokens(5, 500)], [*head, *tokens(20, 600)]
    ask(manager, 0, earlier)
    begin(manager, 1, [*earlier, *tokens(30, 800)])  # it goes on from an end, so it parts from nothing
    begin(manager, 2, parting)
    order = [2, 1] if first == "parts" else [1, 2]
    manager.free(order[0])
    assert IN_USE in levels(manager)
    if restored:
        data, manager = memory_data(manager), manager_of(num_pages=120)
        load_memory(manager, data)
    manager.free(order[1])
    manager.check_invariants()
    assert IN_USE not in levels(manager)
    crowd(manager, 10, 12)
    assert manager.cached_prefix([*head, 999]) == 0


@pytest.mark.parametrize("order", ["aligned", "lru"])
@pytest.mark.parametrize("parted", [False, True])
def test_states_of_the_kind_that_fewer_requests_began_with_go_first(order, parted):
    manager = manager_of(prefix_eviction=order)
    for seq_id in range(4 * parted):
        ask(manager, seq_id, [*tokens(2 * INTERVAL), *tokens(5, 500 + 10 * seq_id)])
    said, parts = tokens(2 * INTERVAL + 20 + 3 * ANSWERS, 1000), manager.parts
    ask(manager, 9, said[: 2 * INTERVAL + 20], said[2 * INTERVAL + 20 :])
    (chain,) = parts.cache.chains().values()
    chain.extend(said, len(said) // SIZE)
    ends = INTERVAL, 2 * INTERVAL + 20, (len(said) - 1) // ANSWERS * ANSWERS
    found = [parts.cache.find(1, chain.links[end // SIZE - 1]) for end in ends]
    ranks = [parts.allocator.groups[1].evictable[block].level for block in found if block is not None]
    first = [0, UNLIKELY, UNLIKELY] if parted else [UNLIKELY, 0, 0]
    assert ranks == (first if order == "aligned" else [0, 0, 0])


def test_a_low_priority_keeps_no_state_for_longer_than_none():
    manager, prompt = manager_of(), tokens(2 * INTERVAL + 20, 1000)
    low = CacheRetention((RetentionDirective(0, None, DEFAULT_PRIORITY - 5, None),), ())
    begin(manager, 9, prompt, retention=low)
    manager.free(9)
    levels = sorted(key.level for key in manager.parts.allocator.groups[1].evictable.values())
    assert levels == [UNLIKELY] * (len(levels) - 1) + [-5], "the state at the prompt's end is as likely as any"


def test_a_priority_keeps_the_state_of_an_answer_too():
    manager, said = manager_of(), tokens(70)
    manager.add(0, 0, prompt_tokens=30, retention=CacheRetention((RetentionDirective(0, None, DEFAULT_PRIORITY + 7),)))
    run(manager, 0, said[:30], manager.match_prefix(0, said[:30]))
    for length in range(31, 43):
        assert manager.allocate(0, length, first_write=length - 1) is not None
        manager.dispatched()
        manager.commit(0, said[:length], length)
    assert manager.cached_prefix([*said[:40], 999]) == 40 and levels(manager) == [7] * len(levels(manager))


def test_a_state_that_is_protected_gets_no_level_in_use():
    manager, head = manager_of(num_pages=120, prefix_eviction="predicted"), tokens(2 * INTERVAL)
    manager.parts.predicted.choose_limit = lambda sequence: 8 * 120  # all of the pool may be protected
    for seq_id in range(3):
        ask(manager, seq_id, [*head, *tokens(5, 500 + 10 * seq_id)])
    begin(manager, 3, [*head, *tokens(5, 600)])
    protected = manager.parts.allocator.groups[1].protected
    assert [key.level for _, key in protected.items()] == [0], "protected blocks lie in the order of their last need"
    manager.check_invariants()


def test_a_priority_that_is_the_level_in_use_stays():
    for priority in (DEFAULT_PRIORITY + IN_USE, DEFAULT_PRIORITY + IN_USE + 1):
        manager, head = manager_of(num_pages=80), tokens(2 * INTERVAL)
        ask(manager, 0, [*head, *tokens(5, 500)])
        asked = CacheRetention((RetentionDirective(0, len(head), priority),))
        begin(manager, 1, [*head, *tokens(5, 600)], retention=asked)
        manager.free(1)
        crowd(manager, 10, 12)
        assert levels(manager)[-1] == priority - DEFAULT_PRIORITY
        assert manager.cached_prefix([*head, 999]) == len(head)


def test_a_request_that_leaves_less_is_found_where_its_prompt_parts_and_near_its_end():
    manager, head = manager_of(), tokens(70)
    ask(manager, 0, [*head, *tokens(200, 500)])
    second = [*head, *tokens(200, 600)]
    manager.add(1, 1, prompt_tokens=len(second))
    hit = manager.match_prefix(1, second)
    before = Need(len(second), prompt_tokens=len(second), cached_tokens=hit, seq_id=1)
    tight = [manager.num_available_pages - n for n in range(manager.num_available_pages)]
    fits = [manager.can_admit(before, reserved=[n, 0]) is Fit.OK for n in tight]
    assert manager.leave_less(1)
    assert [manager.can_admit(before, reserved=[n, 0]) is Fit.OK for n in tight].index(True) < fits.index(True)
    run(manager, 1, second, hit)
    manager.free(1)
    manager.check_invariants()
    ends = [n for n in range(hit + 1, len(second)) if manager.cached_prefix([*second[:n], 999]) == n]
    assert ends == [68, 256]


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 40), st.sampled_from([None, 16, 64]))
@settings(max_examples=40, deadline=None)
def test_a_request_fits_by_the_cheap_look_wherever_it_fits(shared, more, answer, step):
    manager = manager_of(max_step_tokens=step)
    ask(manager, 0, [*tokens(shared), *tokens(200, 500)])
    said = [*tokens(shared), *tokens(more, 1000)]
    length = len(said) + answer

    def spare(**known):
        """How many blocks others may take for it to fit."""
        need = Need(length, prompt_tokens=len(said), leaves_nothing="seq_id" not in known, **known)
        return bisect_left(range(200), True, key=lambda n: manager.can_admit(need, reserved=[n, 0]) is not Fit.OK)

    most = spare(cached_tokens=length - 1)
    manager.add(1, 1, prompt_tokens=len(said))
    hit = manager.match_prefix(1, said)
    for _ in range(2):
        assert spare(cached_tokens=hit, seq_id=1) <= most
        manager.leave_less(1)


@pytest.mark.parametrize("pages", [(31, 200), (200, 60)])
def test_a_running_state_stays_where_it_is_in_a_pool_of_another_size(pages):
    """The pool's size decides how many ends keep a state, and so whether the one after the prompt is one of them."""
    before, after = (manager_of(num_pages=number) for number in pages)
    begin(before, 0, tokens(60), marks=(12, 25, 37))
    fitting = Fitting(after, memory_data(before))
    assert fitting.fits_pool() and fitting.keeps_more(0) == (pages[0] > pages[1]) and not fitting.keeps_more(9)
    fitting.apply()
    found = []
    for manager in (before, after):
        manager.fork(0, 1)
        manager.commit(0, tokens(61), 60)
        found.append([copy.group for copy in manager.allocate(0, 61, first_write=60)])
        found.append([[block != NO_BLOCK for block in manager.block_table(seq_id, 1)] for seq_id in (0, 1)])
        manager.check_invariants()
    assert found[:2] == found[2:], "the state after 60 tokens is lost, or not copied"


# ------------------------------------------------------------------ names


class Shadow:
    """The tokens that each state has consumed, kept from tables and copies alone, as the device does."""

    def __init__(self, manager: MemoryManager) -> None:
        self.manager = manager
        self.consumed: dict[int, tuple[int, ...]] = {}

    def holder(self, seq_id: int, length: int) -> int:
        table = self.manager.block_table(seq_id, 1)
        return next(block for block in table[-(-length // SIZE) - 1 :] if block != NO_BLOCK)

    def step(self, seq_id: int, said: list[int], start: int, stop: int, copies) -> None:
        for copy in copies:
            if copy.group == 1:
                self.consumed[copy.dst] = self.consumed[copy.src]
        if start:
            assert self.consumed[self.holder(seq_id, start)] == tuple(said[:start]), "a step begins with another state"
        for length in range(start + 1, stop + 1):
            self.consumed[self.holder(seq_id, length)] = tuple(said[:length])

    def check(self) -> None:
        for block, link in self.manager.parts.cache.contents(1).items():
            said = self.consumed[block]
            chain = HashChain(SIZE)
            chain.extend(said, len(said) // SIZE)
            assert len(said) % SIZE == 0 and chain.links[-1].digest == link.digest


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[int, int, int, int, bool]]:
    """Requests: which earlier one they go on from and how far, new tokens, tokens of the answer, a token in flight."""
    return draw(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 90), st.integers(1, 90), st.integers(0, 50), st.booleans()),
            min_size=1,
            max_size=8,
        )
    )


@given(loads(), st.integers(40, 90), st.data())
@settings(max_examples=60, deadline=None)
def test_a_state_is_named_by_the_tokens_that_it_has_consumed(load, num_pages, data):
    manager = manager_of(num_pages=num_pages)
    shadow, all_said, fresh = Shadow(manager), [[]], 1000
    for seq_id, (of, shared, new, answer, in_flight) in enumerate(load):
        prompt = [*all_said[of % len(all_said)][:shared], *range(fresh, fresh + new)]
        said = [*prompt, *range(fresh + new, fresh + new + answer)]
        fresh += 1000
        all_said.append(said)
        marks = data.draw(st.lists(st.integers(1, len(prompt)), max_size=4))
        manager.add(seq_id, seq_id, prompt_tokens=len(prompt), marks=marks)
        start = manager.match_prefix(seq_id, prompt)
        manager.admitted(seq_id)
        while start < len(said):
            stop = min(len(prompt), start + 32) if start < len(prompt) else start + 1
            copies = manager.allocate(seq_id, stop, first_write=start)
            if copies is None:
                break
            shadow.step(seq_id, said, start, stop, copies)
            manager.dispatched()
            shadow.check()
            known = said[: stop - (in_flight and stop > len(prompt))]
            manager.commit(seq_id, known, stop)
            shadow.check()
            start = stop
        manager.free(seq_id)
        manager.check_invariants()
        shadow.check()


# ------------------------------------------------------------------ how many stay


def share_of(num_pages: int = 40) -> tuple[MemoryManager, CheckpointShare]:
    manager = manager_of(num_pages=num_pages)
    share = manager.parts.checkpoints
    assert share is not None
    return manager, share


def test_guesses_take_at_most_half_of_the_pool_and_the_oldest_go_first():
    manager, share = share_of()
    for seq_id in range(30):
        ask(manager, seq_id, tokens(20, 1000 * seq_id))
        for guess in Guess:
            held = 8 * len(share.waiting[guess])
            assert held <= max(8, share.limit_bytes(guess))
    assert sum(share.limit_bytes(guess) for guess in Guess) <= 8 * 40 // 2
    assert ask(manager, 98, tokens(21, 1000 * 29)) == 20
    assert ask(manager, 99, tokens(21)) == 0


def test_the_share_goes_to_what_serves():
    _, share = share_of()
    even = share.limit_bytes(Guess.AT_END)
    for _ in range(20):
        share.arrived(INTERVAL, goes_on=False)
    assert share.parts and share.limit_bytes(Guess.AT_END) < even < share.limit_bytes(Guess.INSIDE)
    for _ in range(200):
        share.arrived(INTERVAL, goes_on=True)
    assert share.goes_on and share.limit_bytes(Guess.INSIDE) < even < share.limit_bytes(Guess.AT_END)


def test_what_parts_before_the_first_interval_says_nothing():
    _, share = share_of()
    for _ in range(20):
        share.arrived(INTERVAL - SIZE, goes_on=False)
    assert share.seen == [0, 0]


def test_the_report_has_the_share():
    manager = manager_of()
    ask(manager, 0, tokens(100))
    report = manager.report()
    assert [group.unproven for group in report.groups] == [0, 2], "after 64 tokens, and the prompt's end"

    assert "states that no request has begun with: 1 2/100" in str(report)
    ask(manager, 1, tokens(120))
    assert manager.report().groups[1].unproven == 2, "one is proven, another is the new prompt's end"
