"""What grammars make of a step: which of its rows they guide, and how they end sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from paged.runtime.guides import Guide
from paged.runtime.live_requests import Owner
from paged.runtime.messages import SequenceOutput
from paged.runtime.plan import Row, StepPlan, TokenEvent
from paged.runtime.sequence import FinishReason, Sequence

_STUCK = (
    "no token is left to come next: bad_words, allowed_token_ids or banned_token_ids rule out all "
    "that the form of the output, if it has one, allows here"
)


class GuidedRow(NamedTuple):
    """A row whose next token a guide has a say in."""

    row: Row
    owner: Owner
    guide: Guide


class End(NamedTuple):
    """How a guide ends a sequence."""

    reason: FinishReason
    error: str | None


def guided_rows(plan: StepPlan, owners: Mapping[Sequence, Owner]) -> list[GuidedRow]:
    """The rows of a step whose next tokens guides have a say in."""
    rows = []
    for row in plan.rows:
        owner = owners.get(row.sequence) if row.samples else None
        if owner is not None and owner.guide is not None:
            rows.append(GuidedRow(row, owner, owner.guide))
    return rows


def stuck_rows(rows: list[GuidedRow], masks: NDArray[np.int32]) -> list[tuple[GuidedRow, End]]:
    """The rows that no token may follow, by masks [len(rows), W]."""
    found = []
    for guided, left in zip(rows, masks.any(axis=1), strict=True):
        if not left:
            ends = guided.guide.may_end
            error = None if ends else guided.guide.error or _STUCK
            found.append((guided, End(FinishReason.STOP if ends else FinishReason.ABORT, error)))
    return found


def end_of(guide: Guide, event: TokenEvent) -> End | None:
    """How the sequence ends with a token, which the guide takes in; None if the guide goes on.

    A stop token is no part of the text: it ends the sequence, and the guide is not asked.
    """
    if event.finish_reason is FinishReason.STOP:
        return None
    guide.advance(event.token)
    if not guide.is_complete:
        return None
    error = guide.error or None
    return End(FinishReason.ABORT if error else FinishReason.STOP, error)


def with_end(news: SequenceOutput, end: End) -> SequenceOutput:
    """The news of the token with which a guide has ended the sequence."""
    if end.error:
        return replace(news, finish_reason="abort", error=end.error)
    return replace(news, finish_reason="stop", ended_by_text=True)
