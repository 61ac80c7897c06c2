"""The engine's statistics as Prometheus metrics, read at the moment of the scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from paged.http.engine import AnyEngine
from paged.http.histogram import cumulated
from paged.runtime.messages import Distribution, EngineStats
from paged.runtime.step_record import HOST_BOUNDS, STEP_BOUNDS, TOKEN_BOUNDS

_Value = tuple[str, str, float]
"""Name, help, value."""
_Labelled = tuple[str, str, str, Mapping[str, float]]
"""Name, help, a label, and a value for each value of the label."""

# Of what vLLM can be told to do and Paged cannot: it has never happened, and boards may ask.
_NEVER = {
    "vllm:spec_decode_num_drafts": "Drafts of tokens: there is no speculative decoding.",
    "vllm:spec_decode_num_draft_tokens": "Tokens of drafts: there is no speculative decoding.",
    "vllm:spec_decode_num_accepted_tokens": "Accepted ones: there is no speculative decoding.",
    "vllm:mm_cache_queries": "Images looked up: models read text alone.",
    "vllm:mm_cache_hits": "Images found: models read text alone.",
}
_SLEEP_STATES = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}


class EngineCollector(Collector):
    """Asks the engine whenever it is asked itself."""

    def __init__(self, engine: AnyEngine, labels: dict[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering the collector must not ask the engine."""
        return []

    def collect(self) -> Iterable[Metric]:
        stats, about = self._engine.stats(), self._engine.about
        for value in _gauges(stats):
            yield self._gauge(*value)
        for labelled in _labelled_gauges(stats):
            yield self._labelled(GaugeMetricFamily, *labelled)
        for value in _counters(stats):
            yield self._counter(*value)
        for labelled in _labelled_counters(stats):
            yield self._labelled(CounterMetricFamily, *labelled)
        yield from self._steps(stats)
        settings = {"block_size": str(stats.page_size), "num_gpu_blocks": str(stats.num_pages)}
        settings = dict(about.settings) if about else settings
        yield self._gauge("vllm:cache_config_info", "Settings of the KV cache.", 1, settings)
        startup = about.startup if about else {}
        text = "Seconds that each phase of the engine's start took."
        yield self._labelled(GaugeMetricFamily, "paged:startup_seconds", text, "phase", startup)
        adapters = dict.fromkeys(("running_lora_adapters", "waiting_lora_adapters"), "")
        text = "Adapters: there are none."
        yield self._gauge("vllm:lora_requests_info", text, 1, {"max_lora": "0"} | adapters)

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

    def _labelled(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        family = kind(name, text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family

    def _steps(self, stats: EngineStats) -> Iterable[Metric]:
        """How long steps take, by bucket, and how full they are."""
        steps = stats.steps
        seconds = HistogramMetricFamily(
            "paged:step_seconds",
            "Seconds of a step, from when the device could begin, by the shape it was padded to.",
            labels=[*self._labels, "bucket"],
        )
        for bucket, found in steps.seconds.items():
            labels = [*self._labels.values(), bucket]
            seconds.add_metric(labels, cumulated(STEP_BOUNDS, found.counts), found.total)
        yield seconds
        text = "Seconds of the host in a step, beside waiting for the device."
        yield self._histogram("paged:step_host_seconds", text, HOST_BOUNDS, steps.host_seconds)
        name = "vllm:iteration_tokens_total"
        yield self._histogram(name, "Tokens of a step.", TOKEN_BOUNDS, steps.num_tokens)

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], found: Distribution
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        buckets = cumulated(bounds, found.counts)
        family.add_metric(list(self._labels.values()), buckets, found.total)
        return family


def _gauges(stats: EngineStats) -> list[_Value]:
    usage = "Share of the KV pages in use, 0 to 1."
    free_tokens = (stats.num_free_pages + stats.num_cached_pages) * stats.page_size
    return [
        ("vllm:num_requests_running", "Sequences running.", stats.num_running),
        ("vllm:num_requests_waiting", "Sequences waiting.", stats.num_waiting),
        ("vllm:kv_cache_usage_perc", usage, stats.kv_cache_usage),
        ("vllm:gpu_cache_usage_perc", usage, stats.kv_cache_usage),
        ("paged:num_pages", "KV pages.", stats.num_pages),
        ("paged:num_free_pages", "KV pages that are free.", stats.num_free_pages),
        ("paged:num_cached_pages", "KV pages kept for their content.", stats.num_cached_pages),
        ("paged:free_kv_tokens", "Tokens that free and cached pages have room for.", free_tokens),
        ("paged:num_host_pages", "KV pages in host memory.", stats.num_host_pages),
        ("paged:num_used_host_pages", "Those that hold something.", stats.num_used_host_pages),
        ("paged:num_disk_pages", "KV pages on disk.", stats.num_disk_pages),
        ("paged:prefill_servers_connected", "Prefill servers.", stats.transfer.num_connected),
        ("paged:remote_prefills_running", "Prompts there.", stats.transfer.num_under_way),
        ("paged:decode_engines_connected", "Decode engines.", stats.transfer.num_served),
        ("paged:page_size", "Tokens per KV page.", stats.page_size),
        ("paged:page_bytes", "Bytes of a KV page.", stats.bytes_per_page),
        ("paged:kv_waste", "Share of the places in used pages without a token.", stats.kv_waste),
        ("paged:waiting_tokens", "Prompt tokens yet to be computed.", stats.waiting_tokens),
        ("paged:wait_seconds", "Estimated time in the queue.", stats.wait_seconds),
        ("paged:long_wait_seconds", "That in the lane of long ones.", stats.long_wait_seconds),
        ("paged:num_running_long", "Long sequences running.", stats.num_running_long),
        ("paged:num_waiting_long", "Long sequences waiting.", stats.num_waiting_long),
    ]


def _labelled_gauges(stats: EngineStats) -> list[_Labelled]:
    by_reason = {
        "capacity": stats.num_waiting - stats.num_deferred,
        "deferred": stats.num_deferred,
    }
    deferred = "Sequences waiting, for room or (deferred) for a grammar or pages from elsewhere."
    asleep = "Whether the engine is in a state: it is always awake."
    return [
        ("vllm:num_requests_waiting_by_reason", deferred, "reason", by_reason),
        ("vllm:engine_sleep_state", asleep, "sleep_state", _SLEEP_STATES),
    ]


def _counters(stats: EngineStats) -> list[_Value]:
    host_queries = "Prompt tokens not found in pages, looked up in host memory."
    host_hits = "Prompt tokens loaded from host memory."
    left_out = "KV pages that the disk was too slow to take."
    received = "Bytes of KV pages that prefill servers handed over."
    waited = "Seconds that prompts were waited for there, all together."
    sent = "Bytes of KV pages handed over to decode engines."
    compiles = "Compilations while serving; 0 unless something is wrong."
    tokens, cached = stats.prompt_tokens_admitted, stats.prompt_tokens_cached
    num_in_steps = stats.steps.num_tokens.total
    padding = stats.steps.num_places - num_in_steps
    return [
        ("vllm:prompt_tokens", "Tokens of prompts begun, computed or not.", tokens),
        ("vllm:prompt_tokens_cached", "Those of them that need not be computed.", cached),
        ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens),
        ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
        ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits),
        ("vllm:external_prefix_cache_queries", host_queries, stats.host_queries),
        ("vllm:external_prefix_cache_hits", host_hits, stats.host_hits),
        ("paged:host_bytes_saved", "Bytes of KV pages sent to the host.", stats.host_bytes_saved),
        ("paged:host_bytes_loaded", "Bytes that came back from it.", stats.host_bytes_loaded),
        ("paged:disk_pages_read", "KV pages read from disk.", stats.disk_pages_read),
        ("paged:disk_pages_left_out", left_out, stats.disk_pages_left_out),
        ("paged:remote_prefill_bytes", received, stats.transfer.bytes_received),
        ("paged:remote_prefill_seconds", waited, stats.transfer.seconds),
        ("paged:served_prefill_bytes", sent, stats.transfer.bytes_sent),
        ("vllm:num_preemptions", "Sequences preempted.", stats.num_preemptions),
        ("paged:computed_prompt_tokens", "Prompt tokens computed, again too.", stats.prompt_tokens),
        ("paged:num_steps", "Steps run.", stats.num_steps),
        ("paged:step_tokens", "Tokens in steps.", num_in_steps),
        ("paged:step_padding", "Places of steps without one.", padding),
        ("paged:timeouts", "Requests whose deadline passed.", stats.num_timeouts),
        ("paged:compiles_after_warmup", compiles, stats.compiles_after_warmup),
        ("paged:engine_restarts", "Engines started after one that died.", stats.num_restarts),
        *((name, text, 0) for name, text in _NEVER.items()),
    ]


