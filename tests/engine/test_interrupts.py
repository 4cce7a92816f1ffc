"""Signals wait within a hold, in the main thread, and come after it."""

from __future__ import annotations

import signal
import threading

import pytest

from jpaged.engine.interrupts import SignalHold

held = SignalHold()


@pytest.fixture(autouse=True)
def handlers_stay():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before


def test_ctrl_c_comes_after_the_hold():
    done = []
    with pytest.raises(KeyboardInterrupt), held:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]


def test_a_hold_within_a_hold_ends_with_the_outer_one():
    done = []
    with pytest.raises(KeyboardInterrupt), held:
        with held:
            signal.raise_signal(signal.SIGINT)
        done.append("still held")
    assert done == ["still held"]


def test_a_handler_of_the_users_own_is_called_once_with_its_signal():
    came = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: came.append(number))
    with held:
        signal.raise_signal(signal.SIGALRM)
        assert came == []
    assert came == [signal.SIGALRM]
    signal.signal(signal.SIGALRM, before)


def test_an_exception_within_the_hold_is_the_cause_that_the_signal_shows():
    with pytest.raises(KeyboardInterrupt) as caught, held:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("first")
    assert isinstance(caught.value.__context__, ValueError)


def test_what_the_user_ignores_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held:
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with held:
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
