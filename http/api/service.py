"""What every route shares: the models of the server, their names and running requests."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from paged.http.api.answers import AnswerFormat
from paged.http.api.defaults import RequestDefaults
from paged.http.api.errors import ApiError
from paged.http.api.protocol import now
from paged.http.api.responses.store import ResponseStore
from paged.http.engine import AnyEngine, Engine
from paged.http.metrics import Metrics
from paged.http.request_report import Reporter
from paged.runtime.errors import InvalidRequest, Overloaded, Unsupported
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
        log_requests: whether each request for vectors or scores is logged.
        reporters: are told of each request for text that has ended.
        created: seconds, for /v1/models.
    """

    engine: E
    model_names: tuple[str, ...]
    metrics: Metrics
    log_requests: bool = False
    reporters: tuple[Reporter, ...] = ()
    created: int = field(default_factory=now)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def check_room(self, num_sequences: int) -> None:
        """Raise Overloaded if the queue, as last heard of, has no room for so many sequences.

        It is asked before a prompt costs time; the engine has the last word. A request that finds
        nobody waiting is left to that: it may be one that there never is room for.
        """
        stats = self.engine.stats()
        if stats.room is not None and stats.num_waiting and num_sequences > stats.room:
            message = f"The queue is full: {stats.num_waiting} sequences wait"
            raise Overloaded(message, "queue", stats.retry_after)


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


@dataclass(frozen=True)
class Models:
    """All models of a server. A request that names none is for the first that can answer it.

    Attributes:
        services: at least one; no name is that of two.
        max_body_size: bytes of a request body.
        default_timeout: seconds of requests that name none; None for no limit.
        responses: those of /v1/responses that can be asked for again; None where none are kept.
    """

    services: tuple[AnyService, ...]
    max_body_size: int
    responses: ResponseStore | None
    default_timeout: float | None = None

    def __iter__(self) -> Iterator[AnyService]:
        return iter(self.services)

    def dead(self) -> list[str]:
        """Those whose engine has died for good."""
        return [service.model_name for service in self if service.engine.errored]

    def troubles(self) -> list[str]:
        """What keeps any of them from serving now."""
        return [
            f"The engine of {service.model_name} {trouble}"
            for service in self
            if (trouble := service.engine.trouble)
        ]

    def kept_responses(self, param: str | None = None) -> ResponseStore:
        """For requests that need a kept response, by a field. Raises Unsupported without any."""
        if self.responses is None:
            raise Unsupported(
                "This server has several processes, and so keeps no responses: send the whole "
                "conversation in `input`, or start the server with --api-server-count 1",
                param,
            )
        return self.responses

    def named(self, name: str | None) -> AnyService:
        """The model of a name, which may be left out. Raises ApiError (404) if it is no model's."""
        for service in self.services:
            if not name or name in service.model_names:
                return service
        known = _listed([each for service in self.services for each in service.model_names])
        message = f"The model `{(name or '')[:100]}` does not exist; this server has {known}"
        raise ApiError(404, message, "NotFoundError", "model")

    def for_text(self, name: str | None) -> Service:
        """A model that generates text. Raises as `named`, and Unsupported for one that does not."""
        return self._of(Service, name, no_text)

    def for_vectors(self, name: str | None) -> PoolingService:
        """A model that gives embeddings or scores. Raises as `named`, and Unsupported as above."""
        return self._of(PoolingService, name, no_vectors)

    def _of[S: AnyService](
        self,
        kind: type[S],
        name: str | None,
        refusal: Callable[[AnyService, Sequence[S]], Unsupported],
    ) -> S:
        able = [service for service in self.services if isinstance(service, kind)]
        service = self.named(name) if name or not able else able[0]
        if isinstance(service, kind):
            return service
        raise refusal(service, able)


def no_text(service: AnyService, able: Sequence[AnyService] = ()) -> Unsupported:
    """What a model for embeddings or scores says when it is asked for text; `able` are others."""
    return Unsupported(
        f"The model `{service.model_name}` gives embeddings or scores and generates no text: "
        f"ask /v1/embeddings, /score or /rerank{_or_else(able)}",
        "model",
    )


def no_vectors(service: AnyService, able: Sequence[AnyService] = ()) -> Unsupported:
    """What a model that generates text says when it is asked for embeddings or scores."""
    return Unsupported(
        f"The model `{service.model_name}` was started to generate text; for embeddings and "
        f"scores start one with --runner pooling{_or_else(able)}",
        "model",
    )


def models_of(request: Request) -> Models:
    """The models of the server that has got a request."""
    models: Models = request.app.state.models
    return models


def _or_else(able: Sequence[AnyService]) -> str:
    """What may be asked instead."""
    return f", or ask {_listed([each.model_name for each in able])}" if able else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def new_id(request: Request, prefix: str, client_id: str | None, *, joint: str = "-") -> str:
    """An id of our own, ending in the client's (from X-Request-Id or the body), made harmless."""
    ours = f"{prefix}{joint}{uuid.uuid4().hex}"
    theirs = request.headers.get("x-request-id") or client_id
    return f"{ours}-{_NOT_IN_ID.sub('_', theirs[:_MAX_CLIENT_ID])}" if theirs else ours
