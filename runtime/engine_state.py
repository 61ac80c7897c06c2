"""A close look at an engine: its sequences, its pages, its steps in flight and its threads.

It costs some milliseconds, and is made between two steps when somebody asks.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback

import msgspec

_DEEPEST = 30


class SequenceState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence that has not ended.

    Attributes:
        request_id, index: which.
        status: "running", "waiting", "preempted", or "preparing" for a grammar or pages on disk.
        slot: its row in the device state, while it runs.
        arrival_time: seconds, `time.time`.
        prompt_tokens, output_tokens, max_tokens: how long it is, and how long its output may be.
        computed_tokens: in pages, or to be by a step in flight.
        pending_tokens: sampled by steps in flight.
        cached_tokens: of its prompt; -1 before it first ran.
        num_pages, num_preemptions: pages that it holds, and times it had to give them back.
        page_tables: for each group of layers the ids of its pages, in the order of its tokens; 0
            where a window has left one behind.
    """

    request_id: str
    index: int
    status: str
    slot: int | None
    priority: int
    arrival_time: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    computed_tokens: int
    pending_tokens: int
    cached_tokens: int
    num_pages: int
    num_preemptions: int
    page_tables: list[list[int]] = []


class StepState(msgspec.Struct, frozen=True):
    """A step that was enqueued and not read; `age` in seconds."""

    bucket: str
    num_rows: int
    num_tokens: int
    age: float


class ThreadState(msgspec.Struct, frozen=True):
    """A thread and where it is, the innermost call last."""

    name: str
    stack: list[str]


class ProcessState(msgspec.Struct, frozen=True):
    """A process and its threads."""

    pid: int
    threads: list[ThreadState]

    @classmethod
    def here(cls) -> ProcessState:
        """This process."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        threads = []
        for ident, frame in frames.items():
            stack = traceback.extract_stack(frame, limit=_DEEPEST)
            calls = [f"{each.filename}:{each.lineno} {each.name}" for each in stack]
            threads.append(ThreadState(names.get(ident, f"thread {ident}"), calls))
        return cls(os.getpid(), threads)


class EngineState(msgspec.Struct, frozen=True):
    """What there is to see between two steps.

    Attributes:
        sequences: in their order of service.
        pages: of each page, from page 1 on, what `PagePool.states` says.
        in_flight: the oldest first.
        process: of the engine.
    """

    sequences: list[SequenceState]
    pages: bytes
    in_flight: list[StepState]
    process: ProcessState
