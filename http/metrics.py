"""Prometheus metrics: vLLM's names, which dashboards and autoscalers know, and a few of our own.

Gauges and counters of the engine are read from its statistics when they are asked for. Histograms
are filled as outputs pass by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from paged.http.engine import AnyEngine
from paged.http.engine_metrics import EngineCollector
from paged.http.histogram import Histogram
from paged.http.recent import Recent
from paged.runtime.outputs import RequestMetrics

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
_DELIVERY = (
    *(0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5, 1.0),
)
_NS = (1, 2, 5, 10, 20)
_FINISH_REASONS = ("stop", "length", "abort", "timeout", "error", "repetition")


class Metrics(Collector):
    """The metrics of one model; `number` counts the models of a server from 0.

    Attributes:
        max_model_len: tokens of prompt and output together.
        recent: the last minutes, for the status page.
    """

    def __init__(self, engine: AnyEngine, model_name: str, number: int = 0) -> None:
        self._labels = {"model_name": model_name, "engine": str(number)}
        self._of_engine = EngineCollector(engine, self._labels)
        self._collectors: list[Collector] = [self._of_engine]
        self.max_model_len = engine.max_model_len
        self.recent = Recent()
        tokens = _one_two_five(engine.max_model_len)
        self.first_token = self._histogram("time_to_first_token_seconds", _FIRST_TOKEN)
        old_name = "vllm:time_per_output_token_seconds"  # which older boards ask for
        self.inter_token = self._histogram("inter_token_latency_seconds", _PER_TOKEN, also=old_name)
        self.per_token = self._histogram("request_time_per_output_token_seconds", _PER_TOKEN)
        self.end_to_end = self._histogram("e2e_request_latency_seconds", _PER_REQUEST)
        self.queue = self._histogram("request_queue_time_seconds", _PER_REQUEST)
        self.prefill = self._histogram("request_prefill_time_seconds", _PER_REQUEST)
        self.decode = self._histogram("request_decode_time_seconds", _PER_REQUEST)
        self.inference = self._histogram("request_inference_time_seconds", _PER_REQUEST)
        self.prompt_tokens = self._histogram("request_prompt_tokens", tokens)
        self.generation_tokens = self._histogram("request_generation_tokens", tokens)
        self.longest_generation = self._histogram("request_max_num_generation_tokens", tokens)
        self.max_tokens = self._histogram("request_params_max_tokens", tokens)
        self.computed_tokens = self._histogram("request_prefill_kv_computed_tokens", tokens)
        self.n = self._histogram("request_params_n", _NS)
        self.delivery = self._histogram("token_delivery_seconds", _DELIVERY, "paged")
        self.success = self._counters("request_success", "finished_reason", _FINISH_REASONS)
        text = "Requests whose client left before their end."
        disconnects = Counter("paged:client_disconnects", text, [*self._labels], registry=None)
        self._collectors.append(disconnects)
        self.disconnects = disconnects.labels(**self._labels)

    @property
    def engine_names(self) -> frozenset[str]:
        """Metrics that are the engine's own, and the same in all API processes."""
        return frozenset(family.name for family in self._of_engine.collect())

    def count_end(self, reason: str) -> None:
        """Take note that a sequence has ended."""
        if reason in self.success:
            self.success[reason].inc()

    def observe_first(self, times: RequestMetrics) -> None:
        """Take note of a first token."""
        _span(self.first_token, times.arrival_time, times.first_token_time)
        if times.first_token_time is not None:
            self.recent.now().add_first(times.first_token_time - times.arrival_time)

    def observe_times(self, times: RequestMetrics, num_gaps: int) -> None:
        """Take note of how long a request took, the longest of whose sequences has `num_gaps`."""
        _span(self.end_to_end, times.arrival_time, times.finished_time)
        _span(self.queue, times.arrival_time, times.first_scheduled_time)
        _span(self.prefill, times.first_scheduled_time, times.first_token_time)
        _span(self.decode, times.first_token_time, times.finished_time)
        _span(self.inference, times.first_scheduled_time, times.finished_time)
        if num_gaps > 0:
            _span(self.per_token, times.first_token_time, times.finished_time, parts=num_gaps)

    def count_pooling(self, reason: str, num_tokens: int, seconds: float) -> None:
        """Take note of a request for embeddings or scores that has ended."""
        self.success[reason].inc()
        if reason == "stop":
            self.prompt_tokens.observe(num_tokens)
            self.end_to_end.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        for collector in self._collectors:
            yield from collector.collect()

    def _counters(self, name: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """A counter for each value of a label, looked up once."""
        names = [*self._labels, label]
        family = Counter(f"vllm:{name}", _text(name), names, registry=None)
        self._collectors.append(family)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}

    def _histogram(
        self, name: str, buckets: Sequence[float], origin: str = "vllm", also: str | None = None
    ) -> Histogram:
        histogram = Histogram(f"{origin}:{name}", _text(name), self._labels, buckets, also=also)
        self._collectors.append(histogram)
        return histogram


class _Joined(Collector):
    """The metrics of all models: a family stands once, with the samples of each of them."""

    def __init__(self, models: Sequence[Metrics]) -> None:
        self._models = models

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering the collector must not ask the engines."""
        return []

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for model in self._models:
            for family in model.collect():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        return families.values()


def registry_of(models: Sequence[Metrics]) -> CollectorRegistry:
    """The registry of a server: its process and its models."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    registry.register(_Joined(models))
    return registry


def _span(histogram: Histogram, start: float | None, end: float | None, parts: int = 1) -> None:
    if start is not None and end is not None:
        histogram.observe((end - start) / parts)


def _text(name: str) -> str:
    """Help that says what the name says."""
    return name.replace("_", " ").capitalize() + "."


def _one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, ... up to and including the first that reaches `limit`."""
    series = [float(digit * 10**power) for power in range(9) for digit in (1, 2, 5)]
    return [value for value in series if value < limit] + [
        next(value for value in series if value >= limit)
    ]
