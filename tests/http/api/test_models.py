"""The list of models, and one of them."""

from starlette.testclient import TestClient

from paged.http.app import create_app
from tests.http.fakes import FakeEngine


def test_models(client: TestClient, engine: FakeEngine) -> None:
    reply = client.get("/v1/models").json()
    assert reply["object"] == "list"
    first, second = reply["data"]
    assert first.pop("created") > 0
    assert first == {
        "id": "tiny",
        "object": "model",
        "owned_by": "paged",
        "root": "tiny",
        "parent": None,
        "max_model_len": 64,
        "permission": [],
    }
    assert second["id"] == "other-name"
    assert client.get("/v1/models/other-name").json() == second
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()


def test_names_of_models_may_hold_slashes(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, ["org/model"]))
    assert client.get("/v1/models/org/model").json()["id"] == "org/model"
    missing = client.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "NotFoundError"
