"""The official client, over a real socket, reads every reply as its own types."""

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from pydantic import BaseModel

from tests.http.fakes import FakeEngine

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
