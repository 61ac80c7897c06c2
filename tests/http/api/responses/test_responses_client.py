"""The official client reads responses as its own types, whole and streamed."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import FunctionToolParam, Response
from pydantic import BaseModel

from paged.http.api.answers import AnswerFormat
from paged.http.app import create_app
from tests.http.fakes import FakeEngine, answer_of, serving
from tests.runtime.remote import wait_until

TOOL: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=2000)


@pytest.fixture
def sdk(engine: FakeEngine) -> Iterator[OpenAI]:
    answers = AnswerFormat("hermes", "qwen3", auto=True)
    with (
        serving(create_app(engine, ["tiny"], answers=answers)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as sdk,
    ):
        yield sdk


def check(reply: BaseModel) -> None:
    """The client builds its types without validating them: do it here."""
    type(reply).model_validate(reply.model_dump(exclude_unset=True), strict=True)


def ask(sdk: OpenAI, input: Any = "Hi", **options: Any) -> Response:
    reply: Response = sdk.responses.create(model="tiny", input=input, **options)
    check(reply)
    return reply


def test_a_response(sdk: OpenAI) -> None:
    reply = ask(sdk, instructions="Be kind.", metadata={"a": "b"}, user="me", temperature=0.5)
    assert reply.output_text == "Hello!"
    assert reply.status == "completed"
    assert reply.id.startswith("resp_")
    assert (reply.instructions, reply.metadata, reply.user) == ("Be kind.", {"a": "b"}, "me")
    assert reply.temperature == 0.5
    assert reply.usage is not None
    assert reply.usage.input_tokens_details.cached_tokens == 1
    assert reply.usage.output_tokens == 6
    assert reply.usage.total_tokens == reply.usage.input_tokens + 6


def test_reasoning_text_and_a_call(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"
    reply = ask(sdk, tools=[TOOL])
    thought, message, call = reply.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "Hm."
    assert message.type == "message"
    assert reply.output_text == "Let me see."
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"city": "Oslo"}')
    assert reply.usage is not None
    assert reply.usage.output_tokens_details.reasoning_tokens == len("Hm.")


def test_a_tool_round_trip(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = f"<think>Hm.</think>{CALL}"
    conversation: list[Any] = [{"role": "user", "content": "Weather?"}]
    first = ask(sdk, conversation, tools=[TOOL])
    conversation += first.output
    call = first.output[-1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    engine.answer = "Take an umbrella."
    by_hand = ask(sdk, [*conversation, result], tools=[TOOL])
    by_id = ask(sdk, [result], tools=[TOOL], previous_response_id=first.id)
    assert by_hand.output_text == by_id.output_text == "Take an umbrella."
    prompts = [seen.text for seen in engine.seen[1:]]
    assert prompts == ["tools=1|user:Weather?|assistant:|tool:rain|assistant:"] * 2


def test_parsed_answers(sdk: OpenAI, engine: FakeEngine) -> None:
    class Weather(BaseModel):
        city: str
        degrees: int

    engine.answer = '{"city": "Oslo", "degrees": 3}'
    reply = sdk.responses.parse(model="tiny", input="Hi", text_format=Weather)
    assert reply.output_parsed == Weather(city="Oslo", degrees=3)
    [seen] = engine.seen
    assert answer_of(seen.params.structured_outputs)["required"] == ["city", "degrees"]


def test_the_clients_own_accumulator(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = f"<think>Hm.</think>Let me see.{CALL}"
    with sdk.responses.stream(model="tiny", input="Hi", tools=[TOOL]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Let me see."
    stored = sdk.responses.retrieve(final.id)
    assert stored.output_text == final.output_text


def test_events(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = f"<think>Hm.</think>Let me see.{CALL}"
    events = list(sdk.responses.create(model="tiny", input="Hi", tools=[TOOL], stream=True))
    for event in events:
        check(event)
    assert events[-1].type == "response.completed"


def test_log_probabilities(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = "<think>Hi, Hi</think>Hi!"
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    message = ask(sdk, **options).output[-1]
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [entry.token for entry in part.logprobs] == ["H", "i", "!"]
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2, 2]
    tokens: list[str] = []
    for event in sdk.responses.create(model="tiny", input="Hi", stream=True, **options):
        if event.type == "response.output_text.delta":
            tokens += [entry.token for entry in event.logprobs]
    assert tokens == ["H", "i", "!"]
    assert ask(sdk, include=["message.output_text.logprobs"]).output_text == "Hi!"


def test_stored_responses(sdk: OpenAI) -> None:
    first = ask(sdk, "Who?")
    again = sdk.responses.retrieve(first.id)
    check(again)
    assert again == first
    second = ask(sdk, "And?", previous_response_id=first.id, instructions="Be kind.")
    assert second.previous_response_id == first.id
    sdk.responses.delete(first.id)
    for response_id in (first.id, ask(sdk, store=False).id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            sdk.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError, match="There is no response") as caught:
            ask(sdk, previous_response_id=response_id)
        assert caught.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            sdk.responses.delete(response_id)
    assert ask(sdk, "So?", previous_response_id=second.id).status == "completed"


def test_instructions_are_not_inherited(sdk: OpenAI, engine: FakeEngine) -> None:
    first = ask(sdk, "Who?", instructions="Be kind.")
    ask(sdk, "And?", previous_response_id=first.id)
    assert [seen.text for seen in engine.seen] == [
        "system:Be kind.|user:Who?|assistant:",
        "user:Who?|assistant:Hello!|user:And?|assistant:",
    ]


def test_instructions_are_one_message_with_the_systems(sdk: OpenAI, engine: FakeEngine) -> None:
    said = [{"role": role, "content": role[0]} for role in ("developer", "system", "user")]
    ask(sdk, said, instructions="Be kind.")
    assert engine.seen[0].text == "system:Be kind.\n\nd\n\ns|user:u|assistant:"


def test_in_the_background(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.pause = 1
    reply = ask(sdk, background=True)
    assert (reply.status, reply.background, reply.output) == ("in_progress", True, [])
    with pytest.raises(openai.BadRequestError, match="is in_progress"):
        ask(sdk, previous_response_id=reply.id)
    engine.pause = 0
    while reply.status == "in_progress":
        reply = sdk.responses.retrieve(reply.id)
    check(reply)
    assert (reply.status, reply.output_text) == ("completed", "Hello!")
    assert sdk.responses.cancel(reply.id) == reply


def test_what_runs_in_the_background_can_be_cancelled(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.pause = 0.05
    engine.answer = "a" * 1000
    first, second = ask(sdk, background=True), ask(sdk, background=True)
    assert sdk.responses.cancel(first.id).status == "cancelled"
    assert sdk.responses.retrieve(first.id).status == "cancelled"
    sdk.responses.delete(second.id)
    wait_until(lambda: len(engine.aborted) == 2 and not engine.running)


def test_a_failure_in_the_background_is_told(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.fails_after = 2
    reply = ask(sdk, background=True)
    while reply.status == "in_progress":
        reply = sdk.responses.retrieve(reply.id)
    check(reply)
    assert reply.status == "failed"
    assert reply.error is not None
    assert (reply.error.code, reply.error.message[:22]) == (
        "server_error",
        "The engine has stopped",
    )


def test_a_prompt_that_is_too_long_for_the_background(sdk: OpenAI) -> None:
    reply = ask(sdk, "x" * 3000, background=True)
    while reply.status == "in_progress":
        reply = sdk.responses.retrieve(reply.id)
    assert reply.error is not None
    assert reply.error.code == "invalid_prompt"


def test_only_what_runs_in_the_background_can_be_cancelled(sdk: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="background true"):
        sdk.responses.cancel(ask(sdk).id)


def test_an_answer_that_is_cut_is_incomplete(sdk: OpenAI) -> None:
    reply = ask(sdk, max_output_tokens=3)
    assert (reply.status, reply.output_text) == ("incomplete", "Hel")
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.max_output_tokens == 3
