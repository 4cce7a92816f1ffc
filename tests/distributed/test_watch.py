"""A failure of the devices is told as what it is: the loss of a process, where one was lost."""

import threading

import pytest

from jpaged.distributed import watch
from jpaged.distributed.watch import Watch
from jpaged.errors import ProcessLost


class Broken:
    """Fails to be fetched, as the result of a collective whose peer died."""

    def __array__(self, *args, **kwargs):
        raise RuntimeError("Connection reset by peer")


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(Watch, "_leave", lambda self: None)
    monkeypatch.setattr(watch, "jax", FakeJax)
    return Watch()


class FakeJax:
    @staticmethod
    def device_get(arrays):
        return arrays.__array__() if isinstance(arrays, Broken) else arrays


def test_a_failed_fetch_waits_for_news_of_the_process_that_caused_it(run):
    timer = threading.Timer(0.2, run.lose, ["process 1 is gone"])
    timer.start()
    with pytest.raises(ProcessLost, match="process 1 is gone"):
        run.fetch(Broken())
    timer.join()


def test_a_failure_of_the_devices_stays_one_where_nobody_was_lost(run, monkeypatch):
    monkeypatch.setattr(watch, "NEWS_SECONDS", 0.05)
    with pytest.raises(RuntimeError, match="Connection reset by peer"):
        run.fetch(Broken())
    assert run.fetch([1, 2]) == [1, 2]
