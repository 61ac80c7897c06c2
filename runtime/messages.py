"""What passes between the front (text, HTTP) and the engine core (tokens, device).

The front tokenises, detokenises and applies stop strings; the core knows token ids alone. Both
sides may live in one process or in two: these records are plain msgspec structs, and those that
come by the hundred travel without the names of their fields.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from paged.runtime.sampling_params import SamplingParams

NO_NUMBERS = "the model's scores for the next token are no numbers (NaN or infinite)"
"""The error of a sequence that ends because of it, and ends alone."""


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """On which terms a request is to be taken; by default at once and for as long as it takes.

    Attributes:
        deadline: seconds, `time.monotonic`, which all processes of a machine share; 0 for none.
        num_sequences: for how many the queue must have room: those of all prompts that came
            together, if this is the first of them. 0 if that was asked before or is not to be.
        num_tokens: the prompt tokens of these.
    """

    deadline: float = 0.0
    num_sequences: int = 0
    num_tokens: int = 0


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Why a request was not taken.

    Attributes:
        cause: "queue" or "tokens", of which too many wait; "deadline", which would pass; "size", by
            which it could never be taken.
        message: for the user.
        retry_after: seconds until it may be taken; 0 if it never is, or its time is over.
    """

    cause: str
    message: str
    retry_after: float


NO_TERMS = Terms()


class EngineRequest(msgspec.Struct, frozen=True):
    """A validated request.

    Attributes:
        request_id: unique in the engine while the request lives.
        prompt_token_ids: 1 to max_model_len - 1 ids, all in the vocabulary.
        params: validated; max_tokens is set.
        priority: lower first, under the priority policy.
        arrival_time: seconds, `time.time`.
        cache_salt: keeps prefix cache entries apart; "" shares.
        grammar: that the output must follow, as `paged.runtime.grammar` writes it; "" for none.
        bad_words: token sequences that the output must not hold, of two tokens or more each.
        terms: on which it is to be taken.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str = ""
    grammar: str = ""
    bad_words: list[list[int]] = []
    terms: Terms = NO_TERMS


class Candidates(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position.

    Attributes:
        token: the chosen (or given) token.
        logprob, rank: its own.
        top_tokens, top_logprobs: the most likely ones asked for, best first.
    """

    token: int
    logprob: float
    rank: int
    top_tokens: list[int]
    top_logprobs: list[float]


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """News of one sequence from one step.

    Attributes:
        request_id, index: which sequence.
        token_ids: new tokens (the one that ended it included).
        logprobs: an entry per new token, if asked for.
        prompt_logprobs: entries for prompt positions 1 onwards, all at once, with the first news
            of sequence 0, if asked for.
        finish_reason: set on the last news: "stop", "length", "abort", "timeout" when its deadline
            has passed, "refused", or "error".
        stop_reason: the stop token id that ended it; None for end-of-sequence.
        error: what went wrong: with the engine when finish_reason is "error", with this sequence
            alone when it is "abort".
        ended_by_text: whether the last token belongs to the text although finish_reason is "stop":
            a grammar was complete with it.
        num_cached_tokens: prompt tokens found in the prefix cache.
        first_scheduled_time: seconds, `time.time`.
        read_time: when the tokens came from the device; seconds, `time.monotonic`, which all
            processes of a machine share. None if there are none.
        refusal: why, when finish_reason is "refused".
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[Candidates] | None = None
    prompt_logprobs: list[Candidates] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None
    ended_by_text: bool = False
    read_time: float | None = None
    refusal: Refusal | None = None


class Saving(NamedTuple):
    """How far a stop has come with the pages that it writes to disk.

    Attributes:
        num_done, num_pages: those that it has written, and all.
        seconds_left: after which it gives up.
    """

    num_done: int
    num_pages: int
    seconds_left: float


class Distribution(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Values counted by size; see `paged.runtime.step_record` for the bounds.

    Attributes:
        counts: values up to each bound and above the one before, then those above all; () for none.
        total: their sum.
    """

    counts: tuple[int, ...] = ()
    total: float = 0.0


class StepStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is known of the steps so far.

    Attributes:
        seconds: a step's time, by bucket.
        host_seconds: the host's time in a step.
        num_tokens: tokens in a step.
        num_places: counter, places of their buckets; those without a token are padding.
    """

    seconds: dict[str, Distribution] = {}
    host_seconds: Distribution = Distribution()
    num_tokens: Distribution = Distribution()
    num_places: int = 0


class TransferStats(msgspec.Struct, frozen=True, array_like=True):
    """What is known of prompts that another engine computes; counters, but for the first three.

    Attributes:
        num_connected: prefill engines that can be asked.
        num_under_way: prompts that they compute for this one.
        num_served: decode engines that may ask this one.
        outcomes: prompts asked for, by how that ended.
        bytes_received: of pages that were handed over.
        seconds: that prompts have been waited for, all together.
        served: prompts of decode engines, by how they ended.
        bytes_sent: of their pages.
    """

    num_connected: int = 0
    num_under_way: int = 0
    num_served: int = 0
    outcomes: dict[str, int] = {}
    bytes_received: int = 0
    seconds: float = 0.0
    served: dict[str, int] = {}
    bytes_sent: int = 0


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot of an engine, for metrics and logs. Counters only grow; 0 is what it has not.

    Attributes:
        num_running, num_waiting: sequences, or texts that are embedded or scored.
        num_deferred: those waiting ones that wait for a grammar, or for pages on disk or of a
            prefill engine.
        kv_cache_usage: share of pages in use by sequences, 0 to 1.
        num_pages, num_free_pages, num_cached_pages, page_size: the pool.
        kv_waste: share of the token places in used pages that hold no token, 0 to 1.
        prompt_tokens, generation_tokens: counters, tokens computed and tokens sampled.
        prompt_tokens_admitted: counter, tokens of all prompts begun, computed or not.
        prompt_tokens_cached: counter, those of them that need not be computed.
        prefix_cache_queries, prefix_cache_hits: counters, prompt tokens looked up in pages.
        host_queries, host_hits: counters, those not found there, looked up in host memory, and
            those loaded from it.
        num_host_pages, num_used_host_pages: pages in host memory, and those that hold something.
        host_bytes_saved, host_bytes_loaded: counters, bytes that went there and that came back.
        num_disk_pages: pages on disk.
        disk_pages_read, disk_pages_left_out: counters, pages that came back from there, and those
            that the disk was too slow to take.
        num_preemptions: counter.
        num_steps: counter.
        compiles_after_warmup: counter; 0 unless something is wrong.
        bytes_per_page: of the pool.
        steps: how long and how full they were.
        room: sequences that the queue would take now; None for any number.
        retry_after: seconds until one more is likely to be taken.
        wait_seconds, long_wait_seconds: that a request waits for its turn by the rates of late; the
            latter in the lane of long ones.
        waiting_tokens: prompt tokens that are yet to be computed.
        num_running_long, num_waiting_long: those of the sequences that are in that lane.
        refused: counters, requests that were not taken, by cause.
        num_timeouts: counter, requests whose deadline passed while they waited or ran.
        transfer: prompts that another engine computes.
        num_restarts: counter, engines that have followed one that died, after which the other
            counters begin at 0.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    kv_cache_usage: float = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    page_size: int = 0
    kv_waste: float = 0
    prompt_tokens: int = 0
    prompt_tokens_admitted: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    host_queries: int = 0
    host_hits: int = 0
    num_host_pages: int = 0
    num_used_host_pages: int = 0
    host_bytes_saved: int = 0
    host_bytes_loaded: int = 0
    num_disk_pages: int = 0
    disk_pages_read: int = 0
    disk_pages_left_out: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    compiles_after_warmup: int = 0
    bytes_per_page: int = 0
    steps: StepStats = StepStats()
    room: int | None = None
    retry_after: float = 1.0
    wait_seconds: float = 0.0
    long_wait_seconds: float = 0.0
    waiting_tokens: int = 0
    num_running_long: int = 0
    num_waiting_long: int = 0
    refused: dict[str, int] = {}
    num_timeouts: int = 0
    transfer: TransferStats = TransferStats()
    num_restarts: int = 0
