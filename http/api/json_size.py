"""How much a JSON text may hold, counted before it is decoded.

Decoding and looking through millions of values takes seconds in which no other request gets on: the
decoder lets no other thread run. Counting does.
"""

from __future__ import annotations

MAX_VALUES = 2_000_000
"""Entries of lists and objects: token ids of the longest prompts, with room to spare."""

MAX_STRUCTURE = 200_000
"""Lists, objects and members of objects, which cost more."""

_STRUCTURE = (b"[", b"{", b":")
_SLICE = 2**16


class TooManyValues(ValueError):
    """A text that holds more than is allowed."""


def check_num_values(text: bytes) -> None:
    """Raise TooManyValues for a text that holds too much; it may be no JSON at all."""
    # Each takes two bytes at least, and most texts have too few of these characters anyhow.
    if len(text) > 2 * MAX_STRUCTURE and _is_too_much(_count(text)):
        _count_exactly(text)


def _count_exactly(text: bytes) -> None:
    """Leave strings out, in which the characters stand for nothing."""
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")
    found, in_string = (0, 0), False
    for start in range(0, len(bare), _SLICE):
        pieces = bare[start : start + _SLICE].split(b'"')
        num_values, structure = _count(b"".join(pieces[in_string::2]))
        found = (found[0] + num_values, found[1] + structure)
        in_string ^= len(pieces) % 2 == 0
        if _is_too_much(found):
            raise TooManyValues(
                f"it holds more than {MAX_VALUES} values, or {MAX_STRUCTURE} lists, objects and "
                "members of objects"
            )


def _count(text: bytes) -> tuple[int, int]:
    structure = sum(text.count(mark) for mark in _STRUCTURE)
    return text.count(b",") + structure, structure


def _is_too_much(found: tuple[int, int]) -> bool:
    return found[0] > MAX_VALUES or found[1] > MAX_STRUCTURE
