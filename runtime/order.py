"""In which order sequences are served.

One order rules a scheduler: waiting sequences are admitted from its front, running ones advance
from its front, and when pages run out the last running sequence gives its pages back. A key never
changes, so whoever comes first is never thrown out for those behind, and nobody starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from paged.runtime.sequence import Sequence, Status

Order = Callable[[Sequence], tuple[float, int]]

PRIORITY_SECONDS = 60.0
"""What one level of priority is worth in seconds of waiting."""

LANE_SECONDS = 30.0
"""For how long short sequences overtake a long one: those that arrive later stand behind it."""


def by_arrival(sequence: Sequence) -> tuple[float, int]:
    """First come, first served."""
    return sequence.arrival, sequence.sequence_id


def by_priority(sequence: Sequence) -> tuple[float, int]:
    """Lower priorities first, but each level counts only as much as `PRIORITY_SECONDS`.

    An urgent sequence overtakes those that arrived up to so much earlier for each level between
    them; whoever has waited longer keeps its place, however many urgent ones arrive.
    """
    return sequence.arrival + PRIORITY_SECONDS * sequence.priority, sequence.sequence_id


def by_lane(sequence: Sequence) -> tuple[float, int]:
    """Short ones first, but only for `LANE_SECONDS`; beside that as `by_priority`."""
    key, number = by_priority(sequence)
    return key + LANE_SECONDS * sequence.is_long, number


ORDERS: dict[str, Order] = {"fcfs": by_arrival, "priority": by_priority, "lanes": by_lane}
"""By the name of the scheduling policy."""


class Line:
    """Sequences in their order of service."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    @property
    def last(self) -> Sequence | None:
        return self._sequences[-1] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=self._order)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, self._order(sequence), key=self._order)
        found = self._sequences.pop(index)
        assert found is sequence, f"sequence {sequence.sequence_id} is not in this line"


class WaitingLine:
    """Sequences to admit, the long ones apart from the others.

    Forks stand beside the line until their parent's prompt is scheduled.

    Attributes:
        short, long: their lines. Without lanes no sequence is called long.
    """

    def __init__(self, order: Order) -> None:
        self.short, self.long = Line(order), Line(order)
        self._order = order
        self._forks: dict[int, list[Sequence]] = {}  # by the parent's id

    @property
    def has_forks(self) -> bool:
        return bool(self._forks)

    @property
    def first(self) -> Sequence | None:
        return self.first_of(self.short, self.long)

    def first_of(self, *lines: Line) -> Sequence | None:
        """The first of these lines of it."""
        firsts = [line.first for line in lines if line.first is not None]
        return min(firsts, key=self._order, default=None)

    def add(self, sequence: Sequence) -> None:
        parent = sequence.parent
        if parent is not None and sequence.status is Status.WAITING and _prompt_to_come(parent):
            self._forks.setdefault(parent.sequence_id, []).append(sequence)
        else:
            self._line_of(sequence).add(sequence)

    def remove(self, sequence: Sequence) -> None:
        forks = self._forks.get(sequence.parent.sequence_id, []) if sequence.parent else []
        if sequence in forks:
            forks.remove(sequence)
        else:
            self._line_of(sequence).remove(sequence)

    def release_forks(self, parent: Sequence) -> None:
        """Let the forks join the line: the parent's prompt is scheduled, or never will be."""
        for fork in self._forks.pop(parent.sequence_id, ()):
            self._line_of(fork).add(fork)

    def _line_of(self, sequence: Sequence) -> Line:
        return self.long if sequence.is_long else self.short


def _prompt_to_come(parent: Sequence) -> bool:
    return not parent.finished and parent.num_computed < len(parent.prompt)
