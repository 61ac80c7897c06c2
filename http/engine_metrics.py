"""The engine's statistics as Prometheus metrics, read at the moment of the scrape."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paged.http.engine import AnyEngine
from paged.runtime.messages import EngineStats

_Value = tuple[str, str, float]
"""Name, help, value."""


class EngineCollector(Collector):
    """Asks the engine whenever it is asked itself."""

    def __init__(self, engine: AnyEngine, labels: dict[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering the collector must not ask the engine."""
        return []

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for value in _gauges(stats):
            yield self._gauge(*value)
        for value in _counters(stats):
            yield self._counter(*value)
        settings = {"block_size": str(stats.page_size), "num_gpu_blocks": str(stats.num_pages)}
        yield self._gauge("vllm:cache_config_info", "Settings of the KV cache.", 1, settings)

    def _gauge(
        self, name: str, text: str, value: float, more: dict[str, str] | None = None
    ) -> Metric:
        labels = self._labels | (more or {})
        family = GaugeMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def _gauges(stats: EngineStats) -> list[_Value]:
    usage = "Share of the KV pages in use, 0 to 1."
    return [
        ("vllm:num_requests_running", "Sequences running.", stats.num_running),
        ("vllm:num_requests_waiting", "Sequences waiting.", stats.num_waiting),
        ("vllm:kv_cache_usage_perc", usage, stats.kv_cache_usage),
        ("vllm:gpu_cache_usage_perc", usage, stats.kv_cache_usage),
        ("paged:num_pages", "KV pages.", stats.num_pages),
        ("paged:num_free_pages", "KV pages that are free.", stats.num_free_pages),
        ("paged:num_cached_pages", "KV pages kept for their content.", stats.num_cached_pages),
        ("paged:num_host_pages", "KV pages in host memory.", stats.num_host_pages),
        ("paged:num_used_host_pages", "Those that hold something.", stats.num_used_host_pages),
        ("paged:num_disk_pages", "KV pages on disk.", stats.num_disk_pages),
        ("paged:page_size", "Tokens per KV page.", stats.page_size),
        ("paged:kv_waste", "Share of the places in used pages without a token.", stats.kv_waste),
        ("paged:waiting_tokens", "Prompt tokens yet to be computed.", stats.waiting_tokens),
        ("paged:wait_seconds", "Estimated time in the queue.", stats.wait_seconds),
        ("paged:long_wait_seconds", "That in the lane of long ones.", stats.long_wait_seconds),
        ("paged:num_running_long", "Long sequences running.", stats.num_running_long),
        ("paged:num_waiting_long", "Long sequences waiting.", stats.num_waiting_long),
    ]


def _counters(stats: EngineStats) -> list[_Value]:
    host_queries = "Prompt tokens not found in pages, looked up in host memory."
    host_hits = "Prompt tokens loaded from host memory."
    left_out = "KV pages that the disk was too slow to take."
    compiles = "Compilations while serving; 0 unless something is wrong."
    return [
        ("vllm:prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
        ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens),
        ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
        ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits),
        ("vllm:external_prefix_cache_queries", host_queries, stats.host_queries),
        ("vllm:external_prefix_cache_hits", host_hits, stats.host_hits),
        ("paged:host_bytes_saved", "Bytes of KV pages sent to the host.", stats.host_bytes_saved),
        ("paged:host_bytes_loaded", "Bytes that came back from it.", stats.host_bytes_loaded),
        ("paged:disk_pages_read", "KV pages read from disk.", stats.disk_pages_read),
        ("paged:disk_pages_left_out", left_out, stats.disk_pages_left_out),
        ("vllm:num_preemptions", "Sequences preempted.", stats.num_preemptions),
        ("paged:num_steps", "Steps run.", stats.num_steps),
        ("paged:timeouts", "Requests whose deadline passed.", stats.num_timeouts),
        ("paged:compiles_after_warmup", compiles, stats.compiles_after_warmup),
    ]
