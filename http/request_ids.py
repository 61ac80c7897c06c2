"""X-Request-Id: every reply carries the client's own, or one of ours."""

from __future__ import annotations

import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NAME = b"x-request-id"
_MAX_LENGTH = 256


class EchoRequestId:
    """Middleware that puts an id on replies, by which client and server mean the same request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        theirs = next((value for name, value in scope["headers"] if name == _NAME), b"")
        header = (_NAME, theirs[:_MAX_LENGTH] or uuid.uuid4().hex.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            await send(message)

        await self.app(scope, receive, send_with_id)
