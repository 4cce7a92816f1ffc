"""Programs: compiled once a key, ahead of the first call or at it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.execution.compile.program import Compilations, Program


@pytest.fixture
def made():
    """A program that scales and sums, the keys it compiled and the shapes it traced."""
    keys, traced = [], []

    @partial(jax.jit, static_argnames="factor")
    def scaled_sum(x, *, factor):
        traced.append(x.shape)
        return (x * factor).sum()

    return Program(scaled_sum, keys.append), keys, traced


def test_a_call_compiles_its_key_once(made):
    program, keys, traced = made
    for _ in range(3):
        assert program("four", np.ones(4, np.float32), factor=2) == 8
    assert program("two", np.ones(2, np.float32), factor=3) == 6
    assert keys == ["four", "two"] and traced == [(4,), (2,)]


def test_what_was_prepared_from_shapes_is_not_traced_again(made):
    program, keys, traced = made
    compile_it = program.prepare("four", jax.ShapeDtypeStruct((4,), jnp.float32), factor=5)
    assert (program.out_info.shape, program.out_info.dtype) == ((), jnp.float32)
    compile_it()
    assert program("four", np.arange(4, dtype=np.float32), factor=5) == 30
    assert keys == ["four"] and traced == [(4,)]


def test_another_shape_under_a_known_key_is_an_error_rather_than_a_compilation(made):
    program, keys, traced = made
    program("four", np.ones(4, np.float32), factor=1)
    with pytest.raises(TypeError, match=r"float32\[5\]"):
        program("four", np.ones(5, np.float32), factor=1)
    assert keys == ["four"] and traced == [(4,)]


def test_a_call_waits_for_the_thread_that_has_begun_with_its_key(made):
    program, keys, traced = made
    compile_it = program.prepare("four", np.ones(4, np.float32), factor=2)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(program, "four", np.ones(4, np.float32), factor=2)
        assert program.prepare("four", np.ones(4, np.float32), factor=2) is not compile_it
        compile_it()
        assert answer.result(60) == 8
    assert keys == ["four"] and traced == [(4,)] and program.has("four")


def test_what_is_never_compiled_keeps_nobody_waiting(made):
    """Whoever traced it may have been interrupted."""
    program, keys, _ = made
    compile_it = program.prepare("four", np.ones(4, np.float32), factor=2)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(program, "four", np.ones(4, np.float32), factor=2)
        del compile_it
        assert answer.result(60) == 8
    assert keys == ["four", "four"]


def test_where_another_thread_fails_a_call_compiles_for_itself():
    failures = [RuntimeError("no room")]

    @jax.jit
    def doubled(x):
        if failures:
            raise failures.pop()
        return x * 2

    program = Program(doubled, lambda key: None)
    with pytest.raises(RuntimeError, match="no room"):
        program.prepare("x", np.ones(2, np.float32))
    assert not program.has("x")
    assert program("x", np.ones(2, np.float32)).tolist() == [2, 2]


def test_what_is_compiled_already_is_not_prepared_again(made):
    program, keys, traced = made
    program("four", np.ones(4, np.float32), factor=1)
    program.prepare("four", np.ones(4, np.float32), factor=1)()
    assert keys == ["four"] and traced == [(4,)]


# Counting compilations: how many, how long, and whether one is going on.


def program(compilations, function=lambda x: x + 1):
    return Program(jax.jit(function), compilations.begin, compilations.end)


def test_each_shape_counts_once_and_its_seconds_too():
    compilations = Compilations()
    add = program(compilations)
    for size in (2, 3, 2):
        add(size, np.ones(size, np.float32))
    assert compilations.count == 2 and compilations.num_recompiles == 0
    assert 0 < compilations.seconds < 60
    assert not compilations.running


def test_a_compilation_is_going_on_from_its_tracing_to_its_end():
    compilations = Compilations()
    seen = []

    def traced(x):
        seen.append(compilations.running)
        return x

    compile_it = program(compilations, traced).prepare("x", np.ones(2, np.float32))
    assert seen == [True] and compilations.running
    compile_it()
    assert not compilations.running


def test_one_that_fails_is_over_too():
    compilations = Compilations()

    def fails(x):
        raise RuntimeError("no such product")

    with pytest.raises(RuntimeError, match="no such product"):
        program(compilations, fails)("x", np.ones(2, np.float32))
    assert not compilations.running


def test_a_compilation_after_the_warm_up_is_a_recompile_and_a_warning(caplog):
    compilations = Compilations()
    compilations.warm = True
    with caplog.at_level(logging.DEBUG, "jpaged"):
        program(compilations)("new", np.ones(2, np.float32))
    assert compilations.num_recompiles == 1
    levels = {record.levelname: record.getMessage() for record in caplog.records if record.name.startswith("jpaged")}
    assert levels["WARNING"] == "compiling new after warm-up (number 1)"
    assert levels["DEBUG"].startswith("compiled new in ")


def test_what_was_forgotten_is_compiled_again():
    compilations = Compilations()
    add = program(compilations)
    add("x", np.ones(2, np.float32))
    before = compilations.seconds
    add.forget()
    add("x", np.ones(2, np.float32))
    assert compilations.seconds > before
