"""Prometheus metrics: vLLM's names, which dashboards and autoscalers know, and a few of our own.

Gauges and counters of the engine are read from its statistics when they are asked for. Histograms
are filled as outputs pass by.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged.http.engine import Engine
from paged.runtime.messages import EngineStats
from paged.runtime.outputs import RequestOutput

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_PER_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FINISH_REASONS = ("stop", "length", "abort", "error")
_UNCOUNTED_PATHS = frozenset({"/metrics", "/health", "/ping", "/version"})
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.registry.register(_EngineCollector(engine, self._labels))

        tokens = _one_two_five(engine.max_model_len)
        self.first_token = self._histogram("time_to_first_token_seconds", _FIRST_TOKEN)
        self.inter_token = self._histogram("inter_token_latency_seconds", _PER_TOKEN)
        self.per_token = self._histogram("request_time_per_output_token_seconds", _PER_TOKEN)
        self.end_to_end = self._histogram("e2e_request_latency_seconds", _PER_REQUEST)
        self.queue = self._histogram("request_queue_time_seconds", _PER_REQUEST)
        self.prefill = self._histogram("request_prefill_time_seconds", _PER_REQUEST)
        self.decode = self._histogram("request_decode_time_seconds", _PER_REQUEST)
        self.inference = self._histogram("request_inference_time_seconds", _PER_REQUEST)
        self.prompt_tokens = self._histogram("request_prompt_tokens", tokens)
        self.generation_tokens = self._histogram("request_generation_tokens", tokens)
        success = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self.success = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in _FINISH_REASONS
        }
        http_labels = ["handler", "method", "status"]
        self.http_requests = Counter(
            "http_requests", "HTTP requests.", http_labels, registry=self.registry
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds",
            "From a request's head to the end of its reply.",
            http_labels[:2],
            registry=self.registry,
        )

    def watch(self) -> RequestWatch:
        """A watch over one request."""
        return RequestWatch(self)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        names = list(self._labels)
        family = Histogram(f"vllm:{name}", text, names, registry=self.registry, buckets=buckets)
        return family.labels(**self._labels)


class RequestWatch:
    """Observes the outputs of one request; `open` until it has ended one way or another."""

    def __init__(self, metrics: Metrics) -> None:
        self.open = True
        self._metrics = metrics
        self._num_tokens: dict[int, int] = {}
        self._last_news: dict[int, float] = {}

    def observe(self, output: RequestOutput) -> None:
        """Take note of an output that the client gets."""
        metrics, now = self._metrics, time.perf_counter()
        if not self._num_tokens:
            _span(metrics.first_token, output.metrics.arrival_time, output.metrics.first_token_time)
        for sequence in output.outputs:
            before = self._last_news.get(sequence.index)
            if before is not None:
                metrics.inter_token.observe(now - before)
            self._last_news[sequence.index] = now
            count = self._num_tokens.get(sequence.index, 0) + len(sequence.token_ids)
            self._num_tokens[sequence.index] = count
            if sequence.finish_reason in metrics.success:
                metrics.success[sequence.finish_reason].inc()
        if output.finished:
            self._observe_whole(output)
            self.close()

    def close(self, reason: str | None = None) -> None:
        """Nothing more will come; `reason` if the engine has not given one."""
        self.open = False
        if reason is not None:
            self._metrics.success[reason].inc()

    def _observe_whole(self, output: RequestOutput) -> None:
        metrics, times = self._metrics, output.metrics
        metrics.prompt_tokens.observe(len(output.prompt_token_ids))
        metrics.generation_tokens.observe(sum(self._num_tokens.values()))
        _span(metrics.end_to_end, times.arrival_time, times.finished_time)
        _span(metrics.queue, times.arrival_time, times.first_scheduled_time)
        _span(metrics.prefill, times.first_scheduled_time, times.first_token_time)
        _span(metrics.decode, times.first_token_time, times.finished_time)
        _span(metrics.inference, times.first_scheduled_time, times.finished_time)
        gaps = max(self._num_tokens.values(), default=0) - 1
        if gaps > 0:
            _span(metrics.per_token, times.first_token_time, times.finished_time, parts=gaps)


def _span(histogram: Histogram, start: float | None, end: float | None, parts: int = 1) -> None:
    if start is not None and end is not None:
        histogram.observe((end - start) / parts)


def _one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, ... up to and including the first that reaches `limit`."""
    series = [float(digit * 10**power) for power in range(9) for digit in (1, 2, 5)]
    return [value for value in series if value < limit] + [
        next(value for value in series if value >= limit)
    ]


class _EngineCollector(Collector):
    """The engine's statistics at the moment of the scrape."""

    def __init__(self, engine: Engine, labels: dict[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering the collector must not ask the engine."""
        return []

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for name, text, value in _gauges(stats):
            gauge = GaugeMetricFamily(name, text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
        for name, text, value in _counters(stats):
            counter = CounterMetricFamily(name, text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
        settings = {"block_size": stats.page_size, "num_gpu_blocks": stats.num_pages}
        labels = self._labels | {name: str(value) for name, value in settings.items()}
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Settings of the KV cache.", labels=list(labels)
        )
        info.add_metric(list(labels.values()), 1)
        yield info


_Value = tuple[str, str, float]


def _gauges(stats: EngineStats) -> list[_Value]:
    usage = "Share of the KV pages in use, 0 to 1."
    return [
        ("vllm:num_requests_running", "Sequences running.", stats.num_running),
        ("vllm:num_requests_waiting", "Sequences waiting.", stats.num_waiting),
        ("vllm:kv_cache_usage_perc", usage, stats.kv_cache_usage),
        ("vllm:gpu_cache_usage_perc", usage, stats.kv_cache_usage),
        ("paged:num_pages", "KV pages.", stats.num_pages),
        ("paged:num_free_pages", "KV pages that are free.", stats.num_free_pages),
        ("paged:num_cached_pages", "Free to take, but cached.", stats.num_cached_pages),
        ("paged:page_size", "Tokens per KV page.", stats.page_size),
        ("paged:kv_waste", "Share of the places in used pages without a token.", stats.kv_waste),
    ]


def _counters(stats: EngineStats) -> list[_Value]:
    return [
        ("vllm:prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
        ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens),
        ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
        ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits),
        ("vllm:num_preemptions", "Sequences preempted.", stats.num_preemptions),
        ("paged:num_steps", "Steps run.", stats.num_steps),
        (
            "paged:compiles_after_warmup",
            "Compilations while serving; 0 unless something is wrong.",
            stats.compiles_after_warmup,
        ),
    ]


class CountRequests:
    """Middleware that counts HTTP requests by route template, known verb and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNCOUNTED_PATHS:
            await self.app(scope, receive, send)
            return
        status = 500
        start = time.perf_counter()

        async def watch_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch_status)
        finally:
            handler = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.http_requests.labels(handler, method, status).inc()
            seconds = time.perf_counter() - start
            self.metrics.http_seconds.labels(handler, method).observe(seconds)
