"""API keys: `Authorization: Bearer KEY`, or `X-Api-Key: KEY`, on every route but the probes'."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paged.http.api.errors import ApiError, error_response
from paged.http.paths import OPEN_PATHS, path_of

_REFUSAL = "Wrong or missing API key: send it as 'Authorization: Bearer KEY' or as 'X-Api-Key: KEY'"


class RequireKey:
    """Middleware that lets a request through if it brings one of the keys."""

    def __init__(
        self, app: ASGIApp, keys: Iterable[str], open_paths: Collection[str] = OPEN_PATHS
    ) -> None:
        self.app = app
        self.open_paths = open_paths
        self.digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) in self.open_paths or self._admits(scope):
            await self.app(scope, receive, send)
            return
        error = ApiError(401, _REFUSAL, "AuthenticationError")
        reply = error_response(error, path_of(scope), {"WWW-Authenticate": "Bearer"})
        await reply(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        # Headers are decoded as Latin-1; this gives the bytes that were sent. Digests are of one
        # length and all are compared, so that the time taken says nothing about the keys.
        digests = [sha256(key.strip().encode("latin-1")).digest() for key in given]
        matches = [
            hmac.compare_digest(digest, known) for digest in digests for known in self.digests
        ]
        return any(matches)
