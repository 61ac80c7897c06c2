"""What callers get back, with vLLM's names and meanings.

The records are msgspec structs, for a server makes thousands a second. Nothing in them leads back
to them, so the garbage collector, which walks more the more there is made, need not know them.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from paged.runtime.messages import Refusal


class Logprob(NamedTuple):
    """One candidate token at one position.

    Attributes:
        logprob: log-probability before temperature, penalties and biases.
        rank: 1 for the most likely token.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""The chosen token and the most likely ones at one position, by token id."""


class CompletionOutput(Struct, gc=False):
    """One sequence of a request.

    Attributes:
        index: 0 to n - 1.
        text: the output text, whole or new since the last output (see RequestOutputKind).
        token_ids: likewise, token ids.
        cumulative_logprob: sum of the chosen tokens' log-probabilities; None if not asked for.
        logprobs: an entry per entry of token_ids; None if not asked for.
        finish_reason: "stop", "length", "abort", "timeout", "refused" or "error"; None while it
            runs.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence.
        error: what went wrong, when finish_reason is "error".
        impossible: whether that is that what was asked for cannot be had.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    impossible: bool = False

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(Struct, gc=False):
    """Times of a request, in seconds on the clock of `time.time` (None: not yet).

    Attributes:
        arrival_time: when the request came in.
        first_scheduled_time: when its first token entered a step.
        first_token_time: when its first output token was read.
        finished_time: when its last sequence ended.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


class RequestOutput(Struct, gc=False):
    """A request's state, final or streamed.

    Attributes:
        request_id: unique in the engine.
        prompt: the prompt's text; None if it came as token ids.
        prompt_token_ids: the prompt.
        prompt_logprobs: per prompt token, None for the first; None if not asked for.
        outputs: its sequences, by index.
        finished: every sequence has ended.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        metrics: times.
        read_time: when its newest tokens came from the device; seconds, `time.monotonic`.
        refusal: why it was not taken, if it was not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    read_time: float | None = None
    refusal: Refusal | None = None


def join_deltas(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """Two successive DELTA outputs of a request as one."""
    outputs = {output.index: output for output in older.outputs}
    for output in newer.outputs:
        before = outputs.get(output.index)
        outputs[output.index] = output if before is None else _joined(before, output)
    return replace(
        newer,
        outputs=[outputs[index] for index in sorted(outputs)],
        prompt_logprobs=older.prompt_logprobs or newer.prompt_logprobs,
    )


def _joined(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    logprobs = newer.logprobs
    if older.logprobs is not None and logprobs is not None:
        logprobs = older.logprobs + logprobs
    return replace(
        newer,
        text=older.text + newer.text,
        token_ids=older.token_ids + newer.token_ids,
        logprobs=logprobs,
    )
