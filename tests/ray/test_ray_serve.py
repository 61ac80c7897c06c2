"""Replicas of the demo model on Ray Serve: routed, killed, scaled, streamed from and drained."""

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import openai
import pytest
import yaml

from paged.http.replicas.request import pages_of
from paged.prefix import extend_hashes
from paged.runtime.routing import Policy, Router
from tests.ray.serving import (
    NAME,
    NUM_PAGES,
    PAGE_SIZE,
    Cluster,
    Load,
    await_end,
    family,
    wait_until,
)

DEPLOY = Path(__file__).parents[2] / "deploy/ray"

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # of what Ray uses
]


def client_of(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0, timeout=120)


def streamed(cluster: Cluster, prompt: str, num_tokens: int, begun: Any = None) -> int:
    """How many tokens a stream brings. Raises APIError for one that ends with an error."""
    number = 0
    stream = client_of(cluster).completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=num_tokens,
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    for chunk in stream:
        for choice in chunk.choices:  # the field is ours
            number += len((choice.model_extra or {}).get("token_ids") or [])
        if begun is not None and number:
            begun.release()
            begun = None
    return number


def test_every_endpoint_is_there(cluster: Cluster) -> None:
    cluster.serve(num_replicas=1)
    client = client_of(cluster)
    assert [model.id for model in client.models.list()] == [NAME]
    messages: list[Any] = [{"role": "user", "content": "Say hello."}]
    reply = client.chat.completions.create(model=NAME, messages=messages, max_tokens=4)
    assert reply.choices[0].message.content
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 4
    stream = client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=6, stream=True, extra_body={"ignore_eos": True}
    )
    assert len([chunk for chunk in stream if chunk.choices]) >= 6
    assert client.responses.create(model=NAME, input="Hi", max_output_tokens=16).output_text
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        client.responses.create(model=NAME, input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="Hi")
    for path in ("/health", "/ready", "/version", "/load", "/openapi.json", "/"):
        found = httpx2.get(f"{cluster.url}{path}", headers={"X-Request-Id": "mine"}, timeout=60)
        assert (found.status_code, found.headers.get_list("x-request-id")) == (200, ["mine"])


