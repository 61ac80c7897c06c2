"""The official client, over a real socket, reads every reply as its own types."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from pydantic import BaseModel

from paged.http.api.answers import AnswerFormat
from paged.http.app import create_app
from tests.http.fakes import FakeEngine, serving
from tests.runtime.remote import wait_until

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def sdk(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as sdk:
        yield sdk


def check(reply: BaseModel) -> None:
    """The client builds its types without validating them: do it here."""
    type(reply).model_validate(reply.model_dump(exclude_unset=True), strict=True)


def test_chat(sdk: OpenAI) -> None:
    reply = sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, n=2
    )
    assert isinstance(reply, ChatCompletion)
    check(reply)
    assert reply.choices[1].message.content == "Hello!"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 12


def test_chat_stream(sdk: OpenAI) -> None:
    chunks: list[ChatCompletionChunk] = list(
        sdk.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
    )
    for chunk in chunks:
        check(chunk)
    text = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(part or "" for part in text) == "Hello!"
    assert chunks[-1].usage is not None


def test_the_clients_own_accumulator(sdk: OpenAI) -> None:
    with sdk.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello!"


def test_completions(sdk: OpenAI) -> None:
    check(sdk.completions.create(model="tiny", prompt="a", logprobs=2))
    reply = sdk.completions.create(model="tiny", prompt=["a", "b"], echo=True, logprobs=2)
    assert isinstance(reply, Completion)
    assert [choice.text for choice in reply.choices] == ["aHello!", "bHello!"]
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.tokens == ["\x00", "a", *"Hello!"]
    stream = sdk.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello!"


def test_models(sdk: OpenAI) -> None:
    models: list[Model] = list(sdk.models.list())
    for model in models:
        check(model)
    assert sdk.models.retrieve("other-name").id == models[1].id


def test_errors(sdk: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be") as caught:
        sdk.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        sdk.chat.completions.create(model="gpt-5", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="audio is not supported"):
        sdk.chat.completions.create(
            model="tiny", messages=MESSAGES, audio={"format": "wav", "voice": "alloy"}
        )


def test_an_error_in_a_stream(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.fails_after = 2
    with pytest.raises(openai.APIError, match="engine has stopped"):
        list(sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))


def test_a_reply_and_its_headers(sdk: OpenAI) -> None:
    headers = {"X-Request-Id": "mine-1"}
    raw = sdk.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, extra_headers=headers
    )
    assert (raw.status_code, raw.headers["x-request-id"]) == (200, "mine-1")
    reply = raw.parse()
    assert reply.id.endswith("-mine-1")
    assert reply._request_id == "mine-1"
    with sdk.chat.completions.with_streaming_response.create(
        model="tiny", messages=MESSAGES, stream=True
    ) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert [*streamed.iter_lines()][-2] == "data: [DONE]"


class Person(BaseModel):
    name: str
    age: int


def test_answers_as_models(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = '{"name": "Ada", "age": 36}'
    reply = sdk.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Person)
    assert reply.choices[0].message.parsed == Person(name="Ada", age=36)
    with sdk.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Person
    ) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == Person(name="Ada", age=36)
    assert {"chunk", "content.delta", "content.done"} <= kinds
    wanted = engine.seen[-1].params.structured_outputs
    assert wanted is not None
    assert wanted.json == Person.model_json_schema() | {"additionalProperties": False}


def test_an_answer_that_was_cut_is_no_model(sdk: OpenAI, engine: FakeEngine) -> None:
    engine.answer = '{"name": "Ada", "age": 36}'
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Person, max_tokens=4
        )


def test_log_probabilities_as_they_are_streamed(sdk: OpenAI) -> None:
    with sdk.chat.completions.stream(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
    ) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "logprobs.content.delta"]
    assert [entry.token for entry in snapshots[-1]] == [*"Hello!"]


def asynchronously(url: str, work: Callable[[AsyncOpenAI], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as sdk:
            await work(sdk)

    asyncio.run(run())


def test_many_at_once(url: str) -> None:
    async def work(sdk: AsyncOpenAI) -> None:
        replies = await asyncio.gather(
            *(sdk.chat.completions.create(model="tiny", messages=MESSAGES) for _ in range(20))
        )
        assert {reply.choices[0].message.content for reply in replies} == {"Hello!"}
        assert len({reply.id for reply in replies}) == 20
        streams = [
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            for _ in range(5)
        ]
        texts = [[chunk.choices[0].delta.content async for chunk in each] for each in streams]
        assert {"".join(part or "" for part in text) for text in texts} == {"Hello!"}
        async with sdk.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "Hello!"

    asynchronously(url, work)


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_stream_that_is_left_is_aborted(url: str, engine: FakeEngine, how: str) -> None:
    engine.answer, engine.pause = "x" * 50, 0.2

    async def read(sdk: AsyncOpenAI, begun: asyncio.Event) -> None:
        stream = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        async for _ in stream:
            begun.set()
            if how == "close":
                await stream.close()
                break

    async def work(sdk: AsyncOpenAI) -> None:
        begun = asyncio.Event()
        reading = asyncio.create_task(read(sdk, begun))
        await begun.wait()
        if how == "cancel":
            reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await asyncio.to_thread(wait_until, lambda: not engine.running)

    asynchronously(url, work)
    assert len(engine.aborted) == 1


def test_time_limits_of_the_client(url: str, engine: FakeEngine) -> None:
    """It gives up, tries again, and leaves nothing running behind."""
    engine.pause = 10
    with (
        OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=1, timeout=1) as sdk,
        pytest.raises(openai.APITimeoutError),
    ):
        sdk.chat.completions.create(model="tiny", messages=MESSAGES)
    wait_until(lambda: len(engine.aborted) == 2 and not engine.running)


def test_every_kind_of_error(engine: FakeEngine) -> None:
    app = create_app(engine, ["tiny"], api_keys=["right"], max_body_size=1000)
    with serving(app) as url, OpenAI(base_url=f"{url}/v1", api_key="right", max_retries=0) as sdk:
        with pytest.raises(openai.AuthenticationError, match="API key") as caught:
            sdk.with_options(api_key="wrong").models.list()
        assert caught.value.request_id
        assert (caught.value.status_code, caught.value.type) == (401, "AuthenticationError")
        with pytest.raises(openai.NotFoundError):
            sdk.models.retrieve("nothing")
        with pytest.raises(openai.NotFoundError):
            sdk.images.generate(prompt="a cat")
        with pytest.raises(openai.BadRequestError, match="--runner pooling"):
            sdk.embeddings.create(model="tiny", input="a")
        with pytest.raises(openai.APIStatusError) as too_large:
            sdk.completions.create(model="tiny", prompt="a" * 2000)
        assert too_large.value.status_code == 413
        engine.errored = True
        with pytest.raises(openai.InternalServerError, match="engine has stopped"):
            sdk.completions.create(model="tiny", prompt="a")


def test_it_tries_again_where_that_may_help(url: str, engine: FakeEngine) -> None:
    engine.errored = True
    with OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=2) as sdk:
        with pytest.raises(openai.InternalServerError):
            sdk.completions.create(model="tiny", prompt="a")
        assert len(engine.seen) == 3
        with pytest.raises(openai.BadRequestError):
            sdk.completions.create(model="tiny", prompt="a", temperature=-1)
        assert len(engine.seen) == 3


class Weather(BaseModel):
    """The weather in a city."""

    city: str


def test_a_call_there_and_back(engine: FakeEngine) -> None:
    """The tool is a model of the client's, which reads the call as such."""
    engine.max_model_len = 2000
    engine.answer = '<tool_call>{"name": "Weather", "arguments": {"city": "Oslo"}}</tool_call>'
    app = create_app(engine, ["tiny"], answers=AnswerFormat("hermes", auto=True))
    tools = [openai.pydantic_function_tool(Weather)]
    with serving(app) as url, OpenAI(base_url=f"{url}/v1", api_key="any") as sdk:
        reply = sdk.chat.completions.parse(model="tiny", messages=MESSAGES, tools=tools)
        with sdk.chat.completions.stream(model="tiny", messages=MESSAGES, tools=tools) as stream:
            streamed = stream.get_final_completion()
        for each in (reply, streamed):
            assert each.choices[0].finish_reason == "tool_calls"
            assert each.choices[0].message.tool_calls is not None
            [call] = each.choices[0].message.tool_calls
            assert call.function.parsed_arguments == Weather(city="Oslo")
        said: Any = reply.choices[0].message.model_dump(exclude_unset=True, exclude={"parsed"})
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "cold"}
        engine.answer = "It is cold."
        last = sdk.chat.completions.create(
            model="tiny", messages=[*MESSAGES, said, result], tools=tools
        )
    assert last.choices[0].message.content == "It is cold."
