"""Which tiling a product gets."""

from __future__ import annotations

import functools

import pytest

from paged.matmul import Tiling, choice
from paged.matmul.tuned import TUNED

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
tiling_for = functools.partial(choice.tiling_for, device_kind=H200)


def test_a_tiling_that_was_measured() -> None:
    assert tiling_for(256, 4096, 14336, gated=True) is not None
    assert tiling_for(1, 4096, 4096) is None


def test_each_kind_of_device_has_its_own_and_else_an_h200s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Tiling(widths=(192,))
    monkeypatch.setitem(TUNED, H100, {(False, 4096, 4096): ((8, None), (64, own))})
    for m, expected in ((8, None), (9, own), (1000, own)):
        assert tiling_for(m, 4096, 4096, device_kind=H100) == expected
    for m in (1, 64, 256, 9000):
        expected = tiling_for(m, 4096, 6144)
        assert tiling_for(m, 4096, 6144, device_kind=H100) == expected


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
    assert tiling_for(4096, 5120, 5120) is None
    # A weight of 33 MB is left to XLA for fewer rows than one of 52 MB.
    assert tiling_for(32, 4096, 4032) is None
    assert tiling_for(64, 4096, 4032) is not None
