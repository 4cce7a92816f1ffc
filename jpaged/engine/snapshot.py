"""Takes the counters and gauges of a running engine together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import add

from jpaged.engine.replica import Replica
from jpaged.engine.stats import Counters, EngineStats
from jpaged.execution.compile.program import Compilations


def take_snapshot(replicas: Sequence[Replica], compilations: Compilations, counters: Counters) -> EngineStats:
    """Add up what all replicas have and did. It only reads, in O(replicas and layer groups)."""
    schedulers = [replica.scheduler for replica in replicas]
    each = zip(*(replica.memory.block_counts for replica in replicas), strict=True)
    finished: Counter[str] = Counter()
    for replica in replicas:
        finished.update(replica.ended)
    disk = replicas[0].memory.disk  # several replicas have none
    speculations = [scheduler.speculation for scheduler in schedulers if scheduler.speculation is not None]
    return EngineStats(
        num_running=sum(len(scheduler.running) for scheduler in schedulers),
        num_waiting=sum(len(scheduler.waiting) for scheduler in schedulers),
        num_swapped=sum(len(scheduler.swapped) for scheduler in schedulers),
        num_steps=counters.num_steps,
        num_computed_tokens=counters.num_tokens,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_output_tokens=counters.num_output_tokens,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        num_recomputes=sum(scheduler.preemption.num_recomputes for scheduler in schedulers),
        num_swaps=sum(scheduler.preemption.num_swaps for scheduler in schedulers),
        finished=dict(finished),
        blocks=tuple(reduce(add, counts) for counts in each),
        num_pages=sum(replica.memory.layout.num_pages for replica in replicas),
        num_available_pages=sum(replica.memory.num_available_pages for replica in replicas),
        num_drafts=sum(speculation.num_drafts for speculation in speculations),
        num_draft_tokens=sum(speculation.num_drafted for speculation in speculations),
        num_accepted_tokens=sum(speculation.num_accepted for speculation in speculations),
        num_adapter_loads=counters.num_adapter_loads,
        num_encoded_images=counters.num_encoded_images,
        step_times=counters.step_times,
        num_compiled=compilations.count,
        compile_seconds=compilations.seconds,
        num_recompiles=compilations.num_recompiles,
        num_compiled_in_background=compilations.num_in_background,
        num_shapes_to_come=compilations.num_to_come,
        disk=None if disk is None else disk.stats(),
    )