def test_a_client_that_leaves_ends_its_request(cluster: Cluster) -> None:
    cluster.serve(num_replicas=1)
    stream = client_of(cluster).completions.create(
        model=NAME, prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert sum(cluster.counted("vllm:num_requests_running").values()) == 1
    stream.close()
    wait_until(lambda: sum(cluster.counted("vllm:num_requests_running").values()) == 0, 30)


def prompts(seed: int) -> list[list[int]]:
    """Prompts of 20 families that take turns: more pages than one replica has, not than two have.

    Args:
        seed: of the families, which have nothing in common with those of another.
    """
    random = Random(seed)
    families = [[random.randrange(1000, 9000) for _ in range(6 * PAGE_SIZE)] for _ in range(20)]
    turns = [random.sample(families, len(families)) for _ in range(4)]
    return [[*family, *random.sample(range(1000, 9000), 4)] for turn in turns for family in turn]


def predicted(policy: Policy, asked: list[list[int]]) -> float:
    """The hit rate of two replicas that forget what was used longest ago."""
    router = Router(policy)
    held: dict[str, OrderedDict[bytes, None]] = {name: OrderedDict() for name in "ab"}
    for name in held:
        router.add(name, 1000)
    num_hits = 0
    for tokens in asked:
        pages = pages_of(b'{"prompt": %s}' % str(tokens).encode())
        name = router.choose(pages)
        router.sent(pages, name)
        router.ended(name)
        hashes: list[bytes] = []
        extend_hashes(hashes, tokens, PAGE_SIZE)
        num_hits += sum(page in held[name] for page in hashes) * PAGE_SIZE
        for page in reversed(hashes):
            held[name][page] = None
            held[name].move_to_end(page)
        while len(held[name]) > NUM_PAGES - 1:
            held[name].popitem(last=False)
    return num_hits / sum(map(len, asked))


def measured(cluster: Cluster, asked: list[list[int]]) -> float:
    def rate_of() -> tuple[float, float]:
        names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
        hits, queries = (sum(cluster.counted(name).values()) for name in names)
        return hits, queries

    before = rate_of()
    for tokens in asked:
        assert cluster.complete(tokens, max_tokens=1).status_code == 200
    after = rate_of()
    return (after[0] - before[0]) / (after[1] - before[1])


def test_requests_go_where_their_prefix_is(cluster: Cluster) -> None:
    found: dict[Policy, float] = {}
    expected: dict[Policy, float] = {}
    policies: tuple[Policy, ...] = ("random", "prefix")
    for seed, policy in enumerate(policies):
        cluster.serve(num_replicas=2, routing=policy)
        asked = prompts(seed)
        found[policy], expected[policy] = measured(cluster, asked), predicted(policy, asked)
    assert found == pytest.approx(expected, abs=0.08)
    factor = found["prefix"] / found["random"]
    assert factor == pytest.approx(expected["prefix"] / expected["random"], rel=0.2)
    assert factor > 1.5


def test_a_replica_that_is_killed_takes_its_own_streams_along_and_no_more(cluster: Cluster) -> None:
    cluster.serve(num_replicas=2)
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(10) as pool:
        streams = [
            pool.submit(streamed, cluster, f"{number} times told", 250, begun)
            for number in range(4)
        ]
        for _ in streams:
            assert begun.acquire(timeout=120)
        whole = [
            pool.submit(cluster.complete, f"Question {number}", max_tokens=40, ignore_eos=True)
            for number in range(6)
        ]
        wait_until(lambda: len(cluster.counted("vllm:num_requests_running")) == 2, 30)
        one, other = map(family, cluster.replicas())
        one[0].kill()
        failures = [each.exception() for each in streams]
        replies = [each.result() for each in whole]
    lost = [each for each in failures if each is not None]
    assert len(lost) == 2
    assert all("has stopped" in str(each) for each in lost)
    assert [each.result() for each in streams if each.exception() is None] == [250, 250]
    assert [each.status_code for each in replies] == [200] * 6
    assert {each.json()["usage"]["completion_tokens"] for each in replies} == {40}
    await_end(one)
    cluster.await_replicas(2)
    assert other[0] in cluster.replicas()
    assert cluster.complete("Hi", max_tokens=2).status_code == 200


def test_replicas_come_and_go_under_load(cluster: Cluster) -> None:
    cluster.serve(num_replicas=1)
    [first] = cluster.replicas()
    with Load(cluster, num_clients=3).going_on() as load:
        load.await_more(3)
        cluster.serve(num_replicas=2)
        both = {each: family(each) for each in cluster.replicas()}
        assert first in both
        load.await_more(6)
        cluster.serve(num_replicas=1)
        [kept] = cluster.replicas()
        del both[kept]
        await_end(chain(*both.values()))
        load.await_more(3)
    assert load.wrong == []


def test_the_number_of_replicas_follows_the_load(cluster: Cluster) -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 1.5,
        "upscale_delay_s": 1,
        "downscale_delay_s": 3,
        "look_back_period_s": 3,
        "metrics_interval_s": 1,
    }
    cluster.serve(num_replicas=1, scaling=scaling)
    with Load(cluster, num_clients=1).going_on() as few:
        with Load(cluster, num_clients=4).going_on() as many:
            cluster.await_replicas(2)
            many.await_more(3)
        cluster.await_replicas(1)
        few.await_more(2)
    assert [*few.wrong, *many.wrong] == []


def test_an_update_lets_running_requests_finish(cluster: Cluster) -> None:
    cluster.serve(num_replicas=1)
    [before] = map(family, cluster.replicas())
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(streamed, cluster, "Once upon a time", 300, begun)
        assert begun.acquire(timeout=120)
        cluster.serve(num_replicas=1, served_model_name=[NAME, "newer"])
        assert stream.result(timeout=120) == 300
    await_end(before)
    assert cluster.post("/v1/completions", model="newer", prompt="Hi").status_code == 200


def test_the_end_of_an_application_lets_running_requests_finish(cluster: Cluster) -> None:
    from ray import serve

    cluster.serve(num_replicas=1)
    [last] = map(family, cluster.replicas())
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(streamed, cluster, "Once upon a time", 200, begun)
        assert begun.acquire(timeout=120)
        serve.delete("paged")
        assert stream.result(timeout=120) == 200
    await_end(last)


def test_the_files_for_ray_are_read_by_ray() -> None:
    from ray.serve.schema import ServeDeploySchema

    [service, *_] = yaml.safe_load_all((DEPLOY / "rayservice.yaml").read_text())
    for text in ((DEPLOY / "serve.yaml").read_text(), service["spec"]["serveConfigV2"]):
        schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
        assert [app.import_path for app in schema.applications] == ["paged:serve_app"]
