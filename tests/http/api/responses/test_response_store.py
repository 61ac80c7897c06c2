"""The store holds so many responses, so many bytes, and what was used last."""

import asyncio
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from paged.http.api.errors import ApiError
from paged.http.api.responses.protocol import (
    InputItem,
    ReasoningOptions,
    Response,
    TextOptions,
)
from paged.http.api.responses.store import ResponseStore, Stored
from paged.http.app import create_app
from tests.http.fakes import FakeEngine


def stored(name: str, size: int = 0, task: asyncio.Task[None] | None = None) -> Stored:
    response = Response(
        id=name,
        created_at=0,
        status="completed",
        background=False,
        instructions=None,
        max_output_tokens=None,
        max_tool_calls=None,
        metadata={},
        model="tiny",
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning=ReasoningOptions(),
        store=True,
        temperature=1.0,
        text=TextOptions(),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        truncation="disabled",
        user=None,
    )
    return Stored(response, (InputItem(role="user", content="x" * size),), task)


def kept(store: ResponseStore, names: str) -> str:
    return "".join(name for name in names if name in store)


def test_the_number_is_bounded() -> None:
    store = ResponseStore(max_responses=2)
    for name in "abc":
        store.put(stored(name))
    assert kept(store, "abc") == "bc"
    store.get("b")
    store.put(stored("d"))
    assert kept(store, "abcd") == "bd"
    store.put(stored("d", size=10))
    assert (len(store), kept(store, "abcd")) == (2, "bd")


def test_the_bytes_are_bounded() -> None:
    store = ResponseStore(max_bytes=5000)
    for name in "ab":
        store.put(stored(name, size=1000))
    store.put(stored("c", size=3000))
    assert kept(store, "abc") == "c"
    store.delete("c")
    for name in "de":
        store.put(stored(name, size=1000))
    assert kept(store, "cde") == "de"
    store.put(stored("f", size=6000))
    assert kept(store, "def") == "de"
    store.put(stored("e", size=6000))
    assert kept(store, "def") == "d"


def test_what_is_missing_is_a_404_that_says_why() -> None:
    store = ResponseStore(max_responses=7)
    for use in (store.get, store.delete):
        with pytest.raises(ApiError, match="the 7 used last, with 256 MiB") as caught:
            use("resp_1")
        assert caught.value.status == 404


def test_what_has_to_go_is_no_longer_made() -> None:
    async def scenario() -> None:
        store = ResponseStore(max_responses=1)
        task = asyncio.create_task(asyncio.sleep(60))
        store.put(stored("a", task=task))
        store.put(stored("a", size=1, task=task))
        await asyncio.sleep(0)
        assert not task.cancelling()
        store.put(stored("b"))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_what_cannot_be_kept_cannot_run_in_the_background() -> None:
    engine = FakeEngine()
    app = create_app(engine, ["tiny"])
    app.state.models = replace(app.state.models, responses=ResponseStore(max_bytes=2000))
    client = TestClient(app)
    kept = client.post("/v1/responses", json={"input": "a"}).json()["id"]
    large = {"input": "a", "metadata": {"a": "x" * 2000}}
    refused = client.post("/v1/responses", json=large | {"background": True})
    assert refused.json()["error"]["param"] == "background"
    assert client.post("/v1/responses", json=large).status_code == 200
    assert client.get(f"/v1/responses/{kept}").status_code == 200
    assert not engine.running
