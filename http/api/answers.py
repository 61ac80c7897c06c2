"""Answers read as reasoning, content and tool calls, as flags and a request want it."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paged.http.api.parsers.calls import CallParser
from paged.http.api.parsers.events import (
    Arguments,
    CallStart,
    Content,
    Event,
    Parser,
    Part,
)
from paged.http.api.parsers.forced import NamedParser, RequiredParser
from paged.http.api.parsers.harmony import MARKS, HarmonyParser
from paged.http.api.parsers.harmony import before_answer as before_final_message
from paged.http.api.parsers.reasoning import ThinkParser
from paged.http.api.parsers.registry import (
    FORMATS,
    HARMONY_CALLS,
    HARMONY_REASONING,
    THINKINGS,
)
from paged.http.api.tools import ToolUse
from paged.http.engine import Tokenizer

# Mistral's templates take ids of just this form.
_MISTRAL_ID = (string.ascii_letters + string.digits, 9)
# Tokens of a prompt in which the mark that opens the reasoning is looked for.
_PROMPT_END = 16


@dataclass(frozen=True)
class AnswerFormat:
    """How the served model writes its answers.

    Attributes:
        tool_parser, reasoning_parser: names from the registry; None for none.
        auto: whether the model may choose to call tools.
        hides_tools: whether it is not told of tools that it must not call.
    """

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    auto: bool = False
    hides_tools: bool = False

    @property
    def takes_tools(self) -> bool:
        return self.auto and self.tool_parser is not None

    def has_hidden_marks(self, use: ToolUse, tokenizer: Tokenizer) -> bool:
        """Whether a mark is a special token, which text leaves out unless told otherwise."""
        marks = self._reasoning_marks
        if use.choice == "auto" and self.tool_parser in FORMATS:
            marks += FORMATS[self.tool_parser].marks
        return any(not _shown(tokenizer, mark) for mark in marks)

    def parser(
        self, use: ToolUse, prompt_end: str, said: str = "", *, has_form: bool = False
    ) -> Parser | None:
        """What reads one answer; None where it is content alone.

        Args:
            use: of tools.
            prompt_end: the end of the prompt's text, special tokens included.
            said: the message that the answer continues, if it does.
            has_form: whether the request names the form of the answer, which then is content.
        """
        calls = None if has_form else self._call_parser(use)
        if calls and not use.parallel:
            calls = FirstCall(calls)
        reasoning = self._reasoning_parser(prompt_end, said)
        if self._is_harmony and use.choice in ("none", "auto"):
            return calls or reasoning
        return Both(reasoning, calls) if reasoning and calls else reasoning or calls

    def before_answer(self, prompt_end: str, said: str = "") -> Part | None:
        """What may come before an answer that has a form, as a part of a structural tag."""
        if self._is_harmony:
            return before_final_message(prompt_end)
        if self.reasoning_parser not in THINKINGS:
            return None
        thinking = THINKINGS[self.reasoning_parser]
        return thinking.before_answer(thinking.starts(prompt_end, said))

    def _call_parser(self, use: ToolUse) -> Parser | None:
        if use.choice == "named":
            return NamedParser(use.name)
        if use.choice == "required":
            return RequiredParser()
        if use.choice == "auto" and self._is_harmony:
            return HarmonyParser(reads_calls=True)
        if use.choice == "auto" and self.tool_parser in FORMATS:
            return CallParser(FORMATS[self.tool_parser], use.tools)
        return None

    def _reasoning_parser(self, prompt_end: str, said: str) -> Parser | None:
        if self._is_harmony:
            return HarmonyParser(reads_calls=False)
        if self.reasoning_parser not in THINKINGS:
            return None
        thinking = THINKINGS[self.reasoning_parser]
        return ThinkParser(thinking, starts=thinking.starts(prompt_end, said))

    def call_id(self, given: str | None) -> str:
        """The id of a call: the model's own, if it gave one."""
        if given is not None:
            return given
        if self.tool_parser == "mistral":
            return "".join(random.choices(_MISTRAL_ID[0], k=_MISTRAL_ID[1]))
        return f"chatcmpl-tool-{uuid.uuid4().hex}"

    @property
    def _is_harmony(self) -> bool:
        return self.tool_parser == HARMONY_CALLS or self.reasoning_parser == HARMONY_REASONING

    @property
    def _reasoning_marks(self) -> tuple[str, ...]:
        if self._is_harmony:
            return MARKS
        if self.reasoning_parser not in THINKINGS:
            return ()
        thinking = THINKINGS[self.reasoning_parser]
        return thinking.opens + thinking.closes


def _shown(tokenizer: Tokenizer, mark: str) -> bool:
    token_ids = tokenizer.encode(mark, add_special_tokens=False)
    return mark in tokenizer.decode(token_ids, skip_special_tokens=True)


def prompt_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """The end of a prompt's text, with its special tokens."""
    return tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)


class Both:
    """A parser of reasoning, and one of calls that reads what is content to the first."""

    def __init__(self, reasoning: Parser, calls: Parser) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def push(self, text: str) -> list[Event]:
        return self._passed(self._reasoning.push(text))

    def finish(self) -> list[Event]:
        return [*self._passed(self._reasoning.finish()), *self._calls.finish()]

    def _passed(self, events: Iterable[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            result += self._calls.push(event.text) if isinstance(event, Content) else [event]
        return result


class FirstCall:
    """Leaves out all calls of another parser but the first (`parallel_tool_calls` false)."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        return self._only(self._parser.push(text))

    def finish(self) -> list[Event]:
        return self._only(self._parser.finish())

    def _only(self, events: list[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            self._num_calls += isinstance(event, CallStart)
            if self._num_calls < 2 or not isinstance(event, CallStart | Arguments):
                kept.append(event)
        return kept
