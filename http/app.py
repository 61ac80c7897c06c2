"""The application: routes, middleware, and the service behind them."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import paged
from paged.http.api.chat import chat_completions
from paged.http.api.completions import completions
from paged.http.api.errors import ApiError, GenerationFailed, handle_error
from paged.http.api.models import list_models, retrieve_model
from paged.http.api.service import Service, service_of
from paged.http.auth import RequireKey
from paged.http.engine import Engine
from paged.http.metrics import Metrics
from paged.http.options import ServeOptions
from paged.http.request_counter import CountRequests
from paged.runtime.errors import EngineDead, InvalidRequest


def create_app(
    engine: Engine,
    model_names: Sequence[str],
    *,
    api_keys: Sequence[str] = (),
    max_body_size: int = ServeOptions.max_body_size,
    chat_template: str | None = None,
    log_requests: bool = False,
) -> Starlette:
    """An ASGI application that serves `engine`; its `state.service` holds what the routes share.

    Args:
        engine: running; the application does not shut it down.
        model_names: names that requests may use; replies carry the first.
        api_keys: any of them is needed for all but the probes; none admits everyone.
        max_body_size: bytes.
        chat_template: in place of the tokenizer's own.
        log_requests: whether to log each request's parameters (never its prompt).
    """
    metrics = Metrics(engine, model_names[0])
    middleware = [Middleware(CountRequests, registry=metrics.registry)]
    if api_keys:
        middleware.append(Middleware(RequireKey, keys=api_keys))
    app = Starlette(
        routes=_ROUTES,
        middleware=middleware,
        exception_handlers=dict.fromkeys(_HANDLED, handle_error),
    )
    app.state.service = Service(
        engine, tuple(model_names), metrics, max_body_size, chat_template, log_requests
    )
    return app


async def health(request: Request) -> Response:
    """200 while requests can be served."""
    return Response(status_code=503 if service_of(request).engine.errored else 200)


async def version(request: Request) -> Response:
    """The version of Paged."""
    return JSONResponse({"version": paged.__version__})


async def metrics(request: Request) -> Response:
    """For Prometheus."""
    exposition = service_of(request).metrics.exposition()
    return Response(exposition, media_type=CONTENT_TYPE_LATEST)


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
    Route("/v1/models/{name:path}", retrieve_model),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
]
