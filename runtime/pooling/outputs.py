"""What callers get back, with vLLM's names and meanings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class EmbeddingOutput:
    """The vector of a text, [N] float32."""

    embedding: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class EmbeddingRequestOutput:
    """A text's tokens and its vector."""

    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


@dataclass(frozen=True)
class ScoringOutput:
    """How well a document answers a query: the higher, the better."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """A pair's score, and the tokens that were read for it."""

    prompt_token_ids: list[int]
    outputs: ScoringOutput
