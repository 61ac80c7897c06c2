"""Calls amid text: one machine for every way of writing them that has marks.

A call is handed on when the whole of it has been read and understood, so that the arguments a
client gets are always a JSON object. What turns out to be no call is content, mark and all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paged.http.api.parsers.events import Arguments, CallStart, Content, Event, Tools
from paged.http.api.parsers.marks import WHITE_SPACE, Trimmer, first_mark, unsettled


class NoCall(ValueError):
    """Text that looked like a call and is none."""


@dataclass(frozen=True)
class Call:
    """A call as it was read.

    Attributes:
        name: of the function.
        arguments: any JSON values.
        id: as the model gave it.
    """

    name: str
    arguments: dict[str, Any]
    id: str | None = None

    def events(self) -> list[Event]:
        """The call as a parser tells it. Raises NoCall for what JSON cannot say."""
        if not self.name.strip():
            raise NoCall("a call without a name")
        try:
            self.name.encode()
        except UnicodeEncodeError:
            raise NoCall("a name that is no text") from None
        return [CallStart(self.name, self.id), Arguments(as_json(self.arguments))]


def as_json(value: Any) -> str:
    """JSON text. Raises NoCall for numbers that are none (`NaN`)."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which can only be sent escaped
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise NoCall(str(error)) from None
    return text


@dataclass(frozen=True)
class Format:
    """How a model writes calls.

    Attributes:
        opens: marks that a call, or a list of calls, begins with.
        end: where the call ends that a text begins with, mark included; None while it has not.
            The second argument is where the text's newest piece begins: nothing before that has
            to be looked at again. It may not change its mind when more text follows.
        read: the calls in such a text, marks included; raises NoCall. The text may lack its end if
            the answer ended first.
        ignored: marks around calls that mean nothing to us.
        alone: calls stand at the beginning of an answer or nowhere, as their marks are common.
        between: what may stand between two calls, and is not content there.
    """

    opens: tuple[str, ...]
    end: Callable[[str, int], int | None]
    read: Callable[[str, Tools], list[Call]]
    ignored: tuple[str, ...] = ()
    alone: bool = False
    between: str = WHITE_SPACE

    @property
    def marks(self) -> tuple[str, ...]:
        return self.opens + self.ignored


def until(*marks: str) -> Callable[[str, int], int | None]:
    """For `Format.end`: a call ends with the first of these marks."""
    longest = max(map(len, marks))

    def end(text: str, fresh: int) -> int | None:
        start = max(0, fresh - longest + 1)
        found = first_mark(text[start:], marks)
        return start + found[0] + len(found[1]) if found else None

    return end


class CallParser:
    """Reads an answer written in a format.

    White space between calls, before the first and after the last, belongs to none of the content.
    """

    def __init__(self, format: Format, tools: Tools) -> None:
        self._format = format
        self._tools = tools
        self._space = Trimmer(characters=format.between)
        self._text = ""  # not handed on: a call so far, or what may become a mark
        self._in_call = False
        self._has_content = False
        self._after_call = False

    def push(self, text: str) -> list[Event]:
        fresh = len(self._text)
        self._text += text
        events: list[Event] = []
        while self._text:
            before = len(self._text), self._in_call
            events += self._call(fresh) if self._in_call else self._content()
            if before == (len(self._text), self._in_call):
                break
            fresh = 0
        return events

    def finish(self) -> list[Event]:
        rest, self._text = self._text, ""
        events = self._read(rest) if self._in_call else self._say(rest)
        space = self._space.take()
        return events if self._after_call or not space else [*events, Content(space)]

    def _call(self, fresh: int) -> list[Event]:
        end = self._format.end(self._text, fresh)
        if end is None:
            return []
        body, self._text = self._text[:end], self._text[end:]
        self._in_call = False
        return self._read(body)

    def _read(self, body: str) -> list[Event]:
        try:
            calls = self._format.read(body, self._tools)
            events = [event for call in calls for event in call.events()]
        except (NoCall, RecursionError):
            return self._say(body)
        self._space.take()
        self._after_call = True
        return events

    def _content(self) -> list[Event]:
        """What stands before the next mark, and that mark; or all that can be no mark."""
        marks = self._marks()
        found = first_mark(self._text, marks)
        if found is None:
            settled = len(self._text) - unsettled(self._text, marks)
            return self._say(self._cut(settled))
        at, mark = found
        events = self._say(self._cut(at))
        if mark not in self._marks():  # that content took the mark's meaning
            return events
        if mark in self._format.ignored:
            self._cut(len(mark))
        else:
            self._in_call = True
        return events

    def _marks(self) -> Sequence[str]:
        return () if self._format.alone and self._has_content else self._format.marks

    def _cut(self, size: int) -> str:
        cut, self._text = self._text[:size], self._text[size:]
        return cut

    def _say(self, text: str) -> list[Event]:
        said = self._space.add(text)
        if not said:
            return []
        self._has_content = True
        self._after_call = False
        return [Content(said)]
