"""What a prefill engine does for decode engines, beside its other work.

A prompt is computed as the request of a single token, which nobody is given. After each step its
pages that have become full are read, behind the step and before anything that could overwrite them.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping

from paged.pool import NULL_PAGE
from paged.runtime.config import EngineConfig
from paged.runtime.greeting import in_one_line
from paged.runtime.live_requests import Owner
from paged.runtime.messages import EngineRequest, SequenceOutput, Terms
from paged.runtime.plan import StepPlan
from paged.runtime.runner import StepRunner
from paged.runtime.sampling_params import SamplingParams
from paged.runtime.scheduler import SchedulerConfig
from paged.runtime.sequence import Sequence
from paged.runtime.transfer.door import Door, Gone, Job, listen
from paged.runtime.transfer.handshake import facts_of
from paged.runtime.transfer.messages import Failed, Finished

logger = logging.getLogger(__name__)

OUTCOMES = ("done", "refused", "aborted")
"""How a prompt of a decode engine may end."""

# Bytes that have left the device and wait for the network; beyond that no new prompt is taken.
_MOST_WAITING = 2**30
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class ServedPrefills:
    """Makes requests of what decode engines ask for, and hands over their pages.

    Args:
        door: where they ask; None for nowhere, and then nothing ever happens here.
        vocab_size: token ids are below it.

    Attributes:
        outcomes: how many prompts have ended in each way.
        num_pages: that were handed over.
    """

    def __init__(
        self, door: Door | None, runner: StepRunner, max_model_len: int, vocab_size: int
    ) -> None:
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.num_pages = 0
        self._door, self._runner = door, runner
        self._max_model_len, self._vocab_size = max_model_len, vocab_size
        self._jobs: dict[str, Job] = {}

    @classmethod
    def of(
        cls, config: EngineConfig, runner: StepRunner, scheduling: SchedulerConfig, vocab_size: int
    ) -> ServedPrefills:
        """As a configuration says. Raises ConfigError: see `listen`."""
        door = None
        # Before there is a port, which a device without memory for them would leave open.
        facts = {} if config.kv_transfer_port is None else facts_of(runner)
        if (listener := listen(config)) is not None:
            door = Door(listener, facts, runner.page_parts, scheduling.windows)
            logger.info("Prefills are served at %s:%d", config.kv_transfer_host, door.port)
        return cls(door, runner, scheduling.max_model_len, vocab_size)

    @property
    def port(self) -> int | None:
        """At which decode engines ask."""
        return None if self._door is None else self._door.port

    @property
    def has_news(self) -> bool:
        """Whether somebody wants something, or does not any more."""
        return self._door is not None and self._door.has_news

    @property
    def num_connected(self) -> int:
        """Decode engines that may ask."""
        return 0 if self._door is None else self._door.num_connected

    def __contains__(self, request_id: str) -> bool:
        """Whether a request is a decode engine's."""
        return request_id in self._jobs

    def fileno(self) -> int | None:
        """What is readable while there is news."""
        return None if self._door is None else self._door.fileno()

    def hear(
        self, add: Callable[[EngineRequest], None], abort: Callable[[str], list[SequenceOutput]]
    ) -> None:
        """Take what has been asked for, and end what is not wanted any more."""
        if self._door is None:
            return
        for news in self._door.news():
            if isinstance(news, Gone):
                self._end(news, abort)
            elif (obstacle := self._obstacle(news, self._door)) is not None:
                self._fail(news, "refused", obstacle)
            else:
                request_id = f"prefill-{secrets.token_hex(8)}"
                self._jobs[request_id] = news
                add(_request(request_id, news))

    def launched(self, plan: StepPlan, owners: Mapping[Sequence, Owner]) -> None:
        """Hand over what a step, which has just been enqueued, completes."""
        if not self._jobs:
            return
        for row in plan.rows:
            owner = owners.get(row.sequence)
            job = None if owner is None else self._jobs.get(owner.live.request.request_id)
            if job is not None and not job.is_complete:
                self._hand_over(job, row.sequence, row.start + row.length)

    def without(self, news: list[SequenceOutput]) -> list[SequenceOutput]:
        """The news of a step that are for others; decode engines hear why a prompt has ended."""
        if not self._jobs:
            return news
        kept = []
        for item in news:
            if (job := self._jobs.get(item.request_id)) is None:
                kept.append(item)
            elif item.finish_reason is not None:
                del self._jobs[item.request_id]
                self._settle(job, item)
        return kept

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._jobs.clear()
        if self._door is not None:
            self._door.close()

    def _obstacle(self, job: Job, door: Door) -> str | None:
        """Why a prompt is not computed here; None if it is."""
        token_ids = job.asked.token_ids
        if not 0 < len(token_ids) < self._max_model_len:
            return f"{len(token_ids)} tokens, and --max-model-len is {self._max_model_len}"
        if not all(0 <= each < self._vocab_size for each in token_ids):
            return f"a token beyond the vocabulary of {self._vocab_size}"
        waiting = door.num_waiting * self._runner.shapes.bytes_per_host_page
        if waiting > _MOST_WAITING:
            return f"{waiting / 2**20:.0f} MiB of pages wait for the network"
        return None

    def _end(self, gone: Gone, abort: Callable[[str], list[SequenceOutput]]) -> None:
        for request_id, job in list(self._jobs.items()):
            is_meant = job.connection is gone.connection and not job.is_over
            if is_meant and gone.number in (None, job.asked.number):
                self._fail(job, "aborted", "it was cancelled")
                if abort(request_id):  # of one that is refused there is news yet
                    del self._jobs[request_id]

    def _hand_over(self, job: Job, sequence: Sequence, num_computed: int) -> None:
        page_size = self._runner.shapes.cache.page_size
        until = min(num_computed // page_size, job.num_full)
        for group, table in enumerate(sequence.page_tables):
            entry = job.num_handed[group]
            pages = table[entry:until]
            assert NULL_PAGE not in pages, "a page that is wanted is not behind a window"
            for stack in self._runner.read(pages):
                job.connection.hand_over(job, job.number_of(group, entry), stack)
                entry += len(stack[0])
            self.num_pages += len(pages)
            job.num_handed[group] = max(entry, until)
        if job.is_complete:
            job.connection.tell(Finished(job.asked.number))

    def _settle(self, job: Job, last: SequenceOutput) -> None:
        if job.is_over:
            return
        if job.is_complete:
            self.outcomes["done"] += 1
        elif last.refusal is not None:
            self._fail(job, "refused", last.refusal.message)
        else:
            self._fail(job, "aborted", last.error or f"it ended by {last.finish_reason}")

    def _fail(self, job: Job, outcome: str, reason: str) -> None:
        job.is_over = True
        self.outcomes[outcome] += 1
        job.connection.tell(Failed(job.asked.number, in_one_line(reason)))


def _request(request_id: str, job: Job) -> EngineRequest:
    asked = job.asked
    return EngineRequest(
        request_id,
        asked.token_ids,
        _ONE_TOKEN,
        priority=asked.priority,
        arrival_time=time.time(),
        cache_salt=asked.salt,
        terms=Terms(num_sequences=1, num_tokens=len(asked.token_ids)),
    )
