"""Spans of requests for OpenTelemetry, under vLLM's names: imported where the extra is there."""

from __future__ import annotations

import os
import threading

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

import paged
from paged.http.request_report import RequestReport
from paged.http.trace_context import trace_headers
from paged.runtime.errors import ConfigError

# Seconds that the end of a server takes for spans that are not sent yet.
_LAST_SPANS = 3.0
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


def exporter(endpoint: str) -> SpanExporter:
    """What sends spans to a collector, in the protocol that OpenTelemetry's variable names.

    Raises:
        ConfigError: it names none of the two.
        ImportError: the exporter is not installed.
    """
    protocol = os.environ.get(_PROTOCOL, "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        is_open = not endpoint.startswith("https://")
        return OTLPSpanExporter(endpoint=endpoint, insecure=is_open)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpExporter,
        )

        return HttpExporter(endpoint=endpoint)
    raise ConfigError(f"{_PROTOCOL} must be grpc or http/protobuf, got {protocol!r}")


class RequestTraces:
    """Makes a span of each request that has ended.

    Args:
        processor: takes the spans.
    """

    wants_texts = False

    def __init__(self, processor: SpanProcessor) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", "paged")
        resource = Resource.create({"service.name": name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("paged", paged.__version__)

    @classmethod
    def sent_to(cls, endpoint: str) -> RequestTraces:
        """Spans that go to a collector, some at a time. Raises as `exporter` does."""
        return cls(BatchSpanProcessor(exporter(endpoint)))

    def close(self) -> None:
        """Send what is left. A collector that is gone is not waited for."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_LAST_SPANS)

    def report(self, report: RequestReport) -> None:
        times = report.times
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(trace_headers()),
            kind=SpanKind.SERVER,
            attributes=attributes(report),
            start_time=_nanoseconds(times.arrival_time),
        )
        if "error" in report.reasons:
            span.set_status(Status(StatusCode.ERROR))
        assert times.finished_time is not None, "the request has ended"
        span.end(_nanoseconds(times.finished_time))


def attributes(report: RequestReport) -> dict[str, AttributeValue]:
    """What a span says; seconds, and nothing of what was asked or answered."""
    asked, times, params = report.asked, report.times, report.asked.params
    latencies = {
        "time_in_queue": (times.arrival_time, times.first_scheduled_time),
        "time_to_first_token": (times.arrival_time, times.first_token_time),
        "e2e": (times.arrival_time, times.finished_time),
        "time_in_model_prefill": (times.first_scheduled_time, times.first_token_time),
        "time_in_model_decode": (times.first_token_time, times.finished_time),
        "time_in_model_inference": (times.first_scheduled_time, times.finished_time),
    }
    found: dict[str, AttributeValue] = {
        "gen_ai.request.id": asked.request_id,
        "gen_ai.response.model": asked.model,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.prompt_tokens": len(asked.prompt),
        "gen_ai.usage.completion_tokens": sum(report.num_tokens),
        "gen_ai.usage.num_sequences": len(report.num_tokens),
        "gen_ai.response.finish_reasons": report.reasons,
        "paged.cached_tokens": report.num_cached_tokens,
    }
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    for name, (start, end) in latencies.items():
        if start is not None and end is not None:
            found[f"gen_ai.latency.{name}"] = end - start
    return found


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
