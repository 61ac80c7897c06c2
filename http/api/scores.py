"""POST /score: how well texts answer each other."""

from __future__ import annotations

import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from paged.http.api.body import json_response, read_body
from paged.http.api.fields import POOLING_NEUTRAL
from paged.http.api.pooled import computed, prepared, usage
from paged.http.api.pooling_protocol import PooledList, PoolingRequest, Score, ScoreRequest
from paged.http.api.protocol import now
from paged.http.api.service import PoolingService, models_of, new_id
from paged.http.api.timeouts import deadline_of
from paged.runtime.errors import InvalidRequest
from paged.runtime.pooling.comparison import Comparison, pair_up
from paged.runtime.pooling.outputs import ScoringRequestOutput

_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


async def score(request: Request) -> Response:
    """A score for each pair."""
    models = models_of(request)
    body = await read_body(request, ScoreRequest, POOLING_NEUTRAL, models.max_body_size)
    service = models.for_vectors(body.model)
    created, reply_id = now(), new_id(request, "score", body.request_id)
    outputs = await scored(service, request, reply_id, body, _pairs(body))
    data = [Score(index=index, score=output.outputs.score) for index, output in enumerate(outputs)]
    return json_response(
        PooledList(
            id=reply_id,
            created=created,
            model=service.model_name,
            data=data,
            usage=usage(outputs),
        )
    )


async def scored(
    service: PoolingService,
    request: Request,
    reply_id: str,
    body: PoolingRequest,
    pairs: list[tuple[str, str]],
) -> list[ScoringRequestOutput]:
    """The scores of pairs, in their order."""
    engine, deadline = service.engine, deadline_of(body.timeout, time.monotonic())
    service.check_room(len(pairs))
    lengths = [len(first) + len(second) for first, second in pairs]

    def compare() -> Comparison:
        return engine.compare(pairs, body.truncate_prompt_tokens)

    comparison = await prepared(lengths, compare, "documents")
    submit = partial(engine.score, comparison)
    return await computed(service, request, reply_id, submit, deadline)


def _pairs(body: ScoreRequest) -> list[tuple[str, str]]:
    for first, second in _SIDES:
        queries, documents = getattr(body, first), getattr(body, second)
        if queries is not None and documents is not None:
            return pair_up(queries, documents)
    names = ", or ".join(f"{first} and {second}" for first, second in _SIDES)
    raise InvalidRequest(f"a score needs two texts: {names}", _SIDES[0][0])
