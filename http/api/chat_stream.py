"""The events of a chat stream, in the order that clients rely on.

Per answer: one chunk with the role, as soon as its first token exists; chunks with reasoning, text
and pieces of calls; one with the reason for its end. Then, if asked for, one with the usage and no
answer at all.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from paged.http.api.conversation import echoed
from paged.http.api.generation import generate
from paged.http.api.job import Job, Tally
from paged.http.api.logprobs import TokenSpeller, chat_logprobs
from paged.http.api.message import AnswerReader, AnswerReaders
from paged.http.api.protocol import ChatChunk, ChatRequest, ChunkChoice, Delta, StreamOptions
from paged.http.api.service import Service
from paged.http.api.streaming import EventMaker, event
from paged.runtime.outputs import CompletionOutput, RequestOutput


async def chat_events(
    service: Service, body: ChatRequest, job: Job, readers: AnswerReaders
) -> AsyncGenerator[bytes, None]:
    """Events, those that are there at the same time in one piece."""
    speller = TokenSpeller(service.engine.tokenizer, bool(body.return_tokens_as_token_ids))
    chunks = _Chunks(body, job, speller, readers)
    async with aclosing(generate(service, job)) as outputs:
        async for index, output in outputs:
            if events := b"".join(chunks.of(index, output)):
                yield events
    if chunks.options.include_usage:
        yield chunks.usage()


@dataclass
class _Chunks:
    """Makes the chunks of one stream."""

    body: ChatRequest
    job: Job
    speller: TokenSpeller
    readers: AnswerReaders
    tally: Tally = field(default_factory=Tally)
    started: dict[int, AnswerReader] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._plain = EventMaker(ChatChunk(**self.job.head(), choices=[]))

    @property
    def options(self) -> StreamOptions:
        return self.body.stream_options or StreamOptions()

    def of(self, index: int, output: RequestOutput) -> Iterator[bytes]:
        """Chunks for one output of the engine."""
        for sequence in output.outputs:
            if sequence.index not in self.started:
                yield self._role(sequence.index, output)
                if text := echoed(self.body):
                    yield self._chunk(ChunkChoice(index=sequence.index, delta=Delta(content=text)))
        self.tally.add(index, output)
        for sequence in output.outputs:
            for choice in self._news(sequence):
                continuous = self.options.continuous
                yield self._chunk(choice) if continuous else self._plain.event(choice)

    def usage(self) -> bytes:
        """The chunk after the last."""
        return event(ChatChunk(**self.job.head(), choices=[], usage=self.tally.usage()))

    def _role(self, index: int, output: RequestOutput) -> bytes:
        wants_prompt = self.body.return_token_ids and not self.started
        self.started[index] = self.readers.new()
        choice = ChunkChoice(index=index, delta=Delta(role=self.readers.role, content=""))
        prompt = output.prompt_token_ids if wants_prompt else UNSET
        return self._chunk(choice, prompt_token_ids=prompt)

    def _news(self, sequence: CompletionOutput) -> Iterator[ChunkChoice]:
        """What is new; nothing while the text of a token is held back and nothing else is.

        Each chunk has one kind of news, what belongs to the tokens comes with the first, and the
        reason for the end with the last.
        """
        logprobs = chat_logprobs(sequence, self.body.top_logprobs or 0, self.speller)
        token_ids = sequence.token_ids if self.body.return_token_ids else UNSET
        ended = sequence.finished()
        reader = self.started[sequence.index]
        deltas = reader.deltas(sequence.text, ended=ended)
        if not deltas and (ended or logprobs or token_ids):
            deltas = [Delta()]
        for at, delta in enumerate(deltas, start=1):
            last = ended and at == len(deltas)
            yield ChunkChoice(
                index=sequence.index,
                delta=delta,
                logprobs=logprobs if at == 1 else None,
                finish_reason=reader.finish_reason(sequence.finish_reason) if last else None,
                stop_reason=sequence.stop_reason if last else UNSET,
                token_ids=token_ids if at == 1 else UNSET,
            )

    def _chunk(self, choice: ChunkChoice, **more: Any) -> bytes:
        usage = self.tally.usage() if self.options.continuous else UNSET
        return event(ChatChunk(**self.job.head(), choices=[choice], usage=usage, **more))
