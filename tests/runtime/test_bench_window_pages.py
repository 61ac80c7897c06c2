"""The numbers that `benchmarks/window_pages.py` prints, on smaller runs."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.window_pages import measure

ARGS = Namespace(
    length=1024, outputs=32, sequences=40, room=4, page_size=16, max_num_batched_tokens=256
)


@pytest.mark.parametrize(
    ("windows", "num_groups", "most_share", "least"),
    [
        ((None,) * 4, 1, 1.0, 4),
        ((64,) * 4, 1, 6 / 64, 10),
        ((64, None) * 2, 2, (1 + 6 / 64) / 2, 6),
        ((64, 64, 64, None), 4, (1 + 3 * 6 / 64) / 4, 8),
    ],
)
def test_windows_leave_room_for_more(
    windows: tuple[int | None, ...], num_groups: int, most_share: float, least: int
) -> None:
    """A window of 64 takes 4 pages of 16 and parts of two; while a prompt comes, its chunk too."""
    use = measure(windows, ARGS)
    assert use.num_groups == num_groups
    assert most_share - 2 / 64 <= use.share <= most_share
    assert use.most >= least
