"""GET /v1/models: the names that the server's models answer to."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from paged.http.api.body import json_response
from paged.http.api.protocol import ModelCard, ModelList
from paged.http.api.service import AnyService, models_of


async def list_models(request: Request) -> Response:
    """All names of all models."""
    cards = [_card(each, name) for each in models_of(request) for name in each.model_names]
    return json_response(ModelList(data=cards))


async def retrieve_model(request: Request) -> Response:
    """One of them; without a name, all."""
    name = request.path_params["name"]
    if not name:
        return await list_models(request)
    return json_response(_card(models_of(request).named(name), name))


def _card(service: AnyService, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        root=service.model_name,
        max_model_len=service.engine.max_model_len,
        created=service.created,
    )
