"""The sequences that a plan counts are those that the scheduler runs at once."""

from __future__ import annotations

import pytest

from jpaged.memory.layout import PoolLayout
from jpaged.planning.room import sequences_at_once
from scripts.benchmarks.shapes import shape_named
from scripts.benchmarks.simulate import PagedServer
from scripts.benchmarks.workloads import Ask


@pytest.mark.parametrize(
    ("model", "pages", "step_tokens"),
    [
        ("Llama-3.1-8B", 2000, 2048),
        ("Gemma-3-27B", 300, 512),
        ("Gemma-3-27B", 300, 2048),
        ("Granite-4-H-Small", 60, 2048),
        ("Jamba-1.5-Mini", 60, 512),
    ],
)
def test_a_pool_runs_about_as_many_sequences_as_the_plan_counts(model, pages, step_tokens):
    groups = shape_named(model).groups()
    layout = PoolLayout.plan(groups, 64 << 30)
    pool = layout.page_bytes * pages
    server = PagedServer(groups, pool, budget=step_tokens, max_num_seqs=64, prefix_caching=True)
    for i in range(64):
        assert server.add(i, Ask(0.0, 1900, 148, tokens=tuple(range(2000 * i, 2000 * i + 1900))))
    running = []
    while server.step() is not None:
        running.append(len(server.lengths))
    counted = min(64, sequences_at_once(layout, 2048, step_tokens, pool, 0.01))
    assert 0.75 * max(running) <= counted <= 1.25 * max(running)


def test_a_pool_too_small_for_one_prompt_holds_no_sequence():
    layout = PoolLayout.plan(shape_named("Gemma-3-27B").groups(), 8 << 30)
    assert sequences_at_once(layout, 8192, 8192, layout.page_bytes * 90, 0.01) == 0
    assert sequences_at_once(layout, 8192, 512, layout.page_bytes * 90, 0.01) > 0
