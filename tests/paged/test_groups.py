"""Layers in groups, and how many pages sequences hold in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.groups import (
    LayerGroup,
    entries_behind,
    group_layers,
    most_entries,
    most_pages,
)

WINDOW, LONG = 1024, 8192
MODELS = {
    # Whole layers, layers with a window, groups of each, layers of a group.
    "Llama": (32, 0, 1, 0, 32),
    "Mistral 7B v0.1": (0, 32, 0, 1, 32),
    "Gemma 2 9B": (21, 21, 1, 1, 21),
    "gpt-oss 20B": (12, 12, 1, 1, 12),
    "Cohere 2 7B": (8, 24, 1, 3, 8),
    "Gemma 3 1B": (4, 22, 1, 6, 4),
    "Gemma 3 12B": (8, 40, 1, 5, 8),
    "Gemma 3 27B": (10, 52, 1, 5, 11),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_few_groups(name: str) -> None:
    num_whole, num_windowed, whole, windowed, size = MODELS[name]
    groups = group_layers([None] * num_whole + [WINDOW] * num_windowed, LONG)
    windows = [group.window for group in groups]
    assert windows == [None] * whole + [WINDOW] * windowed
    assert max(len(group.layers) for group in groups) == size


def test_layers_keep_their_order() -> None:
    groups = group_layers([8, 8, None] * 2, max_len=100)
    assert groups == (
        LayerGroup(None, (2, 5)),
        LayerGroup(8, (0, 1)),
        LayerGroup(8, (3, 4)),
    )


def test_windows_that_never_move_are_none() -> None:
    assert group_layers([8, None, 9], max_len=8) == (LayerGroup(None, (0, 1, 2)),)
    assert group_layers([8, 9], max_len=9) == (LayerGroup(None, (1,)), LayerGroup(8, (0,)))


@given(st.lists(st.sampled_from([None, 3, 50]), min_size=1, max_size=70), st.integers(1, 60))
def test_every_layer_has_one_place(windows: list[int | None], max_len: int) -> None:
    groups = group_layers(windows, max_len)
    places = [(layer, group.window) for group in groups for layer in group.layers]
    expected = [None if window is None or window >= max_len else window for window in windows]
    assert sorted(places) == list(enumerate(expected))
    size = max(len(group.layers) for group in groups)
    for kind in set(expected):
        room = size * sum(group.window == kind for group in groups)
        assert room <= 7 / 6 * expected.count(kind)


@pytest.mark.parametrize(
    ("window", "position", "behind"),
    [(None, 1000, 0), (8, 7, 0), (8, 10, 0), (8, 11, 1), (8, 15, 2), (1, 3, 0), (1, 4, 1)],
)
def test_entries_behind_hold_nothing_that_is_seen(
    window: int | None, position: int, behind: int
) -> None:
    """With pages of 4: a window of 8 sees positions 4 to 11 at 11."""
    assert entries_behind(window, position, page_size=4) == behind


@given(
    window=st.integers(1, 40),
    page_size=st.integers(1, 9),
    chunks=st.lists(st.integers(1, 30), min_size=1, max_size=12),
)
def test_no_sequence_uses_more_entries(window: int, page_size: int, chunks: list[int]) -> None:
    """A table that is looked after before each chunk, as `paged.runtime.page_tables` does."""
    length, start = sum(chunks), 0
    for chunk in chunks:
        behind = entries_behind(window, start - 1, page_size)
        start += chunk
        used = -(-start // page_size) - behind
        assert used <= most_entries(window, length, max(chunks), page_size)


def test_pages_are_counted_in_all_groups() -> None:
    """1000 tokens in pages of 16, and a window of 64 beside a chunk of 32."""
    assert most_pages((None,), 1000, 32, 16) == 63
    assert most_pages((64,), 1000, 32, 16) == 7
    assert most_pages((None, 64, 64), 1000, 32, 16) == 63 + 2 * 7
    assert most_pages((None, 64), 30, 30, 16) == 2 + 2
