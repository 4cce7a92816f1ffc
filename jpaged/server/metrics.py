"""Metrics in Prometheus' format, under vLLM's names with the prefix ``jpaged:``."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jpaged import AsyncLLM, RequestOutput
from jpaged.metrics import Counter, Gauge
from jpaged.metrics import Histogram as EngineHistogram

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_HISTOGRAMS = (  # name, help, buckets
    ("time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", _SECONDS),
    ("inter_token_latency_seconds", "Seconds between two tokens of a stream.", _GAPS),
    (
        "request_time_per_output_token_seconds",
        "Mean seconds of a token after the first.",
        _GAPS,
    ),
    ("e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", _LONG),
    ("request_queue_time_seconds", "Seconds from a request's arrival to its first step.", _LONG),
    ("request_prefill_time_seconds", "Seconds from a request's first step to its first token.", _LONG),
    ("request_decode_time_seconds", "Seconds from a request's first token to its end.", _LONG),
    ("request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS),
    ("request_generation_tokens", "Tokens that a request generated.", _TOKENS),
)


_HELP = {
    "num_requests_running": "Requests in the running batch, now.",
    "num_requests_waiting": "Requests that wait for admission, now.",
    "num_requests_swapped": "Requests whose blocks lie in host memory, now.",
    "kv_cache_usage_perc": "Share of the pool's large pages that hold blocks in use, from 0 to 1.",
    "kv_blocks": "Blocks of a layer group by state: used, evictable (cached, not in use) or empty.",
    "shapes_to_compile": "Shapes that the background has still to compile.",
    "prompt_tokens": "Prompt tokens of the requests that have their first token, cached ones included.",
    "generation_tokens": "Tokens generated.",
    "computed_tokens": "Tokens that steps computed, prompts and outputs, without those from the prefix cache.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "spec_decode_num_drafts": "Times that a sequence's drafts were verified.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were kept.",
    "adapter_loads": "Low-rank adapters written to the devices, including those after an eviction.",
    "encoded_images": "Images that went through the encoder, including those encoded again.",
    "num_preemptions": "Preemptions of running requests.",
    "preemptions_by_way": "Preemptions by what follows: the request is computed again, or swapped to host memory.",
    "compiled_shapes": "Shapes compiled since the start.",
    "compile_seconds": "Seconds of tracing and compiling, added up over shapes.",
    "recompiled_shapes": "Shapes compiled after a warm-up.",
    "background_compiled_shapes": "Shapes compiled in the background.",
    "request_success": "Outputs that ended, by finish_reason.",
    "step_time_seconds": "Seconds of an engine step: schedule, dispatch, and read back the step before.",
    "disk_usage_perc": "Share of disk_space that is used, from 0 to 1.",
    "disk_blocks": "Blocks on disk, now.",
    "disk_read_bytes_per_second": "Measured read rate of the disk, in bytes a second.",
    "disk_open": "1 while the disk is used, 0 after it failed.",
    "disk_break_even_tokens": "Prefix length in tokens from which reading from disk beats computing.",
    "disk_cache_hits": "Prompt tokens whose KV came from disk.",
    "disk_read_bytes": "Bytes read from disk.",
    "disk_written_bytes": "Bytes written to disk.",
    "disk_failures": "Blocks that were damaged or missing when they were read, and reads that took too long.",
    "disk_skipped_blocks": "Blocks that were evicted faster than they could be written.",
    "ram_usage_perc": "Share of kv_offloading_size that is used, from 0 to 1, without swapped blocks.",
    "ram_blocks": "Cached blocks in host memory, now.",
    "ram_read_bytes_per_second": "Measured rate of copies within host memory, in bytes a second.",
    "ram_open": "1 while host memory is used.",
    "ram_break_even_tokens": "Prefix length in tokens from which loading from host memory beats computing.",
    "ram_cache_hits": "Prompt tokens whose KV came from host memory.",
    "ram_read_bytes": "Bytes loaded from host memory.",
    "ram_written_bytes": "Bytes copied to host memory.",
    "ram_failures": "Blocks that were missing when they were loaded, and loads that took too long.",
    "ram_skipped_blocks": "Blocks that were filled faster than they could be copied.",
}
"""Help text by the engine's metric: its measure and unit. A test finds one that is missing."""


