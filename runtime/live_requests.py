"""What the engine core knows of requests that have not ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paged.runtime.disk_pages import Fetched
from paged.runtime.engine_state import SequenceState
from paged.runtime.guides import Compiled, Guide
from paged.runtime.messages import Candidates, EngineRequest, Refusal, SequenceOutput
from paged.runtime.sequence import Sequence, SequenceLimits
from paged.runtime.transfer.peer import Handover


@dataclass(eq=False)
class LiveRequest:
    """A live request and its sequences that have not ended.

    Attributes:
        prompt_scores: log-probabilities of prompt positions 1 onwards, as far as computed; None
            if not asked for or already handed out.
    """

    request: EngineRequest
    sequences: dict[int, Sequence] = field(default_factory=dict)
    first_scheduled: float | None = None
    prompt_scores: list[Candidates] | None = None

    @classmethod
    def of(cls, request: EngineRequest) -> LiveRequest:
        """A new one, without sequences yet."""
        asked = request.params.prompt_logprobs is not None
        return cls(request, prompt_scores=[] if asked else None)


@dataclass(frozen=True)
class Owner:
    """Whose sequence it is: its request, its index there, and its own 64-bit seed.

    Attributes:
        says_more: whether its news hold more than tokens.
        guide: what says which tokens may come next; None if it is free.
    """

    live: LiveRequest
    index: int
    seed: int
    says_more: bool
    guide: Guide | None


class Preparing(NamedTuple):
    """A request that is not queued yet.

    Attributes:
        compiled: its grammar, if it has one.
        fetched: pages of its prompt, if some are being read from disk.
        handover: pages of its prompt, if a prefill engine computes some.
    """

    live: LiveRequest
    compiled: Compiled | None
    fetched: Fetched | None
    handover: Handover | None

    @property
    def missing(self) -> list[Future[Any]]:
        """What it waits for."""
        outcome = None if self.handover is None else self.handover.outcome
        parts = (self.compiled, self.fetched, outcome)
        return [part for part in parts if part is not None and not part.done()]


def limits_of(request: EngineRequest, eos: frozenset[int]) -> SequenceLimits:
    """When a request's sequences end.

    Where a grammar can but end, it does, whatever else was asked for.

    Args:
        eos: ids of the tokens that end the model's texts.
    """
    params, guided = request.params, bool(request.grammar)
    assert params.max_tokens is not None, "the front sets max_tokens"
    stops = frozenset(params.stop_token_ids or ())
    heeded = frozenset() if params.ignore_eos and not guided else eos
    min_tokens = 0 if guided else params.min_tokens
    return SequenceLimits(params.max_tokens, min_tokens, stops | heeded, heeded - stops)


def refused(request: EngineRequest, refusal: Refusal) -> list[SequenceOutput]:
    """The news of all sequences of a request that is not taken."""
    return [
        SequenceOutput(request.request_id, index, [], finish_reason="refused", refusal=refusal)
        for index in range(request.params.n)
    ]


def ending(live: LiveRequest, index: int, reason: str, error: str | None = None) -> SequenceOutput:
    """The last news of a sequence, without a token."""
    return SequenceOutput(
        request_id=live.request.request_id,
        index=index,
        token_ids=[],
        finish_reason=reason,
        error=error,
        first_scheduled_time=live.first_scheduled,
    )


def sequence_states(
    sequences: Iterable[Sequence], preparing: Iterable[Preparing], owners: Mapping[Sequence, Owner]
) -> list[SequenceState]:
    """Those the scheduler knows, then those it will.

    Args:
        owners: of all of them; one without has ended.
    """
    states = [
        _state_of(sequence, owners[sequence], sequence.status.value)
        for sequence in sequences
        if sequence in owners
    ]
    for each in preparing:
        for sequence in each.live.sequences.values():
            states.append(_state_of(sequence, owners[sequence], "preparing"))
    return states


def _state_of(sequence: Sequence, owner: Owner, status: str) -> SequenceState:
    return SequenceState(
        request_id=owner.live.request.request_id,
        index=owner.index,
        status=status,
        slot=sequence.slot,
        priority=sequence.priority,
        arrival_time=sequence.arrival,
        prompt_tokens=len(sequence.prompt),
        output_tokens=len(sequence.outputs),
        max_tokens=sequence.limits.max_tokens,
        computed_tokens=sequence.num_computed,
        pending_tokens=sequence.num_pending,
        cached_tokens=sequence.num_cached,
        num_pages=sum(
            len(table) - behind
            for table, behind in zip(sequence.page_tables, sequence.num_behind, strict=False)
        ),
        num_preemptions=sequence.num_preemptions,
        page_tables=[list(table) for table in sequence.page_tables],
    )
