"""An engine core whose device is a clock, to measure all that stands around it without a GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from paged.runtime.engine_state import EngineState, ProcessState
from paged.runtime.memory import MemoryPlan
from paged.runtime.messages import EngineRequest, EngineStats, Saving, SequenceOutput

MAX_MODEL_LEN, VOCABULARY = 2**20, 49_000
_MOST_NEW = 8192 // 300
_MEMORY = MemoryPlan(None, 0, 0, 0, 1, 1, 1, MAX_MODEL_LEN, MAX_MODEL_LEN)


@dataclass
class Clock:
    """A core for `Engine`. Each step gives every request a token, up to its max_tokens.

    So many requests at most begin with a step as prompts of 300 tokens fit into 8,192.

    A step starts when it is launched and the one before it has ended, and takes always as long.
    The next is launched before one is read, as `EngineCore` does.

    Attributes:
        step_time: seconds.
    """

    step_time: float
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCABULARY
    memory: MemoryPlan = field(default_factory=lambda: _MEMORY)
    startup: dict[str, float] = field(default_factory=dict)
    _random: Random = field(default_factory=lambda: Random(0))
    _waiting: deque[EngineRequest] = field(default_factory=deque)
    _live: dict[str, int] = field(default_factory=dict)  # tokens to come
    _ends: list[float] = field(default_factory=list)  # of the steps in flight, oldest first
    _num_steps: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._waiting)

    def fileno(self) -> None:
        """No other process has news for `step`."""

    def add(self, request: EngineRequest) -> None:
        self._waiting.append(request)

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        left = [each for each in self._waiting if each.request_id != request_id]
        waited = len(left) < len(self._waiting)
        self._waiting = deque(left)
        if self._live.pop(request_id, None) is None and not waited:
            return []
        return [SequenceOutput(request_id, 0, [], finish_reason="abort")]

    def step(self) -> list[SequenceOutput]:
        """Launch a step, then wait for the one before it."""
        now, clock = time.time(), time.perf_counter()
        starts = max(clock, self._ends[-1]) if self._ends else clock
        self._ends.append(starts + self.step_time)
        self._num_steps += 1
        for _ in range(min(_MOST_NEW, len(self._waiting))):
            request = self._waiting.popleft()
            self._live[request.request_id] = request.params.max_tokens or 0
        if len(self._ends) == 1:
            return []
        time.sleep(max(self._ends.pop(0) - time.perf_counter(), 0))
        read = time.monotonic()
        return [self._advance(*each, now, read) for each in list(self._live.items())]

    def _advance(self, name: str, num_left: int, now: float, read: float) -> SequenceOutput:
        """A sequence's next token."""
        self._live[name] = num_left - 1
        if num_left == 1:
            del self._live[name]
        token, reason = self._random.randrange(VOCABULARY), None if num_left > 1 else "length"
        return SequenceOutput(
            name, 0, [token], finish_reason=reason, first_scheduled_time=now, read_time=read
        )

    def stats(self) -> EngineStats:
        return EngineStats(num_steps=self._num_steps)

    def look(self, deliver: Callable[[EngineState], None]) -> None:
        deliver(EngineState([], b"", [], ProcessState.here()))

    def reset_prefix_cache(self) -> bool:
        return True

    def kill(self, reason: str) -> None:
        """Nothing: it does not hang."""

    def closing(self) -> Iterator[Saving]:
        self.close()
        return iter(())

    def close(self) -> None:
        self._live.clear()
        self._waiting.clear()
