"""Shapes that hold every text, and few of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.runtime.pooling.grid import Grid, Shape

sizes = st.tuples(st.integers(1, 70_000), st.integers(1, 1024), st.integers(1, 20_000))


@given(sizes, st.data())
def test_every_text_fits_a_shape(size, data):
    longest, most_rows, most_tokens = size
    grid = Grid.make(*size)
    num_tokens = data.draw(st.integers(1, longest))
    length = grid.length_for(num_tokens)
    assert num_tokens <= length
    assert length % 16 == 0
    rows = grid.most_rows(length)
    assert rows <= most_rows
    assert rows == 1 or rows * length <= most_tokens
    num_texts = data.draw(st.integers(1, rows))
    assert num_texts <= grid.rows_for(length, num_texts)
    assert Shape(grid.rows_for(length, num_texts), length) in grid.all()


@given(sizes)
def test_padding_is_bounded(size):
    """Beyond a few tokens, a text fills half of its row or more."""
    grid = Grid.make(*size)
    for shorter, longer in zip(grid.lengths, grid.lengths[1:], strict=False):
        assert shorter < longer <= 2 * shorter


def test_shapes_are_few_and_the_largest_come_first():
    grid = Grid.make(512, 256, 8192)
    shapes = grid.all()
    assert len(shapes) < 40
    assert shapes[0].rows * shapes[0].length == 8192
    assert shapes[-1] == Shape(1, 16)
    assert len(set(shapes)) == len(shapes)


@pytest.mark.parametrize("longest", [1, 16, 17, 512, 513, 8192, 40960])
def test_the_last_row_is_no_longer_than_it_must(longest):
    assert Grid.make(longest, 8, 64).lengths[-1] == -(-longest // 16) * 16
