"""The way in: prompts and parameters as users write them, checked and made into engine requests.

Every check that depends on the model is here, so that nothing invalid reaches the core. Messages
give the numbers, never the input itself, which may be huge or private.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, NamedTuple, NotRequired, TypedDict

from paged.models.chat_template import ChatTemplateError, Message
from paged.models.tokenizer import Tokenizer
from paged.runtime.errors import InvalidRequest
from paged.runtime.grammar import grammar_of
from paged.runtime.messages import EngineRequest
from paged.runtime.sampling_params import SamplingParams


class TextPrompt(TypedDict):
    """A prompt to be tokenised."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A tokenised prompt; `prompt`, if given, is its text and only passed on to the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_MAX_SALT = 1024
_MAX_WORD = 64


class Prepared(NamedTuple):
    """A request ready for the core, and its prompt's text (None if it came as token ids)."""

    request: EngineRequest
    prompt: str | None


class Parts(NamedTuple):
    """A prompt taken apart; token_ids is None for text yet to be tokenised."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str


class BadWords(NamedTuple):
    """Words as tokens: those of one, and those of several."""

    single: list[int]
    longer: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Front:
    """Makes engine requests for one model. Safe to use from several threads.

    Attributes:
        tokenizer: None if the engine takes token ids only.
        max_model_len: tokens of prompt and output together.
        vocab_size: token ids are below it.
        max_logprobs: most log-probabilities at a position.
        default_params: for requests without parameters.
        eos_token_ids: tokens that end an answer.
        has_priorities: whether the scheduler heeds priorities.
    """

    tokenizer: Tokenizer | None
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    default_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    has_priorities: bool = False

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Prepared:
        """One request. Raises InvalidRequest if it can never run."""
        return self.prepare_all([request_id], [prompt], [params], [priority], cache_salt)[0]

    def prepare_all(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        priorities: Sequence[int],
        cache_salt: str = "",
    ) -> list[Prepared]:
        """Many requests, tokenised together. Raises InvalidRequest if any can never run."""
        arrival = time.time()
        parts = self._tokenised([take_apart(prompt, cache_salt) for prompt in prompts])
        prepared = []
        for each in zip(request_ids, parts, params, priorities, strict=True):
            request_id, part, wanted, priority = each
            assert part.token_ids is not None
            if not part.token_ids:
                raise InvalidRequest(
                    "the prompt is empty; it must hold at least one token", "prompt"
                )
            # First: a prompt that is too long need not be looked through.
            resolved, words = self._resolve(wanted, len(part.token_ids))
            check_ids(part.token_ids, self.vocab_size, "prompt")
            self._check_priority(priority)
            _check_text(request_id, "request_id")
            _check_salt(part.cache_salt)
            request = EngineRequest(
                request_id=request_id,
                prompt_token_ids=part.token_ids,
                params=resolved,
                priority=priority,
                arrival_time=arrival,
                cache_salt=part.cache_salt,
                grammar=self._grammar(wanted),
                bad_words=words.longer,
            )
            prepared.append(Prepared(request, part.text))
        return prepared

    def chat_prompts(
        self, conversations: Sequence[Sequence[Message]], **template: Any
    ) -> list[TokensPrompt]:
        """Conversations as prompts, by the model's chat template.

        Args:
            template: keywords of `Tokenizer.apply_chat_template`.

        Raises:
            InvalidRequest: there is no tokenizer or template, or the template refuses.
        """
        if self.tokenizer is None:
            raise InvalidRequest(
                "chat needs a tokenizer; the engine was started with skip_tokenizer_init",
                "messages",
            )
        render = self.tokenizer.apply_chat_template
        try:
            texts = [render(messages, **template) for messages in conversations]
        except ChatTemplateError as error:
            raise InvalidRequest(str(error), "messages") from error
        # Templates write the special tokens themselves.
        encoded = self._encode(texts, add_special_tokens=False)
        return [
            TokensPrompt(prompt=text, prompt_token_ids=token_ids)
            for text, token_ids in zip(texts, encoded, strict=True)
        ]

    def _encode(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        assert self.tokenizer is not None
        encode = self.tokenizer.backend.encode_batch_fast
        try:
            return [each.ids for each in encode(texts, add_special_tokens=add_special_tokens)]
        except TypeError:  # what the library says of text that UTF-8 cannot hold
            raise InvalidRequest("the prompt holds lone surrogates", "prompt") from None

    def _tokenised(self, parts: list[Parts]) -> list[Parts]:
        texts = [part.text for part in parts if part.token_ids is None and part.text is not None]
        if not texts:
            return parts
        if self.tokenizer is None:
            raise InvalidRequest(
                "the engine was started with skip_tokenizer_init and takes no text; "
                'send {"prompt_token_ids": [...]}',
                "prompt",
            )
        encoded = iter(self._encode(texts))
        return [
            part._replace(token_ids=next(encoded)) if part.token_ids is None else part
            for part in parts
        ]

    def _check_priority(self, priority: int) -> None:
        if not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
            raise InvalidRequest("priority must be a 64-bit integer", "priority")
        if priority and not self.has_priorities:
            raise InvalidRequest(
                f"priority is {priority}, but requests are served in order of arrival; start the "
                "engine with --scheduling-policy priority (or lanes)",
                "priority",
            )

    def _resolve(
        self, params: SamplingParams | None, num_prompt_tokens: int
    ) -> tuple[SamplingParams, BadWords]:
        """Checked parameters with max_tokens set; grammars and long words travel beside them."""
        room = self.max_model_len - num_prompt_tokens
        explicit = params is not None and params.max_tokens is not None
        params = self.default_params if params is None else params
        wanted = params.max_tokens
        if room < 1 or (explicit and wanted is not None and wanted > room):
            raise self._too_long(num_prompt_tokens, wanted)
        self._check_params(params)
        words = self._tokens_of(params.bad_words or ())
        if params.bad_words:
            banned = [*(params.banned_token_ids or ()), *words.single]
            params = replace(params, banned_token_ids=banned or None, bad_words=None)
        max_tokens = room if wanted is None else min(wanted, room)
        if max_tokens == wanted and params.structured_outputs is None:
            return params, words
        return replace(params, max_tokens=max_tokens, structured_outputs=None), words

    def _grammar(self, params: SamplingParams | None) -> str:
        """What the output must follow; "" if it is free."""
        if params is None or params.structured_outputs is None:
            return ""
        if self.tokenizer is None:
            raise InvalidRequest(
                "structured outputs need a tokenizer; the engine was started with "
                "skip_tokenizer_init",
                "structured_outputs",
            )
        return grammar_of(params.structured_outputs, self.tokenizer, self.vocab_size)

    def _too_long(self, num_prompt_tokens: int, max_tokens: int | None) -> InvalidRequest:
        output = f"{max_tokens}" if max_tokens is not None else "at least 1"
        total = num_prompt_tokens + (max_tokens or 1)
        return InvalidRequest(
            f"This model's maximum context length is {self.max_model_len} tokens. However, you "
            f"requested {output} output tokens and your prompt contains {num_prompt_tokens} input "
            f"tokens, for a total of {'' if max_tokens else 'at least '}{total} tokens. Please "
            "reduce the length of the input prompt or the number of requested output tokens: see "
            "docs/failures.md#prompt-too-long.",
            "input_tokens",
        )

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.max_logprobs:
                raise InvalidRequest(
                    f"{name} must be at most {self.max_logprobs} (--max-logprobs), got {value}",
                    name,
                )
        if params.stop_strings and self.tokenizer is None:
            raise InvalidRequest(
                "stop strings need a tokenizer; the engine was started with skip_tokenizer_init",
                "stop",
            )
        for stop in params.stop_strings:
            _check_text(stop, "stop")
        check_ids(params.stop_token_ids or (), self.vocab_size, "stop_token_ids")
        check_ids(params.logit_bias or (), self.vocab_size, "logit_bias")
        check_ids(params.allowed_token_ids or (), self.vocab_size, "allowed_token_ids")
        check_ids(params.banned_token_ids or (), self.vocab_size, "banned_token_ids")
        ends = {*(params.stop_token_ids or ()), *self.eos_token_ids}
        if params.min_tokens and params.allowed_token_ids and {*params.allowed_token_ids} <= ends:
            raise InvalidRequest(
                "allowed_token_ids must hold one that does not end the output, for min_tokens is "
                f"{params.min_tokens}",
                "allowed_token_ids",
            )

    def _tokens_of(self, words: Sequence[str]) -> BadWords:
        """The tokens that stand for these words, alone and behind a space."""
        if not words:
            return BadWords([], [])
        if self.tokenizer is None:
            raise InvalidRequest(
                "bad_words need a tokenizer; the engine was started with skip_tokenizer_init",
                "bad_words",
            )
        for word in words:
            _check_text(word, "bad_words")
        spellings = [each for word in words for each in (word, f" {word.lstrip()}")]
        encoded = sorted(set(map(tuple, self._encode(spellings, add_special_tokens=False))))
        longest = max(map(len, encoded))
        if longest > _MAX_WORD:
            raise InvalidRequest(
                f"bad_words may have {_MAX_WORD} tokens each, one of them has {longest}",
                "bad_words",
            )
        single = [ids[0] for ids in encoded if len(ids) == 1]
        return BadWords(single, [list(ids) for ids in encoded if len(ids) > 1])


def take_apart(prompt: Prompt, cache_salt: str) -> Parts:
    """A prompt's text or token ids. Raises InvalidRequest if it is neither."""
    if isinstance(prompt, str):
        return Parts(prompt, None, cache_salt)
    if not isinstance(prompt, Mapping):
        return Parts(None, _integers(prompt), cache_salt)
    return _parts_of_mapping(prompt, cache_salt)


