"""Grammars at work in the engine: which tokens may come next in each sequence that has one.

So are words that may not come, as far as they have several tokens: which of these is ruled out
depends on those before it, as in a grammar.

Compiling needs the bytes of every token, which are made for the first grammar that comes. Both
happen in a thread of their own. What is compiled is kept by its text; each sequence has a copy with
its own state, which stays with it through preemptions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from paged.models.tokenizer import Tokenizer
from paged.runtime.bans import Bans, Recent
from paged.runtime.errors import InvalidRequest
from paged.runtime.grammar import LIMITS
from paged.runtime.grammar_vocabulary import grammar_vocabulary
from paged.runtime.sampler import EVERY_TOKEN, num_words

_MAX_KEPT = 64


Compiled = Future[LLMatcher]
"""A grammar that is being compiled; InvalidRequest if this vocabulary cannot follow it."""


class Guide:
    """Where one sequence is in its grammar, once that is compiled, and what is ruled out besides.

    Args:
        compiled: its grammar; None if it has none, but words that may not come.
        bans: None if there are none.
    """

    def __init__(self, compiled: Compiled | None, bans: Bans | None = None) -> None:
        self._compiled = compiled
        self._recent = None if bans is None else Recent(bans)

    @cached_property
    def matcher(self) -> LLMatcher | None:
        return None if self._compiled is None else self._compiled.result().deep_copy()

    def advance(self, token: int) -> None:
        """Take in the sequence's next token."""
        if self.matcher is not None:
            self.matcher.consume_token(token)
        if self._recent is not None:
            self._recent.add(token)

    def restrict(self, mask: NDArray[np.int32]) -> None:
        """Take from what its grammar allows, [W], what is ruled out."""
        if self._recent is not None:
            self._recent.apply(mask)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow, or there is an error."""
        return self.matcher is not None and self.matcher.is_stopped()

    @property
    def may_end(self) -> bool:
        """Whether the output is all that its grammar asks for."""
        return self.matcher is not None and self.matcher.is_accepting()

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any further; "" while it can."""
        return "" if self.matcher is None else self.matcher.get_error()


class Grammars:
    """Compiles grammars for one vocabulary and says what they allow.

    Args:
        load_tokenizer: called once, when the first grammar comes.
        vocab_size: entries of the model's logits, which may be more than the tokenizer knows.
        eos_token_ids: tokens that end an answer: allowed exactly where the grammar may end.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(token for token in eos_token_ids if token < vocab_size)
        self._thread = ThreadPoolExecutor(1, "paged-grammars")
        self._kept: OrderedDict[str, Compiled] = OrderedDict()

    def compile(self, grammar: str) -> Compiled:
        """Start compiling, or find what was compiled before."""
        if grammar not in self._kept:
            self._kept[grammar] = self._thread.submit(self._compile, grammar)
        self._kept.move_to_end(grammar)
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return self._kept[grammar]

    def masks(self, guides: Sequence[Guide]) -> NDArray[np.int32]:
        """[len(guides), ceil(V / 32)]: bit t % 32 of word t // 32 says whether token t may come."""
        masks = np.zeros((len(guides), num_words(self._vocab_size)), np.int32)
        places = [(guide.matcher, place) for place, guide in enumerate(guides)]
        bound = [(matcher, place) for matcher, place in places if matcher is not None]
        if bound:
            fill_next_token_bitmask_par(self._executor, bound, masks)
        for mask, guide in zip(masks, guides, strict=True):
            if guide.matcher is None:
                mask[:] = EVERY_TOKEN
            guide.restrict(mask)
        return masks

    def close(self) -> None:
        """Forget what still waits to be compiled."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # the first takes longest, and leaves its automata to the copies
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed: {matcher.get_error()}")
        return matcher

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        if not self._eos:
            raise InvalidRequest("structured output needs an end-of-sequence token")
        return grammar_vocabulary(self._load_tokenizer(), self._vocab_size, self._eos)
