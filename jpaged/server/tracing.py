"""Records OpenTelemetry spans of requests, as part of the client's trace (extra `otel`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jpaged import BeamSearchParams, RequestOutput, SamplingParams
from jpaged.server.caller import Caller

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span


class Traces:
    """Records a span for each request of the engine, with a child span for each phase.

    The phases are "queue" (from its arrival to its first step), "prefill" (to its first token), "decode" (to its end)
    and, within these, "preempted" for each preemption. Attributes have vLLM's names and contain no prompts or outputs.

    Args:
        provider: makes and exports the spans.
        model: name of the model.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("jpaged")
        self._model = model

    @classmethod
    def to_collector(cls, endpoint: str, model: str) -> Traces:
        """Return traces that a thread sends to a collector in batches, by OTLP over HTTP.

        Args:
            endpoint: URL of the collector's traces, such as ``http://localhost:4318/v1/traces``.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": "jpaged"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider, model)

    def record(
        self,
        caller: Caller,
        params: SamplingParams | BeamSearchParams,
        output: RequestOutput | None,
        num_tokens: int,
        failure: str | None = None,
    ) -> None:
        """Record the spans of a request that has ended.

        Args:
            output: its last output; None if there was none.
            num_tokens: tokens that it generated.
            failure: reason of an early end; None if it completed.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        took, now = None if output is None else output.metrics, time.monotonic()
        epoch = time.time_ns() - round(now * 1e9)  # zero of the monotonic clock, on the clock of traces
        began = caller.arrived if took is None else min(caller.arrived, took.arrival_time)
        scheduled = first = None
        ended = now
        if took is not None:
            scheduled, first, ended = took.first_scheduled_time, took.first_token_time, took.finished_time or now

        def at(seconds: float) -> int:
            return epoch + round(seconds * 1e9)

        span: Span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(dict(caller.trace_headers)),
            kind=SpanKind.SERVER,
            start_time=at(began),
            attributes=self._attributes(caller, params, output, num_tokens),
        )
        below = set_span_in_context(span)
        parts: list[tuple[str, float | None, float | None]] = [("queue", began, scheduled or ended)]
        if scheduled is not None:
            parts.append(("prefill", scheduled, first or ended))
        if first is not None:
            parts.append(("decode", first, ended))
        parts += [("preempted", out, back) for out, back in (took.preempted if took is not None else ())]
        for name, begin, end in parts:
            if begin is not None:
                part = self._tracer.start_span(name, context=below, start_time=at(begin))
                part.end(end_time=at(ended if end is None else end))
        if failure is not None:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(end_time=at(ended))

    def _attributes(
        self,
        caller: Caller,
        params: SamplingParams | BeamSearchParams,
        output: RequestOutput | None,
        num_tokens: int,
    ) -> Mapping[str, Any]:
        given: dict[str, Any] = {
            "gen_ai.request.id": caller.request_id,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.completion_tokens": num_tokens,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
        }
        if isinstance(params, SamplingParams):
            given |= {"gen_ai.request.top_p": params.top_p, "gen_ai.request.n": params.n}
        if output is not None:
            given["gen_ai.usage.prompt_tokens"] = len(output.prompt_token_ids)
            given["gen_ai.usage.cached_tokens"] = output.num_cached_tokens
            given["gen_ai.usage.num_sequences"] = len(output.outputs)
            given["gen_ai.response.finish_reasons"] = [one.finish_reason or "" for one in output.outputs]
        return {name: value for name, value in given.items() if value is not None}

    def close(self) -> None:
        """Export the remaining spans and stop."""
        self._provider.shutdown()
