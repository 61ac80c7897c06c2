"""Log-probabilities in the three forms that replies have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from paged.http.api.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from paged.runtime.outputs import CompletionOutput, Logprob, TokenLogprobs

# JSON has no infinities.
_LOWEST = -9999.0


def chat_logprobs(sequence: CompletionOutput, num_top: int) -> ChatLogprobs | None:
    """An entry per token, each with exactly `num_top` candidates, most likely first."""
    if not sequence.logprobs:
        return None
    entries = []
    for token_id, candidates in zip(sequence.token_ids, sequence.logprobs, strict=True):
        chosen = _top_logprob(token_id, candidates[token_id])
        top = [_top_logprob(*item) for item in _by_rank(candidates)[:num_top]]
        entries.append(TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(entries)


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    *,
    first_text: str = "",
    text_offset: int = 0,
) -> CompletionLogprobs:
    """Lists with an entry per token; the chosen token is always among the candidates.

    Args:
        token_ids: tokens of the text.
        logprobs: their candidates; None for the first token of a prompt.
        first_text: what such a token reads as.
        text_offset: where the first token begins in the whole text.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        if candidates is None:
            tokens.append(first_text)
            chosen.append(None)
            top.append(None)
            continue
        tokens.append(_text(token_id, candidates[token_id]))
        chosen.append(_finite(candidates[token_id].logprob))
        top.append(_by_text(candidates))
    offsets = list(accumulate(map(len, tokens), initial=text_offset))[:-1]
    return CompletionLogprobs(offsets, chosen, tokens, top)


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


def _by_text(candidates: TokenLogprobs) -> dict[str, float]:
    """Most likely first. Of ids that read the same, as half characters do, the likelier counts."""
    texts: dict[str, float] = {}
    for token_id, entry in _by_rank(candidates):
        texts.setdefault(_text(token_id, entry), _finite(entry.logprob))
    return texts


def _by_rank(candidates: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(candidates.items(), key=lambda item: item[1].rank)


def _top_logprob(token_id: int, entry: Logprob) -> TopLogprob:
    text = _text(token_id, entry)
    return TopLogprob(text, _finite(entry.logprob), list(text.encode()))


def _text(token_id: int, entry: Logprob) -> str:
    return f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
