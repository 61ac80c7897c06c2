"""Spans of requests: vLLM's names, the caller's trace, and nothing of what was said."""

import builtins
import json
import time
from collections.abc import Sequence
from threading import Event
from typing import Any

import pytest
from starlette.testclient import TestClient

from paged.http.app import create_app
from paged.http.cli import parse
from paged.http.options import ServeOptions
from paged.http.start import _traces
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from tests.http.fakes import FakeEngine

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from paged.http import otel
from paged.http.otel import RequestTraces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LATENCIES = {
    *("time_in_queue", "time_to_first_token", "e2e"),
    *("time_in_model_prefill", "time_in_model_decode", "time_in_model_inference"),
}


def spans(engine: FakeEngine, **body: Any) -> Sequence[ReadableSpan]:
    exporter = InMemorySpanExporter()
    traces = RequestTraces(SimpleSpanProcessor(exporter))
    app = create_app(engine, ["tiny"], reporters=[traces], reads_traces=True)
    client = TestClient(app, raise_server_exceptions=False)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    client.post("/v1/completions", json={"prompt": "secret"} | body, headers=headers)
    return exporter.get_finished_spans()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span(engine: FakeEngine, stream: bool) -> None:
    [span] = spans(engine, stream=stream, n=2, temperature=0.5, top_p=0.9, max_tokens=4)
    assert (span.name, span.kind) == ("llm_request", SpanKind.SERVER)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert f"{span.context.trace_id:032x}" == TRACE
    found = dict(span.attributes or {})
    assert str(found.pop("gen_ai.request.id")).startswith("cmpl-")
    latencies = {name: found.pop(f"gen_ai.latency.{name}") for name in LATENCIES}
    assert all(isinstance(value, float) and value >= 0 for value in latencies.values())
    assert found == {
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "paged.cached_tokens": 1,
    }
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0 <= span.end_time - span.start_time < 10e9


def test_each_prompt_is_a_span_of_the_same_trace(engine: FakeEngine) -> None:
    found = spans(engine, prompt=["a", "b"])
    assert [f"{span.context.trace_id:032x}" for span in found] == [TRACE] * 2


def test_a_request_that_failed(engine: FakeEngine) -> None:
    engine.fails_after = 2
    [span] = spans(engine)
    assert span.status.status_code is StatusCode.ERROR
    assert "secret" not in json.dumps(span.to_json())


def test_refused_requests_are_none(engine: FakeEngine) -> None:
    assert spans(engine, prompt="a" * 99) == ()


def test_a_collector_that_is_gone_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "_LAST_SPANS", 0.1)
    gone = Event()

    class Stuck(SimpleSpanProcessor):
        def shutdown(self) -> None:
            gone.wait(60)

    started = time.monotonic()
    RequestTraces(Stuck(InMemorySpanExporter())).close()
    assert time.monotonic() - started < 30
    gone.set()


def test_what_is_left_is_sent_in_the_end(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otel, "_LAST_SPANS", 60.0)
    exporter = InMemorySpanExporter()
    traces = RequestTraces(BatchSpanProcessor(exporter, schedule_delay_millis=60_000))
    app = create_app(engine, ["tiny"], reporters=[traces])
    TestClient(app).post("/v1/completions", json={"prompt": "a"})
    traces.close()
    assert len(exporter.get_finished_spans()) == 1


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "paged.http.otel":
            raise ModuleNotFoundError("No module named 'opentelemetry.sdk'")
        return find(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    flags = ["serve", "--otlp-traces-endpoint", "http://127.0.0.1:4317"]
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry: pip install 'paged\[otel\]'"):
        _traces(read_flags(ServeOptions, parse(flags)))


def test_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
    flags = ["serve", "--otlp-traces-endpoint", "http://127.0.0.1:4317"]
    with pytest.raises(ConfigError, match="must be grpc or http/protobuf, got 'smoke'"):
        _traces(read_flags(ServeOptions, parse(flags)))
