"""GET /openapi.json and /docs: the routes and their bodies, as the protocol declares them."""

from __future__ import annotations

import html
import inspect
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import paged
from paged.http.api.errors import ErrorBody
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
    "/v1/embeddings": (EmbeddingRequest, PooledList[Embedding]),
    **dict.fromkeys(("/score", "/v1/score"), _SCORES),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RANKING),
    "/tokenize": (TokenizeRequest, Tokenized),
    "/detokenize": (DetokenizeRequest, Detokenized),
    "/tokenizer_info": (None, TokenizerInfo),
    "/v1/models": (None, ModelList),
    "/v1/models/{name}": (None, ModelCard),
}
_STREAMED = ("/v1/chat/completions", "/v1/completions")
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
    kinds = {kind for pair in _BODIES.values() for kind in pair if kind is not None} | {ErrorBody}
    where = "#/components/schemas/{name}"
    ordered = sorted(kinds, key=str)
    refs, schemas = msgspec.json.schema_components(ordered, ref_template=where)
    refs_by_kind = dict(zip(ordered, refs, strict=True))
    paths: dict[str, Any] = {}
    for route in filter(lambda route: route.include_in_schema, routes):
        path = route.path.replace(":path}", "}")
        paths[path] = {verb: _operation(route, path, refs_by_kind) for verb in _verbs(route)}
    info = {"title": "Paged", "version": paged.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _verbs(route: Route) -> Iterator[str]:
    return (verb.lower() for verb in sorted(route.methods or ()) if verb != "HEAD")


def _operation(route: Route, path: str, refs: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    takes, gives = _BODIES.get(path, (None, None))
    operation: dict[str, Any] = {
        "summary": (inspect.getdoc(route.endpoint) or "").partition("\n")[0],
        "responses": {
            "200": {"description": "Success"} | (_json(refs[gives]) if gives else {}),
            "default": {"description": "An error"} | _json(refs[ErrorBody]),
        },
    }
    if path in _STREAMED:
        operation["responses"]["200"]["content"]["text/event-stream"] = {}
    if takes:
        operation["requestBody"] = {"required": True} | _json(refs[takes])
    if "{name}" in path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
