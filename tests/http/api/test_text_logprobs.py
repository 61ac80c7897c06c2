"""Which of an answer's tokens a text consists of."""

import pytest

from paged.http.api.logprobs import TextLogprobs
from paged.http.api.protocol import TokenLogprob


def taken(tokens: list[bytes], *texts: str) -> list[list[bytes]]:
    """The tokens of each text, one after the other."""
    logprobs = TextLogprobs()
    logprobs.add([TokenLogprob("", 0.0, [*token], []) for token in tokens])
    return [[bytes(entry.bytes) for entry in logprobs.take(text)] for text in texts]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([b"a", b"\xf0\x9f", b"\x98\x80"], "a\U0001f600"),
        ([b"a", b"\xf0\x9f"], "a\ufffd"),
        ([b"a", b"\xf0", b"\x9f", b"b"], "a\ufffdb"),
        ([b"\xe3\x81", b"\xff", b"c"], "\ufffd\ufffdc"),
        ([b"\xe3\x81\x82"], "\u3042"),
        ([b"\xef\xbf\xbd"], "\ufffd"),
        ([b".", b"*", b"\xe3"], ".*\ufffd"),
        ([b"\xff"] * 2000, "\ufffd" * 2000),
    ],
)
def test_tokens_that_end_within_a_character(tokens: list[bytes], text: str) -> None:
    assert taken(tokens, text) == [tokens]


def test_marks_belong_to_no_text() -> None:
    tokens = [b"<think>", b"Hm", b"</think>", b"H", b"i"]
    assert taken(tokens, "Hm", "Hi") == [[b"Hm"], [b"H", b"i"]]
    assert taken([b"H", b"i"], "other", "Hi") == [[], [b"H", b"i"]]
