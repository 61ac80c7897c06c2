"""The trace that a request is part of, as its headers say: W3C's traceparent and tracestate."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

_NAMES = frozenset({b"traceparent", b"tracestate"})
_headers: ContextVar[dict[str, str]] = ContextVar("trace headers")


class ReadTraceContext:
    """Middleware that keeps these headers where `trace_headers` finds them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        found = {name.decode(): text.decode("latin-1") for name, text in headers if name in _NAMES}
        token = _headers.set(found)
        try:
            await self.app(scope, receive, send)
        finally:
            _headers.reset(token)


def trace_headers() -> dict[str, str]:
    """Those of the request that is answered here."""
    return _headers.get({})
