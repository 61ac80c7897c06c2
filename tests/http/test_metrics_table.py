"""Every metric that vLLM's users know: its name, its type and its labels."""

import re
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.http.fakes import FakeEngine

MODEL = {"model_name", "engine"}


class Known(NamedTuple):
    kind: str
    labels: frozenset[str] = frozenset()
    values: frozenset[str] | None = None  # of the label, of which there is one then


COUNTER, GAUGE, HISTOGRAM = Known("counter"), Known("gauge"), Known("histogram")


def labelled(kind: str, label: str, *values: str) -> Known:
    return Known(kind, frozenset({label}), frozenset(values) or None)


SETTINGS = frozenset(
    {
        *("block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_dtype", "swap_space"),
        *("gpu_memory_utilization", "enable_prefix_caching", "prefix_caching_hash_algo"),
        *("kv_cache_memory_bytes", "kv_offloading_size"),
    }
)
TABLE = {
    "num_requests_running": GAUGE,
    "num_requests_waiting": GAUGE,
    "num_requests_waiting_by_reason": labelled("gauge", "reason", "capacity", "deferred"),
    "gpu_cache_usage_perc": GAUGE,
    "kv_cache_usage_perc": GAUGE,
    "prefix_cache_queries": COUNTER,
    "prefix_cache_hits": COUNTER,
    "external_prefix_cache_queries": COUNTER,
    "external_prefix_cache_hits": COUNTER,
    "mm_cache_queries": COUNTER,
    "mm_cache_hits": COUNTER,
    "num_preemptions": COUNTER,
    "prompt_tokens": COUNTER,
    "generation_tokens": COUNTER,
    "prompt_tokens_cached": COUNTER,
    "prompt_tokens_by_source": labelled(
        *("counter", "source", "local_compute", "local_cache_hit", "external_kv_transfer")
    ),
    "request_success": labelled(
        *("counter", "finished_reason", "stop", "length", "abort", "error", "repetition", "timeout")
    ),
    "time_to_first_token_seconds": HISTOGRAM,
    "inter_token_latency_seconds": HISTOGRAM,
    "request_time_per_output_token_seconds": HISTOGRAM,
    "time_per_output_token_seconds": HISTOGRAM,
    "e2e_request_latency_seconds": HISTOGRAM,
    "request_queue_time_seconds": HISTOGRAM,
    "request_inference_time_seconds": HISTOGRAM,
    "request_prefill_time_seconds": HISTOGRAM,
    "request_decode_time_seconds": HISTOGRAM,
    "request_prompt_tokens": HISTOGRAM,
    "request_generation_tokens": HISTOGRAM,
    "request_max_num_generation_tokens": HISTOGRAM,
    "request_params_max_tokens": HISTOGRAM,
    "request_prefill_kv_computed_tokens": HISTOGRAM,
    "request_params_n": HISTOGRAM,
    "iteration_tokens_total": HISTOGRAM,
    "cache_config_info": Known("gauge", SETTINGS),
    "lora_requests_info": Known(
        "gauge", frozenset({"max_lora", "running_lora_adapters", "waiting_lora_adapters"})
    ),
    "engine_sleep_state": labelled(
        *("gauge", "sleep_state", "awake", "weights_offloaded", "discard_all")
    ),
    "spec_decode_num_drafts": COUNTER,
    "spec_decode_num_draft_tokens": COUNTER,
    "spec_decode_num_accepted_tokens": COUNTER,
    "spec_decode_num_accepted_tokens_per_pos": labelled("counter", "position"),
}
"""Without those that vLLM has only where it is told to look for them: `corrupted_requests`, and
`kv_block_...` of --kv-cache-metrics."""

BOUNDS = {
    "time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 "
    "2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0 +Inf",
    "inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 "
    "5.0 7.5 10.0 20.0 40.0 80.0 +Inf",
    "e2e_request_latency_seconds": "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 "
    "50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0 +Inf",
    "request_params_n": "1.0 2.0 5.0 10.0 20.0 +Inf",
    "iteration_tokens_total": "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 "
    "8192.0 16384.0 +Inf",
}


@pytest.fixture
def families(client: TestClient) -> dict[str, tuple[str, list[dict[str, str]]]]:
    """Of each metric its type, and the labels of its samples."""
    reply = client.post("/v1/completions", json={"prompt": "ab", "n": 2, "temperature": 1})
    assert reply.status_code == 200
    text = client.get("/metrics").text
    return {
        family.name: (family.type, [sample.labels for sample in family.samples])
        for family in text_string_to_metric_families(text)
    }


@pytest.mark.parametrize("name", TABLE)
def test_vllms_metrics(families: dict[str, tuple[str, list[dict[str, str]]]], name: str) -> None:
    known = TABLE[name]
    kind, samples = families[f"vllm:{name}"]
    assert kind == known.kind
    for labels in samples:
        assert {*labels} - {"le"} == MODEL | known.labels
        assert (labels["model_name"], labels["engine"]) == ("tiny", "0")
    if known.values is not None:
        [label] = known.labels
        assert {labels[label] for labels in samples} == known.values


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_are_vllms(families: dict[str, tuple[str, list[dict[str, str]]]], name: str) -> None:
    _, samples = families[f"vllm:{name}"]
    assert [labels["le"] for labels in samples if "le" in labels] == BOUNDS[name].split()


def test_no_name_of_vllms_prefix_is_our_own(
    families: dict[str, tuple[str, list[dict[str, str]]]],
) -> None:
    ours = {name.removeprefix("vllm:") for name in families if name.startswith("vllm:")}
    assert {name for name in ours if not name.endswith("_created")} == {*TABLE}


def test_our_own_are_explained(
    families: dict[str, tuple[str, list[dict[str, str]]]],
) -> None:
    """Each in docs/operations.md, with its type."""
    text = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    rows = [row.split("|")[1:3] for row in text.splitlines() if row.startswith("| `paged:")]
    explained = {
        name: kind.strip() for names, kind in rows for name in re.findall(r"`(paged:\w+)`", names)
    }
    ours = {
        name: kind
        for name, (kind, _) in families.items()
        if name.startswith("paged:") and not name.endswith("_created")
    }
    assert ours == explained


def test_a_scrape_takes_milliseconds(client: TestClient, engine: FakeEngine) -> None:
    client.get("/metrics")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert client.get("/metrics").status_code == 200
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1, "on a busy machine of tests; a few milliseconds where there is room"
