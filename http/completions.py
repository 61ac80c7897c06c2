"""POST /v1/completions."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from paged.http.body import json_response, read_body
from paged.http.completion_choices import ChoiceMaker
from paged.http.disconnect import while_connected
from paged.http.fields import COMPLETION_NEUTRAL
from paged.http.generation import Outputs, generate
from paged.http.job import Job, Tally, make_job, sampling_params
from paged.http.prompts import split, tokenised
from paged.http.protocol import Completion, CompletionChoice, CompletionRequest, StreamOptions
from paged.http.service import Service, new_id, service_of
from paged.http.streaming import Events, event, event_stream
from paged.runtime.outputs import CompletionOutput, RequestOutput
from paged.runtime.sampling_params import SamplingParams

_MAX_TOKENS = 16


async def completions(request: Request) -> Response:
    """Continue one or many prompts, whole or as a stream."""
    service = service_of(request)
    body = await read_body(request, CompletionRequest, COMPLETION_NEUTRAL, service.max_body_size)
    service.check_model(body.model)
    engine = service.engine
    params = _params(body, engine.default_sampling_params)
    given = split(body.prompt, params.n)
    special = body.add_special_tokens is not False
    prompts = await tokenised(
        given, engine.tokenizer, engine.max_model_len, add_special_tokens=special
    )
    reply_id = new_id(request, "cmpl", body.request_id)
    job = make_job(body, prompts, params, id=reply_id, model=service.model_name)
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


def _scores(output: RequestOutput) -> RequestOutput:
    """The output of a request with `echo` and `max_tokens: 0`: its prompt alone."""
    return replace(output, outputs=[_emptied(sequence) for sequence in output.outputs])


def _emptied(sequence: CompletionOutput) -> CompletionOutput:
    ended = "length" if sequence.finished() else None
    return CompletionOutput(sequence.index, logprobs=[], finish_reason=ended)


async def _outputs(service: Service, body: CompletionRequest, job: Job) -> Outputs:
    async with aclosing(generate(service, job)) as outputs:
        async for index, output in outputs:
            yield index, _scores(output) if body.echo and body.max_tokens == 0 else output


async def _complete(
    service: Service, body: CompletionRequest, job: Job, maker: ChoiceMaker
) -> Completion:
    tally = Tally()
    choices: list[CompletionChoice] = []
    async with aclosing(_outputs(service, body, job)) as outputs:
        async for index, output in outputs:
            tally.add(index, output)
            choices += maker.choices(index, output)
    choices.sort(key=lambda choice: choice.index)
    return Completion(**job.head(), choices=choices, usage=tally.usage())


async def _events(
    service: Service, body: CompletionRequest, job: Job, maker: ChoiceMaker
) -> Events:
    """A chunk whenever a choice has news; in the end, if asked for, the usage without a choice."""
    tally = Tally()
    options = body.stream_options or StreamOptions()

    def chunk(choices: list[CompletionChoice], with_usage: bool | None) -> bytes:
        usage = tally.usage() if with_usage else UNSET
        return event(Completion(**job.head(), choices=choices, usage=usage))

    async with aclosing(_outputs(service, body, job)) as outputs:
        async for index, output in outputs:
            tally.add(index, output)
            for choice in maker.choices(index, output):
                yield chunk([choice], options.continuous)
    if options.include_usage:
        yield chunk([], with_usage=True)