def _labelled_counters(stats: EngineStats) -> list[_Labelled]:
    tokens, cached = stats.prompt_tokens_admitted, stats.prompt_tokens_cached
    by_source = {
        "local_compute": tokens - cached,
        "local_cache_hit": cached - stats.host_hits,
        "external_kv_transfer": stats.host_hits,
    }
    text = (
        "Tokens of prompts begun: computed, found in pages, or loaded from host memory, where "
        "those of prefill servers arrive."
    )
    asked = "Prompts that a prefill server was to compute, by how that ended."
    served = "Prompts computed for decode engines, by how that ended."
    hits = {"device": stats.prefix_cache_hits, "host": stats.host_hits}
    per_token = stats.bytes_per_page / stats.page_size if stats.page_size else 0.0
    hit_bytes = {tier: tokens * per_token for tier, tokens in hits.items()}
    no_drafts = "Accepted tokens by place: there is no speculative decoding."
    return [
        ("vllm:prompt_tokens_by_source", text, "source", by_source),
        ("vllm:spec_decode_num_accepted_tokens_per_pos", no_drafts, "position", {"0": 0}),
        ("paged:remote_prefills", asked, "outcome", stats.transfer.outcomes),
        ("paged:served_prefills", served, "outcome", stats.transfer.served),
        ("paged:prefix_hit_tokens", "Prompt tokens found, by tier.", "tier", hits),
        ("paged:prefix_hit_bytes", "Bytes of KV that were found, by tier.", "tier", hit_bytes),
    ]
