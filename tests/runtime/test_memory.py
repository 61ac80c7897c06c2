"""Where the memory goes, and what to do when it does not suffice."""

from __future__ import annotations

import pytest

from paged.runtime.errors import ConfigError
from paged.runtime.memory import MemoryPlan, fit_model_len, page_memory

GIB = 2**30


def fit(wanted: int | None, num_pages: int, model_len: int = 4096) -> int:
    return fit_model_len(
        wanted,
        model_len,
        num_pages=num_pages,
        pages_of=lambda length: -(-length // 16),
        kv_bytes=num_pages * 2**20,
        bytes_per_page=2**20,
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
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes 257m"):
        fit(None, num_pages=256)


def test_minus_one_is_the_longest_that_fits() -> None:
    assert fit(-1, num_pages=11) == 160
    assert fit(-1, num_pages=10_000) == 4096


def test_more_than_the_model_was_made_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="5000 is greater than the model's own length of 4096"):
        fit(5000, num_pages=10_000)


@pytest.mark.parametrize("num_pages", [0, 1])
def test_no_page_at_all(num_pages: int) -> None:
    with pytest.raises(ConfigError, match="KV cache"):
        fit(-1, num_pages=num_pages)


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
    plan = MemoryPlan(
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
    assert plan.report().splitlines() == [
        "Memory:",
        "  weights        2.00 GiB",
        "  slot state     3.0 MiB",
        "  KV pages       64.0 MiB  (64 of 16 tokens)",
        "KV cache size: 1,008 tokens",
        "Maximum concurrency for 1,008 tokens per request: 1.00x",
    ]
