"""What the scheduler decides for one step, as plain data handed to the device side.

What there is one of for each sequence and step is a msgspec struct: made in a quarter of a named
tuple's time, and nothing that the garbage collector need look at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from paged.host_pages import PageMove
from paged.runtime.sequence import FinishReason, Sequence


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part in a step: its tokens at positions start to start + length.

    Attributes:
        sequence: whose tokens.
        slot: its row in the device state (kept here: a preemption may take the slot away while
            the step is in flight).
        start: position of the first token, equal to its tokens in pages before the step.
        length: tokens, at least one.
        samples: whether the step's last token of this row is the newest of its sequence, so that
            a new token is sampled after it.
    """

    sequence: Sequence
    slot: int
    start: int
    length: int
    samples: bool


class PageUpdate(NamedTuple):
    """Entry `entry` of a page table becomes `page`.

    Tables are numbered group by group: with S slots, slot s has tables s, S + s, 2 * S + s, ...
    """

    table: int
    entry: int
    page: int


class PageCopy(NamedTuple):
    """Page `source` is copied to `target` before the step (copy-on-write)."""

    source: int
    target: int


@dataclass(frozen=True)
class StepPlan:
    """One step.

    Attributes:
        rows: rows of one token first, then chunks; never empty.
        admitted: sequences that were given a slot in this step (their slot state is reset).
        page_updates: changes to the device's page tables, to apply before the step.
        copies: pages to copy before the step; no target is a source.
        moves: between pages and the host, to be made in their order, before the copies.
    """

    rows: tuple[Row, ...]
    admitted: tuple[Sequence, ...]
    page_updates: tuple[PageUpdate, ...]
    copies: tuple[PageCopy, ...]
    moves: tuple[PageMove, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """What a finished step means for one sequence.

    Attributes:
        sequence: whose token.
        row: index of the row in its plan.
        token: the new output token; negative if it ended with an error instead.
        finish_reason: set if this token ended the sequence.
    """

    sequence: Sequence
    row: int
    token: int
    finish_reason: FinishReason | None
