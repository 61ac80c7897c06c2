"""POST /v1/embeddings."""

from __future__ import annotations

import time
from base64 import b64encode
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from paged.http.api.body import json_response, read_body
from paged.http.api.fields import POOLING_NEUTRAL
from paged.http.api.pooled import computed, prepared, usage
from paged.http.api.pooling_protocol import Embedding, EmbeddingRequest, PooledList
from paged.http.api.prompts import listed
from paged.http.api.protocol import now
from paged.http.api.service import models_of, new_id
from paged.http.api.timeouts import deadline_of
from paged.runtime.pooling.outputs import EmbeddingRequestOutput
from paged.runtime.pooling.reader import Tokens


async def embeddings(request: Request) -> Response:
    """A vector for each input."""
    models = models_of(request)
    body = await read_body(request, EmbeddingRequest, POOLING_NEUTRAL, models.max_body_size)
    service = models.for_vectors(body.model)
    service.engine.abilities.check_embeds()
    deadline, prompts = deadline_of(body.timeout, time.monotonic()), listed(body.input, "input")
    service.check_room(len(prompts))
    reader, special = service.engine.reader, body.add_special_tokens is not False

    def read() -> list[Tokens]:
        return reader.texts(prompts, body.truncate_prompt_tokens, add_special_tokens=special)

    created, reply_id = now(), new_id(request, "embd", body.request_id)
    texts = await prepared([len(prompt) for prompt in prompts], read, "input")
    submit = partial(service.engine.embed, texts, body.dimensions)
    outputs = await computed(service, request, reply_id, submit, deadline)
    return json_response(
        PooledList(
            id=reply_id,
            created=created,
            model=service.model_name,
            data=[_embedding(index, output, body) for index, output in enumerate(outputs)],
            usage=usage(outputs),
        )
    )


def _embedding(index: int, output: EmbeddingRequestOutput, body: EmbeddingRequest) -> Embedding:
    vector = output.outputs.embedding
    if body.encoding_format == "base64":
        return Embedding(index=index, embedding=b64encode(vector.astype("<f4").tobytes()).decode())
    return Embedding(index=index, embedding=vector.tolist())
