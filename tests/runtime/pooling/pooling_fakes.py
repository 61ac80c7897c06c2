"""A runner without a device, and a tokenizer that puts special tokens around texts and pairs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from paged.models.tokenizer import Tokenizer
from paged.runtime.pooling.abilities import Abilities
from paged.runtime.pooling.engine import PoolingEngine
from paged.runtime.pooling.grid import Grid
from paged.runtime.pooling.reader import Reader
from paged.runtime.pooling.vectors import Vectors
from paged.runtime.pooling.waiting import Batch

CLS, SEP = 0, 1
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB_SIZE = 32
MAX_MODEL_LEN = 24
SIZE = 4


def letter_tokenizer() -> Tokenizer:
    """A token for each letter, from 2 on; <cls> a <sep>, or <cls> a <sep> b <sep> for pairs."""
    vocabulary = {letter: 2 + place for place, letter in enumerate(LETTERS)}
    backend = Backend(models.WordLevel({"<cls>": CLS, "<sep>": SEP, **vocabulary}, "<sep>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens([AddedToken("<cls>"), AddedToken("<sep>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[("<cls>", CLS), ("<sep>", SEP)],
    )
    return Tokenizer(backend, special_tokens={}, chat_templates={})


def reader(**changes: Any) -> Reader:
    settings: dict[str, Any] = {
        "tokenizer": letter_tokenizer(),
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
    }
    return Reader(**settings | changes)


@dataclass(frozen=True)
class Launched:
    """Its vectors are made when they are read."""

    batch: Batch
    runner: FakeRunner

    def read(self) -> Vectors:
        if self.runner.fails_at == self.runner.num_read:
            raise RuntimeError("the device fell off")
        self.runner.num_read += 1
        vectors = np.zeros((self.batch.shape.rows, SIZE), np.float32)
        for row, text in zip(vectors, self.batch.texts, strict=False):
            ids = text.tokens.token_ids
            row[:] = (sum(ids), len(ids), sum(text.tokens.types), 1)
        return vectors


@dataclass
class FakeRunner:
    """A vector is: sum of the ids, number of tokens, number of those of a second text, 1.

    Attributes:
        fails_at: the batch, from 0, that cannot be read; refuses_at: or launched.
        pause: seconds that launching takes.
        gate: while it is cleared, launching waits.
        entered: set by the first launch.
        batches: all that were launched.
    """

    fails_at: int | None = None
    refuses_at: int | None = None
    pause: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    batches: list[Batch] = field(default_factory=list)
    num_read: int = 0
    num_compiles: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self.gate.set()

    def watch(self, when_gone: Callable[[str], object]) -> None:
        pass

    def launch(self, batch: Batch) -> Launched:
        self.entered.set()
        assert self.gate.wait(60)
        time.sleep(self.pause)
        if self.refuses_at == len(self.batches):
            raise RuntimeError("out of memory")
        self.batches.append(batch)
        return Launched(batch, self)

    def kill(self, reason: str) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def pooling_engine(runner: FakeRunner | None = None, **changes: Any) -> PoolingEngine:
    """An engine over the fake runner: batches of up to 4 texts, or of 16 tokens and more."""
    abilities: dict[str, Any] = {
        "scores": False,
        "size": SIZE,
        "dimensions": (),
        "normalized": True,
    }
    grid = Grid.make(MAX_MODEL_LEN, 4, 64)
    return PoolingEngine(reader(), Abilities(**abilities | changes), runner or FakeRunner(), grid)
