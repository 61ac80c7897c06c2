"""Reasoning between marks, as `<think>...</think>`, in front of the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paged.http.api.parsers.events import Content, Event, Part, Reasoning
from paged.http.api.parsers.marks import WHITE_SPACE, Trimmer, first_mark, unsettled

_SPACE: Part = {"type": "regex", "pattern": r"[ \t\r\n]{0,32}"}


def _sequence(*elements: Part) -> Part:
    return {"type": "sequence", "elements": list(elements)}


def _thoughts(begin: str, ends: Sequence[str]) -> Part:
    free = {"type": "any_text"}
    return {"type": "tag", "begin": begin, "content": free, "end": list(ends)}


@dataclass(frozen=True)
class Thinking:
    """How a model reasons.

    Attributes:
        opens, closes: the marks around it; of several, any.
        assumed: it reasons even without an opening mark, unless the prompt has closed it already.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    assumed: bool = False

    def starts(self, prompt_end: str, said: str = "") -> bool | None:
        """Whether an answer begins inside the reasoning; None if the answer itself will say.

        Args:
            prompt_end: the last characters of the prompt: templates may open the reasoning
                themselves, or close it to switch it off.
            said: the message that the answer continues, if it does.
        """
        found = [(said.rfind(mark), mark in self.opens) for mark in self.opens + self.closes]
        at, opened = max(found)
        if at >= 0:
            return opened
        end = prompt_end.rstrip(WHITE_SPACE)
        if end.endswith(self.opens):
            return True
        if end.endswith(self.closes):
            return False
        return True if self.assumed else None

    def before_answer(self, starts: bool | None) -> Part | None:
        """What may come before an answer that has a form; None if that begins at once.

        Args:
            starts: see `starts`.
        """
        if starts is False:
            return None
        if starts:
            return _sequence(_thoughts("", self.closes), _SPACE)
        opened = [_thoughts(mark, self.closes) for mark in self.opens]
        reasoning = _sequence(_SPACE, {"type": "or", "elements": opened}, _SPACE)
        return {"type": "optional", "content": reasoning}


class ThinkParser:
    """Splits an answer. White space around the marks belongs to neither side."""

    def __init__(self, thinking: Thinking, *, starts: bool | None) -> None:
        self._thinking = thinking
        self._starts = starts
        self._text = ""
        self._space = Trimmer()
        self._read: Callable[[], list[Event] | None] = self._opening
        if starts is False:
            self._read = self._answer

    def push(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while (more := self._read()) is not None:
            events += more
        return events

    def finish(self) -> list[Event]:
        """What was held back: an unfinished mark is text. Reasoning without an end is reasoning."""
        rest, self._text = self._text, ""
        if not rest:
            return []
        inside = self._read == self._reasoning or (self._read == self._opening and self._starts)
        return [Reasoning(self._space.take() + rest) if inside else Content(rest)]

    def _opening(self) -> list[Event] | None:
        """The opening mark, even where the prompt had it; white space alone decides nothing."""
        bare = self._text.lstrip(WHITE_SPACE)
        mark = next((mark for mark in self._thinking.opens if bare.startswith(mark)), None)
        if mark is not None:
            self._text, self._read = bare.removeprefix(mark).lstrip(WHITE_SPACE), self._before
        elif not any(mark.startswith(bare) for mark in self._thinking.opens):
            self._read = self._before if self._starts else self._answer
        return None if self._read == self._opening else []

    def _before(self) -> list[Event] | None:
        """White space between the opening mark and the first thought."""
        self._text = self._text.lstrip(WHITE_SPACE)
        if not self._text:
            return None
        self._read = self._reasoning
        return []

    def _reasoning(self) -> list[Event] | None:
        found = first_mark(self._text, self._thinking.closes)
        if found is None:
            settled = len(self._text) - unsettled(self._text, self._thinking.closes)
            said = self._space.add(self._text[:settled])
            self._text = self._text[settled:]
            return [Reasoning(said)] if said else None
        at, mark = found
        said = self._space.add(self._text[:at])
        self._text, self._read = self._text[at + len(mark) :], self._after
        return [Reasoning(said)] if said else []

    def _after(self) -> list[Event] | None:
        """White space between the closing mark and the answer."""
        self._text = self._text.lstrip(WHITE_SPACE)
        if not self._text:
            return None
        self._read = self._answer
        return []

    def _answer(self) -> list[Event] | None:
        said, self._text = self._text, ""
        return [Content(said)] if said else None


_THINK = (("<think>",), ("</think>",))
THINK = Thinking(*_THINK)
THINK_ASSUMED = Thinking(*_THINK, assumed=True)
MISTRAL_THINK = Thinking(("[THINK]",), ("[/THINK]",))
SEED_THINK = Thinking(("<seed:think>",), ("</seed:think>",))
GRANITE_THINK = Thinking(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
