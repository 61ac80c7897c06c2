"""The application: routes, middleware, and the services behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import TypedDict, Unpack

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import paged
from paged.http.api.answers import AnswerFormat
from paged.http.api.anthropic.routes import count_tokens, create_message
from paged.http.api.chat import chat_completions
from paged.http.api.completions import completions
from paged.http.api.defaults import RequestDefaults
from paged.http.api.embeddings import embeddings
from paged.http.api.errors import ApiError, GenerationFailed, handle_error, unavailable
from paged.http.api.invocations import Handler, invocations
from paged.http.api.models import list_models, retrieve_model
from paged.http.api.openapi import openapi, page
from paged.http.api.rerank import rerank
from paged.http.api.responses.routes import StoredResponse, cancel_response, create_response
from paged.http.api.responses.store import ResponseStore
from paged.http.api.scores import score
from paged.http.api.service import (
    AnyService,
    Models,
    PoolingService,
    Service,
    models_of,
    no_text,
    no_vectors,
)
from paged.http.api.tokens import detokenize, tokenize, tokenizer_info
from paged.http.auth import RequireKey
from paged.http.bugs import AnswerBugs
from paged.http.engine import Engine
from paged.http.key_limits import (
    RATE_HEADERS,
    CountsOfFirst,
    LimitKeys,
    LocalCounts,
    answers_of,
)
from paged.http.keys import KeyRing
from paged.http.metrics import Metrics, registry_of
from paged.http.options import ServeOptions
from paged.http.paths import path_of
from paged.http.peers import Answers, Peers, added
from paged.http.request_counter import CountRequests, Load, refusals_in
from paged.http.request_ids import EchoRequestId
from paged.http.request_report import Reporter
from paged.http.status import DEBUG_ROUTES, STATUS_ROUTES, Glance, recent_of
from paged.http.trace_context import ReadTraceContext
from paged.runtime.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded
from paged.runtime.pooling.engine import PoolingEngine

_ALONE = Peers()
# Seconds after which a probe that failed may ask again.
_SECONDS_TO_RETRY = 5


class Door(TypedDict, total=False):
    """What an application is told of itself rather than of a model; see `create_server`."""

    api_keys: Sequence[str]
    admin_keys: Sequence[str]
    reads_traces: bool
    key_ring: KeyRing | None
    metrics_need_key: bool
    max_body_size: int
    default_timeout: float | None
    tells_tokenizer: bool
    allowed_origins: Sequence[str]
    allowed_methods: Sequence[str]
    allowed_headers: Sequence[str]
    allow_credentials: bool
    peers: Peers
    keeps_responses: bool


def create_app(
    engine: Engine | PoolingEngine,
    model_names: Sequence[str],
    *,
    chat_template: str | None = None,
    trust_request_chat_template: bool = False,
    answers: AnswerFormat | None = None,
    defaults: RequestDefaults | None = None,
    response_role: str = "assistant",
    log_requests: bool = False,
    reporters: Sequence[Reporter] = (),
    **door: Unpack[Door],
) -> Starlette:
    """An ASGI application that serves one model: see `create_service` and `create_server`."""
    service = create_service(
        engine,
        model_names,
        chat_template=chat_template,
        trust_request_chat_template=trust_request_chat_template,
        answers=answers,
        defaults=defaults,
        response_role=response_role,
        log_requests=log_requests,
        reporters=reporters,
    )
    return create_server([service], **door)


def create_service(
    engine: Engine | PoolingEngine,
    model_names: Sequence[str],
    number: int = 0,
    *,
    chat_template: str | None = None,
    trust_request_chat_template: bool = False,
    answers: AnswerFormat | None = None,
    defaults: RequestDefaults | None = None,
    response_role: str = "assistant",
    log_requests: bool = False,
    reporters: Sequence[Reporter] = (),
) -> AnyService:
    """A model as the routes see it.

    Args:
        engine: running; nobody here shuts it down.
        model_names: names that requests may use; replies carry the first.
        number: of the model in its server, from 0.
        chat_template: in place of the tokenizer's own.
        trust_request_chat_template: whether requests may bring one of their own.
        answers: how the model writes reasoning and tool calls; None for text alone.
        defaults: what requests leave open.
        response_role: that chat replies carry.
        log_requests: whether to log each request for vectors or scores.
        reporters: are told of each request for text that has ended.
    """
    names, metrics = tuple(model_names), Metrics(engine, model_names[0], number)
    if isinstance(engine, PoolingEngine):
        return PoolingService(engine, names, metrics, log_requests)
    return Service(
        engine,
        names,
        metrics,
        log_requests,
        tuple(reporters),
        chat_template=chat_template,
        trust_request_chat_template=trust_request_chat_template,
        answers=answers or AnswerFormat(),
        defaults=defaults or RequestDefaults(),
        role=response_role,
    )


def create_server(
    services: Sequence[AnyService],
    *,
    api_keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    reads_traces: bool = False,
    key_ring: KeyRing | None = None,
    metrics_need_key: bool = False,
    max_body_size: int = ServeOptions.max_body_size,
    default_timeout: float | None = None,
    tells_tokenizer: bool = False,
    allowed_origins: Sequence[str] = ("*",),
    allowed_methods: Sequence[str] = ("*",),
    allowed_headers: Sequence[str] = ("*",),
    allow_credentials: bool = False,
    peers: Peers = _ALONE,
    keeps_responses: bool = True,
) -> Starlette:
    """An ASGI application that serves models; its `state.models` holds them.

    Args:
        services: at least one, no two of a name. They decide which routes there are.
        api_keys: any of them is needed for all but the probes; none admits everyone.
        admin_keys: any of them is needed for /debug/state, which is not there without.
        reads_traces: whether requests say of which trace they are part.
        key_ring: more of them, with limits; one of either is needed then.
        metrics_need_key: whether one is needed for /metrics, too, where there are keys.
        max_body_size: bytes.
        default_timeout: seconds of requests that name none; None for no limit.
        tells_tokenizer: whether there is /tokenizer_info.
        allowed_origins, allowed_methods, allowed_headers, allow_credentials: what pages of other
            sites may ask of this server from a browser.
        peers: the other API processes, which have the same models.
        keeps_responses: whether those of /v1/responses can be asked for again. They never can be
            where there are peers.
    """
    registry, load = registry_of([service.metrics for service in services]), Load()
    refused = refusals_in(registry)
    middleware = [
        Middleware(CountRequests, registry=registry, load=load, refused=refused),
        Middleware(EchoRequestId),
        Middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=allowed_methods,
            allow_headers=allowed_headers,
            allow_credentials=allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After", *RATE_HEADERS],
        ),
    ]
    counts = LocalCounts() if peers.is_first else CountsOfFirst(peers)
    closed = {"/metrics"} if metrics_need_key else set()
    keys = {"keys": api_keys, "admin_keys": admin_keys, "closed": closed}
    if key_ring is not None:
        middleware.append(Middleware(LimitKeys, ring=key_ring, counts=counts, **keys))
    elif api_keys or admin_keys:
        middleware.append(Middleware(RequireKey, **keys))
    if reads_traces:
        middleware.append(Middleware(ReadTraceContext))
    middleware.append(Middleware(AnswerBugs))
    app = Starlette(
        routes=[
            *STATUS_ROUTES,
            *(DEBUG_ROUTES if admin_keys or key_ring is not None else ()),
            *_routes(services, tells_tokenizer=tells_tokenizer),
        ],
        middleware=middleware,
        exception_handlers=dict.fromkeys(_HANDLED, handle_error),
    )
    responses = ResponseStore() if keeps_responses and not peers.paths else None
    app.state.models = Models(tuple(services), max_body_size, responses, default_timeout)
    app.state.registry = registry
    app.state.load, app.state.refused = load, refused
    app.state.peers = peers
    app.state.glances = [Glance() for _ in services]
    app.state.key_ring, app.state.counts = key_ring, counts
    return app


def told(app: Starlette) -> Answers:
    """What the process of an application tells its peers."""
    state = app.state
    return {
        "troubles": state.models.troubles,
        "load": lambda: state.load.num_requests,
        "metrics": lambda: generate_latest(state.registry).decode(),
        "recent": lambda: recent_of(state.models),
        **(answers_of(state.counts) if isinstance(state.counts, LocalCounts) else {}),
    }


async def health(request: Request) -> Response:
    """200 while requests can be served by all models."""
    troubles = models_of(request).troubles()
    if not troubles:  # else the others may be gone by now
        troubles = sorted({*chain(*await request.app.state.peers.ask("troubles", list[str]))})
    if troubles:
        return unavailable("; ".join(troubles), path_of(request.scope), _SECONDS_TO_RETRY)
    return Response()


async def ready(request: Request) -> Response:
    """200 while requests are taken. Before that and while it stops, the gate answers."""
    return await health(request)


async def version(request: Request) -> Response:
    """The version of Paged."""
    return JSONResponse({"version": paged.__version__})


async def load(request: Request) -> Response:
    """How many requests are being answered, for load balancers."""
    state = request.app.state
    others = await state.peers.ask("load", int)
    return JSONResponse({"server_load": state.load.num_requests + sum(others)})


async def metrics(request: Request) -> Response:
    """For Prometheus; of all API processes, whichever is asked."""
    state = request.app.state
    exposition = generate_latest(state.registry)
    if others := await state.peers.ask("metrics", str):
        shared = frozenset().union(*(service.metrics.engine_names for service in state.models))
        exposition = await asyncio.to_thread(added, exposition.decode(), others, shared)
    return Response(exposition, media_type=CONTENT_TYPE_LATEST)


async def refuse_generation(request: Request) -> Response:
    """What models for embeddings or scores say when they are asked for text."""
    raise no_text(models_of(request).named(None))


async def refuse_pooling(request: Request) -> Response:
    """What models that generate text say when they are asked for embeddings or scores."""
    raise no_vectors(models_of(request).named(None))


_HANDLED = (
    ApiError,
    InvalidRequest,
    EngineDead,
    GenerationFailed,
    HTTPException,
    ClientDisconnect,
    Overloaded,
    DeadlineExceeded,
)
_ROUTES = [
    Route("/health", health),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/ready", ready),
    Route("/version", version),
    Route("/metrics", metrics),
    Route("/load", load),
    Route("/v1/models", list_models),
    Route("/openapi.json", openapi),
    Route("/docs", page),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/models/{name:path}", retrieve_model),
]
_GENERATION: dict[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": create_response,
    "/v1/messages": create_message,
    "/v1/messages/count_tokens": count_tokens,
}
_RESPONSES = [
    Route("/v1/responses/{response_id}", StoredResponse, methods=["GET", "DELETE"]),
    Route("/v1/responses/{response_id}/cancel", cancel_response, methods=["POST"]),
]
_POOLING: dict[str, Handler] = {
    "/v1/embeddings": embeddings,
    "/score": score,
    "/v1/score": score,
    "/rerank": rerank,
    "/v1/rerank": rerank,
    "/v2/rerank": rerank,
}


def _routes(services: Sequence[AnyService], *, tells_tokenizer: bool) -> list[Route]:
    """Those of all models, and for what none of them can do refusals."""
    refused: dict[str, Handler] = {}
    more = [Route("/tokenizer_info", tokenizer_info)] if tells_tokenizer else []
    if any(isinstance(service, Service) for service in services):
        more += _RESPONSES
    else:
        refused |= dict.fromkeys(_GENERATION, refuse_generation)
    if not any(isinstance(service, PoolingService) for service in services):
        refused |= dict.fromkeys(_POOLING, refuse_pooling)
    posts = _GENERATION | _POOLING | refused
    posts["/invocations"] = invocations(dict(posts))
    return [
        *_ROUTES,
        *more,
        *(
            Route(path, posts[path], methods=["POST"], include_in_schema=path not in refused)
            for path in posts
        ),
    ]
