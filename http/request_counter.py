"""How many HTTP requests there were and how long they took, under few and known labels."""

from __future__ import annotations

import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged.http.api.errors import REFUSAL_CAUSE
from paged.http.paths import OPEN_PATHS, STATUS_PATH, path_of

_UNCOUNTED_PATHS = OPEN_PATHS | {"/load", STATUS_PATH}
DIRECT_SEND = "paged.direct_send"
"""Where a request's scope has the server's own `send`. No middleware looks at the parts of a body,
and six of them take as long as encoding one: streams send theirs past them, after the head."""
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


@dataclass
class Load:
    """How many HTTP requests are being answered."""

    num_requests: int = 0


def refusals_in(registry: CollectorRegistry) -> Counter:
    """Counts refusals, those too that the gate makes before a request comes so far."""
    text = "HTTP requests refused, by cause."
    return Counter("paged:requests_refused", text, ["cause"], registry=registry)


class CountRequests:
    """Middleware that counts by route template, known verb and status.

    Args:
        app: what answers.
        registry: gets the metrics.
        load: is kept up to date.
        refused: as `refusals_in` makes it.
    """

    def __init__(
        self, app: ASGIApp, registry: CollectorRegistry, load: Load, refused: Counter
    ) -> None:
        self.app = app
        self.load = load
        self.refused = refused
        labels = ["handler", "method", "status"]
        self.count = Counter("http_requests", "HTTP requests.", labels, registry=registry)
        self.seconds = Histogram(
            "http_request_duration_seconds",
            "From a request's head to the end of its reply.",
            labels[:2],
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) in _UNCOUNTED_PATHS:
            await self.app(scope, receive, send)
            return
        scope[DIRECT_SEND] = send
        status = 500
        start = time.perf_counter()

        async def watch_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.load.num_requests += 1
        try:
            await self.app(scope, receive, watch_status)
        finally:
            self.load.num_requests -= 1
            self._take_note(scope, status, time.perf_counter() - start)

    def _take_note(self, scope: Scope, status: int, seconds: float) -> None:
        # The router leaves its route in the scope; paths as they came could be anything.
        handler = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self.count.labels(handler, method, status).inc()
        self.seconds.labels(handler, method).observe(seconds)
        if cause := scope.get(REFUSAL_CAUSE):
            self.refused.labels(cause).inc()
