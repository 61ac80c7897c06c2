"""From the core's tokens to what callers read: text, stop strings, log-probabilities, times."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from paged.models.tokenizer import Tokenizer
from paged.runtime.detokenizer import Detokenizer
from paged.runtime.messages import (
    NO_NUMBERS,
    Candidates,
    EngineRequest,
    Refusal,
    SequenceOutput,
)
from paged.runtime.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams
from paged.runtime.stop_strings import StopMatcher, stop_pattern

logger = logging.getLogger(__name__)


class Processed(NamedTuple):
    """What a step means outside the core.

    Attributes:
        outputs: at most one for a request.
        aborts: sequences (request id, index) that a stop string ended; the core does not know yet.
    """

    outputs: list[RequestOutput]
    aborts: list[tuple[str, int]]


class _SequenceText:
    """Tokens in, visible text out: detokenising, then stop strings."""

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.match

    def push(self, token: int, *, armed: bool) -> str:
        return self._matcher.push(self._detokenizer.push(token), armed=armed)

    def finish(self, *, armed: bool) -> str:
        shown = self._matcher.push(self._detokenizer.finish(), armed=armed)
        return shown + self._matcher.flush()


@dataclass(eq=False)
class _Sequence:
    """A sequence's output so far; under DELTA, since it was last handed out.

    Attributes:
        text: None if the request wants token ids alone.
    """

    output: CompletionOutput
    text: _SequenceText | None
    num_tokens: int = 0


@dataclass(eq=False)
class _Request:
    """A live request."""

    request: EngineRequest
    prompt: str | None
    sequences: list[_Sequence]
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    read_time: float | None = None
    refusal: Refusal | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    news: dict[int, _Sequence] = field(default_factory=dict)  # of this step, by index

    @property
    def finished(self) -> bool:
        return None not in [sequence.output.finish_reason for sequence in self.sequences]


class OutputProcessor:
    """The live requests as their callers see them. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def add(self, request: EngineRequest, prompt: str | None) -> None:
        """Expect outputs of a request that the core has accepted."""
        params = request.params
        tokenizer = self._tokenizer if params.detokenize else None
        patterns = [stop_pattern(stop) for stop in params.stop_strings]
        sequences = []
        for index in range(params.n):
            text = None
            if tokenizer is not None:
                detokenizer = Detokenizer(
                    tokenizer,
                    request.prompt_token_ids,
                    skip_special_tokens=params.skip_special_tokens,
                )
                matcher = StopMatcher(patterns, include=params.include_stop_str_in_output)
                text = _SequenceText(detokenizer, matcher)
            sequences.append(_Sequence(_fresh(index, params), text))
        metrics = RequestMetrics(request.arrival_time)
        self._requests[request.request_id] = _Request(request, prompt, sequences, metrics)

    def process(self, news: Iterable[SequenceOutput]) -> Processed:
        """Take in a step's news. What is no longer expected is dropped."""
        now = time.time()
        changed: dict[str, _Request] = {}
        aborts = []
        for item in news:
            live = self._requests.get(item.request_id)
            if live is None or live.sequences[item.index].output.finish_reason is not None:
                continue
            changed[item.request_id] = live
            try:
                if self._take(live, item, now):
                    aborts.append((item.request_id, item.index))
            except Exception as error:
                # A tokenizer that fails on one request's tokens must not stop the others.
                logger.exception("Request %s failed in output processing", item.request_id)
                aborts += _fail(live, error)
        outputs = [self._report(live, now) for live in changed.values()]
        return Processed([output for output in outputs if output is not None], aborts)

    def _take(self, live: _Request, item: SequenceOutput, now: float) -> bool:
        """File the news of one sequence; True if the core must be told that it ended."""
        sequence = live.sequences[item.index]
        live.news[item.index] = sequence
        live.read_time, live.refusal = item.read_time, item.refusal
        if live.metrics.first_token_time is None:
            self._note_times(live, item, now)
        if item.index == 0:
            live.num_cached_tokens = item.num_cached_tokens or live.num_cached_tokens
        if item.prompt_logprobs is not None:
            scores = [self._logprobs(live, each) for each in item.prompt_logprobs]
            live.prompt_logprobs = [None, *scores]
        self._append(live, sequence, item)
        output = sequence.output
        if sequence.text is not None and sequence.text.stop_string is not None:
            output.finish_reason, output.stop_reason = "stop", sequence.text.stop_string
            return item.finish_reason is None
        output.finish_reason, output.stop_reason = item.finish_reason, item.stop_reason
        if item.error is not None:
            output.impossible = item.finish_reason == "abort" and item.error != NO_NUMBERS
            output.finish_reason, output.error = "error", item.error
        return False

    def _note_times(self, live: _Request, item: SequenceOutput, now: float) -> None:
        """Earlier outputs keep the times they were given: metrics are replaced, not changed."""
        scheduled = item.first_scheduled_time
        if live.metrics.first_scheduled_time is None and scheduled is not None:
            live.metrics = replace(live.metrics, first_scheduled_time=scheduled)
        if item.token_ids:
            live.metrics = replace(live.metrics, first_token_time=now)

    def _append(self, live: _Request, sequence: _Sequence, item: SequenceOutput) -> None:
        """Add tokens and their text, up to the end of a stop string."""
        params, output, text = live.request.params, sequence.output, sequence.text
        # The token that ended it is no part of the text, unless asked for.
        ended_by_token = item.finish_reason == "stop" and not item.ended_by_text
        hidden = bool(item.token_ids) and ended_by_token and not params.include_stop_str_in_output
        num_shown = len(item.token_ids) - hidden
        for position, token in enumerate(item.token_ids):
            output.token_ids.append(token)
            sequence.num_tokens += 1
            if item.logprobs is not None:
                self._append_logprob(live, output, item.logprobs[position])
            if text is not None and position < num_shown:
                output.text += text.push(token, armed=sequence.num_tokens >= params.min_tokens)
                if text.stop_string is not None:
                    return
        if text is not None and item.finish_reason is not None:
            output.text += text.finish(armed=sequence.num_tokens >= params.min_tokens)

    def _append_logprob(
        self, live: _Request, output: CompletionOutput, candidates: Candidates
    ) -> None:
        assert output.logprobs is not None, "the core sends log-probabilities if asked to"
        assert output.cumulative_logprob is not None
        output.logprobs.append(self._logprobs(live, candidates))
        output.cumulative_logprob += candidates.logprob

    def _logprobs(self, live: _Request, candidates: Candidates) -> TokenLogprobs:
        """The chosen token first, then the most likely ones."""
        text_of = None
        if self._tokenizer is not None and live.request.params.detokenize:
            text_of = self._tokenizer.token_text
        ranked = [(candidates.token, candidates.logprob, candidates.rank)]
        best = zip(candidates.top_tokens, candidates.top_logprobs, strict=True)
        ranked += [
            (token, logprob, rank)
            for rank, (token, logprob) in enumerate(best, start=1)
            if token != candidates.token
        ]
        return {
            token: Logprob(logprob, rank, text_of(token) if text_of else None)
            for token, logprob, rank in ranked
        }

    def _report(self, live: _Request, now: float) -> RequestOutput | None:
        """What the caller gets after this step; None if it wants the end alone."""
        finished = live.finished
        if finished:
            live.metrics = replace(live.metrics, finished_time=now)
            del self._requests[live.request.request_id]
        kind = live.request.params.output_kind
        news, live.news = live.news, {}
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        prompt_logprobs = live.prompt_logprobs
        if kind is RequestOutputKind.DELTA:
            live.prompt_logprobs = None
            outputs = [_take_delta(news[index], live.request.params) for index in sorted(news)]
        else:
            outputs = [_copy(sequence.output) for sequence in live.sequences]
        return RequestOutput(
            request_id=live.request.request_id,
            prompt=live.prompt,
            prompt_token_ids=live.request.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=finished,
            num_cached_tokens=live.num_cached_tokens,
            metrics=live.metrics,
            read_time=live.read_time,
            refusal=live.refusal,
        )


def _fail(live: _Request, error: Exception) -> list[tuple[str, int]]:
    """End what still runs of a request with an error; the sequences that ended so."""
    failed = [sequence for sequence in live.sequences if not sequence.output.finished()]
    for sequence in failed:
        output = sequence.output
        live.news[output.index] = sequence
        output.finish_reason, output.error = "error", f"{type(error).__name__}: {error}"
    return [(live.request.request_id, sequence.output.index) for sequence in failed]


def _fresh(index: int, params: SamplingParams) -> CompletionOutput:
    if params.logprobs is None:
        return CompletionOutput(index)
    return CompletionOutput(index, cumulative_logprob=0.0, logprobs=[])


def _take_delta(sequence: _Sequence, params: SamplingParams) -> CompletionOutput:
    """Hand out what is new and start afresh; the sum of log-probabilities and the end stay."""
    delta = sequence.output
    sequence.output = _fresh(delta.index, params)
    sequence.output.cumulative_logprob = delta.cumulative_logprob
    sequence.output.finish_reason = delta.finish_reason
    return delta


def _copy(output: CompletionOutput) -> CompletionOutput:
    """A snapshot: later tokens must not show in it."""
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return replace(output, token_ids=list(output.token_ids), logprobs=logprobs)
