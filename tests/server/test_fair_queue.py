"""Keys get their shares of the engine, whoever asks first or most."""

import asyncio
from collections import Counter

import pytest

from jpaged.server.access import Key
from jpaged.server.errors import ApiError
from jpaged.server.fair_queue import FairQueue

A, B, C = (Key(name, b"", name, share=share) for name, share in (("a", 1.0), ("b", 1.0), ("c", 0.5)))


def served(asks, *, keys=(A, B, C), places=1, max_waiting=100):
    """The order in which requests get a place, all asked for before the first one ends."""
    order = []

    async def one(queue, key, first):
        async with queue.place(key):
            await first.wait()
            order.append(key.name)

    async def main():
        queue, first = FairQueue(keys, places=places, max_waiting=max_waiting), asyncio.Event()
        tasks = [asyncio.create_task(one(queue, key, first)) for key in asks]
        await asyncio.sleep(0)
        first.set()
        await asyncio.gather(*tasks)
        assert queue.num_waiting == 0

    asyncio.run(asyncio.wait_for(main(), 10))
    return order


async def take(queue, key):
    """Wait for a place and give it back."""
    async with queue.place(key):
        pass


def test_a_key_that_comes_behind_a_crowd_is_served_second():
    assert served([*[A] * 20, B])[:3] in (["a", "b", "a"], ["a", "a", "b"])


def test_keys_are_served_by_their_shares():
    counts = Counter(served([*[A] * 40, *[C] * 40])[:30])
    assert 19 <= counts["a"] <= 21


def test_one_key_alone_waits_for_nobody():
    assert served([A] * 5, keys=(A,), places=1) == ["a"] * 5


def test_more_than_a_keys_share_of_the_places_is_refused_and_others_still_come_in():
    async def main():
        queue = FairQueue((A, C), places=1, max_waiting=4)
        async with queue.place(A):
            waiting = [asyncio.create_task(take(queue, C)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(ApiError) as refused:
                await take(queue, C)
            assert refused.value.status == 429 and "2 requests of the key c" in refused.value.message
            waiting += [asyncio.create_task(take(queue, A)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(ApiError, match="4 requests of all keys"):
                await take(queue, A)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert queue.num_waiting == 0

    asyncio.run(asyncio.wait_for(main(), 10))  # one that is not refused would wait forever


def test_a_request_of_many_prompts_waits_once_and_is_not_refused_midway():
    async def main():
        queue, running = FairQueue((A, B), places=2, max_waiting=2), []
        place = queue.places(A)

        async def one(name, place):
            async with place():
                running.append(name)
                await asyncio.sleep(0)

        async with queue.place(B):
            prompts = [asyncio.create_task(one("a", place)) for _ in range(9)]
            await asyncio.sleep(0)
            assert running == ["a"] and queue.num_waiting == 1
            other = asyncio.create_task(one("b", queue.places(B)))
            await asyncio.gather(*prompts, other)
        assert running.index("b") < 4 and running.count("a") == 9

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_place_given_to_one_who_leaves_goes_to_the_next():
    async def main():
        queue = FairQueue((A, B), places=1, max_waiting=4)
        place = queue.place(A)
        await place.__aenter__()
        leaver, next_one = (asyncio.create_task(take(queue, key)) for key in (A, B))
        await asyncio.sleep(0)
        await place.__aexit__(None, None, None)  # it is given to one of them ...
        leaver.cancel()  # ... and this one leaves, given or not
        await asyncio.wait_for(next_one, 5)

    asyncio.run(main())
