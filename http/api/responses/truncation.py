"""`truncation: "auto"`: a conversation that is too long loses its oldest turns."""

from __future__ import annotations

from msgspec import structs

from paged.http.api.chat import prepared
from paged.http.api.protocol import ChatRequest
from paged.http.api.service import Service
from paged.runtime.errors import InvalidRequest


async def fitting(service: Service, body: ChatRequest) -> ChatRequest:
    """The request with as few turns left out as leave room for its answer.

    A turn begins with a message of the user and has all that follows it, so that no result of a
    tool is without its call; what stands before the first one, as instructions, always stays. A
    last turn that is too long by itself is for others to refuse.
    """
    messages = body.messages
    starts = [at for at, message in enumerate(messages) if message.role == "user"]
    if not starts or await _fits(service, body):
        return body

    def without(num_turns: int) -> ChatRequest:
        kept = messages[: starts[0]] + messages[starts[num_turns] :]
        return structs.replace(body, messages=kept)

    low, high = 1, len(starts) - 1  # turns to leave out: a search by halves, each look renders all
    while low < high:
        middle = (low + high) // 2
        if await _fits(service, without(middle)):
            high = middle
        else:
            low = middle + 1
    return without(high)


async def _fits(service: Service, body: ChatRequest) -> bool:
    try:
        chat = await prepared(service, body, "measured")
    except InvalidRequest as error:
        if error.param == "input_tokens":
            return False
        raise
    [prompt] = chat.job.prompts
    return len(prompt) + (body.max_tokens or 1) <= service.engine.max_model_len
