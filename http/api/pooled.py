"""What requests for embeddings and scores have in common: to be prepared, computed and counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from starlette.requests import ClientDisconnect, Request

from paged.http.api.disconnect import while_connected
from paged.http.api.protocol import PromptTokensDetails, Usage
from paged.http.api.service import PoolingService
from paged.http.api.timeouts import in_time
from paged.http.meter import count_tokens
from paged.runtime.errors import DeadlineExceeded, InvalidRequest
from paged.runtime.long_text import without_hurry

logger = logging.getLogger(__name__)

MAX_INPUTS = 2048
"""Texts, or pairs of them, in a request."""


class Output(Protocol):
    """An answer for one text or pair, with the tokens that were read for it."""

    @property
    def prompt_token_ids(self) -> list[int]: ...


async def prepared[T](lengths: Sequence[int], prepare: Callable[[], T], name: str) -> T:
    """What `prepare` makes of texts, without holding up others if they are long.

    Args:
        lengths: characters of each text or pair, or how many token ids.
        name: of the request's field.

    Raises:
        InvalidRequest: there are too many, or as `prepare` raises.
    """
    if len(lengths) > MAX_INPUTS:
        raise InvalidRequest(f"{name} may have {MAX_INPUTS} entries, got {len(lengths)}", name)
    return await without_hurry(sum(lengths), prepare)


async def computed[O: Output](
    service: PoolingService,
    request: Request,
    id: str,
    submit: Callable[[], Future[list[O]]],
    deadline: float,
) -> list[O]:
    """The outputs of a request, which ends at its deadline, and when the client goes away.

    Args:
        submit: has the engine begin.
        deadline: on the clock of `time.monotonic`; 0 for none.

    Raises:
        Overloaded, DeadlineExceeded.
    """
    reason, tokens, start = "error", 0, time.perf_counter()
    future = submit()
    try:
        async with in_time(deadline):
            outputs = await while_connected(request.receive, asyncio.wrap_future(future))
        reason, tokens = "stop", num_tokens(outputs)
        count_tokens(tokens)
        if service.log_requests:
            fields = {"request_id": id, "model": service.model_name, "prompt_tokens": tokens}
            values = (*fields.values(), len(outputs))
            logger.info("%s: %s, %d tokens in %d inputs", *values, extra={"fields": fields})
        return outputs
    except DeadlineExceeded:
        reason = "timeout"
        raise
    except (ClientDisconnect, asyncio.CancelledError):
        reason = "abort"
        raise
    finally:
        service.metrics.count_pooling(reason, tokens, time.perf_counter() - start)


def num_tokens(outputs: Sequence[Output]) -> int:
    """Tokens that were read for them."""
    return sum(len(output.prompt_token_ids) for output in outputs)


def usage(outputs: Sequence[Output]) -> Usage:
    """Tokens that a request took; it makes none."""
    tokens = num_tokens(outputs)
    return Usage(tokens, 0, tokens, PromptTokensDetails(0))
