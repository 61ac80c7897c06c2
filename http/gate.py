"""The first thing that requests meet: whether the server takes any yet, or still."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from paged.http.api.errors import unavailable
from paged.http.paths import OPEN_PATHS, PROBES, path_of
from paged.http.request_ids import EchoRequestId
from paged.models.reports import Report
from paged.runtime.logs import current_model

# Seconds after which clients may ask again, and those that a refused body may take to come.
_SECONDS_TO_RETRY = 5
_SECONDS_FOR_BODY = 1.0
_NOTHING_YET = Report("starting", "", 0, 0)
_ALIVE = frozenset({"/health", "/ping", "/metrics", "/version"})


class Loading(msgspec.Struct, frozen=True):
    """What /health and /ready say while models are loaded.

    Attributes:
        model: which, where there are several; "" for the only one.
        phase: "starting", or what takes long: "loading_weights", "preparing" programs, ...
        done, total, unit: how much of the phase is done; "bytes" or "programs".
        fraction: the same, 0 to 1; None where that is not known.
        seconds: that the start has taken so far.
        seconds_left: that the phase will take, as it went so far; None where that is not known.
    """

    model: str
    phase: str
    done: int
    total: int
    unit: str
    fraction: float | None
    seconds: float
    seconds_left: float | None
    status: str = "loading"


@dataclass
class Progress:
    """How a start gets on. Its reports may come from another thread."""

    _start: float = field(default_factory=time.monotonic)
    _phase_start: float = 0.0
    _model: str = ""
    _report: Report = _NOTHING_YET

    def take(self, report: Report) -> None:
        model = current_model()
        if (model, report.label) != (self._model, self._report.label):
            self._phase_start = time.monotonic()
        self._model, self._report = model, report

    def told(self) -> Loading:
        label, unit, done, total = self._report
        now = time.monotonic()
        pace = (now - self._phase_start) / done if done else None
        return Loading(
            model=self._model,
            phase=label.lower().replace(" ", "_"),
            done=done,
            total=total,
            unit={"B": "bytes"}.get(unit, unit.strip()),
            fraction=round(done / total, 3) if total else None,
            seconds=round(now - self._start, 1),
            seconds_left=None if pace is None else round(pace * (total - done), 1),
        )


class Gate:
    """An ASGI application that stands before another one, and counts whom it refuses.

    Attributes:
        app: what is behind it, with `state.refused`; None while models are loaded.
        progress: of that.
        is_draining: whether it lets only those through that ask how the server is.
    """

    def __init__(self) -> None:
        self.app: Starlette | None = None
        self.progress = Progress()
        self.is_draining = False
        self._num_early = 0  # refused, and not in the application's metrics

    def open(self, app: Starlette) -> None:
        """Let requests through to an application."""
        self.app = app
        app.state.refused.labels("loading").inc(self._num_early)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope)
        if self.app is None:
            self._num_early += path not in OPEN_PATHS
            reply = self._not_yet(path)
        elif self.is_draining and path not in _ALIVE:
            if path not in OPEN_PATHS:
                self.app.state.refused.labels("draining").inc()
            # Pools of connections are to look for another server.
            reply = _later(path, "This server is stopping", {"Connection": "close"})
        else:
            await self.app(scope, receive, send)
            return
        await _have_sent(Request(scope, receive))
        await EchoRequestId(reply)(scope, receive, send)

    def _not_yet(self, path: str) -> Response:
        told = self.progress.told()
        if path in PROBES:
            headers = {"Retry-After": str(_SECONDS_TO_RETRY)}
            return JSONResponse(msgspec.to_builtins(told), 503, headers)
        return _later(path, f"The model is being loaded ({told.phase})")


def _later(path: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return unavailable(f"{message}; try again later", path, _SECONDS_TO_RETRY, headers)


async def _have_sent(request: Request) -> None:
    """Let the client finish: one that still sends when it is hung up on may not see the reply."""
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_SECONDS_FOR_BODY):
            async for _ in request.stream():
                pass
