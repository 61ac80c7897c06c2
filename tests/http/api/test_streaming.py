"""Events made from what a stream's chunks share are those made whole."""

from typing import Any

import pytest

from paged.http.api.protocol import (
    ChatChunk,
    ChunkChoice,
    Completion,
    CompletionChoice,
    Delta,
)
from paged.http.api.streaming import EventMaker, event

HEAD = {"id": 'cmpl-"choices":[', "model": "a/b", "created": 7}
COMPLETION = CompletionChoice(
    index=1, text='"]}\n\n', logprobs=None, finish_reason=None, stop_reason=None, token_ids=[3]
)
CHAT = ChunkChoice(index=0, delta=Delta(content="ü"), finish_reason="stop")


@pytest.mark.parametrize(("kind", "choice"), [(Completion, COMPLETION), (ChatChunk, CHAT)])
def test_events_read_as_if_made_whole(kind: Any, choice: CompletionChoice | ChunkChoice) -> None:
    maker = EventMaker(kind(**HEAD, choices=[]))
    assert maker.event(choice) == event(kind(**HEAD, choices=[choice]))
