"""Errors about a chat request in the words of the API whose request it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from paged.runtime.errors import InvalidRequest


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors that name a field of `names` name it as the client wrote it."""
    try:
        yield
    except InvalidRequest as error:
        ours, message = error.param, str(error)
        if ours is None or ours not in names:
            raise
        if message.startswith(ours):
            message = names[ours] + message.removeprefix(ours)
        raise type(error)(message, names[ours]) from error
