"""What every route shares: the engine, the names it answers to, and the running requests."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field

from starlette.requests import Request

from paged.http.api.errors import ApiError
from paged.http.api.protocol import now
from paged.http.engine import Engine
from paged.http.metrics import Metrics

_MAX_CLIENT_ID = 64
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class Service:
    """One served model.

    Attributes:
        engine: does the work.
        model_names: names that requests may use; replies carry the first.
        metrics: counted by the routes, read by /metrics.
        max_body_size: bytes of a request body.
        chat_template: in place of the tokenizer's own; None for that.
        log_requests: whether each request is logged.
        created: seconds, for /v1/models.
        running: engine ids of the requests in flight.
    """

    engine: Engine
    model_names: tuple[str, ...]
    metrics: Metrics
    max_body_size: int
    chat_template: str | None = None
    log_requests: bool = False
    created: int = field(default_factory=now)
    running: set[str] = field(default_factory=set)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for a name that is not served; none at all means the only model."""
        if name and name not in self.model_names:
            message = f"The model `{name[:100]}` does not exist; this is `{self.model_name}`"
            raise ApiError(404, message, "NotFoundError", "model")


def service_of(request: Request) -> Service:
    """The service behind a route."""
    service: Service = request.app.state.service
    return service


def new_id(request: Request, prefix: str, client_id: str | None) -> str:
    """An id of our own, ending in the client's (from X-Request-Id or the body), made harmless."""
    ours = f"{prefix}-{uuid.uuid4().hex}"
    theirs = request.headers.get("x-request-id") or client_id
    return f"{ours}-{_NOT_IN_ID.sub('_', theirs[:_MAX_CLIENT_ID])}" if theirs else ours
