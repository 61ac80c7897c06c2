"""Texts, pairs and token ids, checked and cut."""

from __future__ import annotations

from typing import Any

import pytest

from paged.runtime.errors import InvalidRequest
from paged.runtime.pooling.reader import Tokens
from tests.runtime.pooling.pooling_fakes import (
    CLS,
    MAX_MODEL_LEN,
    SEP,
    VOCAB_SIZE,
    letter_tokenizer,
    reader,
)

A, B, C, D = 2, 3, 4, 5


def test_texts_get_the_models_special_tokens():
    assert reader().texts(["ab", ""]) == [
        Tokens([CLS, A, B, SEP], [0] * 4),
        Tokens([CLS, SEP], [0] * 2),
    ]
    assert reader().texts(["ab"], add_special_tokens=False) == [Tokens([A, B], [0, 0])]


def test_token_ids_stay_as_they_are():
    prompts: list[Any] = [[A, B], {"prompt_token_ids": [C]}, {"prompt": "d"}, "a"]
    tokens = reader().texts(prompts)
    assert [each.token_ids for each in tokens] == [[A, B], [C], [CLS, D, SEP], [CLS, A, SEP]]


def test_pairs_are_one_text_of_two_types():
    assert reader().pairs([("ab", "c")]) == [
        Tokens([CLS, A, B, SEP, C, SEP], [0, 0, 0, 0, 1, 1]),
    ]


@pytest.mark.parametrize("text", ["", "a", "abc" * 7, "zy" * 11])
def test_texts_are_as_the_tokenizer_itself_makes_them(text):
    assert reader().texts([text])[0].token_ids == letter_tokenizer().encode(text)


@pytest.mark.parametrize(("limit", "kept"), [(3, "a"), (5, "abc"), (24, "abcd")])
def test_texts_are_cut_at_their_end(limit, kept):
    assert reader().texts(["abcd"], limit) == reader().texts([kept])
    [tokens] = reader().texts([[A, B, C, D]], limit)
    assert tokens.token_ids == [A, B, C, D][:limit]


def test_minus_one_cuts_to_what_the_model_takes():
    [tokens] = reader().texts(["a" * 10_000], -1)
    assert len(tokens.token_ids) == MAX_MODEL_LEN


@pytest.mark.parametrize("first", range(0, 30, 3))
@pytest.mark.parametrize("second", range(0, 30, 5))
def test_pairs_are_cut_as_the_tokenizer_itself_cuts_them(first, second):
    """Which it does for all threads at once, if it does."""
    ours = reader().pairs([("a" * first, "b" * second)], 15)
    backend = letter_tokenizer().backend
    backend.enable_truncation(15, strategy="longest_first")
    theirs = backend.encode("a" * first, "b" * second)
    assert ours == [Tokens(theirs.ids, theirs.type_ids)]


def test_lower_case():
    assert reader(lowercase=True).texts(["AB"]) == reader().texts(["ab"])


@pytest.mark.parametrize(
    ("prompts", "truncate", "words"),
    [
        ([[]], None, ["empty"]),
        ([{"prompt_token_ids": []}], None, ["empty"]),
        ([[VOCAB_SIZE]], None, ["32", "0 to 31"]),
        ([[A, -1]], None, ["-1"]),
        (["a" * 23], None, ["24 tokens", "25 tokens", "truncate_prompt_tokens"]),
        (["a" * 10_000], None, ["24 tokens", "10000 characters"]),
        ([[A] * 25], None, ["25 tokens"]),
        (["a"], 0, ["between 1 and 24", "0"]),
        (["a"], 25, ["between 1 and 24", "25"]),
        (["a"], -2, ["-2"]),
        (["a"], 2, ["2 special tokens", "at least 3"]),
        (["\ud800"], None, ["surrogates"]),
        ([5], None, ["text, a list of token ids"]),
    ],
)
def test_refusals_give_the_numbers(prompts, truncate, words):
    with pytest.raises(InvalidRequest) as error:
        reader().texts(prompts, truncate)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_without_a_tokenizer_only_ids_are_read():
    blind = reader(tokenizer=None)
    assert blind.texts([[A]]) == [Tokens([A], [0])]
    for refused in (lambda: blind.texts(["a"]), lambda: blind.pairs([("a", "b")], 8)):
        with pytest.raises(InvalidRequest, match="skip_tokenizer_init"):
            refused()
