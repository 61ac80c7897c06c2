"""What no route expected: a reply all the same, below those that put headers on replies."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged.http.api.errors import error_response
from paged.http.paths import path_of


class AnswerBugs:
    """Middleware that replies 500 for an exception, unless the reply has begun, and raises it on.

    Starlette's own does so outside of all other middleware: to pages of other sites its replies
    look like a server that is not there, and they lack the id by which the log knows them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watch(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:
            if scope["type"] == "http" and not begun:
                await error_response(error, path_of(scope))(scope, receive, send)
            raise
