"""Steps in which nothing happens are not planned one by one: no number changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.benchmarks.serving_sim import simulation
from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE
from jpaged.benchmarks.serving_sim.models import OPT_13B
from jpaged.benchmarks.serving_sim.policies import PAGED, SYSTEMS, build
from jpaged.benchmarks.serving_sim.simulation import simulate
from jpaged.benchmarks.serving_sim.workload import Ask

SLOTS = 700
SMALL = replace(OPT_13B, shape=replace(OPT_13B.shape, max_len=256, pool_gib=SLOTS * OPT_13B.token_bytes / 2**30))
"""A pool of so few slots that requests wait and are preempted."""

asks = st.lists(
    st.tuples(st.floats(0, 4), st.integers(1, 80), st.integers(1, 120), st.sampled_from([1, 1, 3])),
    min_size=1,
    max_size=14,
).map(lambda drawn: [Ask(*one) for one in sorted(drawn)])


def both(system, asks, most_waiting=None, **options):
    """What a run gives with coasting and without."""
    found = []
    for coasts in (True, False):
        policy = build(system, SMALL, **options)
        outcome = simulate(policy, SMALL.machine(PAPER_ENGINE), asks, most_waiting=most_waiting, coasts=coasts)
        jobs = [(job.ask, job.first_token, job.finished) for job in outcome.jobs]
        found.append((jobs, replace(outcome, jobs=[])))
    return found


@pytest.mark.parametrize("system", SYSTEMS)
@settings(max_examples=25, deadline=None)
@given(asks=asks, most_waiting=st.sampled_from([None, 3]))
def test_every_time_and_count_is_the_same_to_the_last_bit(system, asks, most_waiting):
    coasted, planned = both(system, asks, most_waiting)
    assert coasted == planned


@settings(max_examples=25, deadline=None)
@given(asks=asks, mode=st.sampled_from(["recompute", "swap"]), block_size=st.sampled_from([1, 16, 64]))
def test_it_is_the_same_with_blocks_of_any_size_and_either_way_of_return(asks, mode, block_size):
    options = {"preemption_mode": mode, "block_size": block_size}
    if mode == "swap":
        options["swap_space_bytes"] = 200 * OPT_13B.token_bytes
    coasted, planned = both(PAGED, asks, **options)
    assert coasted == planned


def planned_steps(monkeypatch, **options):
    """Serve two long requests; return how many steps there were, and how many of them were planned."""
    planned, take = [], simulation._Run.take

    def count(run, *rest):
        planned.append(1)
        take(run, *rest)

    monkeypatch.setattr(simulation._Run, "take", count)
    outcome = simulate(build(PAGED, SMALL, **options), SMALL.machine(PAPER_ENGINE), [Ask(0.0, 16, 200)] * 2)
    return outcome.steps, len(planned)


def test_most_steps_of_a_lone_batch_are_not_planned(monkeypatch):
    steps, planned = planned_steps(monkeypatch)
    assert steps == 200 and planned < 10


def test_a_cache_is_told_of_every_block_so_all_steps_are_planned(monkeypatch):
    assert planned_steps(monkeypatch, prefix_caching=True) == (200, 200)
