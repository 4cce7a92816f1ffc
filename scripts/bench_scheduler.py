"""Measures the host cost of a decode step: Python milliseconds of scheduling, and of building the device's arrays.

    python scripts/bench_scheduler.py [--seqs 256] [--steps 200]

Nothing runs on a device: made-up tokens come back one step late, as in the engine. The goal is at most
1 ms for schedule + update with 256 running sequences.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import numpy as np

from jpaged.execution.batch import BatchBuilder
from jpaged.execution.caches.base import BlockFormat
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.caches.registry import layer_caches
from jpaged.execution.compile.buckets import Buckets
from jpaged.memory import MemoryManager, PoolLayout
from jpaged.model_api import AttentionGroup
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Request, ScheduledStep, Scheduler, Sequence

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
BUDGET = 2048


def make_pool(num_seqs: int, max_model_len: int) -> PoolSpec:
    """Return a pool that never runs out, of one layer of attention."""
    (cache,) = layer_caches([AttentionGroup("full", (0,), 1, 64)], BlockFormat(BLOCK_SIZE, np.dtype("float32"), 1))
    block_bytes = cache.pool_groups()[0].real_bytes
    return PoolSpec.plan([cache], 2 * num_seqs * (max_model_len // BLOCK_SIZE) * block_bytes)


def make_scheduler(layout: PoolLayout, num_seqs: int, max_model_len: int, prefix_caching: bool) -> Scheduler:
    """Return a scheduler whose pool is filled with `num_seqs` requests that never end."""
    memory = MemoryManager(layout, prefix_caching=prefix_caching, max_step_tokens=BUDGET)
    scheduler = Scheduler(memory, max_num_seqs=num_seqs, max_num_batched_tokens=max(BUDGET, num_seqs))
    for i in range(num_seqs):
        prompt = [(i * 131 + j * 7) % 32000 for j in range(PROMPT_TOKENS + i % BLOCK_SIZE)]
        scheduler.add(
            Request(
                request_id=i,
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
                seed=0,
                max_total_tokens=max_model_len,
                stop_ids=frozenset(),
                eos_ids=frozenset(),
                sequences=[Sequence(i, 0, list(prompt), len(prompt))],
            )
        )
    return scheduler


def measure(num_seqs: int, num_steps: int, prefix_caching: bool) -> dict[str, list[float]]:
    """Measure the milliseconds of every step once all sequences decode."""
    max_model_len = PROMPT_TOKENS + BLOCK_SIZE + num_steps + 100
    spec = make_pool(num_seqs, max_model_len)
    scheduler = make_scheduler(spec.layout, num_seqs, max_model_len, prefix_caching)
    buckets = Buckets(max_num_seqs=num_seqs, max_num_batched_tokens=scheduler.max_num_batched_tokens)
    builder = BatchBuilder(spec, max_num_seqs=num_seqs, max_model_len=max_model_len)
    before: ScheduledStep | None = None
    times: dict[str, list[float]] = {"schedule": [], "update": [], "schedule + update": [], "build": []}
    while len(times["build"]) < num_steps:
        t0 = time.perf_counter()
        step = scheduler.schedule()
        t1 = time.perf_counter()
        builder.build(step, buckets.smallest(tokens=step.num_tokens, seqs=len(step.chunks)))
        t2 = time.perf_counter()
        scheduler.dispatched(step)
        dispatched = time.perf_counter() - t2
        if before is not None:
            tokens = [(7 * i + len(times["build"])) % 32000 for i in range(len(before.samples))]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqs", type=int, default=256, help="running sequences")
    parser.add_argument("--steps", type=int, default=200, help="decode steps measured")
    arguments = parser.parse_args()
    for prefix_caching in (False, True):
        gc.collect()
        times = measure(arguments.seqs, arguments.steps, prefix_caching)
        print(f"{arguments.seqs} sequences, {arguments.steps} decode steps, prefix caching {prefix_caching}: ms a step")
        for name, values in times.items():
            ordered = sorted(values)
            p95 = ordered[int(0.95 * (len(ordered) - 1))]
            print(f"  {name:18} median {statistics.median(values):6.3f}   p95 {p95:6.3f}")


if __name__ == "__main__":
    main()
