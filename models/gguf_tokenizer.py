"""The tokenizer in a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from paged.models import bpe
from paged.models.tokenizer import Tokenizer, TokenizerError, wrap_sequences

_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
# What ends a turn in chats, by the models' own convention: files often name another token only.
_END_TEXTS = ("<end_of_turn>", "<|end|>", "<|eot_id|>", "<|im_end|>")


class _Kind(IntEnum):
    """Token types, by their number in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# How `tokenizer.ggml.pre` says that text is cut before pairs are merged.
_PRE_TOKENIZERS = {
    "default": bpe.gpt2_words,
    "gpt-2": bpe.gpt2_words,
    "smollm": bpe.gpt2_words_and_digits,
    "llama-bpe": bpe.three_digits,
    "llama3": bpe.three_digits,
    "llama-v3": bpe.three_digits,
    "falcon3": bpe.three_digits,
    "dbrx": bpe.three_digits,  # Phi-4
    "gpt-4o": bpe.o200k_words,  # Phi-4-mini
    "qwen2": bpe.one_digit,
    "deepseek-r1-qwen": bpe.one_digit,
    "tekken": bpe.tekken_words,  # Mistral Nemo
}
# Whose words are looked up whole before pairs are merged, and whose texts begin with BOS.
_LLAMA3_KINDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
_COMPOSED_KINDS = ("qwen2", "deepseek-r1-qwen")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Rebuild the tokenizer that a GGUF file was converted from.

    Raises:
        TokenizerError: the file has none, or one of a kind that is not supported.
    """
    fields = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = str(fields.get("model"))
    if kind not in builders:
        raise TokenizerError(
            f"the GGUF file has a tokenizer of kind {kind!r}; supported: {', '.join(builders)}"
        )
    template = metadata.get("tokenizer.chat_template")
    try:
        return _build(builders[kind], fields, template)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises nothing narrower than that
        raise TokenizerError(
            f"the tokenizer in the GGUF file is damaged: {type(error).__name__}: {error}"
        ) from error


def _build(
    builder: Callable[[Mapping[str, Any]], tokenizers.Tokenizer],
    fields: Mapping[str, Any],
    template: Any,
) -> Tokenizer:
    backend = builder(fields)
    tokens = fields["tokens"]
    special_tokens = {
        name: tokens[fields[key]] for name, key in _NAMED_TOKENS.items() if key in fields
    }
    _add_special_tokens(backend, fields)
    _wrap(backend, fields, special_tokens)
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_templates={"default": template} if template else {},
        eos_token_ids=[fields[key] for key in _END_TOKENS if key in fields] + _end_ids(fields),
    )


def _end_ids(fields: Mapping[str, Any]) -> list[int]:
    pieces = enumerate(zip(fields["tokens"], fields["token_type"], strict=True))
    return [
        token_id
        for token_id, (token, kind) in pieces
        if kind == _Kind.CONTROL and token in _END_TEXTS
    ]


def _byte_level(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """GPT-2's kind: merges over printable stand-ins for bytes."""
    pre = fields.get("pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"the GGUF file cuts text by {pre!r}; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    vocab = {token: index for index, token in enumerate(fields["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    whole = pre in _LLAMA3_KINDS
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=whole))
    if pre in _COMPOSED_KINDS:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Llama 2's and Gemma's kind: merges of characters, unknown ones spelled as bytes."""
    tokens = fields["tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges_by_score(tokens, fields["scores"], fields["token_type"])
    unknown = tokens[fields.get("unknown_token_id", 0)]
    model = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefix = fields.get("add_space_prefix", True)
    spaces = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([*steps, *strip])
    return backend


def _merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Pairs in the order SentencePiece would merge them: the pair whose whole scores best first."""
    vocab = {token: index for index, token in enumerate(tokens)}
    ranked = []
    for whole, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind != _Kind.NORMAL:
            continue
        pairs = bpe.pairs_of(whole, vocab)
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        ranked += [(-score, pair) for pair in pairs]
    return [pair for _, pair in sorted(ranked, key=lambda entry: entry[0])]


def _add_special_tokens(backend: tokenizers.Tokenizer, fields: Mapping[str, Any]) -> None:
    """Control tokens are found whole in text and skipped when decoding; user-defined only found."""
    added = [
        AddedToken(token, special=kind != _Kind.USER_DEFINED, normalized=False)
        for token, kind in zip(fields["tokens"], fields["token_type"], strict=True)
        if kind in (_Kind.UNKNOWN, _Kind.CONTROL, _Kind.USER_DEFINED)
    ]
    backend.add_tokens(added)


def _wrap(
    backend: tokenizers.Tokenizer, fields: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    llama_kind = fields["model"] == "llama" or fields.get("pre") in _LLAMA3_KINDS
    add_bos = fields.get("add_bos_token", llama_kind)
    wrap_sequences(
        backend,
        bos=special_tokens.get("bos_token") if add_bos else None,
        eos=special_tokens.get("eos_token") if fields.get("add_eos_token") else None,
    )
