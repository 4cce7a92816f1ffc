"""Plain decodes are planned in bulk: the plan is the one that planning each request by itself would make."""

from __future__ import annotations

import pytest
from fake_device import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples

from jpaged.memory import GroupSpec, ImageFeatures
from jpaged.scheduling import scheduler as scheduler_module
from jpaged.scheduling.inputs import PromptItem, asks_for
from jpaged.scheduling.planning import plan_decodes
from jpaged.scheduling.step import StepPlan
from jpaged.scheduling.work import ENCODES

GROUPS = {
    "full": [group("full")],
    "window": [group("full", layer_bytes=4), group("window", window=5, layer_bytes=4)],
    "pictures": [group("full"), GroupSpec("images", 8, 1, 4, ImageFeatures())],
    "pictures that stay": [group("full"), GroupSpec("images", 8, 1, 4, ImageFeatures(stays=True))],
}

arrivals = st.lists(
    st.tuples(
        st.integers(0, 6),  # step of arrival
        st.integers(1, 18),  # prompt tokens
        st.integers(1, 20),  # max_tokens
        st.sampled_from([1, 1, 1, 2]),  # outputs
        st.integers(0, 2),  # priority, where it counts
    ),
    min_size=2,
    max_size=8,
)


def told(steps, order):
    """Return what was planned, with sequences named by their request's place in `order`."""
    names = {seq.seq_id: (place, seq.index) for place, request in enumerate(order) for seq in request.sequences}
    plans = []
    for step, tables in steps:
        chunks = [(names[c.seq.seq_id], c.start, c.length, c.source_row) for c in step.chunks]
        samples = [names[sample.seq.seq_id] for sample in step.samples]
        preempted = [order.index(request) for request in step.preempted]
        encodes = [(encode.image.digest, encode.stored.blocks) for encode in step.work_of(ENCODES)]
        reads = {kind: [read.start for read in rows] for kind, rows in step.rows.items()}
        plans.append((chunks, tables, samples, dict(step.work) | {ENCODES: encodes}, reads, preempted))
    return plans


def serve(arrivals, num_pages, **options):
    """Serve the requests; return the steps and the tokens of each output."""
    scheduler = make_scheduler(num_pages, **options)
    loop, order, steps, todo = Loop(scheduler), [], [], sorted(arrivals)
    for now in range(5000):
        while todo and todo[0][0] <= now:
            _, length, max_tokens, width, priority = todo.pop(0)
            tokens = [(7 * len(order) + i) % 11 for i in range(length)]
            counts = scheduler.policy == "priority"
            request = make_request(tokens, max_tokens, width=width, priority=priority if counts else None)
            if "images" in scheduler.memory.shared and len(order) % 3:
                request.asks = asks_for([PromptItem(len(order) % length, 1, b"cat", 3, {}, False)])
            try:
                scheduler.add(request)
            except ValueError:
                continue
            order.append(request)
        if not (todo or scheduler.has_work or loop.in_flight):
            break
        step = loop.step()
        steps.append((step, [c.tables and [list(table) for table in c.tables] for c in step.chunks]))
    return told(steps, order), [seq.output_token_ids for request in order for seq in request.sequences]


@settings(max_examples=examples(150), deadline=None)
@given(
    arrivals=arrivals,
    groups=st.sampled_from(sorted(GROUPS)),
    num_pages=st.integers(8, 24),
    max_num_seqs=st.integers(2, 6),
    extra_budget=st.integers(0, 8),
    prefix_caching=st.booleans(),
    preemption_mode=st.sampled_from(["recompute", "swap"]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_steps_are_the_same_as_without_the_bulk(arrivals, groups, num_pages, max_num_seqs, extra_budget, **modes):
    options = {"groups": GROUPS[groups], "max_num_seqs": max_num_seqs, "budget": max_num_seqs + extra_budget, **modes}
    options["swap_blocks"] = 3
    with_bulk = serve(arrivals, num_pages, **options)
    known, scheduler_module.plan_decodes = scheduler_module.plan_decodes, lambda queues, position, *rest: position
    try:
        without = serve(arrivals, num_pages, **options)
    finally:
        scheduler_module.plan_decodes = known
    assert with_bulk == without


def decoding(scheduler, *requests):
    """A batch of requests whose prompts are computed."""
    loop = Loop(scheduler)
    for request in requests:
        scheduler.add(request)
    loop.step()
    loop.drain()
    return scheduler.running


def test_the_bulk_ends_at_a_request_of_several_outputs_and_goes_on_behind_it():
    scheduler = make_scheduler(64)
    decoding(scheduler, make_request(5, 9), make_request(6, 9, width=2), make_request(7, 9))
    plan = StepPlan(32)
    assert plan_decodes(scheduler.queues, 0, plan, scheduler.allocation) == 1
    assert plan_decodes(scheduler.queues, 1, plan, scheduler.allocation) == 1
    assert plan_decodes(scheduler.queues, 2, plan, scheduler.allocation) == 3
    assert [chunk.start for chunk in plan.decodes] == [5, 7] and plan.left == 30
    assert [sample.seq.pending_row for sample in plan.samples] == [0, 1]


@pytest.mark.parametrize("kind", ["pictures", "pictures that stay"])
def test_a_request_that_has_read_its_pictures_is_planned_in_the_bulk_unless_they_stay(kind):
    scheduler = make_scheduler(64, groups=GROUPS[kind])
    shown, text = make_request(6, 9), make_request(5, 9)
    shown.asks = asks_for([PromptItem(2, 1, b"cat", 3, {}, False)])
    decoding(scheduler, text, shown)
    stays = kind != "pictures"
    assert plan_decodes(scheduler.queues, 0, StepPlan(32), scheduler.allocation) == (1 if stays else 2)


@pytest.mark.parametrize("kind", ["pictures", "pictures that stay"])
def test_steps_without_tokens_that_read_pictures_are_those_of_text(kind):
    loop = Loop(make_scheduler(64, groups=GROUPS[kind], prefix_caching=True))
    for _ in range(2):  # computed, and found in the cache
        shown = make_request(6, 9)
        shown.asks = asks_for([PromptItem(2, 1, b"cat", 3, {}, False)])
        steps = [step for step in loop.run(shown) if step.chunks]
        last = max(chunk.start for step in steps for chunk in step.chunks)
        for step in steps:
            reads = step.chunks[0].start <= (last if kind != "pictures" else 2)
            assert bool(step.rows) == reads


def test_the_bulk_ends_where_a_block_is_missing_and_changes_nothing_there():
    scheduler = make_scheduler(5)
    running = decoding(scheduler, make_request(8, 4), make_request(8, 4))
    plan = StepPlan(32)
    assert plan_decodes(scheduler.queues, 0, plan, scheduler.allocation) == 1, "the fifth block is the first request's"
    assert running[1].sequences[0].num_computed == 8 and running[1].sequences[0].num_pending == 0


def test_the_bulk_ends_at_the_longest_length_and_at_prompts():
    scheduler = make_scheduler(64, budget=10)
    decoding(scheduler, make_request(4, 2), make_request(20, 5))
    plan = StepPlan(10)
    assert plan_decodes(scheduler.queues, 0, plan, scheduler.allocation) == 1, (
        "the second has most of its prompt to compute"
    )
    again = StepPlan(10)
    assert plan_decodes(scheduler.queues, 0, again, scheduler.allocation) == 1, (
        "the first one's last token is on its way"
    )
    assert not again.decodes and again.left == 10
