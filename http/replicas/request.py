"""A request on its way to a replica, and what its prompt begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Scope

from paged.prefix import extend_hashes

PAGE_BYTES = 256
"""Bytes of a request's text in what routers call a page: some 64 tokens."""

_MAX_PAGES = 1024
# The fields that come before the conversation in what the model reads, or keep pages apart.
_FIRST = ("model", "cache_salt", "tools", "system", "instructions", "chat_template_kwargs")
_THEN = ("messages", "prompt", "input")
# What an application may look at; the rest of a scope belongs to the process it was made in.
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


@dataclass(frozen=True)
class Asked:
    """A whole HTTP request.

    Attributes:
        scope: as ASGI has it, what can be sent to another process.
        body: as it came.
        pages: hashes of its prompt's pages, as `paged.runtime.routing.Router` takes them.
    """

    scope: Scope
    body: bytes
    pages: tuple[bytes, ...]


def asked(scope: Mapping[str, Any], body: bytes) -> Asked:
    """The request of a scope, for a replica."""
    sent = {name: scope[name] for name in _SCOPE if name in scope}
    return Asked(sent, body, pages_of(body) if scope["method"] == "POST" else ())


def pages_of(body: bytes) -> tuple[bytes, ...]:
    """Hashes of the pages of a prompt, by the JSON that it is written in.

    Conversations that go on begin with the same JSON. Nothing is tokenised here: what is wrong with
    a body is for the replica to say, and no body is taken for one without a prompt.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return ()
    told = b"\0".join(bytes(fields.get(name, b"")) for name in (*_FIRST, *_THEN))
    hashes: list[bytes] = []
    extend_hashes(hashes, told[: PAGE_BYTES * _MAX_PAGES], PAGE_BYTES)
    return tuple(hashes)
