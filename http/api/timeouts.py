"""How long a request may take: its field `timeout`, its header, or what the server says."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct, structs
from starlette.requests import Request

from paged.runtime.config import LONGEST_TIMEOUT
from paged.runtime.errors import DeadlineExceeded, InvalidRequest

HEADER = "X-Request-Timeout"
LATE = "The request was not answered within its time"


def timed[T: Struct](request: Request, body: T) -> T:
    """The body with its timeout filled in, if its route has one.

    Raises:
        InvalidRequest: a timeout that is none.
    """
    if "timeout" not in body.__struct_fields__:
        return body
    given: Any = getattr(body, "timeout", None)
    name = "timeout"
    if given is None and (text := request.headers.get(HEADER)) is not None:
        given, name = _number(text), HEADER
    if given is None:
        given = request.app.state.models.default_timeout
    if given is not None and not 0 < given <= LONGEST_TIMEOUT:
        allowed = f"above 0 and at most {LONGEST_TIMEOUT} seconds"
        raise InvalidRequest(f"{name} must be {allowed}, got {given:g}", name)
    return structs.replace(body, timeout=given)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def deadline_of(timeout: float | None, started: float) -> float:
    """When that is, on the clock of `time.monotonic`; 0 for never."""
    return 0.0 if timeout is None else started + timeout


@asynccontextmanager
async def in_time(deadline: float) -> AsyncIterator[None]:
    """What is done meanwhile is cancelled at a deadline, which raises DeadlineExceeded."""
    loop = asyncio.get_running_loop()
    when = loop.time() + deadline - time.monotonic() if deadline else None
    try:
        async with asyncio.timeout_at(when):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(LATE) from error
