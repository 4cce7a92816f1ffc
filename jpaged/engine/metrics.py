"""An engine's statistics as a list of named metrics, in the shape that vLLM's `get_metrics` gives them."""

from __future__ import annotations

from jpaged.engine.stats import STEP_BOUNDS, EngineStats
from jpaged.memory import DiskStats
from jpaged.metrics import Counter, Gauge, Histogram, Metric

PREFIX = "jpaged:"


def metrics_of(stats: EngineStats) -> list[Metric]:
    """Name every number of a snapshot."""
    gauges = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "num_requests_swapped": stats.num_swapped,
        "kv_cache_usage_perc": stats.kv_cache_usage,
        "shapes_to_compile": stats.num_shapes_to_come,
    }
    counters = {
        "prompt_tokens": stats.num_prompt_tokens,
        "generation_tokens": stats.num_output_tokens,
        "computed_tokens": stats.num_computed_tokens,
        "prefix_cache_queries": stats.prefix_queries,
        "prefix_cache_hits": stats.prefix_hits,
        "spec_decode_num_drafts": stats.num_drafts,
        "spec_decode_num_draft_tokens": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
        "adapter_loads": stats.num_adapter_loads,
        "encoded_images": stats.num_encoded_images,
        "num_preemptions": stats.num_preemptions,
        "compiled_shapes": stats.num_compiled,
        "compile_seconds": stats.compile_seconds,
        "recompiled_shapes": stats.num_recompiles,
        "background_compiled_shapes": stats.num_compiled_in_background,
    }
    metrics: list[Metric] = [Gauge(PREFIX + name, value) for name, value in gauges.items()]
    for blocks in stats.blocks:
        for state in ("used", "evictable", "empty"):
            labels = {"group": blocks.name, "state": state}
            metrics.append(Gauge(f"{PREFIX}kv_blocks", getattr(blocks, state), labels=labels))
    metrics += [Counter(PREFIX + name, value) for name, value in counters.items()]
    if stats.disk is not None:
        metrics += _disk(stats.disk)
    for way, count in (("recompute", stats.num_recomputes), ("swap", stats.num_swaps)):
        metrics.append(Counter(f"{PREFIX}preemptions_by_way", count, labels={"way": way}))
    for reason, count in stats.finished.items():
        metrics.append(Counter(f"{PREFIX}request_success", count, labels={"finished_reason": reason}))
    metrics.append(_steps(stats))
    return metrics


def _disk(disk: DiskStats) -> list[Metric]:
    gauges = {
        "disk_usage_perc": disk.used_bytes / disk.limit_bytes,
        "disk_blocks": disk.num_blocks,
        "disk_read_bytes_per_second": disk.read_rate,
        "disk_open": int(disk.is_open),
    }
    if disk.break_even is not None:  # a scrape without it: nothing is read, or nothing is known yet
        gauges["disk_break_even_tokens"] = disk.break_even
    counters = {
        "disk_cache_hits": disk.hits,
        "disk_read_bytes": disk.read_bytes,
        "disk_written_bytes": disk.written_bytes,
        "disk_failures": disk.failures,
        "disk_skipped_blocks": disk.skipped,
    }
    metrics: list[Metric] = [Gauge(PREFIX + name, value) for name, value in gauges.items()]
    return metrics + [Counter(PREFIX + name, value) for name, value in counters.items()]


def _steps(stats: EngineStats) -> Histogram:
    times, total, buckets = stats.step_times, 0, {}
    for bound, count in zip([*map(str, STEP_BOUNDS), "+Inf"], times.buckets, strict=True):
        total += count
        buckets[bound] = total
    return Histogram(f"{PREFIX}step_time_seconds", times.count, times.total, buckets)
