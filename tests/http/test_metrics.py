"""What dashboards and autoscalers read, by the names they know."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.http.fakes import FakeEngine

Labels = frozenset[tuple[str, str]]


def scrape(client: TestClient) -> dict[tuple[str, Labels], float]:
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def value(client: TestClient, name: str, **labels: str) -> float:
    if ":" in name:
        labels |= {"model_name": "tiny", "engine": "0"}
    return scrape(client).get((name, frozenset(labels.items())), 0.0)


def complete(client: TestClient, **body: Any) -> None:
    reply = client.post("/v1/completions", json={"prompt": "ab"} | body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vllm:num_requests_running", 0),
        ("vllm:num_requests_waiting", 0),
        ("vllm:kv_cache_usage_perc", 0.25),
        ("vllm:gpu_cache_usage_perc", 0.25),
        ("vllm:prompt_tokens_total", 3),
        ("vllm:generation_tokens_total", 6),
        ("vllm:prefix_cache_queries_total", 40),
        ("vllm:prefix_cache_hits_total", 30),
        ("vllm:external_prefix_cache_queries_total", 10),
        ("vllm:external_prefix_cache_hits_total", 4),
        ("vllm:num_preemptions_total", 2),
        ("paged:num_pages", 100),
        ("paged:num_free_pages", 75),
        ("paged:num_cached_pages", 10),
        ("paged:num_host_pages", 50),
        ("paged:num_used_host_pages", 20),
        ("paged:host_bytes_saved_total", 2**40),
        ("paged:num_disk_pages", 60),
        ("paged:disk_pages_read_total", 6),
        ("paged:disk_pages_left_out_total", 3),
        ("paged:host_bytes_loaded_total", 2**30),
        ("paged:page_size", 16),
        ("paged:kv_waste", 0.125),
        ("paged:num_steps_total", 7),
        ("paged:compiles_after_warmup_total", 0),
    ],
)
def test_the_engine_is_asked_at_each_scrape(client: TestClient, name: str, expected: float) -> None:
    complete(client)
    labels = frozenset({("model_name", "tiny"), ("engine", "0")})
    assert scrape(client)[name, labels] == expected


def test_the_cache_is_described(client: TestClient) -> None:
    assert value(client, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_histograms_of_a_request(client: TestClient, stream: bool) -> None:
    complete(client, stream=stream)
    once = {
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    }
    counts = {name: value(client, f"vllm:{name}_count") for name in once}
    assert counts == dict.fromkeys(once, 1)
    assert value(client, "vllm:inter_token_latency_seconds_count") == (5 if stream else 0)
    assert value(client, "vllm:request_prompt_tokens_sum") == 3
    assert value(client, "vllm:request_generation_tokens_sum") == 6


def test_latencies_are_in_seconds(client: TestClient, engine: FakeEngine) -> None:
    engine.pause = 0.02
    complete(client, stream=True)
    assert 0.1 <= value(client, "vllm:inter_token_latency_seconds_sum") < 1
    assert 0.02 <= value(client, "vllm:time_to_first_token_seconds_sum") < 0.5
    assert 0.12 <= value(client, "vllm:e2e_request_latency_seconds_sum") < 1


def test_the_delivery_of_streamed_tokens(client: TestClient, engine: FakeEngine) -> None:
    engine.pause = 0.02
    complete(client, stream=True)
    assert value(client, "paged:token_delivery_seconds_count") == 6
    assert 0 < value(client, "paged:token_delivery_seconds_sum") < 0.02


def test_token_buckets_reach_the_models_length(client: TestClient) -> None:
    bounds = [
        dict(labels)["le"]
        for name, labels in scrape(client)
        if name == "vllm:request_prompt_tokens_bucket"
    ]
    assert sorted(bounds, key=float) == [
        "1.0",
        "2.0",
        "5.0",
        "10.0",
        "20.0",
        "50.0",
        "100.0",
        "+Inf",
    ]


def test_ends_are_counted_by_reason(client: TestClient, engine: FakeEngine) -> None:
    complete(client)
    complete(client, max_tokens=2, n=2)
    client.post("/v1/completions", json={"prompt": "x" * 99})
    engine.fails_after = 1
    client.post("/v1/completions", json={"prompt": "a"})
    counts = {
        reason: value(client, "vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert counts == {"stop": 1, "length": 2, "abort": 0, "error": 1}


def test_http_requests_have_few_labels(client: TestClient) -> None:
    complete(client)
    client.post("/v1/completions", content=b"")
    client.get("/v1/models/tiny")
    client.get("/secret/path")
    client.request("BREW", "/v1/models")
    for path in ("/health", "/ping", "/version", "/metrics"):
        client.get(path)
    counted = {
        tuple(dict(labels)[name] for name in ("handler", "method", "status")): count
        for (sample, labels), count in scrape(client).items()
        if sample == "http_requests_total"
    }
    assert counted == {
        ("/v1/completions", "POST", "200"): 1,
        ("/v1/completions", "POST", "400"): 1,
        ("/v1/models/{name:path}", "GET", "200"): 1,
        ("none", "GET", "404"): 1,
        ("/v1/models", "other", "405"): 1,
    }
    seconds = "http_request_duration_seconds_count"
    assert value(client, seconds, handler="/v1/completions", method="POST") == 2


def test_the_process_is_described(client: TestClient) -> None:
    assert value(client, "process_resident_memory_bytes") > 0
