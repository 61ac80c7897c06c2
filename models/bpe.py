"""What tokenizers that merge pairs have in common, whatever file their vocabulary is in.

Texts are cut into words first, for no token spans two of them; pairs are merged within.
"""

from __future__ import annotations

from collections.abc import Container

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A capital may begin a word within a word, and contractions stay with theirs.
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{ending}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{ending}"
    r"|{digits}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gpt2_words() -> pre_tokenizers.PreTokenizer:
    """As GPT-2 cuts them."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def gpt2_words_and_digits() -> pre_tokenizers.PreTokenizer:
    """As GPT-2, and each digit apart."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, gpt2_words()])


def three_digits() -> pre_tokenizers.PreTokenizer:
    """As GPT-4 and many since: numbers in threes."""
    return _split_words(_WORDS, digits=r"\p{N}{1,3}")


def one_digit() -> pre_tokenizers.PreTokenizer:
    """As GPT-4, and each digit apart."""
    return _split_words(_WORDS, digits=r"\p{N}")


def o200k_words() -> pre_tokenizers.PreTokenizer:
    """As GPT-4o, by capitals too."""
    return _split_words(_CASED_WORDS, digits=r"\p{N}{1,3}", ending=f"{_CONTRACTIONS}?")


def tekken_words() -> pre_tokenizers.PreTokenizer:
    """As Mistral's Tekken: by capitals, each digit apart, contractions as they come."""
    return _split_words(_CASED_WORDS, digits=r"\p{N}")


def _split_words(words: str, *, digits: str, ending: str = "") -> pre_tokenizers.PreTokenizer:
    pattern = words.replace("{digits}", digits).replace("{ending}", ending)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, bytes_only])


def pairs_of[Token: (str, bytes)](
    token: Token, vocab: Container[Token]
) -> list[tuple[Token, Token]]:
    """The pairs of tokens in `vocab` that together are `token`, the shortest left one first."""
    cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
    return [(left, right) for left, right in cuts if left in vocab and right in vocab]
