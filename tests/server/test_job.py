"""A response's job has one beginning and one end, whenever it is cancelled."""

import asyncio

import pytest

from jpaged.server.openai.responses.event_replay import kind_of
from jpaged.server.openai.responses.job import Job


class Held:
    """An answer that yields some events and then waits for ever."""

    error = None

    def __init__(self, *kinds):
        self.kinds = kinds

    def state(self, status):
        return {"status": status, "incomplete_details": None}

    async def events(self):
        for kind in self.kinds:
            yield kind, {"response": self.state(kind.partition(".")[2])}
        await asyncio.Event().wait()


async def cancelled(answer):
    job = Job(answer.state("queued"), [])
    job.start(answer)
    await asyncio.sleep(0)
    await job.cancel()
    return job.response["status"], [kind_of(event) async for event in job.follow()]


@pytest.mark.parametrize(
    ("before", "status", "events"),
    [
        ([], "cancelled", ["created", "cancelled"]),
        (["created"], "cancelled", ["created", "cancelled"]),
        (["created", "completed"], "completed", ["created", "completed"]),
    ],
)
def test_a_cancelled_job_has_one_beginning_and_one_end(before, status, events):
    found = asyncio.run(cancelled(Held(*(f"response.{kind}" for kind in before))))
    assert found == (status, [f"response.{kind}" for kind in events])
