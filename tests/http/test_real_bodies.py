"""No body makes a server over the real engine fail, and beams come through the socket."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from starlette.testclient import TestClient

from paged.http.app import create_app
from paged.runtime.async_engine import AsyncEngine
from tests.http.api.test_any_body import CHATS, COMPLETIONS, MESSAGE_REPLIES, RESPONSES, VALUES
from tests.http.fakes import serving
from tests.runtime.fakes import write_model
from tests.runtime.test_llm_end_to_end import FLAGS, MODEL

pytestmark = pytest.mark.slow
PATHS = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHATS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGE_REPLIES,
    "/tokenize": st.fixed_dictionaries({}, optional={"prompt": VALUES, "messages": VALUES}),
    "/detokenize": st.fixed_dictionaries({"tokens": st.lists(st.integers()) | VALUES}),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    folder = write_model(tmp_path_factory.mktemp("model"), MODEL)
    engine = AsyncEngine(str(folder), compile_cache_dir="", **FLAGS)
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("path", PATHS)
def test_it_is_answered_or_refused(engine: AsyncEngine, path: str) -> None:
    app = create_app(engine, ["tiny"], trust_request_chat_template=True)
    with TestClient(app, raise_server_exceptions=True) as client:

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(PATHS[path])
        def answered(body: Any) -> None:
            assert client.post(path, json=body).status_code in (200, 400, 404)

        answered()
    assert not engine.errored
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_beams_through_the_socket(engine: AsyncEngine) -> None:
    with (
        serving(create_app(engine, ["tiny"])) as url,
        OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as sdk,
    ):
        beams: dict[str, Any] = {"use_beam_search": True, "ignore_eos": True}
        reply = sdk.completions.create(
            model="tiny", prompt=["abc", "d"], n=2, max_tokens=6, extra_body=beams, echo=True
        )
        greedy = sdk.completions.create(
            model="tiny", prompt="abc", max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
        )
        best = sdk.completions.create(model="tiny", prompt="abc", n=2, best_of=4, max_tokens=6)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text[:1] for choice in reply.choices] == ["a", "a", "d", "d"]
    assert reply.usage
    assert reply.usage.completion_tokens == 24
    assert len(greedy.choices[0].text) <= len(reply.choices[0].text)
    assert [choice.index for choice in best.choices] == [0, 1]
