"""A message in the making, of which a reply and a stream are two views."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import structs

from paged.http.api.anthropic.blocks import Blocks
from paged.http.api.anthropic.protocol import (
    MessageEvent,
    MessageReply,
    MessagesUsage,
    Stop,
    StopEvent,
)
from paged.http.api.chat import Prepared
from paged.http.api.errors import GenerationFailed
from paged.http.api.generation import generate
from paged.http.api.job import Tally
from paged.http.api.service import Service
from paged.runtime.outputs import CompletionOutput, RequestOutput

AnyEvent = MessageEvent | StopEvent


class Answer:
    """One message.

    Args:
        service, chat: what makes it.
        fills: whether it may be as long as the model's length allows, for more was asked for.

    Attributes:
        message: as it is now.
    """

    def __init__(self, service: Service, chat: Prepared, *, fills: bool) -> None:
        self._service, self._job, self._fills = service, chat.job, fills
        nothing = MessagesUsage(0, 0, 0)
        self.message = MessageReply(id=chat.job.id, model=chat.job.model, usage=nothing)
        self._blocks = Blocks(chat.readers.format.call_id)
        self._reader = chat.readers.new()
        self._tally = Tally()

    async def events(self) -> AsyncGenerator[list[AnyEvent], None]:
        """All events, those that are there at the same time in one piece."""
        begun = False
        async with aclosing(generate(self._service, self._job)) as outputs:
            async for index, output in outputs:
                self._tally.add(index, output)
                events: list[AnyEvent] = [] if begun else [*self._begin()]
                begun = True
                events += self._news(output)
                if events:
                    yield events
        yield [*self._blocks.close(), *self._end(output.outputs[0])]

    async def finish(self) -> MessageReply:
        """The whole message."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self.message

    def _begin(self) -> list[MessageEvent]:
        usage = structs.replace(self._usage(), output_tokens=0)
        self.message = structs.replace(self.message, usage=usage)
        return [MessageEvent(type="message_start", message=self.message), MessageEvent(type="ping")]

    def _news(self, output: RequestOutput) -> list[MessageEvent]:
        [sequence] = output.outputs
        events = self._reader.events(sequence.text, ended=sequence.finished())
        return [*self._blocks.add(events)]

    def _end(self, last: CompletionOutput) -> list[AnyEvent]:
        stop, usage = self._stop(last), self._usage()
        self.message = structs.replace(
            self.message,
            content=self._blocks.whole,
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=usage,
        )
        return [StopEvent(delta=stop, usage=usage), MessageEvent(type="message_stop")]

    def _stop(self, last: CompletionOutput) -> Stop:
        if last.finish_reason == "abort":
            raise GenerationFailed(f"{self._job.id}: ended before its answer was whole")
        if last.finish_reason == "length":
            too_long = "model_context_window_exceeded"
            return Stop(too_long if self._fills else "max_tokens", None)
        if isinstance(last.stop_reason, str):
            return Stop("stop_sequence", last.stop_reason)
        return Stop("tool_use" if self._blocks.has_calls else "end_turn", None)

    def _usage(self) -> MessagesUsage:
        used, cached = self._tally, self._tally.cached_tokens
        return MessagesUsage(used.prompt_tokens - cached, used.completion_tokens, cached)
