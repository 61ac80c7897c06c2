"""Tokens that a request rules out, as the host knows them: some always, some behind others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paged.runtime.sampling_params import SamplingParams

_BITS = 32


@dataclass(frozen=True)
class Bans:
    """What a request rules out.

    Attributes:
        left: [W] int32, a bit for each token that may come at all, 32 to a word.
        words: token sequences that no output may hold, each of two tokens or more.
    """

    left: NDArray[np.int32]
    words: Sequence[Sequence[int]] = ()

    @classmethod
    def of(cls, params: SamplingParams, words: Sequence[Sequence[int]], vocab_size: int) -> Bans:
        """Those of a request whose `bad_words` of several tokens are `words`."""
        only, never = params.allowed_token_ids, params.banned_token_ids
        return cls(_mask(only, never or (), vocab_size), words)


def _mask(
    only: Collection[int] | None, never: Collection[int], vocab_size: int
) -> NDArray[np.int32]:
    bits = np.full(-(-vocab_size // _BITS) * _BITS, only is None)
    bits[list(only or ())] = True
    bits[list(never)] = False
    bits[vocab_size:] = False
    return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass
class Recent:
    """A sequence's last tokens, as many as its bans look back on."""

    bans: Bans
    tokens: list[int] = field(default_factory=list)

    def add(self, token: int) -> None:
        """Take in the next token."""
        longest = max(map(len, self.bans.words), default=1)
        self.tokens = [*self.tokens, token][-(longest - 1) :] if longest > 1 else []

    def apply(self, mask: NDArray[np.int32]) -> None:
        """Take from `mask` [W] what may not come now."""
        mask &= self.bans.left
        for *before, last in self.bans.words:
            if self.tokens[-len(before) :] == before:
                mask.view(np.uint32)[last // _BITS] &= np.uint32(~(1 << last % _BITS) & 0xFFFFFFFF)
