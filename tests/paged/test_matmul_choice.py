"""Which tiling a product gets."""

from __future__ import annotations

import pytest

from paged.matmul import tiling_for


def test_a_tiling_that_was_measured() -> None:
    assert tiling_for(256, 4096, 14336, gated=True) is not None
    assert tiling_for(1, 4096, 4096) is None


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("m", [1, 8, 16, 64, 96, 256, 1000, 8192])
@pytest.mark.parametrize(("k", "n"), [(64, 64), (2560, 9728), (5120, 5120), (2048, 320)])
def test_a_tiling_that_was_not_measured_fits(m: int, k: int, n: int, gated: bool) -> None:
    how = tiling_for(m, k, n, gated=gated, residual=not gated)
    assert how is None or (k % (how.depth * how.splits) == 0 and (not gated or how.splits == 1))


def test_the_estimate_is_asked_where_it_can_know() -> None:
    assert tiling_for(256, 8192, 28672, gated=True) is not None
    assert tiling_for(256, 2560, 9728, gated=True) is not None
    assert tiling_for(32, 5120, 5120) is not None
    assert tiling_for(32, 4096, 4096, device="NVIDIA H100 80GB HBM3") is None
    assert tiling_for(64, 4096, 4096, device="NVIDIA H100 80GB HBM3") is not None
    assert tiling_for(4096, 5120, 5120) is None
    assert tiling_for(256, 4096, 6144, device="NVIDIA H100 80GB HBM3") is None
