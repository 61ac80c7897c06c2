"""The format of gpt-oss, in which an answer is several messages, each to a channel.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>commentary
    to=functions.clock <|constrain|>json<|message|>{"zone": "UTC"}<|call|>

Analysis is reasoning, commentary to a function is a call, and everything else is content. The
prompt ends with the beginning of the first message's head, `<|start|>assistant`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paged.http.api.parsers.calls import Call, NoCall
from paged.http.api.parsers.events import Content, Event, Part, Reasoning
from paged.http.api.parsers.json_calls import json_object
from paged.http.api.parsers.marks import first_mark, unsettled

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
# A message that lacks its end is ended by the head of the next one.
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
MARKS = (*_ENDS, MESSAGE, "<|constrain|>")
_HEAD = f"{START}assistant"
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True)
class _Head:
    """What a message is: for which channel, and to whom (None for the user)."""

    channel: str | None
    recipient: str | None


def _head(text: str) -> _Head:
    channel, recipient = _CHANNEL_NAME.search(text), _RECIPIENT.search(text)
    return _Head(channel and channel[1], recipient and recipient[1])


def before_answer(prompt_end: str) -> Part | None:
    """What comes before an answer that has a form: analysis, and the final message's head.

    None if the prompt does not end with the beginning of a head.
    """
    if not prompt_end.endswith(_HEAD):
        return None
    analysis = {
        "type": "tag",
        "begin": f"{CHANNEL}analysis{MESSAGE}",
        "content": {"type": "any_text"},
        "end": f"<|end|>{_HEAD}",
    }
    final = [f"{CHANNEL}final{kind}{MESSAGE}" for kind in ("", " <|constrain|>json")]
    heads = [{"type": "const_string", "value": head} for head in final]
    elements = [{"type": "star", "content": analysis}, {"type": "or", "elements": heads}]
    return {"type": "sequence", "elements": elements}


class HarmonyParser:
    """Reads an answer.

    Args:
        reads_calls: False makes content of messages to functions, as of any other.
    """

    def __init__(self, *, reads_calls: bool) -> None:
        self._reads_calls = reads_calls
        self._text = ""  # not handed on
        self._searched = 0  # characters of it in which no message ends
        self._head: _Head | None = None  # None between messages
        self._said: set[type[Event]] = set()  # kinds of text that there have been
        self._begins = False  # the message has handed on nothing yet

    def push(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while True:
            before = self._head, len(self._text)
            events += self._between() if self._head is None else self._body(self._head)
            if before == (self._head, len(self._text)):
                return events

    def finish(self) -> list[Event]:
        rest, self._text = self._text, ""
        if self._head is None:
            # A head without a message says nothing, but an answer without any mark is one.
            return [] if first_mark(rest, MARKS) else self._say(Content, rest)
        return self._end(self._head, rest)

    def _between(self) -> list[Event]:
        before, mark, after = self._text.partition(MESSAGE)
        if mark:
            self._head, self._text, self._begins = _head(before), after, True
        return []

    def _body(self, head: _Head) -> list[Event]:
        found = first_mark(self._text[self._searched :], _ENDS)
        if found is None:
            return self._wait() if self._is_call(head) else self._stream(head)
        at, mark = self._searched + found[0], found[1]
        body, rest = self._text[:at], self._text[at + len(mark) :]
        self._searched = 0
        # The channel's mark belongs to the next head, whose name would be lost without it.
        self._text = CHANNEL + rest if mark == CHANNEL else rest
        self._head = None
        return self._end(head, body)

    def _wait(self) -> list[Event]:
        self._searched = len(self._text) - unsettled(self._text, _ENDS)
        return []

    def _is_call(self, head: _Head) -> bool:
        return self._reads_calls and head.recipient is not None and head.channel != "analysis"

    def _stream(self, head: _Head) -> list[Event]:
        settled = len(self._text) - unsettled(self._text, _ENDS)
        said, self._text = self._text[:settled], self._text[settled:]
        return self._say(_kind(head), said)

    def _end(self, head: _Head, body: str) -> list[Event]:
        """The events of a message's last text; of all of it, if it is a call."""
        if not self._is_call(head):
            return self._say(_kind(head), body)
        assert head.recipient is not None
        try:
            return Call(head.recipient.removeprefix("functions."), json_object(body)).events()
        except NoCall:
            return self._say(Content, body)

    def _say(self, kind: type[Content] | type[Reasoning], text: str) -> list[Event]:
        """Text; a message's first is set apart from the message of its kind before it."""
        if not text:
            return []
        apart = "\n" if self._begins and kind in self._said else ""
        self._begins = False
        self._said.add(kind)
        return [kind(apart + text)]


def _kind(head: _Head) -> type[Content] | type[Reasoning]:
    return Reasoning if head.channel == "analysis" else Content
