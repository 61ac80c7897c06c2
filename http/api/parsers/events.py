"""What an answer consists of, and what every parser is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins.

    Attributes:
        name: of the function.
        id: as the model gave it; None if it gives none.
    """

    name: str
    id: str | None = None


@dataclass(frozen=True)
class Arguments:
    """A piece of the latest call's arguments, which all together are a JSON object."""

    text: str


Event = Content | Reasoning | CallStart | Arguments

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters, by the function's name."""


Part = dict[str, Any]
"""A part of a structural tag (see `paged.runtime.structural_tags`)."""


class Parser(Protocol):
    """Reads one answer, a piece of text at a time.

    All events joined depend on the whole text alone, never on where its pieces were cut: so an
    answer that is streamed says the same as one that is not. `push` holds back only what later text
    may still turn into something else; `finish`, called once at the end, gives that out.
    """

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbours of one kind as one, and none that are empty."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, CallStart):
            result.append(event)
        elif isinstance(last, type(event)):
            result[-1] = type(event)(last.text + event.text)
        elif event.text:
            result.append(event)
    return result
