"""What a server fills into requests that leave it open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from paged.http.api.protocol import ChatRequest, GenerationRequest, StreamOptions


@dataclass(frozen=True)
class RequestDefaults:
    """Values of fields, where a request has none of its own.

    Attributes:
        tokens_as_ids: `return_tokens_as_token_ids`.
        include_usage: whether streams end with their usage, whatever requests say.
        chat_template_kwargs: names that the chat template reads; a request's own go before.
    """

    tokens_as_ids: bool = False
    include_usage: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def fill[R: GenerationRequest](self, body: R) -> R:
        """The request with these values in it."""
        if body.return_tokens_as_token_ids is None and self.tokens_as_ids:
            body = structs.replace(body, return_tokens_as_token_ids=True)
        if body.stream and self.include_usage:
            wanted = body.stream_options or StreamOptions()
            body = structs.replace(body, stream_options=structs.replace(wanted, include_usage=True))
        if isinstance(body, ChatRequest) and self.chat_template_kwargs:
            names = {**self.chat_template_kwargs, **(body.chat_template_kwargs or {})}
            body = structs.replace(body, chat_template_kwargs=names)
        return body
