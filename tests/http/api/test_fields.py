"""Fields beyond OpenAI's own, each as the engine or the reply shows it."""

from typing import Any, ClassVar

import pytest
from starlette.testclient import TestClient

from paged.http.api.logprobs import TokenSpeller, chat_logprobs
from paged.http.api.search import best
from paged.http.app import create_app
from paged.runtime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tests.http.fakes import FakeEngine, FakeTokenizer, events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"role": "user", "content": "Hi"}


def chat(client: TestClient, **body: Any) -> dict[str, Any]:
    reply = client.post(CHAT, json={"messages": [HI]} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    reply = client.post(COMPLETIONS, json={"prompt": "abc"} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(client: TestClient, path: str, **body: Any) -> str:
    reply = client.post(path, json={"prompt": "abc", "messages": [HI]} | body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]["param"]


class TestTruncation:
    @pytest.mark.parametrize(
        ("fields", "kept"),
        [
            ({"truncate_prompt_tokens": 4}, "6789"),
            ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, "6789"),
            ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, "\x00012"),
            ({"truncate_prompt_tokens": 64}, "\x000123456789"),
            ({"truncation_side": "right"}, "\x000123456789"),
        ],
    )
    def test_so_much_of_a_prompt_is_read(
        self, client: TestClient, engine: FakeEngine, fields: dict[str, Any], kept: str
    ) -> None:
        reply = complete(client, prompt="0123456789", echo=True, **fields)
        assert engine.seen[0].text == kept.lstrip("\0") or engine.seen[0].text == kept
        assert reply["usage"]["prompt_tokens"] == len(kept)
        assert reply["choices"][0]["text"].lstrip("\0") == kept.lstrip("\0") + "Hello!"

    def test_all_that_leaves_room(self, client: TestClient, engine: FakeEngine) -> None:
        complete(client, prompt=list(range(100)), truncate_prompt_tokens=-1, max_tokens=10)
        complete(client, prompt=list(range(100)), truncate_prompt_tokens=-1, max_tokens=1000)
        assert [seen.prompt for seen in engine.seen] == [list(range(46, 100)), [99]]

    def test_of_a_conversation_too(self, client: TestClient, engine: FakeEngine) -> None:
        chat(client, truncate_prompt_tokens=10)
        assert engine.seen[0].text == "assistant:"

    @pytest.mark.parametrize("value", [0, -2, 65, 10**30])
    def test_of_impossible_lengths(self, client: TestClient, value: int) -> None:
        for path in (CHAT, COMPLETIONS):
            assert refused(client, path, truncate_prompt_tokens=value) == "truncate_prompt_tokens"
        assert refused(client, CHAT, truncation_side="up") == "truncation_side"


class TestTokensAsIds:
    def test_in_completions(self, client: TestClient) -> None:
        reply = complete(
            client, echo=True, logprobs=1, max_tokens=2, return_tokens_as_token_ids=True
        )
        logprobs = reply["choices"][0]["logprobs"]
        tokens = [0, *b"abc", *b"He"]
        assert logprobs["tokens"] == [f"token_id:{token}" for token in tokens]
        assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
        assert "token_id:72" in logprobs["top_logprobs"][4]

    def test_in_chat(self, client: TestClient) -> None:
        fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
        [choice] = chat(client, **fields)["choices"]
        assert choice["logprobs"]["content"][0]["token"] == "token_id:72"
        streamed = events(client.post(CHAT, json={"messages": [HI], "stream": True} | fields).text)
        assert (
            streamed[1]["choices"][0]["logprobs"]["content"][0]
            == (choice["logprobs"]["content"][0])
        )


