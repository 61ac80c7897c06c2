"""From texts as users write them to checked tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Encoding

from paged.models.tokenizer import Tokenizer
from paged.runtime.errors import InvalidRequest
from paged.runtime.front import Prompt, check_ids, take_apart
from paged.runtime.long_text import LONGEST_TOKEN


class Tokens(NamedTuple):
    """A text, or two read as one: its tokens, and of which of the two each is (0 or 1)."""

    token_ids: list[int]
    types: list[int]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Makes tokens for one model. Safe to use from several threads.

    Wherever `truncate` may be given, it is the most tokens a text may keep, special ones included;
    those behind are dropped. -1 stands for `max_model_len`; None refuses a text that is longer.

    Attributes:
        tokenizer: None if the engine takes token ids only.
        max_model_len: most tokens of a text.
        vocab_size: token ids are below it.
        lowercase: texts are put in lower case first.
    """

    tokenizer: Tokenizer | None
    max_model_len: int
    vocab_size: int
    lowercase: bool = False

    def texts(
        self,
        prompts: Sequence[Prompt],
        truncate: int | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[Tokens]:
        """Tokens of each prompt. Raises InvalidRequest if any cannot be computed."""
        limit = self._limit(truncate)
        parts = [take_apart(prompt, "") for prompt in prompts]
        written = [part.text for part in parts if part.token_ids is None and part.text is not None]
        encoded = iter(self._texts(written, limit, add_special_tokens))
        return [
            self._checked(
                next(encoded) if part.token_ids is None else _of_one_type(part.token_ids[:limit])
            )
            for part in parts
        ]

    def pairs(self, pairs: Sequence[tuple[str, str]], truncate: int | None = None) -> list[Tokens]:
        """Tokens of pairs of texts, each read as one. Of two that are too long the longer is cut.

        Raises InvalidRequest if any cannot be computed.
        """
        room = self._room(self._limit(truncate), is_pair=True)
        flat = self._encode([text for pair in pairs for text in pair], room is not None)
        both = zip(flat[::2], flat[1::2], strict=True)
        cut = [_cut([first, second], room) for first, second in both]
        return [self._checked(self._finished(first, second)) for first, second in cut]

    def _texts(self, texts: list[str], limit: int | None, add_special_tokens: bool) -> list[Tokens]:
        room = self._room(limit, is_pair=False) if add_special_tokens and texts else limit
        cut = [_cut([each], room)[0] for each in self._encode(texts, room is not None)]
        return [self._finished(each, None, add_special_tokens) for each in cut]

    def _limit(self, truncate: int | None) -> int | None:
        if truncate is None:
            return None
        if truncate != -1 and not 1 <= truncate <= self.max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be between 1 and {self.max_model_len}, or -1 for "
                f"that, got {truncate}",
                "truncate_prompt_tokens",
            )
        return self.max_model_len if truncate == -1 else truncate

    def _room(self, limit: int | None, *, is_pair: bool) -> int | None:
        """What a limit leaves to tokens that are not special."""
        if limit is None or self.tokenizer is None:
            return limit
        special = self.tokenizer.backend.num_special_tokens_to_add(is_pair)
        if limit <= special:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {limit}, and this model adds {special} special tokens; "
                f"use at least {special + 1}",
                "truncate_prompt_tokens",
            )
        return limit - special

    def _encode(self, texts: list[str], is_cut: bool) -> list[Encoding]:
        """Texts without special tokens. What cannot fit is found, or cut, before it costs time."""
        if not texts:
            return []
        if self.tokenizer is None:
            raise InvalidRequest(
                "the engine was started with skip_tokenizer_init and takes no text; send token ids",
                "input",
            )
        allowed = LONGEST_TOKEN * self.max_model_len
        longest = max(map(len, texts))
        if longest > allowed and not is_cut:
            raise self._too_long(f"{longest} characters")
        shown = [text[:allowed].lower() if self.lowercase else text[:allowed] for text in texts]
        try:
            return self.tokenizer.backend.encode_batch_fast(shown, add_special_tokens=False)
        except TypeError:  # what the library says of text that UTF-8 cannot hold
            raise InvalidRequest("the input holds lone surrogates", "input") from None

    def _finished(
        self, first: Encoding, second: Encoding | None, add_special_tokens: bool = True
    ) -> Tokens:
        """Put the special tokens of the model around one text or two."""
        assert self.tokenizer is not None, "who encoded a text has a tokenizer"
        process: Callable[..., Encoding] = self.tokenizer.backend.post_process
        whole = process(first, second, add_special_tokens)
        return Tokens(whole.ids, whole.type_ids)

    def _checked(self, tokens: Tokens) -> Tokens:
        ids = tokens.token_ids
        if not ids:
            raise InvalidRequest("the input is empty; it must hold at least one token", "input")
        if len(ids) > self.max_model_len:
            raise self._too_long(f"{len(ids)} tokens")
        check_ids(ids, self.vocab_size, "input")
        return tokens

    def _too_long(self, size: str) -> InvalidRequest:
        return InvalidRequest(
            f"This model's maximum context length is {self.max_model_len} tokens, and an input has "
            f"{size}. Shorten it, or have it cut with truncate_prompt_tokens.",
            "input_tokens",
        )


def _of_one_type(token_ids: list[int]) -> Tokens:
    return Tokens(token_ids, [0] * len(token_ids))


def _cut(encodings: list[Encoding], room: int | None) -> list[Encoding]:
    """One encoding or two, of at most `room` tokens together; the longer one loses tokens first."""
    if room is None:
        return encodings
    *shorter, longer = sorted(encodings, key=lambda each: len(each.ids))
    for each in shorter:
        kept = min(len(each.ids), room // 2)
        each.truncate(kept)
        room -= kept
    longer.truncate(room)
    return encodings
