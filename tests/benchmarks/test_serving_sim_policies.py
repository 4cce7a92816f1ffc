"""Policies of the serving simulation: each admits, batches and answers as the system that it stands for."""

from __future__ import annotations

import pytest

from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE
from jpaged.benchmarks.serving_sim.models import OPT_13B
from jpaged.benchmarks.serving_sim.policies import FASTER, MAX, ORACLE, PAGED, POW2, SYSTEMS, build
from jpaged.benchmarks.serving_sim.policy import Job
from jpaged.benchmarks.serving_sim.simulation import simulate
from jpaged.benchmarks.serving_sim.workload import Ask

MACHINE = OPT_13B.machine(PAPER_ENGINE)


def serve(system, asks, **options):
    policy, running = build(system, OPT_13B, **options), []
    outcome = simulate(policy, MACHINE, asks, watch=lambda p, step, clock: running.append(len(p.scheduler.running)))
    return outcome, max(running)


def test_request_level_batching_begins_a_batch_when_the_last_has_ended():
    asks = [Ask(0.0, 16, 8), Ask(0.0, 16, 24), Ask(0.001, 16, 8)]
    outcome, most = serve(FASTER, asks)
    first, second, third = sorted(outcome.jobs, key=lambda job: asks.index(job.ask))
    assert most == 2
    assert first.finished == second.finished, "answers come when the batch ends"
    assert third.first_token > second.finished, "nobody joins a running batch"


def test_request_level_batches_are_as_large_as_the_longest_lengths_allow():
    assert serve(FASTER, [Ask(0.0, 16, 4)] * 20)[1] == 15_700 // 2048 == 7


def test_request_level_batching_counts_who_waits_before_the_scheduler():
    policy = build(FASTER, OPT_13B)
    for _ in range(6):
        policy.arrive(Job(Ask(0.0, 16, 4, n=2)))
    assert policy.num_waiting == 12
    policy.scheduler.dispatched(policy.schedule())
    assert policy.num_waiting == 12 - 6, "a batch has seven seats, and a request of two outputs takes two"


def test_orca_max_reserves_the_longest_length_but_lets_requests_join():
    outcome, most = serve(MAX, [Ask(0.0, 16, 4 + i) for i in range(20)])
    assert most == 7
    assert len({job.finished for job in outcome.jobs}) > 4, "each ends on its own"


@pytest.mark.parametrize(("system", "output", "most"), [(POW2, 100, 61), (POW2, 130, 30), (ORACLE, 112, 122)])
def test_orcas_reservations_are_rounded_by_the_buddy_allocator(system, output, most):
    # 16 + 128 -> 256 slots; 16 + 256 -> 512; 16 + 112 = 128 exactly; of 15,700 slots
    assert serve(system, [Ask(0.0, 16, output)] * 150)[1] == most


def test_pages_hold_more_requests_than_any_reservation():
    asks = [Ask(0.0, 50, 70)] * 250
    most = [serve(system, asks)[1] for system in (PAGED, ORACLE, POW2)]
    assert most[0] > 1.5 * most[1] and most[1] > 1.5 * most[2]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_policy_answers_every_request_and_gives_all_memory_back(system):
    policy = build(system, OPT_13B)
    asks = [Ask(0.1 * i, 30 + i, 5 + i, n=1 + i % 2) for i in range(12)]
    outcome = simulate(policy, MACHINE, asks)
    assert len(outcome.jobs) == 12 and not policy.jobs and not policy.has_work
    assert all(job.ask.arrival < job.first_token <= job.finished for job in outcome.jobs)
    if system == PAGED:
        assert policy.memory.report().used == 0
    else:
        assert not policy.memory.reserved


def test_outputs_of_a_prompt_share_its_blocks_in_pages_only():
    ask = Ask(0.0, 160, 20, n=4)
    paged, orca = build(PAGED, OPT_13B), build(ORACLE, OPT_13B)
    paged.arrive(Job(ask))
    orca.arrive(Job(ask))
    assert len(paged.scheduler.waiting) == 1 and len(orca.scheduler.waiting) == 4
    for policy in (paged, orca):
        policy.scheduler.dispatched(policy.schedule())
    assert paged.memory.report().saving == pytest.approx(0.75)
    assert sum(orca.memory.reserved.values()) == 4 * 180


def test_a_job_of_several_requests_ends_with_the_last_of_them():
    job = Job(Ask(0.0, 16, 4, n=2))
    policy = build(ORACLE, OPT_13B)
    policy.arrive(job)
    first, second = policy.scheduler.waiting
    assert policy.ended([first], 1.0) == [] and job.finished is None
    assert policy.ended([second], 2.0) == [job] and job.finished == 2.0


def test_contiguous_beams_pay_for_copies():
    asks = [Ask(0.0, 200, 30, n=4, beams=True)]
    assert serve(ORACLE, asks, copied=0.2)[0].seconds > 1.005 * serve(ORACLE, asks)[0].seconds


def test_what_no_region_could_hold_is_refused():
    outcome, _ = serve(POW2, [Ask(0.0, 16, 4), Ask(0.0, 20_000, 4)])
    assert outcome.refused == 1 and len(outcome.jobs) == 1


def test_an_unknown_policy_is_named():
    with pytest.raises(ValueError, match="'vLLM' is not one of"):
        build("vLLM", OPT_13B)
