"""Work on text that may be long, without holding up everybody else's streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paged.http.engine import Tokenizer
from paged.runtime.errors import InvalidRequest

# Twice what the longest tokens of known vocabularies stand for (they are runs of spaces).
_LONGEST_TOKEN = 256
# Characters that take a few milliseconds to render or to tokenise.
_LONG_TEXT = 10_000


async def without_hurry[T](num_characters: int, work: Callable[[], T]) -> T:
    """The result of `work`, done in another thread if the text is long."""
    return work() if num_characters < _LONG_TEXT else await asyncio.to_thread(work)


def encode(
    tokenizer: Tokenizer, text: str, max_model_len: int, *, add_special_tokens: bool
) -> list[int]:
    """Token ids of a text.

    Raises:
        InvalidRequest: it is too long whatever its tokens are, found before they cost time.
    """
    allowed = _LONGEST_TOKEN * max_model_len
    if len(text) > allowed:
        raise InvalidRequest(
            f"This model's maximum context length is {max_model_len} tokens, but your prompt has "
            f"{len(text)} characters; at most {allowed} could fit. Please reduce its length.",
            "input_tokens",
        )
    return tokenizer.encode(text, add_special_tokens)
