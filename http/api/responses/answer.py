"""A response in the making: the same events whether a stream, a reply or nobody waits for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import structs

from paged.http.api.chat import Prepared
from paged.http.api.errors import GenerationFailed, error_info
from paged.http.api.generation import generate
from paged.http.api.job import Tally
from paged.http.api.logprobs import TokenSpeller, chat_logprobs
from paged.http.api.message import AnswerReader
from paged.http.api.protocol import TokenLogprob, now
from paged.http.api.responses.conversation import as_input
from paged.http.api.responses.output import Output
from paged.http.api.responses.protocol import (
    IncompleteDetails,
    InputItem,
    InputTokensDetails,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningOptions,
    Response,
    ResponseError,
    ResponseEvent,
    ResponsesRequest,
    ResponseUsage,
    TextFormat,
    TextOptions,
)
from paged.http.api.responses.store import ResponseStore, Stored
from paged.http.api.service import Service
from paged.runtime.errors import InvalidRequest
from paged.runtime.long_text import without_hurry
from paged.runtime.outputs import CompletionOutput, RequestOutput


@dataclass
class Answer:
    """One response.

    Attributes:
        service, body, chat: what makes it.
        store: keeps it; None if it is not to be kept.
        items: the conversation that it answers.
        response: as it is now.
    """

    service: Service
    store: ResponseStore | None
    body: ResponsesRequest
    chat: Prepared
    items: tuple[InputItem, ...]
    response: Response = field(init=False)

    def __post_init__(self) -> None:
        self.response = _begun(self.body, self.chat, is_kept=self.store is not None)
        self._output = Output(self.chat.readers.format.call_id)
        self._reader: AnswerReader = self.chat.readers.new()
        self._tally = Tally()
        self._speller = TokenSpeller(self.service.engine.tokenizer, as_ids=False)

    async def events(self) -> AsyncGenerator[list[ResponseEvent], None]:
        """All events, those that are there at the same time in one piece.

        At their end the response is whole; it is kept, if it is to be.
        """
        begun = False
        async with aclosing(generate(self.service, self.chat.job)) as outputs:
            async for index, output in outputs:
                events = [] if begun else self._begin()
                begun = True
                self._tally.add(index, output)
                events += self._news(output)
                if events:
                    yield events
        [last] = output.outputs
        if last.finish_reason == "abort":
            raise GenerationFailed(f"{self.response.id}: ended before its answer was whole")
        yield [*self._close(last), await self._end(last)]

    async def finish(self) -> Response:
        """The whole response."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self.response

    def fail(self, error: Exception) -> ResponseEvent:
        """End it with an error."""
        code = "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
        why = ResponseError(code, error_info(error).message)
        self.response = structs.replace(self.response, status="failed", error=why)
        self._keep()
        return self._output.lifecycle("failed", self.response)

    def _keep(self) -> None:
        """Put it into the store, if there is one."""
        if self.store is not None:
            answer = tuple(as_input(item) for item in self.response.output)
            self.store.put(Stored(self.response, self.items + answer))

    def _begin(self) -> list[ResponseEvent]:
        states = ("created", "in_progress")
        return [self._output.lifecycle(state, self.response) for state in states]

    def _news(self, output: RequestOutput) -> list[ResponseEvent]:
        [sequence] = output.outputs
        events = self._reader.events(sequence.text, ended=sequence.finished())
        return [*self._output.add(events, self._logprobs(sequence))]

    def _logprobs(self, sequence: CompletionOutput) -> list[TokenLogprob]:
        logprobs = chat_logprobs(sequence, self.response.top_logprobs, self._speller)
        return logprobs.content if logprobs else []

    def _close(self, last: CompletionOutput) -> list[ResponseEvent]:
        return [*self._output.close("completed" if last.finish_reason == "stop" else "incomplete")]

    async def _end(self, last: CompletionOutput) -> ResponseEvent:
        cut = last.finish_reason == "length"
        self.response = structs.replace(
            self.response,
            completed_at=None if cut else now(),
            status="incomplete" if cut else "completed",
            incomplete_details=IncompleteDetails() if cut else None,
            output=self._output.items,
            usage=await self._usage(),
        )
        self._keep()
        return self._output.lifecycle(self.response.status, self.response)

    async def _usage(self) -> ResponseUsage:
        used = self._tally.usage()
        return ResponseUsage(
            used.prompt_tokens,
            InputTokensDetails(used.prompt_tokens_details.cached_tokens),
            used.completion_tokens,
            OutputTokensDetails(await self._num_reasoning_tokens()),
            used.total_tokens,
        )

    async def _num_reasoning_tokens(self) -> int:
        """Counted anew from the text: outputs of several tokens do not say which thought what."""
        tokenizer = self.service.engine.tokenizer
        thoughts = [item for item in self._output.items if isinstance(item, ReasoningItem)]
        text = "".join(part.text for item in thoughts for part in item.content)
        if tokenizer is None or not text:
            return 0
        return len(await without_hurry(len(text), lambda: tokenizer.encode(text, False)))


def _begun(body: ResponsesRequest, chat: Prepared, *, is_kept: bool) -> Response:
    """A response without an output, which tells what it was asked for."""
    reasoning, text = body.reasoning or ReasoningOptions(), body.text or TextOptions()
    params = chat.job.params
    return Response(
        id=chat.job.id,
        created_at=chat.job.created,
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=chat.job.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=reasoning,
        store=is_kept,
        temperature=params.temperature,
        text=structs.replace(text, format=text.format or TextFormat(type="text")),
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
