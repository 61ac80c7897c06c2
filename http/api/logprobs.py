"""Log-probabilities in the three forms that replies have."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from paged.http.api.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from paged.http.engine import Tokenizer
from paged.runtime.outputs import CompletionOutput, Logprob, TokenLogprobs

# JSON has no infinities.
_LOWEST = -9999.0


@dataclass(frozen=True)
class TokenSpeller:
    """How tokens are written beside their log-probabilities.

    Attributes:
        tokenizer: knows their bytes, also those of half characters; None where there is none.
        as_ids: write `token_id:7`, from which the token can be told, in place of its text.
    """

    tokenizer: Tokenizer | None
    as_ids: bool

    def text(self, token_id: int, decoded: str | None) -> str:
        """What a token reads as, if it was decoded."""
        return f"token_id:{token_id}" if self.as_ids or decoded is None else decoded

    def top_logprob(self, token_id: int, entry: Logprob) -> TopLogprob:
        text = self.text(token_id, entry.decoded_token)
        known = self.tokenizer is not None and entry.decoded_token is not None
        spelled = self.tokenizer.token_bytes(token_id) if self.tokenizer and known else b""
        return TopLogprob(text, _finite(entry.logprob), list(spelled or text.encode()))


def chat_logprobs(
    sequence: CompletionOutput, num_top: int, speller: TokenSpeller
) -> ChatLogprobs | None:
    """An entry per token, each with exactly `num_top` candidates, most likely first."""
    if not sequence.logprobs:
        return None
    entries = []
    for token_id, candidates in zip(sequence.token_ids, sequence.logprobs, strict=True):
        chosen = speller.top_logprob(token_id, candidates[token_id])
        top = [speller.top_logprob(*item) for item in _by_rank(candidates)[:num_top]]
        entries.append(TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(entries)


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    speller: TokenSpeller,
    *,
    first_text: str = "",
    text_offset: int = 0,
) -> tuple[CompletionLogprobs, int]:
    """Lists with an entry per token, and where the text of the last one ends.

    The chosen token is always among the candidates.

    Args:
        token_ids: tokens of the text.
        logprobs: their candidates; None for the first token of a prompt.
        speller: writes tokens.
        first_text: what such a token reads as.
        text_offset: where the first token begins in the whole text.
    """
    tokens: list[str] = []
    lengths: list[int] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        if candidates is None:
            tokens.append(speller.text(token_id, first_text))
            lengths.append(len(first_text))
            chosen.append(None)
            top.append(None)
            continue
        decoded = candidates[token_id].decoded_token
        tokens.append(speller.text(token_id, decoded))
        lengths.append(len(tokens[-1] if decoded is None else decoded))
        chosen.append(_finite(candidates[token_id].logprob))
        top.append(_by_text(candidates, speller))
    *offsets, end = accumulate(lengths, initial=text_offset)
    return CompletionLogprobs(offsets, chosen, tokens, top), end


def prompt_logprobs(logprobs: Sequence[TokenLogprobs | None] | None) -> PromptLogprobs | None:
    """Candidates by token id, per prompt token; None if they were not asked for."""
    if logprobs is None:
        return None
    return [_prompt_entry(candidates) if candidates else None for candidates in logprobs]


def _prompt_entry(candidates: TokenLogprobs) -> dict[int, PromptLogprob]:
    return {
        token_id: PromptLogprob(_finite(entry.logprob), entry.rank, entry.decoded_token)
        for token_id, entry in candidates.items()
    }


def _by_text(candidates: TokenLogprobs, speller: TokenSpeller) -> dict[str, float]:
    """Most likely first. Of ids that read the same, as half characters do, the likelier counts."""
    texts: dict[str, float] = {}
    for token_id, entry in _by_rank(candidates):
        text = speller.text(token_id, entry.decoded_token)
        texts.setdefault(text, _finite(entry.logprob))
    return texts


def _by_rank(candidates: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(candidates.items(), key=lambda item: item[1].rank)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def _spelling(text: str) -> str:
    """A pattern of bytes that read as this text: each U+FFFD may stand for up to three of them
    that are no character, as tokens are that end within one."""

    def replaced(run: re.Match[str]) -> str:
        return f"[\ufffd\udc80-\udcff]{{{len(run[0])},{3 * len(run[0])}}}"

    return re.sub("\ufffd+", replaced, re.escape(text))


class TextLogprobs:
    """Which of an answer's tokens the texts consist of that were read out of it, one by one."""

    def __init__(self) -> None:
        self._entries: list[TokenLogprob] = []

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        """The answer's next tokens."""
        self._entries += entries

    def take(self, text: str) -> list[TokenLogprob]:
        """Those of the next text; tokens before it, as of marks, are left out.

        A text that is not what its tokens spell gets none, and leaves all to the next one.
        """
        if not self._entries:
            return []
        spelled = b"".join(bytes(entry.bytes) for entry in self._entries)
        escaped = spelled.decode(errors="surrogateescape")
        place = re.search(_spelling(text), escaped)
        if place is None:
            return []
        start, end = (len(escaped[:at].encode(errors="surrogateescape")) for at in place.span())
        ends = [*accumulate(len(entry.bytes) for entry in self._entries)]
        first, last = bisect_right(ends, start), bisect_left(ends, end) + 1
        found, self._entries = self._entries[first:last], self._entries[last:]
        return found
