"""The page at /, what feeds it, and what operators see; with keys and below a path."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from paged.http import status
from paged.http.app import create_app
from paged.http.recent import Second
from paged.http.status import picture, runs
from paged.runtime.engine_state import EngineState
from tests.http.fakes import FakeEngine
from tests.runtime.pooling.pooling_fakes import pooling_engine

STATIC = Path(status.__file__).parent / "static"


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


def test_who_watches_shares_what_is_summed() -> None:
    glance = status.Glance()
    first = glance.history([{10: Second(9)}], 12.1)
    assert glance.history([{10: Second(9)}], 12.9) is first
    assert first.rate == 3
    assert glance.history([{10: Second(9)}], 14.0).rate == 0


def test_what_the_page_shows(client: TestClient, engine: FakeEngine) -> None:
    engine.running = {"cmpl-1-0"}
    found = client.get("/status.json").json()
    [model] = found["models"]
    assert (model["name"], model["generates"], model["trouble"]) == ("tiny", True, None)
    assert model["stats"]["num_pages"] == 100
    assert model["memory"] == {
        "weights": 2**31,
        "KV pages": 101 * 160,
        "steps": 2**28,
        "slot state": 2**20,
        "left over": 2**33 - 2**31 - 101 * 160 - 2**28 - 2**20,
    }
    assert model["num_devices"] == 1
    assert model["startup"] == {"weights": 1.5, "compile": 20.0}
    assert model["steps"] == [{"bucket": "decode_4", "count": 4, "ms": 1.5}]
    assert model["host_ms"] == pytest.approx(0.05)
    assert model["pages"]["per_cell"] == 1
    assert model["pages"]["cells"][9:16] == [[1, 0, 0], *[[0, 1, 0]] * 5, [0, 0, 1]]
    [sequence] = model["sequences"]
    assert (sequence["request_id"], sequence["status"]) == ("cmpl-1-0", "running")
    assert (sequence["num_pages"], "page_tables" in sequence) == (1, False)


def test_ids_are_not_whole(client: TestClient, engine: FakeEngine) -> None:
    """With the id of a kept response anyone who has a key can read it."""
    engine.running = {f"resp_{'0123456789abcdef' * 2}-mine-0"}
    [model] = client.get("/status.json").json()["models"]
    [sequence] = model["sequences"]
    assert sequence["request_id"] == "resp_01234567"


def test_what_clients_got_is_in_the_history(client: TestClient) -> None:
    client.post("/v1/completions", json={"prompt": "a", "stream": True})
    recent = client.app.state.models.services[0].metrics.recent  # type: ignore[attr-defined]
    seconds = recent.seconds.values()  # two, where one ended meanwhile
    assert sum(second.tokens for second in seconds) == 6
    assert sum(sum(second.firsts) for second in seconds) == 1
    assert sum(sum(second.gaps) for second in seconds) == 5


def test_a_pool_is_drawn_in_few_squares() -> None:
    states = bytes([2, 2, 3, 1] * 1000 + [0])
    found = picture(states)
    assert (found.per_cell, len(found.cells)) == (3, 1334)
    assert [sum(column) for column in zip(*found.cells, strict=True)] == [2000, 1000, 1000]
    assert picture(b"").cells == []


def test_those_who_watch_together_cost_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_FRESH", 60)  # while they watch
    looks = []

    class Watched(FakeEngine):
        async def look(self) -> EngineState:
            looks.append(1)
            return await super().look()

    client = TestClient(create_app(Watched(), ["tiny"]))
    for _ in range(3):
        client.get("/status.json")
    assert len(looks) == 1


def test_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hung(FakeEngine):
        async def look(self) -> EngineState:
            await asyncio.sleep(60)
            raise AssertionError

    monkeypatch.setattr(status, "_PATIENCE", 0.05)
    client = TestClient(create_app(Hung(), ["tiny"], admin_keys=["admin"]))
    [model] = client.get("/status.json").json()["models"]
    assert (model["pages"], model["sequences"]) == (None, None)
    [model] = client.get("/debug/state", headers=key("admin")).json()["models"]
    assert model["error"] == "the engine did not answer within 0.05 s"


def test_an_engine_that_is_being_restarted() -> None:
    """It has not died for good, and does not serve either."""

    class Restarting(FakeEngine):
        @property
        def trouble(self) -> str | None:
            return "has stopped and is being restarted"

    client = TestClient(create_app(Restarting(), ["tiny"]))
    [model] = client.get("/status.json").json()["models"]
    assert model["trouble"] == "has stopped and is being restarted"


def test_a_model_for_vectors() -> None:
    engine = pooling_engine()
    try:
        client = TestClient(create_app(engine, ["tiny"], admin_keys=["admin"]))
        [model] = client.get("/status.json").json()["models"]
        assert (model["generates"], model["pages"]) == (False, None)
        [model] = client.get("/debug/state", headers=key("admin")).json()["models"]
        assert model["stats"]["num_running"] == 0
    finally:
        engine.shutdown()


def test_the_page_needs_no_key_and_its_figures_do(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, ["tiny"], api_keys=["secret"]))
    for path in ("/", "/static/page.js", "/static/page.css"):
        assert client.get(path).status_code == 200
    assert client.get("/status.json").status_code == 401
    assert client.get("/status.json", headers=key("secret")).status_code == 200


@pytest.mark.parametrize("root_path", ["", "/models"])
def test_the_page_finds_its_files(engine: FakeEngine, root_path: str) -> None:
    client = TestClient(create_app(engine, ["tiny"]), root_path=root_path)
    text = client.get(f"{root_path}/").text
    assert f'<base href="{root_path}/">' in text
    names = re.findall(r'(?:href|src)="(static/[^"]+)"', text)
    assert {*names} == {"static/icon.svg", "static/page.css", "static/page.js"}
    for name in names:
        reply = client.get(f"{root_path}/{name}")
        assert reply.status_code == 200
        assert "default-src 'self'" in reply.headers["content-security-policy"]


def test_nothing_of_the_page_is_elsewhere() -> None:
    for path in STATIC.iterdir():
        found = re.findall(r"https?://[^\s\"']+", path.read_text())
        assert {*found} <= {"http://www.w3.org/2000/svg"}, path
    modules = {path.name for path in STATIC.glob("*.js")}
    for path in STATIC.glob("*.js"):
        assert {*re.findall(r'from "\./([^"]+)"', path.read_text())} <= modules


@pytest.mark.parametrize(
    "name",
    [
        *("nothing.js", "..%2fstatus.py", "%2e%2e%2fapp.py", "status.py", "index.html"),
        *("%00.js", f"{'a' * 300}.js"),
    ],
)
def test_no_other_file_is_given_away(client: TestClient, name: str) -> None:
    assert client.get(f"/static/{name}").status_code == 404


def test_what_operators_see(engine: FakeEngine) -> None:
    engine.running = {"cmpl-1-0"}
    client = TestClient(create_app(engine, ["tiny"], api_keys=["user"], admin_keys=["admin"]))
    for headers in ({}, key("user"), key("wrong")):
        assert client.get("/debug/state", headers=headers).status_code == 401
    found: dict[str, Any] = client.get("/debug/state", headers=key("admin")).json()
    assert {thread["name"] for thread in found["process"]["threads"]} >= {"MainThread"}
    [model] = found["models"]
    assert model["pages"] == [["used", 10], ["shared", 5], ["cached", 10], ["free", 75]]
    assert model["sequences"][0]["request_id"] == "cmpl-1-0"
    assert model["steps_in_flight"][0]["bucket"] == "decode_4"
    assert "secret" not in json.dumps(found)
    assert client.get("/v1/models", headers=key("admin")).status_code == 401
    assert client.get("/v1/models", headers=key("user")).status_code == 200


@pytest.mark.parametrize("keys", [[], ["user"]])
def test_without_an_admin_key_it_is_not_there(engine: FakeEngine, keys: list[str]) -> None:
    client = TestClient(create_app(engine, ["tiny"], api_keys=keys))
    assert client.get("/debug/state", headers=key("user")).status_code == 404


def test_an_admin_key_alone_leaves_the_rest_open(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, ["tiny"], admin_keys=["admin"]))
    assert client.get("/v1/models").status_code == 200


def test_runs_of_pages() -> None:
    assert runs(bytes([0, 0, 2, 0])) == [("free", 2), ("used", 1), ("free", 1)]
