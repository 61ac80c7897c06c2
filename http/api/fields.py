"""Known request fields that this version does not carry out, and fields that mean nothing to it.

A field that would change the answer and cannot be honoured is refused, never dropped; its neutral
values, those that ask for nothing, are let through.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from paged.runtime.errors import InvalidRequest, Unsupported

logger = logging.getLogger(__name__)

_MAX_FIELDS = 1000

Neutral = dict[str, tuple[object, ...]]
"""Field to the values, beside null, that ask for nothing."""

_GENERATION: Neutral = {
    "ebnf": (),
    "flat_logprobs": (False,),
    "guided_decoding_backend": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "logprobs_mode": ("raw_logprobs",),
    "regex": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "thinking_token_budget": (),
    "vllm_xargs": ({},),
}
CHAT_NEUTRAL: Neutral = _GENERATION | {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
COMPLETION_NEUTRAL: Neutral = _GENERATION | {"prompt_embeds": (), "suffix": ("",)}
POOLING_NEUTRAL: Neutral = {
    "activation": (True,),
    "cache_salt": (),
    "chat_template": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "instruction": (),
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "normalize": (True,),
    "priority": (0,),
    "rank_fields": ([],),
    "softmax": (True,),
    "truncation_side": ("right",),
    "use_activation": (True,),
}

# About the account: no answer could show whether they were honoured.
ACCEPTED = {
    "cache_control",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "user_profile_id",
    "workspace_id",
}


def missing(field: str) -> InvalidRequest:
    """What a request is told that lacks a field."""
    return InvalidRequest(f"{field}: this field is required", field)


def require(part: msgspec.Struct, where: str, *names: str) -> None:
    """Raise InvalidRequest, naming the first, if a part of a request lacks one of these fields.

    Args:
        where: the path of the part in the request.
    """
    for name in names:
        if getattr(part, name) is None:
            raise missing(f"{where}.{name}")


def check_fields(body: Mapping[str, msgspec.Raw], known: tuple[str, ...], neutral: Neutral) -> None:
    """Refuse what cannot be carried out; note in the debug log what nobody knows.

    Args:
        body: the request's fields, their values not decoded yet.
        known: the fields that are carried out.
        neutral: those that are not, with their neutral values.

    Raises:
        Unsupported: names the first field that asks for something.
        InvalidRequest: there are more fields than any request has.
    """
    if len(body) > _MAX_FIELDS:
        raise InvalidRequest(f"A body may have {_MAX_FIELDS} fields, got {len(body)}")
    for name in sorted(body.keys() - set(known) - ACCEPTED):
        if name not in neutral:
            logger.debug("Ignoring unknown request field %.100r", name)
        elif not _is_neutral(body[name], neutral[name]):
            raise Unsupported(f"{name} is not supported", name)


def _is_neutral(value: msgspec.Raw, neutral: tuple[object, ...]) -> bool:
    try:
        return msgspec.json.decode(value) in (None, *neutral)
    except msgspec.DecodeError:  # a number beyond all bounds
        return False
