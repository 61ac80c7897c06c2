"""What of a sequence's tokens the prefix cache holds, in every group of layers.

A layer that sees all needs all pages from the first. One with a window needs those alone that the
first token to be computed still sees, and does not mind that older ones were evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from paged.groups import Windows, entries_behind
from paged.pool import NULL_PAGE, PagePool

Find = Callable[[bytes, int], int | None]
"""The page of a group that holds the content of a hash."""


def find_prefix(
    pool: PagePool, hashes: Sequence[bytes], windows: Windows, *, on_host: bool = False
) -> list[list[int]]:
    """Pages of the longest prefix of a hash chain that all groups can go on from.

    Takes no references. Each group's list has the same length; the null page stands where a window
    needs none.

    Args:
        on_host: whether host pages will do (see `PagePool.find`).
    """
    match, find = partial(pool.match, on_host=on_host), partial(pool.find, on_host=on_host)
    return find_tables(find, match, pool.page_size, hashes, windows)


def find_tables(
    find: Find,
    match: Callable[[Sequence[bytes], int], list[int]],
    page_size: int,
    hashes: Sequence[bytes],
    windows: Windows,
) -> list[list[int]]:
    """As `find_prefix`, where `find` and `match` find whatever they do."""
    whole = [match(hashes, group) for group, window in enumerate(windows) if window is None]
    if len(whole) == len(windows) == 1:
        return whole
    known = hashes[: min(map(len, whole), default=len(hashes))]
    count = _until_windows_agree(find, page_size, known, windows)
    tables = []
    for group, window in enumerate(windows):
        behind = entries_behind(window, count * page_size, page_size)
        tables.append([NULL_PAGE] * behind + match(hashes[behind:count], group))
    return tables


def _until_windows_agree(
    find: Find,
    page_size: int,
    hashes: Sequence[bytes],
    windows: Windows,
) -> int:
    """The longest prefix, in pages, at whose end every window finds its pages.

    A page that one group lacks ends the prefix before it for all, which moves all windows back.
    Each group goes back from there over pages it has not looked up yet: none is looked up twice.
    """
    count = len(hashes)
    moving = {group: window for group, window in enumerate(windows) if window is not None}
    known_from = dict.fromkeys(moving, count)  # up to `count` a group has all pages from here on
    tried = None
    while count != tried:
        tried = count
        for group, window in moving.items():
            first = entries_behind(window, count * page_size, page_size)
            entry = min(known_from[group], count)
            while entry > first and find(hashes[entry - 1], group) is not None:
                entry -= 1
            if entry > first:
                count = entry - 1
                entry = count
            known_from[group] = entry
    return count
