"""What an engine knows of its requests: who waits for them, where they run, and what is told when they end."""

from __future__ import annotations

import pytest
from fake_device import Loop
from small_schedulers import make_request, make_scheduler

from jpaged.engine.replica import Replica
from jpaged.engine.request_registry import RequestRegistry
from jpaged.scheduling import Status


@pytest.fixture
def replica():
    return Replica(make_scheduler(), max_model_len=64)


def registered(book, replica, *requests):
    for request in requests:
        replica.add(request)
        book.register(replica, request)
    return requests


def test_a_request_that_ended_is_told_once_and_leaves_its_replica(replica):
    book, request = RequestRegistry(), make_request(5, max_tokens=2)
    registered(book, replica, request)
    Loop(replica.scheduler).run()
    book.finish(request)
    assert not book.unfinished and replica.load == 0 and replica.ended == {"length": 1}
    assert book.take_finished() == [request]
    assert book.take_finished() == []


def test_an_abort_frees_what_the_request_holds_and_whoever_waits_for_it(replica):
    book, loop = RequestRegistry(), Loop(replica.scheduler)
    one, other = registered(book, replica, make_request(5), make_request(6))
    book.awaited[one.request_id] = book.restored[one.request_id] = one
    loop.step()
    replica.in_flight.append(object())
    book.abort(one)
    assert not book.awaited and not book.restored and list(book.unfinished.values()) == [other]
    assert replica.load == 1 and replica.in_flight, "the other request waits for the step"
    book.abort(other)
    assert not replica.in_flight and replica.memory.num_used_blocks == 0
    book.abort(other)
    assert replica.load == 0 and book.take_finished() == [], "nobody is told of what was aborted"


def test_all_requests_can_be_ended_for_their_callers_to_read(replica):
    book = RequestRegistry()
    requests = registered(book, replica, make_request(5), make_request(6, width=2))
    book.end_all()
    assert book.take_finished() == list(requests) and not book.unfinished and replica.load == 0
    assert {seq.finish_reason for request in requests for seq in request.sequences} == {"abort"}


def test_what_is_put_back_waits_over_an_empty_memory_and_what_had_ended_is_told(replica):
    book, loop = RequestRegistry(), Loop(replica.scheduler)
    ended, running = registered(book, replica, make_request(5, max_tokens=1), make_request(6, max_tokens=9))
    for _ in range(2):
        loop.step()
    assert ended.status is Status.FINISHED and running.status is Status.RUNNING
    book.put_back([replica])
    assert book.take_finished() == [ended]
    assert running.status is Status.WAITING and replica.memory.num_used_blocks == 0 and replica.load == 1
