"""What a thread hands to coroutines, and how long it waits for them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jpaged.engine.async_stream import AsyncStream, deliver, delivery_wait

SECONDS = 60  # nothing may hang


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


def test_a_reader_takes_all_that_came_in_order():
    async def main():
        stream = AsyncStream()
        await asyncio.to_thread(deliver, [(stream, 1), (stream, 2)])
        stream.put(3)
        await asyncio.sleep(0)
        return await stream.get()

    assert run(main()) == [1, 2, 3]


def test_an_exception_comes_before_any_item():
    async def main():
        stream = AsyncStream()
        stream.put(1)
        stream.put(ValueError("no"))
        await asyncio.sleep(0)
        await stream.get()

    with pytest.raises(ValueError, match="no"):
        run(main())


def test_who_delivers_with_patience_goes_on_when_all_readers_have_dealt_with_it():
    async def main():
        seen = []

        async def reader(stream):
            seen.append(await stream.get())

        streams = [AsyncStream() for _ in range(32)]
        readers = [asyncio.create_task(reader(stream)) for stream in streams]
        await asyncio.sleep(0)

        def tell():
            deliver([(stream, i) for i, stream in enumerate(streams)], SECONDS)
            return list(seen)

        found = await asyncio.to_thread(tell)
        await asyncio.gather(*readers)
        return found

    assert run(main()) == [[i] for i in range(32)]


@pytest.mark.parametrize("patience", [0.0, 0.01])
def test_a_loop_that_is_busy_is_not_waited_for_beyond_the_patience(patience):
    told = threading.Event()

    def tell(stream):
        deliver([(stream, 1)], patience)
        told.set()

    async def main():
        stream = AsyncStream()
        thread = threading.Thread(target=tell, args=(stream,))
        thread.start()
        assert told.wait(SECONDS)  # the event loop does nothing else
        thread.join()
        return await stream.get()

    assert run(main()) == [1]


def test_a_loop_that_was_closed_is_not_waited_for():
    async def make():
        return AsyncStream()

    deliver([(run(make()), 1)], SECONDS)


def test_a_step_behind_a_compiler_is_waited_for_no_longer_than_another():
    assert delivery_wait(0.05) == pytest.approx(0.005)
    assert delivery_wait(30.0) == 0.02
