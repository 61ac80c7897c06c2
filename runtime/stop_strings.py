"""Finding stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopPattern:
    """One stop string, searched a character at a time (Knuth, Morris and Pratt). Immutable.

    A state is the length of its longest beginning, short of the whole, that the text ends with.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._fallback = [0]  # by length - 1: the state left when a beginning does not go on
        state = 0
        for character in text[1:]:
            state = self._extend(state, character)
            self._fallback.append(state)

    def advance(self, state: int, character: str) -> tuple[int, bool]:
        """The state after one more character, and whether the string is complete with it."""
        state = self._extend(state, character)
        if state == len(self.text):
            return self._fallback[-1], True
        return state, False

    def _extend(self, state: int, character: str) -> int:
        while state and self.text[state] != character:
            state = self._fallback[state - 1]
        return state + (self.text[state] == character)


@lru_cache(maxsize=256)
def stop_pattern(text: str) -> StopPattern:
    """The pattern of a stop string, made once for the many prompts of a request."""
    return StopPattern(text)


class StopMatcher:
    """Looks for several stop strings in one text; the one that ends first wins.

    Text is held back only while a stop string may have begun in it.
    """

    def __init__(self, patterns: Sequence[StopPattern], *, include: bool = False) -> None:
        self._patterns = patterns
        self._first = frozenset(pattern.text[0] for pattern in patterns)
        self._include = include
        self._states = [0] * len(patterns)
        self._held = ""
        self.match: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown now. Sets `match` when a stop string is complete.

        Args:
            armed: False lets stop strings that end in this piece pass.
        """
        if not self._held and self._first.isdisjoint(text):
            return text
        start = len(self._held)
        text = self._held + text
        for end in range(start, len(text)):
            matched = self._advance(text[end])
            if matched is not None and armed:
                return self._stop(text[: end + 1], matched)
        shown = len(text) - max(self._states)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """The longest stop string that ends with this character, if any."""
        longest = None
        for index, pattern in enumerate(self._patterns):
            self._states[index], complete = pattern.advance(self._states[index], character)
            if complete and (longest is None or len(pattern.text) > len(longest)):
                longest = pattern.text
        return longest

    def _stop(self, text: str, matched: str) -> str:
        self.match, self._held = matched, ""
        return text if self._include else text[: len(text) - len(matched)]
