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


def test_more_than_the_model_was_made_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="5000 is greater than the model's own length of 4096"):
        fit(5000, num_pages=10_000)


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
