"""Which shapes an engine has, and which of them it needs first."""

from __future__ import annotations

import pytest
from tiny_model import tiny_runner

from jpaged.execution.shapes import Shape, compile_at_low_priority, compiled_in_threads


@pytest.fixture(scope="module")
def runner():
    made = tiny_runner(max_num_seqs=4, budget=80, can_swap=True)
    yield made
    made.worker.close()


def test_all_shapes_have_names_of_their_own_and_their_number_is_known(runner):
    names = [shape.name for shape in runner.shapes.all()]
    assert len(set(names)) == len(names) == len(runner.shapes)


def test_the_first_and_the_later_ones_are_all_of_them(runner):
    first, later = ([shape.name for shape in some] for some in (runner.shapes.first(), runner.shapes.later()))
    assert first == [
        "decode step, 1 tokens",
        "mixed step, 64 tokens",
        "greedy sampler, 1 rows",
        "mixed step, 80 tokens",
        "full sampler, 4 rows",
    ]
    replaceable = [name for name in later if "step" in name or "sampler" in name]
    replaceable = [name for name in replaceable if "table" not in name]
    assert replaceable == [
        "full sampler, 1 rows",
        "decode step, 2 tokens",
        "decode step, 4 tokens",
        "greedy sampler, 4 rows",
    ]
    assert later[-len(replaceable) :] == replaceable, "what no larger shape can replace comes before"
    assert sorted(first + later) == sorted(shape.name for shape in runner.shapes.all())


def test_listing_shapes_traces_nothing(runner):
    before = runner.worker.num_compiled
    assert runner.shapes.later()
    assert runner.worker.num_compiled == before


def test_what_fails_in_a_thread_is_raised_where_it_was_asked_for():
    def fail():
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        compile_at_low_priority(fail)
    with pytest.raises(RuntimeError, match="no such instruction"):
        list(compiled_in_threads([Shape("a", lambda: lambda: None), Shape("b", lambda: fail)]))
