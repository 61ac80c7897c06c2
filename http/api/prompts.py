"""Prompts as token ids: those of a completions request may be text or ids, one or many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from paged.http.api.protocol import GenerationRequest
from paged.http.engine import Engine, Tokenizer
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
    kinds = set(map(type, prompts))  # in C: a prompt may be long
    if kinds == {int}:
        return [cast(list[int], prompts)]
    if int in kinds:
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


def truncated(
    token_ids: list[int], body: GenerationRequest, max_tokens: int | None, engine: Engine
) -> list[int]:
    """As much of a prompt as its request wants kept: its end, unless that is to be cut.

    Args:
        token_ids: the whole prompt.
        body: asks for at most so many tokens; for -1, all that leave room for the output.
        max_tokens: of the output; None needs room for one.
        engine: whose length counts.

    Raises:
        InvalidRequest: another number than -1 or those from 1 to the model's length.
    """
    wanted, longest = body.truncate_prompt_tokens, engine.max_model_len
    if wanted is None:
        return token_ids
    if wanted != -1 and not 1 <= wanted <= longest:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or between 1 and {longest}, got {wanted}",
            "truncate_prompt_tokens",
        )
    kept = max(longest - (max_tokens or 1), 1) if wanted == -1 else wanted
    return token_ids[:kept] if body.truncation_side == "right" else token_ids[-kept:]
