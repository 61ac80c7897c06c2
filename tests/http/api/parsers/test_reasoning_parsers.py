"""Reasoning and what follows it, for every kind of marks and every way of starting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.http.api.parsers.events import Event
from paged.http.api.parsers.reasoning import ThinkParser
from paged.http.api.parsers.registry import THINKINGS
from tests.http.api.parsers.answers import content_of, read, reasoning_of

OPENED, CLOSED, PLAIN = "<think>\n", "<think>\n\n</think>\n\n", "assistant\n"


def events_of(name: str, prompt_end: str, *pieces: str) -> list[Event]:
    thinking = THINKINGS[name]
    return read(ThinkParser(thinking, starts=thinking.starts(prompt_end)), pieces)


@pytest.mark.parametrize(
    ("name", "prompt_end", "text", "reasoning", "content"),
    [
        ("qwen3", PLAIN, "<think>\nHm, well.\n</think>\n\nYes \n", "Hm, well.", "Yes \n"),
        ("qwen3", PLAIN, "Yes", "", "Yes"),
        ("qwen3", PLAIN, " <b>", "", " <b>"),
        ("qwen3", PLAIN, " <thi", "", " <thi"),
        ("qwen3", PLAIN, "<think></think>Yes", "", "Yes"),
        ("qwen3", PLAIN, "<think>cut o", "cut o", ""),
        ("qwen3", PLAIN, "<think>cut </thi", "cut </thi", ""),
        ("qwen3", OPENED, "Hm</think>Yes", "Hm", "Yes"),
        ("qwen3", OPENED, "<think>Hm</think>Yes", "Hm", "Yes"),
        ("qwen3", OPENED, "cut off", "cut off", ""),
        ("qwen3", OPENED, "<t", "<t", ""),
        ("qwen3", CLOSED, "Yes, <think>no</think>", "", "Yes, <think>no</think>"),
        ("deepseek_r1", PLAIN, "Hm\n</think>\nYes", "Hm", "Yes"),
        ("deepseek_r1", PLAIN, "Yes", "Yes", ""),
        ("deepseek_r1", PLAIN, "", "", ""),
        ("deepseek_r1", CLOSED, "Yes", "", "Yes"),
        ("mistral", PLAIN, "[THINK]Hm[/THINK]Yes", "Hm", "Yes"),
        ("seed_oss", PLAIN, "<seed:think>Hm</seed:think>Yes", "Hm", "Yes"),
        (
            "granite",
            PLAIN,
            "Here's my thought process: Hm. Here is my response: Yes",
            "Hm.",
            "Yes",
        ),
    ],
)
def test_reasoning_is_split_off(
    name: str, prompt_end: str, text: str, reasoning: str, content: str
) -> None:
    whole = events_of(name, prompt_end, text)
    assert (reasoning_of(whole), content_of(whole)) == (reasoning, content)
    assert events_of(name, prompt_end, *text) == whole


@pytest.mark.parametrize("name", THINKINGS)
@given(st.data())
def test_the_pieces_do_not_matter(name: str, data: st.DataObject) -> None:
    marks = THINKINGS[name].opens + THINKINGS[name].closes
    parts = [*marks, *(mark[:4] for mark in marks), " ", "\n", "Hm", "<", "é"]
    pieces = data.draw(st.lists(st.sampled_from(parts), max_size=8))
    prompt_end = data.draw(st.sampled_from([OPENED, CLOSED, PLAIN, *marks]))
    text = "".join(pieces)
    whole = events_of(name, prompt_end, text)
    assert events_of(name, prompt_end, *pieces) == whole
    assert events_of(name, prompt_end, *text) == whole
