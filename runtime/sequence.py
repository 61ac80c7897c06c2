"""A sequence: one continuation of a request, from its arrival to its last token.

The scheduler owns sequences. Token positions of a sequence fall into regions:

    0 ........ num_computed ...... num_tokens .. num_tokens + num_pending
    | in pages | known, to compute | sampled on the device, not read yet |

`num_computed` counts what has been *scheduled*: the device runs steps in order, so a later step may
rely on it. While the host runs one step ahead, `num_computed` of a decoding sequence reaches past
`num_tokens`: its newest tokens are known to the device alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended, in the words of the OpenAI API where it has them."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True)
class SequenceLimits:
    """When a sequence ends.

    Attributes:
        max_tokens: output tokens at most (at least 1), the model's length already applied.
        min_tokens: no stop token ends the sequence before this many output tokens.
        stop_token_ids: ids that end it, the model's end-of-sequence ids included.
        eos_token_ids: those of them that are the model's own (they give no stop reason).
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(eq=False, slots=True)
class Sequence:
    """Host state of one sequence. Only the scheduler and the engine loop change it.

    Attributes:
        sequence_id: unique in the engine.
        prompt: prompt token ids, at least one.
        limits: when to end.
        priority: lower runs first under the priority policy.
        arrival: seconds on the engine's clock.
        cache_salt: keeps its prefix cache entries apart from other salts; "" shares with all.
        reads_prefix_cache: False when every prompt token must be computed (prompt_logprobs).
        parent: the sequence whose prompt pages this one shares (n > 1), or None.
        backlog: prompt tokens, of those that the scheduler counts as yet to be computed.
        is_long: whether it is in the lane of long ones; never, where there are no lanes.
        status: where it is in its life.
        finish_reason, stop_reason: why it ended, and the stop token id that did it, if one did.
        outputs: output token ids read back so far.
        num_computed: tokens whose keys and values are in pages, by schedule (see the module).
        num_pending: tokens sampled by scheduled steps and not read back.
        num_cached: prompt tokens found in the prefix cache at first admission; -1 before.
        num_preemptions: times it had to give its pages back.
        page_tables: for each group of layers, page ids; entry i holds positions i * page_size
            onwards. Empty while it does not run.
        num_behind: how many entries of each table, from the first, its group's window has left
            behind: they hold the null page.
        horizon: tokens that it can have computed before its page tables must change.
        page_hashes: prefix-cache hashes of its full pages of known tokens, in order.
        part_ends: tokens up to which pages filled in part hold it, that it left or has copied.
        num_registered: how many of its pages, from the first, carry their hash in the pool.
        next_step: number of the first step that its newest token is there for.
        slot: its row in the device state while running, else None.
    """

    sequence_id: int
    prompt: list[int]
    limits: SequenceLimits
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str = ""
    reads_prefix_cache: bool = True
    parent: Sequence | None = None
    is_long: bool = False
    backlog: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    outputs: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    num_cached: int = -1
    num_preemptions: int = 0
    page_tables: list[list[int]] = field(default_factory=list)
    num_behind: list[int] = field(default_factory=list)
    horizon: int = 0
    page_hashes: list[bytes] = field(default_factory=list)
    part_ends: list[int] = field(default_factory=list)
    num_registered: int = 0
    next_step: int = 0
    slot: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host: prompt and outputs."""
        return len(self.prompt) + len(self.outputs)

    @property
    def num_total(self) -> int:
        """Known tokens and those sampled but not read back."""
        return self.num_tokens + self.num_pending

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known token ids at positions start to stop (stop at most `num_tokens`)."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop]
        return self.prompt[start:] + self.outputs[max(start - split, 0) : stop - split]
