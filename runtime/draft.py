"""A step's plan in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from paged.host_pages import PageMove
from paged.runtime.lanes import LongShare
from paged.runtime.plan import PageCopy, PageUpdate, Row, StepPlan
from paged.runtime.sequence import Sequence


@dataclass
class Draft:
    """What the scheduler has decided so far.

    Attributes:
        budget: tokens that the step still has room for.
        num_slots: of the device.
        decodes, chunks: its rows of one token, and the longer ones.
        long: what it may do for long sequences, where these have a lane of their own.
        admitted, page_updates, copies: see `StepPlan`.
        sources: pages to be copied, on hold until the plan is made.
    """

    budget: int
    num_slots: int
    long: LongShare | None = None
    decodes: list[Row] = field(default_factory=list)
    chunks: list[Row] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def give_pages(self, sequence: Sequence, group: int, pages: list[int]) -> None:
        """Append pages to the sequence's table of a group of layers."""
        assert sequence.slot is not None, "only a running sequence has page tables"
        entries, table = sequence.page_tables[group], group * self.num_slots + sequence.slot
        for index, page in enumerate(pages, start=len(entries)):
            self.page_updates.append(PageUpdate(table, index, page))
        entries += pages

    def prefills(self, sequence: Sequence) -> bool:
        """Whether the plan computes prompt tokens of the sequence."""
        num_prompt = len(sequence.prompt)
        rows = (*self.chunks, *self.decodes)
        return any(row.sequence is sequence and row.start < num_prompt for row in rows)

    def finish(self, moves: tuple[PageMove, ...]) -> StepPlan:
        return StepPlan(
            rows=(*self.decodes, *self.chunks),
            admitted=tuple(self.admitted),
            page_updates=tuple(self.page_updates),
            copies=tuple(self.copies),
            moves=moves,
        )
