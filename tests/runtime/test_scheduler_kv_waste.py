"""The numbers that `benchmarks/kv_waste.py` prints, on smaller runs."""

from typing import Any

import pytest

from benchmarks.kv_waste import chat_sequences, expected_hits, shared_prefix_sequences, simulate
from paged.pool import PagePool
from paged.runtime.scheduler import Scheduler, SchedulerConfig


def make_scheduler(num_pages: int, page_size: int = 16, **changes: Any) -> Scheduler:
    config = SchedulerConfig(64, 2048, 2048, **changes)
    return Scheduler(config, PagePool(num_pages + 1, page_size))


def test_less_than_four_percent_of_the_kv_memory_is_wasted() -> None:
    report = simulate(make_scheduler(num_pages=5000), chat_sequences(300))
    assert 0.005 < report.waste < 0.04
    assert (report.num_preemptions, report.recomputed) == (0, 0.0)


@pytest.mark.parametrize("prefix_length", [480, 495, 496])
def test_the_prefix_cache_finds_exactly_what_is_common(prefix_length: int) -> None:
    sequences = shared_prefix_sequences(100, prefix_length, suffix_length=40)
    report = simulate(make_scheduler(num_pages=5000), sequences)
    assert report.prefix_queries == 100 * (prefix_length + 40)
    assert report.prefix_hits == expected_hits(100, prefix_length, page_size=16)
    assert report.prefix_hits == 99 * {480: 480, 495: 480, 496: 496}[prefix_length]
    assert report.recomputed == 0.0


def test_room_to_grow_spares_most_recomputation_in_a_tight_pool() -> None:
    """The claim behind `SchedulerConfig.growth_steps`."""
    tight = {steps: make_scheduler(1000, growth_steps=steps) for steps in (0, 8)}
    reports = {steps: simulate(tight[steps], chat_sequences(300)) for steps in tight}
    assert reports[8].recomputed < reports[0].recomputed / 2
    assert reports[8].num_steps < reports[0].num_steps * 1.05
