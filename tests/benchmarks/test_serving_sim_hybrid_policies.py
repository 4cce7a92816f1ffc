"""Baselines for models whose layers differ: what each of them holds, refuses and gives back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jpaged.benchmarks.serving_sim.hybrid_policies import (
    GCD,
    HYBRID_SYSTEMS,
    LARGEST,
    NAIVE,
    SPLIT,
    build_hybrid,
    held_bytes,
)
from jpaged.benchmarks.serving_sim.machine import RECENT_ENGINE
from jpaged.benchmarks.serving_sim.models import Served, shape_named
from jpaged.benchmarks.serving_sim.policies import PAGED
from jpaged.benchmarks.serving_sim.policy import Job
from jpaged.benchmarks.serving_sim.simulation import simulate
from jpaged.benchmarks.serving_sim.workload import Ask

GEMMA = replace(shape_named("Gemma-3-27B"), pool_gib=4.0, max_len=32768)
VISION = replace(shape_named("Llama-3.2-11B-Vision"), pool_gib=3.0)
MACHINE = Served(GEMMA, 27e9, 27e9, 5376, 62, 2, "h100").machine(RECENT_ENGINE)


def held_by(system, shape, length):
    policy = build_hybrid(system, shape, length)
    policy.arrive(Job(Ask(0.0, length, 50)))
    end = length + policy.shift
    while policy.scheduler.waiting or policy.scheduler.running[0].sequences[0].num_computed < end:
        step = policy.schedule()
        policy.scheduler.dispatched(step)
        policy.scheduler.update(step, [0] * len(step.samples), [0.0] * len(step.samples))
    return held_bytes(policy)


def test_the_largest_page_keeps_what_lies_behind_windows():
    length, needed = 6000, GEMMA.needed_bytes(6000)
    assert held_by(LARGEST, GEMMA, length) > 2 * needed
    assert needed <= held_by(PAGED, GEMMA, length) < 1.1 * needed


def test_the_largest_page_keeps_images_in_every_layer():
    text, images = 100, VISION.image_tokens
    assert held_by(LARGEST, VISION, text) >= (images + text) * 40 * 4096
    assert held_by(PAGED, VISION, text) < 0.5 * (images + text) * 40 * 4096


def test_gcd_pages_hold_exactly_the_blocks():
    policy = build_hybrid(GCD, GEMMA, 1000)
    held = held_by(GCD, GEMMA, 6000)
    assert policy.memory.page_bytes == 2 * 16 * 8192, "the divisor of 10 and 52 layers"
    assert held % policy.memory.page_bytes == 0
    assert held <= held_by(PAGED, GEMMA, 6000)


def test_gcd_pages_never_exceed_the_pool():
    policy, most = build_hybrid(GCD, GEMMA, 3000), []
    asks = [Ask(0.0, 3000 + i, 40) for i in range(40)]
    outcome = simulate(policy, MACHINE, asks, watch=lambda p, step, clock: most.append(p.memory.used_pages))
    assert len(outcome.jobs) == 40
    assert 0.5 < max(most) * policy.memory.page_bytes / (4 << 30) <= 1


def test_a_static_split_is_right_for_one_length_only():
    asks, shape = [Ask(0.0, 12_000, 30)] * 6, replace(GEMMA, pool_gib=8.0)
    right = simulate(build_hybrid(SPLIT, shape, 12_000), MACHINE, asks)
    wrong = simulate(build_hybrid(SPLIT, shape, 1500), MACHINE, asks)
    assert len(right.jobs) == len(wrong.jobs) == 6
    assert right.batch > 1.5 * wrong.batch


def test_naive_jenga_gives_a_page_to_several_requests_and_jenga_does_not():
    shape = replace(GEMMA, pool_gib=2.0)
    pages = {}
    for system in (PAGED, NAIVE):
        policy = build_hybrid(system, shape, 100)
        per_page = policy.memory.layout.groups[0].blocks_per_page
        assert per_page > 1
        for _ in range(2):
            policy.arrive(Job(Ask(0.0, 16, 4)))
        policy.scheduler.dispatched(policy.schedule())
        tables = [policy.memory.block_table(request.request_id, 0) for request in policy.scheduler.running]
        pages[system] = {block // per_page for table in tables for block in table}
    assert len(pages[PAGED]) == 2 and len(pages[NAIVE]) == 1


@pytest.mark.parametrize("system", HYBRID_SYSTEMS)
def test_every_policy_answers_every_request_and_gives_all_memory_back(system):
    policy = build_hybrid(system, GEMMA, 2500)
    outcome = simulate(policy, MACHINE, [Ask(0.2 * i, 2000 + 100 * i, 20) for i in range(8)])
    assert len(outcome.jobs) == 8 and held_bytes(policy) == 0


def test_the_gcd_page_has_no_prefix_cache():
    with pytest.raises(ValueError, match="prefix_caching: the GCD page"):
        build_hybrid(GCD, GEMMA, 100, prefix_caching=True)
    with pytest.raises(ValueError, match="'vLLM' is not one of"):
        build_hybrid("vLLM", GEMMA, 100)
