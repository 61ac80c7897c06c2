"""Batches of what waits: everything once, the oldest first, no place left empty in vain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paged.runtime.pooling.grid import Grid
from paged.runtime.pooling.reader import Tokens
from paged.runtime.pooling.vectors import Vectors
from paged.runtime.pooling.waiting import Batch, Request, Waiting

GRID = Grid.make(64, 6, 128)


def request(*lengths: int) -> Request[Vectors]:
    texts = [Tokens([1] * length, [0] * length) for length in lengths]
    return Request(texts, lambda vectors: vectors, lambda number: None)


def lengths_of(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [len(text.tokens.token_ids) for text in batch.texts]


def test_the_oldest_brings_its_like_along():
    waiting = Waiting(GRID)
    for each in (request(30), request(3), request(20, 31)):
        waiting.add(each)
    first, second = waiting.take(), waiting.take()
    assert lengths_of(first) == [30, 20, 31, 3], "and a shorter one, for a row would be empty"
    assert second is None
    assert first is not None
    assert first.shape == (4, 32)


def test_shorter_texts_do_not_make_a_batch_larger():
    waiting = Waiting(GRID)
    waiting.add(request(30, 3, 3))
    assert lengths_of(waiting.take()) == [30]
    assert lengths_of(waiting.take()) == [3, 3]


def test_what_was_cancelled_is_left_out():
    waiting = Waiting(GRID)
    gone, wanted = request(5, 40, 40), request(40, 5)
    for each in (gone, wanted):
        waiting.add(each)
    gone.future.cancel()
    batches = [waiting.take(), waiting.take(), waiting.take()]
    assert [text.request for batch in batches if batch for text in batch.texts] == [wanted] * 2
    assert len(waiting) == 0


@given(st.lists(st.lists(st.integers(1, 64), min_size=1, max_size=9), max_size=9))
def test_all_texts_are_taken_once_and_the_oldest_always_first(requests):
    waiting = Waiting(GRID)
    for lengths in requests:
        waiting.add(request(*lengths))
    left = set(range(sum(map(len, requests))))
    assert len(waiting) == len(left)
    while (batch := waiting.take()) is not None:
        numbers = [text.number for text in batch.texts]
        assert numbers[0] == min(left)
        assert len(numbers) == len(set(numbers)) <= batch.shape.rows
        assert max(lengths_of(batch)) <= batch.shape.length
        assert batch.shape in GRID.all()
        left -= set(numbers)
    assert not left
