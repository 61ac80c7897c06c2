"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, replace

from msgspec import UNSET, structs
from starlette.requests import Request
from starlette.responses import Response

from paged.http.api.answers import prompt_end
from paged.http.api.body import json_response, read_body
from paged.http.api.chat_stream import chat_events
from paged.http.api.conversation import chat_prompt, echoed
from paged.http.api.disconnect import while_connected
from paged.http.api.fields import CHAT_NEUTRAL
from paged.http.api.generation import generate
from paged.http.api.job import Job, Tally, make_job, sampling_params
from paged.http.api.logprobs import TokenSpeller, chat_logprobs, prompt_logprobs
from paged.http.api.message import AnswerReader, AnswerReaders
from paged.http.api.prompts import truncated
from paged.http.api.protocol import ChatChoice, ChatCompletion, ChatRequest
from paged.http.api.search import num_candidates
from paged.http.api.service import Service, models_of, new_id
from paged.http.api.streaming import event_stream
from paged.http.api.structured import structured_outputs
from paged.http.api.tools import ToolUse, forced, read_tools, without_tools
from paged.runtime.config import MAX_LOGPROBS
from paged.runtime.errors import InvalidRequest
from paged.runtime.outputs import CompletionOutput
from paged.runtime.sampling_params import SamplingParams


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    models = models_of(request)
    body = await read_body(request, ChatRequest, CHAT_NEUTRAL, models.max_body_size)
    service = models.for_text(body.model)
    service.check_room(num_candidates(body))
    chat = await prepared(service, body, new_id(request, "chatcmpl", body.request_id))
    if body.stream:
        return await event_stream(request, chat_events(service, chat.body, chat.job, chat.readers))
    reply = _complete(service, chat.body, chat.job, chat.readers)
    return json_response(await while_connected(request.receive, reply))


@dataclass(frozen=True)
class Prepared:
    """A request that can be generated, the defaults filled in, and what will read its answers."""

    body: ChatRequest
    job: Job
    readers: AnswerReaders


async def prepared(service: Service, body: ChatRequest, reply_id: str) -> Prepared:
    """Fill in the defaults, check a conversation and put it through the template.

    Raises:
        InvalidRequest: anything in the request that cannot be carried out.
    """
    started, body = time.monotonic(), service.defaults.fill(body)
    use = read_tools(body, automatic=service.answers.takes_tools)
    params = forced(_params(body, service.engine.default_sampling_params), use)
    hidden = use.choice == "none" and service.answers.hides_tools
    told = without_tools(body) if hidden else body
    template = service.template_for(body.chat_template)
    prompt = await chat_prompt(told, service.engine, template)
    prompt = truncated(prompt, body, params.max_tokens, service.engine)
    readers = _readers(service, body, use, prompt)
    if (form := params.structured_outputs) and (before := readers.before_answer):
        params = replace(params, structured_outputs=form.preceded_by(before))
    if _has_hidden_marks(service, use):
        params = replace(params, skip_special_tokens=False)
    name = service.model_name
    job = make_job(body, [prompt], params, id=reply_id, model=name, started=started)
    return Prepared(body, job, readers)


def _params(body: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """An answer may fill the model's length, unless the request or the model limits it."""
    limits = (body.max_completion_tokens, body.max_tokens, _model_limit(defaults))
    max_tokens = next((limit for limit in limits if limit is not None), None)
    num_top = body.top_logprobs or 0
    if not 0 <= num_top <= MAX_LOGPROBS:
        allowed = f"between 0 and {MAX_LOGPROBS}"
        raise InvalidRequest(f"top_logprobs must be {allowed}, got {num_top}", "top_logprobs")
    if num_top and not body.logprobs:
        raise InvalidRequest("top_logprobs need logprobs to be true", "top_logprobs")
    logprobs = num_top if body.logprobs else None
    return sampling_params(body, defaults, max_tokens=max_tokens, logprobs=logprobs)


def _model_limit(defaults: SamplingParams) -> int | None:
    """The model's own limit; one without leaves the 16 of SamplingParams, which is not for chat."""
    return None if defaults.max_tokens == SamplingParams().max_tokens else defaults.max_tokens


def _readers(service: Service, body: ChatRequest, use: ToolUse, prompt: list[int]) -> AnswerReaders:
    tokenizer, answers = service.engine.tokenizer, service.answers
    assert tokenizer is not None, "the prompt has been made with it"
    reads = answers.reasoning_parser or answers.tool_parser
    end = prompt_end(tokenizer, prompt) if reads else ""
    last = body.messages[-1].content
    said = last if body.continue_final_message and isinstance(last, str) else ""
    form = structured_outputs(body)
    return AnswerReaders(
        answers,
        use,
        end,
        said,
        include_reasoning=body.include_reasoning is not False,
        role=service.role,
        has_form=form is not None and form.kind != "structural_tag",
    )


def _has_hidden_marks(service: Service, use: ToolUse) -> bool:
    tokenizer = service.engine.tokenizer
    return tokenizer is not None and service.answers.has_hidden_marks(use, tokenizer)


async def _complete(
    service: Service, body: ChatRequest, job: Job, readers: AnswerReaders
) -> ChatCompletion:
    tally = Tally()
    speller = TokenSpeller(service.engine.tokenizer, bool(body.return_tokens_as_token_ids))
    async with aclosing(generate(service, job)) as outputs:
        async for index, output in outputs:
            tally.add(index, output)
    return ChatCompletion(
        **job.head(),
        choices=[
            _choice(sequence, body, speller, readers.new()) for sequence in job.best(output).outputs
        ],
        usage=tally.usage(),
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
        prompt_token_ids=output.prompt_token_ids if body.return_token_ids else UNSET,
    )


def _choice(
    sequence: CompletionOutput, body: ChatRequest, speller: TokenSpeller, reader: AnswerReader
) -> ChatChoice:
    message = reader.message(sequence.text)
    if text := echoed(body):
        message = structs.replace(message, content=text + (message.content or ""))
    logprobs = chat_logprobs(sequence, body.top_logprobs or 0, speller) if body.logprobs else None
    return ChatChoice(
        index=sequence.index,
        message=message,
        logprobs=logprobs,
        finish_reason=reader.finish_reason(sequence.finish_reason),
        stop_reason=sequence.stop_reason,
        token_ids=sequence.token_ids if body.return_token_ids else UNSET,
    )