def _parts_of_mapping(prompt: Mapping[str, Any], cache_salt: str) -> Parts:
    unknown = [key for key in prompt if key not in _PROMPT_KEYS]
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    cache_salt = prompt.get("cache_salt", cache_salt)
    if unknown or not isinstance(text, str | None) or (text is None and token_ids is None):
        raise InvalidRequest(
            'a prompt given as a dict must hold "prompt" (text) or "prompt_token_ids" (integers), '
            'and may hold "cache_salt"',
            "prompt",
        )
    return Parts(text, None if token_ids is None else _integers(token_ids), cache_salt)


def check_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest for a token id that the model does not have."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
    raise InvalidRequest(
        f"Token id {wrong} is out of vocabulary: {param} takes ids from 0 to {vocab_size - 1}",
        param,
    )


def _check_text(value: Any, name: str) -> None:
    """Refuse what is no text, or text that UTF-8 cannot hold: it could not be hashed or sent."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string", name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} holds lone surrogates", name) from None


def _check_salt(cache_salt: Any) -> None:
    """Each sequence hashes it anew, so it must not be long."""
    _check_text(cache_salt, "cache_salt")
    if len(cache_salt) > _MAX_SALT:
        raise InvalidRequest(
            f"cache_salt may have {_MAX_SALT} characters, got {len(cache_salt)}", "cache_salt"
        )


def _integers(values: Any) -> list[int]:
    try:
        if isinstance(values, bytes | bytearray):  # text that nobody decoded
            raise TypeError
        return list(map(index, values))
    except TypeError:
        raise InvalidRequest(
            "a prompt must be text, a list of token ids, or a dict with either", "prompt"
        ) from None
