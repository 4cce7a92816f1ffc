"""What a replica tells routers of its cache, and what a router makes of it."""

from __future__ import annotations

import hashlib

from jpaged.cache_events import CacheEvent, CacheEvents
from jpaged.integrations.ray.held_chains import MOST_CHANGES, HeldChains, ReportReader
from jpaged.integrations.ray.prefix_index import Policy, PrefixIndex

SIZE = 4


def digest(tokens):
    return hashlib.sha256(repr(list(tokens)).encode()).digest()[:16]


class Engine:
    """A cache of blocks, by the tokens that they end."""

    def __init__(self):
        self.events, self.number, self.lost = [], 0, False

    def _add(self, kind, tokens, medium):
        parent, name = (digest(tokens[: len(tokens) - cut]) for cut in (SIZE, 0))
        own = tuple(tokens[-SIZE:]) if kind == "stored" else ()
        self.events.append(CacheEvent(self.number, kind, medium, 0, 0, name, parent if own else b"", own))
        self.number += 1

    def store(self, tokens, medium="device"):
        for end in range(SIZE, len(tokens) + 1, SIZE):
            self._add("stored", tokens[:end], medium)

    def remove(self, tokens, medium="device"):
        self._add("removed", tokens, medium)

    def clear(self, medium="device"):
        self.events.append(CacheEvent(self.number, "cleared", medium, 0))

    def take(self):
        events, self.events = self.events, []
        lost, self.lost = self.lost, False
        return CacheEvents(events, self.number, lost)


def chain(name, length=4):
    return tuple(f"{name}{i}".encode() for i in range(length))


TOKENS = list(range(20))  # with a chain of four links, each ends in another block


class Followed:
    """An engine, what its replica reports, and a router's index."""

    def __init__(self):
        self.engine, self.chains = Engine(), HeldChains()
        self.index, self.reader = PrefixIndex(100), ReportReader()

    def served(self, name, tokens):
        self.engine.store(tokens)
        self.chains.follow(self.engine.take())
        self.chains.served(chain(name), tokens)
        self.index.add("r", chain(name))

    def match(self, name):
        self.chains.follow(self.engine.take())
        self.index.follow("r", self.reader.news(self.chains.report()))
        return self.index.match("r", chain(name))


def test_a_router_drops_what_a_replica_evicted():
    one = Followed()
    one.served("a", TOKENS)
    assert one.match("a") == 4
    one.engine.remove(TOKENS[:16])
    assert one.match("a") == 3
    one.engine.remove(TOKENS[:4])
    assert one.match("a") == 0
    one.served("a", TOKENS)
    assert one.match("a") == 4


def test_what_a_tier_has_is_not_lost():
    one = Followed()
    one.served("a", TOKENS)
    one.engine.store(TOKENS, "ram")
    for end in range(4, 21, 4):
        one.engine.remove(TOKENS[:end])
    assert one.match("a") == 4
    one.engine.clear("ram")
    assert one.match("a") == 0


def test_a_router_learns_what_others_sent():
    one = Followed()
    one.served("a", TOKENS)
    other, reader = PrefixIndex(100), ReportReader()
    other.follow("r", reader.news(one.chains.report()))
    assert other.match("r", chain("a")) == 4


def test_a_prompt_that_is_gone_before_it_was_looked_for_is_lost():
    one = Followed()
    one.engine.store(TOKENS)
    one.engine.remove(TOKENS[:8])
    one.served("b", [9] * 20)
    one.chains.served(chain("a"), TOKENS)
    one.index.add("r", chain("a"))
    assert one.match("a") == 1 and one.match("b") == 4


def test_events_that_were_lost_void_what_was_known():
    one = Followed()
    one.served("a", TOKENS)
    assert one.match("a") == 4
    one.engine.lost = True
    assert one.match("a") == 0


def test_a_router_that_missed_reports_begins_anew():
    one = Followed()
    one.served("a", TOKENS)
    assert one.match("a") == 4
    for number in range(MOST_CHANGES):
        one.chains.served((f"x{number}".encode(), b"end"), TOKENS)
    assert one.match("a") == 0
    one.served("b", TOKENS)
    assert one.match("b") == 4


def test_the_replica_that_has_a_prompt_still_is_preferred():
    index, engines = PrefixIndex(100), {name: Followed() for name in "ab"}
    for name, one in engines.items():
        one.index = index
        one.engine.store(TOKENS)
        one.chains.follow(one.engine.take())
        one.chains.served(chain("p"), TOKENS)
        index.add(name, chain("p"))
    engines["a"].engine.remove(TOKENS[:4])
    for name, one in engines.items():
        one.chains.follow(one.engine.take())
        index.follow(name, one.reader.news(one.chains.report()))
    assert Policy(index, overload=9).ranked(chain("p"), {"a": 0, "b": 2})[0] == ["b"]
