"""Tool calls in every format: what they mean, whatever the pieces in which they come."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.http.api.parsers.calls import CallParser
from paged.http.api.parsers.events import CallStart, Event
from paged.http.api.parsers.marks import WHITE_SPACE
from paged.http.api.parsers.registry import FORMATS, REASONING_PARSERS, TOOL_PARSERS
from paged.http.api.parsers.tagged_calls import typed
from tests.http.api.parsers.answers import CALLS, MALFORMED, TOOLS, calls_of, content_of, read

ROOT = Path(__file__).parents[4]
GOOD = [(name, *answer) for name, answers in CALLS.items() for answer in answers]
BAD = [(name, text) for name, texts in MALFORMED.items() for text in texts]
SNIPPETS = [
    *(text[start:end] for _, text, _, _ in GOOD for start, end in ((0, 20), (0, None), (15, None))),
    *(text for _, text in BAD if len(text) < 200),
    *(mark for known in FORMATS.values() for mark in known.marks),
    *("Hello", " ", "\n", "{", "}", "[", "]", ";", "<", "é"),
]


def events_of(name: str, *pieces: str) -> list[Event]:
    return read(CallParser(FORMATS[name], TOOLS), pieces)


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
def test_calls_are_read(name: str, text: str, content: str, calls: Any) -> None:
    whole = events_of(name, text)
    assert (content_of(whole), calls_of(whole)) == (content, calls)
    assert events_of(name, *text) == whole


@pytest.mark.parametrize(("name", "text"), BAD, ids=lambda value: value[:40])
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    events = events_of(name, text)
    assert calls_of(events) == []
    assert content_of(events) == text


def test_every_format_is_tested() -> None:
    tested = {FORMATS[name] for name in CALLS}
    assert set(FORMATS.values()) == tested


def test_the_documentation_lists_every_parser() -> None:
    text = (ROOT / "docs/tools.md").read_text(encoding="utf-8")
    assert [name for name in TOOL_PARSERS + REASONING_PARSERS if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", FORMATS)
def test_no_mark_is_part_of_another(name: str) -> None:
    marks = FORMATS[name].marks
    assert not [(a, b) for a in marks for b in marks if a != b and a in b]


@pytest.mark.parametrize("name", FORMATS)
def test_the_pieces_do_not_matter(name: str) -> None:
    @given(st.lists(st.sampled_from(SNIPPETS), max_size=6).map("".join), st.data())
    def check(text: str, data: st.DataObject) -> None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
        edges = zip([0, *cuts], [*cuts, len(text)], strict=True)
        assert events_of(name, *(text[a:b] for a, b in edges)) == events_of(name, text)

    check()


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(alphabet=WHITE_SPACE + "abc.,é", max_size=30))
def test_plain_text_passes_unchanged(name: str, text: str) -> None:
    assert content_of(events_of(name, text)) == text


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
def test_no_part_of_a_mark_is_ever_shown(name: str, text: str, content: str, calls: Any) -> None:
    parser = CallParser(FORMATS[name], TOOLS)
    shown = ""
    for character in text:
        shown += content_of(parser.push(character))
        assert content.startswith(shown)


def test_plain_text_is_not_held_back() -> None:
    parser = CallParser(FORMATS["hermes"], TOOLS)
    assert [content_of(parser.push(piece)) for piece in ("Hi", " you <", "b>", "!")] == [
        "Hi",
        " you",
        " <b>",
        "!",
    ]


def test_ids_that_the_model_gives_are_kept() -> None:
    [(_, text, _, _)] = [answer for answer in GOOD if answer[0] == "kimi_k2"]
    ids = [event.id for event in events_of("kimi_k2", text) if hasattr(event, "id")]
    assert ids == ["functions.weather:0", "functions.clock:1"]
    text = '[TOOL_CALLS]clock[CALL_ID]abcdefghi[ARGS]{"zone": "UTC"}'
    assert events_of("mistral", text)[0] == CallStart("clock", "abcdefghi")


def test_half_a_surrogate_pair_is_sent_escaped() -> None:
    text = '<tool_call>{"name": "clock", "arguments": {"é": "\\ud800"}}</tool_call>'
    assert events_of("hermes", text)[1].text == '{"\\u00e9": "\\ud800"}'  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "string"}, "3"),
        ("3", {"type": "integer"}, 3),
        (" 3 ", {"type": ["integer", "null"]}, 3),
        ("3", {}, 3),
        ("3", None, 3),
        ("three", {"type": "integer"}, "three"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("3", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "3"),
        ("True", {"type": "boolean"}, True),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("1", {"oneOf": "odd", "type": 5}, 1),
    ],
)
def test_values_between_tags_are_what_the_schema_says(text: str, schema: Any, value: Any) -> None:
    assert typed(text, schema) == value
