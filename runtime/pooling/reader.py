"""From texts as users write them to checked tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Encoding

from paged.models.tokenizer import Tokenizer
from paged.runtime.errors import InvalidRequest
from paged.runtime.front import Prompt, check_ids, take_apart
from paged.runtime.long_text import LONGEST_TOKEN
from paged.runtime.pooling.frame import Frame
from paged.runtime.pooling.whole import check_whole

# Characters that are encoded at a time: what the tokenizer makes of them takes some 20 MB.
_PORTION = 2**18


class Tokens(NamedTuple):
    """A text, or two read as one: its tokens, and of which of the two each is (0 or 1)."""

    token_ids: list[int]
    types: list[int]


class _Read(NamedTuple):
    """A text as it is encoded, without special tokens; `ids` are its tokens."""

    encoding: Encoding
    ids: list[int]


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
        room = self._room(limit, is_pair=False) if add_special_tokens and written else limit
        encoded = self._encode(written, room is not None)
        framed = self._framing(room, add_special_tokens=add_special_tokens)
        return [
            self._checked(
                framed(next(encoded)) if part.token_ids is None else _one(part.token_ids[:limit])
            )
            for part in parts
        ]

    def pairs(self, pairs: Sequence[tuple[str, str]], truncate: int | None = None) -> list[Tokens]:
        """Tokens of pairs of texts, each read as one. Of two that are too long the longer is cut.

        Raises InvalidRequest if any cannot be computed.
        """
        room = self._room(self._limit(truncate), is_pair=True)
        encoded = self._encode(_without_repetition(pairs), room is not None)
        framed = self._framing(room)
        tokens, first, read = [], None, None
        for query, _ in pairs:
            if read is None or query != first:
                first, read = query, next(encoded)
            tokens.append(self._checked(framed(read, next(encoded))))
        return tokens

    def _limit(self, truncate: int | None) -> int | None:
        check_whole("truncate_prompt_tokens", truncate)
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

    def _encode(self, texts: list[str], is_cut: bool) -> Iterator[_Read]:
        """Texts without special tokens, a portion at a time.

        What cannot fit is found, or cut, before it costs time.
        """
        if not texts:
            return
        if self.tokenizer is None:
            raise InvalidRequest(
                "the engine was started with skip_tokenizer_init and takes no text; send token ids",
                "input",
            )
        allowed = LONGEST_TOKEN * self.max_model_len
        longest = max(map(len, texts))
        if longest > allowed and not is_cut:
            raise self._too_long(f"{longest} characters")
        for portion in _portions(texts, allowed):
            shown = [text.lower() for text in portion] if self.lowercase else portion
            try:
                encoded = self.tokenizer.backend.encode_batch_fast(shown, add_special_tokens=False)
            except TypeError:  # what the library says of text that UTF-8 cannot hold
                raise InvalidRequest("the input holds lone surrogates", "input") from None
            yield from (_Read(each, each.ids) for each in encoded)

    def _framing(
        self, room: int | None, *, add_special_tokens: bool = True
    ) -> Callable[..., Tokens]:
        """A function that cuts a text or two to `room` tokens, and puts the special ones around."""
        frames: dict[tuple[bool, ...], Frame] = {}

        def framed(*texts: _Read) -> Tokens:
            assert self.tokenizer is not None, "who encoded a text has a tokenizer"
            empty = tuple(not text.ids for text in texts)
            if empty not in frames:
                frames[empty] = Frame.learn(
                    self.tokenizer.backend,
                    [text.encoding for text in texts],
                    add_special_tokens=add_special_tokens,
                )
            return Tokens(*frames[empty].around(_cut([text.ids for text in texts], room)))

        return framed

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


def _one(token_ids: list[int]) -> Tokens:
    """A text that came as token ids."""
    return Tokens(token_ids, [0] * len(token_ids))


def _without_repetition(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """All texts in their order, but of a query that stands before many documents only one."""
    texts: list[str] = []
    last = None
    for query, document in pairs:
        texts += [document] if query == last else [query, document]
        last = query
    return texts


def _portions(texts: Sequence[str], longest: int) -> Iterator[list[str]]:
    """Texts, cut to `longest` characters, those of about `_PORTION` at a time."""
    portion: list[str] = []
    size = 0
    for text in texts:
        portion.append(text[:longest])
        size += len(portion[-1])
        if size >= _PORTION:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _cut(texts: list[list[int]], room: int | None) -> list[list[int]]:
    """One text or two, of at most `room` tokens together; the longer one loses tokens first."""
    if room is None:
        return texts
    if len(texts) == 1:
        return [texts[0][:room]]
    first, second = texts
    shorter = min(len(first), len(second), room // 2)
    is_first = len(first) <= len(second)
    kept = (shorter, room - shorter) if is_first else (room - shorter, shorter)
    return [text[:most] for text, most in zip(texts, kept, strict=True)]
