"""The tilings worth a try. The first is the rule's own, and the likeliest come before others.

They are near what is fast on some GPU, and few: to make a kernel takes a second, and Python's one
thread most of it. One for which a GPU lacks memory or registers does not compile there, and is
passed over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paged.attention.mosaic.decode import buffer_bytes, num_buffers, widened_bytes
from paged.attention.tiling import (
    DecodeTiling,
    Heads,
    MosaicDecode,
    MosaicPrefill,
    PrefillTiling,
    TritonDecode,
    TritonPrefill,
)

# Besides the rule's: programs of a multiprocessor, and bytes of the ring of each, are together what
# is on its way. Of its 227 KiB of shared memory something is left for queries and output.
_OTHER_RINGS = (MosaicDecode(1, 131072), MosaicDecode(2, 98304), MosaicDecode(3, 65536))
_ROOM_FOR_RINGS = 208 * 1024
# Where Mosaic's kernels run, Triton's may still be faster to decode: the likeliest are tried.
_OF_TRITON_ON_HOPPER = 1


def decode_candidates(heads: Heads, *, mosaic: bool) -> list[DecodeTiling]:
    """`mosaic` says whether its kernels are there, and take such heads."""
    triton = _triton_decode(heads)
    return [*_mosaic_decode(heads), *triton[:_OF_TRITON_ON_HOPPER]] if mosaic else triton


def prefill_candidates(heads: Heads, *, mosaic: bool) -> list[PrefillTiling]:
    """Likewise. On Hopper Triton's kernel takes twice as long as Mosaic's."""
    return _mosaic_prefill(heads) if mosaic else _triton_prefill(heads)


def _mosaic_decode(heads: Heads) -> list[DecodeTiling]:
    """One of each number of buffers, where the programs of a multiprocessor fit into it."""
    default = MosaicDecode.default(heads)
    if heads.latent_rank is not None:  # of whose spans two fit, and no more
        return [default]
    found: dict[tuple[int, int], DecodeTiling] = {}
    for tiling in (default, *_OTHER_RINGS):
        buffers = num_buffers(heads, tiling.ring)
        each = buffers * buffer_bytes(heads) + widened_bytes(heads)
        if tiling.residents * each <= _ROOM_FOR_RINGS:
            found.setdefault((tiling.residents, buffers), tiling)
    return list(found.values())


def _mosaic_prefill(heads: Heads) -> list[PrefillTiling]:
    default = MosaicPrefill.default(heads)
    cut = [replace(default, span=64, stages=stages) for stages in (2, 3)]
    return _distinct([default, replace(default, programs=1), *cut])


def _triton_decode(heads: Heads) -> list[DecodeTiling]:
    default = TritonDecode.default(heads)
    span, warps = default.span, default.warps
    return _distinct(
        [
            default,
            replace(default, programs=1024),
            replace(default, stages=2),
            replace(default, span=span // 2, stages=4),
            replace(default, span=2 * span, warps=2 * warps),
        ]
    )


def _triton_prefill(heads: Heads) -> list[PrefillTiling]:
    default = TritonPrefill.default(heads)
    span, queries = default.span, max(default.queries // 2, 16)
    return _distinct(
        [
            default,
            replace(default, stages=2),
            replace(default, queries=queries, warps=4),
            replace(default, queries=queries, warps=4, span=2 * span, stages=2),
            replace(default, warps=4),
        ]
    )


def _distinct[T](tilings: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(tilings))
