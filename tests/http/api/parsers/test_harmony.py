"""The format of gpt-oss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.http.api.parsers.events import Event
from paged.http.api.parsers.harmony import MARKS, HarmonyParser
from tests.http.api.parsers.answers import CLOCK, WEATHER, calls_of, content_of, read, reasoning_of

THOUGHT = "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant"
CALL = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo", "days": 3}<|call|>'
)
OTHER_CALL = ' to=functions.clock<|channel|>commentary json<|message|>{"zone": "UTC"}<|call|>'
START = "<|start|>assistant"


def events_of(*pieces: str, reads_calls: bool = True) -> list[Event]:
    return read(HarmonyParser(reads_calls=reads_calls), pieces)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (THOUGHT + "<|channel|>final<|message|>Yes.", "Hm, <b>.", "Yes.", []),
        (THOUGHT + "<|channel|>final<|message|>Yes.<|return|>", "Hm, <b>.", "Yes.", []),
        (THOUGHT + CALL, "Hm, <b>.", "", [WEATHER]),
        (THOUGHT + CALL + START + OTHER_CALL, "Hm, <b>.", "", [WEATHER, CLOCK]),
        (
            "<|channel|>commentary<|message|>I look.<|end|>" + START + CALL,
            "",
            "I look.",
            [WEATHER],
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final"
            "<|message|>Yes.",
            "",
            "I look.\nYes.",
            [],
        ),
        (THOUGHT + "<|channel|>analysis<|message|>More.<|end|>", "Hm, <b>.\nMore.", "", []),
        ("<|channel|>analysis<|message|>cut o", "cut o", "", []),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b", []),
        ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final", "a", "", []),
        ("No marks at all", "", "No marks at all", []),
        (CALL[:-9], "", '{"city": "Oslo", "days": 3', []),
        (CALL.removesuffix("<|call|>"), "", "", [WEATHER]),
    ],
)
def test_channels(text: str, reasoning: str, content: str, calls: object) -> None:
    whole = events_of(text)
    assert (reasoning_of(whole), content_of(whole)) == (reasoning, content)
    assert calls_of(whole) == calls
    assert events_of(*text) == whole


def test_calls_may_be_left_unread() -> None:
    events = events_of(THOUGHT + CALL, reads_calls=False)
    assert reasoning_of(events) == "Hm, <b>."
    assert content_of(events) == '{"city": "Oslo", "days": 3}'


@given(st.lists(st.sampled_from([THOUGHT, CALL, OTHER_CALL, START, *MARKS, "<|", "{}", "Hm"])))
def test_the_pieces_do_not_matter(pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = events_of(text)
    assert events_of(*pieces) == whole
    assert events_of(*text) == whole
