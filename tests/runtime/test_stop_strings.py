from hypothesis import example, given
from hypothesis import strategies as st

from paged.runtime.stop_strings import StopMatcher, stop_pattern

ALPHABET = "ab😀"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.text(ALPHABET, max_size=4), max_size=12)


def matcher(stops: list[str], include: bool = False) -> StopMatcher:
    return StopMatcher([stop_pattern(stop) for stop in stops], include=include)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Start and end of the stop string that ends first, the longest of those."""
    spans = [
        (end, start)
        for end in range(1, len(text) + 1)
        for start in range(end)
        if text[start:end] in stops
    ]
    if not spans:
        return None
    end, start = min(spans)
    return start, end


def longest_beginning(text: str, stops: list[str]) -> int:
    beginnings = {stop[:size] for stop in stops for size in range(len(stop))}
    return max(size for size in range(len(text) + 1) if text[len(text) - size :] in beginnings)


@given(STOPS, PIECES, st.booleans())
@example(["aab"], ["a", "aa", "b"], False)
@example(["b", "ab"], ["a", "b"], True)
@example(["aa"], ["ab", "aa"], False)
def test_text_ends_at_the_first_stop_string(stops, pieces, include):
    search = matcher(stops, include)
    shown = ""
    for count, piece in enumerate(pieces, start=1):
        shown += search.push(piece)
        text = "".join(pieces[:count])
        span = first_stop(text, stops)
        if span is not None:
            start, end = span
            assert search.match == text[start:end]
            assert shown == text[: end if include else start]
            return
        assert search.match is None
        assert shown == text[: len(text) - longest_beginning(text, stops)]
    assert shown + search.flush() == "".join(pieces)


@given(STOPS, PIECES)
def test_unarmed_stop_strings_pass(stops, pieces):
    search = matcher(stops)
    shown = [search.push(piece, armed=False) for piece in pieces]
    assert search.match is None
    assert "".join(shown) + search.flush() == "".join(pieces)


def test_a_stop_string_may_begin_while_unarmed():
    search = matcher(["END"])
    assert search.push("xEN", armed=False) == "x"
    assert search.push("Dy") == ""
    assert search.match == "END"


def test_no_stop_strings_hold_nothing():
    search = matcher([])
    assert search.push("anything") == "anything"
    assert search.flush() == ""


def test_a_long_stop_string_costs_no_more_than_its_text():
    search = matcher(["a" * 50_000 + "b"])
    shown = "".join(search.push("a" * 500) for _ in range(400))
    assert search.push("b") == ""
    assert shown == "a" * 150_000
    assert search.match is not None


def test_a_pattern_is_made_once_for_all_prompts_of_a_request():
    assert stop_pattern("stop" * 256) is stop_pattern("stop" * 256)
