"""Tokens that a request rules out, as the host knows them: some always, some behind others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paged.runtime.messages import EngineRequest
from paged.runtime.sampling_params import SamplingParams

_BITS = 32


@dataclass(frozen=True)
class Bans:
    """What a request rules out.

    Attributes:
        left: [W] int32, a bit for each token that may come at all, 32 an element.
        bad_words: token sequences of two or more that no output may hold, by their last but one.
        reach: tokens that are looked back on.
    """

    left: NDArray[np.int32]
    bad_words: Mapping[int, Sequence[Sequence[int]]]
    reach: int

    @classmethod
    def of(
        cls, params: SamplingParams, bad_words: Sequence[Sequence[int]], vocab_size: int
    ) -> Bans:
        """Those of a request whose bad words of several tokens are `bad_words`."""
        only, never = params.allowed_token_ids, params.banned_token_ids
        by_last_but_one: dict[int, list[Sequence[int]]] = {}
        for word in bad_words:
            by_last_but_one.setdefault(word[-2], []).append(word)
        reach = max(map(len, bad_words), default=1) - 1
        return cls(_mask(only, never or (), vocab_size), by_last_but_one, reach)


def bans_of(request: EngineRequest, vocab_size: int) -> Bans | None:
    """What must be ruled out on the host: all of it where a grammar rules out the rest."""
    params = request.params
    rules_out = params.allowed_token_ids is not None or params.banned_token_ids
    if not request.bad_words and not (request.grammar and rules_out):
        return None
    return Bans.of(params, request.bad_words, vocab_size)


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
        self.tokens.append(token)
        if len(self.tokens) > self.bans.reach:
            del self.tokens[0]

    def apply(self, mask: NDArray[np.int32]) -> None:
        """Take from `mask` [W] what may not come now."""
        mask &= self.bans.left
        newest = self.tokens[-1] if self.tokens else -1
        for *before, last in self.bans.bad_words.get(newest, ()):
            if self.tokens[-len(before) :] == before:
                mask.view(np.uint32)[last // _BITS] &= np.uint32(~(1 << last % _BITS) & 0xFFFFFFFF)
