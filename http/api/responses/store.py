"""Responses that can be asked for again and continued: as many as there is room for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from paged.http.api.errors import ApiError
from paged.http.api.responses.protocol import InputItem, Response

_MAX_RESPONSES = 1000
_MAX_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Stored:
    """A response and what came before it.

    Attributes:
        response: as it is now.
        items: the conversation so far, the answer included once it has ended.
        task: what makes it in the background; None for one that a client waited for.
    """

    response: Response
    items: tuple[InputItem, ...]
    task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """Bytes, as JSON: conversations that share their beginning count it each."""
        return len(msgspec.json.encode((self.response, self.items)))


class ResponseStore:
    """Keeps what was used last; what runs in the background is cancelled when it has to go.

    Args:
        max_responses, max_bytes: kept at most.
    """

    def __init__(self, max_responses: int = _MAX_RESPONSES, max_bytes: int = _MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, tuple[Stored, int]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    def put(self, stored: Stored) -> None:
        """Keep a response, in place of what has its id; not one that is too large by itself."""
        self._drop(stored.response.id)
        size = stored.size
        if size > self._max_bytes:
            _cancel(stored)
            return
        self._stored[stored.response.id] = stored, size
        self._num_bytes += size
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            oldest = next(iter(self._stored))
            _cancel(self._drop(oldest))

    def get(self, response_id: str, param: str | None = None) -> Stored:
        """A response, by which it is used. Raises ApiError (404, about `param`) without it."""
        if response_id not in self._stored:
            raise self._missing(response_id, param)
        self._stored.move_to_end(response_id)
        return self._stored[response_id][0]

    def delete(self, response_id: str) -> None:
        """Forget a response, which ends what makes it. Raises ApiError (404) without it."""
        if response_id not in self._stored:
            raise self._missing(response_id, None)
        _cancel(self._drop(response_id))

    def _drop(self, response_id: str) -> Stored | None:
        stored, size = self._stored.pop(response_id, (None, 0))
        self._num_bytes -= size
        return stored

    def _missing(self, response_id: str, param: str | None) -> ApiError:
        message = (
            f"There is no response {response_id[:100]!r}: either it never was, or it came with "
            "store false, was deleted, or made room for others (this server keeps the "
            f"{self._max_responses} used last, with {self._max_bytes >> 20} MiB)"
        )
        return ApiError(404, message, "NotFoundError", param)


def _cancel(stored: Stored | None) -> None:
    if stored is not None and stored.task is not None:
        stored.task.cancel()
