"""The blocks of an answer as it grows, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from paged.http.api.anthropic.protocol import (
    Block,
    InputJsonDelta,
    MessageEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from paged.http.api.arguments import read_arguments
from paged.http.api.parsers.events import Arguments, CallStart, Content, Event, Reasoning

Delta = TextDelta | ThinkingDelta | InputJsonDelta


@dataclass
class _Open:
    """The block that is being written: what it began as, and its pieces."""

    start: Block
    pieces: list[str] = field(default_factory=list)

    def block(self) -> Block:
        text = "".join(self.pieces)
        match self.start:
            case TextBlock():
                return TextBlock(text)
            case ThinkingBlock():
                return ThinkingBlock(text)
            case ToolUseBlock(id=id, name=name):
                return ToolUseBlock(id, name, _object(text))


class Blocks:
    """The blocks of one answer.

    Args:
        call_id: the id of a call, given the model's own if it gave one.

    Attributes:
        whole: those that have ended.
    """

    def __init__(self, call_id: Callable[[str | None], str]) -> None:
        self.whole: list[Block] = []
        self._call_id = call_id
        self._open: _Open | None = None

    @property
    def has_calls(self) -> bool:
        return any(isinstance(block, ToolUseBlock) for block in self.whole)

    def add(self, events: Iterable[Event]) -> Iterator[MessageEvent]:
        """What the model said next."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._say(TextBlock(""), TextDelta(text), text)
                case Reasoning(text):
                    yield from self._say(ThinkingBlock(""), ThinkingDelta(text), text)
                case CallStart(name, call_id):
                    yield from self.close()
                    yield from self._begin(ToolUseBlock(self._call_id(call_id), name, {}))
                case Arguments(text):
                    yield self._more(InputJsonDelta(text), text)

    def close(self) -> Iterator[MessageEvent]:
        """The end of the block that is open, if one is."""
        if self._open is not None:
            yield MessageEvent(type="content_block_stop", index=len(self.whole))
            self.whole.append(self._open.block())
            self._open = None

    def _say(self, start: Block, delta: Delta, text: str) -> Iterator[MessageEvent]:
        if self._open is None or type(self._open.start) is not type(start):
            yield from self.close()
            yield from self._begin(start)
        yield self._more(delta, text)

    def _begin(self, start: Block) -> Iterator[MessageEvent]:
        self._open = _Open(start)
        index = len(self.whole)
        yield MessageEvent(type="content_block_start", index=index, content_block=start)

    def _more(self, delta: Delta, text: str) -> MessageEvent:
        assert self._open is not None, "a block has begun"
        self._open.pieces.append(text)
        return MessageEvent(type="content_block_delta", index=len(self.whole), delta=delta)


def _object(text: str) -> dict[str, Any]:
    """A call's input; a forced call may be cut before it is one."""
    try:
        return read_arguments(text)
    except ValueError:
        return {}
