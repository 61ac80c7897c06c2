"""The application: routes, middleware, and the service behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import paged
from paged.http.api.answers import AnswerFormat
from paged.http.api.chat import chat_completions
from paged.http.api.completions import completions
from paged.http.api.embeddings import embeddings
from paged.http.api.errors import ApiError, GenerationFailed, handle_error
from paged.http.api.models import list_models, retrieve_model
from paged.http.api.openapi import openapi, page
from paged.http.api.rerank import rerank
from paged.http.api.scores import score
from paged.http.api.service import PoolingService, Service, served_by
from paged.http.api.tokens import detokenize, tokenize
from paged.http.auth import RequireKey
from paged.http.engine import Engine
from paged.http.metrics import Metrics
from paged.http.options import ServeOptions
from paged.http.peers import Peers, added
from paged.http.request_counter import CountRequests
from paged.http.request_ids import EchoRequestId
from paged.runtime.errors import EngineDead, InvalidRequest, Unsupported
from paged.runtime.pooling.engine import PoolingEngine


def create_app(
    engine: Engine | PoolingEngine,
    model_names: Sequence[str],
    *,
    api_keys: Sequence[str] = (),
    max_body_size: int = ServeOptions.max_body_size,
    chat_template: str | None = None,
    trust_request_chat_template: bool = False,
    answers: AnswerFormat | None = None,
    log_requests: bool = False,
    allowed_origins: Sequence[str] = ("*",),
    allowed_methods: Sequence[str] = ("*",),
    allowed_headers: Sequence[str] = ("*",),
    allow_credentials: bool = False,
    peers: Peers | None = None,
) -> Starlette:
    """An ASGI application that serves `engine`; its `state.service` holds what the routes share.

    Args:
        engine: running; the application does not shut it down. It decides which routes there are.
        model_names: names that requests may use; replies carry the first.
        api_keys: any of them is needed for all but the probes; none admits everyone.
        max_body_size: bytes.
        chat_template: in place of the tokenizer's own.
        trust_request_chat_template: whether requests may bring one of their own.
        answers: how the model writes reasoning and tool calls; None for text alone.
        log_requests: whether to log each request's parameters (never its prompt).
        allowed_origins, allowed_methods, allowed_headers, allow_credentials: what pages of other
            sites may ask of this server from a browser.
        peers: other API processes of the same engine.
    """
    metrics = Metrics(engine, model_names[0])
    middleware = [
        Middleware(CountRequests, registry=metrics.registry),
        Middleware(EchoRequestId),
        Middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=allowed_methods,
            allow_headers=allowed_headers,
            allow_credentials=allow_credentials,
            expose_headers=["X-Request-Id"],
        ),
    ]
    if api_keys:
        middleware.append(Middleware(RequireKey, keys=api_keys))
    app = Starlette(
        routes=_routes(engine),
        middleware=middleware,
        exception_handlers=dict.fromkeys(_HANDLED, handle_error),
    )
    shared = (tuple(model_names), metrics, max_body_size, log_requests)
    app.state.peers = peers
    if isinstance(engine, PoolingEngine):
        app.state.service = PoolingService(engine, *shared)
    else:
        app.state.service = Service(
            engine,
            *shared,
            chat_template=chat_template,
            trust_request_chat_template=trust_request_chat_template,
            answers=answers or AnswerFormat(),
        )
    return app


async def health(request: Request) -> Response:
    """200 while requests can be served."""
    return Response(status_code=503 if served_by(request).engine.errored else 200)


async def version(request: Request) -> Response:
    """The version of Paged."""
    return JSONResponse({"version": paged.__version__})


async def metrics(request: Request) -> Response:
    """For Prometheus, of all API processes but when one of them asks."""
    metrics, peers = served_by(request).metrics, request.app.state.peers
    exposition = metrics.exposition()
    if peers is not None and request.scope["server"][1] != peers.own:
        others = await peers.expositions()
        exposition = await asyncio.to_thread(
            added, exposition.decode(), others, metrics.engine_names
        )
    return Response(exposition, media_type=CONTENT_TYPE_LATEST)


async def refuse_generation(request: Request) -> Response:
    """What a model for embeddings or scores says when it is asked for text."""
    raise Unsupported(
        "This model gives embeddings or scores and generates no text: ask /v1/embeddings, /score "
        "or /rerank"
    )


async def refuse_pooling(request: Request) -> Response:
    """What a model that generates text says when it is asked for embeddings or scores."""
    raise Unsupported(
        "This model was started to generate text; for embeddings and scores start one with "
        "--runner pooling"
    )


# The last one answers too, but a bug still reaches the server's log with its trace.
_HANDLED = (
    ApiError,
    InvalidRequest,
    EngineDead,
    GenerationFailed,
    HTTPException,
    ClientDisconnect,
    Exception,
)
_ROUTES = [
    Route("/health", health),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/version", version),
    Route("/metrics", metrics),
    Route("/v1/models", list_models),
    Route("/openapi.json", openapi),
    Route("/docs", page),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/models/{name:path}", retrieve_model),
]
_GENERATION = {"/v1/chat/completions": chat_completions, "/v1/completions": completions}
_POOLING = {
    "/v1/embeddings": embeddings,
    "/score": score,
    "/v1/score": score,
    "/rerank": rerank,
    "/v1/rerank": rerank,
    "/v2/rerank": rerank,
}


def _routes(engine: Engine | PoolingEngine) -> list[Route]:
    """Those of all models, those of this kind, and refusals for those of the other kind."""
    ours, others, refuse = _GENERATION, _POOLING, refuse_pooling
    if isinstance(engine, PoolingEngine):
        ours, others, refuse = _POOLING, _GENERATION, refuse_generation
    posts = ours | dict.fromkeys(others, refuse)
    return [*_ROUTES, *(Route(path, posts[path], methods=["POST"]) for path in posts)]
