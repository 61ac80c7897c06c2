"""Where the memory goes, and what to do when it does not suffice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paged.runtime.errors import ConfigError
from paged.runtime.memory import (
    MemoryPlan,
    available_memory,
    check_host_memory,
    fit_model_len,
    host_pages,
    page_memory,
)

GIB = 2**30
ON_CPU = MemoryPlan(
    budget=None,
    weights=2 * GIB,
    state=3 * 2**20,
    steps=0,
    bytes_per_page=2**20,
    page_size=16,
    num_pages=64,
    max_model_len=1008,
    pages_per_sequence=63,
)


def fit(
    wanted: int | None, num_pages: int, model_len: int = 4096, *, from_share: bool = True
) -> int:
    return fit_model_len(
        wanted,
        model_len,
        num_pages=num_pages,
        pages_of=lambda length: -(-length // 16),
        kv_bytes=num_pages * 2**20,
        bytes_per_page=2**20,
        from_share=from_share,
    )


def test_what_is_left_becomes_pages() -> None:
    assert page_memory(10 * GIB, weights=4 * GIB, state=GIB, steps=2 * GIB) == 3 * GIB


def test_nothing_left_names_each_part_and_the_flags() -> None:
    with pytest.raises(ConfigError, match=r"weights 4\.00 GiB.*by 1\.00 GiB.*--max-num-seqs"):
        page_memory(6 * GIB, weights=4 * GIB, state=GIB, steps=2 * GIB)


def test_the_null_page_holds_no_tokens() -> None:
    assert fit(None, num_pages=257) == 4096
    with pytest.raises(ConfigError, match=r"\(4096\).*\(4080\).*--max-model-len 4080"):
        fit(None, num_pages=256)


def test_the_advice_of_the_error_works() -> None:
    assert fit(4080, num_pages=256) == 4080
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes 257M"):
        fit(None, num_pages=256)


def test_minus_one_is_the_longest_that_fits() -> None:
    assert fit(-1, num_pages=11) == 160
    assert fit(-1, num_pages=10_000) == 4096


@pytest.mark.parametrize("num_pages", [0, 1])
def test_no_page_at_all(num_pages: int) -> None:
    with pytest.raises(ConfigError, match=r"KV cache.*Give more.*-memory-bytes 2M") as caught:
        fit(-1, num_pages=num_pages)
    assert "--max-model-len" not in str(caught.value)


def test_the_share_of_a_gpu_is_advised_only_where_it_counts() -> None:
    for from_share in (True, False):
        with pytest.raises(ConfigError) as caught:
            fit(None, num_pages=256, from_share=from_share)
        assert ("--gpu-memory-utilization" in str(caught.value)) == from_share


def test_what_a_machine_cannot_hold_is_refused() -> None:
    check_host_memory(ON_CPU, 3 * GIB)
    check_host_memory(ON_CPU, None)
    with pytest.raises(ConfigError, match=r"3\.00 GiB.*weights 2\.00 GiB.*KV pages 4\.00 GiB"):
        check_host_memory(replace(ON_CPU, num_pages=4096), 3 * GIB)


@pytest.mark.parametrize(
    ("content", "available"),
    [
        ("MemTotal: 9 kB\nMemAvailable:   3 kB\nSwapFree:  2 kB\nHugePages_Total:   0\n", 5120),
        ("MemAvailable: 3 kB\n", 3072),
        ("MemTotal: 9 kB\n", None),
        (None, None),
    ],
)
def test_what_a_machine_has_left(
    tmp_path: Path, content: str | None, available: int | None
) -> None:
    path = tmp_path / "meminfo"
    if content is not None:
        path.write_text(content)
    assert available_memory(path) == available


def test_swap_is_not_counted_where_memory_is_pinned(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemAvailable: 3 kB\nSwapFree: 2 kB\n")
    assert available_memory(path, swap=False) == 3072


def test_host_pages_fill_what_is_wanted() -> None:
    assert host_pages(10 * GIB - 1, GIB, available=10 * GIB) == 9
    assert host_pages(0, GIB, available=0) == 0
    assert host_pages(GIB, GIB, available=None) == 1
    message = r"is 10\.00 GiB, and this machine has 9\.50 GiB of memory left. Use at most 9\.50"
    with pytest.raises(ConfigError, match=message):
        host_pages(10 * GIB, GIB, available=19 * GIB // 2)
    with pytest.raises(ConfigError, match=r"is 512\.0 MiB, and one KV page takes 1\.00 GiB"):
        host_pages(GIB // 2, GIB, available=None)


def test_host_pages_are_reported_and_counted() -> None:
    plan = replace(ON_CPU, num_host_pages=126, transit=GIB)
    lines = plan.report().splitlines()
    assert "  host transfers 1.00 GiB" in lines
    assert lines[-1] == "Host KV cache size: 2,016 tokens (126.0 MiB)"
    needed = plan.weights + plan.state + (64 + 126) * 2**20
    check_host_memory(plan, needed)
    with pytest.raises(ConfigError, match="--kv-offloading-size"):
        check_host_memory(plan, needed - 1)


def test_the_report_says_how_much_fits() -> None:
    plan = MemoryPlan(
        budget=100 * GIB,
        weights=15 * GIB,
        state=GIB,
        steps=2 * GIB,
        bytes_per_page=2 * 2**20,
        page_size=16,
        num_pages=40_001,
        max_model_len=8192,
        pages_per_sequence=512,
    )
    assert plan.num_tokens == 640_000
    assert "GPU KV cache size: 640,000 tokens" in plan.report()
    assert "Maximum concurrency for 8,192 tokens per request: 78.12x" in plan.report()
    assert "  budget         100.00 GiB\n  weights        15.00 GiB\n" in plan.report()


def test_the_report_is_silent_on_what_is_not_known() -> None:
    assert ON_CPU.report().splitlines() == [
        "Memory:",
        "  weights        2.00 GiB",
        "  slot state     3.0 MiB",
        "  KV pages       64.0 MiB  (64 of 16 tokens)",
        "KV cache size: 1,008 tokens",
        "Maximum concurrency for 1,008 tokens per request: 1.00x",
    ]
