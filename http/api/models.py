"""GET /v1/models: the names that the model answers to."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from paged.http.api.body import json_response
from paged.http.api.protocol import ModelCard, ModelList
from paged.http.api.service import AnyService, served_by


async def list_models(request: Request) -> Response:
    """All names of the model."""
    service = served_by(request)
    return json_response(ModelList(data=[_card(service, name) for name in service.model_names]))


async def retrieve_model(request: Request) -> Response:
    """One of them."""
    service = served_by(request)
    name = request.path_params["name"]
    service.check_model(name)
    return json_response(_card(service, name))


def _card(service: AnyService, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        root=service.model_name,
        max_model_len=service.engine.max_model_len,
        created=service.created,
    )
