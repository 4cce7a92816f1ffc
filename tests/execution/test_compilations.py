"""Counting compilations: how many, how long, and whether one is going on."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest

from jpaged.execution.compile.program import Compilations, Program


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
