"""Prompts as token ids: those of a completions request may be text or ids, one or many."""

from __future__ import annotations

from collections.abc import Sequence

from paged.http.engine import Tokenizer
from paged.runtime.errors import InvalidRequest
from paged.runtime.long_text import LONGEST_TOKEN, without_hurry

Prompt = str | list[int]

MAX_SEQUENCES = 1024


def split(prompt: str | list[str | int | list[int]], n: int) -> list[Prompt]:
    """An entry per prompt.

    Args:
        prompt: as it came.
        n: sequences per prompt.

    Raises:
        InvalidRequest: none at all, a mixture, or too many.
    """
    prompts = listed(prompt, "prompt")
    if len(prompts) * n > MAX_SEQUENCES:
        raise InvalidRequest(
            f"A request may ask for {MAX_SEQUENCES} sequences (prompts times n), "
            f"got {len(prompts)} times {n}",
            "n",
        )
    return prompts


def listed(prompts: str | list[str | int | list[int]], name: str) -> list[Prompt]:
    """Text, token ids, or a list of either, as a list of texts and lists of token ids.

    Args:
        name: of the request's field.

    Raises:
        InvalidRequest: none at all, or a mixture.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not prompts:
        raise InvalidRequest(f"{name} must not be empty", name)
    token_ids = [item for item in prompts if isinstance(item, int)]
    if len(token_ids) == len(prompts):
        return [token_ids]
    if token_ids:
        message = f"{name} must be a list of texts, of token ids, or of lists of token ids"
        raise InvalidRequest(message, name)
    return [item for item in prompts if not isinstance(item, int)]


async def tokenised(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    max_model_len: int,
    *,
    add_special_tokens: bool,
) -> list[list[int]]:
    """Token ids of each prompt; the special tokens are for those that came as text.

    Raises:
        InvalidRequest: text, but no tokenizer; or a text that cannot fit.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in prompts if not isinstance(prompt, str)]
    if tokenizer is None:
        raise InvalidRequest("This server has no tokenizer: send token ids", "prompt")

    def work() -> list[list[int]]:
        return [
            encode(tokenizer, prompt, max_model_len, add_special_tokens=add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]

    return await without_hurry(sum(map(len, texts)), work)


def encode(
    tokenizer: Tokenizer, text: str, max_model_len: int, *, add_special_tokens: bool
) -> list[int]:
    """Token ids of a text.

    Raises:
        InvalidRequest: it is too long whatever its tokens are, found before they cost time.
    """
    allowed = LONGEST_TOKEN * max_model_len
    if len(text) > allowed:
        raise InvalidRequest(
            f"This model's maximum context length is {max_model_len} tokens, but your prompt has "
            f"{len(text)} characters; at most {allowed} could fit. Please reduce its length.",
            "input_tokens",
        )
    return tokenizer.encode(text, add_special_tokens)
