"""Vocabularies of bytes: GPT-2's printable stand-ins for them, and tiktoken's files.

A tiktoken file has a line for each token: its bytes in base64, and its rank, which is its id. Of
neighbours in a text that together are a token, those of the lowest rank are joined first.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from paged.models import bpe

# What GLM-4 has before every text.
_GLM4_START = ("[gMASK]", "<sop>")


def _byte_alphabet() -> dict[str, bytes]:
    """The byte that each character stands for in GPT-2's kind of vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    moved = {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}
    return {chr(byte): bytes([byte]) for byte in printable} | moved


BYTES = _byte_alphabet()
_CHARACTERS = {byte[0]: character for character, byte in BYTES.items()}


def glm4_backend(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """GLM-4's tokenizer, from its tiktoken file and the special tokens in tokenizer_config.json.

    Raises:
        ValueError: one of the two is not what it should be.
    """
    backend = _tiktoken_backend(_read_ranks(path))
    _add_tokens(backend, settings)
    start = [(token, backend.token_to_id(token)) for token in _GLM4_START]
    missing = [token for token, token_id in start if token_id is None]
    if missing:
        raise ValueError(f"tokenizer_config.json lacks the special tokens {', '.join(missing)}")
    backend.post_processor = processors.TemplateProcessing(
        single=[*_GLM4_START, "$A"], special_tokens=start
    )
    return backend


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, binascii.Error, ValueError) as error:
        raise ValueError(f"{path} is no tiktoken file: {error}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"the ranks in {path} are not 0 to {len(ranks) - 1}, each once")
    return ranks


def _tiktoken_backend(ranks: Mapping[bytes, int]) -> Tokenizer:
    vocab = {_spelled(token): rank for token, rank in ranks.items()}
    merges = sorted(
        (rank, ranks[left], ranks[right], _spelled(left), _spelled(right))
        for token, rank in ranks.items()
        for left, right in bpe.pairs_of(token, ranks)
    )
    pairs = [(left, right) for *_, left, right in merges]
    backend = Tokenizer(models.BPE(vocab, pairs, ignore_merges=True))
    backend.pre_tokenizer = bpe.three_digits()
    backend.decoder = decoders.ByteLevel()
    return backend


def _spelled(token: bytes) -> str:
    return "".join(_CHARACTERS[byte] for byte in token)


def _add_tokens(backend: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Those that tokenizer_config.json lists by id, which follow the ranks."""
    listed = settings.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        raise ValueError("tokenizer_config.json has no 'added_tokens_decoder'")
    for token_id, record in sorted(listed.items(), key=lambda entry: int(entry[0])):
        content, special = str(record["content"]), bool(record.get("special"))
        backend.add_tokens([AddedToken(content, special=special, normalized=False)])
        if backend.token_to_id(content) != int(token_id):
            raise ValueError(
                f"special token {content!r} should have id {token_id}; among the others it has "
                f"{backend.token_to_id(content)}"
            )
