"""Counts what the scheduler does where requests are preempted, by block size and way of return: no device, no clock.

It is the load of `sharing.returning`, whose times these counts explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.memory import FullAttention, GroupSpec, MemoryManager, PoolLayout
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import PreemptionMode, Request, Scheduler
from jpaged.scheduling import Sequence as Stream

PROMPT = OUTPUT = 100
"""Tokens of every request."""
TOKEN_BYTES = 4096
MAX_NUM_SEQS, BUDGET = 24, 256


@dataclass(frozen=True)
class Returning:
    """Holds the counts of one run.

    Attributes:
        pool_blocks: blocks of the pool, which is half of what all requests want.
        batch: mean sequences of a step.
        moved: blocks that went to the host and came back.
        computed: tokens that were computed, those computed again included.
    """

    block_size: int
    mode: PreemptionMode
    pool_blocks: int
    steps: int
    batch: float
    preemptions: int
    moved: int
    computed: int


def count(block_size: int, mode: PreemptionMode, num_requests: int = 8) -> Returning:
    """Serve requests that are all sent at once to a pool of half of what they want."""
    spec = GroupSpec("full", block_size * TOKEN_BYTES, 1, block_size, FullAttention())
    layout = PoolLayout.plan([spec], num_requests * (PROMPT + OUTPUT) // 2 * TOKEN_BYTES)
    space = layout.pool_bytes if mode == "swap" else 0
    memory = MemoryManager(layout, max_step_tokens=BUDGET, swap_space_bytes=space)
    scheduler = Scheduler(memory, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET, preemption_mode=mode)
    for number in range(num_requests):
        scheduler.add(_request(number))
    steps = chunks = moved = computed = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.dispatched(step)
        scheduler.update(step, [0] * len(step.samples), [0.0] * len(step.samples))
        steps += bool(step.chunks)
        chunks += len(step.chunks)
        moved += len(step.swap_in)
        computed += step.num_tokens
    pages = layout.num_pages
    return Returning(block_size, mode, pages, steps, chunks / steps, scheduler.num_preemptions, moved, computed)


def _request(number: int) -> Request:
    tokens = [0] * PROMPT
    return Request(
        request_id=number,
        prompt_token_ids=tokens,
        params=SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True),
        seed=0,
        max_total_tokens=PROMPT + OUTPUT,
        stop_ids=frozenset(),
        eos_ids=frozenset(),
        sequences=[Stream(number, 0, list(tokens), PROMPT)],
    )


def table(block_sizes: Sequence[int], modes: Sequence[PreemptionMode] = ("recompute", "swap")) -> str:
    """Return the counts as a table in Markdown."""
    head = ["block size", "preemption", "blocks of the pool", "steps", "mean batch", "preemptions"]
    head += ["blocks moved there and back", "tokens computed"]
    lines = [head, ["---"] * len(head)]
    for size in block_sizes:
        for mode in modes:
            it = count(size, mode)
            numbers = [str(size), mode, str(it.pool_blocks), str(it.steps), f"{it.batch:.2f}", str(it.preemptions)]
            lines.append([*numbers, str(it.moved), f"{it.computed:,}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
