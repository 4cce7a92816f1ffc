"""The threads in which XLA compiles are found by what they do, and get a low priority while steps run."""

from __future__ import annotations

import os
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from jpaged.execution.compile.cache import compiled_anew
from jpaged.execution.compile.compiler_threads import (
    LEAST_SECONDS,
    NICENESS,
    CompilerThreads,
    seconds_of_threads,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no priorities of threads")


def test_those_that_took_time_are_found_and_lowered_and_raised_again():
    own = threading.get_native_id()
    times = iter([{1: 5.0, 2: 0.0, own: 0.0}, {1: 5.0, 2: 1.0, 3: LEAST_SECONDS, 4: LEAST_SECONDS / 2, own: 9.0}])
    calls: list[tuple[int, int]] = []
    threads = CompilerThreads(lambda: next(times), lambda thread, niceness: calls.append((thread, niceness)))
    with threads.found():
        pass
    assert threads.ids == {2, 3}, "one was idle, one is Python's"
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with threads.lowered():
        assert sorted(calls) == [(2, max(NICENESS, before)), (3, max(NICENESS, before))]
        calls.clear()
    assert sorted(calls) == [(2, before), (3, before)]


def test_a_system_that_does_not_say_has_none(tmp_path):
    assert seconds_of_threads(tmp_path / "none") == {}
    (tmp_path / "12").mkdir()  # it ended meanwhile
    assert seconds_of_threads(tmp_path) == {}
    (tmp_path / "12" / "stat").write_text("12 (a) b) R 1 1 1 0 -1 0 0 0 0 0 30 20 0 0\n")
    (tmp_path / "13").mkdir()
    (tmp_path / "13" / "stat").write_text("13 (tf_XLAEigen) R 1 1 1 0 -1 0 0 0 0 0 30 20 0 0\n")
    assert seconds_of_threads(tmp_path) == {12: 50 / os.sysconf("SC_CLK_TCK")}, "the other one runs steps"


@linux
def test_the_threads_that_compile_run_no_steps():
    def long(x, y):
        for number in range(40):
            x = jnp.sort(jnp.tanh(x @ y) + jnp.cumsum(x * number, axis=1), axis=1)
        return x

    x = jnp.ones((64, 64))
    threads = CompilerThreads()
    with compiled_anew(), threads.found():
        run = jax.jit(long).lower(x, x).compile()
    assert threads.ids and threads.ids <= set(seconds_of_threads())
    before = seconds_of_threads()
    for _ in range(200):
        x = jax.block_until_ready(run(x, x))
    after = seconds_of_threads()
    assert all(after[thread] - before[thread] < LEAST_SECONDS for thread in threads.ids & set(after))
    steps = sum(after.values()) - sum(before.get(thread, 0.0) for thread in after)
    assert steps > LEAST_SECONDS, "too little was run to tell"
