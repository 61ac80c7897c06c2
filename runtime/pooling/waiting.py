"""Requests that wait, and the batches that are made of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paged.runtime.pooling.grid import Grid, Shape
from paged.runtime.pooling.reader import Tokens
from paged.runtime.pooling.vectors import Vectors

Advance = Callable[[int], object]
"""Told how many more texts of a request are done."""


@dataclass(eq=False)
class Request[T]:
    """Texts that are answered together, by a T.

    Attributes:
        finish: makes the answer of the vectors [n, N] of the texts, in their order.
        future: of the answer. Whoever cancels it ends the request.
        vectors: [N] of each text that is done, by its place.
    """

    texts: Sequence[Tokens]
    finish: Callable[[Vectors], T]
    advance: Advance
    future: Future[T] = field(default_factory=Future)
    vectors: dict[int, Vectors] = field(default_factory=dict)

    def deliver(self, place: int, vector: Vectors) -> None:
        """Take the vector of a text; the last one makes the answer."""
        if self.future.done():
            return
        self.vectors[place] = vector
        try:
            self.advance(1)
        except Exception as error:  # such as that nobody reads the progress any more
            self.fail(error)
            return
        if len(self.vectors) < len(self.texts) or not self.future.set_running_or_notify_cancel():
            return
        try:
            ordered = [self.vectors[place] for place in range(len(self.texts))]
            self.future.set_result(self.finish(np.stack(ordered)))
        except Exception as error:  # of this request alone
            self.future.set_exception(error)

    def fail(self, error: Exception) -> None:
        """End a request that has no answer yet."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Text(NamedTuple):
    """A text of a request, at `place` there; `number` counts texts as they come."""

    request: Request[Any]
    place: int
    number: int

    @property
    def tokens(self) -> Tokens:
        return self.request.texts[self.place]


class Batch(NamedTuple):
    """Texts that are computed together, no more than the shape has rows."""

    shape: Shape
    texts: list[Text]


class Waiting:
    """Texts by the length of the row they need, the oldest first.

    Attributes:
        num_tokens: of all of them.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.num_tokens = 0
        self._queues: dict[int, deque[Text]] = {length: deque() for length in grid.lengths}
        self._num_added = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, request: Request[Any]) -> None:
        for place, tokens in enumerate(request.texts):
            queue = self._queues[self.grid.length_for(len(tokens.token_ids))]
            queue.append(Text(request, place, self._num_added))
            self._num_added += 1
            self.num_tokens += len(tokens.token_ids)

    def take(self) -> Batch | None:
        """The next batch: the oldest text with others of its length.

        Rows that would stay empty take shorter texts, the longest of them first.
        """
        self._drop_ended()
        heads = [(queue[0].number, length) for length, queue in self._queues.items() if queue]
        if not heads:
            return None
        length = min(heads)[1]
        texts = self._pop(length, self.grid.most_rows(length))
        rows = self.grid.rows_for(length, len(texts))
        for shorter in reversed([each for each in self._queues if each < length]):
            texts += self._pop(shorter, rows - len(texts))
        return Batch(Shape(rows, length), texts)

    def _drop_ended(self) -> None:
        """Of the heads alone: what stands behind them is looked at when it is taken."""
        for queue in self._queues.values():
            while queue and queue[0].request.future.done():
                self._next(queue)

    def _pop(self, length: int, most: int) -> list[Text]:
        """Up to `most` texts of a queue that are still wanted."""
        queue = self._queues[length]
        texts: list[Text] = []
        while queue and len(texts) < most:
            text = self._next(queue)
            if not text.request.future.done():
                texts.append(text)
        return texts

    def _next(self, queue: deque[Text]) -> Text:
        text = queue.popleft()
        self.num_tokens -= len(text.tokens.token_ids)
        return text
