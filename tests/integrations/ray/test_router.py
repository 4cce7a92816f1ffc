"""Which replicas Serve is offered for a request, and in which order: a hint holds however they are chosen."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from jpaged.integrations.ray.hints import Hint
from jpaged.integrations.ray.router import LoadRouter, PrefixRouter

NAMES = ["a", "b", "c", "d"]


class Name(NamedTuple):
    """What Serve calls a replica."""

    unique_id: str


@pytest.fixture(params=[LoadRouter, PrefixRouter])
def router(request):
    """A router without Serve behind it, which has sent nothing yet."""
    router = object.__new__(request.param)
    router._replica_queue_len_cache = {}
    if isinstance(router, PrefixRouter):
        router.initialize_state(overload=2, max_chunks=8)
    return router


def offered(router, hint, names=NAMES):
    """The names of the replicas in ranks, and whether Serve waits before it asks again."""
    replicas = [SimpleNamespace(replica_id=Name(name)) for name in names]
    asked = SimpleNamespace(args=(hint,), routing_context=SimpleNamespace(should_backoff=False))
    ranks = asyncio.run(router.choose_replicas(replicas, asked))
    return [[replica.replica_id.unique_id for replica in rank] for rank in ranks], asked.routing_context.should_backoff


def flat(ranks):
    return [name for rank in ranks for name in rank]


def test_every_replica_is_offered_once_and_serve_waits_before_it_asks_again(router):
    ranks, waits = offered(router, Hint())
    assert sorted(flat(ranks)) == NAMES and waits


def test_the_one_that_is_asked_for_is_the_only_one_offered_while_it_is_there(router):
    assert offered(router, Hint(only="c"))[0][0] == ["c"] and flat(offered(router, Hint(only="c"))[0]) == ["c"]
    assert sorted(flat(offered(router, Hint(only="gone"))[0])) == NAMES


def test_those_that_refused_are_offered_only_where_there_is_no_other(router):
    assert sorted(flat(offered(router, Hint(avoid=frozenset("ab")))[0])) == ["c", "d"]
    assert sorted(flat(offered(router, Hint(avoid=frozenset(NAMES)))[0])) == NAMES
    assert flat(offered(router, Hint(), names=[])[0]) == []


def test_by_load_the_first_two_are_drawn_and_all_come_first_as_often():
    random.seed(0)
    router = object.__new__(LoadRouter)
    ranks = [offered(router, Hint())[0] for _ in range(400)]
    assert {len(rank) for rank, *_ in ranks} == {2}
    drawn = Counter(name for rank, *_ in ranks for name in rank)
    assert sorted(drawn) == NAMES and min(drawn.values()) > 100
