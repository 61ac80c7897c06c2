"""The flags that are worth turning, in the order that they are worth turning in.

First what bounds the memory (length, its share, sequences), then what bounds a step (its tokens),
then what saves work (prefix cache), and at last what costs precision (KV cache, weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paged.runtime.bench.results import Value

Values = Mapping[str, Value]
"""What each flag is now, by its field of `EngineConfig`; none of them left to a default."""

_LENGTHS = 256  # a longest sequence is rounded up to a multiple: the next workload differs a little
_MOST_UTILIZATION = 0.96  # the rest is the driver's, and what fragments
_LEAST_TOKENS = 16
_MOST_TOKENS = 65_536


@dataclass(frozen=True)
class Facts:
    """What bounds the search.

    Attributes:
        num_requests: of the workload.
        longest: tokens of its longest request, prompt and answer.
        on_gpu: memory is a share of a device's; else `kv_cache_memory_bytes` bounds it.
        free_bytes: of the host's memory, that a KV cache on a CPU may take; None if unknown.
        is_quantized: the checkpoint's weights are already of fewer bits.
    """

    num_requests: int
    longest: int
    on_gpu: bool
    free_bytes: int | None = None
    is_quantized: bool = False


Move = Callable[[Values, Facts], Values | None]
"""What to change next; None when there is nothing further in this direction."""


@dataclass(frozen=True)
class Lever:
    """A flag, and the directions in which it may be turned, each for as long as it gains.

    Attributes:
        name: what people call it.
        costs_precision: answers change by it.
    """

    name: str
    moves: tuple[Move, ...]
    costs_precision: bool = False


def _shorter(values: Values, facts: Facts) -> Values | None:
    wanted = -(-facts.longest // _LENGTHS) * _LENGTHS
    return {"max_model_len": wanted} if wanted < _int(values, "max_model_len") else None


def _more_memory(values: Values, facts: Facts) -> Values | None:
    if facts.on_gpu and values["kv_cache_memory_bytes"] is not None:
        return None  # which is all that counts then, and nobody checks against the GPU
    if facts.on_gpu:
        now = values["gpu_memory_utilization"]
        assert isinstance(now, float)
        more = round(now + 0.03, 2)
        return {"gpu_memory_utilization": more} if more <= _MOST_UTILIZATION else None
    twice = 2 * _int(values, "kv_cache_memory_bytes")
    fits = facts.free_bytes is None or twice <= facts.free_bytes // 2
    return {"kv_cache_memory_bytes": twice} if fits else None


def _more_sequences(values: Values, facts: Facts) -> Values | None:
    now = _int(values, "max_num_seqs")
    if now >= facts.num_requests:
        return None
    tokens = max(2 * now, _int(values, "max_num_batched_tokens"))
    return {"max_num_seqs": 2 * now, "max_num_batched_tokens": tokens}


def _fewer_sequences(values: Values, facts: Facts) -> Values | None:
    now = _int(values, "max_num_seqs")
    return {"max_num_seqs": now // 2} if now > 1 else None


def _more_tokens(values: Values, facts: Facts) -> Values | None:
    twice = 2 * _int(values, "max_num_batched_tokens")
    most = min(_MOST_TOKENS, _int(values, "max_num_seqs") * _int(values, "max_model_len"))
    return {"max_num_batched_tokens": twice} if twice <= most else None


def _fewer_tokens(values: Values, facts: Facts) -> Values | None:
    half = _int(values, "max_num_batched_tokens") // 2
    least = max(_LEAST_TOKENS, _int(values, "max_num_seqs"))
    return {"max_num_batched_tokens": half} if half >= least else None


def _other_caching(values: Values, facts: Facts) -> Values | None:
    return {"enable_prefix_caching": not values["enable_prefix_caching"]}


def _pages_of(dtype: str) -> Move:
    def move(values: Values, facts: Facts) -> Values | None:
        return {"kv_cache_dtype": dtype} if values["kv_cache_dtype"] != dtype else None

    return move


def _weights_of(kind: str) -> Move:
    def move(values: Values, facts: Facts) -> Values | None:
        if facts.is_quantized or values["quantization"] == kind:
            return None
        return {"quantization": kind}

    return move


LEVERS = (
    Lever("longest sequence", (_shorter,)),
    Lever("memory for pages", (_more_memory,)),
    Lever("sequences in a step", (_more_sequences, _fewer_sequences)),
    Lever("tokens in a step", (_more_tokens, _fewer_tokens)),
    Lever("prefix caching", (_other_caching,)),
    Lever("KV cache of 8 bits", (_pages_of("fp8"), _pages_of("int8")), costs_precision=True),
    Lever(
        "weights of fewer bits",
        (_weights_of("fp8"), _weights_of("int8"), _weights_of("int4")),
        costs_precision=True,
    ),
)


def _int(values: Values, name: str) -> int:
    value = values[name]
    assert isinstance(value, int)
    return value
