"""Servers that clients talk to."""

from collections.abc import Iterator

import pytest

from paged.http.api.answers import AnswerFormat
from paged.http.app import create_app
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.sampling_params import SamplingParams
from tests.http.fakes import FakeEngine, serving
from tests.runtime.pooling.pooling_fakes import pooling_engine

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


class TalkingEngine(FakeEngine):
    """Answers as the conversation seems to want it."""

    def _answer(self, prompt: list[int], params: SamplingParams) -> list[tuple[int, str]]:
        assert self.tokenizer is not None
        asked = self.tokenizer.decode(prompt)
        self.pause = 0.05 if "slowly" in asked else 0.0
        self.answer = _answer_to(asked, structured=params.structured_outputs is not None)
        return super()._answer(prompt, params)


def _answer_to(asked: str, *, structured: bool) -> str:
    if "slowly" in asked:
        return "x" * 200
    if "|tool:" in asked:
        return "It is cold."
    if structured:
        return '{"name": "Ada", "age": 36}'
    return CALL if asked.startswith("tools=") else "Hello!"


@pytest.fixture
def text_url() -> Iterator[str]:
    """A server whose model calls tools."""
    engine, answers = TalkingEngine(max_model_len=4000), AnswerFormat("hermes", auto=True)
    with serving(create_app(engine, ["tiny"], answers=answers, tells_tokenizer=True)) as url:
        yield url


@pytest.fixture
def vectors_url() -> Iterator[str]:
    """A server whose model gives vectors."""
    engine = pooling_engine()
    try:
        with serving(create_app(engine, ["tiny"])) as url:
            yield url
    finally:
        engine.shutdown()


@pytest.fixture(scope="session")
def demo_url() -> Iterator[str]:
    """A server of the demo model, with few shapes to compile."""
    engine = AsyncEngine(
        max_model_len=256,
        kv_cache_memory_bytes=64 * 2**20,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        compile_cache_dir="",
    )
    try:
        with serving(create_app(engine, ["demo"], tells_tokenizer=True)) as url:
            yield url
    finally:
        engine.shutdown()
