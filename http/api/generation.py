"""Running a job: the engine's outputs as they come, counted, and aborted when nobody reads on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypedDict

from paged.http.api.errors import GenerationFailed
from paged.http.api.job import Job
from paged.http.api.service import Service
from paged.http.api.structured import in_words_of
from paged.http.api.timeouts import LATE
from paged.http.meter import count_tokens
from paged.http.request_report import Asked, RequestWatch
from paged.runtime.errors import DeadlineExceeded, InvalidRequest, Overloaded
from paged.runtime.messages import NO_NUMBERS, Terms
from paged.runtime.outputs import RequestOutput

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""Outputs with the index of their prompt."""


def generate(service: Service, job: Job) -> Outputs:
    """Outputs of all prompts, interleaved.

    Whoever stops early closes this generator, which aborts what still runs.
    """
    ending = _Ending()
    streams = [_run_prompt(service, job, index, ending) for index in range(len(job.prompts))]
    return streams[0] if len(streams) == 1 else _merge(streams, ending)


@dataclass
class _Ending:
    """Why prompts of a request end early: the client has left, unless another of them failed."""

    has_failed: bool = False


async def _run_prompt(service: Service, job: Job, index: int, ending: _Ending) -> Outputs:
    request_id = f"{job.id}-{index}"
    outputs = _outputs(service, job, index, request_id)
    asked = Asked(request_id, job.model, job.prompts[index], job.params)
    watch = RequestWatch(service.metrics, asked, service.reporters)
    service.running.add(request_id)
    counted = False
    try:
        async with aclosing(outputs):
            async for output in outputs:
                _check(output)
                count_tokens(_num_tokens(output, begins=not counted))
                counted = True
                watch.observe(output)
                yield index, output
                watch.handed_on(output)  # whoever streams comes back when it has sent it
    except InvalidRequest as error:
        watch.drop()
        raise in_words_of(job.form, error) from error
    except Overloaded:
        watch.drop()
        raise
    except DeadlineExceeded:
        watch.close("timeout")
        raise
    except Exception:
        watch.close("error")
        raise
    finally:
        service.running.discard(request_id)
        watch.close("abort", client_left=not ending.has_failed)  # if it has not ended


def _outputs(
    service: Service, job: Job, index: int, request_id: str
) -> AsyncGenerator[RequestOutput, None]:
    """Those of the engine for one prompt."""
    engine, prompt = service.engine, job.prompts[index]
    how: _How = {
        "priority": job.priority,
        "cache_salt": job.cache_salt,
        "terms": job.terms(index),
    }
    if job.beams is None:
        return engine.generate(prompt, job.params, request_id, **how)
    return _only(engine.beam_search(prompt, job.beams, request_id, **how))


class _How(TypedDict):
    """What the engine is told of a prompt beside its parameters."""

    priority: int
    cache_salt: str
    terms: Terms


async def _only(search: Awaitable[RequestOutput]) -> AsyncGenerator[RequestOutput, None]:
    """The one output of a search."""
    yield await search


def _num_tokens(output: RequestOutput, *, begins: bool) -> int:
    """Tokens that an output brings, and with the first those of its prompt."""
    num_new = sum(len(sequence.token_ids) for sequence in output.outputs)
    return num_new + (len(output.prompt_token_ids) if begins else 0)


def _check(output: RequestOutput) -> None:
    for sequence in output.outputs:
        if sequence.impossible:
            raise InvalidRequest(str(sequence.error), "structured_outputs")
        if sequence.finish_reason == "timeout":
            raise DeadlineExceeded(LATE)
        if sequence.finish_reason == "error":
            told = NO_NUMBERS if sequence.error == NO_NUMBERS else None
            raise GenerationFailed(f"{output.request_id}: {sequence.error}", told)


async def _merge(streams: Sequence[Outputs], ending: _Ending) -> Outputs:
    """Items of all streams as they come; the first error of any ends them all."""
    queue: _Queue = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        for _ in streams:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    ending.has_failed = True
                    raise item
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


_Queue = asyncio.Queue[tuple[int, RequestOutput] | Exception | None]
"""Outputs, errors, and None at the end of each stream."""


async def _pump(stream: Outputs, queue: _Queue) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait(item)
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
