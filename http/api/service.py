"""What every route shares: the engine, the names it answers to, and the running requests."""

from __future__ import annotations

import asyncio
import re
import uuid
from dataclasses import dataclass, field

from starlette.requests import Request

from paged.http.api.answers import AnswerFormat
from paged.http.api.defaults import RequestDefaults
from paged.http.api.errors import ApiError
from paged.http.api.protocol import now
from paged.http.engine import AnyEngine, Engine
from paged.http.metrics import Metrics
from paged.runtime.errors import InvalidRequest
from paged.runtime.pooling.engine import PoolingEngine

_MAX_CLIENT_ID = 64
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class Served[E: AnyEngine]:
    """One served model, whatever it is for.

    Attributes:
        engine: does the work.
        model_names: names that requests may use; replies carry the first.
        metrics: counted by the routes, read by /metrics.
        max_body_size: bytes of a request body.
        log_requests: whether each request is logged.
        created: seconds, for /v1/models.
    """

    engine: E
    model_names: tuple[str, ...]
    metrics: Metrics
    max_body_size: int
    log_requests: bool = False
    created: int = field(default_factory=now)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for a name that is not served; none at all means the only model."""
        if name and name not in self.model_names:
            message = f"The model `{name[:100]}` does not exist; this is `{self.model_name}`"
            raise ApiError(404, message, "NotFoundError", "model")


@dataclass(frozen=True)
class Service(Served[Engine]):
    """A served model that generates text.

    Attributes:
        chat_template: in place of the tokenizer's own; None for that.
        trust_request_chat_template: whether requests may bring one of their own.
        answers: how the model's answers are read.
        defaults: what requests leave open.
        role: that chat replies carry.
        running: engine ids of the requests in flight.
    """

    chat_template: str | None = None
    trust_request_chat_template: bool = False
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    role: str = "assistant"
    running: set[str] = field(default_factory=set)

    @property
    def num_running(self) -> int:
        """Requests in flight."""
        return len(self.running)

    def template_for(self, wanted: str | None) -> str | None:
        """The template of a request. Raises InvalidRequest for its own where that is not allowed.

        A template is a program: one from a stranger may take as much time as it likes.
        """
        if wanted is None:
            return self.chat_template
        if not self.trust_request_chat_template:
            raise InvalidRequest(
                "This server takes no chat_template from requests; start it with "
                "--trust-request-chat-template to allow that",
                "chat_template",
            )
        return wanted

    async def abort_running(self) -> None:
        """End them: each gives a last output."""
        for request_id in list(self.running):
            await self.engine.abort(request_id)


@dataclass(frozen=True)
class PoolingService(Served[PoolingEngine]):
    """A served model that gives embeddings or scores."""

    @property
    def num_running(self) -> int:
        """Texts in flight."""
        stats = self.engine.stats()
        return stats.num_running + stats.num_waiting

    async def abort_running(self) -> None:
        """End them: their requests are told that the engine has stopped."""
        await asyncio.to_thread(self.engine.shutdown)


AnyService = Service | PoolingService


def served_by(request: Request) -> AnyService:
    """The service behind a route that every model has."""
    service: AnyService = request.app.state.service
    return service


def service_of(request: Request) -> Service:
    """The service behind a route that generates text."""
    service: Service = request.app.state.service
    return service


def pooling_service_of(request: Request) -> PoolingService:
    """The service behind a route for embeddings or scores."""
    service: PoolingService = request.app.state.service
    return service


def new_id(request: Request, prefix: str, client_id: str | None) -> str:
    """An id of our own, ending in the client's (from X-Request-Id or the body), made harmless."""
    ours = f"{prefix}-{uuid.uuid4().hex}"
    theirs = request.headers.get("x-request-id") or client_id
    return f"{ours}-{_NOT_IN_ID.sub('_', theirs[:_MAX_CLIENT_ID])}" if theirs else ours
