"""Programs are shared between functions made of equal things, and between no others."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.execution.compile import program as module
from jpaged.execution.compile.program import Program
from jpaged.execution.compile.recent import CompiledProgram, RecentPrograms, signature


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    """The process' programs, none of them known yet."""
    fresh = RecentPrograms()
    monkeypatch.setattr(module, "recent_programs", fresh)
    return fresh


def scale(by: int, traced: list[int]):
    @partial(jax.jit, static_argnames="power")
    def scaled(x, *, power):
        traced.append(by)
        return x**power * by

    return scaled


def test_a_function_made_again_of_the_same_is_not_traced_again():
    traced, keys = [], []
    for _ in range(3):
        program = Program(scale(2, traced), keys.append, made_of=("scale", 2))
        assert program("four", np.full(4, 3, np.float32), power=2).tolist() == [18] * 4
    assert traced == [2] and keys == ["four"] * 3, "each program is told of its shapes all the same"


def test_what_is_made_of_something_else_shapes_and_static_arguments_keep_programs_apart():
    traced = []
    ones = np.ones(4, np.float32)
    for by, x, power in ((2, ones, 1), (3, ones, 1), (2, ones[:2], 1), (2, ones, 2), (2, ones.astype(np.int32), 1)):
        program = Program(scale(by, traced), lambda _: None, made_of=("scale", by))
        assert program("key", x, power=power).tolist() == [by] * len(x)
    assert len(traced) == 5


def test_what_was_prepared_gives_its_shapes_without_a_trace():
    traced = []
    for _ in range(2):
        program = Program(scale(2, traced), lambda _: None, made_of=("scale", 2))
        compile_it = program.prepare("four", jax.ShapeDtypeStruct((4,), jnp.float32), power=3)
        assert program.out_info.shape == (4,)
        compile_it()
    assert traced == [2]


def test_a_program_without_a_name_is_its_own():
    traced = []
    for _ in range(2):
        Program(scale(2, traced), lambda _: None)("four", np.ones(4, np.float32), power=1)
    assert traced == [2, 2]


def test_what_cannot_be_compared_has_no_signature():
    assert signature(("model", np.ones(2)), (), {}) is None
    assert signature(("model", [1]), (), {}) is None
    assert signature(("model", (1, 2)), (np.ones(2),), {"top": 0}) is not None


def test_the_programs_asked_for_last_are_kept(programs):
    kept = RecentPrograms(most=2)
    first, second, third = (CompiledProgram(None, name) for name in ("first", "second", "third"))
    kept.keep(1, first)
    kept.keep(2, second)
    assert kept.find(1) is first
    kept.keep(3, third)
    assert kept.find(2) is None and kept.find(1) is first and kept.find(3) is third
    assert kept.find(None) is None
    kept.clear()
    assert kept.find(1) is None
