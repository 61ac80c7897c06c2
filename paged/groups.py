"""Groups of layers that keep the same tokens, and so share page tables.

A layer with a window never looks further back than that, so its old pages can go; a layer without
one keeps all. A model that has both (Gemma, gpt-oss) might have a pool for each kind, and memory
divided between the two: but how much each needs follows from how long sequences are, and nobody
knows that beforehand. So all groups have the same number of layers, as far as may be, and take
equal pages of one pool: a page holds `page_size` tokens for the layers of whichever group took it.
The cache has as many arrays as a group has layers, and the n-th layers of all groups share the n-th
array. They do not meet there, for a page is in the tables of one group alone.

Kinds of layers rarely have equal numbers of layers, so a kind is cut into several groups, of which
the last may be smaller: its pages lie empty in some arrays. Few groups are little work for the
host, small ones leave little empty. As many layers to a group as leave a sixth of a kind's memory
empty at most make 2 groups of Gemma 2 or gpt-oss, 4 of Cohere 2, and 6 or 7 of Gemma 3.

A model whose layers are all alike is one group. So is one whose windows no sequence outgrows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_EMPTY = 1 / 6

Windows = tuple[int | None, ...]
"""How many positions a token sees (itself included) in the layers of each group; None sees all."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share page tables.

    Attributes:
        window: see `Windows`.
        layers: their indices in the model; that of index n is in the cache's n-th array.
    """

    window: int | None
    layers: tuple[int, ...]


def group_layers(windows: Sequence[int | None], max_len: int) -> tuple[LayerGroup, ...]:
    """The groups of a model, those without a window first.

    Args:
        windows: of each layer.
        max_len: tokens of the longest sequence; a window of as many never moves.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        never_moves = window is None or window >= max_len
        kinds.setdefault(None if never_moves else window, []).append(layer)
    size = _group_size([len(layers) for layers in kinds.values()])
    return tuple(
        LayerGroup(window, tuple(layers[start : start + size]))
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for start in range(0, len(layers), size)
    )


def _group_size(counts: list[int]) -> int:
    """Layers of a group, for kinds of so many: what makes fewest groups, then fewest empty."""

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    def is_tight(size: int) -> bool:
        return all(-(-count // size) * size <= (1 + _MOST_EMPTY) * count for count in counts)

    return min(
        filter(is_tight, range(1, max(counts) + 1)), key=lambda size: (num_groups(size), size)
    )


def entries_behind(window: int | None, position: int, page_size: int) -> int:
    """How many entries of a page table, from the first, a token at `position` sees nothing of."""
    return 0 if window is None else max(position - window + 1, 0) // page_size


def most_entries(window: int | None, num_tokens: int, chunk: int, page_size: int) -> int:
    """Entries of a page table in use at once by a sequence that grows to `num_tokens`.

    Args:
        chunk: tokens it computes in a step at most. They are all in pages, beside the window before
            the first of them.
    """
    entries = -(-num_tokens // page_size)
    if window is None:
        return entries
    return min(entries, -(-(window + chunk - 1) // page_size) + 1)


def most_pages(windows: Windows, num_tokens: int, chunk: int, page_size: int) -> int:
    """Pages of all groups that a sequence holds at once, see `most_entries`."""
    return sum(most_entries(window, num_tokens, chunk, page_size) for window in windows)
