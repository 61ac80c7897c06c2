"""Tools and reasoning over a real socket, read by the official client."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionToolParam
from starlette.testclient import TestClient

from paged.http.api.answers import AnswerFormat
from paged.http.app import create_app
from tests.http.fakes import FakeEngine, FakeTokenizer, answer_of, events, serving

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
CHAT = "/v1/chat/completions"

Connect = Callable[[AnswerFormat], OpenAI]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=2000)


@pytest.fixture
def connect(engine: FakeEngine) -> Iterator[Connect]:
    """A client of a server that reads answers in some format."""
    with ExitStack() as stack:

        def connected(answers: AnswerFormat) -> OpenAI:
            url = stack.enter_context(serving(create_app(engine, ["tiny"], answers=answers)))
            return stack.enter_context(OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0))

        yield connected


@pytest.fixture
def sdk(connect: Connect) -> OpenAI:
    return connect(AnswerFormat("hermes", "qwen3", auto=True))


def ask(sdk: OpenAI, **options: Any) -> ChatCompletion:
    options = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL]} | options
    reply: ChatCompletion = sdk.chat.completions.create(**options)
    ChatCompletion.model_validate(reply.model_dump(exclude_unset=True), strict=True)
    return reply


def stream(sdk: OpenAI, **options: Any) -> list[ChatCompletionChunk]:
    options = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "stream": True} | options
    chunks = list(sdk.chat.completions.create(**options))
    for chunk in chunks:
        type(chunk).model_validate(chunk.model_dump(exclude_unset=True), strict=True)
    return chunks


def accumulated(sdk: OpenAI, **options: Any) -> Any:
    """The whole answer, as the client's own accumulator makes it of the chunks."""
    options = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL]} | options
    with sdk.chat.completions.stream(**options) as chunks:
        for _ in chunks:
            pass
        return chunks.get_final_completion().choices[0]


