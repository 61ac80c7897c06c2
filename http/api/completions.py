"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from paged.http.api.body import json_response, read_body
from paged.http.api.disconnect import while_connected
from paged.http.api.fields import COMPLETION_NEUTRAL
from paged.http.api.generation import generate
from paged.http.api.job import Job, Tally, make_job, sampling_params
from paged.http.api.logprobs import TokenSpeller, completion_logprobs, prompt_logprobs
from paged.http.api.prompts import Prompt, split, tokenised, truncated
from paged.http.api.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    StreamOptions,
)
from paged.http.api.search import num_candidates
from paged.http.api.service import Service, models_of, new_id
from paged.http.api.streaming import EventMaker, Events, event, event_stream
from paged.http.engine import Tokenizer
from paged.runtime.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from paged.runtime.sampling_params import SamplingParams

_MAX_TOKENS = 16


async def completions(request: Request) -> Response:
    """Continue one or many prompts, whole or as a stream."""
    models = models_of(request)
    body = await read_body(request, CompletionRequest, COMPLETION_NEUTRAL, models.max_body_size)
    service = models.for_text(body.model)
    started, body = time.monotonic(), service.defaults.fill(body)
    engine = service.engine
    params = _params(body, engine.default_sampling_params)
    given = split(body.prompt, num_candidates(body))
    service.check_room(len(given) * num_candidates(body))
    special = body.add_special_tokens is not False
    prompts = await tokenised(
        given, engine.tokenizer, engine.max_model_len, add_special_tokens=special
    )
    if body.truncate_prompt_tokens is not None:
        prompts = [truncated(prompt, body, params.max_tokens, engine) for prompt in prompts]
        given = list[Prompt](prompts)
    reply_id = new_id(request, "cmpl", body.request_id)
    name = service.model_name
    job = make_job(body, prompts, params, id=reply_id, model=name, started=started)
    maker = ChoiceMaker(body, given, engine.tokenizer)
    if body.stream:
        return await event_stream(request, _events(service, body, job, maker))
    whole = _complete(service, body, job, maker)
    return json_response(await while_connected(request.receive, whole))


def _params(body: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    max_tokens = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
    # Scoring a prompt needs no new token, but the engine makes at least one: see `_scores`.
    max_tokens = 1 if body.echo and max_tokens == 0 else max_tokens
    echoed = body.logprobs if body.echo else None
    wanted = [number for number in (body.prompt_logprobs, echoed) if number is not None]
    return sampling_params(
        body,
        defaults,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max(wanted, default=None),
    )


def _wanted(output: RequestOutput, body: CompletionRequest) -> RequestOutput:
    """What a request wants of an output: its prompt alone under `echo` and `max_tokens: 0`."""
    if body.max_tokens != 0 or not body.echo:
        return output
    return replace(output, outputs=[_emptied(sequence) for sequence in output.outputs])


def _emptied(sequence: CompletionOutput) -> CompletionOutput:
    ended = "length" if sequence.finished() else None
    return CompletionOutput(sequence.index, logprobs=[], finish_reason=ended)


async def _complete(
    service: Service, body: CompletionRequest, job: Job, maker: ChoiceMaker
) -> Completion:
    tally = Tally()
    choices: list[CompletionChoice] = []
    async with aclosing(generate(service, job)) as outputs:
        async for index, output in outputs:
            tally.add(index, _wanted(output, body))
            choices += maker.choices(index, _wanted(job.best(output), body))
    choices.sort(key=lambda choice: choice.index)
    return Completion(**job.head(), choices=choices, usage=tally.usage())


async def _events(
    service: Service, body: CompletionRequest, job: Job, maker: ChoiceMaker
) -> Events:
    """A chunk whenever a choice has news; in the end, if asked for, the usage without a choice."""
    tally = Tally()
    options = body.stream_options or StreamOptions()

    plain = EventMaker(Completion(**job.head(), choices=[]))

    def with_usage(choices: list[CompletionChoice]) -> bytes:
        return event(Completion(**job.head(), choices=choices, usage=tally.usage()))

    async with aclosing(generate(service, job)) as outputs:
        async for index, output in outputs:
            wanted = _wanted(output, body)
            tally.add(index, wanted)
            for choice in maker.choices(index, wanted):
                yield with_usage([choice]) if options.continuous else plain.event(choice)
    if options.include_usage:
        yield with_usage([])


@dataclass
class ChoiceMaker:
    """Makes the choices of one request from outputs: whole ones, or chunks of them.

    Attributes:
        body: what was asked for.
        prompts: as they came, text or token ids.
        tokenizer: for prompts that came as token ids.
        offsets: by choice index, where its next token begins in the text; present once it began.
        scores: by prompt, its log-probabilities: a stream has them in the first output alone.
    """

    body: CompletionRequest
    prompts: Sequence[str | list[int]]
    tokenizer: Tokenizer | None
    offsets: dict[int, int] = field(default_factory=dict)
    scores: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)

    def choices(self, prompt_index: int, output: RequestOutput) -> Iterator[CompletionChoice]:
        """What an output says, except of sequences that have no news."""
        if output.prompt_logprobs is not None:
            self.scores[prompt_index] = output.prompt_logprobs
        for sequence in output.outputs:
            choice = self._choice(prompt_index, sequence, output)
            if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids:
                yield choice

    def _choice(
        self, prompt_index: int, sequence: CompletionOutput, output: RequestOutput
    ) -> CompletionChoice:
        index = prompt_index * (self.body.n or 1) + sequence.index
        begins = index not in self.offsets
        echoes = bool(self.body.echo and begins)
        scores = self.scores.get(prompt_index) if begins else None
        shows_scores = self.body.prompt_logprobs is not None
        shows_ids = self.body.return_token_ids
        return CompletionChoice(
            index=index,
            text=(self._prompt_text(prompt_index) if echoes else "") + sequence.text,
            logprobs=self._logprobs(index, sequence, output, scores if echoes else None),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            prompt_logprobs=prompt_logprobs(scores) if shows_scores else None,
            token_ids=sequence.token_ids if shows_ids else UNSET,
            prompt_token_ids=output.prompt_token_ids if shows_ids and begins else UNSET,
        )

    def _logprobs(
        self,
        index: int,
        sequence: CompletionOutput,
        output: RequestOutput,
        echoed: list[TokenLogprobs | None] | None,
    ) -> CompletionLogprobs | None:
        """An entry per token of the prompt, if it is echoed, and per new one."""
        start = self.offsets.setdefault(index, 0)
        if self.body.logprobs is None:
            return None
        prompt = output.prompt_token_ids if echoed else []
        token_ids = [*prompt, *sequence.token_ids]
        if not token_ids:
            return None
        logprobs = [*(echoed or ()), *(sequence.logprobs or ())]
        first = self._decode(prompt[:1])
        speller = TokenSpeller(self.tokenizer, bool(self.body.return_tokens_as_token_ids))
        made, self.offsets[index] = completion_logprobs(
            token_ids, logprobs, speller, first_text=first, text_offset=start
        )
        return made

    def _prompt_text(self, prompt_index: int) -> str:
        prompt = self.prompts[prompt_index]
        return prompt if isinstance(prompt, str) else self._decode(prompt)

    def _decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is None or not token_ids:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)
