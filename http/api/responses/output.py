"""The items of an answer as it grows, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal
from uuid import uuid4

from msgspec import UNSET

from paged.http.api.logprobs import TextLogprobs
from paged.http.api.parsers.events import Arguments, CallStart, Content, Event, Reasoning
from paged.http.api.protocol import TokenLogprob
from paged.http.api.responses.protocol import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseEvent,
    Status,
)

Kind = Literal["message", "reasoning", "function_call"]

_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
_DELTAS = {kind: f"{name}.delta" for kind, name in _TEXT_EVENTS.items()}


@dataclass
class _Open:
    """The item that is being written.

    Attributes:
        kind, id, call_id, name: what it is.
        pieces: its text, or its arguments.
        logprobs: of its tokens.
    """

    kind: Kind
    id: str
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def part(self) -> OutputText | ReasoningText:
        if self.kind == "message":
            return OutputText(text=self.text, logprobs=[*self.logprobs])
        return ReasoningText(self.text)

    def item(self, status: Status) -> OutputItem:
        """The whole of it; as long as it is in progress it has no parts."""
        ended = status != "in_progress"
        match self.kind:
            case "message":
                text = OutputText(text=self.text, logprobs=self.logprobs)
                return OutputMessage(id=self.id, status=status, content=[text] if ended else [])
            case "reasoning":
                thoughts = [ReasoningText(self.text)] if ended else []
                return ReasoningItem(id=self.id, status=status, content=thoughts)
            case "function_call":
                return FunctionCallItem(
                    id=self.id,
                    status=status,
                    call_id=self.call_id,
                    name=self.name,
                    arguments=self.text,
                )


class Output:
    """The items of one answer.

    Args:
        call_id: the id of a call, given the model's own if it gave one.

    Attributes:
        items: those that are whole.
    """

    def __init__(self, call_id: Callable[[str | None], str]) -> None:
        self.items: list[OutputItem] = []
        self._call_id = call_id
        self._open: _Open | None = None
        self._numbers = count()
        self._logprobs = TextLogprobs()

    def add(
        self, events: Iterable[Event], logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[ResponseEvent]:
        """What the model said next, and its tokens as far as they are asked for."""
        self._logprobs.add(logprobs)
        for event in events:
            match event:
                case Content(text):
                    yield from self._say("message", text, self._logprobs.take(text))
                case Reasoning(text):
                    self._logprobs.take(text)
                    yield from self._say("reasoning", text, [])
                case CallStart(name, call_id):
                    yield from self.close("completed")
                    yield from self._begin("function_call", self._call_id(call_id), name)
                case Arguments(text):
                    yield from self._say("function_call", text, [])

    def close(self, status: Status) -> Iterator[ResponseEvent]:
        """The end of the item that is open, if one is."""
        if self._open is None:
            return
        item, kind = self._open.item(status), self._open.kind
        name = f"{_TEXT_EVENTS[kind]}.done"
        if kind == "function_call":
            yield self._event(name, name=self._open.name, arguments=self._open.text)
        else:
            scores = {"logprobs": self._open.logprobs} if kind == "message" else {}
            yield self._event(name, content_index=0, text=self._open.text, **scores)
            yield self._event("response.content_part.done", content_index=0, part=self._open.part)
        yield self._item_event("response.output_item.done", item)
        self.items.append(item)
        self._open = None

    def lifecycle(self, state: str, response: Response) -> ResponseEvent:
        """An event about the response as a whole."""
        return ResponseEvent(
            type=f"response.{state}", sequence_number=next(self._numbers), response=response
        )

    def _say(self, kind: Kind, text: str, logprobs: list[TokenLogprob]) -> Iterator[ResponseEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self.close("completed")
            yield from self._begin(kind)
        assert self._open is not None
        self._open.pieces.append(text)
        self._open.logprobs += logprobs
        yield ResponseEvent(
            type=_DELTAS[kind],
            sequence_number=next(self._numbers),
            output_index=len(self.items),
            item_id=self._open.id,
            content_index=UNSET if kind == "function_call" else 0,
            delta=text,
            logprobs=logprobs if kind == "message" else UNSET,
        )

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[ResponseEvent]:
        self._open = _Open(kind, f"{_ID_PREFIXES[kind]}_{uuid4().hex}", call_id, name)
        yield self._item_event("response.output_item.added", self._open.item("in_progress"))
        if kind != "function_call":
            yield self._event("response.content_part.added", content_index=0, part=self._open.part)

    def _item_event(self, type: str, item: OutputItem) -> ResponseEvent:
        number, index = next(self._numbers), len(self.items)
        return ResponseEvent(type=type, sequence_number=number, output_index=index, item=item)

    def _event(self, type: str, **more: Any) -> ResponseEvent:
        """An event about the open item."""
        assert self._open is not None
        return ResponseEvent(
            type=type,
            sequence_number=next(self._numbers),
            output_index=len(self.items),
            item_id=self._open.id,
            **more,
        )
