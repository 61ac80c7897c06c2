"""What dashboards and autoscalers read, by the names they know."""

import time
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.testclient import TestClient

from paged.http.api.errors import ApiError, cause_of
from paged.http.app import create_app
from paged.runtime.errors import EngineDead, InvalidRequest, Overloaded
from tests.http.fakes import FakeEngine
from tests.runtime.remote import wait_until

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


STREAM = {"prompt": "a", "stream": True, "max_tokens": 60}


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
        ("paged:prefill_servers_connected", 1),
        ("paged:remote_prefills_running", 3),
        ("paged:decode_engines_connected", 2),
        ("paged:remote_prefill_bytes_total", 2**20),
        ("paged:remote_prefill_seconds_total", 1.5),
        ("paged:served_prefill_bytes_total", 2**21),
        ("paged:page_size", 16),
        ("paged:kv_waste", 0.125),
        ("paged:num_steps_total", 7),
        ("paged:compiles_after_warmup_total", 0),
        ("paged:free_kv_tokens", 85 * 16),
        ("paged:page_bytes", 160),
        ("paged:step_tokens_total", 12),
        ("paged:step_padding_total", 4),
        ("paged:step_host_seconds_count", 4),
        ("paged:computed_prompt_tokens_total", 2),
        ("vllm:prompt_tokens_cached_total", 1),
        ("vllm:iteration_tokens_total_sum", 12),
    ],
)
def test_the_engine_is_asked_at_each_scrape(client: TestClient, name: str, expected: float) -> None:
    complete(client)
    labels = frozenset({("model_name", "tiny"), ("engine", "0")})
    assert scrape(client)[name, labels] == expected


def test_the_cache_is_described(client: TestClient) -> None:
    described = [labels for name, labels in scrape(client) if name == "vllm:cache_config_info"]
    [labels] = map(dict, described)
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("16", "100")
    assert (labels["num_cpu_blocks"], labels["cache_dtype"]) == ("50", "auto")


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
    start = time.monotonic()
    complete(client, stream=True)
    took = time.monotonic() - start
    assert 0.1 <= value(client, "vllm:inter_token_latency_seconds_sum") <= took
    assert 0.02 <= value(client, "vllm:time_to_first_token_seconds_sum") <= took
    assert 0.12 <= value(client, "vllm:e2e_request_latency_seconds_sum") <= took


def test_the_delivery_of_streamed_tokens(client: TestClient, engine: FakeEngine) -> None:
    """Which is no part of the pauses before them, however long it took."""
    engine.pause = 0.02
    start = time.monotonic()
    complete(client, stream=True)
    took = time.monotonic() - start
    assert value(client, "paged:token_delivery_seconds_count") == 6
    assert 0 < value(client, "paged:token_delivery_seconds_sum") <= took - 6 * engine.pause


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


@pytest.mark.parametrize(
    ("name", "label", "expected"),
    [
        ("vllm:num_requests_waiting_by_reason", "reason", {"capacity": 2, "deferred": 1}),
        ("vllm:engine_sleep_state", "sleep_state", {"awake": 1, "discard_all": 0}),
        ("paged:prefix_hit_tokens_total", "tier", {"device": 30, "host": 4}),
        ("paged:prefix_hit_bytes_total", "tier", {"device": 300, "host": 40}),
        ("paged:remote_prefills_total", "outcome", {"done": 4, "lost": 1}),
        ("paged:served_prefills_total", "outcome", {"done": 5}),
        ("paged:step_seconds_count", "bucket", {"decode_4": 4}),
        ("paged:startup_seconds", "phase", {"weights": 1.5, "compile": 20}),
    ],
)
def test_what_has_a_label(
    client: TestClient, engine: FakeEngine, name: str, label: str, expected: dict[str, float]
) -> None:
    engine.num_waiting, engine.num_deferred = 3, 1
    assert {each: value(client, name, **{label: each}) for each in expected} == expected


def test_what_a_request_asks_for(client: TestClient) -> None:
    complete(client, n=2, temperature=1, max_tokens=4)
    complete(client)
    sums = {
        "request_params_n": 3,
        "request_params_max_tokens": 4 + 16,
        "request_max_num_generation_tokens": 4 + 6,
        "request_prefill_kv_computed_tokens": 2 + 2,
    }
    assert {name: value(client, f"vllm:{name}_sum") for name in sums} == sums


def num_refused(client: TestClient, cause: str) -> float:
    return scrape(client)["paged:requests_refused_total", frozenset({("cause", cause)})]


def test_refusals_are_counted_by_cause(app: Starlette, engine: FakeEngine) -> None:
    client = TestClient(app, raise_server_exceptions=False)
    for body in ({"prompt": 1}, {"prompt": "a", "model": "other"}, {"prompt": "a", "n": 0}):
        client.post("/v1/completions", json=body)
    client.post("/v1/completions", content=b"{}")
    client.get("/secret/path")
    engine.errored = True
    client.post("/v1/completions", json={"prompt": "a"})
    causes = ("bad_request", "not_found", "internal_server")
    assert {cause: num_refused(client, cause) for cause in causes} == {
        "bad_request": 3,
        "not_found": 2,
        "internal_server": 1,
    }


def test_requests_without_a_key_are_counted(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, ["tiny"], api_keys=["secret"]))
    assert client.get("/v1/models").status_code == 401
    assert num_refused(client, "authentication") == 1


def test_some_refusals_have_causes_of_their_own() -> None:
    assert cause_of(InvalidRequest("...", "input_tokens")) == "too_long"
    assert cause_of(ApiError(503, "...", "ServiceUnavailableError")) == "service_unavailable"
    assert cause_of(Overloaded("...", "tokens")) == "tokens"


def test_clients_that_leave_are_counted(url: str, engine: FakeEngine) -> None:
    engine.answer, engine.pause = "x" * 60, 0.2
    with httpx2.stream("POST", f"{url}/v1/completions", json=STREAM) as reply:
        next(reply.iter_lines())
    wait_until(lambda: "paged:client_disconnects_total{" in httpx2.get(f"{url}/metrics").text)
    wait_until(lambda: engine.aborted != [])
    [line] = [
        line
        for line in httpx2.get(f"{url}/metrics").text.splitlines()
        if line.startswith("paged:client_disconnects_total{")
    ]
    assert line.endswith(" 1.0")


def test_who_fails_with_another_prompt_has_not_left(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = engine._check

    def fail_for_b(prompt: list[int]) -> None:
        check(prompt)
        if prompt[-1] == ord("b"):
            raise EngineDead("the device is gone")

    monkeypatch.setattr(engine, "_check", fail_for_b)
    engine.pause = 0.05
    client = TestClient(create_app(engine, ["tiny"]), raise_server_exceptions=False)
    assert client.post("/v1/completions", json={"prompt": ["a", "b"]}).status_code == 500
    assert len(engine.aborted) == 1
    assert value(client, "paged:client_disconnects_total") == 0
    assert value(client, "vllm:request_success_total", finished_reason="abort") == 1


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
