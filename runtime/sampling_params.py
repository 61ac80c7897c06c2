"""How a request wants its tokens chosen, with vLLM's names, defaults and meanings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from operator import index
from typing import Any

from paged.runtime.errors import ConfigError, InvalidRequest, Unsupported
from paged.runtime.structured_outputs import StructuredOutputsParams

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_TOKEN_RULES = 512
_GREEDY_BELOW = 1e-5
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 1e6
_INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids")
_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")


class RequestOutputKind(Enum):
    """What each `RequestOutput` of a stream holds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; numbers may come in numpy's types.

    Attributes:
        n: sequences to generate from the prompt.
        temperature: 0 is greedy; logits are divided by it.
        top_p: keep the smallest set of most likely tokens with at least this probability.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one.
        repetition_penalty: above 1 discourages tokens of the prompt and of the output.
        presence_penalty, frequency_penalty: subtracted from the logits of output tokens, once
            and per occurrence.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: only these can be chosen.
        banned_token_ids: these never are.
        bad_words: texts that the output must not hold, alone or behind a space, spelled as the
            tokenizer spells them: the engine bans the last token of each behind the others.
        seed: makes the tokens reproducible; sequence i of n uses seed + i.
        max_tokens: output tokens at most; None leaves it to the model's length.
        min_tokens: no end before this many output tokens.
        stop: strings that end the output; not part of it unless include_stop_str_in_output.
        stop_token_ids: token ids that end the output.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: return the chosen token's log-probability and those of this many most likely.
        prompt_logprobs: the same for the prompt's tokens.
        detokenize: False gives token ids alone; needs no tokenizer.
        skip_special_tokens: leave special tokens out of the text.
        output_kind: what each streamed output holds.
        structured_outputs: what form the output must have; it ends when that is complete.

    Raises:
        InvalidRequest: a value out of its range or of another type; names the field, the value
            and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _make_plain(self)
        _check_ranges(self)
        _check_stops(self)
        _check_structured(self)
        if self.n > 1 and self.greedy:
            raise InvalidRequest(
                f"n must be 1 when using greedy sampling (temperature 0), got {self.n}", "n"
            )
        if not self.spaces_between_special_tokens:
            raise Unsupported(
                "spaces_between_special_tokens=False is not supported",
                "spaces_between_special_tokens",
            )
        _check_rules(self)

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def effective_temperature(self) -> float:
        """0 for greedy; else within what float32 tells from greedy and from pure chance."""
        if self.greedy:
            return 0.0
        return min(max(self.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _make_plain(params: SamplingParams) -> None:
    """Values as Python's own numbers: whatever else came would fail in the middle of a step."""

    def convert(name: str, kind: str, make: Callable[[Any], object]) -> None:
        value = getattr(params, name)
        if value is None and name in _OPTIONAL:
            return
        try:
            object.__setattr__(params, name, make(value))
        except (AttributeError, OverflowError, TypeError):
            found = type(value).__name__
            raise InvalidRequest(f"{name} must be {kind}, got {found}", name) from None

    for name in _INTEGERS:
        convert(name, "an integer", index)
    for name in _NUMBERS:
        convert(name, "a number", _number)
    for name in _TOKEN_LISTS:
        if getattr(params, name) is not None:
            convert(name, "a list of token ids", lambda ids: [index(each) for each in ids])
    if params.logit_bias is not None:
        convert("logit_bias", "a dict of token ids to numbers", _biases)


def _number(value: Any) -> float:
    if not isinstance(value, Real):
        raise TypeError
    return float(value)


def _biases(value: Any) -> dict[int, float]:
    return {index(token): _number(bias) for token, bias in value.items()}


def _check_ranges(params: SamplingParams) -> None:
    def check(name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise InvalidRequest(f"{name} must be {allowed}, got {getattr(params, name)}", name)

    check("n", 1 <= params.n <= MAX_N, f"between 1 and {MAX_N}")
    check("temperature", 0 <= params.temperature < float("inf"), "a finite number of at least 0")
    check("top_p", 0 < params.top_p <= 1, "above 0 and at most 1")
    check("top_k", params.top_k >= -1, "-1 or 0 (off), or at least 1")
    check("min_p", 0 <= params.min_p <= 1, "between 0 and 1")
    check("repetition_penalty", 1e-6 <= params.repetition_penalty <= 1e6, "between 1e-6 and 1e6")
    for name in ("presence_penalty", "frequency_penalty"):
        check(name, -2 <= getattr(params, name) <= 2, "between -2 and 2")
    if params.seed is not None:
        check("seed", -(2**63) <= params.seed < 2**63, "a 64-bit integer")
    if params.max_tokens is not None:
        check("max_tokens", params.max_tokens >= 1, "at least 1")
        limit = f"between 0 and max_tokens ({params.max_tokens})"
        check("min_tokens", 0 <= params.min_tokens <= params.max_tokens, limit)
    check("min_tokens", params.min_tokens >= 0, "at least 0")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        check(name, value is None or value >= 0, "at least 0")
    for token, bias in (params.logit_bias or {}).items():
        if not -100 <= bias <= 100:
            raise InvalidRequest(
                f"logit_bias must be between -100 and 100, got {bias} for token {token}",
                "logit_bias",
            )


def _check_stops(params: SamplingParams) -> None:
    stops = params.stop_strings
    if not all(isinstance(stop, str) for stop in stops):
        raise InvalidRequest("stop must be a string or a list of strings", "stop")
    if any(stop == "" for stop in stops):
        raise InvalidRequest("stop must not hold an empty string", "stop")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop may hold {MAX_STOP_STRINGS} strings, got {len(stops)}", "stop")
    if stops and not params.detokenize:
        raise InvalidRequest("stop strings need detokenize=True", "stop")


def _check_rules(params: SamplingParams) -> None:
    """Each token that a request says something about takes a place on the device."""
    allowed = params.allowed_token_ids
    if allowed is not None and {*allowed} <= {*(params.banned_token_ids or ())}:
        raise InvalidRequest(
            "allowed_token_ids must hold one that is not banned", "allowed_token_ids"
        )
    names = ("allowed_token_ids", "banned_token_ids", "stop_token_ids", "logit_bias")
    num_rules = {name: len(getattr(params, name) or ()) for name in names}
    if sum(num_rules.values()) > MAX_TOKEN_RULES:
        raise InvalidRequest(
            f"{', '.join(names)} and bad_words may name {MAX_TOKEN_RULES} tokens together, "
            f"got {sum(num_rules.values())}",
            max(names, key=lambda name: num_rules[name]),
        )
    if not all(isinstance(word, str) and word.strip() for word in params.bad_words or ()):
        raise InvalidRequest("bad_words must be texts with more than spaces in them", "bad_words")
    if len(params.bad_words or ()) > MAX_TOKEN_RULES:
        raise InvalidRequest(f"bad_words may hold {MAX_TOKEN_RULES} texts", "bad_words")


def _check_structured(params: SamplingParams) -> None:
    name = "structured_outputs"
    value: object = params.structured_outputs
    if not isinstance(value, StructuredOutputsParams | None):
        found = type(value).__name__
        raise InvalidRequest(f"{name} must be StructuredOutputsParams, got {found}", name)


def with_model_defaults(defaults: dict[str, Any]) -> SamplingParams:
    """The parameters of a request that sets none, under a model's generation_config.json.

    Raises:
        ConfigError: a value out of its range.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    known = {name: defaults[name] for name in names if defaults.get(name) is not None}
    if defaults.get("max_new_tokens") is not None:
        known["max_tokens"] = defaults["max_new_tokens"]
    try:
        return SamplingParams(**known)
    except InvalidRequest as error:
        raise ConfigError(
            f"The model's generation_config.json, or what stands for it, asks for what cannot be: "
            f"{error}. Use --generation-config paged to do without it."
        ) from error
