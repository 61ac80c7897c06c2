"""Finding marks in text that comes in pieces, none of which need respect them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WHITE_SPACE = " \t\r\n"


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of `marks` stands, and which it is; the longer one of two at one place."""
    found = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
    if not found:
        return None
    at, _, mark = min(found)
    return at, mark


def unsettled(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may still be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks), default=0) - 1)
    for size in range(longest, 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks if len(mark) > size):
            return size
    return 0


@dataclass
class Trimmer:
    """Hands text on without the white space at its end, which waits for what comes after it.

    Attributes:
        held: that white space.
        characters: what counts as such.
    """

    held: str = ""
    characters: str = WHITE_SPACE

    def add(self, text: str) -> str:
        """The text that can be handed on now."""
        whole = self.held + text
        settled = whole.rstrip(self.characters)
        self.held = whole[len(settled) :]
        return settled

    def take(self) -> str:
        """The white space, no longer held."""
        held, self.held = self.held, ""
        return held