def test_a_call(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = "<think>\nHm.\n</think>\n\nLet me see.\n" + CALL
    choice = ask(sdk).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("chatcmpl-tool-")
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    extra = choice.message.model_extra or {}
    assert extra["reasoning"] == extra["reasoning_content"] == "Hm."


def test_content_is_null_beside_calls_alone(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = CALL + "\n" + CALL
    message = ask(sdk).choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    assert len({call.id for call in message.tool_calls}) == 2


def test_a_streamed_call(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = "<think>Hm.</think>See.\n" + CALL + CALL
    chunks = stream(sdk)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "See."
    assert "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas) == "Hm."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    for index in (0, 1):
        first, *rest = [call for call in calls if call.index == index]
        assert first.function is not None
        assert (first.type, first.function.name, first.function.arguments) == (
            "function",
            "weather",
            "",
        )
        assert first.id
        pieces = [piece.function.arguments or "" for piece in rest if piece.function]
        assert "".join(pieces) == '{"city": "Oslo"}'
        assert not [piece for piece in rest if piece.id or piece.type]
    assert [
        chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason
    ] == ["tool_calls"]


def test_the_clients_accumulator_agrees_with_the_whole_reply(
    sdk: OpenAI, engine: FakeEngine
) -> None:
    for engine.answer in ("Hello!", CALL, f"Well.{CALL}{CALL}", "<tool_call>no</tool_call>"):
        whole, streamed = ask(sdk).choices[0], accumulated(sdk)
        assert (streamed.finish_reason, streamed.message.content or "") == (
            whole.finish_reason,
            whole.message.content or "",
        )
        ours, theirs = whole.message.tool_calls or [], streamed.message.tool_calls or []
        assert [call.function.arguments for call in ours] == [  # type: ignore[union-attr]
            call.function.arguments for call in theirs
        ]


def test_what_is_malformed_is_content(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = '<tool_call>{"name": "weather", "arguments": {"city": </tool_call>'
    choice = ask(sdk).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", engine.answer)
    assert choice.message.tool_calls == []


def test_an_answer_that_is_cut_says_so(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = CALL + CALL
    choice = ask(sdk, max_tokens=len(CALL) + 10).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    assert len(choice.message.tool_calls) == 1


def test_one_call_alone_if_no_more_are_wanted(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = CALL + CALL
    message = ask(sdk, parallel_tool_calls=False).choices[0].message
    assert message.tool_calls is not None
    assert len(message.tool_calls) == 1
    assert len(accumulated(sdk, parallel_tool_calls=False).message.tool_calls) == 1


def test_every_sequence_is_read_by_itself(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = CALL
    assert [choice.finish_reason for choice in ask(sdk, n=2).choices] == ["tool_calls"] * 2
    ends = [chunk.choices[0].finish_reason for chunk in stream(sdk, n=2)]
    assert ends.count("tool_calls") == 2


@pytest.mark.parametrize("options", [{"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}])
def test_calls_are_read_only_where_they_may_be(
    sdk: OpenAI, engine: FakeEngine, options: dict[str, Any]
) -> None:
    engine.answer = CALL
    choice = ask(sdk, **options).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", CALL)


def test_tokens_of_a_stream_are_all_told(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = "<think>Hm.</think>See.\n" + CALL
    chunks = stream(sdk, logprobs=True, extra_body={"return_token_ids": True})
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    tokens = [entry.token for each in logprobs if each for entry in each.content or []]
    ids = [(chunk.choices[0].model_extra or {}).get("token_ids", []) for chunk in chunks]
    assert "".join(tokens) == engine.answer
    assert [token for each in ids for token in each] == list(engine.answer.encode())


def test_the_template_is_told_of_tools_and_thinking(sdk: OpenAI, engine: FakeEngine) -> None:
    ask(
        sdk,
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    expected = "tools=1|reasoning_effort=low|enable_thinking=False|user:Hi|assistant:"
    assert engine.seen[0].text == expected


def test_tools_can_be_kept_from_the_model(connect: Connect, engine: FakeEngine) -> None:
    sdk = connect(AnswerFormat("hermes", auto=True, hides_tools=True))
    ask(sdk, tool_choice="none")
    ask(sdk)
    assert [seen.text for seen in engine.seen] == [
        "user:Hi|assistant:",
        "tools=1|user:Hi|assistant:",
    ]


def test_reasoning_that_the_template_opens_or_closes(connect: Connect, engine: FakeEngine) -> None:
    sdk = connect(AnswerFormat(reasoning_parser="qwen3"))
    engine.answer = "Hm.</think>Yes."
    for said, reasoning, content in (
        ("<think>", "Hm.", "Yes."),
        ("<think></think>", None, "Hm.</think>Yes."),
        ("<think>I wonder whether. ", "Hm.", "Yes."),
        ("<think></think>No, ", None, "Hm.</think>Yes."),
    ):
        messages = [*MESSAGES, {"role": "assistant", "content": said}]
        options = {"continue_final_message": True, "add_generation_prompt": False}
        message = ask(sdk, messages=messages, tools=openai.NOT_GIVEN, extra_body=options)
        told = message.choices[0].message
        assert (told.model_extra or {}).get("reasoning") == reasoning
        assert told.content == content


def test_reasoning_alone_leaves_no_content(connect: Connect, engine: FakeEngine) -> None:
    sdk = connect(AnswerFormat(reasoning_parser="deepseek_r1"))
    engine.answer = "Hm."
    message = ask(sdk, tools=openai.NOT_GIVEN).choices[0].message
    assert (message.content, (message.model_extra or {})["reasoning"]) == (None, "Hm.")


def test_reasoning_can_be_left_out(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = "<think>Hm.</think>Yes."
    message = ask(sdk, extra_body={"include_reasoning": False}).choices[0].message
    assert (message.content, message.model_extra) == ("Yes.", {})


def test_gpt_oss(connect: Connect, engine: FakeEngine) -> None:
    for reasoning_parser in ("openai_gptoss", None):
        sdk = connect(AnswerFormat("openai", reasoning_parser, auto=True))
        engine.answer = (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
        )
        choice = ask(sdk).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.model_extra or {})["reasoning_content"] == "Hm."
        assert accumulated(sdk).message.tool_calls[0].function.arguments == '{"city": "Oslo"}'


def test_mistrals_ids_have_the_form_that_its_templates_take(
    connect: Connect, engine: FakeEngine
) -> None:
    engine.answer = '[TOOL_CALLS]weather{"city": "Oslo"}'
    message = ask(connect(AnswerFormat("mistral", auto=True))).choices[0].message
    assert message.tool_calls is not None
    assert len(message.tool_calls[0].id) == 9
    assert message.tool_calls[0].id.isalnum()


class HidingTokenizer(FakeTokenizer):
    """One whose special tokens are left out of text, as those of real ones are."""

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        text = super().decode(ids, skip_special_tokens)
        return text.replace("[TOOL_CALLS]", "") if skip_special_tokens else text


def test_marks_that_are_special_tokens_are_made_visible(
    connect: Connect, engine: FakeEngine
) -> None:
    engine.tokenizer = HidingTokenizer()
    sdk = connect(AnswerFormat("mistral", auto=True))
    ask(sdk)
    ask(sdk, tool_choice="none")
    assert [seen.params.skip_special_tokens for seen in engine.seen] == [False, True]


def test_a_conversation_with_calls_goes_round(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = "<think>Hm.</think>" + CALL
    message = ask(sdk).choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    engine.answer = "It rains."
    reply = ask(sdk, messages=[*MESSAGES, message.model_dump(exclude_unset=True), result])
    assert reply.choices[0].message.content == "It rains."
    assert engine.seen[1].text == "tools=1|user:Hi|assistant:|tool:rain|assistant:"


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def test_a_named_function_is_forced(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = '{"city": "Oslo"}'
    choice = ask(sdk, tool_choice=NAMED).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", engine.answer)
    assert accumulated(sdk, tool_choice=NAMED).message.tool_calls[0].function.name == "weather"
    forms = [seen.params.structured_outputs for seen in engine.seen]
    assert [answer_of(form) for form in forms] == [TOOL["function"]["parameters"]] * 2


def test_some_call_is_forced(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = '[{"name": "weather", "parameters": {"city": "Oslo"}}]'
    choice = ask(sdk, tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert len(choice.message.tool_calls) == 1
    assert answer_of(engine.seen[0].params.structured_outputs)["type"] == "array"


def test_no_other_form_goes_with_a_forced_call(sdk: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="drop one") as caught:
        ask(sdk, tool_choice="required", response_format={"type": "json_object"})
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_reasoning_comes_before_a_forced_call(sdk: OpenAI, engine: FakeEngine, choice: Any) -> None:
    arguments = '{"city": "Oslo"}'
    call = f'[{{"name": "weather", "parameters": {arguments}}}]'
    engine.answer = f"<think>Hm.</think>\n\n{call if choice == 'required' else arguments}"
    message = ask(sdk, tool_choice=choice).choices[0].message
    assert message.tool_calls is not None
    [made] = message.tool_calls
    assert made.type == "function"
    assert made.function.arguments == arguments
    assert (message.model_extra or {})["reasoning"] == "Hm."
    streamed = accumulated(sdk, tool_choice=choice).message
    assert streamed.tool_calls[0].function.arguments == arguments


def test_structured_output_is_content(connect: Connect, engine: FakeEngine) -> None:
    sdk = connect(AnswerFormat("llama3_json", "deepseek_r1", auto=True))
    wanted = '{"name": "weather", "parameters": {}}'
    engine.answer = f"Hm.</think>{wanted}"
    message = ask(sdk, response_format={"type": "json_object"}).choices[0].message
    assert (message.content, message.tool_calls) == (wanted, [])
    assert (message.model_extra or {})["reasoning"] == "Hm."


def test_calls_are_read_beside_a_structural_tag(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = f"Well. {CALL}"
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    message = ask(sdk, extra_body={"response_format": tag}).choices[0].message
    assert (message.content, len(message.tool_calls or ())) == ("Well.", 1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_tools_that_are_refused(sdk: OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(sdk, **body)
    assert caught.value.param == param


def test_a_server_without_a_parser_says_what_it_lacks(
    client: TestClient, engine: FakeEngine
) -> None:
    reply = client.post(CHAT, json={"messages": MESSAGES, "tools": [TOOL]})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "tool_choice")
    assert "--enable-auto-tool-choice and --tool-call-parser" in error["message"]


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_arguments_in_the_history_may_be_missing(
    client: TestClient, engine: FakeEngine, arguments: Any
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    assert client.post(CHAT, json={"messages": messages}).status_code == 200


class RememberingTokenizer(FakeTokenizer):
    """One that remembers what its template was given."""

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        self.messages = messages
        return super().apply_chat_template(messages, **options)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_templates_find_what_the_assistant_thought(
    client: TestClient, engine: FakeEngine, name: str
) -> None:
    engine.tokenizer = tokenizer = RememberingTokenizer()
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "1", "type": "function", "function": function}
    thinking = {"role": "assistant", "content": None, name: "Hm", "tool_calls": [call]}
    saying = thinking | {"content": "Well"}
    messages = [*MESSAGES, thinking, saying]
    assert client.post(CHAT, json={"messages": messages}).status_code == 200
    _, thought, said = tokenizer.messages
    assert thought["reasoning_content"] == thought["reasoning"] == thought["thinking"] == "Hm"
    # gpt-oss's template refuses both beside a call.
    assert "thinking" not in said
    assert said["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_chunks_have_a_finish_reason_always(engine: FakeEngine) -> None:
    engine.answer = CALL
    app = create_app(engine, ["tiny"], answers=AnswerFormat("hermes", auto=True))
    with TestClient(app) as client:
        body = {"messages": MESSAGES, "tools": [TOOL], "stream": True}
        chunks = events(client.post(CHAT, json=body).text)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [*[None] * (len(chunks) - 1), "tool_calls"]
