"""POST /rerank: documents by how well they answer a query, as clients of Jina and Cohere ask."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from paged.http.api.body import json_response, read_body
from paged.http.api.fields import POOLING_NEUTRAL
from paged.http.api.pooled import usage
from paged.http.api.pooling_protocol import Document, RankedDocument, Ranking, RerankRequest
from paged.http.api.scores import scored
from paged.http.api.service import models_of, new_id
from paged.runtime.errors import InvalidRequest


async def rerank(request: Request) -> Response:
    """The documents with their scores, the best first."""
    models = models_of(request)
    body = await read_body(request, RerankRequest, POOLING_NEUTRAL, models.max_body_size)
    service = models.for_vectors(body.model)
    documents = _documents(body)
    reply_id = new_id(request, "rerank", body.request_id)
    pairs = [(body.query, document.text) for document in documents]
    outputs = await scored(service, request, reply_id, body, pairs)
    shows = body.return_documents is not False
    ranked = [
        RankedDocument(index=index, relevance_score=output.outputs.score, document=document)
        if shows
        else RankedDocument(index=index, relevance_score=output.outputs.score)
        for index, (output, document) in enumerate(zip(outputs, documents, strict=True))
    ]
    ranked.sort(key=lambda each: -each.relevance_score)
    results = ranked[: body.top_n or None]
    return json_response(
        Ranking(id=reply_id, model=service.model_name, results=results, usage=usage(outputs))
    )


def _documents(body: RerankRequest) -> list[Document]:
    if not body.documents:
        raise InvalidRequest("documents must not be empty", "documents")
    if body.top_n is not None and body.top_n < 0:
        raise InvalidRequest(f"top_n must be at least 0 (all of them), got {body.top_n}", "top_n")
    return [Document(each) if isinstance(each, str) else each for each in body.documents]
