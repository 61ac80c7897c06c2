"""What a request for a response may hold, what the engine gets of it, and what is refused."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from paged.http.api.responses.conversation import messages_of
from paged.http.api.responses.protocol import RESPONSES_NEUTRAL, InputItem
from tests.http.fakes import FakeEngine, answer_of, client_of

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=200)


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    return client_of(engine)


def ask(client: TestClient, **body: Any) -> dict[str, Any]:
    reply = client.post("/v1/responses", json={"input": "Hi"} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(client: TestClient, **body: Any) -> str:
    """The field that is blamed."""
    reply = client.post("/v1/responses", json={"input": "Hi"} | body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] is not None
    assert error["param"].rpartition(".")[2].partition("[")[0] in error["message"]
    return error["param"]


def text(*parts: str, type: str = "input_text") -> list[dict[str, str]]:
    return [{"type": type, "text": part} for part in parts]


def test_items_of_all_kinds(client: TestClient, engine: FakeEngine) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    ask(
        client,
        input=[
            {"role": "developer", "content": "Be kind."},
            {"type": "message", "role": "user", "content": text("a", "b")},
            {"type": "reasoning", "id": "rs_1", "summary": text("Hm.", type="summary_text")},
            call | {"id": "fc_1", "status": "completed"},
            {"type": "function_call_output", "call_id": "c1", "output": text("c")},
            {"role": "assistant", "content": text("d", type="output_text"), "id": "msg_1"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "user", "content": "e"},
        ],
    )
    [seen] = engine.seen
    turns = ["system:Be kind.", "user:a\nb", "assistant:", "tool:c", "assistant:d"]
    assert seen.text == "|".join([*turns, "assistant:no", "user:e", "assistant:"])


def test_what_is_said_in_one_turn_is_one_message() -> None:
    def said(content: str) -> InputItem:
        return InputItem(role="assistant", content=content)

    def called(name: str) -> InputItem:
        return InputItem(type="function_call", call_id=name, name=name, arguments="{}")

    thought = InputItem(type="reasoning", content=None, summary=None)
    hm = InputItem(type="reasoning", content=[], summary=None)
    assert messages_of([thought, hm]) == []
    turns = messages_of([said("a"), called("f"), called("g"), said("b")])
    [turn] = turns
    assert turn.content == "ab"
    assert turn.tool_calls is not None
    assert [call.function.name for call in turn.tool_calls] == ["f", "g"]
    assert [turn.content for turn in messages_of([said("a"), said("b")])] == ["a", "b"]


@pytest.mark.parametrize(
    ("input", "param"),
    [
        ([], "input"),
        ([{"role": "robot", "content": "a"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "odd"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].type"),
        ([{"type": "function_call", "call_id": "a", "name": "f"}], "input[0].arguments"),
        (
            [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}],
            "input[0].arguments",
        ),
        ([{"type": "function_call_output", "output": "a"}], "input[0].call_id"),
        ([{"role": "user", "content": 1}], "input[0].content"),
        (7, "input"),
    ],
)
def test_input_that_is_wrong(client: TestClient, input: Any, param: str) -> None:
    assert refused(client, input=input) == param


def test_input_is_counted_from_this_requests_first_item(client: TestClient) -> None:
    first = ask(client)
    bad = [{"role": "robot", "content": "a"}]
    assert refused(client, input=bad, previous_response_id=first["id"]) == "input[0].role"


def test_what_the_engine_gets(client: TestClient, engine: FakeEngine) -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 1.5},
        "seed": 3,
        "stop": ["x"],
        "min_tokens": 2,
        "ignore_eos": True,
    }
    other = {"priority": 5, "cache_salt": "s", "max_output_tokens": 9}
    ask(client, **sampling, **other)
    [seen] = engine.seen
    got = {name: getattr(seen.params, name) for name in sampling}
    assert got == sampling | {"logit_bias": {7: 1.5}}
    assert (seen.priority, seen.cache_salt, seen.params.max_tokens) == (5, "s", 9)


def test_the_template_is_told_of_tools_and_effort(client: TestClient, engine: FakeEngine) -> None:
    reasoning = {"effort": "low", "summary": "auto"}
    reply = ask(client, tools=[TOOL], reasoning=reasoning, chat_template_kwargs={"a": 1})
    assert engine.seen[0].text.startswith("tools=1|reasoning_effort=low|a=1|")
    assert (reply["tools"], reply["reasoning"]) == ([TOOL], reasoning)
    ask(client, tools=[])
    assert engine.seen[1].text.startswith("user:")


def test_forms_of_the_answer(client: TestClient, engine: FakeEngine) -> None:
    schema = {"type": "object"}
    formats: list[dict[str, Any]] = [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "name": "n", "schema": schema},
    ]
    for wanted in formats:
        assert ask(client, text={"format": wanted})["text"]["format"] == wanted
    free, *forms = [seen.params.structured_outputs for seen in engine.seen]
    assert free is None
    assert [answer_of(form) for form in forms] == [{"type": "object"}, schema]


def test_choices_of_tools(client: TestClient, engine: FakeEngine) -> None:
    engine.answer = '{"a": 1}'
    named = ask(client, tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    assert [item["type"] for item in named["output"]] == ["function_call"]
    engine.answer = '[{"name": "f", "parameters": {}}]'
    required = ask(client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    assert [item["type"] for item in required["output"]] == ["function_call"]
    assert not required["parallel_tool_calls"]
    assert [item["type"] for item in ask(client, tools=[TOOL], tool_choice="none")["output"]] == [
        "message"
    ]


@pytest.mark.parametrize("name", sorted(RESPONSES_NEUTRAL))
def test_what_is_not_carried_out_is_refused_unless_neutral(client: TestClient, name: str) -> None:
    for value in (None, *RESPONSES_NEUTRAL[name]):
        ask(client, **{name: value})
    assert refused(client, **{name: {"id": "x"}}) == name


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [TOOL | {"parameters": 1}]}, "tools[0].parameters"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"truncation": "some"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ""}, "stop"),
    ],
)
def test_values_that_are_refused(client: TestClient, body: dict[str, Any], param: str) -> None:
    assert refused(client, **body) == param


def test_values_that_ask_for_nothing(client: TestClient) -> None:
    ask(
        client,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto", "generate_summary": "auto", "context": "auto"},
        text={"verbosity": "medium"},
        stream_options={"include_obfuscation": False},
        max_tool_calls=3,
        service_tier="auto",
        unknown=1,
    )


def test_a_stored_response_is_not_streamed(client: TestClient) -> None:
    reply = client.get(f"/v1/responses/{ask(client)['id']}?stream=true")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream")


def test_truncation_drops_the_oldest_turns(client: TestClient, engine: FakeEngine) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    turns = [
        [{"role": "user", "content": "a" * 40}, call],
        [{"role": "user", "content": "b" * 40}, {"role": "assistant", "content": "B"}],
        [{"role": "user", "content": "c" * 40}],
    ]
    turns[0].append({"type": "function_call_output", "call_id": "c1", "output": "A" * 30})
    engine.max_model_len = 250
    body = {
        "input": [item for turn in turns for item in turn],
        "instructions": "Be kind.",
        "max_output_tokens": 20,
    }
    ask(client, **body, truncation="auto")
    ask(client, **body, truncation="disabled")
    ask(client, **body | {"max_output_tokens": 80}, truncation="auto")
    kept = [seen.text for seen in engine.seen]
    assert kept[0] == kept[1]
    end = f"user:{'c' * 40}|assistant:"
    assert kept[2] == f"system:Be kind.|user:{'b' * 40}|assistant:B|{end}"
    engine.max_model_len = 100
    ask(client, **body, truncation="auto")
    assert engine.seen[3].text == f"system:Be kind.|{end}"