class RequestTimes:
    """Arrival times of the tokens of one request.

    Attributes:
        num_tokens: tokens so far, by output.
        gap: seconds between the last two outputs with tokens, or between the first token and the first output.
        shared: tokens of each sequence that share the gap: all but the first token of the first output.
    """

    def __init__(self) -> None:
        self.num_tokens: Counts[int] = Counts()
        self.gap = 0.0
        self.shared: dict[int, int] = {}
        self._last: float | None = None

    def count(self, output: RequestOutput) -> None:
        """Count the new tokens of an output."""
        new = {each.index: len(each.token_ids) for each in output.outputs if each.token_ids}
        self.shared = {}
        if not new:
            return
        now, took = time.monotonic(), output.metrics
        since, self._last = self._last, now
        if since is None:
            since = now if took is None or took.first_token_time is None else took.first_token_time
            self.shared = {index: number - 1 for index, number in new.items() if number > 1}
        else:
            self.shared = new
        self.gap = max(0.0, now - since)
        for index, number in new.items():  # Counter.update takes several times as long
            self.num_tokens[index] += number


class ServerMetrics:
    """Collects the times of requests and exports them with the engine's metrics in Prometheus' format.

    Args:
        engine: read at each scrape, which never waits for a step.
        model: value of the label ``model_name`` of every metric.
    """

    def __init__(self, engine: AsyncLLM, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineNumbers(engine, model))
        made = {
            name: Histogram(f"jpaged:{name}", help_text, ["model_name"], registry=self._registry, buckets=buckets)
            for name, help_text, buckets in _HISTOGRAMS
        }
        self._histograms = {name: histogram.labels(model) for name, histogram in made.items()}

    def streamed(self, times: RequestTimes) -> None:
        """Count an output of a stream: each sequence's tokens share the time since the previous output."""
        for number in times.shared.values():
            for _ in range(number):
                self._histograms["inter_token_latency_seconds"].observe(times.gap / number)

    def finished(self, output: RequestOutput, times: RequestTimes, arrived: float) -> None:
        """Count a request that ended.

        Args:
            arrived: its arrival at the server, on the clock of its metrics. It may have waited in the fair queue before
                it reached the engine; a restored request reached the engine before.
        """
        took, histograms = output.metrics, self._histograms
        histograms["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        histograms["request_generation_tokens"].observe(times.num_tokens.total())
        if took is None or took.finished_time is None:
            return
        came = min(arrived, took.arrival_time)
        histograms["e2e_request_latency_seconds"].observe(took.finished_time - came)
        if took.first_scheduled_time is None or took.first_token_time is None:
            return
        histograms["request_queue_time_seconds"].observe(took.first_scheduled_time - came)
        histograms["request_prefill_time_seconds"].observe(took.first_token_time - took.first_scheduled_time)
        histograms["time_to_first_token_seconds"].observe(took.first_token_time - came)
        decode = took.finished_time - took.first_token_time
        histograms["request_decode_time_seconds"].observe(decode)
        longest = max(times.num_tokens.values(), default=0)
        if longest > 1:
            histograms["request_time_per_output_token_seconds"].observe(decode / (longest - 1))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineNumbers(Collector):
    """Exports an engine's metrics, read at each scrape."""

    def __init__(self, engine: AsyncLLM, model: str) -> None:
        self._engine = engine
        self._model = model

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metric in self._engine.get_metrics():
            labels = {"model_name": self._model, **metric.labels}
            help_text = _HELP[metric.name.removeprefix("jpaged:")]
            if isinstance(metric, Gauge):
                gauge = families.setdefault(metric.name, GaugeMetricFamily(metric.name, help_text, labels=list(labels)))
                gauge.add_metric(list(labels.values()), metric.value)  # type: ignore[attr-defined]
            elif isinstance(metric, Counter):
                counter = families.setdefault(
                    metric.name, CounterMetricFamily(metric.name, help_text, labels=list(labels))
                )
                counter.add_metric(list(labels.values()), metric.value)  # type: ignore[attr-defined]
            elif isinstance(metric, EngineHistogram):
                buckets = [(bound, float(count)) for bound, count in metric.buckets.items()]
                times = HistogramMetricFamily(metric.name, help_text, labels=list(labels))
                times.add_metric(list(labels.values()), buckets, metric.sum)
                families[metric.name] = times
        return iter(families.values())
