"""Stopping work for a client that has gone away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.requests import ClientDisconnect
from starlette.types import Receive


async def while_connected[T](receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled as soon as the client closes the connection.

    Args:
        receive: the request's, its body already read.
        work: awaited to the end of its clean-up in any case.

    Raises:
        ClientDisconnect: the client went first.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
