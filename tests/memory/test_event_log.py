"""Changes of cached blocks: a reader that follows them knows what the pool and the tiers have."""

from __future__ import annotations

import random

import pytest
from fake_store import FakeStore
from memory_pools import run
from small_schedulers import group, layout_of

from jpaged.memory import EventLog, MemoryManager, Tier, Tiers
from jpaged.memory.tiers import BreakEven

LAYOUT = layout_of([group()], 8)


def make(most: int = 10_000, pages: int = 12) -> tuple[MemoryManager, EventLog]:
    even = BreakEven(latency=0.0, read_rate=1.0, min_tokens=1)
    tier = Tier("ram", LAYOUT, FakeStore(), pages * LAYOUT.page_bytes, 1, even, at_fill=True)
    memory = MemoryManager(LAYOUT, prefix_caching=True, tiers=Tiers([tier]))
    memory.log_events(log := EventLog(most, [4]), 0)
    return memory, log


def serve(memory: MemoryManager, number: int, tokens: list[int], salt: str | None = None) -> None:
    for _ in range(2):  # the tier copies what the step before has filled
        memory.tiers.begin_step()
        if number not in memory.parts.sequences:
            memory.add(number, number)
            memory.match_prefix(number, tokens, salt=salt)
            run(memory, number, tokens)
        memory.tiers.take_writes()
        memory.dispatched()
    memory.free(number)


class Reader:
    """Follows a log: what lies in which medium, by digest."""

    def __init__(self, log: EventLog) -> None:
        self.log, self.next, self.num_lost = log, 0, 0
        self.held: dict[str, set[bytes]] = {"device": set(), "ram": set()}

    def read(self, most: int = 7) -> None:
        while True:
            found = self.log.since(self.next, most)
            if found.lost:
                self.num_lost += 1
                self.held = {medium: set() for medium in self.held}
            for event in found.events:
                held = self.held[event.medium]
                if event.kind == "cleared":
                    held.clear()
                elif event.kind == "stored":
                    held.add(event.digest)
                else:
                    held.discard(event.digest)
            self.next = found.next
            if not found.events:
                return


def there(memory: MemoryManager) -> dict[str, set[bytes]]:
    pool = {link.digest for link in memory.parts.cache.contents(0).values()}
    return {"device": pool, "ram": set(memory.tiers.each[0].index._blocks[0])}


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_knows_what_pool_and_tier_have(seed):
    memory, log = make()
    reader, rng = Reader(log), random.Random(seed)
    for number in range(60):
        serve(memory, number, [rng.randrange(3) for _ in range(4 * rng.randint(1, 5))], rng.choice([None, "a"]))
        if rng.random() < 0.1:
            memory.clear()
        if rng.random() < 0.1:
            memory.tiers.clear()
        reader.read()
        assert reader.held == there(memory) and not reader.num_lost


def test_an_event_names_tokens_parent_salt_and_medium():
    memory, log = make()
    serve(memory, 0, [1, 2, 3, 4, 5, 6, 7, 8], "a")
    events = log.since(0, 100).events
    first, second = (one for one in events if one.medium == "device")
    assert first.token_ids == (1, 2, 3, 4) and second.parent == first.digest and first.salt == second.salt != b""
    assert [one.number for one in events] == list(range(4)) and {one.medium for one in events} == {"device", "ram"}
    serve(memory, 1, [1, 2, 3, 4])
    assert log.since(4, 1).events[0].salt == b""


def test_a_reader_that_comes_too_late_starts_anew():
    memory, log = make(most=4)
    reader = Reader(log)
    reader.read()
    for number in range(5):
        serve(memory, number, [number] * 8)
    found = log.since(reader.next, 100)
    assert found.lost and len(found.events) == 4 and found.next == found.events[-1].number + 1
    assert not log.since(found.next, 100).lost and log.since(found.next + 1, 1).lost  # of an engine before


def test_a_log_that_begins_late_has_what_is_there():
    memory, _ = make()
    serve(memory, 0, [1] * 16)
    memory.log_events(log := EventLog(100, [4]), 0)
    reader = Reader(log)
    reader.read()
    assert reader.held == there(memory) and all(reader.held.values())
