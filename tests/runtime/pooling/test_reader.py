"""Texts, pairs and token ids, checked and cut."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Encoding, processors
from tokenizers import Tokenizer as Backend

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


SPECIAL = (("<sep>", SEP), ("<cls>", CLS))
PROCESSORS = {
    "none": None,
    "bert": processors.BertProcessing(*SPECIAL),
    "roberta": processors.RobertaProcessing(*SPECIAL),
    "bytes": processors.ByteLevel(),
    "sequence": processors.Sequence(
        [processors.ByteLevel(), processors.RobertaProcessing(*SPECIAL)]
    ),
    "only behind": processors.TemplateProcessing(
        single="$A <sep>", pair="$A <sep> $B <sep>", special_tokens=[("<sep>", SEP)]
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("texts", [("ab", "c"), ("", "ab"), ("ab", ""), ("", ""), ("a<sep>b", "a")])
@pytest.mark.parametrize("limit", [None, 24])
def test_special_tokens_are_as_the_tokenizer_itself_puts_them(name, texts, limit):
    tokenizer = letter_tokenizer()
    tokenizer.backend.post_processor = PROCESSORS[name]
    ours = reader(tokenizer=tokenizer)
    theirs = tokenizer.backend.encode(*texts)
    if theirs.ids and name not in ("none", "bytes"):  # which tell no pairs from texts
        assert ours.pairs([texts], limit) == [Tokens(theirs.ids, theirs.type_ids)]
    for text in filter(None, texts):
        alone = tokenizer.backend.encode(text)
        assert ours.texts([text], limit) == [Tokens(alone.ids, alone.type_ids)]


@pytest.mark.parametrize("limit", [5, -1])
def test_cutting_costs_no_more_than_reading(limit):
    """The tokenizer's own takes the square of the lengths for it, in time and in memory."""
    long = reader(max_model_len=100)
    start = time.thread_time()
    [tokens] = long.pairs([("a" * 10_000, "b" * 10_000)], limit)
    assert len(tokens.token_ids) == (100 if limit == -1 else limit)
    assert time.thread_time() - start < 1


class Counting:
    """A tokenizer that notes what it encodes."""

    def __init__(self) -> None:
        self.backend = self
        self.real: Backend = letter_tokenizer().backend
        self.seen: list[list[str]] = []

    def encode_batch_fast(self, texts: Sequence[str], **how: Any) -> list[Encoding]:
        self.seen.append(list(texts))
        return self.real.encode_batch_fast(texts, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def test_a_query_is_encoded_once_for_all_its_documents():
    tokenizer: Any = Counting()
    pairs = [("ab", "c"), ("ab", "d"), ("a", "d"), ("ab", "d")]
    found = reader(tokenizer=tokenizer).pairs(pairs)
    assert tokenizer.seen == [["ab", "c", "d", "a", "d", "ab", "d"]]
    assert found == [each for pair in pairs for each in reader().pairs([pair])]


@pytest.mark.parametrize("limit", [None, -1])
def test_long_texts_are_encoded_a_few_at_a_time(limit):
    """What cannot run is refused at its first text, and memory is bounded."""
    tokenizer: Any = Counting()
    many = reader(tokenizer=tokenizer, max_model_len=1000)
    texts = ["a" * 100_000] * 8
    if limit is None:
        with pytest.raises(InvalidRequest, match="100002 tokens"):
            many.texts(texts)
        assert [len(portion) for portion in tokenizer.seen] == [3]
    else:
        assert [len(each.token_ids) for each in many.texts(texts, -1)] == [1000] * 8
        assert [len(portion) for portion in tokenizer.seen] == [3, 3, 2]


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
        (["a"], 5.0, ["a whole number", "5.0"]),
        (["a"], True, ["a whole number", "True"]),
        (["a"], "5", ["a whole number", "'5'"]),
        (["a"], float("nan"), ["a whole number", "nan"]),
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
