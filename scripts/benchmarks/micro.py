"""Host costs without a device: a decode step of the scheduler, and the two-level allocator."""

from __future__ import annotations

import gc
import random
import statistics
import time

import numpy as np

from jpaged.execution.batch import BatchBuilder
from jpaged.execution.caches.base import BlockSettings
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.caches.registry import layer_caches
from jpaged.execution.compile.buckets import Buckets
from jpaged.memory import MemoryManager, PoolLayout
from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.eviction_key import EvictionKey
from jpaged.model_api import AttentionGroup
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Request, ScheduledStep, Scheduler, Sequence
from scripts.cases import Rows

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
BUDGET = 2048


def make_pool(num_seqs: int, max_model_len: int, block_size: int = BLOCK_SIZE) -> PoolSpec:
    """Return a pool that never runs out, of one layer of attention."""
    (cache,) = layer_caches([AttentionGroup("full", (0,), 1, 64)], BlockSettings(block_size, np.dtype("float32"), 1))
    block_bytes = cache.pool_groups()[0].real_bytes
    return PoolSpec.plan([cache], 2 * num_seqs * (max_model_len // block_size) * block_bytes)


def make_scheduler(layout: PoolLayout, num_seqs: int, max_model_len: int, prefix_caching: bool) -> Scheduler:
    """Return a scheduler whose pool is filled with `num_seqs` requests that never end."""
    memory = MemoryManager(layout, prefix_caching=prefix_caching, max_step_tokens=BUDGET)
    scheduler = Scheduler(memory, max_num_seqs=num_seqs, max_num_batched_tokens=max(BUDGET, num_seqs))
    for i in range(num_seqs):
        scheduler.add(make_request(i, max_model_len))
    return scheduler


def make_request(number: int, most: int) -> Request:
    """Return a request that ends at a length of `most` tokens."""
    prompt = [(number * 131 + j * 7) % 32000 for j in range(PROMPT_TOKENS + number % BLOCK_SIZE)]
    return Request(
        request_id=number,
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
        seed=0,
        max_total_tokens=most,
        stop_ids=frozenset(),
        eos_ids=frozenset(),
        sequences=[Sequence(number, 0, list(prompt), len(prompt))],
    )


def measure(num_seqs: int, num_steps: int, prefix_caching: bool, block_size: int) -> dict[str, list[float]]:
    """Measure the milliseconds of every step once all sequences decode."""
    max_model_len = PROMPT_TOKENS + max(BLOCK_SIZE, block_size) + num_steps + 100
    spec = make_pool(num_seqs, max_model_len, block_size)
    scheduler = make_scheduler(spec.layout, num_seqs, max_model_len, prefix_caching)
    buckets = Buckets(max_num_seqs=num_seqs, max_num_batched_tokens=scheduler.max_num_batched_tokens)
    builder = BatchBuilder(spec, max_num_seqs=num_seqs, max_model_len=max_model_len)
    before: ScheduledStep | None = None
    times: dict[str, list[float]] = {"schedule": [], "update": [], "schedule + update": [], "build": []}
    while len(times["build"]) < num_steps:
        t0 = time.perf_counter()
        step = scheduler.schedule()
        t1 = time.perf_counter()
        builder.laid_out(step, buckets.smallest(tokens=step.num_tokens, seqs=step.num_chunks))
        t2 = time.perf_counter()
        scheduler.dispatched(step)
        dispatched = time.perf_counter() - t2
        if before is not None:
            tokens = [(7 * i + len(times["build"])) % 32000 for i in range(before.num_samples)]
            logprobs = [-1.0] * len(tokens)
            t3 = time.perf_counter()
            scheduler.update(before, tokens, logprobs)
            t4 = time.perf_counter()
            if before.num_decodes == num_seqs:
                parts = {"schedule": t1 - t0, "build": t2 - t1, "update": t4 - t3 + dispatched}
                parts["schedule + update"] = parts["schedule"] + parts["update"]
                for name, seconds in parts.items():
                    times[name].append(1e3 * seconds)
        before = step
    return times


def scheduler(sequences: int = 256, steps: int = 200, block_size: int = BLOCK_SIZE) -> Rows:
    """Milliseconds of scheduling a decode step and of building its arrays; made-up tokens come back one step late.

    The goal is at most 1 ms for schedule + update with 256 sequences. With --block-size 2048 no step needs a block.
    """
    rows = []
    for prefix_caching in (False, True):
        gc.collect()
        for name, values in measure(sequences, steps, prefix_caching, block_size).items():
            p95 = sorted(values)[int(0.95 * (len(values) - 1))]
            row = {"prefix caching": prefix_caching, "part": name, "median ms": statistics.median(values)}
            rows.append(row | {"p95 ms": p95})
    return rows


def many_requests(requests: int = 100_000, output: int = 32, sequences: int = 256, pool: int = 4) -> Rows:
    """Seconds of scheduling many requests from their arrival to their end; made-up tokens come back one step late.

    As many requests wait as run at once. The prefix cache is on, and the pool holds --pool times the tokens of those
    that run, so that cached blocks are evicted all the time. "microseconds" are of the processor time, for each request
    and for each row of a step. The goal is 100,000 requests of 32 output tokens in under three minutes.
    """
    length = PROMPT_TOKENS + BLOCK_SIZE + output
    layout = make_pool(pool * sequences // 2, length + BLOCK_SIZE).layout
    memory = MemoryManager(layout, prefix_caching=True, max_step_tokens=BUDGET)
    scheduler = Scheduler(memory, max_num_seqs=sequences, max_num_batched_tokens=max(BUDGET, sequences))
    added = ended = steps = rows = 0
    before: ScheduledStep | None = None
    clock, start = time.perf_counter(), time.process_time()
    while ended < requests:
        while added < requests and len(scheduler.waiting) < sequences:
            prompt = PROMPT_TOKENS + added % BLOCK_SIZE
            scheduler.add(make_request(added, prompt + output))
            added += 1
        step = scheduler.schedule()
        scheduler.dispatched(step)
        if before is not None:
            tokens = [(7 * i + steps) % 32000 for i in range(before.num_samples)]
            ended += len(scheduler.update(before, tokens, [-1.0] * len(tokens)))
        steps, rows, before = steps + 1, rows + step.num_chunks, step
    seconds = time.process_time() - start
    row = {"requests": requests, "output": output, "sequences": sequences, "steps": steps, "CPU seconds": seconds}
    row |= {"seconds": time.perf_counter() - clock, "microseconds a request": 1e6 * seconds / requests}
    return [row | {"microseconds a row": 1e6 * seconds / rows, "preemptions": scheduler.num_preemptions}]


BLOCKS_PER_PAGE = (4, 6)


def allocator(operations: int = 1_000_000, blocks: int = 100_000, seed: int = 0) -> Rows:
    """CPU seconds of random operations on the two-level allocator: take a block, release one, share a cached one.

    The pool has two groups of different block sizes and stays full, so that pages are carved, evicted and given back
    all the time. The goal is 1e6 operations over 1e5 blocks in under 10 s.
    """
    rng = random.Random(seed)
    draws = [rng.random() for _ in range(operations)]
    pool = BlockAllocator(BLOCKS_PER_PAGE, blocks // max(BLOCKS_PER_PAGE), lambda g, block: None)
    requests = [pool.new_request() for _ in range(256)]
    owned: list[tuple[int, int]] = []
    counts = {"take": 0, "refused": 0, "release": 0, "share": 0}
    start = time.process_time()
    for tick, draw in enumerate(draws):
        pick = int(draw * 1e9)
        g = pick & 1
        if draw < 0.5 or not owned:
            taken = pool.take([1 - g, g], requests[pick % 256])
            if taken is None:
                counts["refused"] += 1
            else:
                owned.append((g, taken[g][0]))
                counts["take"] += 1
        elif draw < 0.55 and pool.groups[g].evictable:
            block = next(iter(pool.groups[g].evictable))
            pool.share(g, block)
            owned.append((g, block))
            counts["share"] += 1
        else:
            i = pick % len(owned)
            owned[i], owned[-1] = owned[-1], owned[i]
            g, block = owned.pop()
            pool.release(g, block, EvictionKey(tick, 0), keep=bool(pick & 2))
            counts["release"] += 1
    seconds = time.process_time() - start
    return [{"operations": operations, "blocks": blocks, "CPU seconds": seconds, **counts}]
