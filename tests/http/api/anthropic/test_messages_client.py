"""Anthropic's official client reads messages as its own types, whole and streamed."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import Message, ToolParam
from pydantic import BaseModel

from paged.http.api.answers import AnswerFormat
from paged.http.app import create_app
from tests.http.fakes import FakeEngine, answer_of, serving

TOOL: ToolParam = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
QUESTION: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=2000)


@pytest.fixture
def sdk(engine: FakeEngine) -> Iterator[Anthropic]:
    answers = AnswerFormat("hermes", "qwen3", auto=True)
    app = create_app(engine, ["tiny"], answers=answers, api_keys=["the-key"])
    with serving(app) as url, Anthropic(base_url=url, api_key="the-key", max_retries=0) as sdk:
        yield sdk


def check(reply: BaseModel) -> None:
    """The client builds its types without validating them: do it here."""
    type(reply).model_validate(reply.model_dump(exclude_unset=True), strict=True)


def ask(sdk: Anthropic, messages: Any = QUESTION, **options: Any) -> Message:
    create: Any = sdk.messages.create
    reply: Message = create(**{"model": "tiny", "max_tokens": 1000, "messages": messages} | options)
    check(reply)
    return reply


def test_a_message(sdk: Anthropic) -> None:
    reply = ask(sdk, system="Be kind.")
    [block] = reply.content
    assert block.type == "text"
    assert block.text == "Hello!"
    assert (reply.role, reply.model, reply.stop_reason) == ("assistant", "tiny", "end_turn")
    assert reply.id.startswith("msg_")
    prompt = len("system:Be kind.|user:Hi|assistant:")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (prompt - 1, 6)
    assert reply.usage.cache_read_input_tokens == 1


def test_a_tool_round_trip(sdk: Anthropic, engine: FakeEngine) -> None:
    engine.answer = f"<think>Hm.</think>Let me see.{CALL}"
    first = ask(sdk, tools=[TOOL])
    thought, text, call = first.content
    assert thought.type == "thinking"
    assert thought.thinking == "Hm."
    assert text.type == "text"
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("weather", {"city": "Oslo"})
    assert first.stop_reason == "tool_use"
    engine.answer = "Take an umbrella."
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    said = {"role": "assistant", "content": first.content}
    second = ask(sdk, [*QUESTION, said, {"role": "user", "content": [result]}], tools=[TOOL])
    assert second.stop_reason == "end_turn"
    expected = "tools=1|user:Hi|assistant:Let me see.|tool:rain|assistant:"
    assert engine.seen[1].text == expected


def test_the_clients_own_accumulator(sdk: Anthropic, engine: FakeEngine) -> None:
    engine.answer = f"<think>Hm.</think>Let me see.{CALL}"
    whole = ask(sdk, tools=[TOOL])
    with sdk.messages.stream(
        model="tiny", max_tokens=1000, messages=QUESTION, tools=[TOOL]
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens
    call = final.content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": "Oslo"}


def test_events(sdk: Anthropic, engine: FakeEngine) -> None:
    engine.answer = f"<think>Hm.</think>Let me see.{CALL}"
    events = list(
        sdk.messages.create(
            model="tiny", max_tokens=1000, messages=QUESTION, tools=[TOOL], stream=True
        )
    )
    for event in events:
        check(event)
    assert events[-1].type == "message_stop"


def test_parsed_answers(sdk: Anthropic, engine: FakeEngine) -> None:
    class Weather(BaseModel):
        city: str

    engine.answer = '{"city": "Oslo"}'
    reply = sdk.messages.parse(
        model="tiny", max_tokens=100, messages=QUESTION, output_format=Weather
    )
    assert reply.parsed_output == Weather(city="Oslo")
    [seen] = engine.seen
    assert answer_of(seen.params.structured_outputs)["required"] == ["city"]


def test_count_tokens(sdk: Anthropic) -> None:
    body: Any = {"model": "tiny", "messages": QUESTION, "system": "Be kind.", "tools": [TOOL]}
    count = sdk.messages.count_tokens(**body)
    check(count)
    usage = ask(sdk, system="Be kind.", tools=[TOOL]).usage
    assert usage.cache_read_input_tokens is not None
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors(sdk: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature must be") as caught:
        ask(sdk, extra_body={"temperature": -1})
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        ask(sdk, model="other")
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError, match="API key"):
        ask(sdk.with_options(api_key="another-key"))


def test_an_error_in_a_stream(sdk: Anthropic, engine: FakeEngine) -> None:
    engine.fails_after = 2
    with pytest.raises(anthropic.APIStatusError, match="engine has stopped") as caught:
        list(sdk.messages.create(model="tiny", max_tokens=9, messages=QUESTION, stream=True))
    assert caught.value.type == "api_error"
