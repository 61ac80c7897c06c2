"""A model's vocabulary as the library that follows grammars reads it."""

from __future__ import annotations

from collections.abc import Iterable

from llguidance import LLTokenizer, TokenizerWrapper

from paged.models.tokenizer import Tokenizer


def grammar_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]
) -> LLTokenizer:
    """All tokens, as bytes. Takes half a second for 49 thousand.

    Args:
        tokenizer: of the model.
        vocab_size: entries of its logits; those that the tokenizer does not know never come.
        eos_token_ids: at least one, all below vocab_size.
    """
    tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
    return _make(tokenizer, tokens, eos_token_ids)


def special_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """The special tokens alone, which is enough to check the names and ids in a grammar."""
    tokens = [b""] * vocab_size
    for token in tokenizer.special_ids:
        if token < vocab_size:
            tokens[token] = tokenizer.token_bytes(token)
    return _make(tokenizer, tokens, tokenizer.eos_token_ids or (0,))


def special_ids(tokenizer: Tokenizer, vocab_size: int) -> dict[str, int]:
    """The special tokens by their text."""
    ids = (token for token in tokenizer.special_ids if token < vocab_size)
    return {tokenizer.token_text(token): token for token in ids}


def _make(tokenizer: Tokenizer, tokens: list[bytes], eos_token_ids: Iterable[int]) -> LLTokenizer:
    eos = sorted(eos_token_ids)
    wrapper = TokenizerWrapper(_Vocabulary(tokenizer, tokens, eos))
    return LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=eos)


class _Vocabulary:
    """The attributes that the library looks for."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], eos: list[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = eos[0]
        self.bos_token_id = tokenizer.bos_token_id
        special = tokenizer.special_ids | frozenset(eos)
        self.special_token_ids = sorted(token for token in special if token < len(tokens))
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
