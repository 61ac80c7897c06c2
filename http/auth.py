"""API keys: `Authorization: Bearer KEY`, or `X-Api-Key: KEY`, on every route but the probes'."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paged.http.api.errors import ApiError, error_response
from paged.http.paths import is_for_admins, is_open, path_of

_REFUSAL = "Wrong or missing API key: send it as 'Authorization: Bearer KEY' or as 'X-Api-Key: KEY'"


class RequireKey:
    """Middleware that lets a request through if it brings one of the keys.

    Args:
        keys: for all but the probes; none admits everyone.
        admin_keys: for what is for admins, if there is such a thing.
        closed: paths that need a key although they are open elsewhere.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        admin_keys: Iterable[str] = (),
        closed: Collection[str] = (),
    ) -> None:
        self.app = app
        self.closed = closed
        self.digests = [sha256(key.encode()).digest() for key in keys]
        self.admin_digests = [sha256(key.encode()).digest() for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        if not is_http or self._is_open(path_of(scope)) or self._admits(scope):
            await self.app(scope, receive, send)
            return
        error = ApiError(401, _REFUSAL, "AuthenticationError")
        reply = error_response(error, path_of(scope), {"WWW-Authenticate": "Bearer"})
        await reply(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return is_open(path) and path not in self.closed

    def _admits(self, scope: Scope) -> bool:
        wanted = self.digests
        if self.admin_digests and is_for_admins(path_of(scope)):
            wanted = self.admin_digests
        return not wanted or _brings(scope, wanted)


def _brings(scope: Scope, wanted: Sequence[bytes]) -> bool:
    """Whether a request has a key of one of these digests."""
    headers = Headers(scope=scope)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
    # Headers are decoded as Latin-1; this gives the bytes that were sent. Digests are of one
    # length and all are compared, so that the time taken says nothing about the keys.
    digests = [sha256(key.strip().encode("latin-1")).digest() for key in given]
    matches = [hmac.compare_digest(digest, known) for digest in digests for known in wanted]
    return any(matches)
