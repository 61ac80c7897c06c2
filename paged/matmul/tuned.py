"""What was measured: written by `benchmarks/tune_matmul.py`, for each kind of device.

A product is (gated, K, columns of its output). Its tilings are for up to so many rows; the last is
for more rows too. None is XLA. One whose rows come in groups is (gated, groups, K, columns); its
tilings are written by `benchmarks/expert_kernels.py`. Those of operands of 8 bits, and of
weights alone of 4 or 8 bits, of which a product is (K, columns of the weight), are written by
`benchmarks/tune_narrow.py`.
"""

from __future__ import annotations

from paged.matmul.tiling import Cut, Tiling

Product = tuple[bool, int, int]
UpTo = tuple[int, Tiling | None]
GroupedProduct = tuple[bool, int, int, int]
NarrowProduct = tuple[int, int]

TUNED: dict[str, dict[Product, tuple[UpTo, ...]]] = {
    "NVIDIA H200": {
        (True, 4096, 14336): (
            (7, None),
            (64, Tiling(row_warpgroups=1, widths=(128,), column_warpgroups=2)),
            (128, Tiling(column_cluster=2)),
            (256, Tiling(row_cluster=2)),
            (384, Tiling(column_cluster=2)),
            (512, Tiling(row_cluster=2, widths=(256, 192))),
            (1024, Tiling(row_cluster=2)),
        ),
        (False, 14336, 4096): (
            (8, None),
            (64, Tiling(widths=(64,), row_warpgroups=1, depth=128, splits=2)),
            (128, Tiling(widths=(64,), splits=2)),
            (8192, None),
        ),
        (False, 4096, 6144): (
            (7, None),
            (64, Tiling(widths=(64,), row_warpgroups=1, depth=128)),
            (128, Tiling(widths=(64,), column_cluster=2)),
            (256, Tiling(widths=(128,))),
            (1024, Tiling(widths=(192,), row_cluster=2)),
            (2048, Tiling(row_cluster=2)),
            (8192, Tiling(widths=(192,), row_cluster=2)),
        ),
        (False, 4096, 4096): (
            (32, None),
            (64, Tiling(widths=(64,), row_warpgroups=1, depth=128, splits=2)),
            (128, Tiling(widths=(64,), splits=2)),
            (256, Tiling(widths=(64,), row_cluster=2)),
            (8192, Tiling(row_cluster=2)),
        ),
        (False, 4096, 128256): (
            (128, None),
            (256, Tiling(row_cluster=2)),
            (1024, Tiling(widths=(192,), row_cluster=2)),
        ),
    },
}

GROUPED: dict[str, dict[GroupedProduct, tuple[tuple[int, Tiling], ...]]] = {
    "NVIDIA H200": {},
}

SCALED: dict[str, dict[Product, tuple[tuple[int, Tiling], ...]]] = {
    "NVIDIA H200": {},
}

NARROW_INT4: dict[str, dict[NarrowProduct, tuple[tuple[int, Cut], ...]]] = {
    "NVIDIA H200": {
        (4096, 28672): (
            (32, Cut(warpgroups=4, depth=256)),
            (64, Cut(warpgroups=4)),
            (128, Cut()),
            (256, Cut(depth=64)),
        ),
        (14336, 4096): (
            (1, Cut(splits=8, depth=256, residents=2)),
            (16, Cut(splits=8, residents=2)),
            (32, Cut(warpgroups=4, splits=8, depth=256)),
            (64, Cut(splits=4, depth=256)),
            (128, Cut(splits=4)),
            (256, Cut(splits=4, depth=64)),
        ),
        (4096, 6144): (
            (32, Cut(splits=5, residents=2)),
            (64, Cut(splits=2, depth=256)),
            (128, Cut(splits=2)),
            (256, Cut(splits=2, depth=64)),
        ),
        (4096, 4096): (
            (16, Cut(splits=4, depth=256, residents=2)),
            (64, Cut(splits=4, depth=256)),
            (128, Cut(splits=4)),
            (256, Cut(warpgroups=1, splits=2)),
        ),
    },
}

NARROW_FP8: dict[str, dict[NarrowProduct, tuple[tuple[int, Cut], ...]]] = {
    "NVIDIA H200": {},
}
