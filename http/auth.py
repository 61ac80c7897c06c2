"""API keys: `Authorization: Bearer KEY`, or `X-Api-Key: KEY`, on every route but the probes'."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.responses import Response
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
        if not is_http or is_open(path_of(scope), self.closed) or self._admits(scope):
            await self.app(scope, receive, send)
            return
        await refused(path_of(scope))(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        wanted = self.digests
        if self.admin_digests and is_for_admins(path_of(scope)):
            wanted = self.admin_digests
        return not wanted or are_among(digests_of(scope), wanted)


def refused(path: str) -> Response:
    """The reply to a request without a key."""
    error = ApiError(401, _REFUSAL, "AuthenticationError")
    return error_response(error, path, {"WWW-Authenticate": "Bearer"})


def digests_of(scope: Scope) -> list[bytes]:
    """SHA-256 of the keys that a request brings, in each of the two headers for it."""
    headers = Headers(scope=scope)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
    # Headers are decoded as Latin-1; this gives the bytes that were sent.
    return [sha256(key.strip().encode("latin-1")).digest() for key in given]


def are_among(digests: Iterable[bytes], known: Sequence[bytes]) -> bool:
    """Whether one of these is known.

    Digests are of one length and all are compared, so that the time taken says nothing about keys.
    """
    matches = [hmac.compare_digest(digest, each) for digest in digests for each in known]
    return any(matches)
