"""Policies on the real engine: what each lets in, and that all of them compute the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.benchmarks.memory_contiguous import Buddy, ContiguousMemory
from jpaged.benchmarks.serving_real.experiments import policies_of
from jpaged.benchmarks.serving_real.host import MARGIN, RANDOM, Sizes, hosted
from jpaged.benchmarks.serving_real.policies import (
    MAX_OF_TWICE,
    POLICIES,
    RealPolicy,
    WholePrompts,
    chunking,
    evicting,
    part_of,
    returning,
    scheduler_for,
)
from jpaged.benchmarks.serving_real.reservation import RequestLevelScheduler, ReservingScheduler
from jpaged.benchmarks.serving_real.workload import Task
from jpaged.benchmarks.serving_sim.hybrid_policies import LARGEST
from jpaged.benchmarks.serving_sim.policies import FASTER, MAX, ORACLE, PAGED, POW2, reservation
from jpaged.memory import FullAttention, GroupSpec, MemoryManager, PoolLayout
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Request, Scheduler, Sequence

SLOTS, LONGEST, BLOCK = 2048, 1024, 16
LAYOUT = PoolLayout.plan([GroupSpec("full", 1024, 2, BLOCK, FullAttention())], SLOTS // BLOCK * 2048)


def request(number: int, prompt: int, output: int) -> Request:
    tokens = [number] * prompt
    return Request(
        request_id=number,
        prompt_token_ids=tokens,
        params=SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True),
        seed=0,
        max_total_tokens=prompt + output,
        stop_ids=frozenset(),
        eos_ids=frozenset(),
        sequences=[Sequence(number, 0, list(tokens), prompt)],
    )


def orca(name: str, seqs: int = 256) -> ReservingScheduler:
    return ReservingScheduler.over(
        LAYOUT,
        SLOTS,
        reservation(name, LONGEST),
        block_size=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=1 << 14,
    )


def drain(scheduler: Scheduler) -> int:
    """Run all requests to their ends and return the most that ran at once."""
    most = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step.chunks, "nobody waits for nothing"
        scheduler.dispatched(step)
        most = max(most, len(scheduler.running))
        scheduler.update(step, [0] * len(step.samples), [0.0] * len(step.samples))
    return most


@pytest.mark.parametrize(
    ("name", "prompt", "output", "most"),
    [(MAX, 16, 4, 2), (POW2, 16, 100, 8), (POW2, 16, 130, 4), (ORACLE, 16, 112, 16), (ORACLE, 16, 113, 8)],
)
def test_as_many_run_as_there_are_regions(name, prompt, output, most):
    # 16 + 128 -> 256 slots; 16 + 256 -> 512; 16 + 112 = 128 exactly, one token more 256; of 2,048 slots
    scheduler = orca(name)
    for number in range(40):
        scheduler.add(request(number, prompt, output))
    assert drain(scheduler) == most
    assert scheduler.num_preemptions == 0, "what was reserved is there"
    assert not scheduler.memory.reserved and scheduler.memory.report().used == 0


def test_pages_hold_more_than_any_reservation_of_the_same_pool():
    paged = Scheduler(MemoryManager(LAYOUT), max_num_seqs=256, max_num_batched_tokens=1 << 14)
    schedulers = [paged, *(orca(name) for name in (ORACLE, POW2, MAX))]
    found = []
    for scheduler in schedulers:
        for number in range(40):
            scheduler.add(request(number, 50, 90))
        found.append(drain(scheduler))
    assert found == sorted(found, reverse=True) and found[0] > 1.5 * found[1]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 200)), min_size=1, max_size=40),
    st.sampled_from([MAX, POW2, ORACLE]),
)
def test_the_engine_lets_in_whom_the_simulated_orca_lets_in(lengths, name):
    """No region is below a block, to which the engine rounds it up."""
    lengths = [(prompt + BLOCK, output) for prompt, output in lengths]
    simulated = ContiguousMemory(Buddy(SLOTS), reservation(name, LONGEST), lengths)
    inside = 0
    while inside < len(lengths) and simulated.allocate(inside, 1, first_write=0) is not None:
        inside += 1
    scheduler = orca(name)
    for number, (prompt, output) in enumerate(lengths):
        scheduler.add(request(number, prompt, output))
    step = scheduler.schedule()
    scheduler.dispatched(step)
    assert len(scheduler.running) == inside
    scheduler.update(step, [0] * len(step.samples), [0.0] * len(step.samples))
    drain(scheduler)
    assert scheduler.memory.report().used == 0 and not scheduler.memory.reserved


def test_nobody_is_let_in_while_a_batch_runs():
    scheduler = RequestLevelScheduler.over(
        LAYOUT,
        SLOTS,
        reservation(MAX, LONGEST),
        block_size=BLOCK,
        max_num_seqs=256,
        max_num_batched_tokens=1 << 14,
    )
    for number, output in enumerate((2, 6, 3, 3)):
        scheduler.add(request(number, 16, output))
    seen = []
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.dispatched(step)
        seen.append(tuple(one.request_id for one in scheduler.running))
        scheduler.update(step, [0] * len(step.samples), [0.0] * len(step.samples))
    assert list(dict.fromkeys(seen)) == [(0, 1), (1,), (2, 3)], "0's region stays empty until 1 has ended, too"
    assert scheduler.memory.report().used == 0 and not scheduler.memory.reserved


def test_a_request_that_no_region_could_hold_is_refused_and_nothing_stays():
    scheduler = orca(ORACLE)
    with pytest.raises(ValueError, match="can never fit the pool"):
        scheduler.add(request(0, 1500, 1000))
    assert not scheduler.has_work and not scheduler.memory.reserved


def test_an_abort_gives_the_region_back():
    scheduler = orca(MAX)
    requests = [request(number, 20, 20) for number in range(3)]
    for one in requests:
        scheduler.add(one)
    scheduler.dispatched(scheduler.schedule())
    assert len(scheduler.running) == 2
    scheduler.abort(requests[0])
    scheduler.schedule()
    assert requests[2] in scheduler.running


def test_everything_is_computed_again_after_a_restart():
    scheduler = orca(ORACLE)
    for number in range(5):
        scheduler.add(request(number, 30, 10))
    scheduler.dispatched(scheduler.schedule())
    scheduler.restart()
    assert not scheduler.memory.reserved
    assert drain(scheduler) == 5 and scheduler.memory.report().used == 0


def test_a_whole_prompt_waits_for_a_step_with_room():
    def first_step(kind):
        scheduler = kind(MemoryManager(LAYOUT), max_num_seqs=8, max_num_batched_tokens=64)
        for number in range(3):
            scheduler.add(request(number, 40, 4))
        return [chunk.length for chunk in scheduler.schedule().chunks], scheduler

    assert first_step(Scheduler)[0] == [40, 24]
    lengths, scheduler = first_step(WholePrompts)
    assert lengths == [40]
    scheduler.restart()
    assert drain(scheduler) >= 1


def test_a_prompt_longer_than_a_step_runs_in_chunks_all_the_same():
    scheduler = WholePrompts(MemoryManager(LAYOUT), max_num_seqs=8, max_num_batched_tokens=64)
    for number in range(2):
        scheduler.add(request(number, 100, 4))
    drain(scheduler)
    assert scheduler.memory.report().used == 0


@pytest.fixture(scope="module")
def host():
    with hosted(RANDOM, Sizes(256, 128, 8, 64, small=True)) as made:
        yield made


def test_every_policy_generates_the_same_on_one_engine(host):
    """Memory is so small that the largest page preempts, and that Orca (Max) runs two."""
    prompts = [{"prompt_token_ids": [(7 * n + i) % 500 + 3 for i in range(20 + n)]} for n in range(10)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    policies = [*POLICIES.values(), *chunking(64), *returning(), *evicting()]
    compiled = host.llm.stats().num_recompiles
    answers, preempted = {}, set()
    for policy in policies:
        host.use(policy)
        outputs = host.llm.generate(prompts, params, use_tqdm=False)
        answers[policy.name] = [output.outputs[0].token_ids for output in outputs]
        if host.llm.stats().num_preemptions:
            preempted.add(policy.name)
    assert all(found == answers[PAGED] for found in answers.values())
    assert LARGEST in preempted and not {ORACLE, POW2, MAX, FASTER} & preempted
    assert host.llm.stats().num_recompiles == compiled, "all policies run the same programs"


def test_a_policys_part_of_the_pool_is_its_first_large_pages(host):
    spec = host.llm._engine.runner.spec
    half = scheduler_for(RealPolicy("half", part=0.5), host.llm.config, spec, 128).memory.layout
    assert half.num_pages == spec.layout.num_pages // 2 and half.page_bytes == spec.layout.page_bytes
    assert [group.num_blocks * 2 for group in half.groups] == [group.num_blocks for group in spec.layout.groups]
    assert part_of(spec.layout, 1.0) == spec.layout and part_of(spec.layout, 1e-9).num_pages == 1


def test_a_pool_holds_the_tokens_that_were_asked_for(host):
    spec = host.llm.config.kv_cache_memory_bytes
    assert spec == (256 + MARGIN) * 2 * 6 * 64 * 4


def test_requests_are_served_in_real_time_and_late_ones_are_cut_off(host):
    host.use(POLICIES[PAGED])
    tasks = [Task("chat", tuple(range(3, 33)), 12)] * 4
    served = host.serve(tasks, [0.0, 0.0, 0.01, 0.02], 60.0)
    assert [answer.output_tokens for answer in served.answers] == [12] * 4
    assert all(answer.error is None and answer.due <= answer.token_times[0] for answer in served.answers)
    assert served.steps >= 12 and served.cached > 0, "the later ones find the prompt"
    host.use(POLICIES[PAGED])
    served = host.serve(tasks, [0.0, 0.0, 0.0, 1e6], 0.5)
    assert served.answers[-1].error == "cut off: the time was up"
    assert not host.llm._engine.has_work


def test_a_policy_that_could_run_nothing_is_refused(host):
    engine = host.llm._engine
    with pytest.raises(ValueError, match="holds no region of 4,096, which is 1 times max_model_len=4,096"):
        scheduler_for(POLICIES[MAX], host.llm.config, engine.runner.spec, 4096)


def test_twice_as_long_reserves_for_a_request_of_twice_the_longest(host):
    engine = host.llm._engine
    longest = engine.max_model_len
    twice, once = (
        scheduler_for(POLICIES[name], host.llm.config, engine.runner.spec, longest).memory
        for name in (MAX_OF_TWICE, MAX)
    )
    assert twice.region(10, 4) == 2 * longest == 2 * once.region(10, 4)
    with pytest.raises(ValueError, match="holds no region of 256, which is 2 times max_model_len=128"):
        small = replace(engine.runner.spec, layout=part_of(engine.runner.spec.layout, 0.25))
        scheduler_for(POLICIES[MAX_OF_TWICE], host.llm.config, small, 128)


def test_what_no_pool_of_the_size_can_reserve_is_not_compared():
    sizes = Sizes(pool_tokens=1000, max_model_len=512, max_num_seqs=4, step_tokens=64)
    assert MAX in policies_of("some model", sizes) and MAX_OF_TWICE not in policies_of("some model", sizes)
    assert MAX_OF_TWICE in policies_of("some model", replace(sizes, pool_tokens=1024))
    assert MAX_OF_TWICE not in policies_of(RANDOM, sizes)
    small = replace(sizes, pool_tokens=256)  # for which Orca (Max) is refused by name, and jpaged is compared still
    assert {PAGED, MAX} <= set(policies_of("some model", small))
