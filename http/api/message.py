"""The events of an answer as a reply's message, or as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import UNSET

from paged.http.api.answers import AnswerFormat
from paged.http.api.parsers.events import (
    Arguments,
    CallStart,
    Content,
    Event,
    Parser,
    Part,
    Reasoning,
    joined,
)
from paged.http.api.protocol import (
    AssistantMessage,
    Delta,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from paged.http.api.tools import ToolUse


@dataclass(frozen=True)
class AnswerReaders:
    """What reads the answers to one request; each sequence has one of its own.

    Attributes:
        format: how the model writes its answers.
        use: of tools.
        prompt_end: the end of the prompt's text, special tokens included.
        said: the message that the answers continue, if they do.
        include_reasoning: whether the client wants it.
        role: that the answers carry.
        has_form: whether the request names the form of the answer.
    """

    format: AnswerFormat
    use: ToolUse
    prompt_end: str
    said: str
    include_reasoning: bool
    role: str = "assistant"
    has_form: bool = False

    @property
    def before_answer(self) -> Part | None:
        """What may come before an answer that has a form."""
        return self.format.before_answer(self.prompt_end, self.said)

    def new(self) -> AnswerReader:
        parser = self.format.parser(self.use, self.prompt_end, self.said, has_form=self.has_form)
        return AnswerReader(parser, self)


class AnswerReader:
    """Reads one sequence's text as it comes.

    Args:
        parser: for this answer alone; None if it is content and nothing else.
        request: what is known of the request.
    """

    def __init__(self, parser: Parser | None, request: AnswerReaders) -> None:
        self._parser = parser
        self._request = request
        self._num_calls = 0

    def message(self, text: str) -> AssistantMessage:
        """A whole answer."""
        events = self.events(text, ended=True)
        if self._parser is None:
            return AssistantMessage(content=text, role=self._request.role)
        content = "".join(event.text for event in events if isinstance(event, Content))
        thoughts = "".join(event.text for event in events if isinstance(event, Reasoning)) or UNSET
        return AssistantMessage(
            content=content or (None if events else ""),
            role=self._request.role,
            reasoning=thoughts,
            reasoning_content=thoughts,
            tool_calls=self._calls(events),
        )

    def deltas(self, text: str, *, ended: bool) -> list[Delta]:
        """What this piece of an answer adds; `ended` with the last."""
        return [self._delta(event) for event in self.events(text, ended=ended)]

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer ended: the engine's reason, unless it ended to wait for its calls."""
        forced = self._request.use.choice == "named"
        return "tool_calls" if reason == "stop" and self._num_calls and not forced else reason

    def events(self, text: str, *, ended: bool) -> list[Event]:
        """The same as the parts that it consists of."""
        if self._parser is None:
            return [Content(text)] if text else []
        events = self._parser.push(text)
        if ended:
            events += self._parser.finish()
        if not self._request.include_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        return joined(events)

    def _delta(self, event: Event) -> Delta:
        match event:
            case Content(text):
                return Delta(content=text)
            case Reasoning(text):
                return Delta(reasoning=text, reasoning_content=text)
            case CallStart():
                return self._start(event)
            case Arguments(text):
                piece = ToolCallDelta(
                    index=self._num_calls - 1, function=FunctionDelta(arguments=text)
                )
                return Delta(tool_calls=[piece])

    def _start(self, event: CallStart) -> Delta:
        """A call's first delta: what it is, and none of its arguments yet."""
        self._num_calls += 1
        start = ToolCallDelta(
            index=self._num_calls - 1,
            id=self._request.format.call_id(event.id),
            type="function",
            function=FunctionDelta(name=event.name, arguments=""),
        )
        return Delta(tool_calls=[start])

    def _calls(self, events: Iterable[Event]) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for event in events:
            if isinstance(event, CallStart):
                self._num_calls += 1
                call_id = self._request.format.call_id(event.id)
                calls.append(ToolCall(FunctionCall(event.name, ""), call_id))
            elif isinstance(event, Arguments):
                start = calls[-1]
                function = FunctionCall(start.function.name, event.text)
                calls[-1] = ToolCall(function, start.id)
        return calls
