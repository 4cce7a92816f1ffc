"""Every request has a span in its client's trace, and below it one for each part of its life."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from live_server import LiveServer, until

from jpaged import AsyncLLM, CompletionOutput, RequestOutput, SamplingParams
from jpaged.outputs import RequestMetrics
from jpaged.server.caller import Caller
from jpaged.server.settings import ServerSettings
from jpaged.server.tracing import Traces

trace = pytest.importorskip("opentelemetry.sdk.trace")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
export = pytest.importorskip("opentelemetry.sdk.trace.export")

PATH = "/v1/completions"
BODY = {"model": "tiny", "prompt": "the secret cab", "max_tokens": 6, "ignore_eos": True, "seed": 1}
PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}


@pytest.fixture
def exporter():
    return memory.InMemorySpanExporter()


@pytest.fixture
def traces(exporter):
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    return Traces(provider, "tiny")


@pytest.fixture
def traced(tiny_llm, traces, pace):
    server = LiveServer(AsyncLLM.from_llm(tiny_llm), ServerSettings(model="tiny", port=0), traces)
    yield server
    pace.go_on()
    server.stop()


def by_name(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
def test_the_parts_of_a_request_follow_each_other_in_the_trace_of_its_client(traced, exporter, stream):
    response = traced.http.post(PATH, json=BODY | {"stream": stream}, headers=PARENT | {"X-Request-Id": "mine"})
    assert response.status_code == 200
    until(lambda: len(exporter.get_finished_spans()) == 4)
    spans = by_name(exporter)
    root, queue, prefill, decode = (spans[name] for name in ("llm_request", "queue", "prefill", "decode"))
    assert f"{root.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331" and root.context.trace_state["a"] == "b"
    assert all(span.parent.span_id == root.context.span_id for span in (queue, prefill, decode))
    assert root.start_time == queue.start_time <= queue.end_time == prefill.start_time <= prefill.end_time
    assert prefill.end_time == decode.start_time < decode.end_time == root.end_time
    told = root.attributes
    assert (told["gen_ai.request.id"], told["gen_ai.usage.completion_tokens"]) == ("mine", 6)
    assert told["gen_ai.response.finish_reasons"] == ("length",) and told["gen_ai.usage.prompt_tokens"] > 0
    assert root.status.description is None
    assert "secret" not in str([dict(span.attributes) for span in spans.values()])


def test_a_trace_that_is_none_begins_a_new_one(traced, exporter):
    assert traced.http.post(PATH, json=BODY, headers={"traceparent": "nonsense"}).status_code == 200
    until(lambda: len(exporter.get_finished_spans()) == 4)
    assert by_name(exporter)["llm_request"].parent is None


def test_what_is_refused_or_given_up_has_a_span_that_says_so(traced, exporter, pace):
    assert traced.post(PATH, BODY | {"prompt": [9] * 128}).status_code == 400
    until(lambda: "llm_request" in by_name(exporter))
    assert by_name(exporter)["llm_request"].status.description == "ValueError"
    exporter.clear()
    pace.left = 3
    with traced.http.stream("POST", PATH, json=BODY | {"stream": True, "max_tokens": 100}) as response:
        next(response.iter_lines())
    until(lambda: "llm_request" in by_name(exporter))
    spans = by_name(exporter)
    assert spans["llm_request"].status.description == "the client went away"
    assert spans["decode"].end_time == spans["llm_request"].end_time


def test_each_time_that_memory_was_taken_back_is_a_span(traces, exporter):
    took = RequestMetrics(10.0, 11.0, 12.0, 20.0, 2, 0, ((13.0, 14.0), (15.0, 17.5)))
    output = RequestOutput("r", "a", [1], [CompletionOutput(0, "b", [2], 0.0, "stop")], metrics=took)
    traces.record(Caller("r", arrived=9.0), SamplingParams(), output, 1)
    spans = exporter.get_finished_spans()
    lasted = [(span.name, (span.end_time - span.start_time) / 1e9) for span in spans]
    assert lasted == [
        ("queue", 2.0), ("prefill", 1.0), ("decode", 8.0), ("preempted", 1.0), ("preempted", 2.5), ("llm_request", 11.0)
    ]  # fmt: skip


def test_what_is_left_is_handed_on_at_the_end(exporter):
    provider = trace.TracerProvider()
    provider.add_span_processor(export.BatchSpanProcessor(exporter, schedule_delay_millis=10**6))
    traces = Traces(provider, "tiny")
    traces.record(Caller("r"), SamplingParams(), None, 0, "EngineBusy")
    assert exporter.get_finished_spans() == ()
    traces.close()
    assert [span.name for span in exporter.get_finished_spans()] == ["queue", "llm_request"]


class Collector(HTTPServer):
    """A receiver of OTLP over HTTP: it decodes what is posted and keeps it."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Post)
        self.posts = []


class Post(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.posts.append((self.path, self.headers["Content-Type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_a_collector_gets_the_spans_by_otlp(tiny_llm, pace):
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    collector = Collector()
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    traces = Traces.to_collector(f"http://127.0.0.1:{collector.server_port}/v1/traces", "tiny")
    server = LiveServer(AsyncLLM.from_llm(tiny_llm), ServerSettings(model="tiny", port=0), traces)
    try:
        assert server.http.post(PATH, json=BODY, headers=PARENT | {"X-Request-Id": "mine"}).status_code == 200
    finally:
        server.stop()
        traces.close()  # hands on what is left
        collector.shutdown()
        collector.server_close()
    spans = {}
    for path, kind, body in collector.posts:
        assert (path, kind) == ("/v1/traces", "application/x-protobuf")
        assert b"secret" not in body
        for resource in messages.ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            assert named["service.name"] == "jpaged"
            spans |= {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert spans.keys() == {"llm_request", "queue", "prefill", "decode"}
    root = spans["llm_request"]
    assert root.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c" and root.trace_state == "a=b"
    assert root.parent_span_id.hex() == "b7ad6b7169203331" and root.kind == root.SPAN_KIND_SERVER
    assert all(spans[name].parent_span_id == root.span_id for name in ("queue", "prefill", "decode"))
    told = {entry.key: entry.value for entry in root.attributes}
    assert told["gen_ai.request.id"].string_value == "mine"
    assert told["gen_ai.usage.completion_tokens"].int_value == 6
    assert root.start_time_unix_nano < spans["decode"].end_time_unix_nano == root.end_time_unix_nano
