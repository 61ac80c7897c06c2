"""GET /openapi.json and /docs: the routes and their bodies, as the protocol declares them."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import paged
from paged.http.api.anthropic.protocol import (
    CountTokensRequest,
    MessageReply,
    MessagesRequest,
    TokenCount,
)
from paged.http.api.errors import AnthropicError, ErrorBody, is_anthropic
from paged.http.api.pooling_protocol import (
    Embedding,
    EmbeddingRequest,
    PooledList,
    Ranking,
    RerankRequest,
    Score,
    ScoreRequest,
)
from paged.http.api.protocol import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ModelCard,
    ModelList,
)
from paged.http.api.responses.protocol import DeletedResponse, ResponsesRequest
from paged.http.api.responses.protocol import Response as ResponseReply
from paged.http.api.tokens import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    TokenizerInfo,
)

_SCORES, _RANKING = (ScoreRequest, PooledList[Score]), (RerankRequest, Ranking)
_BODIES: dict[str, tuple[type[msgspec.Struct] | None, type[msgspec.Struct]]] = {
    "/v1/chat/completions": (ChatRequest, ChatCompletion),
    "/v1/completions": (CompletionRequest, Completion),
    "/v1/responses": (ResponsesRequest, ResponseReply),
    "/v1/responses/{response_id}": (None, ResponseReply),
    "/v1/responses/{response_id}/cancel": (None, ResponseReply),
    "/v1/messages": (MessagesRequest, MessageReply),
    "/v1/messages/count_tokens": (CountTokensRequest, TokenCount),
    "/v1/embeddings": (EmbeddingRequest, PooledList[Embedding]),
    **dict.fromkeys(("/score", "/v1/score"), _SCORES),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RANKING),
    "/tokenize": (TokenizeRequest, Tokenized),
    "/detokenize": (DetokenizeRequest, Detokenized),
    "/tokenizer_info": (None, TokenizerInfo),
    "/v1/models": (None, ModelList),
    "/v1/models/{name}": (None, ModelCard),
}
_DELETED = {"/v1/responses/{response_id}": DeletedResponse}
_ERRORS = (ErrorBody, AnthropicError)
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_PAGE = """<!doctype html>
<meta charset="utf-8"><title>Paged</title>
<style>body {{ font: 16px sans-serif; margin: 2em auto; max-width: 50em }}
td {{ padding: .2em 1em .2em 0; vertical-align: top }} code {{ white-space: nowrap }}</style>
<h1>Paged {version}</h1><p>For programs: <a href="openapi.json">openapi.json</a>.</p>
<table>{rows}</table>
"""


async def openapi(request: Request) -> Response:
    """The description of this server's routes."""
    servers = [{"url": request.scope.get("root_path") or "/"}]
    return JSONResponse({**describe(request.app.routes), "servers": servers})


async def page(request: Request) -> Response:
    """The same for people."""
    rows = "".join(
        f"<tr><td><code>{verb.upper()} {html.escape(path)}</code><td>{html.escape(each['summary'])}"
        for path, verbs in describe(request.app.routes)["paths"].items()
        for verb, each in verbs.items()
    )
    return HTMLResponse(_PAGE.format(version=paged.__version__, rows=rows))


def describe(routes: list[Route]) -> dict[str, Any]:
    """OpenAPI 3.1 of these routes."""
    kinds = {kind for pair in _BODIES.values() for kind in pair if kind is not None}
    kinds |= {*_ERRORS, *_DELETED.values()}
    where = "#/components/schemas/{name}"
    ordered = sorted(kinds, key=str)
    refs, schemas = msgspec.json.schema_components(ordered, ref_template=where)
    refs_by_kind = dict(zip(ordered, refs, strict=True))
    paths: dict[str, Any] = {}
    for route in filter(lambda route: route.include_in_schema, routes):
        path = route.path.replace(":path}", "}")
        paths[path] = {verb: _operation(route, path, verb, refs_by_kind) for verb in _verbs(route)}
    info = {"title": "Paged", "version": paged.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _verbs(route: Route) -> Iterator[str]:
    return (verb.lower() for verb in sorted(route.methods or ()) if verb != "HEAD")


def _operation(
    route: Route, path: str, verb: str, refs: dict[Any, dict[str, Any]]
) -> dict[str, Any]:
    takes, gives = _BODIES.get(path, (None, None))
    if verb == "delete":
        gives = _DELETED[path]
    endpoint = getattr(route.endpoint, verb, route.endpoint)
    error = AnthropicError if is_anthropic(path) else ErrorBody
    operation: dict[str, Any] = {
        "summary": (inspect.getdoc(endpoint) or "").partition("\n")[0],
        "responses": {
            "200": {"description": "Success"} | (_json(refs[gives]) if gives else {}),
            "default": {"description": "An error"} | _json(refs[error]),
        },
    }
    if path in _STREAMED:
        operation["responses"]["200"]["content"]["text/event-stream"] = {}
    if takes:
        operation["requestBody"] = {"required": True} | _json(refs[takes])
    if names := re.findall(r"{(\w+)}", path):
        where = {"in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [{"name": name} | where for name in names]
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