def test_half_a_character_has_its_own_bytes() -> None:
    class Halves(FakeTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return bytes([token_id])

    entry = {0xC3: Logprob(-0.5, 1, "\ufffd")}
    sequence = CompletionOutput(0, token_ids=[0xC3], logprobs=[entry])
    made = chat_logprobs(sequence, 1, TokenSpeller(Halves(), False))
    assert made
    assert (made.content[0].token, made.content[0].bytes) == ("\ufffd", [0xC3])
    assert made.content[0].top_logprobs[0].bytes == [0xC3]


class TestEcho:
    MESSAGES: ClassVar = [HI, {"role": "assistant", "content": "Well, "}]

    def test_an_answer_begins_with_the_message_it_continues(self, client: TestClient) -> None:
        how = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
        [choice] = chat(client, messages=self.MESSAGES, **how)["choices"]
        assert choice["message"]["content"] == "Well, Hello!"
        body = {"messages": self.MESSAGES, "stream": True} | how
        deltas = [each["choices"][0]["delta"] for each in events(client.post(CHAT, json=body).text)]
        assert deltas[0]["role"] == "assistant"
        assert [delta.get("content") for delta in deltas[:3]] == ["", "Well, ", "H"]

    def test_of_what_the_user_said_there_is_none(self, client: TestClient) -> None:
        assert chat(client, echo=True)["choices"][0]["message"]["content"] == "Hello!"


class TestTemplates:
    def test_those_of_requests_are_not_trusted(self, client: TestClient) -> None:
        assert refused(client, CHAT, chat_template="{{ messages }}") == "chat_template"

    def test_unless_the_server_says_so(self, engine: FakeEngine) -> None:
        app = create_app(engine, ["tiny"], trust_request_chat_template=True)
        chat(TestClient(app), chat_template="mine")
        assert engine.seen[0].text == "mine|user:Hi|assistant:"

    def test_read_documents(self, client: TestClient, engine: FakeEngine) -> None:
        engine.max_model_len = 200
        chat(client, documents=[{"title": "a"}])
        assert engine.seen[0].text.startswith("documents=[{'title': 'a'}]|")


class TestBestOf:
    def test_the_likeliest_are_returned_and_all_are_counted(
        self, client: TestClient, engine: FakeEngine
    ) -> None:
        for reply in (
            complete(client, best_of=3, n=2, max_tokens=4),
            chat(client, best_of=3, n=2, max_tokens=4),
        ):
            assert [choice["index"] for choice in reply["choices"]] == [0, 1]
            assert [choice["logprobs"] for choice in reply["choices"]] == [None, None]
            assert reply["usage"]["completion_tokens"] == 12
        assert [seen.params.n for seen in engine.seen] == [3, 3]

    def test_logprobs_that_were_asked_for_stay(self, client: TestClient) -> None:
        [choice] = complete(client, best_of=2, logprobs=1)["choices"]
        assert len(choice["logprobs"]["tokens"]) == 6

    def test_scoring_a_prompt_takes_none(self, client: TestClient) -> None:
        reply = complete(client, best_of=2, echo=True, logprobs=0, max_tokens=0)
        assert reply["usage"]["completion_tokens"] == 0

    @pytest.mark.parametrize(
        "fields",
        [
            {"n": 2, "best_of": 1},
            {"best_of": 2, "stream": True},
            {"best_of": 0},
            {"best_of": 129},
            {"best_of": 11, "use_beam_search": True},
        ],
    )
    def test_what_cannot_be_chosen(self, client: TestClient, fields: dict[str, Any]) -> None:
        assert refused(client, COMPLETIONS, **fields) == "best_of"

    def test_ranking(self) -> None:
        sequences = [
            CompletionOutput(0, token_ids=[1] * 4, cumulative_logprob=-4.0),
            CompletionOutput(1, token_ids=[1], cumulative_logprob=-2.0),
            CompletionOutput(2, token_ids=[1] * 2, cumulative_logprob=-1.0),
        ]
        output = RequestOutput("r", None, [1], None, sequences, True, 0, RequestMetrics(0.0))
        ranked = best(output, 2).outputs
        assert [(each.index, each.cumulative_logprob) for each in ranked] == [(0, -1.0), (1, -4.0)]


class TestBeamSearch:
    def test_every_field_reaches_the_engine(self, client: TestClient, engine: FakeEngine) -> None:
        how = {
            "max_tokens": 5,
            "ignore_eos": True,
            "length_penalty": 0.5,
            "early_stopping": True,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
        }
        body = {"use_beam_search": True, "stop_token_ids": [7], "temperature": 0} | how
        reply = complete(client, n=2, best_of=3, **body)
        assert [choice["text"] for choice in reply["choices"]] == ["0: Hello!", "1: Hello!"]
        assert reply["usage"]["completion_tokens"] == 6
        chat(client, n=3, **body)
        for params in engine.searched:
            assert (params.beam_width, params.stop_token_ids) == (3, (7,))
            assert {name: getattr(params, name) for name in how} == how

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("stream", True),
            ("temperature", 0.7),
            ("stop", ["x"]),
            ("logprobs", 1),
            ("logit_bias", {"1": 2}),
            ("min_tokens", 1),
            ("top_p", 0.5),
            ("length_penalty", 50),
            ("n", 11),
            ("n", 0),
            ("guided_regex", "a+"),
            ("response_format", {"type": "json_object"}),
        ],
    )
    def test_what_does_not_go_with_it_is_named(
        self, client: TestClient, field: str, value: Any
    ) -> None:
        assert refused(client, COMPLETIONS, use_beam_search=True, **{field: value}) == field

    @pytest.mark.parametrize("fields", [{"length_penalty": 2}, {"early_stopping": True}])
    def test_what_needs_it_is_named(self, client: TestClient, fields: dict[str, Any]) -> None:
        assert [refused(client, CHAT, **fields)] == list(fields)
